//! Live bytes over time in layers: by the purpose of the blocks, by the code that requested them, by stream,
//! and by the step of the program in which they were requested.
//!
//! [`Layers::of`] names the layers and assigns each block to one layer of each division, so the layers of a
//! division always add up to the live bytes. [`Layers::series`] computes them at the peaks of columns, for a
//! picture that does not have every block.

use std::cmp::Reverse;

use super::callers::Callers;
use super::categories::Category;
use super::growth::StepGrowth;
use super::holders::{BEFORE, NO_STACK};
use super::lives::{Block, Lives};
use super::moments::Timeline;
use super::words::StreamNumbers;

/// The property of a block that decides its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// The purpose, from the stack and the life.
    Category,
    /// The code that requested it.
    Line,
    /// The stream.
    Stream,
    /// The step of the program in which it was requested.
    Step,
}

impl Division {
    /// Every division, in the order in which pages show them.
    pub const ALL: [Self; 4] = [Self::Category, Self::Line, Self::Stream, Self::Step];
}

/// The most layers of lines and of streams, without the one of the others.
const LARGEST: usize = 10;
/// The most layers of steps.
const STEPS: usize = 12;
/// The most numbers that are kept to rank lines.
const RANKED: usize = 1 << 22;
/// The name of the layer of all other lines.
const OTHER_CODE: &str = "other code";

/// The layers of a recording.
#[derive(Clone, Debug, Default)]
pub struct Layers {
    /// The names of the layers of each division, in the order of [`Division::ALL`]. Empty if the recording
    /// does not have the property.
    pub names: [Vec<String>; 4],
    /// The category of each block of [`Lives::blocks`], as an index of its name. Empty without stacks.
    pub category_of: Vec<u8>,
    /// The line of each block, as an index of its name. Empty without stacks.
    pub line_of: Vec<u8>,
    /// The moments between the layers of steps. Blocks from before the first one are the first layer.
    pub step_bounds: Vec<u32>,
    /// The moments between the steps; empty if none were found.
    pub step_ends: Vec<u32>,
}

impl Layers {
    /// Finds the layers of a timeline. `growth` has the steps of the program, if they were found.
    #[must_use]
    pub fn of(timeline: &Timeline<'_>, callers: &Callers<'_>, growth: Option<&StepGrowth>) -> Self {
        let lives = &timeline.lives;
        let mut all = Self::default();
        if lives.blocks.iter().any(|block| block.stack.is_some()) {
            all.set_categories(timeline, callers);
            all.set_lines(lives, callers);
        }
        let streams = &lives.streams.items;
        let numbers = StreamNumbers::of(streams.iter().copied());
        let first = streams.iter().take(LARGEST);
        all.names[2] = first.map(|stream| numbers.name(*stream)).collect();
        if streams.len() > LARGEST {
            all.names[2].push("other streams".to_owned());
        }
        if let Some(growth) = growth.filter(|growth| growth.is_of_replay == timeline.is_replay) {
            all.set_steps(&growth.step_ends, lives.events);
        }
        all
    }

    fn set_categories(&mut self, timeline: &Timeline<'_>, callers: &Callers<'_>) {
        let (lives, passes) = (&timeline.lives, timeline.passes());
        let before = Category::ALL.len();
        let of_block = |block: &Block| match block.stack {
            None if lives.lived_before(block) => before,
            stack => {
                let category = callers.category_of(stack).with(passes.fate(block));
                Category::ALL.iter().position(|one| *one == category).unwrap_or(before - 1)
            }
        };
        let all: Vec<usize> = lives.blocks.iter().map(of_block).collect();
        let mut is_used = [false; Category::ALL.len() + 1];
        all.iter().for_each(|&at| is_used[at] = true);
        let used: Vec<usize> = (0..is_used.len()).filter(|&at| is_used[at]).collect();
        let name = |at: &usize| Category::ALL.get(*at).map_or(BEFORE, |category| category.name());
        self.names[0] = used.iter().map(|at| name(at).to_owned()).collect();
        let place = |at: usize| u8::try_from(used.partition_point(|&one| one < at)).unwrap_or(0);
        self.category_of = all.into_iter().map(place).collect();
    }

