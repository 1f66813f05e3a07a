//! Layers: allocators around another allocator, from code or from the string
//! `layers:[limit:8GiB,track]`.
//!
//! The first layer of the list is the outermost. Without layers no call passes through this module. No
//! layer makes requests of its own; `align`, `guard` and `front` enlarge those of callers.
//!
//! | layer | function | file |
//! |---|---|---|
//! | `limit:SIZE` | limits the bytes that callers hold | [`limit`] |
//! | `statistics` | counts the bytes that callers hold | [`statistics`] |
//! | `track` | reports leaks with stacks when the allocator is dropped or the process ends | [`track`] |
//! | `log:"PATH"` | logs in RMM's CSV format | [`log`] |
//! | `fault:[...]` | fails requests on purpose | [`fault`] |
//! | `oom_retry:TIMES` | retries requests that are out of memory | [`oom_retry`] |
//! | `align:SIZE` | aligns blocks | [`align`] |
//! | `guard` | adds guard bytes and fill patterns, on host memory | [`guard`] |
//! | `front` | caches small blocks per thread | [`front`] |
//!
//! The keys `snapshot_on_oom` and `advise_on_oom` add [`on_oom`]. Registered
//! allocators get those of [`record`].
//!
//! A layer implements only the calls that it observes. Capabilities that a layer does not change are
//! those of the allocator below. A free by address returns the freed size, so `limit` and `statistics`
//! need no table of blocks. Read next: [`Watch`], for layers that observe; `shift`, for layers that
//! move blocks; `front`, which caches blocks; and `stack`, which builds a list of layers.

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

/// Writes a line to the standard error stream. Ignores a failure to write.
fn write_stderr(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "stratalloc: {line}");
}
