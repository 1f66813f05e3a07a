//! One driver in front of another: what is done to calls, streams and addresses on the way.
//!
//! [`Intercepted`] forwards every call of every part to the driver behind it. An [`Interceptor`] says what is
//! different: one method surrounds all calls, the others translate what calls name, and each has a default.
//! Read next: `faulty` (calls that fail), `gated` (work held back), `recorded` (other addresses).

use std::fmt;
use std::os::fd::OwnedFd;

use super::forward::forward;
use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverPoolId, DriverPoolUsage, DriverResult,
    Exportable, Fabric, FabricHandle, Ipc, MemoryInfo, MemoryPools, NodeId, Peers, PhysicalId,
    ProcessUsage, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};

/// What an [`Intercepted`] driver does differently. By default: nothing.
///
/// Methods run on the calling thread and may wait only where the call may. A call that cannot fail (`info`,
/// `granularity_bytes`, which parts there are) is not surrounded.
pub trait Interceptor: fmt::Debug + Send + Sync {
    /// Surrounds every call that can fail. `call` is its name in the driver traits; `act` does it.
    ///
    /// # Errors
    ///
    /// Those of `act`, and own ones, also instead of `act`.
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let _ = call;
        act()
    }

    /// Surrounds [`Driver::allocate`] and [`VirtualMemory::reserve`], inside [`around`](Self::around). `act`
    /// returns the inner driver's address; what this returns, the caller gets.
    ///
    /// # Errors
    ///
    /// Those of `act`, and own ones, also instead of `act`.
    fn obtain(
        &self,
        call: &'static str,
        size_bytes: u64,
        act: impl FnOnce() -> DriverResult<u64>,
    ) -> DriverResult<u64> {
        let _ = (call, size_bytes);
        act()
    }

    /// Surrounds [`Driver::free`] and [`VirtualMemory::unreserve`], inside [`around`](Self::around). `act`
    /// wants the inner driver's address for what [`obtain`](Self::obtain) returned.
    ///
    /// # Errors
    ///
    /// Those of `act`, and own ones, also instead of `act`.
    fn give_back(
        &self,
        call: &'static str,
        address: u64,
        act: impl FnOnce(u64) -> DriverResult<()>,
    ) -> DriverResult<()> {
        let _ = call;
        act(address)
    }

    /// The inner driver's address for one inside what [`obtain`](Self::obtain) returned; others stay as they
    /// are. Not asked about stream-ordered memory. Never waits.
    fn address(&self, address: u64) -> u64 {
        address
    }

    /// The inner driver's stream for one that a call names.
    fn stream(&self, stream: StreamId) -> StreamId {
        stream
    }

    /// Whether [`stream`](Self::stream) means another stream on each thread. Never waits.
    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// The optional parts, from those that the inner driver has. Never waits. Who asks for one part is
    /// answered by that one alone: the others are `None` in `parts`, because a driver may take long to say
    /// whether it has them.
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        parts
    }
}

/// The optional parts of a driver. By default: none.
#[derive(Clone, Copy, Default)]
pub struct Parts<'a> {
    /// See [`Driver::virtual_memory`].
    pub virtual_memory: Option<&'a dyn VirtualMemory>,
    /// See [`Driver::memory_pools`].
    pub memory_pools: Option<&'a dyn MemoryPools>,
    /// See [`Driver::ipc`].
    pub ipc: Option<&'a dyn Ipc>,
    /// See [`Driver::peers`].
    pub peers: Option<&'a dyn Peers>,
    /// See [`Driver::capture`].
    pub capture: Option<&'a dyn Capture>,
    /// See [`Driver::processes`].
    pub processes: Option<&'a dyn Processes>,
}

/// A driver whose calls pass an [`Interceptor`]; everything else is `D`'s.
#[derive(Debug)]
pub struct Intercepted<D, I> {
    inner: D,
    interceptor: I,
}

impl<D, I> Intercepted<D, I> {
    /// Puts an interceptor in front of a driver.
    #[must_use]
    pub const fn with(inner: D, interceptor: I) -> Self {
        Self { inner, interceptor }
    }

    /// The driver that does the work. Calls to it directly are not intercepted.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// What intercepts.
    #[must_use]
    pub fn interceptor(&self) -> &I {
        &self.interceptor
    }
}