    /// Ranks the lines by their most bytes at some of the peaks.
    fn set_lines(&mut self, lives: &Lives, callers: &Callers<'_>) {
        let count = callers.count() as usize;
        let samples = peaks(lives, (RANKED / count.max(1)).clamp(4, 64));
        let width = samples.len() + 1;
        let mut changes = vec![0_i64; count * width];
        let caller_of = |block: &Block| block.stack.map(|stack| callers.of_stack(stack));
        for block in &lives.blocks {
            let Some(caller) = caller_of(block) else { continue };
            let row = &mut changes[caller as usize * width..][..width];
            add(row, &samples, block);
        }
        let most = |row: &[i64]| sums(row).into_iter().max().unwrap_or(0);
        let ranks = changes.chunks(width).zip(0_u32..).map(|(row, caller)| (most(row), caller));
        let mut ranks: Vec<(u64, u32)> = ranks.filter(|(bytes, _)| *bytes > 0).collect();
        ranks.sort_unstable_by_key(|&(bytes, caller)| (Reverse(bytes), caller));
        ranks.truncate(LARGEST);
        let lines: Vec<u32> = ranks.into_iter().map(|(_, caller)| caller).collect();
        let (other, none) = (lines.len(), lines.len() + 1);
        let of_block = |block: &Block| match caller_of(block) {
            None => none,
            Some(caller) => lines.iter().position(|line| *line == caller).unwrap_or(other),
        };
        let layer = |block| u8::try_from(of_block(block)).unwrap_or(u8::MAX);
        self.line_of = lives.blocks.iter().map(layer).collect();
        let others = [OTHER_CODE, NO_STACK].map(str::to_owned);
        self.names[1] = callers.labels(&lines).into_iter().chain(others).collect();
    }

    fn set_steps(&mut self, ends: &[u32], events: u32) {
        let Some(count) = ends.len().checked_sub(1).filter(|count| *count > 0) else { return };
        self.step_ends = ends.to_vec();
        let each = count.div_ceil(STEPS);
        let mut names = vec!["before the first step".to_owned()];
        for first in (0..count).step_by(each) {
            let last = (first + each).min(count);
            self.step_bounds.push(ends[first]);
            names.push(match last - first {
                1 => format!("step {last}"),
                _ => format!("steps {} to {last}", first + 1),
            });
        }
        if ends[count] < events {
            self.step_bounds.push(ends[count]);
            names.push("after the last step".to_owned());
        }
        self.names[3] = names;
    }

    /// Returns the layer of a block of [`Lives::blocks`] in a division that has layers.
    fn layer(&self, lives: &Lives, division: Division, at: usize) -> usize {
        let block = &lives.blocks[at];
        match division {
            Division::Category => self.category_of[at].into(),
            Division::Line => self.line_of[at].into(),
            Division::Stream => (lives.heap(block).stream as usize).min(LARGEST),
            Division::Step => self.step_of(block.born),
        }
    }

    /// Returns the layer of a block that is born at a moment in the division by step.
    fn step_of(&self, born: u32) -> usize {
        self.step_bounds.partition_point(|bound| *bound < born)
    }

    /// Returns the live bytes of each layer of each division at the peaks of at most `most` columns.
    #[must_use]
    pub fn series(&self, lives: &Lives, most: usize) -> [Vec<Vec<u64>>; 4] {
        let peaks = peaks(lives, most);
        let width = peaks.len() + 1;
        let mut divisions = self.names.iter().zip(Division::ALL).map(|(names, division)| {
            let mut changes = vec![0_i64; names.len() * width];
            if !names.is_empty() {
                for (at, block) in lives.blocks.iter().enumerate() {
                    let layer = self.layer(lives, division, at);
                    add(&mut changes[layer * width..][..width], &peaks, block);
                }
            }
            changes.chunks(width).map(sums).collect()
        });
        std::array::from_fn(|_| divisions.next().unwrap_or_default())
    }
}

/// Returns the moments at which the live bytes of at most `most` columns are at their maximum, in order.
fn peaks(lives: &Lives, most: usize) -> Vec<u32> {
    let columns = super::lives::fewer(&lives.columns.columns, most);
    columns.iter().map(|column| column.live_peak_at).collect()
}

/// Adds a block to the changes of a layer from peak to peak.
fn add(changes: &mut [i64], peaks: &[u32], block: &Block) {
    let before = |moment: u32| peaks.partition_point(|at| *at < moment);
    let (from, to) = (before(block.born), before(block.freed));
    let bytes = i64::try_from(block.requested_bytes).unwrap_or(i64::MAX);
    if from < to {
        changes[from] = changes[from].saturating_add(bytes);
        changes[to] = changes[to].saturating_sub(bytes);
    }
}

