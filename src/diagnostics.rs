//! Log lines, written with the `log` crate (target `stratalloc`). A cache hit writes none.
//!
//! Most lines are created while locks are held, and a logger is user code. So `note` only queues a line
//! for the calling thread. When the operation's `Lines` is dropped, after all locks are released, it
//! passes the queued lines to the logger. While a logger runs, its own requests and frees add no lines.
//! If a logger panics, only the line that it was called with is lost.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use log::Level;

use crate::threads::Lasting;

/// The target of all log lines.
const TARGET: &str = "stratalloc";

thread_local! {
    /// The queued lines of this thread's open operations. Empty when no operation is open.
    static KEPT: Lasting<Vec<(Level, String)>> = const { Lasting::new(Vec::new()) };
    /// The number of open (nested) operations on this thread.
    static OPEN: Cell<u32> = const { Cell::new(0) };
    /// True while a logger runs on this thread.
    static EMITS: Cell<bool> = const { Cell::new(false) };
}

/// Passes the operation's queued lines to the logger when dropped. Must be created before the first
/// lock is acquired, so that it is dropped after the last one is released.
#[must_use = "lines are queued until this is dropped"]
pub(crate) struct Lines(PhantomData<*const ()>);

/// Opens an operation. The lines of nested operations are logged when the outermost one ends.
pub(crate) fn lines() -> Lines {
    OPEN.set(OPEN.get() + 1);
    Lines(PhantomData)
}

/// Queues a line if its level is enabled and an operation is open. Calls `text` only then.
#[inline]
pub(crate) fn note(level: Level, text: impl FnOnce() -> String) {
    if level <= log::max_level() && OPEN.get() > 0 && !EMITS.get() {
        let text = text();
        KEPT.with(|kept| kept.change(|kept| kept.push((level, text))));
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        OPEN.set(OPEN.get().saturating_sub(1));
        if OPEN.get() > 0 || EMITS.get() {
            return;
        }
        let kept = KEPT.with(Lasting::take);
        if kept.is_empty() {
            return;
        }
        EMITS.set(true);
        for (level, text) in kept {
            let emit = AssertUnwindSafe(|| log::log!(target: TARGET, level, "{text}"));
            if let Err(panic) = catch_unwind(emit) {
                // The destructor of the panic's payload may panic again.
                mem::forget(panic);
            }
        }
        EMITS.set(false);
    }
}

/// A logger for programs without one: writes to standard error.
mod standard_error {
    use std::io::{self, Write};
    use std::sync::Once;

    use log::{LevelFilter, Log, Metadata, Record};

    const VARIABLE: &str = "STRATALLOC_LOG";

    struct StandardError;

    impl Log for StandardError {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == super::TARGET
        }

        fn log(&self, record: &Record<'_>) {
            if self.enabled(record.metadata()) {
                let level = record.level().as_str().to_ascii_lowercase();
                write_line(&format!("{level}: {}", record.args()));
            }
        }

        fn flush(&self) {}
    }

    /// Writes a line. Ignores a write error, because there is no other place to report it.
    fn write_line(text: &str) {
        let _ = io::stderr().lock().write_all(format!("stratalloc: {text}\n").as_bytes());
    }

    /// Installs this logger at the level in `STRATALLOC_LOG`, unless the program has installed one.
    /// Reads the variable only once.
    pub fn log_by_environment() {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let Some(text) = std::env::var_os(VARIABLE).filter(|text| !text.is_empty()) else {
                return;
            };
            let text = text.to_string_lossy();
            let Ok(level) = text.trim().parse::<LevelFilter>() else {
                let known = "off, error, warn, info, debug or trace";
                write_line(&format!("warn: {VARIABLE}={text:?} is ignored: expected {known}"));
                return;
            };
            if log::set_logger(&StandardError).is_ok() {
                log::set_max_level(level);
            }
        });
    }
}

pub use standard_error::log_by_environment;