impl<D: Driver, I: Interceptor> Intercepted<D, I> {
    /// Does a call on a part of the inner driver. A part is announced only when the inner driver has it, so
    /// that it is missing only for those who call the method past that.
    fn through<'a, P: ?Sized + 'a, T>(
        &'a self,
        call: &'static str,
        part: impl FnOnce(&'a D) -> Option<&'a P>,
        act: impl FnOnce(&'a P) -> DriverResult<T>,
    ) -> DriverResult<T> {
        let part = part(&self.inner).ok_or_else(|| lacking(call))?;
        self.interceptor.around(call, || act(part))
    }

    // What the arguments of calls mean to the inner driver.

    #[expect(clippy::unnecessary_wraps, reason = "the shape that `forward!` asks for")]
    fn address(&self, address: u64) -> DriverResult<u64> {
        Ok(self.interceptor.address(address))
    }

    #[expect(clippy::unnecessary_wraps, reason = "the shape that `forward!` asks for")]
    fn stream(&self, stream: StreamId) -> DriverResult<StreamId> {
        Ok(self.interceptor.stream(stream))
    }

    /// Addresses of other devices pass unchanged: who gave them out is not known here.
    fn place(&self, (device, address): (DeviceId, u64)) -> DriverResult<(DeviceId, u64)> {
        if device == self.inner.info().device {
            return Ok((device, self.address(address)?));
        }
        Ok((device, address))
    }
}

#[cold]
fn lacking(call: &'static str) -> DriverError {
    let message = "the wrapped driver does not have this part";
    DriverError::new(DriverErrorKind::NotSupported, call, 801, message)
}

impl<D: Driver, I: Interceptor> Driver for Intercepted<D, I> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        self.through("allocate", Some, |inner| {
            self.interceptor.obtain("allocate", size_bytes, || inner.allocate(size_bytes))
        })
    }

    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.through("free", Some, |inner| {
            self.interceptor.give_back("free", address, |address| inner.free(address, size_bytes))
        })
    }

    forward! { Self::through, Some;
        make_current() -> ();
        memory_info() -> MemoryInfo;
        create_stream() -> StreamId;
        destroy_stream(stream: StreamId as stream) -> ();
        synchronize_stream(stream: StreamId as stream) -> ();
        synchronize_device() -> ();
        create_event() -> EventId;
        record_event(event: EventId, stream: StreamId as stream) -> ();
        query_event(event: EventId) -> bool;
        synchronize_event(event: EventId) -> ();
        wait_event(stream: StreamId as stream, event: EventId) -> ();
        destroy_event(event: EventId) -> ();
        copy(
            to: u64 as address, from: u64 as address, size_bytes: u64, stream: StreamId as stream
        ) -> ();
        copy_from_host(to: u64 as address, from: &[u8], stream: StreamId as stream) -> ();
        copy_to_host(to: &mut [u8], from: u64 as address, stream: StreamId as stream) -> ();
        fill(to: u64 as address, byte: u8, size_bytes: u64, stream: StreamId as stream) -> ();
        capture_status(stream: StreamId as stream) -> CaptureStatus;
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        self.interceptor.is_per_thread_stream(stream)
            || self.inner.is_per_thread_stream(self.interceptor.stream(stream))
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        let virtual_memory = self.inner.virtual_memory().map(|_| self as _);
        self.interceptor.parts(Parts { virtual_memory, ..Parts::default() }).virtual_memory
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        let memory_pools = self.inner.memory_pools().map(|_| self as _);
        self.interceptor.parts(Parts { memory_pools, ..Parts::default() }).memory_pools
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        let ipc = self.inner.ipc().map(|_| self as _);
        self.interceptor.parts(Parts { ipc, ..Parts::default() }).ipc
    }

    fn peers(&self) -> Option<&dyn Peers> {
        let peers = self.inner.peers().map(|_| self as _);
        self.interceptor.parts(Parts { peers, ..Parts::default() }).peers
    }

    fn capture(&self) -> Option<&dyn Capture> {
        let capture = self.inner.capture().map(|_| self as _);
        self.interceptor.parts(Parts { capture, ..Parts::default() }).capture
    }

    fn processes(&self) -> Option<&dyn Processes> {
        let processes = self.inner.processes().map(|_| self as _);
        self.interceptor.parts(Parts { processes, ..Parts::default() }).processes
    }
}

impl<D: Driver, I: Interceptor> VirtualMemory for Intercepted<D, I> {
    fn granularity_bytes(&self) -> u64 {
        let part = self.inner.virtual_memory();
        part.expect("announced only when the inner driver has it").granularity_bytes()
    }

