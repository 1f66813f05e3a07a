//! Finds the library that made a call.

#![expect(unsafe_code, reason = "asking the dynamic linker about addresses")]

use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;
use std::path::Path;

/// Libraries that call the driver for others. Many libraries contain a copy of the CUDA runtime; the shared
/// one is called by PyTorch.
const BETWEEN: [&str; 2] = ["libcudart.so", "libcuda.so"];

/// Returns the file name of the library whose code called the driver: the first on the stack that is not
/// this library or one of [`BETWEEN`]. Returns "unknown" if the stack cannot be read.
pub(crate) fn library() -> String {
    let own = object_of(library as *mut c_void).map(|own| own.base);
    let mut found = None;
    let visit = |frame: &backtrace::Frame| {
        let object = object_of(frame.ip());
        let object = object.filter(|object| Some(object.base) != own);
        found = object
            .map(|object| object.name)
            .filter(|name| !BETWEEN.iter().any(|between| name.starts_with(between)));
        found.is_none()
    };
    // The synchronized function would hold a lock while the linker's lock is taken. A constructor that calls
    // the driver takes these locks in the other order.
    // SAFETY: only the reader of symbols on Windows needs the lock.
    unsafe { backtrace::trace_unsynchronized(visit) };
    found.unwrap_or_else(|| "unknown".to_owned())
}

/// A loaded library or program.
struct Object {
    base: usize,
    name: String,
}

/// Returns the object that contains an address, or `None` for generated code.
fn object_of(address: *mut c_void) -> Option<Object> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: `info` is valid for a write; the address is only compared.
    if unsafe { libc::dladdr(address, info.as_mut_ptr()) } == 0 {
        return None;
    }
    // SAFETY: `dladdr` has set all fields.
    let info = unsafe { info.assume_init() };
    // SAFETY: the linker keeps the path while the library is loaded. Code of it is on the stack.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy();
    let name = Path::new(&*path).file_name()?.to_string_lossy();
    // The name becomes a part of a JSON text.
    let plain =
        |letter: char| if letter.is_control() || "\"\\".contains(letter) { '?' } else { letter };
    Some(Object { base: info.dli_fbase as usize, name: name.chars().map(plain).collect() })
}

/// Returns whether an address is in the code of the driver's library.
pub(crate) fn is_driver(address: *mut c_void) -> bool {
    object_of(address).is_some_and(|object| object.name.starts_with("libcuda.so"))
}
