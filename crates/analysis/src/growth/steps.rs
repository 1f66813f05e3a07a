//! Finds the steps of a program: the iterations of its outermost loop, from requests that recur at even
//! distances.
//!
//! Requests by the same code (and, for a second set of keys, of the same size) have one key. A key that
//! recurs at even distances until the end is a *beat*. Beats of about the same distance belong to one loop.
//! If requests have stacks with Python code, only these count: threads of the backward pass have none, and
//! the work of a backward pass may grow from step to step.
//!
//! Of nested loops the steps are those of the outermost: the one whose beats have the shortest part of the
//! call stack in common. A loop that runs now and then, such as an evaluation, has more of the stack in
//! common; of loops beside each other the one with more iterations is used. Without stacks the loop with the
//! largest distance is used, unless hardly any key beats in it.
//!
//! A loop counts only if most pairs of successive requests in a step also occurred in the step before. Time
//! and memory are linear in the number of requests.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::Hash;

use crate::callers::Callers;
use crate::lives::{Block, LiveBytes, Lives};
use stratalloc_recording::{Frame, FrameKind, StackId};

/// The least number of complete steps.
pub(super) const STEPS_MIN: usize = 4;
/// The most steps that are examined, the last ones.
const STEPS_MAX: usize = 2048;
/// The most stacks whose common frames are computed.
const PATHS_MAX: usize = 1024;
/// The number of loops that are compared.
const LOOPS_MAX: usize = 6;
/// A key is a beat if distances within a quarter of the median cover at least this share of its requests, in
/// percent. So requests in bursts are none.
const EVEN_PERCENT: u64 = 75;
/// The least share of repeated pairs of requests in the steps of a loop, in percent: with stacks and without.
const REPEATED_PERCENT: [u64; 2] = [50, 40];

/// The steps of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Steps {
    /// The moments between steps: the begin of the first one, and the end of each.
    pub(super) ends: Vec<u32>,
    /// The text of the mark with which each step begins, with `#` for its numbers.
    pub(super) mark: Option<String>,
    /// The stack of the request with which each step begins.
    pub(super) begins_with: Option<StackId>,
    /// The frames of Python code that the requests of the loop have in common, outermost first.
    pub(super) path: Vec<u32>,
    /// The average number of requests of a step.
    pub(super) requests: u32,
}

impl Steps {
    /// Returns the last of the steps, at most [`STEPS_MAX`].
    pub(super) fn last(mut self) -> Self {
        self.ends.drain(..self.ends.len().saturating_sub(STEPS_MAX + 1));
        self
    }

    /// Returns the number of complete steps.
    pub(super) fn count(&self) -> usize {
        self.ends.len().saturating_sub(1)
    }
}

/// The requests among which steps are searched: all, or those that are chosen.
struct Requests<'a> {
    all: &'a [Block],
    /// Indices in `all`.
    chosen: Option<Vec<u32>>,
}

impl Requests<'_> {
    fn len(&self) -> usize {
        self.chosen.as_ref().map_or(self.all.len(), Vec::len)
    }

    fn get(&self, at: u32) -> &Block {
        let at = at as usize;
        &self.all[self.chosen.as_ref().map_or(at, |chosen| chosen[at] as usize)]
    }

    fn iter(&self) -> impl Iterator<Item = &Block> {
        (0..).take(self.len()).map(|at| self.get(at))
    }
}

/// A key that recurs at even distances.
struct Beat {
    /// The places of its requests among all requests.
    at: Vec<u32>,
    /// The median distance, in requests.
    distance: u32,
    stack: Option<StackId>,
}

/// Beats of about the same distance.
#[derive(Default)]
struct Loop {
    beats: Vec<Beat>,
    /// The frames that all stacks of its beats have in common, outermost first; `None` without stacks.
    path: Option<Vec<u32>>,
}

