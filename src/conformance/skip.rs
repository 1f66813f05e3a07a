//! Tests that leave something out say so where everybody sees it.
//!
//! A test harness keeps what a passing test prints to itself, so the lines are written straight to
//! standard error.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The variable that makes it a failure when a test is left out for want of a CUDA device. Any value but
/// an empty one and `0`.
pub const REQUIRE_CUDA: &str = "STRATALLOC_REQUIRE_CUDA";

/// Why a test for a CUDA device is left out.
pub const NO_CUDA_DEVICE: &str = "no CUDA device";

/// Says in one line on standard error that `what` was left out, and why.
pub fn skipped(what: impl Display, why: impl Display) {
    let line = format!("{what}: skipped: {why}\n");
    // Nobody to tell if standard error is gone.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The same for want of a CUDA device. `detail` is what the driver said, or nothing; it stands in the
/// first such line of the process.
///
/// # Panics
///
/// When [`REQUIRE_CUDA`] asks for a device.
pub fn for_want_of_a_device(what: impl Display, detail: &str) {
    static IS_TOLD: AtomicBool = AtomicBool::new(false);
    let required = std::env::var_os(REQUIRE_CUDA).is_some_and(|v| !v.is_empty() && v != "0");
    assert!(!required, "{what}: {NO_CUDA_DEVICE} ({detail}), and {REQUIRE_CUDA} asks for one");
    if detail.is_empty() || IS_TOLD.swap(true, Ordering::Relaxed) {
        skipped(what, NO_CUDA_DEVICE);
    } else {
        skipped(what, format_args!("{NO_CUDA_DEVICE} ({detail})"));
    }
}
