//! The code whose live bytes grow from one step of the program to the next, such as a list that keeps the
//! loss of each step.
//!
//! `steps` finds the steps. The bytes of each caller at the ends of the steps form a series, and `series`
//! decides whether it grows steadily until the end of the recording, or until the first failed request. A
//! cache that fills once stops growing, and gradients that are accumulated are freed again; neither is
//! growth. A sum of rows counts as growth only if all live bytes grow too.

mod marks;
mod rows;
mod series;
mod steps;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;

use schemars::JsonSchema;
use serde::Serialize;

use crate::callers::Callers;
use crate::lives::{LiveBytes, Lives};
use crate::moments::Timeline;
use crate::recording::{Limit, Recording};
use crate::words::{Sentences, no_steps};
use marks::marked;
use rows::RowSeries;
pub(crate) use rows::{RowKey, key_of, labels};
use series::{Course, kept};
use steps::{STEPS_MIN, Steps};

/// The steps of the program, and the code whose live bytes grow from step to step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct StepGrowth {
    /// The number of complete steps that were examined, at most 2,048: the last ones.
    pub steps: u64,
    /// The text with which the program or a profiler marked the begin of each step, with `#` for its numbers;
    /// `null` if the steps were found from repeated requests.
    pub mark: Option<String>,
    /// The code of the request with which each step begins; `null` without stacks.
    pub begins_with: Option<String>,
    /// The average number of requests of a step.
    pub requests_per_step: u32,
    /// The number of events before the first step.
    pub first_event: u32,
    /// The number of events before the end of the last step.
    pub last_event: u32,
    /// Whether live bytes grow steadily until the end, by a relevant amount: a tenth of the live bytes in
    /// 1,000 steps.
    pub is_growing: bool,
    /// Whether the growth determines the need: it is a tenth of the live bytes, and these are most of the
    /// reserved ones or larger blocks replace others; or a request failed after it.
    pub is_decisive: bool,
    /// The growth of a step, in requested bytes: the sum of the growing rows, or of all live bytes if no row
    /// grows alone.
    pub bytes_per_step: u64,
    /// The growth over all recorded steps.
    pub grown_bytes: u64,
    /// The live bytes at the end of the last step.
    pub live_bytes: u64,
    /// The most further steps that fit under the limit at this rate; `null` without growth or a known limit,
    /// or if a request failed.
    pub steps_left: Option<u64>,
    /// The line of the loop that leads to nine tenths of the growth; `null` if several lines do, and without
    /// stacks.
    pub line: Option<String>,
    /// The code that grows, largest growth first, then the code that has filled once.
    pub rows: Vec<GrowthRow>,
    /// The live bytes at the begin of the first step and at the ends of steps, at most 64 of them.
    pub live_at_ends: Vec<u64>,
    /// About the peak of live bytes in the last three steps without everything that grows: without the growth
    /// over all recorded steps.
    pub without_growth_bytes: u64,
    /// The result as a sentence.
    #[schemars(with = "String")]
    pub sentence: Sentences,
    /// The moments between the steps: the begin of the first one, and the end of each.
    #[serde(skip)]
    pub step_ends: Vec<u32>,
    /// The bytes at each of these moments.
    #[serde(skip)]
    pub step_bytes: Vec<StepBytes>,
    /// Whether the moments are those of a replay, not of the recorded events.
    #[serde(skip)]
    pub is_of_replay: bool,
}

/// The live bytes at the end of a step, and in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// The live bytes at its end.
    pub live_bytes: u64,
    /// The peak of live bytes in the step.
    pub peak_bytes: u64,
}

/// The live bytes of one caller over the steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct GrowthRow {
    /// The label of the code; without stacks, the size of the blocks.
    pub asked_for_by: String,
    /// How the bytes grow.
    pub course: GrowthCourse,
    /// The growth of a step, in requested bytes; 0 if it has stopped.
    pub bytes_per_step: u64,
    /// The growth of a step, in blocks.
    pub blocks_per_step: f64,
    /// The first step with growth, from 1.
    pub first_step: u64,
    /// The last step with growth.
    pub last_step: u64,
    /// The growth over all recorded steps.
    pub grown_bytes: u64,
    /// The live bytes at the end of the last step.
    pub held_bytes: u64,
    /// The live blocks then.
    pub held_blocks: u64,
}

/// How live bytes grow over the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum GrowthCourse {
    /// Steps leave blocks behind.
    #[default]
    MoreBlocks,
    /// Steps replace a block by a larger one.
    LargerBlocks,
    /// The growth has stopped.
    FilledOnce,
}

