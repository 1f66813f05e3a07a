//! What is said on the standard error stream, because no caller asks for it or can be told.

use std::fmt::Display;
use std::io::Write as _;
use std::sync::atomic::{AtomicU32, Ordering};

use super::guard;
use crate::config::Config;
use crate::sync::{Global, Rank};

/// So many failures are said on the standard error stream; further ones only by
/// `stratalloc_last_error`.
const COMPLAINTS_MAX: u32 = 32;
/// So many different warnings are said; further ones are dropped.
const WARNINGS_MAX: usize = 32;

fn say(text: &str) {
    // Nobody is left to be told when the stream is closed.
    let _ = writeln!(std::io::stderr(), "stratalloc: {text}");
}

/// Says what the calling thread's last error says.
#[cold]
pub(super) fn complain() {
    static COMPLAINTS: AtomicU32 = AtomicU32::new(0);
    let more = |n: u32| (n < COMPLAINTS_MAX).then_some(n + 1);
    if COMPLAINTS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
        say(guard::last_error().trim_end());
    }
}

/// Says what is legal in a configuration and probably not meant.
#[cold]
pub(super) fn warn(config: &Config) {
    config.warnings().iter().for_each(warn_once);
}

static WARNED: Global<Vec<String>> = Global::new(Rank::Warnings, Vec::new());

/// Says something once in the life of the process: several devices read one environment.
#[cold]
pub(super) fn warn_once(warning: impl Display) {
    let text = format!("warning: {warning}");
    let mut warned = WARNED.lock();
    if warned.len() < WARNINGS_MAX && !warned.contains(&text) {
        warned.push(text.clone());
        drop(warned);
        say(&text);
    }
}
