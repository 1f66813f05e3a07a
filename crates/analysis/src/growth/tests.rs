//! Programs with known growth, or with none, that a generator writes as recordings.

use std::collections::BTreeMap;

use super::*;
use crate::{Compared, Memory, near};
use stratalloc::size::MIB;
use stratalloc_recording::{Limits, reader};

const NODE: &str = "??:0 torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)";
const ADAM: &str = "/v/site-packages/torch/optim/adam.py:170 _init_group";

/// A program that is recorded: its entries, and its live blocks.
struct Program {
    entries: Vec<String>,
    live: BTreeMap<u64, u64>,
    next: u64,
    has_stacks: bool,
    /// The text that the program sets for its requests.
    metadata: String,
}

impl Program {
    fn new() -> Self {
        Self {
            entries: Vec::new(),
            live: BTreeMap::new(),
            next: 0,
            has_stacks: true,
            metadata: String::new(),
        }
    }

    fn frames(&self, stack: &[&str]) -> String {
        let frame = |text: &&str| {
            let (file, rest) = text.split_once(':').expect("a file");
            let (line, function) = rest.split_once(' ').expect("a line");
            format!(r#"{{"filename":"{file}","line":{line},"name":"{function}"}}"#)
        };
        let stack = if self.has_stacks { stack } else { &[] };
        stack.iter().map(frame).collect::<Vec<_>>().join(",")
    }

    fn entry(&mut self, action: &str, address: u64, bytes: u64) {
        self.entries
            .push(format!(r#"{{"action":"{action}","addr":{address},"size":{bytes},"stream":0}}"#));
    }

    /// Allocates a block, in a segment of its own, and returns its address.
    fn alloc(&mut self, mib: u64, stack: &[&str]) -> u64 {
        let (address, bytes) = (self.next, mib * MIB);
        self.next += bytes;
        self.live.insert(address, bytes);
        self.entry("segment_alloc", address, bytes);
        let frames = self.frames(stack);
        let metadata = &self.metadata;
        self.entries.push(format!(
            r#"{{"action":"alloc","addr":{address},"size":{bytes},"stream":0,"user_metadata":"{metadata}","frames":[{frames}]}}"#
        ));
        address
    }

    fn free(&mut self, address: u64) {
        let bytes = self.live.remove(&address).expect("the block lives");
        for action in ["free_requested", "free_completed", "segment_free"] {
            self.entry(action, address, bytes);
        }
    }

    fn fails(&mut self, mib: u64) {
        let bytes = mib * MIB;
        self.entries.push(format!(
            r#"{{"action":"oom","device_free":0,"size":{bytes},"stream":0,"frames":[]}}"#
        ));
    }

    /// Returns the growth in the recording of the last `entries` entries.
    fn growth_of_last(&self, entries: usize) -> Result<StepGrowth, &'static str> {
        let segment = |(address, bytes): (&u64, &u64)| {
            format!(
                r#"{{"address":{address},"total_size":{bytes},"stream":0,"segment_type":"large","blocks":[{{"address":{address},"size":{bytes},"requested_size":{bytes},"state":"active_allocated"}}]}}"#
            )
        };
        let segments: Vec<String> = self.live.iter().map(segment).collect();
        let json = format!(
            r#"{{"segments":[{}],"device_traces":[[{}]]}}"#,
            segments.join(","),
            self.entries[self.entries.len() - entries..].join(",")
        );
        let trace = reader::read_bytes("made", json.as_bytes(), &Limits::default(), None);
        let recording = Recording::unverified(trace.expect("a recording"), None, Memory::default());
        let timeline = Timeline::recorded(&recording, 1).expect("no replay");
        let callers = Callers::of(&recording.trace.stacks, Compared::Code);
        StepGrowth::of(&recording, &timeline, &callers, 10)
    }

    fn growth(&self) -> Result<StepGrowth, &'static str> {
        self.growth_of_last(self.entries.len())
    }

    fn found(&self) -> StepGrowth {
        self.growth().expect("steps are found")
    }

    /// Allocates the parameters of a model.
    fn build(&mut self) {
        for _ in 0..8 {
            self.alloc(64, &["model.py:8 __init__", "train.py:30 main"]);
        }
    }

    /// Runs the layers of a model, and returns their outputs. `from` is the line that calls the model.
    fn forward(&mut self, mib: u64, from: &str) -> Vec<u64> {
        let layer = |at: u64| (10 + at, ["model.py:21 norm", "model.py:22 linear"]);
        let mut outputs = Vec::new();
        for at in 0..4 {
            let (_, lines) = layer(at);
            for line in lines {
                outputs.push(self.alloc(mib, &[line, "model.py:15 forward", from]));
            }
        }
        outputs
    }

    /// Runs the backward pass of outputs, and returns the gradients.
    fn backward(&mut self, outputs: Vec<u64>) -> Vec<u64> {
        let mut gradients = Vec::new();
        for output in outputs.into_iter().rev() {
            gradients.push(self.alloc(64, &[NODE]));
            self.free(output);
        }
        gradients
    }

    /// Runs the optimizer, with new state in the first step, and frees the gradients.
    fn optimize(&mut self, gradients: Vec<u64>, is_first: bool) {
        if is_first {
            gradients.iter().for_each(|_| {
                self.alloc(64, &[ADAM, "train.py:53 main"]);
            });
        }
        let temporary = self.alloc(64, &["train.py:53 main"]);
        self.free(temporary);
        gradients.into_iter().for_each(|gradient| self.free(gradient));
    }

    /// Runs a step of training with outputs of this size. The input of the step before is freed when that of
    /// this step exists.
    fn train(&mut self, mib: u64, before: &mut Option<u64>) {
        let input = self.alloc(mib, &["train.py:50 main"]);
        let is_first = before.is_none();
        before.replace(input).into_iter().for_each(|before| self.free(before));
        let outputs = self.forward(mib, "train.py:51 main");
        let gradients = self.backward(outputs);
        self.optimize(gradients, is_first);
    }
}

/// Returns the program after `steps` steps. `more` is called after each step with its number.
fn trained(
    steps: u64,
    mib: impl Fn(u64) -> u64,
    mut more: impl FnMut(&mut Program, u64),
) -> Program {
    let mut program = Program::new();
    program.build();
    let mut input = None;
    for step in 0..steps {
        program.train(mib(step), &mut input);
        more(&mut program, step);
    }
    program
}

const LEAK: [&str; 1] = ["train.py:54 main"];

fn keep(program: &mut Program) {
    program.alloc(12, &LEAK);
}

#[test]
fn a_list_that_keeps_a_block_of_each_step_grows() {
    let program = trained(40, |_| 10, |program, _| keep(program));
    let found = program.found();
    assert!((39..=40).contains(&found.steps), "{found:?}");
    assert_eq!((found.bytes_per_step, found.is_growing, found.is_decisive), (12 * MIB, true, true));
    let row = &found.rows[0];
    assert_eq!(
        (row.asked_for_by.as_str(), row.course),
        ("train.py:54 main", GrowthCourse::MoreBlocks)
    );
    assert_eq!((row.blocks_per_step, row.held_bytes, row.held_blocks), (1.0, 480 * MIB, 40));
    let without = near(found.without_growth_bytes);
    assert_eq!(
        found.sentence.to_string(),
        format!(
            "Live memory grows by 12.0 MiB a step, {} MiB over {} steps: train.py:54 main, 1 block a step. \
             The program keeps a reference to each of these blocks. Without everything that grows, the last \
             steps would need about {without} MiB of live memory.",
            12 * found.steps,
            found.steps
        )
    );
    // What does not grow: parameters, their gradients and the optimizer's state, and the blocks of a step.
    let peak = found.without_growth_bytes + found.grown_bytes;
    assert!(peak >= found.live_bytes, "{found:?}");
    // The optimizer's state is a cache that fills once.
    let state = found.rows.last().expect("a row");
    assert!(state.asked_for_by.ends_with("[optimizer state]"), "{state:?}");
    assert_eq!((state.course, state.last_step), (GrowthCourse::FilledOnce, 1));
}

#[test]
fn a_list_that_keeps_the_graph_of_each_step_names_the_sum_and_its_lines() {
    let keep = |program: &mut Program, _| drop(program.forward(2, "train.py:60 main"));
    let found = trained(20, |_| 10, keep).found();
    assert_eq!(found.bytes_per_step, 16 * MIB);
    let begin = "Live memory grows by 16.0 MiB a step, ";
    let end = ", nearly all of it from train.py:60 main: model.py:21 norm < model.py:15 forward, \
               8.0 MiB; model.py:22 linear < model.py:15 forward, 8.0 MiB. The program keeps a \
               reference to each of these blocks. Several lines that grow together are usually the graphs of \
               results that are kept: keep loss.item() or loss.detach(), not loss.";
    let sentence = found.sentence.to_string();
    assert!(sentence.starts_with(begin) && sentence.contains(end), "{sentence}");
}

#[test]
fn inputs_of_varied_lengths_are_no_growth() {
    let lengths = [7, 31, 12, 25, 3, 18, 40, 9, 22, 14, 36];
    for shift in 0..11 {
        let length = |step: u64| lengths[usize::try_from(step + shift).expect("small") % 11];
        let found = trained(40, length, |_, _| ()).found();
        assert!((39..=40).contains(&found.steps) && !found.is_growing, "{found:?}");
    }
}

#[test]
fn one_larger_input_is_no_growth() {
    for larger in [20, 38] {
        let found = trained(40, |step| if step == larger { 200 } else { 10 }, |_, _| ()).found();
        assert!(!found.is_growing, "{found:?}");
    }
}

#[test]
fn caches_that_fill_once_are_no_growth() {
    let cache = ["train.py:58 main"];
    let fill = |program: &mut Program, step| {
        if step < 20 {
            program.alloc(30, &cache);
        }
    };
    let found = trained(40, |_| 10, fill).found();
    assert!(!found.is_growing && found.bytes_per_step == 0, "{found:?}");
    let row = found.rows.iter().find(|row| row.asked_for_by == cache[0]).expect("its row");
    assert_eq!((row.course, row.held_bytes), (GrowthCourse::FilledOnce, 600 * MIB));
    assert!((19..=21).contains(&row.last_step), "{row:?}");
}

#[test]
fn accumulated_gradients_and_windows_of_steps_are_no_growth() {
    let mut kept = Vec::new();
    let accumulate = |program: &mut Program, step| {
        kept.push(program.alloc(20, &["train.py:55 main"]));
        if step % 8 == 7 {
            kept.drain(..).for_each(|block| program.free(block));
        }
    };
    let found = trained(39, |_| 10, accumulate).found();
    assert!(!found.is_growing, "{found:?}");
    let mut last = std::collections::VecDeque::new();
    let window = |program: &mut Program, _| {
        last.push_back(program.alloc(20, &["train.py:55 main"]));
        if last.len() > 6 {
            last.pop_front().into_iter().for_each(|block| program.free(block));
        }
    };
    let found = trained(40, |_| 10, window).found();
    assert!(!found.is_growing, "{found:?}");
}

#[test]
fn a_block_that_is_replaced_by_a_larger_one_in_each_step_grows() {
    let mut cache = None;
    let concatenate = |program: &mut Program, step| {
        let longer = program.alloc(8 * (step + 1), &["train.py:57 main"]);
        cache.replace(longer).into_iter().for_each(|shorter| program.free(shorter));
    };
    let found = trained(30, |_| 10, concatenate).found();
    assert_eq!((found.bytes_per_step, found.is_growing), (8 * MIB, true));
    assert_eq!((found.rows[0].course, found.rows[0].held_blocks), (GrowthCourse::LargerBlocks, 1));
    let end = "train.py:57 main, which replaces a block by a larger one.";
    assert!(found.sentence.to_string().contains(end), "{}", found.sentence);
}

#[test]
fn an_evaluation_every_ten_steps_neither_hides_nor_makes_growth() {
    let evaluate = |leak: u64| {
        move |program: &mut Program, step: u64| {
            if step % 10 == 9 {
                let outputs = program.forward(5, "train.py:70 main");
                outputs.into_iter().for_each(|output| program.free(output));
            }
            if leak > 0 {
                program.alloc(leak, &LEAK);
            }
        }
    };
    let found = trained(40, |_| 10, evaluate(0)).found();
    assert!((39..=40).contains(&found.steps) && !found.is_growing, "{found:?}");
    let found = trained(40, |_| 10, evaluate(12)).found();
    assert!((39..=40).contains(&found.steps), "{found:?}");
    assert_eq!((found.bytes_per_step, found.rows[0].asked_for_by.as_str()), (12 * MIB, LEAK[0]));
}

#[test]
fn a_block_at_every_third_step_is_growth_of_a_third() {
    let leak = |program: &mut Program, step: u64| {
        if step.is_multiple_of(3) {
            program.alloc(12, &LEAK);
        }
    };
    let found = trained(43, |_| 10, leak).found();
    assert!((42..=43).contains(&found.steps), "{found:?}");
    assert!((3 * MIB..5 * MIB).contains(&found.bytes_per_step), "{found:?}");
    assert!(
        found.sentence.to_string().contains("train.py:54 main, 1 block in 3 steps"),
        "{}",
        found.sentence
    );
    let leak = |program: &mut Program, step: u64| {
        if !step.is_multiple_of(3) {
            program.alloc(12, &LEAK);
        }
    };
    let found = trained(43, |_| 10, leak).found();
    assert!(
        found.sentence.to_string().contains("train.py:54 main, 0.7 blocks a step"),
        "{}",
        found.sentence
    );
}

#[test]
fn a_ring_that_begins_in_the_middle_shows_the_growth_in_it() {
    let program = trained(40, |_| 10, |program, _| keep(program));
    let found = program.growth_of_last(program.entries.len() / 3).expect("steps are found");
    assert!((11..=14).contains(&found.steps), "{found:?}");
    assert_eq!((found.bytes_per_step, found.is_growing), (12 * MIB, true));
}

#[test]
fn growth_until_a_failed_request_ends_before_the_steps_after_it() {
    let mut kept = Vec::new();
    let mut program = trained(20, |_| 10, |program, _| kept.push(program.alloc(12, &LEAK)));
    program.alloc(10, &["train.py:50 main"]);
    program.fails(500);
    kept.into_iter().for_each(|block| program.free(block));
    let found = program.found();
    assert_eq!((found.bytes_per_step, found.is_decisive), (12 * MIB, true));
    assert!(
        found.sentence.to_string().contains(" before a request failed: train.py:54"),
        "{}",
        found.sentence
    );
}

#[test]
fn steps_after_an_early_failure_are_found() {
    let mut program = Program::new();
    program.build();
    program.fails(9000);
    let mut input = None;
    for _ in 0..20 {
        program.train(10, &mut input);
        keep(&mut program);
    }
    let found = program.found();
    assert_eq!((found.bytes_per_step, found.is_growing), (12 * MIB, true));
    assert!(!found.sentence.to_string().contains("failed"), "{}", found.sentence);
}

#[test]
fn steps_whose_backward_pass_becomes_longer_are_found() {
    let mut program = Program::new();
    program.build();
    let mut all = Vec::new();
    for _ in 0..12 {
        all.extend(program.forward(3, "train.py:51 main"));
        let gradients: Vec<u64> = all.iter().map(|_| program.alloc(2, &[NODE])).collect();
        program.optimize(gradients, false);
    }
    let found = program.found();
    assert!((11..=12).contains(&found.steps), "{found:?}");
    assert_eq!((found.bytes_per_step, found.is_growing), (24 * MIB, true));
}

#[test]
fn layers_are_no_steps() {
    let mut program = Program::new();
    program.build();
    let mut caches = [None; 24];
    for token in 0..16 {
        let embedded = program.alloc(1, &["model.py:13 forward", "generate.py:5 main"]);
        for cache in &mut caches {
            let longer = program.alloc(
                token + 1,
                &["model.py:40 attend", "model.py:15 forward", "generate.py:5 main"],
            );
            cache.replace(longer).into_iter().for_each(|shorter| program.free(shorter));
            let hidden = program
                .alloc(1, &["model.py:41 attend", "model.py:15 forward", "generate.py:5 main"]);
            program.free(hidden);
        }
        let logits = program.alloc(3, &["model.py:17 forward", "generate.py:5 main"]);
        let next = program.alloc(1, &["generate.py:6 main"]);
        [embedded, logits, next].into_iter().for_each(|block| program.free(block));
    }
    let found = program.found();
    assert!((15..=16).contains(&found.steps), "{found:?}");
    assert_eq!(
        (found.bytes_per_step, found.rows[0].course),
        (24 * MIB, GrowthCourse::LargerBlocks)
    );
}

#[test]
fn layers_within_one_line_of_a_loop_are_no_steps() {
    let mut program = Program::new();
    program.build();
    let line = "job.py:30 <listcomp>";
    for _ in 0..24 {
        let input = program.alloc(1, &["job.py:9 batch", line]);
        for _ in 0..12 {
            let [a, b] = ["model.py:21 norm", "model.py:22 linear"]
                .map(|layer| program.alloc(2, &[layer, "model.py:15 forward", line]));
            [a, b].into_iter().for_each(|block| program.free(block));
        }
        program.free(input);
        program.alloc(7, &["model.py:16 forward", line]);
    }
    let found = program.found();
    assert!((23..=24).contains(&found.steps), "{found:?}");
    assert_eq!(found.bytes_per_step, 7 * MIB);
}

#[test]
fn layers_within_another_line_of_a_loop_are_no_steps() {
    let mut program = Program::new();
    program.build();
    for _ in 0..16 {
        let input = program.alloc(1, &["job.py:30 main"]);
        for _ in 0..4 {
            let [a, b] = ["model.py:21 norm", "model.py:22 linear"]
                .map(|layer| program.alloc(2, &[layer, "model.py:15 forward", "job.py:31 main"]));
            [a, b].into_iter().for_each(|block| program.free(block));
        }
        program.free(input);
    }
    let found = program.found();
    assert!((15..=16).contains(&found.steps), "{found:?}");
    assert!(!found.is_growing);
}

#[test]
fn marks_of_the_program_are_its_steps_even_if_their_lengths_differ() {
    let served = |has_marks: bool| {
        let mut program = Program::new();
        program.build();
        let lengths = [3, 40, 11, 90, 7, 25, 60, 2, 33, 18];
        for request in 0..20_usize {
            if has_marks {
                program.metadata = format!("request {request}");
            }
            for _ in 0..lengths[request % 10] {
                let temporary = program.alloc(1, &["serve.py:20 decode", "serve.py:9 main"]);
                program.free(temporary);
            }
            program.alloc(6, &["serve.py:11 main"]);
        }
        program
    };
    let found = served(true).found();
    assert!((18..=20).contains(&found.steps), "{found:?}");
    assert_eq!((found.mark.as_deref(), found.bytes_per_step), (Some("request #"), 6 * MIB));
    let sentence = found.found_sentence();
    assert!(
        sentence.starts_with("Found from marks: ") && sentence.ends_with("\"request #\"."),
        "{sentence}"
    );
}

#[test]
fn without_stacks_sizes_take_the_place_of_code() {
    let mut program = Program::new();
    program.has_stacks = false;
    program.build();
    let mut input = None;
    for _ in 0..40 {
        program.train(10, &mut input);
        program.alloc(12, &LEAK);
    }
    let found = program.found();
    assert_eq!(
        (found.bytes_per_step, found.is_growing, found.begins_with.as_ref()),
        (12 * MIB, true, None)
    );
    assert_eq!(found.rows[0].asked_for_by, "blocks of 12,582,912 bytes on stream 0");
}

#[test]
fn the_first_step_of_an_optimizer_is_no_loop_of_the_program() {
    let mut program = Program::new();
    program.build();
    for at in 0..48 {
        let temporary = program.alloc(1 + at % 3, &[ADAM, "train.py:53 main"]);
        program.alloc(8, &["/v/site-packages/torch/optim/adam.py:790 adam", "train.py:53 main"]);
        program.free(temporary);
    }
    assert!(program.growth().is_err(), "{:?}", program.growth());
}

#[test]
fn few_steps_and_programs_that_only_allocate_have_a_reason() {
    let few = trained(3, |_| 10, |program, _| keep(program));
    assert!(few.growth().is_err());
    let mut built = Program::new();
    (0..50).for_each(|_| built.build());
    assert!(built.growth().is_err(), "{:?}", built.growth());
    assert!(Program::new().growth().is_err());
}
