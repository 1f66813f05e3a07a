//! Captures: which streams are being captured, and the graph that their work becomes.
//!
//! A node is a number and the nodes it depends on; what it would do is not kept. A stream's
//! **frontier** are the nodes that its next node would depend on. A capture starts on one stream
//! and spreads when another stream waits for an event that was recorded inside it. A wait for the
//! whole device, by whichever thread, breaks all captures. Other calls that would wait are refused
//! and do no harm, where a real device would also break the capture.
//!
//! A graph is dropped when its capture ends: it never runs, and its memory goes with it.

use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::{HashMap, HashSet};

use super::{Sim, capture_active, invalid};
use crate::driver::call::Call;
use crate::driver::{Capture, CaptureStatus, DriverResult, NodeId};
use crate::ids::{StreamId, ThreadNumber};

/// All captures that have not ended.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    captures: HashMap<u64, Run>,
    branches: HashMap<StreamId, Branch>,
    nodes: HashMap<NodeId, Node>,
    last_node: u64,
    /// How often somebody said that there may be captures, and not that they are over.
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
    /// Whether no capture is under way: the usual case, asked before anything else.
    pub(super) fn is_idle(&self) -> bool {
        self.captures.is_empty()
    }

    #[inline]
    pub(super) fn status(&self, stream: StreamId) -> CaptureStatus {
        match self.branches.get(&stream) {
            None => CaptureStatus::None,
            Some(branch) if self.captures[&branch.capture].broken => CaptureStatus::Invalidated,
            Some(branch) => CaptureStatus::Active { capture: branch.capture },
        }
    }

    /// Refuses a call that waits when its thread captures.
    #[inline]
    pub(super) fn check_may_wait(&self, call: Call) -> DriverResult<()> {
        if self.is_idle() {
            return Ok(());
        }
        let own = ThreadNumber::current();
        match self.captures.values().find(|run| run.thread == own) {
            Some(run) => {
                Err(capture_active(call, format!("this thread captures stream {}", run.origin)))
            }
            None => Ok(()),
        }
    }

    /// Refuses a call that waits for `stream` when that is captured or the thread captures.
    pub(super) fn check_may_wait_for(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        self.check_not_captured(call, stream)?;
        self.check_may_wait(call)
    }

    /// Refuses a call that is not legal for a captured stream.
    pub(super) fn check_not_captured(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        if self.branches.contains_key(&stream) {
            let message = format!("stream {stream} is being captured");
            return Err(capture_active(call, message));
        }
        Ok(())
    }

    /// Refuses a call that waits for everything while anything is captured, and breaks all captures.
    pub(super) fn check_none(&mut self, call: Call) -> DriverResult<()> {
        let Some(origin) = self.captures.values().next().map(|run| run.origin) else {
            return Ok(());
        };
        self.captures.values_mut().for_each(|run| run.broken = true);
        Err(capture_active(call, format!("stream {origin} is being captured")))
    }

    /// The error of a call that asks whether an event of a capture has finished.
    pub(super) fn refuse_captured(&self, call: Call, capture: u64) -> DriverResult<bool> {
        if self.captures.contains_key(&capture) {
            let message = format!("the event belongs to capture {capture}");
            return Err(capture_active(call, message));
        }
        let message = format!("the event belongs to capture {capture}, which has ended");
        Err(invalid(call, message))
    }

    /// Refuses a submission to a stream whose capture broke.
    pub(super) fn check_takes_work(&self, call: Call, stream: StreamId) -> DriverResult<()> {
        match self.branches.get(&stream) {
            Some(branch) => check_sound(call, branch.capture, &self.captures),
            None => Ok(()),
        }
    }

    /// Turns a submission to a captured stream into a node. `None`: the stream runs.
    pub(super) fn add_node(
        &mut self,
        call: Call,
        stream: StreamId,
    ) -> DriverResult<Option<(u64, NodeId)>> {
        let Some(branch) = self.branches.get_mut(&stream) else {
            return Ok(None);
        };
        let capture = branch.capture;
        check_sound(call, capture, &self.captures)?;
        self.last_node += 1;
        let id = NodeId(self.last_node);
        let dependencies = std::mem::replace(&mut branch.frontier, vec![id]);
        let node = Node { capture, dependencies };
        self.nodes.insert(id, node);
        Ok(Some((capture, id)))
    }

    /// Makes `stream` wait for an event of a capture, which draws it into that capture.
    pub(super) fn join(
        &mut self,
        call: Call,
        stream: StreamId,
        capture: u64,
        node: NodeId,
    ) -> DriverResult<()> {
        if !self.captures.contains_key(&capture) {
            return self.refuse_captured(call, capture).map(drop);
        }
        check_sound(call, capture, &self.captures)?;
        let branch =
            self.branches.entry(stream).or_insert_with(|| Branch { capture, frontier: Vec::new() });
        if branch.capture != capture {
            let other = branch.capture;
            self.break_capture(capture);
            self.break_capture(other);
            let message = format!("the wait would merge captures {capture} and {other}");
            return Err(invalid(call, message));
        }
        if !branch.frontier.contains(&node) {
            branch.frontier.push(node);
        }
        Ok(())
    }

    /// Refuses a captured stream's wait for an event from outside, which breaks the capture.
    pub(super) fn check_no_wait_outside(
        &mut self,
        call: Call,
        stream: StreamId,
    ) -> DriverResult<()> {
        let Some(capture) = self.branches.get(&stream).map(|branch| branch.capture) else {
            return Ok(());
        };
        self.break_capture(capture);
        let message = format!("captured stream {stream} cannot wait for an event from outside");
        Err(invalid(call, message))
    }

    /// Breaks the capture that a stream belongs to.
    pub(super) fn break_on(&mut self, stream: StreamId) {
        if let Some(capture) = self.branches.get(&stream).map(|branch| branch.capture) {
            self.break_capture(capture);
        }
    }

    fn break_capture(&mut self, capture: u64) {
        if let Some(run) = self.captures.get_mut(&capture) {
            run.broken = true;
        }
    }

    fn begin(&mut self, stream: StreamId) -> DriverResult<u64> {
        // Numbers are unique in the process, not only in this device.
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let call = Call::Begin;
        if stream == StreamId::DEFAULT {
            return Err(invalid(call, "the default stream cannot be captured"));
        }
        if self.branches.contains_key(&stream) {
            let message = format!("stream {stream} is being captured already");
            return Err(capture_active(call, message));
        }
        let capture = NEXT.fetch_add(1, Ordering::Relaxed);
        let run = Run { origin: stream, thread: ThreadNumber::current(), broken: false };
        self.captures.insert(capture, run);
        let branch = Branch { capture, frontier: Vec::new() };
        self.branches.insert(stream, branch);
        Ok(capture)
    }

    fn end(&mut self, stream: StreamId) -> DriverResult<()> {
        let call = Call::End;
        let branch = self.branch(call, stream)?;
        let capture = branch.capture;
        let run = &self.captures[&capture];
        if run.origin != stream {
            let message = format!("capture {capture} began on stream {}", run.origin);
            return Err(invalid(call, message));
        }
        let sound = check_sound(call, capture, &self.captures);
        let unjoined = self.unjoined(capture, &branch.frontier);
        self.captures.remove(&capture);
        self.branches.retain(|_, branch| branch.capture != capture);
        self.nodes.retain(|_, node| node.capture != capture);
        sound?;
        match unjoined {
            Some(stream) => Err(invalid(
                call,
                format!("stream {stream} was not joined before capture {capture} ended"),
            )),
            None => Ok(()),
        }
    }

    /// These nodes and all that they depend on.
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

    /// The nodes that the next node on a captured stream comes after; nothing for other streams.
    pub(super) fn before(&self, stream: StreamId) -> HashSet<NodeId> {
        self.branches.get(&stream).map_or_else(HashSet::new, |b| self.history(&b.frontier))
    }

    /// Whether the capture of this node is still under way.
    pub(super) fn knows(&self, node: NodeId) -> bool {
        self.nodes.contains_key(&node)
    }

    /// Whether this capture has not ended.
    pub(super) fn is_open(&self, capture: u64) -> bool {
        self.captures.contains_key(&capture)
    }

    /// A stream of the capture with work that nothing in `frontier` depends on.
    fn unjoined(&self, capture: u64, frontier: &[NodeId]) -> Option<StreamId> {
        let seen = self.history(frontier);
        let mut branches = self.branches.iter();
        let unjoined = branches.find(|(_, branch)| {
            branch.capture == capture && branch.frontier.iter().any(|node| !seen.contains(node))
        });
        unjoined.map(|(stream, _)| *stream)
    }

    /// The capture of a stream, which these nodes must belong to.
    pub(super) fn check_nodes(
        &self,
        call: Call,
        stream: StreamId,
        nodes: &[NodeId],
    ) -> DriverResult<u64> {
        let capture = self.branch(call, stream)?.capture;
        check_sound(call, capture, &self.captures)?;
        let own = |node: &NodeId| self.nodes.get(node).is_some_and(|n| n.capture == capture);
        match nodes.iter().find(|node| !own(node)) {
            None => Ok(capture),
            Some(other) => {
                let message = format!("node {} does not belong to capture {capture}", other.0);
                Err(invalid(call, message))
            }
        }
    }

    /// A node behind these, which no stream comes after.
    pub(super) fn add_leaf(&mut self, capture: u64, dependencies: &[NodeId]) -> NodeId {
        self.last_node += 1;
        let id = NodeId(self.last_node);
        self.nodes.insert(id, Node { capture, dependencies: dependencies.to_vec() });
        id
    }

    fn branch(&self, call: Call, stream: StreamId) -> DriverResult<&Branch> {
        let branch = self.branches.get(&stream);
        branch.ok_or_else(|| invalid(call, format!("stream {stream} is not being captured")))
    }
}

