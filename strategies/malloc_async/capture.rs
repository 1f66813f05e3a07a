//! Blocks inside graph captures.
//!
//! What a captured stream asks for becomes part of the graph, and so does its free inside the same
//! capture: a node that comes after all streams that use the block. A free must not leave its stream
//! with work that nobody joins, because a stream may be joined before the blocks that it allocated
//! are freed, and the capture would fail at its end. So the free becomes a **leaf**: the stream goes
//! on from where it was, and comes after the leaf only when it asks for memory again; then the graph
//! may reuse what was freed.
//!
//! A block from outside cannot be freed inside a capture: its free waits for the end.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::MallocAsyncAllocator;
use super::blocks::Block;
use super::give_back::Given;
use crate::driver::{Capture, CaptureStatus, NodeId};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::StreamId;

/// What asks a request or a free for care: open scopes and deferred frees, in one number.
#[derive(Debug, Default)]
pub(super) struct Captures {
    care: AtomicU64,
    leaves: Mutex<Vec<Leaf>>,
}

/// Frees inside a capture that nothing on their stream comes after yet.
#[derive(Debug)]
struct Leaf {
    capture: u64,
    stream: StreamId,
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
    }

    /// The leaves of a stream, for its next node. Those of its earlier captures are forgotten.
    fn take_leaves(&self, stream: StreamId, capture: u64) -> Vec<NodeId> {
        let mut found = Vec::new();
        self.leaves.lock().retain_mut(|leaf| {
            if leaf.stream == stream && leaf.capture == capture {
                found.append(&mut leaf.nodes);
            }
            leaf.stream != stream
        });
        found
    }
}

impl MallocAsyncAllocator {
    /// The capture that a stream belongs to. A stream that is gone belongs to none.
    pub(super) fn capture_of(&self, stream: StreamId) -> Result<Option<u64>, DriverError> {
        match self.driver.capture_status(stream) {
            Ok(CaptureStatus::None) => Ok(None),
            Ok(CaptureStatus::Active { capture }) => Ok(Some(capture)),
            Ok(CaptureStatus::Invalidated) => Ok(Some(BROKEN)),
            Err(error) if error.kind == DriverErrorKind::InvalidValue => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Frees a block inside the capture that allocated it.
    pub(super) fn free_inside(&self, address: u64, block: &Block) -> Result<Given, DriverError> {
        let Some(graph) = self.driver.capture() else {
            return self.memory_pools().free_async(address, block.stream).map(|()| Given::Freed);
        };
        let before = graph.frontier(block.stream)?;
        let mut after = before.clone();
        for by in &block.uses {
            if self.capture_of(by.stream)? != block.capture {
                // Work that is in no graph, or in another, cannot be waited for by this one.
                return Ok(Given::Deferred);
            }
            after.extend(graph.frontier(by.stream)?);
        }
        after.sort_unstable();
        after.dedup();
        if !block.uses.is_empty() {
            graph.set_frontier(block.stream, &after)?;
        }
        if let Err(error) = self.memory_pools().free_async(address, block.stream) {
            let _ = graph.set_frontier(block.stream, &before);
            return Err(error);
        }
        self.make_leaf(graph, block, &before);
        Ok(Given::Freed)
    }

    /// Sets the stream back to where it was before the free. A driver that cannot leaves the stream
    /// behind the free, as a plain free does.
    fn make_leaf(&self, graph: &dyn Capture, block: &Block, before: &[NodeId]) {
        let (Some(capture), Ok(nodes)) = (block.capture, graph.frontier(block.stream)) else {
            return;
        };
        if graph.set_frontier(block.stream, before).is_ok() {
            self.captures.leaves.lock().push(Leaf { capture, stream: block.stream, nodes });
        }
    }

    /// Puts the next node of a captured stream behind the leaves that it left, and returns where the
    /// stream was before, if that changed.
    pub(super) fn attach_leaves(
        &self,
        stream: StreamId,
        capture: u64,
    ) -> Result<Option<Vec<NodeId>>, DriverError> {
        let leaves = self.captures.take_leaves(stream, capture);
        let Some(graph) = self.driver.capture().filter(|_| !leaves.is_empty()) else {
            return Ok(None);
        };
        let before = graph.frontier(stream)?;
        let mut after = before.clone();
        after.extend(leaves);
        after.sort_unstable();
        after.dedup();
        graph.set_frontier(stream, &after)?;
        Ok(Some(before))
    }

    /// Undoes [`attach_leaves`](Self::attach_leaves) when no node followed. The leaves stay unused.
    pub(super) fn detach_leaves(&self, stream: StreamId, before: Option<Vec<NodeId>>) {
        if let (Some(graph), Some(before)) = (self.driver.capture(), before) {
            // If it fails the capture is broken, and the caller is about to hear of it.
            let _ = graph.set_frontier(stream, &before);
        }
    }
}
