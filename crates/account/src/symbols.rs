//! Replaces functions of the driver when a library looks them up.
//!
//! CUDA's libraries open `libcuda.so.1`, find `cuGetProcAddress` in it with `dlsym`, and look up all other
//! functions with that. Libraries that are linked with the driver are bound to the exported functions at the
//! end of this file.

#![expect(unsafe_code, reason = "replaces functions of the dynamic linker and of the driver")]
#![expect(unreachable_pub, reason = "these functions are called by their names")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::caller;
use crate::calls::{self, Function, NO_DRIVER};

/// The version of the symbol `dlsym` that every glibc of this machine has.
#[cfg(target_arch = "x86_64")]
const VERSION: &CStr = c"GLIBC_2.2.5";
#[cfg(not(target_arch = "x86_64"))]
const VERSION: &CStr = c"GLIBC_2.17";

type Search = unsafe extern "C" fn(handle: *mut c_void, name: *const c_char) -> *mut c_void;

/// The linker's `dlsym`. It is set before the first jump to it.
static LINKER_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Replaces the linker's `dlsym`. If the symbol is not replaced, this function jumps to the linker's
/// function instead of calling it, because that function's result for `RTLD_NEXT` depends on its caller.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {replacement}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 2f",
        "jmp qword ptr [rip + {linker}]",
        "2:",
        "ret",
        replacement = sym replacement,
        linker = sym LINKER_DLSYM,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "stp x0, x1, [sp, #16]",
        "bl {replacement}",
        "mov x9, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbz x9, 2f",
        "mov x0, x9",
        "ret",
        "2:",
        "adrp x9, {linker}",
        "ldr x9, [x9, :lo12:{linker}]",
        "br x9",
        replacement = sym replacement,
        linker = sym LINKER_DLSYM,
    )
}

/// Returns what `dlsym` returns instead of the symbol, or null if the symbol is not replaced.
unsafe extern "C" fn replacement(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let search = linker_dlsym();
    // SAFETY: `dlsym` requires a name that ends with a zero.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    // Functions of the driver are called cuXyz. The third letter of those of cuBLAS and others is lower case.
    let is_candidate = text.starts_with(b"cu") && text.get(2).is_some_and(u8::is_ascii_uppercase);
    if !is_candidate || handle == libc::RTLD_NEXT {
        return ptr::null_mut();
    }
    // SAFETY: the arguments are those of the caller.
    let found = unsafe { search(handle, name) };
    let replaced = NonNull::new(found.cast()).and_then(|found| replaced(text, found, None));
    replaced.map_or(ptr::null_mut(), |replaced| replaced.as_ptr().cast())
}

/// Returns the replacement of a function of the driver, or `None` if it is not replaced. `version` is the
/// version of CUDA whose function is looked up, if there is one.
fn replaced(name: &[u8], found: NonNull<()>, version: Option<c_int>) -> Option<NonNull<()>> {
    // The driver may return a function that is exported here.
    if !caller::is_driver(found.as_ptr().cast()) {
        return None;
    }
    match name {
        b"cuGetProcAddress_v2" => Some(lookup::<1>(found)),
        // The same name means the second version since CUDA 12.
        b"cuGetProcAddress" if version >= Some(12_000) => Some(lookup::<1>(found)),
        b"cuGetProcAddress" => Some(lookup::<0>(found)),
        name => calls::wrapped(std::str::from_utf8(name).ok()?, found),
    }
}

/// Returns the linker's `dlsym`, and lets the replaced one jump to it.
fn linker_dlsym() -> Search {
    let mut found = LINKER_DLSYM.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: the names end with zeros.
        found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), VERSION.as_ptr()) };
        if found.is_null() {
            std::process::abort();
        }
        LINKER_DLSYM.store(found, Ordering::Relaxed);
    }
    // SAFETY: `dlsym` has this signature.
    unsafe { std::mem::transmute::<*mut c_void, Search>(found) }
}

/// Returns a function of the driver by its name, without a wrapper. Returns `None` if the driver's library
/// is not loaded and cannot be, or lacks the function.
pub(crate) fn of_driver(name: &CStr) -> Option<NonNull<()>> {
    // SAFETY: the name ends with a zero. The library's constructors run when CUDA is used.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the handle is valid, and is never closed.
    NonNull::new(unsafe { linker_dlsym()(library, name.as_ptr()) }.cast())
}

/// The driver's `cuGetProcAddress` and `cuGetProcAddress_v2`.
static LOOKUPS: [AtomicPtr<()>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];

