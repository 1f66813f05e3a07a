//! The work of other streams in a replay. A **lane** is a made-up stream that stands for the unrecorded
//! streams that use a block.

use std::sync::Arc;

use hashbrown::HashMap;

use stratalloc::driver::DriverResult;
use stratalloc::ids::StreamId;
use stratalloc_sim::WorkGate;

/// Finishes the work of other streams at the recorded moments.
#[derive(Debug)]
pub(super) struct LaneWork {
    work_gate: Arc<dyn WorkGate>,
    /// For each freed block that waits, by key: its lane, and the point in the lane after its last use.
    waiting: HashMap<u64, (StreamId, u64)>,
}

impl LaneWork {
    pub(super) fn new(work_gate: Arc<dyn WorkGate>) -> Self {
        Self { work_gate, waiting: HashMap::new() }
    }

    /// Returns the number of blocks that wait for the work of lanes.
    pub(super) fn pending(&self) -> usize {
        self.waiting.len()
    }

    /// Holds back all work that is submitted to this lane from now on. Called before the free of a block that
    /// the lane uses, so that the block is still in use when it is freed.
    pub(super) fn hold(&self, lane: StreamId) -> DriverResult<()> {
        self.work_gate.hold(lane)
    }

    /// Records that the block with this key was freed and waits for the lane.
    pub(super) fn freed(&mut self, lane: StreamId, key: u64) -> DriverResult<()> {
        self.waiting.insert(key, (lane, self.work_gate.mark(lane)?));
        Ok(())
    }

    /// Finishes the lane's work that uses the block, and all earlier work of the lane.
    pub(super) fn finish(&mut self, key: u64) -> DriverResult<()> {
        match self.waiting.remove(&key) {
            Some((lane, mark)) => self.work_gate.finish_until(lane, mark),
            None => Ok(()),
        }
    }

    /// Forgets the block with this key, because the allocator itself has waited for the block's work.
    pub(super) fn waited_for(&mut self, key: u64) {
        self.waiting.remove(&key);
    }

    pub(super) fn finish_all(&mut self) -> DriverResult<()> {
        self.waiting.clear();
        self.work_gate.finish_all()
    }
}
