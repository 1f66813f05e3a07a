//! What a device can do: the whole contract between allocators and drivers, on one page.
//!
//! A driver owns device state and nothing else: it caches nothing, rounds nothing and decides
//! nothing. Every call says what must hold before it and whether it may wait. Optional parts are
//! announced by accessors that return an option; a driver that announces a part does all of it.
//! All methods may be called from any thread. Addresses and sizes are bytes of device memory.
//! Every call may fail with a [`DriverError`], whose kind says what is wrong; unless its text says
//! otherwise, a call that failed changed nothing. Read next: `sim` (no memory, any size), `host` (real
//! memory, same semantics), `intercept` (what stands in front of another driver), `call` (the table of the
//! calls: a new one is entered there too).

#![expect(clippy::missing_errors_doc, reason = "all calls fail alike: see the header")]

use std::fmt;
use std::os::fd::OwnedFd;

use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId, ThreadNumber};

mod call;
#[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
pub mod cuda;
mod faulty;
mod free_ranges;
mod gated;
mod held;
mod holders;
#[cfg(target_os = "linux")]
pub mod host;
mod intercept;
mod keepers;
mod pool_books;
mod recorded;
mod refusal;
pub mod sim;

#[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
pub use cuda::Cuda;
pub use faulty::{FaultPlan, Faults, Faulty};
#[doc(hidden)]
pub use gated::{Brake, Gated, Gates, HoldsWork};
#[doc(hidden)]
pub use held::Held;
pub(crate) use holders::name_holders;
#[cfg(target_os = "linux")]
pub use host::Host;
pub use intercept::{Intercepted, Interceptor, Parts};
#[doc(hidden)]
pub use recorded::{Recorded, RecordedAddresses, RecordedAnswers};
pub use sim::Sim;

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// What a device says about itself. Fixed for the life of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its ordinal.
    pub device: DeviceId,
    /// Its name, for people.
    pub name: String,
    /// `sim`, `host` or `cuda`.
    pub driver: &'static str,
    /// All the memory it has.
    pub total_bytes: u64,
}

/// Memory of the device at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free for anybody.
    pub free_bytes: u64,
    /// All it has.
    pub total_bytes: u64,
}

/// Whether a stream is being captured into a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Not capturing: work runs as it is submitted.
    None,
    /// Capturing, with the id of the capture sequence.
    Active {
        /// Unique for each capture of the process.
        capture: u64,
    },
    /// The capture broke and must be ended.
    Invalidated,
}

/// The contract with a device.
pub trait Driver: fmt::Debug + Send + Sync {
    /// What the device says about itself. Never waits.
    fn info(&self) -> DeviceInfo;

    /// Makes the device the calling thread's own, in place of what the thread had, as a program does on
    /// the threads that launch work. No call needs it. Threads that only take memory gain by it on CUDA:
    /// otherwise most calls push the device's context and pop it again. The driver, or another owner of
    /// the context, must live as long as the thread works with the device. Never waits.
    fn make_current(&self) -> DriverResult<()> {
        Ok(())
    }

    /// Free and total memory now. Never waits.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Takes `size_bytes` (at least 1) of device memory and returns its address, aligned to at
    /// least 512. May wait for running work: drivers are free to synchronise.
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64>;

    /// Gives back what [`allocate`](Self::allocate) returned, with the same size. Waits for running
    /// work on real devices (measured beside a 35 ms kernel on an H200: 30 ms).
    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()>;

    /// Makes a stream that does not synchronise with the default one. Never waits.
    fn create_stream(&self) -> DriverResult<StreamId>;

    /// Destroys a stream that [`create_stream`](Self::create_stream) made. Work that was submitted
    /// still finishes.
    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// Waits until all work submitted to `stream` so far has finished.
    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// Waits until all work submitted to the device so far has finished. While any thread captures it
    /// fails, and breaks that capture.
    fn synchronize_device(&self) -> DriverResult<()>;

