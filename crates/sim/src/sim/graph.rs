//! Stream capture: which streams are captured, and the graph of their work.
//!
//! A node is a number and the nodes it depends on. Its work is not kept. The **frontier** of a stream is the
//! set of nodes that its next node would depend on. A capture begins on one stream. Another stream joins when
//! it waits for an event that was recorded in the capture. A wait for the whole device, on any thread,
//! invalidates all captures. Other synchronising calls return an error and leave the capture valid; a real
//! device would also invalidate it.
//!
//! A graph is dropped when its capture ends: it never runs, and its memory is freed.

use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::{HashMap, HashSet};

use super::{Done, Kind, Refusal, SimulatedDevice, State, capture_active, ensure, invalid};
use stratalloc::driver::call::{calls, forward};
use stratalloc::driver::{Capture, CaptureStatus, NodeId};
use stratalloc::ids::{StreamId, ThreadNumber};

/// All captures that have not ended.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    captures: HashMap<u64, Run>,
    branches: HashMap<StreamId, Branch>,
    nodes: HashMap<NodeId, Node>,
    last_node: u64,
    /// How many captures were announced with `expect_captures(true)` and not yet withdrawn.
    pub(super) expected: u64,
}

#[derive(Debug)]
struct Run {
    origin: StreamId,
    thread: ThreadNumber,
    broken: bool,
}

/// A stream that belongs to a capture.
#[derive(Debug)]
struct Branch {
    capture: u64,
    frontier: Vec<NodeId>,
}

#[derive(Debug)]
struct Node {
    capture: u64,
    dependencies: Vec<NodeId>,
}

impl Graphs {
    #[inline]
    pub(super) fn status(&self, stream: StreamId) -> CaptureStatus {
        match self.branches.get(&stream) {
            None => CaptureStatus::None,
            Some(branch) if self.captures[&branch.capture].broken => CaptureStatus::Invalidated,
            Some(branch) => CaptureStatus::Active { capture: branch.capture },
        }
    }

    /// Returns an error for a call that waits, if the calling thread has begun a capture.
    #[inline]
    pub(super) fn check_may_wait(&self) -> Done<()> {
        if self.captures.is_empty() {
            return Ok(());
        }
        let own = ThreadNumber::current();
        match self.captures.values().find(|run| run.thread == own) {
            Some(run) => Err(capture_active(format!("this thread captures stream {}", run.origin))),
            None => Ok(()),
        }
    }

    /// Returns an error for a call that waits for `stream`, if the stream is being captured or the calling
    /// thread has begun a capture.
    pub(super) fn check_may_wait_for(&self, stream: StreamId) -> Done<()> {
        self.check_not_captured(stream)?;
        self.check_may_wait()
    }

    /// Returns an error for a call that is not allowed on a captured stream, if `stream` is one.
    pub(super) fn check_not_captured(&self, stream: StreamId) -> Done<()> {
        let is_captured = self.branches.contains_key(&stream);
        ensure!(!is_captured, capture_active: "stream {stream} is being captured");
        Ok(())
    }

    /// Returns an error for a wait for the whole device if there is any capture, and invalidates all
    /// captures.
    pub(super) fn check_none(&mut self) -> Done<()> {
        let Some(origin) = self.captures.values().next().map(|run| run.origin) else {
            return Ok(());
        };
        self.captures.values_mut().for_each(|run| run.broken = true);
        Err(capture_active(format!("stream {origin} is being captured")))
    }

    /// Returns the error of a call that waits for or queries an event which was recorded in a capture.
    #[cold]
    pub(super) fn refusal_of(&self, capture: u64) -> Refusal {
        match self.captures.contains_key(&capture) {
            true => capture_active(format!("the event belongs to capture {capture}")),
            false => invalid(format!("the event belongs to capture {capture}, which has ended")),
        }
    }

    /// Returns an error for a submission to a stream whose capture was invalidated.
    pub(super) fn check_takes_work(&self, stream: StreamId) -> Done<()> {
        let branch = self.branches.get(&stream);
        branch.map_or(Ok(()), |branch| check_sound(branch.capture, &self.captures))
    }

