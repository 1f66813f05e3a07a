//! The contract between allocators and devices.
//!
//! A driver owns device state and nothing else: it caches no memory, rounds no sizes and has no
//! allocation policy. The doc of each call states its preconditions and whether it may wait. Calls that
//! not every device has form *parts*, such as [`VirtualMemory`]. A part is reached through an accessor
//! that returns `None` if the driver lacks it. A driver that has a part implements all of its calls.
//!
//! All methods may be called from any thread. Addresses and sizes are in bytes of device memory. A call
//! that fails returns a [`DriverError`] with its kind. Unless its doc states otherwise, a failed call
//! changed nothing.
//!
//! - `cuda`: an NVIDIA GPU.
//! - `sim` and `host` (in the package `stratalloc-sim`): a simulated device without memory, and a device
//!   in host memory whose streams run on worker threads.
//! - `intercept`: the base of wrappers around a driver, such as those of `stratalloc-sim`: `faulty` makes
//!   calls fail, `gated` holds work back, `recorded` returns the addresses of a recording.
//! - `call`: the table of all calls. A new call must be added there.

#![expect(clippy::missing_errors_doc, reason = "all calls fail alike: see the header")]

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

pub use crate::error::Holder as ProcessUsage;
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId, ThreadNumber};

#[doc(hidden)]
pub mod call;
#[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
pub mod cuda;
mod holders;
mod intercept;
mod pinned;
#[doc(hidden)]
pub mod pool_users;

#[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
pub use cuda::Cuda;
pub(crate) use holders::{largest_holders, name_holders};
#[doc(hidden)]
pub use intercept::lacking;
pub use intercept::{Intercepted, Interceptor, Parts};
pub use pinned::{HostMemory, PinnedId, PinnedMemory, PinnedRange};

/// Result of a driver call.
pub type DriverResult<T> = Result<T, DriverError>;

/// Properties of a device. They do not change during the life of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Ordinal of the device.
    pub device: DeviceId,
    /// Human-readable name.
    pub name: String,
    /// Name of the driver, such as `sim`, `host` or `cuda`.
    pub driver: &'static str,
    /// Total memory.
    pub total_bytes: u64,
}

/// Free and total memory of a device at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free memory.
    pub free_bytes: u64,
    /// Total memory.
    pub total_bytes: u64,
}

/// Capture status of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureStatus {
    /// Not captured: work runs as it is submitted.
    None,
    /// Captured, with the id of the capture sequence.
    Active {
        /// Id, unique among all captures of the process.
        capture: u64,
    },
    /// The capture was invalidated. It must still be ended.
    Invalidated,
}

/// A device, as allocators use it.
pub trait Driver: fmt::Debug + Send + Sync {
    /// Returns the properties of the device. Never waits.
    fn info(&self) -> DeviceInfo;

    /// Makes the device's context current on the calling thread, in place of the previous one. Never
    /// waits.
    ///
    /// The default does nothing, for devices without contexts. The other calls work without this one. On
    /// CUDA, most of them then push the context and pop it again, which costs time. The driver, or
    /// another owner of the context, must live as long as the thread uses the device.
    fn make_current(&self) -> DriverResult<()> {
        Ok(())
    }

    /// Returns free and total memory. Never waits.
    fn memory_info(&self) -> DriverResult<MemoryInfo>;

    /// Allocates `size_bytes` (at least 1) of device memory and returns the address, aligned to at least
    /// 512 bytes. May wait for running work: drivers are free to synchronise.
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64>;

    /// Frees memory that [`allocate`](Self::allocate) returned. `size_bytes` is the size passed to that
    /// call. A real device waits for running work first.
    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()>;

    /// Creates a stream that does not synchronise with the default stream. Never waits.
    fn create_stream(&self) -> DriverResult<StreamId>;

    /// Destroys a stream that [`create_stream`](Self::create_stream) returned. Work already submitted to
    /// it still runs to its end.
    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// Waits until all work submitted to `stream` so far has finished.
    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()>;

    /// Waits until all work submitted to the device so far has finished. While any thread captures a
    /// stream, the call fails and invalidates that capture.
    fn synchronize_device(&self) -> DriverResult<()>;

