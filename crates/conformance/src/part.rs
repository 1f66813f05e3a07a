//! A small device on a part of a large one, so that tests on a real GPU do not need all of it.
//!
//! The part keeps a list of its allocations, which a real device does not provide, and refuses allocations
//! beyond its size. Streams may be plain numbers; each is mapped to a stream of the inner device. The part
//! has its own default memory pool, so that parts of one device do not affect each other. Captures are not
//! supported. Dropping the part frees everything that is still allocated.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use parking_lot::{Mutex, MutexGuard};

use super::machine::Real;
use stratalloc::driver::call::Call;
use stratalloc::driver::{
    DeviceInfo, Driver, DriverPoolId, DriverPoolUsage, DriverResult, Exportable, HoldsWork,
    HostMemory, Intercepted, Interceptor, MemoryInfo, MemoryPools, Parts, PhysicalId, PinnedId,
    VirtualMemory, lacking,
};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::{EventId, StreamId};
use stratalloc_sim::HeldResources;

/// A physical allocation: its size, its references and its mappings.
#[derive(Clone, Copy, Debug)]
struct Piece {
    bytes: u64,
    holds: u32,
    mappings: u32,
}

/// The size of a mapping, and its physical allocation.
type Mapping = (u64, PhysicalId);

/// Sizes in bytes, by address. Events and pools are listed by handle, with size 0.
type List = BTreeMap<u64, u64>;

#[derive(Debug, Default)]
struct Book {
    segments: List,
    reservations: List,
    mapped: BTreeMap<u64, Mapping>,
    pieces: HashMap<PhysicalId, Piece>,
    events: List,
    /// Pinned memory, by the numbers of the slabs.
    pinned: List,
    /// Page-locked host memory, by address.
    host: List,
    /// Streams of the inner device, by the part's stream numbers.
    streams: HashMap<StreamId, StreamId>,
    /// Pools of the inner device that this part created, including its default one.
    pools: List,
    default_pool: Option<DriverPoolId>,
    /// Allocations from these pools.
    pool_ranges: List,
}

impl Book {
    /// Returns the bytes allocated outside pools.
    fn used_bytes(&self) -> u64 {
        let pieces = self.pieces.values().map(|piece| piece.bytes);
        self.segments.values().copied().chain(pieces).sum()
    }

    /// Adds a reference to a physical allocation.
    fn hold(&mut self, piece: PhysicalId, bytes: u64) {
        let fresh = Piece { bytes, holds: 0, mappings: 0 };
        self.pieces.entry(piece).or_insert(fresh).holds += 1;
    }

    fn change(&mut self, piece: PhysicalId, change: impl FnOnce(&mut Piece)) {
        let Some(own) = self.pieces.get_mut(&piece) else { return };
        change(own);
        if own.holds == 0 && own.mappings == 0 {
            self.pieces.remove(&piece);
        }
    }

    /// Removes and returns the mappings that start in a range.
    ///
    /// # Errors
    ///
    /// The address of the first of them that extends past the end of the range. Nothing is removed then.
    fn remove_mappings(
        &mut self,
        address: u64,
        size_bytes: u64,
    ) -> Result<Vec<(u64, Mapping)>, u64> {
        let end = address.saturating_add(size_bytes);
        let inside: Vec<_> = self.mapped.range(address..end).map(|(at, own)| (*at, *own)).collect();
        if let Some((at, _)) = inside.iter().find(|(at, (bytes, _))| at + bytes > end) {
            return Err(*at);
        }
        for (at, _) in &inside {
            self.mapped.remove(at);
        }
        Ok(inside)
    }
}

/// A device of limited size on top of another one, whose driver is `D`.
pub type Part<D> = Intercepted<D, Share<D>>;

/// The state of a [`Part`]: its size, and its allocations.
#[derive(Debug)]
pub struct Share<D: Driver> {
    device: D,
    total_bytes: u64,
    book: Mutex<Book>,
}

fn foreign(call: &'static str, address: u64) -> DriverError {
    let message = format!("{address:#x} was not allocated from this part, or not with this size");
    DriverError::new(DriverErrorKind::InvalidValue, call, 1, message)
}

impl<D: Driver> Share<D> {
    /// Creates a part of `device`, with `total_bytes` of memory.
    #[must_use]
    pub fn of(device: D, total_bytes: u64) -> Part<D>
    where
        D: Clone,
    {
        Part::with(device.clone(), Self { device, total_bytes, book: Mutex::default() })
    }