    /// Makes an event without timing. It counts as finished until it is recorded. Never waits.
    fn create_event(&self) -> DriverResult<EventId>;

    /// Marks the point that `stream` has reached. An earlier mark of the event is forgotten. Never
    /// waits.
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Whether the work before the event's mark has finished. Never waits. Not legal while the
    /// calling thread captures.
    fn query_event(&self, event: EventId) -> DriverResult<bool>;

    /// Waits until the work before the event's mark has finished.
    fn synchronize_event(&self, event: EventId) -> DriverResult<()>;

    /// Makes later work of `stream` wait for the event's mark. The caller does not wait. An event
    /// of a capture draws `stream` into that capture; a wait across the border of a capture fails
    /// and breaks it.
    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()>;

    /// Destroys an event. Waits for nothing.
    fn destroy_event(&self, event: EventId) -> DriverResult<()>;

    /// Submits a copy of `size_bytes` between two device ranges that do not overlap. Both stay
    /// valid until the work has finished.
    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()>;

    /// Copies host bytes to the device in stream order and waits for the copy.
    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()>;

    /// Copies device bytes to the host in stream order and waits for the copy.
    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()>;

    /// Submits a fill of a device range with one byte value.
    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()>;

    /// Whether `stream` is being captured. Never waits.
    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus>;

    /// Whether `stream` names another stream on each thread: every call means the calling thread's own.
    /// Two threads that name it are then ordered by nothing, and nobody can wait for another thread's.
    /// The answer for a stream never changes. Never waits.
    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// Virtual memory, if the device has it.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }

    /// Stream-ordered memory pools, if the device has them.
    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        None
    }

    /// Sharing of [`Driver::allocate`]'s memory between processes, if the device can.
    fn ipc(&self) -> Option<&dyn Ipc> {
        None
    }

    /// Access between devices, if there can be any.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// Capture of work into graphs, if the device can.
    fn capture(&self) -> Option<&dyn Capture> {
        None
    }

    /// Processes that hold memory of the device, if anybody can tell.
    fn processes(&self) -> Option<&dyn Processes> {
        None
    }
}

/// Returns the calling thread's number if `stream` is the per-thread default stream.
pub(crate) fn thread_of(driver: &dyn Driver, stream: StreamId) -> Option<ThreadNumber> {
    driver.is_per_thread_stream(stream).then(ThreadNumber::current)
}

/// What passes its events in order: a stream, and whose it is if each thread has its own.
pub(crate) type Timeline = (StreamId, Option<ThreadNumber>);

/// What a stream's number means on the calling thread.
#[inline]
pub(crate) fn timeline_of(driver: &dyn Driver, stream: StreamId) -> Timeline {
    (stream, thread_of(driver, stream))
}

/// Whether a stream is being captured. One that is gone is in no capture.
///
/// # Errors
///
/// [`DriverError`] when the driver fails to say for another reason: it may hide a capture.
pub(crate) fn capture_status_of(
    driver: &dyn Driver,
    stream: StreamId,
) -> DriverResult<CaptureStatus> {
    driver.capture_status(stream).or_else(|error| match error.kind() {
        DriverErrorKind::InvalidValue | DriverErrorKind::NotSupported => Ok(CaptureStatus::None),
        _ => Err(error),
    })
}

/// Whether what is submitted to a stream now may become part of a graph, as an event that never passes then.
/// Of a device that is lost the next call tells.
#[inline]
pub(crate) fn may_be_captured(driver: &dyn Driver, stream: StreamId) -> bool {
    match capture_status_of(driver, stream) {
        Ok(status) => status != CaptureStatus::None,
        Err(error) => error.kind() != DriverErrorKind::DeviceLost,
    }
}

