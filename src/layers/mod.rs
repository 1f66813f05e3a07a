//! Layers around any allocator, from code or from the string `layers:[limit:8GiB,track]`.
//!
//! A layer is an allocator around another one; the first of the list is the outermost. Without layers
//! nothing of this is built and nothing is paid. No layer takes device memory of its own.
//!
//! | layer | what it does | file |
//! |---|---|---|
//! | `limit:SIZE` | callers hold at most so much | [`limit`] |
//! | `statistics` | counts what callers hold | [`statistics`] |
//! | `track` | leaks by who asked, at the end of the allocator or of the process | [`track`] |
//! | `log:"PATH"` | RMM's CSV | [`log`] |
//! | `fault:[...]` | requests fail on purpose | [`fault`] |
//! | `oom_retry:TIMES` | asks again when out of memory | [`oom_retry`] |
//! | `align:SIZE` | blocks start at multiples | [`align`] |
//! | `guard` | guard bytes and poison, on host memory | [`guard`] |
//! | `front` | a cache of each thread | [`front`] |
//!
//! [`on_oom`] and [`record`] are put around by other keys.
//!
//! Read next: [`Watch`], for layers that look; `shift`, for those that move blocks; `front`, which keeps
//! some; and `stack`, which puts a list on.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::fmt::Display;
use std::io::Write as _;

pub mod align;
mod below;
pub mod fault;
pub mod front;
pub mod guard;
pub mod limit;
pub mod log;
pub mod on_oom;
pub mod oom_retry;
pub mod record;
mod shift;
mod stack;
pub mod statistics;
pub mod track;
mod watch;

pub use shift::{Block, Placement, Shifted};
pub use stack::{LayerError, wrap};
pub use watch::{Freeing, Watch, Watched};

/// Says a line on the standard error stream. An allocator goes on where that cannot be written.
fn say(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "stratalloc: {line}");
}
