//! CUDA devices.
//!
//! The driver library (`libcuda`) is loaded when the first device is opened. Without it, opening fails
//! with an error. Which optional parts a device has depends on the functions that the library exports and
//! on the attributes of the device. The library is not called through cudarc, for two reasons: cudarc's
//! result codes are a Rust enum, which cannot hold the codes of newer drivers, and the program chooses
//! which version of cudarc is linked.
//!
//! The device's **primary context** is used, as in PyTorch and the CUDA runtime, so memory, streams and
//! events are shared with them. Each call that needs the context makes it current and then restores the
//! previous one. Stream-ordered allocation and freeing need it on default streams only. The id of a
//! stream is its CUDA handle, also for streams of other libraries: 0 and 1 are the legacy default stream,
//! 2 is the per-thread default stream.
//!
//! While any thread captures in the mode `global`, allocating, freeing and querying an event would
//! invalidate that capture. So these calls set the thread's capture mode to relaxed while they run, some
//! of them only while captures are expected.
//!
//! An error of a kernel stays with the context. The first call that reports it fails with the kind
//! `DeviceLost`, and so does every later call.
//!
//! Read next: `api` (the library), `mapping`, `pinned`, `pools`, `graph`, `others`, `across`,
//! `processes`, `gates`, `fabric`.

mod across;
mod api;
#[cfg(feature = "cudarc")]
mod cudarc;
mod fabric;
mod gates;
mod graph;
mod mapping;
mod others;
mod pinned;
mod pools;
mod processes;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use hashbrown::HashSet;
use parking_lot::Mutex;

use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverPoolId, DriverResult, HostMemory, Ipc,
    MemoryInfo, MemoryPools, Peers, PinnedMemory, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};
use across::INVALID_HANDLE;
use api::{Api, Status, api, got};
#[cfg(feature = "cudarc")]
pub use cudarc::{CudaVec, stream_of};
#[cfg(feature = "cudarc")]
pub(crate) use cudarc::{is_on, with_address};
pub use gates::Gate;
use gates::Gates;
pub use graph::Graph;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: u32 = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: u32 = 2;
/// `CU_STREAM_PER_THREAD`, the per-thread default stream.
const PER_THREAD_STREAM: u64 = 2;
/// The largest handle that names a default stream. (0 and 1 are the legacy default stream.)
const LAST_DEFAULT_STREAM: u64 = PER_THREAD_STREAM;
/// `CUDA_ERROR_INVALID_CONTEXT`.
const INVALID_CONTEXT: u32 = 201;
/// Results of a call that needs another current context: the above, and `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const WRONG_CONTEXT: [u32; 2] = [INVALID_CONTEXT, 709];

/// `CUdevice_attribute` numbers.
mod attribute {
    pub(super) const VIRTUAL_MEMORY: i32 = 102;
    pub(super) const DESCRIPTORS: i32 = 103;
    pub(super) const DIRECT: i32 = 110;
    pub(super) const MEMORY_POOLS: i32 = 115;
    pub(super) const FABRIC: i32 = 128;
    pub(super) const HOST_NUMA_ID: i32 = 134;
}

/// One CUDA device.
///
/// Dropping it releases the primary context. Memory that is still allocated stays until the process ends
/// or the context is destroyed.
#[derive(Debug)]
pub struct Cuda {
    api: &'static Api,
    info: DeviceInfo,
    device: i32,
    context: u64,
    can: Abilities,
    granularity_bytes: u64,
    /// PCI bus id, if the driver returned one. NVML (see `processes`) identifies devices by it.
    bus: Option<String>,
    /// Streams that this driver created.
    streams: Mutex<HashSet<u64>>,
    /// Pools that this driver created.
    own_pools: Mutex<HashSet<u64>>,
    /// Whether fabric handles are allowed. `None` until an attempt to create one has succeeded or was
    /// refused.
    fabric: Mutex<Option<bool>>,
    /// Whether pieces are created for GPUDirect RDMA (see `mapping`). `None` until a trial has shown it.
    direct: Mutex<Option<bool>>,
    /// Numbers with which the work of streams is held back.
    gates: Mutex<Gates>,
    /// Pinned memory.
    slabs: Mutex<pinned::Slabs>,
    /// Number of expected captures.
    captures_expected: AtomicUsize,
    /// True once host memory was allocated or registered. Captures are not announced to its allocators.
    has_host_memory: AtomicBool,
    /// Other devices whose primary contexts are retained: CUDA's device handle, and the context.
    others: Mutex<Vec<(i32, u64)>>,
    /// Stream for recording events after the work of streams of other contexts (see `across`). Created
    /// at the first use.
    bridge: Mutex<Option<u64>>,
}

