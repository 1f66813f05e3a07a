//! The end of the process.

/// Has `work` called when the process ends by itself, on the thread that ends it, while others may still
/// run; in children of a fork too. Not after a crash, and not where the system has no such hook.
pub(crate) fn at_exit(work: extern "C" fn()) {
    #[cfg(unix)]
    // SAFETY: `work` is a function of this library, which the system calls before it unloads the library.
    // Refused only for want of memory; then nothing is called.
    let _ = unsafe { libc::atexit(work) };
    #[cfg(not(unix))]
    let _ = work;
}