    /// Creates an event without timing. It counts as finished until it is recorded. Never waits.
    fn create_event(&self) -> DriverResult<EventId>;

    /// Records the event at the current end of `stream`. Replaces an earlier record of the event. Never
    /// waits.
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()>;

    /// Returns whether all work before the event's last record has finished. Never waits. Not allowed
    /// while the calling thread captures a stream.
    fn query_event(&self, event: EventId) -> DriverResult<bool>;

    /// Waits until all work before the event's last record has finished.
    fn synchronize_event(&self, event: EventId) -> DriverResult<()>;

    /// Makes later work of `stream` wait for the event. The calling thread does not wait. If the event
    /// was recorded in a capture, `stream` joins that capture. A captured stream cannot wait for an event
    /// from outside its capture: such a wait fails and invalidates the capture.
    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()>;

    /// Destroys an event. Never waits.
    fn destroy_event(&self, event: EventId) -> DriverResult<()>;

    /// Submits a copy of `size_bytes` between two device ranges that do not overlap. Both ranges must
    /// stay valid until the copy has finished.
    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()>;

    /// Copies host bytes to the device in stream order and waits for the copy.
    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()>;

    /// Copies device bytes to the host in stream order and waits for the copy.
    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()>;

    /// Submits a fill of a device range with one byte value.
    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()>;

    /// Returns whether `stream` is being captured. Never waits.
    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus>;

    /// Returns whether `stream` is the per-thread default stream. The id of that stream names a different
    /// stream on each thread: a call with it uses the calling thread's own. Work that two threads submit
    /// under this id is unordered, and a wait for it covers only the calling thread's work. The answer
    /// for a stream never changes. Never waits.
    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        let _ = stream;
        false
    }

    /// Returns the calls for virtual memory, if the device supports it.
    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        None
    }

    /// Returns the calls for stream-ordered memory pools, if the device supports them.
    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        None
    }

    /// Returns the calls that share memory from [`Driver::allocate`] with other processes, if supported.
    fn ipc(&self) -> Option<&dyn Ipc> {
        None
    }

    /// Returns the calls for access between devices, if supported.
    fn peers(&self) -> Option<&dyn Peers> {
        None
    }

    /// Returns the calls for stream capture, if supported.
    fn capture(&self) -> Option<&dyn Capture> {
        None
    }

    /// Returns the list of processes that hold memory of the device, if it is available.
    fn processes(&self) -> Option<&dyn Processes> {
        None
    }

    /// Returns the calls for pinned memory of the program, if supported.
    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        None
    }

    /// Returns the calls for page-locked host memory that the program accesses by address, if supported.
    fn host_memory(&self) -> Option<&dyn HostMemory> {
        None
    }
}

/// Returns the calling thread's number if `stream` is the per-thread default stream.
pub(crate) fn thread_of(driver: &dyn Driver, stream: StreamId) -> Option<ThreadNumber> {
    driver.is_per_thread_stream(stream).then(ThreadNumber::current)
}

/// A stream. For the per-thread default stream, which is a different stream on each thread, the second
/// field is the number of the thread. Events recorded on one timeline finish in order.
pub(crate) type Timeline = (StreamId, Option<ThreadNumber>);

/// Returns the timeline of `stream` on the calling thread.
#[inline]
pub(crate) fn timeline_of(driver: &dyn Driver, stream: StreamId) -> Timeline {
    (stream, thread_of(driver, stream))
}

/// Returns the capture status of a stream. A destroyed stream counts as not captured, and so does every
/// stream if the driver does not support captures.
///
/// # Errors
///
/// [`DriverError`] of a kind other than `InvalidValue` and `NotSupported`. It is then unknown whether the
/// stream is captured.
pub(crate) fn capture_status_of(
    driver: &dyn Driver,
    stream: StreamId,
) -> DriverResult<CaptureStatus> {
    driver.capture_status(stream).or_else(|error| match error.kind() {
        DriverErrorKind::InvalidValue | DriverErrorKind::NotSupported => Ok(CaptureStatus::None),
        _ => Err(error),
    })
}

