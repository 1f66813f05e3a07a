//! The table of live blocks, for authors of a strategy.
//!
//! [`Blocks`] refuses requests that a simple strategy cannot serve, and returns a unique handle for
//! each block. It rejects stale handles, double frees and handles of other allocators. It finds blocks
//! by address and counts them. `examples/straight.rs` is a complete strategy that uses it.

use std::fmt;

use parking_lot::Mutex;

use crate::allocator::{Allocation, Control, Counters, Request, Token};
use crate::error::{
    AddressFault, AllocError, AllocResult, DriverError, FreeError, HandleError, OutOfMemory,
};
use crate::ids::OwnerId;
use crate::live_blocks::{BlockName, LiveBlocks};
use crate::size::PoolKind;
use crate::stats::{Statistics, signed};

/// The live blocks of one allocator by address, with the requested bytes of each. Dropping the table
/// frees the memory of all its blocks.
///
/// In the counters, each block is a segment of its own. A strategy that holds more memory than its live
/// blocks must replace the field `counters` of [`control`](Self::control). The table has one lock,
/// which is not held while memory is allocated or freed.
pub struct Blocks {
    owner: OwnerId,
    state: Mutex<State>,
    free: Box<FreeFn>,
}

type FreeFn = dyn Fn(u64, u64) -> Result<(), DriverError> + Send + Sync;

#[derive(Default)]
struct State {
    live: LiveBlocks<u64>,
    /// The counters of allocations, bytes and failures.
    statistics: Statistics,
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("live", &self.len()).finish_non_exhaustive()
    }
}

impl Blocks {
    /// Returns an empty table. `free` receives the address and the size in bytes of a block, and frees
    /// its memory. It is called once for each block, with no lock held.
    #[must_use]
    pub fn new(free: impl Fn(u64, u64) -> Result<(), DriverError> + Send + Sync + 'static) -> Self {
        Self { owner: OwnerId::next(), state: Mutex::default(), free: Box::new(free) }
    }

    /// Serves a request from memory at the address that `take` returns. `take` receives the number of
    /// bytes. May wait if `take` does. If `take` returns an out-of-memory error, the size and stream of
    /// the request are added to it.
    ///
    /// # Errors
    ///
    /// Those of [`Request::plain`] and of `take`. [`AllocError::BadAddress`] when a live block starts
    /// at the address.
    pub fn allocate<E: Into<AllocError>>(
        &self,
        request: Request,
        take: impl FnOnce(u64) -> Result<u64, E>,
    ) -> AllocResult {
        let bytes = request.plain()?;
        let address = take(bytes).map_err(|error| self.refused(request, error.into()))?;
        let mut state = self.state.lock();
        if state.live.contains(address) {
            let fault = AddressFault::Live;
            return Err(AllocError::BadAddress { address, requested_bytes: bytes, fault });
        }
        let (serial, _) = state.live.enter(address, bytes);
        state.statistics.count_alloc(PoolKind::of(bytes), signed(bytes));
        Ok(Allocation::new(address, bytes, self.owner, Token::numbered(serial)))
    }

    #[cold]
    fn refused(&self, request: Request, mut error: AllocError) -> AllocError {
        if let AllocError::OutOfMemory(report) = &mut error {
            let driver = report.driver.take();
            **report = OutOfMemory { driver, ..OutOfMemory::of(request.bytes, request.stream) };
            self.state.lock().statistics.num_ooms += 1;
        }
        error
    }

    /// Frees a block. May wait if the function passed to [`new`](Self::new) does.
    ///
    /// # Errors
    ///
    /// [`FreeError`] when the handle is stale or belongs to another allocator, or when the function
    /// passed to [`new`](Self::new) fails. Nothing has changed then.
    pub fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let freed = BlockName::of(&allocation, self.owner).and_then(|name| self.remove(name));
        freed.map(drop).map_err(|reason| FreeError { reason, allocation })
    }

    /// Frees the block that starts at `address` and returns its requested bytes.
    ///
    /// # Errors
    ///
    /// [`HandleError`] when no live block starts there, or when the function passed to
    /// [`new`](Self::new) fails. Nothing has changed then.
    pub fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        self.remove(BlockName::at(address))
    }

    /// Removes the block from the table, then frees its memory. After the free, another thread may get
    /// the same address at once, so the block must not be in the table then.
    fn remove(&self, name: BlockName) -> Result<u64, HandleError> {
        let block = self.state.lock().live.take(name)?;
        let bytes = block.value;
        let freed = (self.free)(name.address, bytes);
        let mut state = self.state.lock();
        if let Err(error) = freed {
            state.live.put_back(block);
            return Err(error.into());
        }
        state.statistics.count_free(PoolKind::of(bytes), signed(bytes));
        Ok(bytes)
    }

    /// Returns the requested bytes of the live block that starts at `address`. Does not wait.
    ///
    /// # Errors
    ///
    /// [`HandleError::UnknownAddress`].
    pub fn size_of(&self, address: u64) -> Result<u64, HandleError> {
        self.state.lock().live.find_mut(BlockName::at(address)).copied()
    }

    /// Returns the number of live blocks. Does not wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.state.lock().live.len()
    }

    /// Returns true if no block is live. Does not wait.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the counters, and support for calls by address, for an allocator whose
    /// [`free_raw`](crate::allocator::DeviceAllocator::free_raw) calls [`free_raw`](Self::free_raw).
    #[must_use]
    pub fn control(&self) -> Control<'_> {
        Control { counters: Some(self), by_address: true, ..Control::default() }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        for block in self.state.get_mut().live.drain() {
            // A drop cannot return an error, so memory that cannot be freed leaks.
            let _ = (self.free)(block.address, block.value);
        }
    }
}

