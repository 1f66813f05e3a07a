//! Writes warnings, and failures of the functions for PyTorch, to the standard error stream.

use std::fmt::Display;
use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};

use super::guard;
use stratalloc::config::Config;
use stratalloc::sync::{Global, Rank};

/// The most failures that are written. Later ones are available only from `stratalloc_last_error`.
const ERRORS_MAX: u32 = 32;
/// The most different warnings that are written. Later ones are dropped.
const WARNINGS_MAX: usize = 32;

fn write_line(text: &str) {
    // If the stream is closed, the message is lost.
    let _ = writeln!(std::io::stderr(), "stratalloc: {text}");
}

/// Writes the calling thread's last error message.
#[cold]
pub(super) fn write_last_error() {
    static ERRORS: AtomicU32 = AtomicU32::new(0);
    let more = |n: u32| (n < ERRORS_MAX).then_some(n + 1);
    if ERRORS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
        write_line(guard::last_error().trim_end());
    }
}

/// Writes the warnings of a configuration, about settings that are valid but probably a mistake.
#[cold]
pub(super) fn warn(config: &Config) {
    config.warnings().iter().for_each(warn_once);
}

static WARNED: Global<Vec<String>> = Global::new(Rank::Warnings, Vec::new());

/// Writes a warning, but each text only once per process: several devices read the same environment.
#[cold]
pub(super) fn warn_once(warning: impl Display) {
    let text = format!("warning: {warning}");
    let mut warned = WARNED.lock();
    if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
        warned.push(text.clone());
        drop(warned);
        write_line(&text);
    }
}
