//! The functions of the driver library, each looked up by name when the library is loaded.
//!
//! This is the only list of signatures. A function that an older driver lacks is `None`. Calling it
//! returns an error with its name. Result codes are plain numbers, because newer drivers return codes
//! that are unknown here. Handles are 64-bit numbers: the library's handles are pointers to its own
//! objects, and are never dereferenced here.
//!
//! Safety relies on the arguments: handles and addresses come from this driver, or the caller is
//! responsible for them. The library checks addresses, but not the handles of streams, events and
//! graphs.
//!
//! Source of names and signatures: `cuda.h`.
#![expect(unsafe_code, reason = "calling a foreign library")]

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_void};
use std::mem::transmute;
use std::ptr::NonNull;
use std::sync::OnceLock;

use libloading::Library;

use crate::driver::DriverResult;
use crate::error::{DriverError, DriverErrorKind};

/// Result of a call: the function's name and the library's code. The code is `None` if the function is
/// absent.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(super) struct Status {
    call: &'static str,
    code: Option<u32>,
}

/// `CUDA_SUCCESS`.
const SUCCESS: u32 = 0;
/// `CUDA_ERROR_NOT_READY`: not a failure, the work is unfinished.
const NOT_READY: u32 = 600;

impl Status {
    pub(super) fn code(self) -> Option<u32> {
        self.code
    }

    /// Returns whether the work has finished. Unfinished work is not an error.
    pub(super) fn finished(self) -> DriverResult<bool> {
        match self.code {
            Some(NOT_READY) => Ok(false),
            _ => self.ok().map(|()| true),
        }
    }

    pub(super) fn ok(self) -> DriverResult<()> {
        match self.code {
            Some(SUCCESS) => Ok(()),
            Some(code) => Err(self.error(code)),
            None => {
                let message = "this driver lacks the function";
                Err(DriverError::new(DriverErrorKind::NotSupported, self.call, 0, message))
            }
        }
    }

    #[cold]
    fn error(self, code: u32) -> DriverError {
        let text = API.get().and_then(|api| api.as_ref().ok()).map(|api| api.describe(code));
        let message = text.unwrap_or_else(|| "unknown code".to_owned());
        DriverError::new(kind_of(code), self.call, i64::from(code), message)
    }
}

/// Returns the value that a call writes to its first argument.
#[inline]
pub(super) fn got<T: Default>(call: impl FnOnce(&mut T) -> Status) -> DriverResult<T> {
    let mut value = T::default();
    call(&mut value).ok()?;
    Ok(value)
}

/// Returns the error kind of a code.
pub(super) fn kind_of(code: u32) -> DriverErrorKind {
    match code {
        2 => DriverErrorKind::OutOfMemory,
        801 | 800 => DriverErrorKind::NotSupported,
        // 709: the stream's context was destroyed, and the stream with it.
        1 | 400 | 709 => DriverErrorKind::InvalidValue,
        900..=908 => DriverErrorKind::CaptureActive,
        // An error of a kernel or of the hardware lasts until the process ends. So does the code of a
        // driver that is shutting down.
        4 | 214 | 220 | 226 | 700 | 702 | 710 | 714..=719 | 721 | 999 => {
            DriverErrorKind::DeviceLost
        }
        _ => DriverErrorKind::Other,
    }
}

/// Returns the address of a function in the library. The result is untyped, so this is compiled once
/// and not once per signature.
fn address_of(library: &Library, name: &str) -> Option<NonNull<c_void>> {
    // SAFETY: any symbol may be read as an untyped pointer. The pointer is not dereferenced here.
    let found = unsafe { library.get::<*mut c_void>(name.as_bytes()) };
    found.ok().and_then(|address| NonNull::new(*address))
}