/// Finds the steps among the requests up to a moment.
pub(super) fn find(
    lives: &Lives,
    callers: &Callers<'_>,
    until: u32,
    live_bytes: &LiveBytes,
) -> Option<Steps> {
    let from = lives.blocks.partition_point(|block| lives.lived_before(block));
    let to = lives.blocks.partition_point(|block| block.born <= until);
    let all = lives.blocks.get(from..to)?;
    let caller = |block: &Block| block.stack.map(|stack| callers.of_stack(stack));
    let is_python: Vec<bool> = (0..callers.count()).map(|one| callers.is_python(one)).collect();
    let is_python = |block: &Block| caller(block).is_some_and(|one| is_python[one as usize]);
    // Some recordings have stacks only of what lives at the end.
    let have_stacks = all.iter().filter(|block| block.stack.is_some()).count() * 2 >= all.len();
    let with_code = (0..).zip(all).filter(|(_, block)| is_python(block)).map(|(at, _)| at);
    let with_code: Vec<u32> = if have_stacks { with_code.collect() } else { Vec::new() };
    let has_code = !with_code.is_empty();
    let requests = Requests { all, chosen: has_code.then_some(with_code) };
    if requests.len() < STEPS_MIN {
        return None;
    }
    let codes = numbered(&requests, |block| {
        let code = caller(block);
        (code, lives.heap(block).stream, if has_code { 0 } else { block.requested_bytes })
    });
    let mut beats = beats(&requests, &codes);
    if has_code {
        let of_size =
            |block: &Block| (caller(block), lives.heap(block).stream, block.requested_bytes);
        beats.extend(self::beats(&requests, &numbered(&requests, of_size)));
    }
    let live_before = |at: u32| live_bytes.at(requests.get(at).born.saturating_sub(1));
    let mut loops = loops(beats, callers);
    let least = REPEATED_PERCENT[usize::from(!has_code)];
    loops.retain_mut(|one| {
        one.put_quietest_first(&live_before);
        !one.is_over_parameters(callers) && repeated_percent(&codes, &one.beats[0].at) >= least
    });
    let found = outermost(&loops, callers, has_code)?;
    let beat = &found.beats[0];
    let begin = |at: &u32| requests.get(*at).born.saturating_sub(1);
    let begins: Vec<u32> = beat.at.iter().map(begin).collect();
    // The last step is complete if about as many requests follow as a step has, and none of them failed.
    let rest = requests.len() as u64 - u64::from(beat.at.last().copied().unwrap_or(0));
    let each = u64::from(beat.distance);
    let is_complete = until == lives.events && rest * 10 >= each * 9 && rest * 2 <= each * 3;
    let ends = quietest(&begins, is_complete.then_some(until), live_bytes);
    let (requests, path) = (requests_each(lives, &ends), found.path.clone().unwrap_or_default());
    Some(Steps { ends, mark: None, begins_with: beat.stack, path, requests })
}

/// Returns for each step the moment at which the fewest bytes are live; at both ends also the begin of the
/// first step and the end of the last one, if that makes one more step. `begins` are moments at which steps
/// begin.
pub(super) fn quietest(begins: &[u32], end: Option<u32>, live_bytes: &LiveBytes) -> Vec<u32> {
    let least = |pair: &[u32]| (pair[0]..pair[1]).min_by_key(|at| live_bytes.at(*at));
    let bounds: Vec<u32> = begins.iter().copied().chain(end).collect();
    let mut ends: Vec<u32> = bounds.windows(2).filter_map(least).collect();
    if let (Some(first), [begin, next, ..]) = (ends.first(), bounds.as_slice())
        && *first > begin.midpoint(*next)
    {
        ends.insert(0, *begin);
    } else {
        ends.extend(bounds.last().filter(|_| ends.len() < bounds.len()));
    }
    ends
}

/// Returns the average number of requests of a step.
pub(super) fn requests_each(lives: &Lives, ends: &[u32]) -> u32 {
    let place = |moment: u32| lives.blocks.partition_point(|block| block.born <= moment);
    let (Some(first), Some(last)) = (ends.first(), ends.last()) else { return 0 };
    let steps = ends.len().saturating_sub(1).max(1);
    u32::try_from((place(*last) - place(*first)) / steps).unwrap_or(u32::MAX)
}

/// Returns a number for each request; equal keys have the same number.
fn numbered<K: Hash + Eq>(requests: &Requests<'_>, key: impl Fn(&Block) -> K) -> Vec<u32> {
    let mut known: HashMap<K, u32> = HashMap::new();
    let number = |block: &Block| {
        let next = u32::try_from(known.len()).unwrap_or(u32::MAX);
        *known.entry(key(block)).or_insert(next)
    };
    requests.iter().map(number).collect()
}