    fn reserve(&self, size_bytes: u64) -> DriverResult<u64> {
        self.through("reserve", D::virtual_memory, |inner| {
            self.interceptor.obtain("reserve", size_bytes, || inner.reserve(size_bytes))
        })
    }

    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.through("unreserve", D::virtual_memory, |inner| {
            let act = |address| inner.unreserve(address, size_bytes);
            self.interceptor.give_back("unreserve", address, act)
        })
    }

    forward! { Self::through, D::virtual_memory;
        create(size_bytes: u64, exportable: Exportable) -> PhysicalId;
        release(piece: PhysicalId) -> ();
        map(address: u64 as address, size_bytes: u64, piece: PhysicalId) -> ();
        set_access(address: u64 as address, size_bytes: u64, device: DeviceId) -> ();
        unmap(address: u64 as address, size_bytes: u64) -> ();
        export(piece: PhysicalId) -> OwnedFd;
        import(descriptor: OwnedFd, size_bytes: u64) -> PhysicalId;
    }

    fn fabric(&self) -> Option<&dyn Fabric> {
        self.inner.virtual_memory()?.fabric().map(|_| self as _)
    }
}

fn fabric<D: Driver>(inner: &D) -> Option<&dyn Fabric> {
    inner.virtual_memory()?.fabric()
}

impl<D: Driver, I: Interceptor> Fabric for Intercepted<D, I> {
    forward! { Self::through, fabric;
        export_handle(piece: PhysicalId) -> FabricHandle;
        import_handle(handle: &FabricHandle) -> PhysicalId;
    }
}

impl<D: Driver, I: Interceptor> MemoryPools for Intercepted<D, I> {
    forward! { Self::through, D::memory_pools;
        default_pool() -> DriverPoolId;
        create_pool() -> DriverPoolId;
        destroy_pool(pool: DriverPoolId) -> ();
        set_release_threshold(pool: DriverPoolId, bytes: u64) -> ();
        release_threshold(pool: DriverPoolId) -> u64;
        keep_memory(pool: DriverPoolId, keep: bool) -> ();
        allow_reuse(pool: DriverPoolId) -> ();
        open_pool(pool: DriverPoolId, other: DeviceId) -> ();
        allocate_async(pool: DriverPoolId, bytes: u64, on: StreamId as stream) -> u64;
        free_async(address: u64, on: StreamId as stream) -> ();
        trim(pool: DriverPoolId, keep_bytes: u64) -> ();
        usage(pool: DriverPoolId) -> DriverPoolUsage;
        reset_high_marks(pool: DriverPoolId) -> ();
        graph_usage() -> DriverPoolUsage;
        reset_graph_high_marks() -> ();
        trim_graphs() -> ();
    }
}

impl<D: Driver, I: Interceptor> Ipc for Intercepted<D, I> {
    forward! { Self::through, D::ipc;
        share(base: u64 as address) -> [u8; 64];
        open(handle: &[u8; 64]) -> u64;
        close(address: u64) -> ();
    }
}

impl<D: Driver, I: Interceptor> Peers for Intercepted<D, I> {
    forward! { Self::through, D::peers;
        can_access(other: DeviceId) -> bool;
        enable_access(other: DeviceId) -> ();
        copy_peer(
            to: (DeviceId, u64) as place,
            from: (DeviceId, u64) as place,
            size_bytes: u64,
            stream: StreamId as stream
        ) -> ();
    }
}

impl<D: Driver, I: Interceptor> Capture for Intercepted<D, I> {
    forward! { Self::through, D::capture;
        expect_captures(expected: bool) -> ();
        expected() -> u64;
        begin(stream: StreamId as stream) -> u64;
        end(stream: StreamId as stream) -> ();
        frontier(stream: StreamId as stream) -> Vec<NodeId>;
        dependencies(node: NodeId) -> Vec<NodeId>;
        add_to_frontier(stream: StreamId as stream, nodes: &[NodeId]) -> ();
        free_behind(address: u64, stream: StreamId as stream, nodes: &[NodeId]) -> NodeId;
    }
}

impl<D: Driver, I: Interceptor> Processes for Intercepted<D, I> {
    forward! { Self::through, D::processes;
        list() -> Vec<ProcessUsage>;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::driver::Sim;
    use crate::driver::sim::SimOptions;

    /// Counts who asks for parts.
    #[derive(Debug, Default)]
    struct Asked(AtomicU64);

    impl Interceptor for Asked {
        fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
            self.0.fetch_add(1, Ordering::Relaxed);
            parts
        }
    }

    #[derive(Debug)]
    struct Nothing;

    impl Interceptor for Nothing {}

    #[test]
    fn who_asks_for_one_part_asks_for_no_other() {
        let inner = Intercepted::with(Sim::new(SimOptions::default()), Asked::default());
        let driver = Intercepted::with(inner, Nothing);
        assert!(driver.memory_pools().is_some());
        assert_eq!(driver.inner().interceptor().0.load(Ordering::Relaxed), 1);
    }
}
