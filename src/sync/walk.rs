//! The calling thread's own stack.

/// Tells `each` where the functions of the calling thread's stack go on, the innermost first, until it
/// answers false. Threads do not wait for each other where the system's unwinder lets them.
#[inline(always)]
pub(crate) fn walk(mut each: impl FnMut(usize) -> bool) {
    let frame = |frame: &backtrace::Frame| each(frame.ip().addr());
    #[cfg(target_os = "linux")]
    // SAFETY: what must not run twice at once is a debugger library of other systems. On Linux the walk is
    // the C runtime's `_Unwind_Backtrace`, which any number of threads may call, each for its own stack.
    unsafe {
        backtrace::trace_unsynchronized(frame);
    }
    #[cfg(not(target_os = "linux"))]
    backtrace::trace(frame);
}
