//! Backward passes and optimizer steps, found by the stacks of requests, and what the lives of blocks show
//! about the purpose of the blocks.
//!
//! A [`Fate`] is stated only where the events show it. Frees have stacks in most recordings; where one has
//! none, the place of the free among the requests decides, and a free between a pass and the next request
//! shows nothing.

use super::callers::Callers;
use super::categories::{Category, is_of_engine};
use super::lives::{Block, Lives, NEVER};
use stratalloc::history::Action;
use stratalloc_recording::{StackId, Stacks, Trace, TraceEvent};

/// The end of a block's life, as far as it shows the purpose of the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fate {
    /// The events do not show it.
    #[default]
    NotShown,
    /// Requested outside of the passes, and freed by autograd in a backward pass.
    FreedByBackward,
    /// Requested outside of the passes, and freed before the next backward pass began.
    FreedBeforeBackward,
    /// Requested in a backward pass or in an optimizer's step, and freed in it.
    FreedInPass,
    /// Requested in a backward pass, and live after it. Or requested in an optimizer's step, and live in
    /// the next one.
    OutlivesPass,
}

/// The kind of work that made a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Other,
    Backward,
    Optimizer,
}

/// Successive requests of one pass, as moments.
#[derive(Clone, Copy, Debug)]
struct Span {
    work: Work,
    first: u32,
    last: u32,
    /// The moment of the first later request of other work; [`NEVER`] if there is none.
    next: u32,
}

/// The passes of a recording.
#[derive(Debug)]
pub(crate) struct Passes<'a> {
    /// The events, for the stacks of frees; empty for a replay.
    events: &'a [TraceEvent],
    /// The work of each stack.
    of_stacks: Vec<Work>,
    /// In the order of their moments. They do not overlap.
    spans: Vec<Span>,
    /// For each span, the first one from it on of a backward pass and of an optimizer's step; the number of
    /// spans if there is none.
    next: Vec<[usize; 2]>,
}

impl<'a> Passes<'a> {
    /// Finds the passes by the stacks of all requests of a recording.
    pub(crate) fn of(trace: &'a Trace) -> Self {
        let requests = (1..NEVER).zip(&trace.events).filter_map(|(moment, event)| {
            Some((moment, event.stack.filter(|_| event.action == Action::Alloc)?))
        });
        Self::with(&trace.events, &trace.stacks, requests)
    }

    /// Finds the passes by the stacks of the blocks of a replay. Its frees have no stacks.
    pub(crate) fn of_replay(lives: &Lives, stacks: &Stacks) -> Self {
        let blocks = lives.blocks.iter().filter(|block| block.born > 0);
        let requests = blocks.filter_map(|block| Some((block.born, block.stack?)));
        Self::with(&[], stacks, requests)
    }

    /// Finds the passes. `requests` are the moments of requests, and their stacks.
    fn with(
        events: &'a [TraceEvent],
        stacks: &Stacks,
        requests: impl Iterator<Item = (u32, StackId)>,
    ) -> Self {
        let mut passes =
            Self { events, of_stacks: works(stacks), spans: Vec::new(), next: Vec::new() };
        let mut is_open = false;
        for (moment, stack) in requests {
            let work = passes.work_of(stack);
            match passes.spans.last_mut() {
                Some(span) if is_open && span.work == work => span.last = moment,
                last => {
                    if let Some(span) = last.filter(|_| is_open) {
                        span.next = moment;
                    }
                    is_open = work != Work::Other;
                    if is_open {
                        let (first, last) = (moment, moment);
                        passes.spans.push(Span { work, first, last, next: NEVER });
                    }
                }
            }
        }
        let mut next = [passes.spans.len(); 2];
        let of_span = |(at, span): (usize, &Span)| {
            next[usize::from(span.work == Work::Optimizer)] = at;
            next
        };
        passes.next = passes.spans.iter().enumerate().rev().map(of_span).collect();
        passes.next.reverse();
        passes
    }

    fn work_of(&self, stack: StackId) -> Work {
        self.of_stacks.get(stack.index()).copied().unwrap_or(Work::Other)
    }

    /// Returns the number of spans that begin at or before a moment.
    fn begun(&self, moment: u32) -> usize {
        self.spans.partition_point(|span| span.first <= moment)
    }

    /// Returns the first span of some work that begins after a moment.
    fn next_of(&self, work: Work, moment: u32) -> Option<Span> {
        let next = self.next.get(self.begun(moment))?;
        self.spans.get(next[usize::from(work == Work::Optimizer)]).copied()
    }

    /// Returns what the life of a block shows.
    pub(crate) fn fate(&self, block: &Block) -> Fate {
        let begun = self.begun(block.born).checked_sub(1).map(|at| self.spans[at]);
        match begun.filter(|span| block.born > 0 && block.born <= span.last) {
            Some(span) if span.work == Work::Backward => self.of_backward(block, span),
            Some(span) => self.of_optimizer(block, span),
            None => match self.next_of(Work::Backward, block.born) {
                Some(backward) if block.freed <= backward.first => Fate::FreedBeforeBackward,
                Some(_) if self.is_freed_by_backward(block) == Some(true) => Fate::FreedByBackward,
                _ => Fate::NotShown,
            },
        }
    }