    /// Turns a submission to a captured stream into a node. Returns `None` if the stream is not
    /// captured.
    pub(super) fn add_node(&mut self, stream: StreamId) -> Done<Option<(u64, NodeId)>> {
        let Some(branch) = self.branches.get_mut(&stream) else {
            return Ok(None);
        };
        let capture = branch.capture;
        check_sound(capture, &self.captures)?;
        self.last_node += 1;
        let id = NodeId(self.last_node);
        let dependencies = std::mem::replace(&mut branch.frontier, vec![id]);
        self.nodes.insert(id, Node { capture, dependencies });
        Ok(Some((capture, id)))
    }

    /// Makes `stream` wait for an event of a capture. The stream joins that capture. If it belongs to another
    /// capture, both are invalidated.
    pub(super) fn join(&mut self, stream: StreamId, capture: u64, node: NodeId) -> Done<()> {
        if !self.captures.contains_key(&capture) {
            return Err(self.refusal_of(capture));
        }
        check_sound(capture, &self.captures)?;
        let fresh = || Branch { capture, frontier: Vec::new() };
        let branch = self.branches.entry(stream).or_insert_with(fresh);
        let other = branch.capture;
        if other != capture {
            self.break_capture(capture);
            self.break_capture(other);
            return Err(invalid(format!("the wait would merge captures {capture} and {other}")));
        }
        if !branch.frontier.contains(&node) {
            branch.frontier.push(node);
        }
        Ok(())
    }

    /// Refuses the wait of a captured stream for an event that was recorded outside captures, and invalidates
    /// the stream's capture. Other streams may wait.
    pub(super) fn check_no_wait_outside(&mut self, stream: StreamId) -> Done<()> {
        let broke = self.break_on(stream);
        ensure!(!broke, "captured stream {stream} cannot wait for an event from outside");
        Ok(())
    }

    /// Invalidates the capture that a stream belongs to. Returns false if it belongs to none.
    pub(super) fn break_on(&mut self, stream: StreamId) -> bool {
        let capture = self.branches.get(&stream).map(|branch| branch.capture);
        capture.map(|capture| self.break_capture(capture)).is_some()
    }

    fn break_capture(&mut self, capture: u64) {
        if let Some(run) = self.captures.get_mut(&capture) {
            run.broken = true;
        }
    }

    fn begin(&mut self, stream: StreamId) -> Done<u64> {
        // Capture numbers are unique in the process, not only on this device.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        ensure!(stream != StreamId::DEFAULT, "the default stream cannot be captured");
        let is_captured = self.branches.contains_key(&stream);
        ensure!(!is_captured, capture_active: "stream {stream} is being captured already");
        let capture = NEXT.fetch_add(1, Ordering::Relaxed);
        let run = Run { origin: stream, thread: ThreadNumber::current(), broken: false };
        self.captures.insert(capture, run);
        self.branches.insert(stream, Branch { capture, frontier: Vec::new() });
        Ok(capture)
    }

    fn end(&mut self, stream: StreamId) -> Done<()> {
        let branch = self.branch(stream)?;
        let capture = branch.capture;
        let origin = self.captures[&capture].origin;
        ensure!(origin == stream, "capture {capture} began on stream {origin}");
        let sound = check_sound(capture, &self.captures);
        let unjoined = self.unjoined(capture, &branch.frontier);
        self.captures.remove(&capture);
        self.branches.retain(|_, branch| branch.capture != capture);
        self.nodes.retain(|_, node| node.capture != capture);
        sound?;
        let Some(stream) = unjoined else { return Ok(()) };
        Err(invalid(format!("stream {stream} was not joined before capture {capture} ended")))
    }

    /// Returns these nodes and all nodes that they depend on.
    fn history(&self, frontier: &[NodeId]) -> HashSet<NodeId> {
        let mut seen = HashSet::new();
        let mut todo = frontier.to_vec();
        while let Some(node) = todo.pop() {
            if seen.insert(node) {
                todo.extend(&self.nodes[&node].dependencies);
            }
        }
        seen
    }

    /// Returns the nodes that precede the next node on a captured stream. Empty for other streams.
    pub(super) fn before(&self, stream: StreamId) -> HashSet<NodeId> {
        self.branches.get(&stream).map_or_else(HashSet::new, |b| self.history(&b.frontier))
    }

