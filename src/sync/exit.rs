//! A function call at the end of the process.

/// Registers `work` to run at normal process exit, on the exiting thread. Other threads may still be
/// running. A forked child runs `work` too. `work` does not run after a crash, or on systems without
/// `atexit`.
pub(crate) fn at_exit(work: extern "C" fn()) {
    #[cfg(unix)]
    // SAFETY: `work` is a function of this library, and the system calls it before it unloads the
    // library. Registration fails only if memory is short. In that case `work` is not called.
    let _ = unsafe { libc::atexit(work) };
    #[cfg(not(unix))]
    let _ = work;
}