    fn of_backward(&self, block: &Block, span: Span) -> Fate {
        let by_backward = self.is_freed_by_backward(block);
        match by_backward {
            _ if block.freed <= span.last => Fate::FreedInPass,
            Some(true) if block.freed < span.next => Fate::FreedInPass,
            Some(true) => Fate::NotShown,
            Some(false) => Fate::OutlivesPass,
            None if span.next != NEVER && block.freed > span.next => Fate::OutlivesPass,
            None => Fate::NotShown,
        }
    }

    fn of_optimizer(&self, block: &Block, span: Span) -> Fate {
        let next = self.next_of(Work::Optimizer, span.last);
        match next {
            _ if block.freed <= span.last => Fate::FreedInPass,
            Some(next) if block.freed > next.first => Fate::OutlivesPass,
            None if block.freed == NEVER && span.next != NEVER => Fate::OutlivesPass,
            _ => Fate::NotShown,
        }
    }

    /// Returns whether autograd's engine freed a block in a backward pass; `None` if that is not shown.
    fn is_freed_by_backward(&self, block: &Block) -> Option<bool> {
        let at = usize::try_from(block.freed).ok()?.checked_sub(1)?;
        if let Some(stack) = self.events.get(at).and_then(|event| event.stack) {
            return Some(self.work_of(stack) == Work::Backward);
        }
        let span = self.spans[self.begun(block.freed).checked_sub(1)?];
        (span.work == Work::Backward && block.freed <= span.last).then_some(true)
    }
}

/// At least so many activations must be live to be taken for a graph.
const GRAPH_BLOCKS_LEAST: usize = 16;

/// Returns true if most of the activations that were requested since the oldest one that lives at a moment
/// are live: then something keeps each of them, as the graph for a backward pass does. Without a graph each
/// lives until the next operators have used it.
pub(crate) fn are_kept(lives: &Lives, callers: &Callers<'_>, moment: u32) -> bool {
    let is_activation = |block: &&Block| is_activation(callers, block);
    let sum = |all: u64, block: &Block| all.saturating_add(block.requested_bytes);
    let live: Vec<&Block> = lives.live_at(moment).filter(is_activation).collect();
    let Some(oldest) = live.iter().map(|block| block.born).min() else { return false };
    let first = lives.blocks.partition_point(|block| block.born < oldest);
    let since = lives.blocks[first..].iter().take_while(|block| block.born <= moment);
    let since_bytes = since.filter(is_activation).fold(0, sum);
    let live_bytes = live.iter().copied().fold(0, sum);
    live.len() >= GRAPH_BLOCKS_LEAST && live_bytes >= since_bytes / 2
}

/// Returns true if the request of a block was made in a forward pass.
pub(crate) fn is_activation(callers: &Callers<'_>, block: &Block) -> bool {
    let caller = block.stack.map(|stack| callers.of_stack(stack));
    caller.is_some_and(|caller| callers.category(caller) == Category::Activations)
}