impl Counters for Blocks {
    fn statistics(&self) -> Statistics {
        let own = self.state.lock().statistics.clone();
        let (blocks, bytes) = (own.allocation, own.allocated_bytes);
        // Each block is a segment, so every request allocates one.
        Statistics {
            active: blocks,
            segment: blocks,
            active_bytes: bytes,
            requested_bytes: bytes,
            reserved_bytes: bytes,
            misses: blocks.all.allocated.cast_unsigned(),
            num_device_alloc: blocks.all.allocated,
            num_device_free: blocks.all.freed,
            ..own
        }
    }

    fn reset_peaks(&self) {
        self.state.lock().statistics.reset_peaks();
    }

    fn reset_accumulated(&self) {
        self.state.lock().statistics.reset_accumulated();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::error::DriverErrorKind;
    use crate::ids::{PoolId, StreamId};

    fn request(bytes: u64) -> Request {
        Request::new(bytes, StreamId(7))
    }

    fn at(address: u64) -> impl Fn(u64) -> Result<u64, DriverError> {
        move |_| Ok(address)
    }

    fn failed(kind: DriverErrorKind) -> DriverError {
        DriverError::new(kind, "free", 1, "on purpose".to_owned())
    }

    #[test]
    fn a_block_is_freed_once_by_its_own_handle_or_its_address() {
        let blocks = Blocks::new(|_, _| Ok(()));
        let block = blocks.allocate(request(100), at(512)).unwrap();
        let copy =
            || Allocation::new(block.address(), block.size_bytes(), block.owner(), block.token());
        let (twin, stale) = (copy(), copy());
        let other = Blocks::new(|_, _| Ok(())).free(twin).unwrap_err();
        assert!(matches!(other.reason, HandleError::Foreign { .. }));
        blocks.free(block).unwrap();
        assert_eq!(blocks.free_raw(512), Err(HandleError::UnknownAddress { address: 512 }));
        let _again = blocks.allocate(request(200), at(512)).unwrap();
        assert_eq!(blocks.free(stale).unwrap_err().reason, HandleError::Stale { address: 512 });
        assert_eq!((blocks.size_of(512), blocks.free_raw(512)), (Ok(200), Ok(200)));
        let counted = blocks.statistics();
        assert_eq!((counted.allocation.all.current, counted.allocation.all.allocated), (0, 2));
        assert_eq!((counted.reserved_bytes.all.current, counted.reserved_bytes.all.peak), (0, 200));
    }

    #[test]
    fn what_cannot_be_served_is_refused_before_memory_is_taken() {
        let blocks = Blocks::new(|_, _| Ok(()));
        let never = |_| -> Result<u64, DriverError> { unreachable!("nothing is taken") };
        let refused = |request| blocks.allocate(request, never).unwrap_err();
        assert!(matches!(refused(request(0)), AllocError::ZeroBytes));
        assert!(matches!(refused(request(1).in_pool(PoolId::next_user())), AllocError::Pool(_)));
        assert!(matches!(refused(request(1).at(512)), AllocError::NoBlockAt { .. }));
        let _first = blocks.allocate(request(1), at(512)).unwrap();
        let second = blocks.allocate(request(1), at(512)).unwrap_err();
        assert!(matches!(second, AllocError::BadAddress { fault: AddressFault::Live, .. }));
    }

    #[test]
    fn a_device_without_memory_is_reported_with_the_numbers_of_the_request() {
        let blocks = Blocks::new(|_, _| Ok(()));
        let none = |_| Err(failed(DriverErrorKind::OutOfMemory));
        let Err(AllocError::OutOfMemory(report)) = blocks.allocate(request(4096), none) else {
            panic!("there is none");
        };
        assert_eq!((report.requested_bytes, report.stream), (4096, StreamId(7)));
        assert!(report.driver.is_some());
        assert_eq!(blocks.statistics().num_ooms, 1);
        let alone = AllocError::from(failed(DriverErrorKind::OutOfMemory)).to_string();
        assert!(alone.starts_with("out of memory on device 0.\nDriver error: "), "{alone}");
        let lost = |_| Err(failed(DriverErrorKind::DeviceLost));
        assert!(matches!(blocks.allocate(request(1), lost), Err(AllocError::Driver(_))));
    }

    #[test]
    fn a_block_that_is_not_freed_stays_live_and_a_drop_tries_again() {
        let (works, freed) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (own, list) = (Arc::clone(&works), Arc::clone(&freed));
        let blocks = Blocks::new(move |address, bytes| {
            list.lock().push((address, bytes));
            let works = own.load(Ordering::Relaxed);
            if works { Ok(()) } else { Err(failed(DriverErrorKind::DeviceLost)) }
        });
        let block = blocks.allocate(request(100), at(512)).unwrap();
        let refused = blocks.free(block).unwrap_err();
        assert!(matches!(refused.reason, HandleError::Driver(_)));
        assert_eq!((blocks.len(), blocks.statistics().allocation.all.freed), (1, 0));
        works.store(true, Ordering::Relaxed);
        drop(blocks);
        assert_eq!(*freed.lock(), [(512, 100), (512, 100)]);
    }
}