/// Optional features that the device and the library support.
#[derive(Clone, Copy, Debug, Default)]
struct Abilities {
    virtual_memory: bool,
    descriptors: bool,
    direct: bool,
    memory_pools: bool,
    capture: bool,
    ipc: bool,
    peers: bool,
    /// Whether the device supports fabric handles. `has_fabric` finds out at the first use whether the
    /// system allows them.
    fabric: bool,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("libcuda")
    }
}

/// Guard: if it pushed a context, the drop pops it, so the previous context is current again.
struct Entered(Option<&'static Api>);

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(api) = self.0 {
            let mut popped = 0;
            // This thread has pushed the context. A failed pop cannot be handled here.
            let _ = api.context_pop(&mut popped);
        }
    }
}

/// Guard: restores the thread's capture mode.
struct Relaxed {
    api: &'static Api,
    before: u32,
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // This thread has exchanged the mode before, so this exchange succeeds.
        let _ = self.api.exchange_capture_mode(&mut self.before);
    }
}

impl Cuda {
    /// Returns the number of devices.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when there is no CUDA driver, or it cannot start.
    pub fn count() -> DriverResult<u32> {
        let api = api()?;
        let count: i32 = got(|count| api.device_count(count))?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns the version of the driver API: 12090 is 12.9.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when there is no CUDA driver.
    pub fn driver_version() -> DriverResult<i32> {
        let api = api()?;
        got(|version| api.driver_version(version))
    }

    /// Opens a device and retains its primary context.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when there is no CUDA driver or no such device.
    pub fn open(device: DeviceId) -> DriverResult<Self> {
        let api = api()?;
        let ordinal = i32::try_from(device.0).unwrap_or(i32::MAX);
        let handle = got(|handle| api.device_get(handle, ordinal))?;
        let mut name = [0; 256];
        api.device_name(&mut name, 256, handle).ok()?;
        let total = got(|total| api.device_total(total, handle))?;
        let has = |attribute| {
            got(|value| api.device_attribute(value, attribute, handle))
                .is_ok_and(|value| value != 0)
        };
        let can = Abilities {
            virtual_memory: has(attribute::VIRTUAL_MEMORY) && api.has_virtual_memory(),
            descriptors: has(attribute::DESCRIPTORS),
            direct: has(attribute::DIRECT),
            memory_pools: has(attribute::MEMORY_POOLS) && api.has_pools(),
            capture: api.has_captures(),
            ipc: api.has_ipc(),
            peers: api.has_peers(),
            fabric: has(attribute::FABRIC),
        };
        let context = got(|context| api.context_retain(context, handle))?;
        let mut bus = [0; 32];
        let has_bus = api.device_bus(&mut bus, 32, handle).ok().is_ok();
        let info =
            DeviceInfo { device, name: text_of(&name), driver: "cuda", total_bytes: total as u64 };
        let mut cuda = Self {
            api,
            info,
            device: handle,
            context,
            can,
            granularity_bytes: 0,
            bus: has_bus.then(|| text_of(&bus)),
            streams: Mutex::default(),
            own_pools: Mutex::default(),
            fabric: Mutex::default(),
            direct: Mutex::default(),
            gates: Mutex::default(),
            slabs: Mutex::default(),
            // If the device has no calls for captures, no caller can announce one. So the count starts at
            // 1: a capture is always expected.
            captures_expected: AtomicUsize::new(usize::from(!can.capture)),
            has_host_memory: AtomicBool::new(false),
            others: Mutex::default(),
            bridge: Mutex::default(),
        };
        if can.virtual_memory {
            match cuda.query_granularity() {
                Ok(bytes) if bytes > 0 => cuda.granularity_bytes = bytes,
                Err(error) if error.kind() == DriverErrorKind::DeviceLost => return Err(error),
                _ => cuda.can.virtual_memory = false,
            }
        }
        Ok(cuda)
    }

    /// Returns the handle of the primary context, for other libraries.
    #[must_use]
    pub fn context(&self) -> u64 {
        self.context
    }

    /// Makes the context current while the guard lives.
    #[inline]
    fn enter(&self) -> DriverResult<Entered> {
        self.enter_context(self.context)
    }

    /// Makes the context current for a call on `stream`, if `stream` is a default stream: the handles of
    /// default streams mean the streams of the current context. Any other handle determines its context, so
    /// for other streams the function does not even query the current context.
    ///
    /// Source: CUDA driver API, `cuMemAllocFromPoolAsync` and `cuMemFreeAsync`: an error is "default
    /// stream specified with no current context". `cuEventRecord` and the calls that return a stream's
    /// capture do not document it. They work without a current context and under another one (driver 580).
    #[inline]
    fn enter_for(&self, stream: StreamId) -> DriverResult<Entered> {
        if stream.0 > LAST_DEFAULT_STREAM { Ok(Entered(None)) } else { self.enter() }
    }

    /// Runs a stream-ordered call on `stream`, with the capture mode relaxed if captures are expected.
    #[inline]
    fn in_order_of(&self, stream: StreamId, call: impl FnMut() -> Status) -> DriverResult<()> {
        let _relaxed = self.relax_if_captures();
        self.on(stream, call)?.ok()
    }

    /// Runs a call on `stream`. If the driver reports a wrong context, repeats it with the device's context
    /// current.
    #[inline]
    fn on(&self, stream: StreamId, mut call: impl FnMut() -> Status) -> DriverResult<Status> {
        let entered = self.enter_for(stream)?;
        let status = call();
        drop(entered);
        if !status.code().is_some_and(|code| WRONG_CONTEXT.contains(&code)) {
            return Ok(status);
        }
        // The failed call has had no effect, so it can be repeated.
        let _entered = self.enter()?;
        Ok(call())
    }

    /// Makes the context current and relaxes the thread's capture mode (see `relax`), while the guards
    /// live.
    fn enter_relaxed(&self) -> DriverResult<(Option<Relaxed>, Entered)> {
        let entered = self.enter()?;
        Ok((self.relax(), entered))
    }

    #[inline]
    fn enter_context(&self, context: u64) -> DriverResult<Entered> {
        let current = got(|current| self.api.context_current(current))?;
        if current == context {
            return Ok(Entered(None));
        }
        self.api.context_push(context).ok()?;
        Ok(Entered(Some(self.api)))
    }

    /// Calls [`relax`](Self::relax) if captures are expected or are not announced. If not, saves two calls
    /// of the library.
    #[inline]
    fn relax_if_captures(&self) -> Option<Relaxed> {
        let may_be_captured = self.captures_expected.load(Ordering::Relaxed) != 0
            || self.has_host_memory.load(Ordering::Relaxed);
        if may_be_captured { self.relax() } else { None }
    }

    /// Relaxes the thread's capture mode while the guard lives. The thread's calls then invalidate no
    /// capture. That is safe, because the calls made under the guard do not depend on the order of
    /// captured work.
    fn relax(&self) -> Option<Relaxed> {
        let mut mode = RELAXED;
        let exchanged = self.api.exchange_capture_mode(&mut mode).ok().is_ok();
        exchanged.then_some(Relaxed { api: self.api, before: mode })
    }
}

/// Returns the text before the first zero.
fn text_of(bytes: &[u8]) -> String {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

fn size(bytes: u64) -> DriverResult<usize> {
    usize::try_from(bytes).map_err(|_| {
        let message = format!("{bytes} bytes are more than an address can count");
        DriverError::new(DriverErrorKind::InvalidValue, "size", 0, message)
    })
}

fn foreign(call: &'static str, what: &str, handle: u64) -> DriverError {
    let message = format!("unknown {what} {handle:#x}: not created by this driver");
    DriverError::new(DriverErrorKind::InvalidValue, call, 0, message)
}

impl Driver for Cuda {
    fn info(&self) -> DeviceInfo {
        self.info.clone()
    }

    /// Replaces the thread's current context, as `cudaSetDevice` does.
    fn make_current(&self) -> DriverResult<()> {
        self.api.context_set(self.context).ok()
    }

    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        self.api.memory_info(&mut free, &mut total).ok()?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        let _ready = self.enter_relaxed()?;
        let bytes = size(size_bytes)?;
        got(|address| self.api.memory_allocate(address, bytes))
    }

    fn free(&self, address: u64, _size_bytes: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.memory_free(address).ok()
    }

    fn create_stream(&self) -> DriverResult<StreamId> {
        let _entered = self.enter()?;
        let stream = got(|stream| self.api.stream_create(stream, NON_BLOCKING))?;
        self.streams.lock().insert(stream);
        Ok(StreamId(stream))
    }

    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        // Locked during the call: once the stream is destroyed, `create_stream` on another thread may get
        // and insert the same handle, which `remove` below must not delete.
        let mut streams = self.streams.lock();
        if !streams.contains(&stream.0) {
            return Err(foreign("cuStreamDestroy_v2", "stream", stream.0));
        }
        let _entered = self.enter()?;
        self.api.stream_destroy(stream.0).ok()?;
        streams.remove(&stream.0);
        self.gates.lock().forget(stream.0);
        Ok(())
    }

    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        // Another stream may be captured, and this call must not invalidate that capture.
        let _relaxed = self.relax();
        self.api.stream_synchronize(stream.0).ok()
    }

    fn synchronize_device(&self) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.context_synchronize().ok()
    }

    fn create_event(&self) -> DriverResult<EventId> {
        let _entered = self.enter()?;
        got(|event| self.api.event_create(event, NO_TIMING)).map(EventId)
    }

    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        let status = self.on(stream, || self.api.event_record(event.0, stream.0))?;
        if status.code() == Some(INVALID_HANDLE) && stream.0 > LAST_DEFAULT_STREAM {
            return self.record_across(event, stream, status);
        }
        status.ok()
    }

    fn query_event(&self, event: EventId) -> DriverResult<bool> {
        let _relaxed = self.relax_if_captures();
        self.api.event_query(event.0).finished()
    }

    fn synchronize_event(&self, event: EventId) -> DriverResult<()> {
        let _relaxed = self.relax_if_captures();
        self.api.event_synchronize(event.0).ok()
    }

    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.stream_wait(stream.0, event.0, 0).ok()
    }

    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.api.event_destroy(event.0).ok()
    }

    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.copy_within(to, from, size(size_bytes)?, stream.0).ok()
    }

    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.copy_from_host(to, from, stream.0)
    }

    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.copy_to_host(to, from, stream.0)
    }

    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        let _entered = self.enter()?;
        self.api.fill(to, byte, size(size_bytes)?, stream.0).ok()
    }

    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        let status = self.enter_for(stream).and_then(|_entered| self.status_of(stream));
        match status {
            Err(error) if WRONG_CONTEXT.map(i64::from).contains(&error.code()) => {
                let _entered = self.enter()?;
                self.status_of(stream)
            }
            status => status,
        }
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        stream.0 == PER_THREAD_STREAM
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.can.virtual_memory.then_some(self as &dyn VirtualMemory)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        self.can.memory_pools.then_some(self as &dyn MemoryPools)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.can.ipc.then_some(self as &dyn Ipc)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        (self.can.peers && matches!(Self::count(), Ok(2..))).then_some(self as &dyn Peers)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        self.can.capture.then_some(self as &dyn Capture)
    }

    /// The first call in the process loads NVML, which is slow.
    fn processes(&self) -> Option<&dyn Processes> {
        self.has_process_list().then_some(self as &dyn Processes)
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        self.api.has_pinned_memory().then_some(self as &dyn PinnedMemory)
    }

    fn host_memory(&self) -> Option<&dyn HostMemory> {
        self.api.has_host_memory().then_some(self as &dyn HostMemory)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let streams = std::mem::take(&mut *self.streams.lock());
        let pools = std::mem::take(&mut *self.own_pools.lock());
        // Another thread may be capturing in this context, and these calls must not invalidate that
        // capture.
        let _relaxed = self.relax();
        if let Ok(_entered) = self.enter() {
            // A failed call leaks the object. A drop cannot report it.
            let bridge = self.bridge.lock().take();
            streams
                .iter()
                .chain(&bridge)
                .for_each(|stream| drop(self.api.stream_destroy(*stream).ok()));
            // A pool with a block in use is not destroyed: see `MemoryPools::destroy_pool`.
            let is_empty =
                |pool: &&u64| self.usage(DriverPoolId(**pool)).is_ok_and(|u| u.used_bytes == 0);
            let empty = pools.iter().filter(is_empty);
            empty.for_each(|pool| drop(self.api.pool_destroy(*pool).ok()));
        }
        for (device, _) in std::mem::take(&mut *self.others.lock()) {
            let _ = self.api.context_release(device);
        }
        let _ = self.api.context_release(self.device);
    }
}