    /// Returns the resources allocated from this part of the device.
    #[must_use]
    pub fn held(&self) -> HeldResources {
        let book = self.book();
        let pairs = |list: &List| list.iter().map(|(at, bytes)| (*at, *bytes)).collect();
        HeldResources {
            segments: pairs(&book.segments),
            reservations: pairs(&book.reservations),
            mapped: book.mapped.iter().map(|(at, (bytes, _))| (*at, *bytes)).collect(),
            pieces: book.pieces.len() as u64,
            pool_ranges: book.pool_ranges.len() as u64,
            events: book.events.len() as u64,
            pinned_bytes: book.pinned.values().chain(book.host.values()).sum(),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock()
    }

    /// Returns the bytes allocated from the inner device, including unused memory of pools. Holds the
    /// lock so that no pool is destroyed during the call.
    fn used_bytes(&self) -> DriverResult<u64> {
        let book = self.book();
        let usage = |pool: &u64| self.pools().usage(DriverPoolId(*pool));
        let reserved = |pool| usage(pool).map(|usage| usage.reserved_bytes);
        let pooled: u64 = book.pools.keys().map(reserved).sum::<DriverResult<_>>()?;
        Ok(book.used_bytes() + pooled)
    }

    /// Returns an error for an allocation beyond the part's size. Concurrent allocations may together exceed
    /// it.
    fn admit(&self, call: &'static str, bytes: u64, used_bytes: u64) -> DriverResult<()> {
        if used_bytes.checked_add(bytes).is_some_and(|sum| sum <= self.total_bytes) {
            return Ok(());
        }
        let message = format!("{bytes} bytes beside {used_bytes} of {}", self.total_bytes);
        Err(DriverError::new(DriverErrorKind::OutOfMemory, call, 2, message))
    }

    fn memory(&self) -> &dyn VirtualMemory {
        self.device.virtual_memory().expect("announced only when the device has it")
    }

    fn host(&self) -> &dyn HostMemory {
        self.device.host_memory().expect("announced only when the device has it")
    }

    fn pools(&self) -> &dyn MemoryPools {
        self.device.memory_pools().expect("announced only when the device has them")
    }

    /// Removes an entry, then runs `work`, which frees the resource; restores the entry if `work` fails.
    /// The entry is removed first because another thread may get the same address as soon as the device
    /// has freed it.
    fn remove(
        &self,
        call: &'static str,
        list: fn(&mut Book) -> &mut List,
        (address, size_bytes): (u64, Option<u64>),
        work: impl FnOnce() -> DriverResult<()>,
    ) -> DriverResult<()> {
        let mut book = self.book();
        let known = list(&mut book).get(&address).copied();
        let fits = |bytes: &u64| size_bytes.is_none_or(|size| size == *bytes);
        let bytes = known.filter(fits).ok_or_else(|| foreign(call, address))?;
        list(&mut book).remove(&address);
        drop(book);
        work().inspect_err(|_| {
            list(&mut self.book()).insert(address, bytes);
        })
    }

    /// Frees everything still allocated, so that an allocator that leaks takes no memory from later tests.
    /// Waits for the device if memory is allocated. The part must not be used afterwards.
    fn free_all(&self) {
        let book = std::mem::take(&mut *self.book());
        let inner = &self.device;
        // Errors are ignored: the device keeps its memory then, and there is no caller to report to.
        let out = (book.segments.len(), book.mapped.len(), book.pool_ranges.len());
        if out != (0, 0, 0) {
            let _ = inner.synchronize_device();
        }
        book.segments.iter().for_each(|(at, bytes)| drop(inner.free(*at, *bytes)));
        if let Some(memory) = inner.virtual_memory() {
            book.mapped.iter().for_each(|(at, (bytes, _))| drop(memory.unmap(*at, *bytes)));
            for (piece, own) in &book.pieces {
                (0..own.holds).for_each(|_| drop(memory.release(*piece)));
            }
            book.reservations.iter().for_each(|(at, bytes)| drop(memory.unreserve(*at, *bytes)));
        }
        if let Some(pools) = inner.memory_pools() {
            let stream = StreamId::DEFAULT;
            book.pool_ranges.keys().for_each(|at| drop(pools.free_async(*at, stream)));
            if !book.pool_ranges.is_empty() {
                let _ = inner.synchronize_stream(stream);
            }
            book.pools.keys().for_each(|pool| drop(pools.destroy_pool(DriverPoolId(*pool))));
        }
        if let Some(part) = inner.pinned_memory() {
            book.pinned.keys().for_each(|slab| drop(part.unpin(PinnedId(*slab))));
        }
        if let Some(part) = inner.host_memory() {
            book.host.iter().for_each(|(at, bytes)| drop(part.free_host(*at, *bytes)));
        }
        book.events.keys().for_each(|event| drop(inner.destroy_event(EventId(*event))));
        book.streams.values().for_each(|stream| drop(inner.destroy_stream(*stream)));
    }
}

impl<D: Driver> Drop for Share<D> {
    fn drop(&mut self) {
        self.free_all();
    }
}

impl<D: HoldsWork + 'static> Real for Part<D> {
    fn held(&self) -> HeldResources {
        self.interceptor().held()
    }