    /// Returns whether the capture of this node has not ended.
    pub(super) fn contains(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Returns whether this capture has not ended.
    pub(super) fn is_open(&self, capture: u64) -> bool {
        self.captures.contains_key(&capture)
    }

    /// Returns a stream of the capture with work that no node in `frontier` depends on, if any.
    fn unjoined(&self, capture: u64, frontier: &[NodeId]) -> Option<StreamId> {
        let seen = self.history(frontier);
        let mut branches = self.branches.iter();
        let unjoined = branches.find(|(_, branch)| {
            branch.capture == capture && branch.frontier.iter().any(|node| !seen.contains(node))
        });
        unjoined.map(|(stream, _)| *stream)
    }

    /// Returns the capture of a stream, after checking that it is valid and that these nodes belong to it.
    pub(super) fn check_nodes(&self, stream: StreamId, nodes: &[NodeId]) -> Done<u64> {
        let capture = self.branch(stream)?.capture;
        check_sound(capture, &self.captures)?;
        for node in nodes {
            let is_own = self.nodes.get(node).is_some_and(|node| node.capture == capture);
            ensure!(is_own, "node {} does not belong to capture {capture}", node.0);
        }
        Ok(capture)
    }

    /// Adds a node that depends on these nodes and is in no stream's frontier.
    pub(super) fn add_leaf(&mut self, capture: u64, dependencies: &[NodeId]) -> NodeId {
        self.last_node += 1;
        let id = NodeId(self.last_node);
        self.nodes.insert(id, Node { capture, dependencies: dependencies.to_vec() });
        id
    }

    fn branch(&self, stream: StreamId) -> Done<&Branch> {
        let branch = self.branches.get(&stream);
        branch.ok_or_else(|| invalid(format!("stream {stream} is not being captured")))
    }
}

fn check_sound(capture: u64, captures: &HashMap<u64, Run>) -> Done<()> {
    let is_broken = captures[&capture].broken;
    ensure!(!is_broken, capture_active: "capture {capture} is broken and must be ended");
    Ok(())
}

impl State {
    /// Only counts. The CUDA driver avoids calls that would invalidate a capture while captures are expected;
    /// the simulated device does not.
    fn expect_captures(&mut self, expected: bool) -> Done<()> {
        let before = self.graphs.expected;
        let after = if expected { before.checked_add(1) } else { before.checked_sub(1) };
        self.graphs.expected = after.ok_or_else(|| invalid("no captures were expected"))?;
        Ok(())
    }

    fn expected(&mut self) -> Done<u64> {
        Ok(self.graphs.expected)
    }

    fn begin(&mut self, stream: StreamId) -> Done<u64> {
        self.work.stream(stream)?;
        self.graphs.begin(stream)
    }

    fn end(&mut self, stream: StreamId) -> Done<()> {
        let capture = self.graphs.branch(stream)?.capture;
        let ended = self.graphs.end(stream);
        if !self.graphs.is_open(capture) {
            self.pools.graph_is_gone(capture);
        }
        ended
    }

    fn frontier(&mut self, stream: StreamId) -> Done<Vec<NodeId>> {
        let branch = self.graphs.branch(stream)?;
        check_sound(branch.capture, &self.graphs.captures)?;
        Ok(branch.frontier.clone())
    }

    fn dependencies(&mut self, node: NodeId) -> Done<Vec<NodeId>> {
        match self.graphs.nodes.get(&node) {
            Some(node) => Ok(node.dependencies.clone()),
            None => Err(invalid(format!("no capture has node {}", node.0))),
        }
    }

    fn add_to_frontier(&mut self, stream: StreamId, nodes: &[NodeId]) -> Done<()> {
        let graphs = &mut self.graphs;
        graphs.check_nodes(stream, nodes)?;
        if let Some(branch) = graphs.branches.get_mut(&stream) {
            branch.frontier.extend_from_slice(nodes);
            branch.frontier.sort_unstable();
            branch.frontier.dedup();
        }
        Ok(())
    }
}

impl<K: Kind> Capture for SimulatedDevice<K> {
    calls! { Capture forward Self::call; }
}
