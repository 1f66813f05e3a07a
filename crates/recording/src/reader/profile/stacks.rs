//! Finds the calls that enclose each event of memory on its thread.
//!
//! A Python function's event has the line of its `def` statement. The events inside have the line from which
//! they were called (`CallFrom`, in newer versions), so this line replaces the other one where it is known.
//! Functions of modules written in C are no frames, but the lines from which they are called count. A thread
//! of the backward pass has no Python functions: there the node of autograd is the frame.

use super::events::ProfileEvents;
use crate::reader::budget::OverBudget;
use crate::stacks::{Frame, MayGrow, StackBuilder, StackId};

/// The number of enclosing calls that are followed. Python's own limit is 1,000.
const CALLS_MAX: usize = 512;
/// The name of an operator that runs a node of the backward pass, up to the node.
const NODE: &str = "autograd::engine::evaluate_function: ";

/// A call with its duration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// The number of its thread.
    pub(super) track: u32,
    pub(super) frame: CallFrame,
    /// The frame of the line from which it was called.
    pub(super) from: Option<u32>,
    pub(super) begin_us: f64,
    pub(super) end_us: f64,
}

/// The frame that a call adds to a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallFrame {
    /// The frame with this number.
    Known(u32),
    /// An operator outside the backward pass: a frame only if nothing else encloses the event.
    Operator(u32),
    /// The frame exceeded the memory limit.
    LeftOut,
    /// Only the line from which it was called counts.
    None,
}

