//! An allocator that is exchanged while it is used: nothing is lost, and a failure changes nothing.
//!
//! Read next: `draining` (old blocks), and further files of `tests/switch/`.

mod bed;
mod callbacks;
mod capabilities;
mod crowd;
mod draining;
mod failures;
mod handles;
mod limits;
mod refusals;
mod statistics;