fn check_sound(call: Call, capture: u64, captures: &HashMap<u64, Run>) -> DriverResult<()> {
    if captures[&capture].broken {
        let message = format!("capture {capture} is broken and must be ended");
        return Err(capture_active(call, message));
    }
    Ok(())
}

impl Capture for Sim {
    /// It is only counted: no call but a wait for the device breaks a capture here.
    fn expect_captures(&self, expected: bool) -> DriverResult<()> {
        let state = &mut *self.enter_other(Call::ExpectCaptures);
        let before = state.graphs.expected;
        let after = if expected { before.checked_add(1) } else { before.checked_sub(1) };
        state.graphs.expected = after
            .ok_or_else(|| invalid(Call::ExpectCaptures, "no captures were expected".to_owned()))?;
        Ok(())
    }

    fn expected(&self) -> DriverResult<u64> {
        Ok(self.enter_other(Call::Expected).graphs.expected)
    }

    fn begin(&self, stream: StreamId) -> DriverResult<u64> {
        let state = &mut *self.enter_other(Call::Begin);
        state.work.stream(Call::Begin, stream)?;
        state.graphs.begin(stream)
    }

    fn end(&self, stream: StreamId) -> DriverResult<()> {
        let state = &mut *self.enter_other(Call::End);
        let capture = state.graphs.branch(Call::End, stream)?.capture;
        let ended = state.graphs.end(stream);
        if !state.graphs.is_open(capture) {
            state.pools.graph_is_gone(capture);
        }
        ended
    }