/// Returns the replacement of one of the driver's [`LOOKUPS`].
fn lookup<const AT: usize>(found: NonNull<()>) -> NonNull<()> {
    LOOKUPS[AT].store(found.as_ptr(), Ordering::Release);
    NonNull::new(look_up::<AT> as *mut ()).unwrap_or(found)
}

/// `CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags)`, and its
/// version 2, which has one more argument.
unsafe extern "C" fn look_up<const AT: usize>(
    symbol: *const c_char,
    function: *mut *mut (),
    version: c_int,
    flags: usize,
    result: *mut c_int,
) -> c_int {
    let known = NonNull::new(LOOKUPS[AT].load(Ordering::Acquire));
    let Some(lookup) =
        known.or_else(|| of_driver([c"cuGetProcAddress", c"cuGetProcAddress_v2"][AT]))
    else {
        return NO_DRIVER;
    };
    // SAFETY: the function is one of the driver.
    let lookup = unsafe { calls::as_function(lookup) };
    let (name, place) = (symbol as usize, function as usize);
    // SAFETY: these are its arguments.
    let status = unsafe {
        lookup(name, place, version as usize, flags, result as usize, 0, 0, 0, 0, 0, 0, 0)
    };
    if status != 0 || symbol.is_null() || function.is_null() {
        return status;
    }
    // SAFETY: the driver has written the function.
    let Some(found) = NonNull::new(unsafe { *function }) else {
        return status;
    };
    // SAFETY: the caller passed a name that ends with a zero.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    if let Some(replaced) = replaced(name, found, Some(version)) {
        // SAFETY: the driver has written there.
        unsafe { *function = replaced.as_ptr() };
    }
    status
}

/// The driver's `cuGetProcAddress`, which returns measured functions.
///
/// # Safety
///
/// As for the function of the driver.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name of the driver's function")]
pub unsafe extern "C" fn cuGetProcAddress(
    symbol: *const c_char,
    function: *mut *mut (),
    version: c_int,
    flags: usize,
) -> c_int {
    // SAFETY: the caller passes the arguments of the driver's function.
    unsafe { look_up::<0>(symbol, function, version, flags, ptr::null_mut()) }
}

/// The driver's `cuGetProcAddress_v2`, which returns measured functions.
///
/// # Safety
///
/// As for the function of the driver.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name of the driver's function")]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    function: *mut *mut (),
    version: c_int,
    flags: usize,
    result: *mut c_int,
) -> c_int {
    // SAFETY: as above.
    unsafe { look_up::<1>(symbol, function, version, flags, result) }
}

/// Exports functions of the driver for libraries that are linked with it.
macro_rules! exported {
    ($($name:ident)+) => {$(
        #[doc = concat!("The driver's `", stringify!($name), "`, measured.")]
        ///
        /// # Safety
        ///
        /// As for the function of the driver.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the name of the driver's function")]
        #[rustfmt::skip]
        pub unsafe extern "C" fn $name(
            a: usize, b: usize, c: usize, d: usize, e: usize, f: usize,
            g: usize, h: usize, i: usize, j: usize, k: usize, l: usize,
        ) -> c_int {
            static FUNCTION: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
            match measured_function(&FUNCTION, stringify!($name)) {
                // SAFETY: the caller passes the arguments of the driver's function.
                Some(function) => unsafe { function(a, b, c, d, e, f, g, h, i, j, k, l) },
                None => NO_DRIVER,
            }
        }
    )+};
}

/// Returns the wrapper of a driver's function, which `known` keeps.
fn measured_function(known: &AtomicPtr<()>, name: &str) -> Option<Function> {
    let mut function = NonNull::new(known.load(Ordering::Acquire));
    if function.is_none() {
        let found = of_driver(&std::ffi::CString::new(name).ok()?)?;
        function = Some(calls::wrapped(name, found).unwrap_or(found));
        known.store(function.map_or(ptr::null_mut(), NonNull::as_ptr), Ordering::Release);
    }
    // SAFETY: the function or its wrapper.
    function.map(|function| unsafe { calls::as_function(function) })
}

exported! {
    cuMemAlloc_v2 cuMemAllocManaged cuMemAllocPitch_v2 cuMemAllocAsync cuMemAllocFromPoolAsync cuMemHostAlloc
    cuMemFree_v2 cuMemFreeAsync cuMemCreate cuMemRelease cuMemMap cuMemUnmap
    cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary cuModuleUnload cuModuleGetFunction
    cuLibraryLoadData cuLibraryUnload cuFuncSetAttribute cuLaunchKernel cuLaunchKernelEx
    cuLaunchCooperativeKernel cuGraphInstantiateWithFlags cuStreamCreate cuStreamCreateWithPriority
}