/// The end of the steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepsEnd {
    /// That of the recording.
    Recording,
    /// A request that failed when the recording was made.
    Failure,
    /// A request that failed in a replay with the memory that is set.
    FailedReplay,
}

/// The growth over this many steps is compared with the live bytes.
const RELEVANT_STEPS: u64 = 1000;
/// Rows that filled once are listed from this share of the live bytes on.
const FILLED_SHARE: u64 = 100;
/// The least number of steps for growth that no row shows.
const ALONE_MIN: usize = 8;
/// The number of points of the curve.
const POINTS: usize = 64;

impl StepGrowth {
    /// Finds the steps and the growth in a timeline. At most `most_rows` rows are listed.
    pub(crate) fn of(
        recording: &Recording,
        timeline: &Timeline<'_>,
        callers: &Callers<'_>,
        most_rows: usize,
    ) -> Result<Self, &'static str> {
        let lives = &timeline.lives;
        if recording.no_history.is_some() {
            return Err(no_steps::NO_HISTORY);
        }
        let missing = recording.trace.missing;
        if missing.frees + missing.allocations > 0 {
            return Err(no_steps::LEFT_OUT);
        }
        let live_bytes = LiveBytes::of(lives, |_| true);
        let failure = lives.failures.first().map(|failure| failure.moment);
        // If the program went on after a failure, the steps may have come later.
        let untils = failure.into_iter().chain([lives.events]);
        let mut found = untils.filter_map(|until| {
            let all = timeline.marks();
            let marked = |numbered| marked(lives, all, callers, until, &live_bytes, numbered);
            let by_requests = || steps::find(lives, callers, until, &live_bytes);
            Some((until, marked(true).or_else(by_requests).or_else(|| marked(false))?.last()))
        });
        let mut missing = no_steps::NO_SEQUENCE;
        let mut is_long = |steps: &Steps| {
            let is_long = steps.count() >= STEPS_MIN;
            if !is_long {
                missing = no_steps::FEW_STEPS;
            }
            is_long
        };
        let found = found.find(|(_, steps)| is_long(steps));
        let (until, steps) = found.ok_or(missing)?;
        if !frees(lives, &steps, until) {
            return Err(no_steps::FREES_NOTHING);
        }
        let end = match failure == Some(until) {
            false => StepsEnd::Recording,
            true if timeline.is_replay && !recording.trace.requests_only => StepsEnd::FailedReplay,
            true => StepsEnd::Failure,
        };
        let measured =
            Self::measured(recording, lives, callers, most_rows, &steps, &live_bytes, end);
        let (step_ends, is_of_replay) = (steps.ends, timeline.is_replay);
        Ok(Self { step_ends, is_of_replay, ..measured })
    }

    fn measured(
        recording: &Recording,
        lives: &Lives,
        callers: &Callers<'_>,
        most_rows: usize,
        steps: &Steps,
        live_bytes: &LiveBytes,
        end: StepsEnd,
    ) -> Self {
        let failed = end != StepsEnd::Recording;
        let live: Vec<u64> = steps.ends.iter().map(|end| live_bytes.at(*end)).collect();
        let (live_kept, live_end) = (kept(&live), live.last().copied().unwrap_or(0));
        let has_code = !recording.trace.stacks.is_empty();
        let (mut growing, mut filled) = (Vec::new(), Vec::new());
        for series in rows::series(lives, callers, &steps.ends) {
            match series.course() {
                Course::Grows(rate) => growing.push((series, rate)),
                Course::Filled { bytes, in_steps } if bytes >= live_end / FILLED_SHARE => {
                    filled.push((series, in_steps));
                }
                Course::Filled { .. } | Course::Level => {}
            }
        }
        growing.sort_by_key(|(_, rate)| Reverse(rate.each()));
        filled.sort_by_key(|(series, _)| Reverse(series.grown_from(0)));
        let sum = |from: usize| {
            let rows = growing.iter().map(|(series, _): &(RowSeries, _)| series.grown_from(from));
            rows.fold(0, u64::saturating_add)
        };
        // Blocks may pass from one caller to another; then all live bytes do not grow.
        let all_grown = |from: usize| live_end - live_kept.get(from).copied().unwrap_or(live_end);
        let (bytes_per_step, grown_bytes) = match Course::of(&live_kept) {
            _ if !growing.is_empty() && all_grown(1) >= sum(1) / 2 => {
                let rates = growing.iter().map(|(_, rate)| rate.each());
                (rates.fold(0, u64::saturating_add), sum(0))
            }
            // Without stacks, blocks of varied sizes have no row that grows.
            Course::Grows(rate) if !has_code && growing.is_empty() && live.len() > ALONE_MIN => {
                (rate.each(), all_grown(0))
            }
            _ => (0, 0),
        };
        let in_long_run = bytes_per_step.saturating_mul(RELEVANT_STEPS);
        let is_growing = bytes_per_step > 0 && in_long_run >= live_end / 10;
        if !is_growing {
            growing.clear();
        }
        let is_share = |part: u64| grown_bytes >= live_end / part;
        let begins_late = recording.start.is_some();
        // Where most of the reserved memory is free, something else determines the need, unless the growth
        // itself leaves free blocks.
        let is_mostly_live = live_end >= recording.figures.peak_reserved_bytes / 2;
        let replaces = growing.first().is_some_and(|(series, rate)| {
            series.growing(*rate).0.course == GrowthCourse::LargerBlocks
        });
        let peak = last_peak(steps, live_bytes);
        let is_large = is_share(10) && (is_mostly_live || replaces && grown_bytes >= peak / 10);
        let is_decisive = is_growing && (is_large || failed && (is_share(20) || begins_late));
        let limit = recording.limit.and_then(Limit::known).filter(|_| is_growing && !failed);
        let room_bytes = |limit: Limit| limit.bytes.saturating_sub(peak);
        let steps_left = limit.map(|limit| room_bytes(limit) / bytes_per_step.max(1));
        let grown = growing.iter().map(|(series, rate)| series.growing(*rate));
        let filled = filled.iter().map(|(series, [first, last])| series.filled(*first, *last));
        // The rows with most of the growth: others may come from elsewhere.
        let mut large_bytes = 0;
        let large = growing.iter().take_while(|(_, rate)| {
            let is_part = large_bytes < bytes_per_step / 10 * 9;
            large_bytes = rate.each().saturating_add(large_bytes);
            is_part
        });
        let mut lines = large.map(|(series, _)| series.line(&steps.path, callers));
        let line = lines.next().flatten().filter(|line| lines.all(|other| other == Some(*line)));
        let rows = grown.take(most_rows).chain(filled.take(most_rows)).collect();
        let mut all = Self {
            steps: steps.count() as u64,
            mark: steps.mark.clone(),
            begins_with: callers.code_of(steps.begins_with),
            requests_per_step: steps.requests,
            first_event: steps.ends[0],
            last_event: steps.ends[steps.count()],
            is_growing,
            is_decisive,
            bytes_per_step: if is_growing { bytes_per_step } else { 0 },
            grown_bytes: if is_growing { grown_bytes } else { 0 },
            live_bytes: live_end,
            steps_left,
            line: line.map(|line| callers.frame_text(line)),
            rows: rows::labelled(rows, lives, callers),
            live_at_ends: points(&live),
            without_growth_bytes: peak.saturating_sub(if is_growing { grown_bytes } else { 0 }),
            sentence: Sentences::default(),
            step_ends: Vec::new(),
            step_bytes: step_bytes(&steps.ends, live_bytes),
            is_of_replay: false,
        };
        all.sentence = all.text(end);
        all
    }
}