/// Returns the keys that recur at even distances until the end.
fn beats(requests: &Requests<'_>, keys: &[u32]) -> Vec<Beat> {
    let count = keys.iter().max().map_or(0, |last| *last as usize + 1);
    let mut ends = vec![0_usize; count + 1];
    keys.iter().for_each(|key| ends[*key as usize + 1] += 1);
    for key in 0..count {
        ends[key + 1] += ends[key];
    }
    let mut places = vec![0_u32; keys.len()];
    let mut next = ends.clone();
    for (key, at) in keys.iter().zip(0_u32..) {
        let place = &mut next[*key as usize];
        places[*place] = at;
        *place += 1;
    }
    let mut distances = Vec::new();
    let beat = |key: usize| {
        let at = &places[ends[key]..ends[key + 1]];
        let distance = even_distance(at, requests.len(), &mut distances)?;
        let stack = requests.get(at[0]).stack;
        Some(Beat { at: at.to_vec(), distance, stack })
    };
    (0..count).filter_map(beat).collect()
}

/// Returns the median distance of places, if most distances are near it and the places reach the end of all
/// `count` requests and extend over half of them: a loop over less is a part of something.
pub(super) fn even_distance(at: &[u32], count: usize, distances: &mut Vec<u32>) -> Option<u32> {
    if at.len() < STEPS_MIN {
        return None;
    }
    distances.clear();
    distances.extend(at.windows(2).map(|pair| pair[1] - pair[0]));
    let middle = distances.len() / 2;
    let median = *distances.select_nth_unstable(middle).1;
    if median < 2 {
        // A single request that recurs is no step.
        return None;
    }
    let near = median - median / 4..=median.saturating_add(median / 4);
    let even = distances.iter().filter(|distance| near.contains(distance));
    let even = even.map(|distance| u64::from(*distance)).sum::<u64>();
    let (first, last) = (at[0] as usize, at[at.len() - 1] as usize);
    let rest = count - last;
    let reaches_end = rest <= (3 * median as usize).max(count / 10);
    let is_long = (last - first) * 2 >= count;
    let is_even = even * 100 >= (last - first) as u64 * EVEN_PERCENT;
    (is_even && reaches_end && is_long).then_some(median)
}

/// Joins beats of about the same distance, and returns the loops with the most beats, the longest distance
/// first.
fn loops(mut beats: Vec<Beat>, callers: &Callers<'_>) -> Vec<Loop> {
    beats.sort_by_key(|beat| (Reverse(beat.distance), beat.at[0]));
    let mut loops: Vec<(u32, Loop)> = Vec::new();
    for beat in beats {
        match loops.last_mut() {
            Some((longest, one)) if beat.distance >= *longest - *longest / 10 => {
                one.beats.push(beat);
            }
            _ => loops.push((beat.distance, Loop { beats: vec![beat], path: None })),
        }
    }
    // A stable sort: of loops with equally many beats, the longest distance stays first.
    loops.sort_by_key(|(_, one)| Reverse(one.beats.len()));
    loops.truncate(LOOPS_MAX);
    loops.sort_by_key(|(distance, _)| Reverse(*distance));
    let with_path = |(_, one): (u32, Loop)| {
        let path = common_path(one.beats.iter().filter_map(|beat| beat.stack), callers);
        Loop { path, ..one }
    };
    loops.into_iter().map(with_path).collect()
}

/// Returns the frames that all stacks with Python code have in common, outermost first.
pub(super) fn common_path(
    stacks: impl Iterator<Item = StackId>,
    callers: &Callers<'_>,
) -> Option<Vec<u32>> {
    let paths =
        stacks.take(PATHS_MAX).map(|stack| callers.python_frames(stack).collect::<Vec<u32>>());
    paths.filter(|path| !path.is_empty()).reduce(|mut all, other| {
        let same = all.iter().zip(&other).take_while(|(one, other)| one == other).count();
        all.truncate(same);
        all
    })
}

impl Loop {
    /// Returns true if all requests of the loop are made for parameters: in a step of an optimizer, PyTorch's
    /// or the program's own, or as a model is moved.
    fn is_over_parameters(&self, callers: &Callers<'_>) -> bool {
        let is_of_it = |frame: u32| {
            let Frame { file, function, .. } = callers.stacks().frame(frame);
            let is_library = callers.kind(frame) == FrameKind::Library;
            let is_optimizer = file.contains("optim")
                && (function == "step" || is_library && file.contains("torch"));
            is_optimizer || is_library && function == "_apply"
        };
        let is_for_it = |stack| callers.python_frames(stack).any(is_of_it);
        self.beats.iter().all(|beat| beat.stack.is_some_and(is_for_it))
    }

