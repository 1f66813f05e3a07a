//! Measures which libraries of a process make the used memory of a CUDA device grow.
//!
//! The dynamic linker loads this library into a program before all others, if `LD_PRELOAD` names it. It
//! replaces `dlsym`, through which CUDA's libraries look up the functions of the driver, and returns for
//! some of these functions a wrapper. A wrapper reads the used memory of the device before and after the
//! call (`cuMemGetInfo`), and adds the difference to the library that made the call. So memory that no
//! caller requests explicitly is measured too: kernels, contexts, graphs, streams.
//!
//! - `symbols`: replaces functions when they are looked up.
//! - `calls`: the wrappers, and the functions that are measured.
//! - `device`: reads the used memory.
//! - `caller`: finds the library that made a call.
//! - `totals`: adds the differences, and writes them as JSON.
//!
//! A wrapped call takes about 20 µs longer. A kernel is measured at its first launch only. The calls of
//! several threads may overlap: then the sum of their differences is right, but memory may be added to the
//! library of another thread. Growth caused by another process during a call is added to the call.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

mod caller;
mod calls;
mod device;
mod symbols;
mod totals;

use std::ffi::c_char;

/// Writes the measured bytes of each device as JSON, with a zero at the end, if `capacity` bytes suffice.
/// Returns the number of bytes needed. They may be more at the next call.
///
/// # Safety
///
/// `buffer` is valid for writes of `capacity` bytes.
#[unsafe(no_mangle)]
#[expect(unsafe_code, reason = "writes into a buffer of the caller")]
pub unsafe extern "C" fn stratalloc_account_json(buffer: *mut c_char, capacity: usize) -> usize {
    let text = totals::json();
    let needed = text.len() + 1;
    if needed <= capacity {
        // SAFETY: the buffer has room for the text.
        unsafe { buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
        // SAFETY: and for the zero.
        let end = unsafe { buffer.add(text.len()) };
        // SAFETY: as above.
        unsafe { end.write(0) };
    }
    needed
}
