//! Messages about tests that were skipped.
//!
//! A test harness hides the output of a passing test, so these lines are written directly to standard
//! error.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The environment variable that makes a test fail, instead of being skipped, if there is no CUDA
/// device. It is set if its value is neither empty nor `0`.
pub const REQUIRE_CUDA: &str = "STRATALLOC_REQUIRE_CUDA";

/// The reason why a test for a CUDA device is skipped.
pub const NO_CUDA_DEVICE: &str = "no CUDA device";

/// Prints one line to standard error: `what` was skipped, and why.
pub fn skipped(what: impl Display, why: impl Display) {
    let line = format!("{what}: skipped: {why}\n");
    // A failure to write is ignored.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Prints like [`skipped`] that there is no CUDA device. `detail` is the message of the driver, or
/// empty; it is printed only once per process.
///
/// # Panics
///
/// When [`REQUIRE_CUDA`] is set.
pub fn for_want_of_a_device(what: impl Display, detail: &str) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    let required = std::env::var_os(REQUIRE_CUDA).is_some_and(|v| !v.is_empty() && v != "0");
    assert!(!required, "{what}: {NO_CUDA_DEVICE} ({detail}), and {REQUIRE_CUDA} requires one");
    if detail.is_empty() || IS_TOLD.swap(true, Ordering::Relaxed) {
        skipped(what, NO_CUDA_DEVICE);
    } else {
        skipped(what, format_args!("{NO_CUDA_DEVICE} ({detail})"));
    }
}
