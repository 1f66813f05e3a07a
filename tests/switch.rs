//! An allocator that is exchanged while it is used: nothing is lost, and a failure changes nothing.
//!
//! Read next: `draining` (old blocks), and further files of `tests/switch/`.

#[path = "switch/bed.rs"]
mod bed;
#[path = "switch/callbacks.rs"]
mod callbacks;
#[path = "switch/capabilities.rs"]
mod capabilities;
#[path = "common/mod.rs"]
mod common;
#[path = "switch/crowd.rs"]
mod crowd;
#[path = "switch/draining.rs"]
mod draining;
#[path = "switch/failures.rs"]
mod failures;
#[path = "switch/handles.rs"]
mod handles;
#[path = "switch/limits.rs"]
mod limits;
#[path = "switch/refusals.rs"]
mod refusals;
#[path = "switch/statistics.rs"]
mod statistics;