/// Returns the bytes at each peak from the changes. The last change has no peak.
fn sums(changes: &[i64]) -> Vec<u64> {
    let mut bytes = 0_i64;
    let before_last = &changes[..changes.len() - 1];
    let sums = before_last.iter().map(|change| {
        bytes = bytes.saturating_add(*change);
        u64::try_from(bytes).unwrap_or(0)
    });
    sums.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::callers::Compared;
    use crate::lives::COLUMNS;
    use crate::recording::{Memory, Recording};
    use crate::{Answer, Question, described};
    use stratalloc_recording::{Limits, reader};

    fn with_layers(name: &str, check: impl FnOnce(&Lives, &Layers, &Answer)) {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
        let path = folder.join(format!("{name}.pickle.xz"));
        let trace = reader::read(&path, &Limits::default()).unwrap();
        let recording = Recording::unverified(trace, None, Memory::default());
        let answer = described("x", &recording, &Question::default()).unwrap();
        let timeline = Timeline::recorded(&recording, COLUMNS).unwrap();
        let callers = Callers::of(&timeline.trace.stacks, Compared::Code);
        let layers = Layers::of(&timeline, &callers, answer.growth.as_ref());
        check(&timeline.lives, &layers, &answer);
    }

    #[test]
    fn the_layers_of_each_division_add_up_to_the_live_bytes() {
        for (name, divisions) in [
            ("truth/checkpointing", 4),
            ("truth/first_optimizer_step", 4),
            ("traces/multistream.default", 2),
        ] {
            with_layers(name, |lives, layers, _| {
                let known = layers.names.iter().filter(|names| !names.is_empty()).count();
                assert!(known <= divisions && known >= divisions / 2, "{name}: {:?}", layers.names);
                for most in [7, 300, COLUMNS] {
                    let series = layers.series(lives, most);
                    let columns = crate::lives::fewer(&lives.columns.columns, most);
                    for (names, bytes) in layers.names.iter().zip(&series) {
                        assert_eq!(names.len(), bytes.len());
                        for (at, column) in columns.iter().enumerate().filter(|_| !names.is_empty())
                        {
                            let sum: u64 = bytes.iter().map(|layer| layer[at]).sum();
                            assert_eq!(sum, column.live_max_bytes, "{name}, {names:?}, {at}");
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn the_layers_of_categories_are_the_categories_of_the_answer() {
        for name in ["truth/checkpointing", "truth/evaluation_keeps_graph", "truth/ring_turned"] {
            with_layers(name, |lives, layers, answer| {
                for moment in &answer.moments {
                    let mut bytes = vec![(0, 0); layers.names[0].len()];
                    for (at, block) in lives.blocks.iter().enumerate() {
                        if block.born <= moment.causes.events && moment.causes.events < block.freed
                        {
                            let layer = &mut bytes[usize::from(layers.category_of[at])];
                            *layer = (layer.0 + block.requested_bytes, layer.1 + 1);
                        }
                    }
                    let named = layers.names[0].iter().map(String::as_str).zip(bytes);
                    let found: Vec<_> = named.filter(|(_, (_, blocks))| *blocks > 0).collect();
                    let rows = moment.categories.iter();
                    let rows = rows.map(|row| (row.category, (row.requested_bytes, row.blocks)));
                    assert_eq!(found, rows.collect::<Vec<_>>(), "{name}");
                }
            });
        }
    }

    #[test]
    fn many_steps_are_grouped_and_blocks_before_and_after_them_have_layers_of_their_own() {
        let mut layers = Layers::default();
        let ends: Vec<u32> = (0..=30).map(|step| 100 + 10 * step).collect();
        layers.set_steps(&ends, 450);
        let names = &layers.names[3];
        assert_eq!(names.len(), layers.step_bounds.len() + 1);
        assert_eq!((&*names[0], &*names[1]), ("before the first step", "steps 1 to 3"));
        assert_eq!((&*names[10], &*names[11]), ("steps 28 to 30", "after the last step"));
        let name = |born| &*names[layers.step_of(born)];
        assert_eq!([0, 100].map(name), ["before the first step"; 2]);
        assert_eq!([101, 130].map(name), ["steps 1 to 3"; 2]);
        assert_eq!(
            [131, 400, 401].map(name),
            ["steps 4 to 6", names[10].as_str(), names[11].as_str()]
        );
        layers.set_steps(&ends[..2], 110);
        assert_eq!(layers.names[3], ["before the first step", "step 1"]);
    }
}