/// Records an event that is no part of a graph.
///
/// # Errors
///
/// [`DriverError`]; of the kind `CaptureActive` when the stream is captured, also when another thread began
/// that just before. The event is good for another try then.
#[inline]
pub(crate) fn record_outside_graphs(
    driver: &dyn Driver,
    event: EventId,
    stream: StreamId,
) -> DriverResult<()> {
    driver.record_event(event, stream)?;
    if may_be_captured(driver, stream) { Err(captured(stream)) } else { Ok(()) }
}

/// Whether anybody expects captures: every open scope does, of whatever allocator over this driver.
pub(crate) fn expects_captures(driver: &dyn Driver) -> bool {
    // A driver that fails to say may hide one.
    driver.capture().is_some_and(|capture| capture.expected() != Ok(0))
}

/// Waits for all work of the device, unless anybody expects captures: the wait would break one, whichever
/// thread captures.
///
/// # Errors
///
/// [`DriverError`]; of the kind `CaptureActive` when it did not wait for a capture's sake.
pub(crate) fn synchronize_outside_captures(driver: &dyn Driver) -> DriverResult<()> {
    if !expects_captures(driver) {
        return driver.synchronize_device();
    }
    let message = "a capture is under way, and would break";
    Err(DriverError::new(DriverErrorKind::CaptureActive, "synchronize_device", 0, message))
}

/// The result of a wait, where a capture that forbids to wait is no error: whoever calls goes on with
/// what has finished already.
///
/// # Errors
///
/// Any other [`DriverError`].
pub(crate) fn unless_captured(waited: DriverResult<()>) -> DriverResult<()> {
    waited.or_else(|error| match error.kind() {
        DriverErrorKind::CaptureActive => Ok(()),
        _ => Err(error),
    })
}

/// An event was not recorded for a capture's sake.
pub(crate) fn captured(stream: StreamId) -> DriverError {
    let message = format!("stream {stream} is being captured");
    DriverError::new(DriverErrorKind::CaptureActive, "record_event", 0, message)
}

/// Lets another device access what this one allocates from now on and did before, and not the other way
/// round. Mapped pages and stream-ordered pools are opened one by one besides.
///
/// # Errors
///
/// [`DriverError`] when that device is this one, or cannot reach it.
pub(crate) fn open_to_peer(driver: &dyn Driver, device: DeviceId) -> DriverResult<()> {
    let own = driver.info().device;
    let refuse =
        |message| DriverError::new(DriverErrorKind::NotSupported, "enable_access", 0, message);
    if device == own {
        return Err(refuse(format!("device {device} is no peer of itself")));
    }
    let peers =
        driver.peers().ok_or_else(|| refuse(format!("no other device reaches device {own}")))?;
    if !peers.can_access(device)? {
        return Err(refuse(format!("device {device} cannot reach device {own}")));
    }
    peers.enable_access(device)
}

/// A physical piece of memory that can be mapped: CUDA's `CUmemGenericAllocationHandle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalId(pub u64);

/// Whether a physical piece may leave the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exportable {
    /// It stays in this process.
    No,
    /// As a file descriptor.
    Descriptor,
    /// As a fabric handle too, where [`VirtualMemory::fabric`] is announced; elsewhere this is
    /// [`Descriptor`](Self::Descriptor).
    Fabric,
}