    fn free_all(&self) {
        self.interceptor().free_all();
    }
}

impl<D: Driver> Interceptor for Share<D> {
    fn info(&self, inner: &dyn Driver) -> DeviceInfo {
        DeviceInfo { total_bytes: self.total_bytes, ..inner.info() }
    }

    /// Offers only virtual memory, memory pools and host memory of the inner device. Hides the other optional
    /// interfaces, because a [`Part`] does not count what is allocated through them.
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        let Parts { virtual_memory, memory_pools, host_memory, .. } = parts;
        Parts { virtual_memory, memory_pools, host_memory, ..Parts::default() }
    }

    /// Returns the inner device's stream for this number, and creates it on the first call.
    fn stream(&self, stream: StreamId) -> DriverResult<StreamId> {
        if stream == StreamId::DEFAULT {
            return Ok(stream);
        }
        let mut book = self.book();
        if let Some(real) = book.streams.get(&stream) {
            return Ok(*real);
        }
        let real = self.device.create_stream()?;
        book.streams.insert(stream, real);
        Ok(real)
    }

    fn is_per_thread_stream(&self, _: &dyn Driver, _: StreamId) -> bool {
        false
    }

    fn memory_info(&self, _: &dyn Driver) -> DriverResult<MemoryInfo> {
        let (used_bytes, total_bytes) = (self.used_bytes()?, self.total_bytes);
        Ok(MemoryInfo { free_bytes: total_bytes.saturating_sub(used_bytes), total_bytes })
    }

    fn allocate(&self, inner: &dyn Driver, size_bytes: u64) -> DriverResult<u64> {
        self.admit("allocate", size_bytes, self.used_bytes()?)?;
        let address = inner.allocate(size_bytes)?;
        self.book().segments.insert(address, size_bytes);
        Ok(address)
    }

    fn free(&self, inner: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let act = || inner.free(address, size_bytes);
        self.remove("free", |book| &mut book.segments, (address, Some(size_bytes)), act)
    }

    fn create_stream(&self, inner: &dyn Driver) -> DriverResult<StreamId> {
        let real = inner.create_stream()?;
        self.book().streams.insert(real, real);
        Ok(real)
    }

    fn destroy_stream(&self, inner: &dyn Driver, stream: StreamId) -> DriverResult<()> {
        let real = self.book().streams.remove(&stream);
        inner.destroy_stream(real.unwrap_or(stream))
    }

    fn create_event(&self, inner: &dyn Driver) -> DriverResult<EventId> {
        let event = inner.create_event()?;
        self.book().events.insert(event.0, 0);
        Ok(event)
    }

    fn destroy_event(&self, inner: &dyn Driver, event: EventId) -> DriverResult<()> {
        let act = || inner.destroy_event(event);
        self.remove("destroy_event", |book| &mut book.events, (event.0, None), act)
    }

    fn pin(&self, inner: &dyn Driver, size_bytes: u64) -> DriverResult<PinnedId> {
        let pinned = inner.pinned_memory().ok_or_else(|| lacking(Call::Pin))?.pin(size_bytes)?;
        self.book().pinned.insert(pinned.0, size_bytes);
        Ok(pinned)
    }

    fn unpin(&self, inner: &dyn Driver, pinned: PinnedId) -> DriverResult<()> {
        let part = inner.pinned_memory().ok_or_else(|| lacking(Call::Unpin))?;
        let act = || part.unpin(pinned);
        self.remove("unpin", |book| &mut book.pinned, (pinned.0, None), act)
    }

    /// Page-locked host memory is limited to the size of the part too, apart from device memory.
    fn allocate_host(&self, _: &dyn Driver, size_bytes: u64) -> DriverResult<u64> {
        let used_bytes = self.book().host.values().sum();
        self.admit("allocate_host", size_bytes, used_bytes)?;
        let address = self.host().allocate_host(size_bytes)?;
        self.book().host.insert(address, size_bytes);
        Ok(address)
    }

    fn free_host(&self, _: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let act = || self.host().free_host(address, size_bytes);
        self.remove("free_host", |book| &mut book.host, (address, Some(size_bytes)), act)
    }

    fn reserve(&self, _: &dyn Driver, size_bytes: u64) -> DriverResult<u64> {
        let address = self.memory().reserve(size_bytes)?;
        self.book().reservations.insert(address, size_bytes);
        Ok(address)
    }

    fn unreserve(&self, _: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let act = || self.memory().unreserve(address, size_bytes);
        self.remove("unreserve", |book| &mut book.reservations, (address, Some(size_bytes)), act)
    }

    fn create(
        &self,
        _: &dyn Driver,
        size_bytes: u64,
        exportable: Exportable,
    ) -> DriverResult<PhysicalId> {
        self.admit("create", size_bytes, self.used_bytes()?)?;
        let piece = self.memory().create(size_bytes, exportable)?;
        self.book().hold(piece, size_bytes);
        Ok(piece)
    }

    fn release(&self, _: &dyn Driver, piece: PhysicalId) -> DriverResult<()> {
        // The reference is removed before the release, because the id may be reused right after the release.
        let mut book = self.book();
        let before = book.pieces.get(&piece).copied();
        book.change(piece, |piece| piece.holds -= 1);
        drop(book);
        self.memory().release(piece).inspect_err(|_| {
            self.book().pieces.extend(before.map(|own| (piece, own)));
        })
    }

    fn map(
        &self,
        _: &dyn Driver,
        address: u64,
        size_bytes: u64,
        piece: PhysicalId,
    ) -> DriverResult<()> {
        self.memory().map(address, size_bytes, piece)?;
        let mut book = self.book();
        book.change(piece, |piece| piece.mappings += 1);
        book.mapped.insert(address, (size_bytes, piece));
        Ok(())
    }

    fn unmap(&self, _: &dyn Driver, address: u64, size_bytes: u64) -> DriverResult<()> {
        let struck = self.book().remove_mappings(address, size_bytes);
        let struck = struck.map_err(|cut| foreign("unmap", cut))?;
        let done = self.memory().unmap(address, size_bytes);
        let mut book = self.book();
        match done {
            Ok(()) => struck
                .into_iter()
                .for_each(|(_, (_, piece))| book.change(piece, |piece| piece.mappings -= 1)),
            Err(_) => book.mapped.extend(struck),
        }
        done
    }

    fn import(
        &self,
        _: &dyn Driver,
        descriptor: OwnedFd,
        size_bytes: u64,
    ) -> DriverResult<PhysicalId> {
        let piece = self.memory().import(descriptor, size_bytes)?;
        self.book().hold(piece, size_bytes);
        Ok(piece)
    }

    fn default_pool(&self, _: &dyn Driver) -> DriverResult<DriverPoolId> {
        let mut book = self.book();
        if let Some(pool) = book.default_pool {
            return Ok(pool);
        }
        let pool = self.pools().create_pool()?;
        book.pools.insert(pool.0, 0);
        Ok(*book.default_pool.insert(pool))
    }

    fn create_pool(&self, _: &dyn Driver) -> DriverResult<DriverPoolId> {
        let pool = self.pools().create_pool()?;
        self.book().pools.insert(pool.0, 0);
        Ok(pool)
    }

    fn destroy_pool(&self, _: &dyn Driver, pool: DriverPoolId) -> DriverResult<()> {
        if self.book().default_pool == Some(pool) {
            return Err(foreign("destroy_pool", pool.0));
        }
        let act = || self.pools().destroy_pool(pool);
        self.remove("destroy_pool", |book| &mut book.pools, (pool.0, None), act)
    }

    /// Compares the request with allocated bytes only: unused memory of the pool may serve it, and it is
    /// unknown how much of that fits.
    fn allocate_async(
        &self,
        _: &dyn Driver,
        pool: DriverPoolId,
        bytes: u64,
        on: StreamId,
    ) -> DriverResult<u64> {
        let book = self.book();
        let used_bytes = book.used_bytes() + book.pool_ranges.values().sum::<u64>();
        drop(book);
        self.admit("allocate_async", bytes, used_bytes)?;
        let address = self.pools().allocate_async(pool, bytes, self.stream(on)?)?;
        self.book().pool_ranges.insert(address, bytes);
        Ok(address)
    }

    fn free_async(&self, _: &dyn Driver, address: u64, on: StreamId) -> DriverResult<()> {
        let on = self.stream(on)?;
        let act = || self.pools().free_async(address, on);
        self.remove("free_async", |book| &mut book.pool_ranges, (address, None), act)
    }

    /// Returns zeros, because a part has no captures.
    fn graph_usage(&self, _: &dyn Driver) -> DriverResult<DriverPoolUsage> {
        Ok(DriverPoolUsage::default())
    }

    fn reset_graph_high_marks(&self, _: &dyn Driver) -> DriverResult<()> {
        Ok(())
    }

    fn trim_graphs(&self, _: &dyn Driver) -> DriverResult<()> {
        Ok(())
    }
}
