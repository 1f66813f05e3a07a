//! The simulated device with a stream as CUDA has one: number 2 is another stream on each thread.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, Exportable, HoldsWork, MemoryInfo,
    NodeId, PhysicalId, Sim, VirtualMemory,
};
use stratalloc::ids::{DeviceId, EventId, StreamId};

/// The number that means the calling thread's own stream.
pub(crate) const OWN: StreamId = StreamId(2);

/// Work finishes when a test says so.
#[derive(Debug)]
pub(crate) struct Threaded {
    pub(crate) sim: Sim,
    own: Mutex<HashMap<ThreadId, StreamId>>,
    /// Waits for the whole device, and unmaps.
    order: Mutex<Vec<&'static str>>,
}

impl Threaded {
    pub(crate) fn new(total_bytes: u64) -> Arc<Self> {
        let (event_mode, costs) = (EventMode::Manual, CallCosts::NONE);
        let sim = SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() };
        Arc::new(Self { sim: Sim::new(sim), own: Mutex::default(), order: Mutex::default() })
    }

    /// What a number means on the calling thread.
    pub(crate) fn real(&self, stream: StreamId) -> StreamId {
        if stream != OWN {
            return stream;
        }
        let mut own = self.own.lock().expect("no test panics under it");
        let new = || self.sim.create_stream().expect("sim has streams");
        *own.entry(std::thread::current().id()).or_insert_with(new)
    }

    /// The waits for the whole device and the unmaps since this was asked last, in order.
    pub(crate) fn take_order(&self) -> Vec<&'static str> {
        std::mem::take(&mut *self.order.lock().expect("no test panics under it"))
    }

    fn note(&self, call: &'static str) {
        self.order.lock().expect("no test panics under it").push(call);
    }

    /// Makes a stream wait for an event; if that is of a capture, it draws the stream in.
    pub(crate) fn join(&self, stream: StreamId, event: EventId) {
        self.wait_event(stream, event).expect("it takes work");
    }

    /// An event behind all that a stream has been given.
    pub(crate) fn mark(&self, stream: StreamId) -> EventId {
        let event = self.create_event().expect("sim has events");
        self.record_event(event, stream).expect("it takes work");
        event
    }

    /// Finishes the work of the calling thread's own stream.
    pub(crate) fn finish_own(&self) {
        self.sim.complete_stream(self.real(OWN));
    }
}

/// Calls that are handed on with the same arguments, but for streams: those with the meaning that they
/// have here.
macro_rules! meant {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $kind),*) -> DriverResult<$result> {
            self.sim.$name($($argument),*)
        })*
    };
    (on stream: $($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $kind,)* stream: StreamId) -> DriverResult<$result> {
            self.sim.$name($($argument,)* self.real(stream))
        })*
    };
}

impl Driver for Threaded {
    fn info(&self) -> DeviceInfo {
        self.sim.info()
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        stream == OWN
    }

    meant! {
        memory_info() -> MemoryInfo;
        allocate(size_bytes: u64) -> u64;
        free(address: u64, size_bytes: u64) -> ();
        create_stream() -> StreamId;
        create_event() -> EventId;
        query_event(event: EventId) -> bool;
        synchronize_event(event: EventId) -> ();
        destroy_event(event: EventId) -> ();
    }
    meant! { on stream:
        destroy_stream() -> ();
        synchronize_stream() -> ();
        record_event(event: EventId) -> ();
        copy(to: u64, from: u64, size_bytes: u64) -> ();
        copy_from_host(to: u64, from: &[u8]) -> ();
        copy_to_host(to: &mut [u8], from: u64) -> ();
        fill(to: u64, byte: u8, size_bytes: u64) -> ();
        capture_status() -> CaptureStatus;
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        self.note("synchronize_device");
        self.sim.synchronize_device()
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.sim.wait_event(self.real(stream), event)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.sim.virtual_memory().map(|_| self as _)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        Some(self)
    }
}

/// All work is held anyway.
impl HoldsWork for Threaded {
    type Gate = ();

    fn hold_back(&self, _: StreamId) -> DriverResult<()> {
        Ok(())
    }
}

impl VirtualMemory for Threaded {
    fn granularity_bytes(&self) -> u64 {
        self.sim.granularity_bytes()
    }

    meant! {
        reserve(size_bytes: u64) -> u64;
        unreserve(address: u64, size_bytes: u64) -> ();
        create(size_bytes: u64, exportable: Exportable) -> PhysicalId;
        release(piece: PhysicalId) -> ();
        map(address: u64, size_bytes: u64, piece: PhysicalId) -> ();
        set_access(address: u64, size_bytes: u64, device: DeviceId) -> ();
        export(piece: PhysicalId) -> OwnedFd;
    }

    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.note("unmap");
        self.sim.unmap(address, size_bytes)
    }

    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> DriverResult<PhysicalId> {
        VirtualMemory::import(&self.sim, descriptor, size_bytes)
    }
}

impl Capture for Threaded {
    meant! {
        expect_captures(expected: bool) -> ();
        expected() -> u64;
        dependencies(node: NodeId) -> Vec<NodeId>;
    }

    meant! { on stream:
        begin() -> u64;
        end() -> ();
        frontier() -> Vec<NodeId>;
    }

    fn add_to_frontier(&self, stream: StreamId, nodes: &[NodeId]) -> DriverResult<()> {
        self.sim.add_to_frontier(self.real(stream), nodes)
    }

    fn free_behind(
        &self,
        address: u64,
        stream: StreamId,
        nodes: &[NodeId],
    ) -> DriverResult<NodeId> {
        self.sim.free_behind(address, self.real(stream), nodes)
    }
}