/// Address space apart from memory.
///
/// A physical piece is mapped whole, and may be mapped at two addresses at once. Releasing a piece
/// that is still mapped keeps it alive until the last unmapping.
///
/// Source: CUDA driver guide, "Virtual Memory Management".
pub trait VirtualMemory: Send + Sync {
    /// Sizes of pieces and addresses of mappings are multiples of this.
    fn granularity_bytes(&self) -> u64;
    /// Takes address space. No memory is used and no access is possible.
    fn reserve(&self, size_bytes: u64) -> DriverResult<u64>;
    /// Gives address space back. All of it must be unmapped; size as reserved.
    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Makes a physical piece. It has no address yet.
    fn create(&self, size_bytes: u64, exportable: Exportable) -> DriverResult<PhysicalId>;
    /// Drops this process's hold on a piece.
    fn release(&self, piece: PhysicalId) -> DriverResult<()>;
    /// Puts a whole piece at `address` of reserved, unmapped space. No access yet.
    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()>;
    /// Allows reading and writing from `device` on a mapped range of whole pieces.
    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()>;
    /// Removes the mappings of a range of whole pieces. The caller makes sure that no work uses
    /// them any more.
    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Handles of pieces that mean something on other machines, if the device and the system allow
    /// them. The first call may ask the device.
    fn fabric(&self) -> Option<&dyn Fabric> {
        None
    }
    /// A descriptor for a piece that was created exportable.
    fn export(&self, piece: PhysicalId) -> DriverResult<OwnedFd>;
    /// A piece from another process's descriptor; the size is checked.
    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> DriverResult<PhysicalId>;
}

/// What a physical piece is called on all machines of one fabric: CUDA's `CUmemFabricHandle`. Its bytes
/// mean nothing to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricHandle(pub [u8; 64]);

/// Pieces that machines of one fabric share (several that are joined by NVLink, say).
pub trait Fabric: Send + Sync {
    /// The handle of a piece that was created with [`Exportable::Fabric`].
    fn export_handle(&self, piece: PhysicalId) -> DriverResult<FabricHandle>;
    /// The piece of a handle, wherever it lies.
    fn import_handle(&self, handle: &FabricHandle) -> DriverResult<PhysicalId>;
}

/// A stream-ordered pool of the driver: CUDA's `CUmemoryPool`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DriverPoolId(pub u64);

/// Bytes of a driver pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverPoolUsage {
    /// In callers' hands, and the most that ever was since the last reset.
    pub used_bytes: u64,
    /// High mark of `used_bytes`.
    pub used_high_bytes: u64,
    /// Held from the device.
    pub reserved_bytes: u64,
    /// High mark of `reserved_bytes`.
    pub reserved_high_bytes: u64,
}

