//! Log lines about what happens off the path of a hit, by the `log` crate (target `stratalloc`).
//!
//! Most of it happens under locks, and a logger is the program's code. So [`note`] only keeps a line, for the
//! calling thread, and the operation's [`Lines`] calls the logger when all locks are released. While a logger
//! runs, its own requests and frees add no lines. A logger that panics loses its line and nothing else.

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};

use log::Level;

use crate::threads::Lasting;

/// The target of all lines.
const TARGET: &str = "stratalloc";

thread_local! {
    /// Lines of operations that are open. Empty outside of them.
    static KEPT: Lasting<Vec<(Level, String)>> = const { Lasting::new(Vec::new()) };
    /// Operations of this thread that are open, one inside the other.
    static OPEN: Cell<u32> = const { Cell::new(0) };
    /// Whether a logger runs on this thread.
    static EMITS: Cell<bool> = const { Cell::new(false) };
}

/// An operation whose lines go to the logger when this is dropped. It is made before the first lock is taken.
#[must_use = "lines are kept while this lives"]
pub(crate) struct Lines(PhantomData<*const ()>);

/// Opens an operation. The lines of an inner one go to the logger when the outermost ends.
pub(crate) fn lines() -> Lines {
    OPEN.set(OPEN.get() + 1);
    Lines(PhantomData)
}

/// Keeps a line if lines of its level are wanted and an operation is open. The text is made only then.
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
                // Its destructor may panic again.
                mem::forget(panic);
            }
        }
        EMITS.set(false);
    }
}

/// The logger of programs that have none: writes to the standard error stream.
#[cfg(any(feature = "cli", feature = "ffi"))]
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

    /// Writes a line. A stream that refuses it has no other place to report that.
    fn write_line(text: &str) {
        let _ = io::stderr().lock().write_all(format!("stratalloc: {text}\n").as_bytes());
    }

    /// Writes lines up to the level in `STRATALLOC_LOG` to the standard error stream, unless the program has
    /// a logger. Reads the variable once.
    pub(crate) fn log_by_environment() {
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

#[cfg(any(feature = "cli", feature = "ffi"))]
pub(crate) use standard_error::log_by_environment;
