//! Blocks inside graph captures.
//!
//! What a captured stream asks for becomes part of the graph, and so does its free inside the same
//! capture: a node that comes after all streams that use the block. A free must not leave its stream
//! with work that nobody joins, because a stream may be joined before the blocks that it allocated
//! are freed, and the capture would fail at its end. So the free becomes a **leaf**, added to the
//! graph beside its stream, and the stream comes after the leaf only when it asks for memory again;
//! then the graph may reuse what was freed. Where a stream stands is never set, only added to:
//! another thread may be submitting to it.
//!
//! A block from outside cannot be freed inside a capture: its free waits for the end.

use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::MallocAsyncAllocator;
use super::blocks::Block;
use super::give_back::Given;
use crate::driver::{CaptureStatus, DriverResult, NodeId, capture_status_of};
use crate::error::DriverError;
use crate::ids::StreamId;
use crate::live_blocks::Live;

/// What asks a request or a free for care: open scopes and deferred frees, in one number.
#[derive(Debug, Default)]
pub(super) struct Captures {
    care: AtomicU64,
    /// One entry for a stream at most: it belongs to one capture at a time.
    leaves: Mutex<HashMap<StreamId, Leaves>>,
}

/// Frees inside a capture that nothing on their stream comes after yet.
#[derive(Debug)]
struct Leaves {
    capture: u64,
    nodes: Vec<NodeId>,
}

const ONE_SCOPE: u64 = 1 << 40;

/// Stands for a capture that broke: no block belongs to it, and nothing may be freed in it.
const BROKEN: u64 = u64::MAX;

impl Captures {
    /// Whether any scope is open or any free is deferred. One relaxed load.
    #[inline]
    pub(super) fn ask_for_care(&self) -> bool {
        self.care.load(Ordering::Relaxed) != 0
    }

    #[inline]
    pub(super) fn any_scope(&self) -> bool {
        self.care.load(Ordering::Relaxed) >= ONE_SCOPE
    }

    pub(super) fn deferred(&self) -> u64 {
        self.care.load(Ordering::Relaxed) % ONE_SCOPE
    }

    pub(super) fn add_deferred(&self) {
        self.care.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn remove_deferred(&self) {
        self.care.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn scope_opened(&self) {
        self.care.fetch_add(ONE_SCOPE, Ordering::Relaxed);
    }

    pub(super) fn scope_closed(&self) {
        self.care.fetch_sub(ONE_SCOPE, Ordering::Relaxed);
        if !self.any_scope() {
            // Without scopes no request looks for leaves.
            *self.leaves.lock() = HashMap::new();
        }
    }

    /// Keeps a leaf for the next request on its stream. Those of earlier captures are forgotten.
    fn add_leaf(&self, stream: StreamId, capture: u64, node: NodeId) {
        let mut all = self.leaves.lock();
        let leaves = all.entry(stream).or_insert_with(|| Leaves { capture, nodes: Vec::new() });
        if leaves.capture != capture {
            *leaves = Leaves { capture, nodes: Vec::new() };
        }
        leaves.nodes.push(node);
    }

    /// The leaves of a stream, for its next node.
    fn take_leaves(&self, stream: StreamId, capture: u64) -> Vec<NodeId> {
        let found = self.leaves.lock().remove(&stream);
        found.filter(|leaves| leaves.capture == capture).map_or_else(Vec::new, |found| found.nodes)
    }
}

/// The capture of a stream of this state.
pub(super) fn capture_in(status: CaptureStatus) -> Option<u64> {
    match status {
        CaptureStatus::None => None,
        CaptureStatus::Active { capture } => Some(capture),
        CaptureStatus::Invalidated => Some(BROKEN),
    }
}

impl MallocAsyncAllocator {
    /// The capture that a stream belongs to. A stream that is gone belongs to none.
    pub(super) fn capture_of(&self, stream: StreamId) -> Result<Option<u64>, DriverError> {
        capture_status_of(&*self.driver, stream).map(capture_in)
    }

    /// Frees a block inside the capture that allocated it.
    pub(super) fn free_inside(&self, block: &Live<Block>, capture: u64) -> DriverResult<Given> {
        let Some(graph) = self.driver.capture() else {
            return self
                .memory_pools()
                .free_async(block.address, block.stream)
                .map(|()| Given::Freed);
        };
        let mut behind = graph.frontier(block.stream)?;
        for by in block.uses() {
            if self.capture_of(by.stream)? != Some(capture) {
                // Work that is in no graph, or in another, cannot be waited for by this one.
                return Ok(Given::Deferred);
            }
            behind.extend(graph.frontier(by.stream)?);
        }
        behind.sort_unstable();
        behind.dedup();
        let leaf = graph.free_behind(block.address, block.stream, &behind)?;
        if self.captures.any_scope() {
            self.captures.add_leaf(block.stream, capture, leaf);
        }
        Ok(Given::Freed)
    }

    /// Puts the next node of a captured stream behind the leaves that it left. It stays behind them
    /// when the request fails.
    pub(super) fn attach_leaves(&self, stream: StreamId, capture: u64) -> Result<(), DriverError> {
        let leaves = self.captures.take_leaves(stream, capture);
        match self.driver.capture() {
            Some(graph) if !leaves.is_empty() => graph.add_to_frontier(stream, &leaves),
            _ => Ok(()),
        }
    }
}
