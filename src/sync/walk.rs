//! The calling thread's own stack.

/// Calls `each` with the return addresses of the calling thread's stack, innermost first, until `each`
/// returns false. Threads do not wait for each other if the system's unwinder allows that.
#[inline(always)]
pub(crate) fn walk(mut each: impl FnMut(usize) -> bool) {
    let frame = |frame: &backtrace::Frame| each(frame.ip().addr());
    #[cfg(target_os = "linux")]
    // SAFETY: on Linux the walk is the C runtime's `_Unwind_Backtrace`, which any number of threads may
    // call at the same time, each for its own stack. Other systems may use a debugger library that must
    // not run twice at the same time.
    unsafe {
        backtrace::trace_unsynchronized(frame);
    }
    #[cfg(not(target_os = "linux"))]
    backtrace::trace(frame);
}
