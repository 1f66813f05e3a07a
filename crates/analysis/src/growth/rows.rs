//! The live bytes of each caller at the ends of steps, and the rows made of them.
//!
//! Only blocks that live at the end of some step count. Without stacks, blocks of one size on one stream take
//! the place of a caller's.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::series::{Course, Rate, kept};
use super::{GrowthCourse, GrowthRow};
use crate::callers::Callers;
use crate::lives::{Block, Lives};
use crate::words::{StreamNumbers, size_label};
use stratalloc_recording::{FrameKind, StackId};

/// The number of rows whose series are examined, those that have grown most.
const SERIES_MAX: usize = 128;

/// The code, or the size, that blocks have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum RowKey {
    Code {
        caller: u32,
    },
    Size {
        each_bytes: u64,
        stream: u32,
    },
    /// Blocks from before the recording, without a stack.
    Before,
}

/// The bytes and blocks that begin or end at a step's end.
#[derive(Clone, Copy)]
struct Change {
    row: u32,
    end: u32,
    bytes: i64,
    blocks: i64,
}

/// What lives of one caller at the begin of the first step and at the end of each step.
pub(super) struct RowSeries {
    key: RowKey,
    stack: Option<StackId>,
    bytes: Vec<u64>,
    /// The bytes that live from there on until the end of the last step.
    kept_bytes: Vec<u64>,
    blocks: Vec<u64>,
}

/// Returns the series of the rows that have grown, at most [`SERIES_MAX`]. `ends` are the begin of the first
/// step and the ends of all.
pub(super) fn series(lives: &Lives, callers: &Callers<'_>, ends: &[u32]) -> Vec<RowSeries> {
    let mut numbers: HashMap<RowKey, u32> = HashMap::new();
    let mut keys: Vec<(RowKey, Option<StackId>)> = Vec::new();
    let mut changes: Vec<Change> = Vec::new();
    let mut begin = 0;
    for block in &lives.blocks {
        while begin < ends.len() && ends[begin] < block.born {
            begin += 1;
        }
        if begin == ends.len() {
            break;
        }
        if block.freed <= ends[begin] {
            continue;
        }
        let key = key_of(lives, callers, block);
        let row = *numbers.entry(key).or_insert_with(|| {
            keys.push((key, block.stack));
            u32::try_from(keys.len() - 1).unwrap_or(u32::MAX)
        });
        let bytes = i64::try_from(block.requested_bytes).unwrap_or(i64::MAX);
        let at = |end: usize| u32::try_from(end).unwrap_or(u32::MAX);
        changes.push(Change { row, end: at(begin), bytes, blocks: 1 });
        let gone = ends.partition_point(|end| *end < block.freed);
        if gone < ends.len() {
            changes.push(Change { row, end: at(gone), bytes: -bytes, blocks: -1 });
        }
    }
    changes.sort_unstable_by_key(|change| (change.row, change.end));
    let rows = changes.chunk_by(|one, other| one.row == other.row);
    let grown = |row: &&[Change]| {
        let later = row.iter().filter(|change| change.end > 0);
        later.fold(0_i64, |sum, change| sum.saturating_add(change.bytes))
    };
    let mut rows: Vec<(i64, &[Change])> = rows.map(|row| (grown(&row), row)).collect();
    rows.retain(|(grown, row)| *grown > 0 && keys[row[0].row as usize].0 != RowKey::Before);
    rows.sort_by_key(|(grown, row)| (Reverse(*grown), row[0].row));
    rows.truncate(SERIES_MAX);
    let series = rows.iter().map(|(_, row)| RowSeries::of(keys[row[0].row as usize], row, ends));
    series.collect()
}

/// Returns the row of a block.
pub(crate) fn key_of(lives: &Lives, callers: &Callers<'_>, block: &Block) -> RowKey {
    match block.stack {
        Some(stack) => RowKey::Code { caller: callers.of_stack(stack) },
        None if lives.lived_before(block) => RowKey::Before,
        None => {
            let stream = lives.heap(block).stream;
            RowKey::Size { each_bytes: block.requested_bytes, stream }
        }
    }
}

