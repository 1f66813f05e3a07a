//! The caching engine of one device: heaps by stream, growth, pressure, limits, events.
//!
//! A hit takes one heap's lock and calls no driver: `engine`. Everything else happens under the
//! growth lock, one miss at a time: `growth` takes segments, `expandable` maps
//! pages, `pressure` is the ladder a miss climbs,
//! `release` and `collect` give segments back, `events` waits for other streams, `oom` tells why
//! nothing helped. `sharing` and `imports` are blocks in other processes, `peers` on other devices.
//! `per_thread` is streams that are another one on each thread. `policy` is what a hit needs to know of the
//! settings; `Growth::is_exact` lists what differs where decisions are PyTorch's to the letter.
//!
//! Lock order: growth, imports, event queue, one heap, ledger, history. A second heap only by
//! `try_lock`, or with the growth lock held, in ascending order. No lock is held while callbacks or
//! observers run.
//! Never here: rounding rules (`size`), bookkeeping of blocks (`heap`), parsing (`config`).

mod addresses;
mod announce;
mod capabilities;
mod capture;
mod cell;
mod checkpoint;
mod collect;
mod engine;
mod events;
mod expandable;
mod growth;
mod hints;
mod imports;
mod inspect;
#[cfg(feature = "replay")]
mod install;
mod log_lines;
mod oom;
mod peers;
mod per_thread;
mod policy;
mod pools;
mod pressure;
mod release;
mod sharing;
mod statistics;

pub use crate::heap::Broken;
pub use engine::{Engine, EngineOptions};
pub use inspect::{Collection, Foresight};
#[cfg(feature = "replay")]
pub(crate) use install::groups;