    fn frontier(&self, stream: StreamId) -> DriverResult<Vec<NodeId>> {
        let call = Call::Frontier;
        let state = self.enter_other(call);
        let branch = state.graphs.branch(call, stream)?;
        check_sound(call, branch.capture, &state.graphs.captures)?;
        Ok(branch.frontier.clone())
    }

    fn dependencies(&self, node: NodeId) -> DriverResult<Vec<NodeId>> {
        let call = Call::Dependencies;
        let state = self.enter_other(call);
        match state.graphs.nodes.get(&node) {
            Some(node) => Ok(node.dependencies.clone()),
            None => Err(invalid(call, format!("no capture has node {}", node.0))),
        }
    }

    fn add_to_frontier(&self, stream: StreamId, nodes: &[NodeId]) -> DriverResult<()> {
        let call = Call::AddToFrontier;
        let graphs = &mut self.enter_other(call).graphs;
        graphs.check_nodes(call, stream, nodes)?;
        if let Some(branch) = graphs.branches.get_mut(&stream) {
            branch.frontier.extend_from_slice(nodes);
            branch.frontier.sort_unstable();
            branch.frontier.dedup();
        }
        Ok(())
    }

    fn free_behind(
        &self,
        address: u64,
        stream: StreamId,
        nodes: &[NodeId],
    ) -> DriverResult<NodeId> {
        self.enter_other(Call::FreeBehind).free_behind(address, stream, nodes)
    }
}
