//! A function call at the end of the process.

/// Registers `work` to run at normal process exit, on the exiting thread. Other threads may still run.
/// Children of a fork run it too. It does not run after a crash, or on systems without `atexit`.
pub(crate) fn at_exit(work: extern "C" fn()) {
    #[cfg(unix)]
    // SAFETY: `work` is a function of this library, which the system calls before it unloads the
    // library. Registration fails only if memory is short; then nothing is called.
    let _ = unsafe { libc::atexit(work) };
    #[cfg(not(unix))]
    let _ = work;
}
