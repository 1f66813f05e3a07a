//! An allocator that is exchanged while it is used: nothing is lost, and a failure changes nothing.
//!
//! Read next: `draining` (old blocks), and further files of `tests/switch/`.

mod callbacks;
mod capabilities;
mod crowd;
mod draining;
mod failures;
mod handles;
mod limits;
mod refusals;
mod statistics;

use crate::common::prelude::*;

const NATIVE: &str = "backend:native";
const EXPANDABLE: &str = "backend:native,expandable_segments:True";
const ASYNC: &str = "backend:cudaMallocAsync";
const FRONT: &str = "backend:native,layers:[front]";
const ALL: [&str; 4] = [NATIVE, EXPANDABLE, ASYNC, FRONT];

/// A switchable allocator on a simulated device.
type Bed = BedOn<Sim, Switchable>;

impl Bed {
    #[track_caller]
    fn switch(&self, conf: &str) {
        self.allocator.switch(conf).expect("a good string");
    }
}