/// Stream-ordered allocation by the driver itself: `cudaMallocAsync` and its relatives.
///
/// Source: CUDA programming guide, "Stream Ordered Memory Allocator".
pub trait MemoryPools: Send + Sync {
    /// The device's default pool.
    fn default_pool(&self) -> DriverResult<DriverPoolId>;
    /// A pool of one's own.
    fn create_pool(&self) -> DriverResult<DriverPoolId>;
    /// Destroys a pool of one's own; its memory goes when the last allocation is freed. Wait for that
    /// first, until [`usage`](Self::usage) says that nothing is left: after a pool was destroyed with a
    /// block in use, libcuda (580) crashed some calls later.
    fn destroy_pool(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// How many bytes the pool keeps when it synchronises.
    fn set_release_threshold(&self, pool: DriverPoolId, bytes: u64) -> DriverResult<()>;
    /// What [`set_release_threshold`](Self::set_release_threshold) set last, or 0.
    fn release_threshold(&self, pool: DriverPoolId) -> DriverResult<u64>;
    /// Says that somebody wants the pool to keep all its memory, or, once for each time, no more. The
    /// release threshold is `u64::MAX` from then on; when the last one goes it becomes what it was
    /// before the first. Counted for the pool, by whichever openings of its device in this process.
    fn keep_memory(&self, pool: DriverPoolId, keep: bool) -> DriverResult<()>;
    /// Allows every kind of reuse that the driver knows: after events, after work that happens to
    /// have finished, and by waits that the driver adds itself.
    fn allow_reuse(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// Lets `other` reach what the pool gives out, now and later. Twice is no error.
    fn open_pool(&self, pool: DriverPoolId, other: DeviceId) -> DriverResult<()>;
    /// Allocates in stream order.
    fn allocate_async(&self, pool: DriverPoolId, bytes: u64, on: StreamId) -> DriverResult<u64>;
    /// Frees in stream order.
    fn free_async(&self, address: u64, on: StreamId) -> DriverResult<()>;
    /// Gives back all but `keep_bytes` of idle memory. May wait.
    fn trim(&self, pool: DriverPoolId, keep_bytes: u64) -> DriverResult<()>;
    /// What the pool holds.
    fn usage(&self, pool: DriverPoolId) -> DriverResult<DriverPoolUsage>;
    /// Sets the high marks to the current values.
    fn reset_high_marks(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// What the device holds for allocations of captured graphs, which come from no pool.
    fn graph_usage(&self) -> DriverResult<DriverPoolUsage>;
    /// Sets the high marks of [`graph_usage`](Self::graph_usage) to the current values.
    fn reset_graph_high_marks(&self) -> DriverResult<()>;
    /// Gives idle memory of graphs back. May wait.
    fn trim_graphs(&self) -> DriverResult<()>;
}

/// Sharing of plain allocations between processes.
pub trait Ipc: Send + Sync {
    /// A handle for the allocation that starts at `base`. Its bytes mean nothing to us.
    fn share(&self, base: u64) -> DriverResult<[u8; 64]>;
    /// Maps another process's allocation. Refuses its own process's handles.
    fn open(&self, handle: &[u8; 64]) -> DriverResult<u64>;
    /// Unmaps what [`open`](Self::open) returned.
    fn close(&self, address: u64) -> DriverResult<()>;
}

/// Access between devices.
pub trait Peers: Send + Sync {
    /// Whether `other` can reach this device's memory.
    fn can_access(&self, other: DeviceId) -> DriverResult<bool>;
    /// Lets `other` reach this device's plain allocations, and those to come. Enabling twice is no error.
    fn enable_access(&self, other: DeviceId) -> DriverResult<()>;
    /// Submits a copy between two devices.
    fn copy_peer(
        &self,
        to: (DeviceId, u64),
        from: (DeviceId, u64),
        size_bytes: u64,
        stream: StreamId,
    ) -> DriverResult<()>;
}

/// A node of a graph under capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u64);

/// Capture of work into graphs.
pub trait Capture: Send + Sync {
    /// Starts capturing `stream` and returns the capture's id.
    fn begin(&self, stream: StreamId) -> DriverResult<u64>;
    /// Says that somebody may be capturing from now on, or, once for each time, that it is over. Between
    /// the two, calls of other threads do without what would break a capture.
    fn expect_captures(&self, expected: bool) -> DriverResult<()>;
    /// How often somebody said so and did not say that it is over. Never waits.
    fn expected(&self) -> DriverResult<u64>;
    /// Ends the capture that started on `stream`. A capture that broke, or that has streams which
    /// were not joined again, ends too, but with an error.
    fn end(&self, stream: StreamId) -> DriverResult<()>;
    /// The nodes that the next node on `stream` would depend on.
    fn frontier(&self, stream: StreamId) -> DriverResult<Vec<NodeId>>;
    /// The nodes that `node` depends on directly.
    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>>;
    /// Makes the next node on `stream` depend on these nodes of its capture, too. What others submit
    /// to the stream meanwhile keeps its order.
    fn add_to_frontier(&self, stream: StreamId, nodes: &[NodeId]) -> DriverResult<()>;
    /// Frees, in the capture that `stream` belongs to and behind these nodes of it, what that capture
    /// allocated. The stream stays where it is: nothing comes after the node by itself.
    fn free_behind(&self, address: u64, stream: StreamId, nodes: &[NodeId])
    -> DriverResult<NodeId>;
}

/// A process that holds memory of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Its number.
    pub process: u32,
    /// What it holds.
    pub used_bytes: u64,
}

/// Who holds memory of the device.
pub trait Processes: Send + Sync {
    /// All of them that can be seen from here.
    fn list(&self) -> DriverResult<Vec<ProcessUsage>>;
}