/// Returns true if steps free at least a tenth of the blocks that they allocate. Code that only builds
/// something repeats too, but has no steps.
fn frees(lives: &Lives, steps: &Steps, until: u32) -> bool {
    let [from, to] = [steps.ends[0], steps.ends[steps.count()]];
    let place = |moment: u32| lives.blocks.partition_point(|block| block.born <= moment);
    let blocks = &lives.blocks[place(from)..place(to)];
    let freed = blocks.iter().filter(|block| block.freed <= until).count();
    freed * 10 >= blocks.len()
}

/// Returns the peak of live bytes in the last three steps.
fn last_peak(steps: &Steps, live_bytes: &LiveBytes) -> u64 {
    live_bytes.peak(steps.ends[steps.count().saturating_sub(3)]..=steps.ends[steps.count()])
}

/// Returns the live bytes at the begin of the first step and at the end of each.
fn step_bytes(ends: &[u32], live_bytes: &LiveBytes) -> Vec<StepBytes> {
    let begins = ends.first().into_iter().chain(ends);
    let at_end = |(&begin, &end): (&u32, &u32)| StepBytes {
        live_bytes: live_bytes.at(end),
        peak_bytes: live_bytes.peak(begin..=end),
    };
    begins.zip(ends).map(at_end).collect()
}

/// Returns at most [`POINTS`] numbers of a series, the first and the last among them.
fn points(series: &[u64]) -> Vec<u64> {
    let last = series.len().saturating_sub(1);
    let count = series.len().min(POINTS);
    (0..count).map(|at| series[at * last / count.saturating_sub(1).max(1)]).collect()
}