/// Returns the work of each stack.
fn works(stacks: &Stacks) -> Vec<Work> {
    let frames = || (0..stacks.frame_count()).map(|number| stacks.frame(number));
    let rules: Vec<_> = frames().map(|frame| Category::rule_of(&frame)).collect();
    let is_engine: Vec<bool> = frames().map(|frame| is_of_engine(&frame)).collect();
    let work = |stack: StackId| {
        let numbers = stacks.frame_numbers(stack);
        if numbers.iter().any(|&number| is_engine[number as usize]) {
            return Work::Backward;
        }
        match Category::of_rules(numbers.iter().map(|&number| rules[number as usize])) {
            Category::OptimizerState | Category::OptimizerStep => Work::Optimizer,
            _ => Work::Other,
        }
    };
    stacks.ids().map(work).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::callers::Compared;
    use stratalloc::config::Config;
    use stratalloc_recording::{Limits, reader};

    const FORWARD: &str = "/v/site-packages/torch/nn/modules/module.py:1 _call_impl";
    const NODE: &str = "??:0 torch::autograd::generated::MulBackward0::apply(int)";
    const STEP: &str = "/v/site-packages/torch/optim/optimizer.py:1 wrapper";
    const ZERO: &str = "/v/site-packages/torch/optim/optimizer.py:9 zero_grad";

    /// Returns the fates of blocks. Each event is `+` or `-`, the block's number, and a frame, if the event
    /// has a stack.
    fn fates(events: &[(&str, u64, &str)]) -> Vec<Fate> {
        let trace = recorded(events);
        let lives = Lives::of(&trace, Config::default().settings(), 1 << 30, 1);
        let passes = Passes::of(&trace);
        let mut blocks = lives.blocks;
        blocks.sort_by_key(|block| block.address);
        blocks.iter().map(|block| passes.fate(block)).collect()
    }

    fn recorded(events: &[(&str, u64, &str)]) -> Trace {
        let event = |(sign, block, frame): &(&str, u64, &str)| {
            let action = if *sign == "+" { "alloc" } else { "free_requested" };
            let frames = frame.split_once(':').map_or_else(String::new, |(file, rest)| {
                let (line, name) = rest.split_once(' ').unwrap();
                format!(r#"{{"filename":"{file}","line":{line},"name":"{name}"}}"#)
            });
            let begin = format!(r#"{{"action":"{action}","addr":{},"size":512"#, block << 20);
            format!(r#"{begin},"stream":0,"frames":[{frames}]}}"#)
        };
        let events: Vec<String> = events.iter().map(event).collect();
        let json = format!(r#"{{"segments":[],"device_traces":[[{}]]}}"#, events.join(","));
        reader::read_bytes("made", json.as_bytes(), &Limits::default(), None).unwrap()
    }

    #[test]
    fn activations_of_a_graph_differ_from_those_of_an_inference() {
        let is_graph = |events: &[(&str, u64, &str)]| {
            let trace = recorded(events);
            let lives = Lives::of(&trace, Config::default().settings(), 1 << 30, 1);
            let callers = Callers::of(&trace.stacks, Compared::Code);
            are_kept(&lives, &callers, lives.peak_live.moment)
        };
        let graph: Vec<_> = (1..40).map(|block| ("+", block, FORWARD)).collect();
        assert!(is_graph(&graph));
        assert!(!is_graph(&graph[..15]), "too few blocks");
        let of = |block| [("+", block, FORWARD), ("-", block, FORWARD)];
        let mut inference: Vec<_> = (1..40).flat_map(of).collect();
        // Some outputs are kept.
        inference.retain(|(sign, block, _)| *sign == "+" || block % 3 != 0);
        assert!(!is_graph(&inference));
    }

    #[test]
    fn lives_show_activations_that_are_kept_gradients_and_temporary_blocks() {
        use Fate::{FreedBeforeBackward, FreedByBackward, FreedInPass, NotShown, OutlivesPass};
        let events = |backward: &'static str, program: &'static str| {
            [
                ("+", 1, FORWARD),
                ("+", 2, FORWARD),
                ("-", 2, program),
                ("+", 3, FORWARD),
                ("+", 4, NODE),
                ("+", 5, NODE),
                ("-", 1, backward),
                ("-", 4, backward),
                ("+", 6, NODE),
                ("+", 7, STEP),
                ("+", 8, STEP),
                ("-", 8, program),
                ("+", 9, STEP),
                ("-", 5, program),
                ("+", 10, FORWARD),
                ("+", 11, STEP),
            ]
        };
        let expected = [
            FreedByBackward,
            FreedBeforeBackward,
            NotShown,
            FreedInPass,
            OutlivesPass,
            OutlivesPass,
            OutlivesPass,
            FreedInPass,
            OutlivesPass,
            NotShown,
            NotShown,
        ];
        assert_eq!(fates(&events(NODE, ZERO)), expected);
        assert_eq!(fates(&events("", "")), expected);
    }

    #[test]
    fn a_free_after_the_last_request_of_a_pass_shows_nothing_without_a_stack() {
        let events = |free: &'static str| {
            [("+", 1, FORWARD), ("+", 2, NODE), ("-", 1, free), ("-", 2, free), ("+", 3, FORWARD)]
        };
        let of = |free| fates(&events(free))[..2].to_vec();
        assert_eq!(of(""), [Fate::NotShown; 2]);
        assert_eq!(of(NODE), [Fate::FreedByBackward, Fate::FreedInPass]);
        assert_eq!(of(ZERO), [Fate::NotShown, Fate::OutlivesPass]);
    }

    #[test]
    fn many_steps_of_an_optimizer_take_linear_time() {
        let steps = (2_u64..60_000).map(|at| ("+", at, if at % 2 == 0 { STEP } else { FORWARD }));
        let mut events: Vec<_> = (60_000_u64..120_000).map(|at| ("+", at, FORWARD)).collect();
        events.extend(steps);
        assert!(fates(&events)[60_000..].iter().all(|fate| *fate == Fate::NotShown));
    }

    #[test]
    fn the_end_of_the_recording_is_no_end_of_a_life() {
        assert_eq!(fates(&[("+", 1, FORWARD), ("+", 2, NODE)]), [Fate::NotShown; 2]);
        assert_eq!(fates(&[("+", 1, STEP)]), [Fate::NotShown]);
        assert_eq!(fates(&[("+", 1, FORWARD), ("-", 1, FORWARD)]), [Fate::NotShown]);
    }
}
