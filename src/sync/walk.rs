//! The calling thread's own stack.

/// Calls `each` with the return addresses of the calling thread's stack, innermost first, until it
/// returns false. Threads do not wait for each other where the system's unwinder allows that.
#[inline(always)]
pub(crate) fn walk(mut each: impl FnMut(usize) -> bool) {
    let frame = |frame: &backtrace::Frame| each(frame.ip().addr());
    #[cfg(target_os = "linux")]
    // SAFETY: on other systems a debugger library is used that must not run twice at once. On Linux the
    // walk is the C runtime's `_Unwind_Backtrace`, which any number of threads may call, each for its
    // own stack.
    unsafe {
        backtrace::trace_unsynchronized(frame);
    }
    #[cfg(not(target_os = "linux"))]
    backtrace::trace(frame);
}
