//! Blocks inside graph captures.
//!
//! An allocation on a captured stream becomes a node of the graph. A free inside the same capture
//! becomes a node that depends on all streams that use the block.
//!
//! The free cannot be placed on the block's stream itself: if that stream was already joined to the
//! capture's origin stream, the free would be unjoined work, and the capture would fail at its end. So
//! the free becomes a **leaf**: a node on which the stream does not depend. The stream's next allocation
//! depends on the leaf; from there on, the graph may reuse the memory. A stream's capture dependencies
//! are only added to, never replaced, because another thread may be submitting to the stream.
//!
//! No capture fails because of a free, whether the scope or the capture ends first.
//!
//! A block that was allocated outside the capture cannot be freed inside it. Its free is deferred until
//! the capture has ended. PyTorch instead frees such a block on its stream and joins all these streams
//! at the end of the capture, which requires a notification of that end.

use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::MallocAsyncAllocator;
use super::blocks::Block;
use super::frees::FreeOutcome;
use crate::driver::{CaptureStatus, DriverResult, NodeId, capture_status_of};
use crate::error::DriverError;
use crate::ids::StreamId;
use crate::live_blocks::Live;

/// The number of deferred frees, and the leaves.
#[derive(Debug, Default)]
pub(super) struct Captures {
    deferred: AtomicU64,
    /// At most one entry per stream: a stream belongs to one capture at a time.
    leaves: Mutex<HashMap<StreamId, Leaves>>,
}

/// Leaves of one stream: free nodes of a capture on which no later node of the stream depends yet.
#[derive(Debug)]
struct Leaves {
    capture: u64,
    nodes: Vec<NodeId>,
}

/// The capture id of an invalidated capture. No block has it, and nothing can be freed in such a
/// capture.
const BROKEN: u64 = u64::MAX;

impl Captures {
    /// Returns the number of deferred frees. One relaxed load.
    #[inline]
    pub(super) fn deferred(&self) -> u64 {
        self.deferred.load(Ordering::Relaxed)
    }

    pub(super) fn add_deferred(&self) {
        self.deferred.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_deferred(&self) {
        self.deferred.fetch_sub(1, Ordering::Relaxed);
    }

    /// Removes all leaves when the last scope is closed, because only requests inside a scope attach
    /// leaves.
    pub(super) fn forget_leaves(&self) {
        *self.leaves.lock() = HashMap::new();
    }

    /// Keeps a leaf for the next request on its stream. Removes leaves of earlier captures.
    fn add_leaf(&self, stream: StreamId, capture: u64, node: NodeId) {
        let mut all = self.leaves.lock();
        let leaves = all.entry(stream).or_insert_with(|| Leaves { capture, nodes: Vec::new() });
        if leaves.capture != capture {
            *leaves = Leaves { capture, nodes: Vec::new() };
        }
        leaves.nodes.push(node);
    }

    /// Removes the leaves of a stream and returns those of `capture`, so that the next node can depend on
    /// them.
    fn take_leaves(&self, stream: StreamId, capture: u64) -> Vec<NodeId> {
        let found = self.leaves.lock().remove(&stream);
        found.filter(|leaves| leaves.capture == capture).map_or_else(Vec::new, |found| found.nodes)
    }
}

/// Returns the capture id of a captured stream: `BROKEN` if the capture is invalidated.
pub(super) fn capture_in(status: CaptureStatus) -> Option<u64> {
    match status {
        CaptureStatus::None => None,
        CaptureStatus::Active { capture } => Some(capture),
        CaptureStatus::Invalidated => Some(BROKEN),
    }
}

impl MallocAsyncAllocator {
    /// Returns the capture that a stream belongs to. A stream that no longer exists belongs to none.
    pub(super) fn capture_of(&self, stream: StreamId) -> Result<Option<u64>, DriverError> {
        capture_status_of(&*self.driver, stream).map(capture_in)
    }

    /// Frees a block inside the capture that allocated it. Defers the free if a use is outside of that
    /// capture.
    pub(super) fn free_inside(
        &self,
        block: &Live<Block>,
        capture: u64,
    ) -> DriverResult<FreeOutcome> {
        let Some(graph) = self.driver.capture() else {
            return self
                .memory_pools()
                .free_async(block.address, block.stream)
                .map(|()| FreeOutcome::Freed);
        };
        let mut behind = graph.frontier(block.stream)?;
        for by in block.uses() {
            if self.capture_of(by.stream)? != Some(capture) {
                // A node of this capture cannot depend on work outside of the capture.
                return Ok(FreeOutcome::Deferred);
            }
            behind.extend(graph.frontier(by.stream)?);
        }
        behind.sort_unstable();
        behind.dedup();
        let leaf = graph.free_behind(block.address, block.stream, &behind)?;
        if self.scopes.any() {
            self.captures.add_leaf(block.stream, capture, leaf);
        }
        Ok(FreeOutcome::Freed)
    }

    /// Makes the next node of a captured stream depend on the stream's leaves. These dependencies remain
    /// if the request fails afterwards.
    pub(super) fn attach_leaves(&self, stream: StreamId, capture: u64) -> Result<(), DriverError> {
        let leaves = self.captures.take_leaves(stream, capture);
        match self.driver.capture() {
            Some(graph) if !leaves.is_empty() => graph.add_to_frontier(stream, &leaves),
            _ => Ok(()),
        }
    }
}