/// Returns true if work submitted to `stream` now may become part of a graph. (An event recorded in a
/// graph never finishes.) False for a destroyed stream and if the driver has no captures. If the status
/// cannot be read for another reason, returns true, except on a lost device: there the caller's next
/// driver call fails anyway.
#[inline]
pub(crate) fn may_be_captured(driver: &dyn Driver, stream: StreamId) -> bool {
    match capture_status_of(driver, stream) {
        Ok(status) => status != CaptureStatus::None,
        Err(error) => error.kind() != DriverErrorKind::DeviceLost,
    }
}

/// Records an event, and fails if the record may have become part of a graph.
///
/// # Errors
///
/// [`DriverError`], of kind `CaptureActive` if [`may_be_captured`] returns true after the record. The
/// capture may have begun before the record or after it. In both cases the event can be recorded again
/// later.
#[inline]
pub(crate) fn record_outside_graphs(
    driver: &dyn Driver,
    event: EventId,
    stream: StreamId,
) -> DriverResult<()> {
    driver.record_event(event, stream)?;
    if may_be_captured(driver, stream) { Err(captured(stream)) } else { Ok(()) }
}

/// Returns true if an allocator that uses this driver expects captures. It does so while it routes
/// requests to a private pool (an open *scope*).
pub(crate) fn expects_captures(driver: &dyn Driver) -> bool {
    // If `expected` fails, assume that captures are expected.
    driver.capture().is_some_and(|capture| capture.expected() != Ok(0))
}

/// Waits for all work of the device, unless captures are expected: the wait would invalidate them,
/// whichever thread captures.
///
/// # Errors
///
/// [`DriverError`], of kind `CaptureActive` if captures are expected. The call has not waited then.
pub(crate) fn synchronize_outside_captures(driver: &dyn Driver) -> DriverResult<()> {
    if !expects_captures(driver) {
        return driver.synchronize_device();
    }
    let message = "a capture is active, and the call would break it";
    Err(DriverError::new(DriverErrorKind::CaptureActive, "synchronize_device", 0, message))
}

/// Replaces the error `CaptureActive` of a wait with success, for callers that continue without the wait.
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

/// Returns the error for an event that cannot be recorded outside a graph, because its stream is
/// captured.
pub(crate) fn captured(stream: StreamId) -> DriverError {
    let message = format!("stream {stream} is being captured");
    DriverError::new(DriverErrorKind::CaptureActive, "record_event", 0, message)
}

/// Gives the device `device` access to this device's plain allocations, existing and future. It does
/// not give this device access to `device`. Mapped pages and stream-ordered pools need calls of their
/// own.
///
/// # Errors
///
/// [`DriverError`] when `device` is this device or cannot access this device's memory, or the driver
/// fails.
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

/// A piece of physical memory that can be mapped: CUDA's `CUmemGenericAllocationHandle`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PhysicalId(pub u64);

/// States whether and how a physical piece can be shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exportable {
    /// It cannot be shared.
    No,
    /// It can be exported as a file descriptor.
    Descriptor,
    /// It can also be exported as a fabric handle, if [`VirtualMemory::fabric`] returns `Some`. If not,
    /// this is the same as [`Descriptor`](Self::Descriptor).
    Fabric,
}

