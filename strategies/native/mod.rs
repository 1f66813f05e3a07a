//! The caching engine of one device: heaps by stream, growth, pressure, limits, events.
//!
//! A hit locks one heap and calls no driver: `engine`. A miss (`pressure`) tries several steps under the
//! growth lock: `growth` allocates segments, `expandable` maps pages. `release` and `collect` release
//! free memory, `events` handles freed blocks that wait for other streams, `oom` reports failures.
//! `sharing` and `imports` share blocks with other processes, `peers` with other devices. `per_thread`
//! handles per-thread default streams. `policy` contains the settings that a hit needs.
//! `sleep` pauses and resumes tags. `Growth::is_exact` lists the differences under `compat:pytorch`.
//!
//! Lock order: growth, imports, event queue, one heap, ledger, history. `copier` is locked
//! behind growth, and nothing behind it. A second heap is locked only by
//! `try_lock` or with the growth lock held. No lock is held while callbacks or observers run.
//!
//! Not in this module: rounding rules (`size`), bookkeeping of blocks (`heap`), parsing (`config`).

mod addresses;
mod announce;
mod backup;
mod capabilities;
mod capture;
mod cell;
mod checkpoint;
mod collect;
mod copies;
mod engine;
mod events;
mod expandable;
mod files;
mod growth;
mod hints;
mod imports;
mod inspect;
mod install;
mod log_lines;
mod oom;
mod pause;
mod peers;
mod per_thread;
mod policy;
mod pools;
mod pressure;
mod release;
mod resume;
mod sharing;
mod sleep;
mod statistics;

pub use crate::heap::Broken;
pub use engine::{Engine, EngineOptions};
pub use inspect::{Collection, Prediction, Releases};
#[doc(hidden)]
pub use install::{Installed, groups};