macro_rules! functions {
    ($( $(#[$doc:meta])* $name:ident = $symbol:literal ( $($arg:ident : $kind:ty),* ); )*) => {
        /// The library's functions.
        pub(super) struct Api {
            $( pub(super) $name: Option<unsafe extern "C" fn($($kind),*) -> u32>, )*
            _library: Option<Library>,
        }

        impl Api {
            fn new(library: Library) -> Self {
                $(
                    let found = address_of(&library, $symbol);
                    // SAFETY: `cuda.h` declares each name with the signature given here. `None` is the
                    // null pointer in both types. The pointers do not outlive the library.
                    let $name = unsafe {
                        transmute::<
                            Option<NonNull<c_void>>,
                            Option<unsafe extern "C" fn($($kind),*) -> u32>,
                        >(found)
                    };
                )*
                Self { $($name,)* _library: Some(library) }
            }

            /// Returns a library without functions. Tests add their own.
            #[cfg(test)]
            pub(super) const fn none() -> Self {
                Self { $($name: None,)* _library: None }
            }

            $(
                $(#[$doc])*
                #[allow(clippy::too_many_arguments, reason = "the driver defines the signature")]
                pub(super) fn $name(&self, $($arg: $kind),*) -> Status {
                    // SAFETY: see `new` for the signature. References are valid during the call, and the
                    // library keeps none. For handles see the header of this file.
                    let code = self.$name.map(|call| unsafe { call($($arg),*) });
                    Status { call: $symbol, code }
                }
            )*
        }
    };
}

functions! {
    init = "cuInit"(flags: u32);
    driver_version = "cuDriverGetVersion"(version: &mut i32);
    error_name = "cuGetErrorName"(code: u32, name: &mut *const c_char);
    error_string = "cuGetErrorString"(code: u32, text: &mut *const c_char);

    device_count = "cuDeviceGetCount"(count: &mut i32);
    device_get = "cuDeviceGet"(device: &mut i32, ordinal: i32);
    device_name = "cuDeviceGetName"(name: &mut [u8; 256], size: i32, device: i32);
    device_bus = "cuDeviceGetPCIBusId"(bus: &mut [u8; 32], size: i32, device: i32);
    device_attribute = "cuDeviceGetAttribute"(value: &mut i32, attribute: i32, device: i32);
    device_total = "cuDeviceTotalMem_v2"(bytes: &mut usize, device: i32);

    context_retain = "cuDevicePrimaryCtxRetain"(context: &mut u64, device: i32);
    context_release = "cuDevicePrimaryCtxRelease_v2"(device: i32);
    context_current = "cuCtxGetCurrent"(context: &mut u64);
    context_set = "cuCtxSetCurrent"(context: u64);
    context_push = "cuCtxPushCurrent_v2"(context: u64);
    context_pop = "cuCtxPopCurrent_v2"(context: &mut u64);
    context_synchronize = "cuCtxSynchronize"();
    exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: &mut u32);

    memory_info = "cuMemGetInfo_v2"(free: &mut usize, total: &mut usize);
    memory_allocate = "cuMemAlloc_v2"(address: &mut u64, bytes: usize);
    memory_free = "cuMemFree_v2"(address: u64);
    host_allocate = "cuMemHostAlloc"(pointer: &mut u64, bytes: usize, flags: u32);
    host_pointer = "cuMemHostGetDevicePointer_v2"(address: &mut u64, pointer: u64, flags: u32);
    host_free = "cuMemFreeHost"(pointer: u64);
    host_register = "cuMemHostRegister_v2"(pointer: u64, bytes: usize, flags: u32);
    host_unregister = "cuMemHostUnregister"(pointer: u64);
    copy_within = "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: u64);
    copy_in = "cuMemcpyHtoDAsync_v2"(to: u64, from: *const c_void, bytes: usize, stream: u64);
    copy_out = "cuMemcpyDtoHAsync_v2"(to: *mut c_void, from: u64, bytes: usize, stream: u64);
    fill = "cuMemsetD8Async"(to: u64, byte: u8, bytes: usize, stream: u64);
    copy_peer = "cuMemcpyPeerAsync"(
        to: u64, to_context: u64, from: u64, from_context: u64, bytes: usize, stream: u64
    );

    stream_create = "cuStreamCreate"(stream: &mut u64, flags: u32);
    stream_destroy = "cuStreamDestroy_v2"(stream: u64);
    stream_context = "cuStreamGetCtx"(stream: u64, context: &mut u64);
    stream_synchronize = "cuStreamSynchronize"(stream: u64);
    stream_wait_value = "cuStreamWaitValue32_v2"(
        stream: u64, address: u64, value: u32, flags: u32
    );
    stream_wait = "cuStreamWaitEvent"(stream: u64, event: u64, flags: u32);
    event_create = "cuEventCreate"(event: &mut u64, flags: u32);
    event_destroy = "cuEventDestroy_v2"(event: u64);
    event_record = "cuEventRecord"(event: u64, stream: u64);
    event_query = "cuEventQuery"(event: u64);
    event_synchronize = "cuEventSynchronize"(event: u64);

    capture_info_1 = "cuStreamGetCaptureInfo"(stream: u64, status: &mut u32, id: &mut u64);
    capture_info_2 = "cuStreamGetCaptureInfo_v2"(
        stream: u64, status: &mut u32, id: &mut u64, graph: &mut u64, nodes: &mut *const u64,
        count: &mut usize
    );
    capture_info_3 = "cuStreamGetCaptureInfo_v3"(
        stream: u64, status: &mut u32, id: &mut u64, graph: &mut u64, nodes: &mut *const u64,
        edges: &mut *const c_void, count: &mut usize
    );
    capture_set_1 = "cuStreamUpdateCaptureDependencies"(
        stream: u64, nodes: *const u64, count: usize, flags: u32
    );
    capture_set_2 = "cuStreamUpdateCaptureDependencies_v2"(
        stream: u64, nodes: *const u64, edges: *const c_void, count: usize, flags: u32
    );
    capture_begin = "cuStreamBeginCapture_v2"(stream: u64, mode: u32);
    capture_end = "cuStreamEndCapture"(stream: u64, graph: &mut u64);
    node_dependencies_1 = "cuGraphNodeGetDependencies"(
        node: u64, nodes: *mut u64, count: &mut usize
    );
    node_dependencies_2 = "cuGraphNodeGetDependencies_v2"(
        node: u64, nodes: *mut u64, edges: *mut c_void, count: &mut usize
    );
    graph_add_free = "cuGraphAddMemFreeNode"(
        node: &mut u64, graph: u64, behind: *const u64, count: usize, address: u64
    );
    graph_destroy = "cuGraphDestroy"(graph: u64);
    graph_instantiate = "cuGraphInstantiateWithFlags"(exec: &mut u64, graph: u64, flags: u64);
    graph_launch = "cuGraphLaunch"(exec: u64, stream: u64);
    graph_exec_destroy = "cuGraphExecDestroy"(exec: u64);

    granularity = "cuMemGetAllocationGranularity"(
        bytes: &mut usize, what: &AllocationProperties, option: u32
    );
    address_reserve = "cuMemAddressReserve"(
        address: &mut u64, bytes: usize, alignment: usize, hint: u64, flags: u64
    );
    address_free = "cuMemAddressFree"(address: u64, bytes: usize);
    piece_create = "cuMemCreate"(
        piece: &mut u64, bytes: usize, what: &AllocationProperties, flags: u64
    );
    piece_release = "cuMemRelease"(piece: u64);
    piece_map = "cuMemMap"(address: u64, bytes: usize, offset: usize, piece: u64, flags: u64);
    piece_unmap = "cuMemUnmap"(address: u64, bytes: usize);
    set_access = "cuMemSetAccess"(address: u64, bytes: usize, access: &AccessDescription, count: usize);
    piece_export = "cuMemExportToShareableHandle"(
        descriptor: &mut i32, piece: u64, kind: u32, flags: u64
    );
    piece_export_fabric = "cuMemExportToShareableHandle"(
        handle: &mut [u8; 64], piece: u64, kind: u32, flags: u64
    );
    piece_import_fabric = "cuMemImportFromShareableHandle"(
        piece: &mut u64, handle: &[u8; 64], kind: u32
    );
    piece_import = "cuMemImportFromShareableHandle"(piece: &mut u64, descriptor: u64, kind: u32);

    pool_default = "cuDeviceGetDefaultMemPool"(pool: &mut u64, device: i32);
    pool_create = "cuMemPoolCreate"(pool: &mut u64, what: &PoolProperties);
    pool_destroy = "cuMemPoolDestroy"(pool: u64);
    pool_allocate = "cuMemAllocFromPoolAsync"(
        address: &mut u64, bytes: usize, pool: u64, stream: u64
    );
    pool_free = "cuMemFreeAsync"(address: u64, stream: u64);
    pool_trim = "cuMemPoolTrimTo"(pool: u64, keep: usize);
    pool_get = "cuMemPoolGetAttribute"(pool: u64, attribute: u32, value: &mut u64);
    pool_set = "cuMemPoolSetAttribute"(pool: u64, attribute: u32, value: &mut u64);
    pool_open = "cuMemPoolSetAccess"(pool: u64, access: &AccessDescription, count: usize);
    graph_memory_get = "cuDeviceGetGraphMemAttribute"(
        device: i32, attribute: u32, value: &mut u64
    );
    graph_memory_set = "cuDeviceSetGraphMemAttribute"(
        device: i32, attribute: u32, value: &mut u64
    );
    graph_memory_trim = "cuDeviceGraphMemTrim"(device: i32);

    ipc_share = "cuIpcGetMemHandle"(handle: &mut IpcHandle, address: u64);
    ipc_open = "cuIpcOpenMemHandle_v2"(address: &mut u64, handle: IpcHandle, flags: u32);
    ipc_close = "cuIpcCloseMemHandle"(address: u64);

    peer_possible = "cuDeviceCanAccessPeer"(can: &mut i32, device: i32, other: i32);
    peer_enable = "cuCtxEnablePeerAccess"(context: u64, flags: u32);
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Location {
    pub(super) kind: u32,
    pub(super) id: i32,
}

impl Location {
    /// Returns the location of a device's memory.
    pub(super) const fn device(device: i32) -> Self {
        Self { kind: 1, id: device }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AllocationProperties {
    /// 1: pinned.
    pub(super) kind: u32,
    /// 0: none, 1: file descriptor, 8: fabric, 9: both.
    pub(super) handles: u32,
    pub(super) location: Location,
    pub(super) windows: u64,
    pub(super) compression: u8,
    /// Whether other devices on the bus may access it (GPUDirect RDMA).
    pub(super) direct: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

const _: () = assert!(size_of::<AllocationProperties>() == 32);

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AccessDescription {
    pub(super) location: Location,
    /// 3: read and write.
    pub(super) flags: u32,
}

const _: () = assert!(size_of::<AccessDescription>() == 12);

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PoolProperties {
    pub(super) kind: u32,
    pub(super) handles: u32,
    pub(super) location: Location,
    pub(super) windows: u64,
    pub(super) most_bytes: usize,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 54],
}

const _: () = assert!(size_of::<PoolProperties>() == 88);

/// `CUipcMemHandle`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct IpcHandle(pub(super) [u8; 64]);

static API: OnceLock<Result<Api, DriverError>> = OnceLock::new();

/// Returns the functions of libcuda, which is loaded and initialised once per process.
pub(super) fn api() -> DriverResult<&'static Api> {
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

fn load() -> Result<Api, DriverError> {
    let mut reasons = Vec::new();
    for name in NAMES {
        // SAFETY: this is the vendor's library, whose initialisers may run in any process.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let api = Api::new(library);
                // `Status::ok` would look up the code's description through `API`, which is not set
                // yet.
                return match api.init(0).code() {
                    Some(SUCCESS) => Ok(api),
                    Some(code) => {
                        let message = api.describe(code);
                        let kind = DriverErrorKind::NotSupported;
                        Err(DriverError::new(kind, "cuInit", i64::from(code), message))
                    }
                    None => Err(missing(format!("{name} has no cuInit"))),
                };
            }
            // `error.source()` is the loader's message, which names the file.
            Err(error) => {
                reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string));
            }
        }
    }
    Err(missing(format!("no CUDA driver on this machine: {}", reasons.join("; "))))
}

fn missing(message: String) -> DriverError {
    DriverError::new(DriverErrorKind::NotSupported, "load libcuda", 0, message)
}

macro_rules! has {
    ($api:ident: $($function:ident),*) => { $($api.$function.is_some())&&* };
}

/// The parts for which the library has the functions. An older driver lacks some functions.
impl Api {
    pub(super) fn has_virtual_memory(&self) -> bool {
        has!(self: granularity, address_reserve, address_free, set_access)
            && has!(self: piece_create, piece_release, piece_map, piece_unmap)
    }

    /// Returns whether the functions of pools are present. The one for access by other devices and those
    /// for memory of graphs (see `graph_usage`) are not required.
    pub(super) fn has_pools(&self) -> bool {
        has!(self: pool_default, pool_create, pool_destroy, pool_allocate, pool_free)
            && has!(self: pool_trim, pool_get, pool_set)
    }

    pub(super) fn has_captures(&self) -> bool {
        (self.capture_info_3.is_some() || self.capture_info_2.is_some())
            && (self.capture_set_2.is_some() || self.capture_set_1.is_some())
            && (self.node_dependencies_2.is_some() || self.node_dependencies_1.is_some())
            && has!(self: capture_begin, capture_end, graph_add_free, graph_destroy)
    }

    pub(super) fn has_pinned_memory(&self) -> bool {
        has!(self: host_allocate, host_free, copy_in, copy_out)
    }

    pub(super) fn has_host_memory(&self) -> bool {
        has!(self: host_allocate, host_free, host_register, host_unregister)
    }

    pub(super) fn has_ipc(&self) -> bool {
        has!(self: ipc_share, ipc_open, ipc_close)
    }

    pub(super) fn has_peers(&self) -> bool {
        has!(self: peer_possible, peer_enable, copy_peer)
    }
}

impl Api {
    /// Returns the library's name and description of a code.
    fn describe(&self, code: u32) -> String {
        let mut name = std::ptr::null();
        let mut text = std::ptr::null();
        let named = self.error_name(code, &mut name).code() == Some(SUCCESS);
        let described = self.error_string(code, &mut text).code() == Some(SUCCESS);
        match (named, described) {
            (true, true) => format!("{}: {}", words(name), words(text)),
            (true, false) => words(name),
            _ => "unknown error code".to_owned(),
        }
    }

    /// Copies bytes to the device and waits for the copy.
    pub(super) fn copy_from_host(&self, to: u64, from: &[u8], stream: u64) -> DriverResult<()> {
        self.copy_in(to, from.as_ptr().cast(), from.len(), stream).ok()?;
        // `cuMemcpyHtoDAsync` may read pageable memory after it returns. The slice is valid only during
        // this call.
        self.stream_synchronize(stream).ok()
    }

    /// Copies bytes from the device and waits for the copy.
    pub(super) fn copy_to_host(&self, to: &mut [u8], from: u64, stream: u64) -> DriverResult<()> {
        let copied = self.copy_out(to.as_mut_ptr().cast(), from, to.len(), stream).ok();
        // Wait even if the copy failed: nothing may write to the slice after this call.
        let waited = self.stream_synchronize(stream).ok();
        copied.and(waited)
    }

    /// Copies the list of nodes that the library returned.
    pub(super) fn listed(nodes: *const u64, count: usize) -> Vec<u64> {
        if nodes.is_null() || count == 0 {
            return Vec::new();
        }
        // SAFETY: the library returned this array of `count` handles. It is valid until the next call
        // for this stream, and is copied at once.
        unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec()
    }
}

/// Copies a string of the library.
fn words(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the library returns static strings that end with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