    /// Moves the beat to the front at which the fewest bytes are live on average, of those that occur nearly
    /// as often as the most frequent one.
    fn put_quietest_first(&mut self, live_before: &dyn Fn(u32) -> u64) {
        let most = self.beats.iter().map(|beat| beat.at.len()).max().unwrap_or(0);
        let live = |beat: &Beat| {
            let sum: u128 = beat.at.iter().map(|at| u128::from(live_before(*at))).sum();
            sum / (beat.at.len() as u128).max(1)
        };
        let frequent = self.beats.iter().enumerate().filter(|(_, b)| b.at.len() * 10 >= most * 9);
        let quietest = frequent.min_by_key(|(_, beat)| (live(beat), beat.at[0])).map(|(at, _)| at);
        self.beats.swap(0, quietest.unwrap_or(0));
    }

    /// Returns true if the other loop runs within an iteration of this one: it has more of the stack in
    /// common; or the line at which both paths part calls another function for it; or they part at two lines
    /// of one function, and the other has more of the stack in common than its line.
    fn encloses(&self, other: &Self, callers: &Callers<'_>) -> bool {
        let (Some(own), Some(path)) = (&self.path, &other.path) else { return false };
        if self.beats[0].at.len() >= other.beats[0].at.len() {
            return false;
        }
        let same = own.iter().zip(path).take_while(|(one, other)| one == other).count();
        match (own.get(same), path.get(same)) {
            (None, Some(_)) => true,
            (Some(own), Some(other)) => {
                let [own, other] = [*own, *other].map(|frame| callers.stacks().frame(frame));
                let is_same = (own.file, own.function) == (other.file, other.function);
                !is_same || path.len() > same + 1
            }
            _ => false,
        }
    }
}

/// Returns the loop whose iterations are the steps. `loops` are ordered by distance, the longest first.
fn outermost<'a>(loops: &'a [Loop], callers: &Callers<'_>, has_code: bool) -> Option<&'a Loop> {
    let most = loops.iter().map(|one| one.beats.len()).max()?;
    let tenths = if has_code { 1 } else { 3 };
    let has_many = |one: &&Loop| one.beats.len() * 10 >= most * tenths;
    let mut outer = loops.iter().filter(has_many);
    match has_code {
        true => {
            let is_inner = |one: &Loop| loops.iter().any(|other| other.encloses(one, callers));
            outer.rfind(|one| !is_inner(one))
        }
        false => outer.next(),
    }
}

/// The most pairs in the table, a power of two.
const PAIRS_MAX: usize = 1 << 16;

/// Returns the share of pairs of successive requests that also occur in the step before, in percent. `begins`
/// are the places at which steps begin.
fn repeated_percent(keys: &[u32], begins: &[u32]) -> u64 {
    // Two steps have at most this many different pairs. A pair that displaces another costs a little of the
    // share, and no memory.
    let longest = begins.windows(2).map(|bounds| bounds[1] - bounds[0]).max().unwrap_or(0);
    let pairs = (4 * longest as usize).next_power_of_two().clamp(2, PAIRS_MAX);
    let mut seen = vec![(0_u64, 0_u32); pairs];
    let (mut repeated, mut all) = (0_u64, 0_u64);
    for (step, bounds) in (1_u32..).zip(begins.windows(2)) {
        let range = bounds[0] as usize..bounds[1] as usize;
        for at in range {
            let before = at.checked_sub(1).map_or(u32::MAX, |before| keys[before]);
            let pair = u64::from(before) << 32 | u64::from(keys[at]);
            let place = pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - pairs.ilog2());
            let slot = &mut seen[usize::try_from(place).unwrap_or(0)];
            let is_known = slot.0 == pair && slot.1 + 1 >= step && slot.1 > 0;
            if step > 1 {
                all += 1;
                repeated += u64::from(is_known);
            }
            *slot = (pair, step);
        }
    }
    repeated * 100 / all.max(1)
}