/// The name of a call, in parts.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Callee<'a> {
    Python(Frame<'a>),
    /// A node of the backward pass.
    Node(String),
    Operator(&'a str),
    /// A function of a module written in C, or the event of an `nn.Module` around the call of its function.
    Other,
}

impl<'a> Callee<'a> {
    /// Parses `path/file.py(12): function`.
    pub(super) fn python(name: &'a str) -> Self {
        let parts = || {
            let (file, rest) = name
                .rsplit_once("): ")
                .map(|(place, function)| (place.rsplit_once('('), function))?;
            let (file, line) = file?;
            Some(Self::Python(Frame { file, line: line.parse().ok()?, function: rest }))
        };
        parts().unwrap_or(Self::Other)
    }

    /// Parses the name of an operator.
    pub(super) fn operator(name: &'a str) -> Self {
        match name.strip_prefix(NODE) {
            // The name that the node has among the functions of a snapshot.
            Some(node) => Self::Node(format!(
                "torch::autograd::{}::apply",
                node.rsplit("::").next().unwrap_or(node)
            )),
            None => Self::Operator(name),
        }
    }
}

impl Call {
    /// Returns a call without its time; `None` if it adds nothing to a stack. `from` is its file and line.
    pub(super) fn of(
        callee: &Callee<'_>,
        from: &str,
        stacks: &mut StackBuilder,
        may_grow: MayGrow<'_>,
    ) -> Option<Self> {
        let (frame, is_operator) = match callee {
            Callee::Python(frame) => (Some(*frame), false),
            Callee::Node(function) => (Some(Frame { file: "", line: 0, function }), false),
            Callee::Operator(function) => (Some(Frame { file: "", line: 0, function }), true),
            Callee::Other => (None, false),
        };
        let frame = match frame.map(|frame| stacks.frame(frame, &mut *may_grow)) {
            Some(Some(number)) if is_operator => CallFrame::Operator(number),
            Some(Some(number)) => CallFrame::Known(number),
            Some(None) => CallFrame::LeftOut,
            None => CallFrame::None,
        };
        let place = from.rsplit_once(':');
        let place = place.and_then(|(file, line)| Some((file, line.parse().ok()?)));
        let from = place
            .and_then(|(file, line)| stacks.frame(Frame { file, line, function: "" }, may_grow));
        let adds = frame != CallFrame::None || from.is_some();
        adds.then_some(Self { track: 0, frame, from, begin_us: 0.0, end_us: 0.0 })
    }
}

impl ProfileEvents {
    /// Sets the stack of each event of memory.
    pub(super) fn find_stacks(&mut self) -> Result<(), OverBudget> {
        let Self { budget, memory, calls, stacks, .. } = self;
        calls.sort_by(|one, other| {
            (one.track.cmp(&other.track))
                .then(one.begin_us.total_cmp(&other.begin_us))
                .then(other.end_us.total_cmp(&one.end_us))
        });
        let mut order: Vec<usize> = budget.vec_of(memory.len())?;
        order.extend(0..memory.len());
        order.sort_by(|one, other| {
            let (one, other) = (&memory[*one], &memory[*other]);
            one.track.cmp(&other.track).then(one.time_us.total_cmp(&other.time_us))
        });
        let mut open = OpenCalls::default();
        let mut calls = calls.iter().peekable();
        for at in order {
            let event = &mut memory[at];
            let is_before =
                |call: &&Call| (call.track, call.begin_us) <= (event.track, event.time_us);
            while let Some(call) = calls.next_if(is_before) {
                open.enter(call);
            }
            open.leave_until(event.track, event.time_us);
            event.stack = open.stack(stacks, &mut |bytes| budget.charge(bytes).is_ok());
        }
        Ok(())
    }
}

/// The calls that enclose the current moment on one thread, the outermost first.
#[derive(Default)]
struct OpenCalls {
    calls: Vec<Call>,
    /// The stack of these calls, if it was found already.
    found: Option<Option<StackId>>,
}

impl OpenCalls {
    fn enter(&mut self, call: &Call) {
        self.leave_until(call.track, call.begin_us);
        if self.calls.len() < CALLS_MAX {
            self.calls.push(*call);
            self.found = None;
        }
    }

    fn leave_until(&mut self, track: u32, time_us: f64) {
        let is_over = |call: &Call| call.track != track || call.end_us < time_us;
        while self.calls.last().is_some_and(is_over) {
            self.calls.pop();
            self.found = None;
        }
    }

    fn stack(&mut self, stacks: &mut StackBuilder, may_grow: MayGrow<'_>) -> Option<StackId> {
        if let Some(found) = self.found {
            return found;
        }
        let mut from = None;
        let mut has_frame = false;
        for call in self.calls.iter().rev() {
            let number = match call.frame {
                CallFrame::Known(number) => {
                    let here = |from| stacks.frame_at_line_of(number, from, &mut *may_grow);
                    Some(from.map_or(Some(number), here))
                }
                CallFrame::LeftOut => Some(None),
                CallFrame::Operator(_) | CallFrame::None => None,
            };
            if let Some(number) = number {
                has_frame = true;
                if !stacks.add(number) {
                    break;
                }
            }
            // An operator is called by the function that encloses it, from a line that its event lacks.
            if !matches!(call.frame, CallFrame::Operator(_)) {
                from = call.from;
            }
        }
        if !has_frame
            && let Some(Call { frame: CallFrame::Operator(number), .. }) = self.calls.last()
        {
            stacks.add(Some(*number));
        }
        let stack = stacks.end(may_grow);
        self.found = Some(stack);
        stack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_calls_are_parsed() {
        let frame = |file, line, function| Callee::Python(Frame { file, line, function });
        assert_eq!(Callee::python("a/b.py(12): f"), frame("a/b.py", 12, "f"));
        assert_eq!(Callee::python("<string>(2): <lambda>"), frame("<string>", 2, "<lambda>"));
        assert_eq!(Callee::python("a (1)/b.py(3): g"), frame("a (1)/b.py", 3, "g"));
        for other in
            ["<built-in method empty of type object at 0x7f>", "nn.Module: Linear_0", "", "(x): "]
        {
            assert_eq!(Callee::python(other), Callee::Other, "{other}");
        }
        let node = |name: &str| Callee::Node(name.to_owned());
        assert_eq!(
            Callee::operator("autograd::engine::evaluate_function: MmBackward0"),
            node("torch::autograd::MmBackward0::apply")
        );
        assert_eq!(
            Callee::operator(
                "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
            ),
            node("torch::autograd::AccumulateGrad::apply")
        );
        assert_eq!(Callee::operator("aten::mm"), Callee::Operator("aten::mm"));
    }
}