/// Virtual memory management: address space and physical memory are separate.
///
/// A physical piece is mapped whole, and may be mapped at two addresses at once. A piece that is
/// released while it is mapped lives until its last unmapping.
///
/// Source: CUDA driver guide, "Virtual Memory Management".
pub trait VirtualMemory: Send + Sync {
    /// Returns the granularity: sizes of pieces and addresses of mappings are multiples of it.
    fn granularity_bytes(&self) -> u64;
    /// Reserves address space and returns its start. The range has no memory until a piece is mapped
    /// there.
    fn reserve(&self, size_bytes: u64) -> DriverResult<u64>;
    /// Unreserves address space, all of which must be unmapped. `size_bytes` is the size passed to
    /// `reserve`.
    fn unreserve(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Creates a physical piece. It has no address yet.
    fn create(&self, size_bytes: u64, exportable: Exportable) -> DriverResult<PhysicalId>;
    /// Releases this process's reference to a piece.
    fn release(&self, piece: PhysicalId) -> DriverResult<()>;
    /// Maps a whole piece at `address` of reserved, unmapped space. The range cannot be accessed before
    /// [`set_access`](Self::set_access).
    fn map(&self, address: u64, size_bytes: u64, piece: PhysicalId) -> DriverResult<()>;
    /// Gives `device` read and write access to a mapped range of whole pieces.
    fn set_access(&self, address: u64, size_bytes: u64, device: DeviceId) -> DriverResult<()>;
    /// Unmaps a range of whole pieces. The caller makes sure that no work uses the range any more.
    fn unmap(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Returns the calls for fabric handles, if the device and the system support them. The first call
    /// may query the device.
    fn fabric(&self) -> Option<&dyn Fabric> {
        None
    }
    /// Returns a file descriptor for a piece, which must have been created exportable.
    fn export(&self, piece: PhysicalId) -> DriverResult<OwnedFd>;
    /// Imports a piece from another process's descriptor. If the piece's size is not `size_bytes`, this
    /// call or the mapping of the piece fails.
    fn import(&self, descriptor: OwnedFd, size_bytes: u64) -> DriverResult<PhysicalId>;
}

/// A handle of a physical piece that is valid on all machines of one fabric: CUDA's `CUmemFabricHandle`.
/// Its bytes are opaque.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricHandle(pub [u8; 64]);

/// Sharing of pieces between machines of one fabric, such as several machines joined by NVLink.
pub trait Fabric: Send + Sync {
    /// Returns the handle of a piece that was created with [`Exportable::Fabric`].
    fn export_handle(&self, piece: PhysicalId) -> DriverResult<FabricHandle>;
    /// Imports the piece that a handle names. The piece may lie on another machine.
    fn import_handle(&self, handle: &FabricHandle) -> DriverResult<PhysicalId>;
}

/// A stream-ordered pool of the driver: CUDA's `CUmemoryPool`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DriverPoolId(pub u64);

/// Byte counters of a driver pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverPoolUsage {
    /// Bytes allocated to callers.
    pub used_bytes: u64,
    /// Maximum of `used_bytes` since the last reset.
    pub used_high_bytes: u64,
    /// Bytes that the pool holds from the device.
    pub reserved_bytes: u64,
    /// Maximum of `reserved_bytes` since the last reset.
    pub reserved_high_bytes: u64,
}

/// Stream-ordered allocation by the driver: `cudaMallocAsync` and related calls.
///
/// Source: CUDA programming guide, "Stream Ordered Memory Allocator".
pub trait MemoryPools: Send + Sync {
    /// Returns the device's default pool.
    fn default_pool(&self) -> DriverResult<DriverPoolId>;
    /// Creates a pool.
    fn create_pool(&self) -> DriverResult<DriverPoolId>;
    /// Destroys a pool that [`create_pool`](Self::create_pool) returned. Call it only when
    /// [`usage`](Self::usage) reports no bytes in use: after a pool was destroyed with a block in use,
    /// libcuda (580) has crashed in a later call.
    fn destroy_pool(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// Sets the release threshold: while the pool has more bytes reserved, the driver releases free
    /// memory of the pool when it synchronises.
    fn set_release_threshold(&self, pool: DriverPoolId, bytes: u64) -> DriverResult<()>;
    /// Returns the pool's release threshold, initially 0.
    fn release_threshold(&self, pool: DriverPoolId) -> DriverResult<u64>;
    /// Adds (`keep`) or removes one user that needs the pool to keep all its memory. While the pool has
    /// users, its release threshold is `u64::MAX`. Removing the last user restores the threshold from
    /// before the first. The users of a pool are counted over all drivers of this process that have the
    /// device open.
    fn keep_memory(&self, pool: DriverPoolId, keep: bool) -> DriverResult<()>;
    /// Enables the three kinds of reuse that the driver supports: after events, after work that happens
    /// to have finished, and with dependencies that the driver inserts.
    fn allow_reuse(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// Gives `other` access to the pool's allocations, existing and future. A repeated call is no error.
    fn open_pool(&self, pool: DriverPoolId, other: DeviceId) -> DriverResult<()>;
    /// Allocates in stream order.
    fn allocate_async(&self, pool: DriverPoolId, bytes: u64, on: StreamId) -> DriverResult<u64>;
    /// Frees in stream order.
    fn free_async(&self, address: u64, on: StreamId) -> DriverResult<()>;
    /// Releases free memory of the pool until at most `keep_bytes` are reserved. May wait.
    fn trim(&self, pool: DriverPoolId, keep_bytes: u64) -> DriverResult<()>;
    /// Returns the pool's counters.
    fn usage(&self, pool: DriverPoolId) -> DriverResult<DriverPoolUsage>;
    /// Resets the high marks (the maxima in [`usage`](Self::usage)) to the current values.
    fn reset_high_marks(&self, pool: DriverPoolId) -> DriverResult<()>;
    /// Returns the counters of memory that the device holds for captured graphs. This memory belongs to
    /// no pool.
    fn graph_usage(&self) -> DriverResult<DriverPoolUsage>;
    /// Sets the high marks of [`graph_usage`](Self::graph_usage) to the current values.
    fn reset_graph_high_marks(&self) -> DriverResult<()>;
    /// Releases idle memory of graphs. May wait.
    fn trim_graphs(&self) -> DriverResult<()>;
}

/// Sharing of plain allocations between processes.
pub trait Ipc: Send + Sync {
    /// Returns a handle for the allocation that starts at `base`. Its bytes are opaque.
    fn share(&self, base: u64) -> DriverResult<[u8; 64]>;
    /// Maps another process's allocation and returns its address. Fails for a handle of this process.
    fn open(&self, handle: &[u8; 64]) -> DriverResult<u64>;
    /// Unmaps an address that [`open`](Self::open) returned.
    fn close(&self, address: u64) -> DriverResult<()>;
}

/// Access between devices.
pub trait Peers: Send + Sync {
    /// Returns whether `other` can access this device's memory.
    fn can_access(&self, other: DeviceId) -> DriverResult<bool>;
    /// Gives `other` access to this device's plain allocations, existing and future. A repeated call is
    /// no error.
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

/// A node of a graph that is being captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u64);

/// Stream capture.
pub trait Capture: Send + Sync {
    /// Starts capturing `stream` and returns the capture's id.
    fn begin(&self, stream: StreamId) -> DriverResult<u64>;
    /// Increments (`expected`) or decrements the number of expected captures. While the number is not 0,
    /// the allocators and the driver avoid calls that would invalidate a capture of another thread.
    fn expect_captures(&self, expected: bool) -> DriverResult<()>;
    /// Returns the number of expected captures. Never waits.
    fn expected(&self) -> DriverResult<u64>;
    /// Ends the capture that began on `stream`. Fails if the capture was invalidated, or if a stream
    /// that joined it was not joined back.
    fn end(&self, stream: StreamId) -> DriverResult<()>;
    /// Returns the nodes that the next node on `stream` would depend on.
    fn frontier(&self, stream: StreamId) -> DriverResult<Vec<NodeId>>;
    /// Returns the nodes that `node` depends on directly.
    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>>;
    /// Adds nodes of `stream`'s capture to the dependencies of the next node on `stream`. Removes none,
    /// so work that another thread submits to the stream at the same time still precedes that node.
    fn add_to_frontier(&self, stream: StreamId, nodes: &[NodeId]) -> DriverResult<()>;
    /// Adds a graph node that frees memory which the capture of `stream` allocated. The node depends on
    /// `nodes`. Returns the node. The stream's dependencies do not change, so later work does not wait
    /// for the free.
    fn free_behind(&self, address: u64, stream: StreamId, nodes: &[NodeId])
    -> DriverResult<NodeId>;
}

/// The processes that hold memory of the device.
pub trait Processes: Send + Sync {
    /// Lists the processes that the driver can see and whose bytes it knows.
    fn list(&self) -> DriverResult<Vec<ProcessUsage>>;
}

/// A driver that can hold back the work of a stream.
#[doc(hidden)]
pub trait HoldsWork: Driver {
    /// A closed gate. Dropping it lets the stream run. The drop neither waits nor fails.
    type Gate: fmt::Debug + Send + 'static;

    /// Holds back work that is submitted to `stream` from now on. Never waits. A call that waits for
    /// such work returns only after another thread has dropped the gate.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device cannot hold back work.
    fn hold_back(&self, stream: StreamId) -> DriverResult<Self::Gate>;
}

impl<D: HoldsWork + ?Sized> HoldsWork for Arc<D> {
    type Gate = D::Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<Self::Gate> {
        (**self).hold_back(stream)
    }
}