impl RowSeries {
    fn of((key, stack): (RowKey, Option<StackId>), changes: &[Change], ends: &[u32]) -> Self {
        let (mut bytes, mut blocks) = (Vec::new(), Vec::new());
        let (mut now_bytes, mut now_blocks) = (0_i64, 0_i64);
        let mut rest = changes;
        for end in 0..ends.len() {
            let here = rest.partition_point(|change| change.end as usize <= end);
            for change in &rest[..here] {
                now_bytes = now_bytes.saturating_add(change.bytes);
                now_blocks += change.blocks;
            }
            rest = &rest[here..];
            bytes.push(u64::try_from(now_bytes).unwrap_or(0));
            blocks.push(u64::try_from(now_blocks).unwrap_or(0));
        }
        Self { key, stack, kept_bytes: kept(&bytes), bytes, blocks }
    }

    /// Returns the line of the program in the loop that leads to the requests, as a frame. `path` are the
    /// frames that all requests of the loop have in common.
    pub(super) fn line(&self, path: &[u32], callers: &Callers<'_>) -> Option<u32> {
        let frames: Vec<u32> = callers.python_frames(self.stack?).collect();
        let same = frames.iter().zip(path).take_while(|(one, other)| one == other).count();
        let mut outer = frames.iter().take(same + 1).copied();
        outer.rfind(|frame| callers.kind(*frame) == FrameKind::Program)
    }

    pub(super) fn course(&self) -> Course {
        Course::of(&self.kept_bytes)
    }

    /// Returns the growth from the end of a step to the end of the last one.
    pub(super) fn grown_from(&self, end: usize) -> u64 {
        let last = last(&self.kept_bytes);
        last - self.kept_bytes.get(end).copied().unwrap_or(last)
    }

    /// Returns the row of a series that grows.
    pub(super) fn growing(&self, rate: Rate) -> (GrowthRow, RowKey) {
        let kept = kept(&self.blocks);
        let kept_at = |step: usize| kept.get(step).copied().unwrap_or(0);
        let more = kept_at(rate.last_step) - kept_at(rate.last_step.saturating_sub(rate.steps));
        #[expect(clippy::cast_precision_loss, reason = "a displayed number")]
        let blocks_per_step = more as f64 / rate.steps.max(1) as f64;
        let course = match more {
            0 => GrowthCourse::LargerBlocks,
            _ => GrowthCourse::MoreBlocks,
        };
        let bytes_per_step = rate.each();
        self.row(GrowthRow {
            course,
            bytes_per_step,
            blocks_per_step,
            first_step: rate.first_step as u64,
            last_step: rate.last_step as u64,
            ..GrowthRow::default()
        })
    }

    /// Returns the row of a series that grew from `first_step` to `last_step`.
    pub(super) fn filled(&self, first_step: usize, last_step: usize) -> (GrowthRow, RowKey) {
        self.row(GrowthRow {
            course: GrowthCourse::FilledOnce,
            first_step: first_step as u64,
            last_step: last_step as u64,
            ..GrowthRow::default()
        })
    }

    fn row(&self, row: GrowthRow) -> (GrowthRow, RowKey) {
        let (held_bytes, held_blocks) = (last(&self.bytes), last(&self.blocks));
        (GrowthRow { grown_bytes: self.grown_from(0), held_bytes, held_blocks, ..row }, self.key)
    }
}

fn last(series: &[u64]) -> u64 {
    series.last().copied().unwrap_or(0)
}

/// Sets the labels of rows.
pub(super) fn labelled(
    rows: Vec<(GrowthRow, RowKey)>,
    lives: &Lives,
    callers: &Callers<'_>,
) -> Vec<GrowthRow> {
    let keys: Vec<RowKey> = rows.iter().map(|(_, key)| *key).collect();
    let rows = rows.into_iter().zip(labels(&keys, lives, callers));
    rows.map(|((row, _), asked_for_by)| GrowthRow { asked_for_by, ..row }).collect()
}

/// Returns the label of each row: that of its code, or its size.
pub(crate) fn labels(keys: &[RowKey], lives: &Lives, callers: &Callers<'_>) -> Vec<String> {
    let code = |key: &RowKey| match *key {
        RowKey::Code { caller } => Some(caller),
        RowKey::Size { .. } | RowKey::Before => None,
    };
    let codes = callers.labels_of(keys.iter().map(code));
    let streams = StreamNumbers::of(lives.streams.items.iter().copied());
    let label = |(key, code): (&RowKey, Option<String>)| match *key {
        RowKey::Size { each_bytes, stream } => {
            size_label(each_bytes, &streams.name(lives.streams.items[stream as usize]))
        }
        RowKey::Code { .. } | RowKey::Before => code.unwrap_or_default(),
    };
    keys.iter().zip(codes).map(label).collect()
}
