//! Derives the requests of a program at a size at which it was not recorded.
//!
//! A program was recorded at two or three values of one parameter, such as the size of a batch. Its requests
//! are aligned one by one with those of the recording at the largest value. The size of each is taken as an
//! affine function of the parameter: a line through the two largest values at which the request occurs. If
//! it occurs only at the largest one, its size is taken as proportional to the parameter. The operations of
//! the recording at the largest value, with the sizes at another value, are then replayed like any other
//! recording.
//!
//! The order of frees between two requests may differ between runs, for example where a program frees the
//! items of a hash table. Only requests are aligned, so that this order does not matter.
//!
//! Blocks that lived before a recording began are known by their addresses, not by the order of their
//! requests. They are compared as sets: those that are equal in all recordings have a constant size.

use std::sync::Arc;

use hashbrown::HashMap;

use super::diff::{DIFFERENCES_MAX, fewest};
use super::figures::live_peak_bytes;
use super::recording::{Memory, Recording};
use super::trial::{fits_in_order, without_files};
use super::words::near;
use stratalloc::config::Config;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{MIN_BLOCK_BYTES, REQUEST_MAX_BYTES};
use stratalloc_recording::{Op, ReplayError, Trace, Workload};
use stratalloc_sim::AddressOrder;

/// A recording of the program at one value of the parameter.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The value of the parameter.
    pub value: u64,
    /// The recording without its limit and its events.
    pub recording: Recording,
}

impl Sample {
    /// Drops all parts of the recording that a forecast does not use.
    pub fn new(value: u64, recording: Recording) -> Self {
        let from = &recording.trace;
        let trace = Trace {
            conf: from.conf.clone(),
            made_here: from.made_here,
            torch: Some(from.torch_version()),
            ..Trace::default()
        };
        let recording = Recording {
            trace,
            limit: None,
            inferred_limit: None,
            unexplained: None,
            exact: None,
            start: None,
            start_layout: None,
            memory: Memory::default(),
            ..recording
        };
        Self { value, recording }
    }
}

/// Requests of one recording, and the sum of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The number of requests.
    pub requests: u64,
    /// In bytes.
    pub bytes: u64,
}

impl Sizes {
    fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// The requests of a program as a function of one parameter.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// The largest recorded value.
    pub base_value: u64,
    /// The recording there. The sums below are of its requests.
    base: Recording,
    /// The sizes of the requests among the operations of `base`, in order.
    lines: Vec<Fit>,
    /// All requests.
    pub all: Sizes,
    /// Requests whose size grows with the parameter.
    pub growing: Sizes,
    /// Requests whose size at the smallest of three values is not on the line.
    pub not_affine: Sizes,
    /// Requests that only the recording at the largest value has. Their size is taken as proportional to the
    /// parameter, which is rather too much.
    pub only_largest: Sizes,
    /// Requests of another recording that the one at the largest value lacks. If there are two others, those
    /// of the one with more bytes.
    pub missing: Sizes,
    /// Blocks that lived before all recordings and are equal in them. Their sizes are constant.
    pub before: Sizes,
}

/// The reason why there is no forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForecastError {
    /// More than a small part of the blocks that lived before the first events differ.
    #[error(
        "what lived before the recordings at {} and {} began differs by {} MiB: record the program from its \
         start, or begin at the same step of each run",
        values[0], values[1], near(*bytes)
    )]
    Late {
        /// The two values of the parameter.
        values: [u64; 2],
        /// The bytes that only one of the recordings has.
        bytes: u64,
    },
    /// No size depends on the parameter.
    #[error("no request grows with the parameter: are these recordings of different sizes?")]
    Constant,
    /// A request failed in a recording, so what follows it is not what the program does otherwise.
    #[error("requests failed in the recording at {value}: record it with enough memory")]
    Failed {
        /// The value of the parameter.
        value: u64,
    },
    /// The requests of two recordings differ too much.
    #[error(
        "more than {DIFFERENCES_MAX} requests are only at {} or only at {}: what the program does changes \
         with the size, or these are recordings of different programs",
        values[0], values[1]
    )]
    OtherRequests {
        /// The two values of the parameter.
        values: [u64; 2],
    },
    /// The sizes of many requests do not follow a line.
    #[error(
        "{percent} % of the requested bytes are in requests whose sizes are no affine function, or that \
         only one recording has: what the program does changes with the size"
    )]
    NotAffine {
        /// Their share of the requested bytes.
        percent: u64,
    },
}

/// The largest share of requested bytes, in percent, whose sizes may follow no line.
const NOT_AFFINE_MAX_PERCENT: u64 = 25;

/// The largest share of the bytes that lived before the recordings, in percent, that may differ: a batch or
/// a loss may be left from the step before.
const BEFORE_MAX_PERCENT: u128 = 10;

/// A block that lived before a recording began. Of streams and pools only the default one has the same
/// handle in all runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct BlockBefore {
    bytes: u64,
    on_default_stream: bool,
    in_default_pool: bool,
}

/// A request of a recording. Streams and pools are numbered in the order of their first requests, because
/// their handles differ between runs.
#[derive(Clone, Copy, Debug)]
struct Asked {
    bytes: u64,
    heap: [usize; 2],
}

/// The size of a request as a function of the parameter: a line through two points, or through one and the
/// origin.
#[derive(Clone, Copy, Debug)]
struct Fit {
    bytes: u64,
    /// The other value of the parameter and the size there.
    other: Option<(u64, u64)>,
}

impl Fit {
    /// Returns the size at a value, at least one byte. `of` is the value at which it is `bytes`.
    fn at(self, value: u64, of: u64) -> u64 {
        let (other, other_bytes) = self.other.unwrap_or_default();
        let [bytes, other_bytes] = [self.bytes, other_bytes].map(i128::from);
        let [value, other, of] = [value, other, of].map(i128::from);
        let bytes = bytes + (bytes - other_bytes) * (value - of) / (of - other);
        u64::try_from(bytes.max(1)).unwrap_or(u64::MAX).min(REQUEST_MAX_BYTES)
    }
}

impl Forecast {
    /// Aligns the requests of recordings at smaller values, in the order of these, with those at the largest.
    ///
    /// # Errors
    ///
    /// [`ForecastError`].
    pub fn of(smaller: &[Sample], largest: &Sample) -> Result<Self, ForecastError> {
        for Sample { value, recording } in smaller.iter().chain([largest]) {
            if recording.workload.ops.iter().any(|op| matches!(op, Op::AllocateFailing { .. })) {
                return Err(ForecastError::Failed { value: *value });
            }
        }
        let (before, asked) = (before(largest), asked(&largest.recording.workload));
        let all = before.iter().map(|block| block.bytes);
        let all = all.chain(asked.iter().map(|asked| asked.bytes));
        let lines = all.map(|bytes| Fit { bytes, other: None }).collect();
        let mut forecast = Self {
            base_value: largest.value,
            base: largest.recording.clone(),
            lines,
            all: Sizes::default(),
            growing: Sizes::default(),
            not_affine: Sizes::default(),
            only_largest: Sizes::default(),
            missing: Sizes::default(),
            before: Sizes::default(),
        };
        let unequal = forecast.compare_before(smaller, &before)?;
        let mut is_off = vec![false; asked.len()];
        for sample in smaller.iter().rev() {
            forecast.add(sample, &asked, &mut is_off)?;
        }
        forecast.missing.requests += unequal.requests;
        forecast.missing.bytes = forecast.missing.bytes.saturating_add(unequal.bytes);
        forecast.count(&is_off);
        let off = [forecast.not_affine, forecast.only_largest, forecast.missing];
        let off_bytes: u128 = off.iter().map(|sizes| u128::from(sizes.bytes)).sum();
        let all_bytes = u128::from(forecast.all.bytes) + u128::from(forecast.missing.bytes);
        let percent = off_bytes * 100 / all_bytes.max(1);
        match u64::try_from(percent).unwrap_or(u64::MAX) {
            percent if percent > NOT_AFFINE_MAX_PERCENT => {
                Err(ForecastError::NotAffine { percent })
            }
            _ if forecast.growing.requests == 0 => Err(ForecastError::Constant),
            _ => Ok(forecast),
        }
    }

    /// Compares the blocks that lived before each recording with those of the one at the largest value, which
    /// are `largest`. Returns those of another recording that this one lacks, if there are a few.
    fn compare_before(
        &mut self,
        smaller: &[Sample],
        largest: &[BlockBefore],
    ) -> Result<Sizes, ForecastError> {
        let mut is_constant = vec![true; largest.len()];
        let mut most = Sizes::default();
        for sample in smaller {
            let blocks = before(sample);
            let mut counts: HashMap<BlockBefore, u64> = HashMap::new();
            blocks.iter().for_each(|block| *counts.entry(*block).or_default() += 1);
            let mut only_largest = Sizes::default();
            for (block, is_constant) in largest.iter().zip(&mut is_constant) {
                match counts.get_mut(block).filter(|count| **count > 0) {
                    Some(count) => *count -= 1,
                    None => {
                        only_largest.add(block.bytes);
                        *is_constant = false;
                    }
                }
            }
            let mut missing = Sizes::default();
            for (block, count) in counts {
                (0..count).for_each(|_| missing.add(block.bytes));
            }
            let all = |blocks: &[BlockBefore]| blocks.iter().map(|b| u128::from(b.bytes)).sum();
            let all_bytes: u128 = u128::max(all(largest), all(&blocks));
            let bytes = only_largest.bytes.max(missing.bytes);
            if u128::from(bytes) * 100 > all_bytes * BEFORE_MAX_PERCENT {
                let values = [sample.value, self.base_value];
                return Err(ForecastError::Late { values, bytes });
            }
            most = if missing.bytes > most.bytes { missing } else { most };
        }
        for (line, is_constant) in self.lines.iter_mut().zip(is_constant) {
            if is_constant {
                // A line through two equal sizes.
                line.other = Some((0, line.bytes));
                self.before.add(line.bytes);
            }
        }
        Ok(most)
    }

    /// Aligns the requests of a recording at a smaller value with `largest`, those at the largest value. A
    /// request that has its line already is checked: `is_off` is set if the size is not on the line.
    fn add(
        &mut self,
        sample: &Sample,
        largest: &[Asked],
        is_off: &mut [bool],
    ) -> Result<(), ForecastError> {
        let of = self.base_value;
        let smaller = asked(&sample.recording.workload);
        let may_be = |x: usize, y: usize| smaller[x].may_grow_to(largest[y], [sample.value, of]);
        let Some(pairs) = fewest([smaller.len(), largest.len()], may_be) else {
            return Err(ForecastError::OtherRequests { values: [sample.value, of] });
        };
        let mut missing = Sizes::default();
        smaller.iter().for_each(|asked| missing.add(asked.bytes));
        for [x, _] in &pairs {
            missing.requests -= 1;
            missing.bytes = missing.bytes.saturating_sub(smaller[*x].bytes);
        }
        if missing.bytes > self.missing.bytes {
            self.missing = missing;
        }
        for [x, y] in pairs {
            let behind = self.lines.len() - largest.len();
            let (line, bytes) = (&mut self.lines[behind + y], smaller[x].bytes);
            if line.other.is_some() {
                is_off[y] = line.at(sample.value, of).abs_diff(bytes) > MIN_BLOCK_BYTES;
            } else {
                line.other = Some((sample.value, bytes));
            }
        }
        Ok(())
    }

    fn count(&mut self, is_off: &[bool]) {
        let (before, asked) = self.lines.split_at(self.lines.len() - is_off.len());
        for line in before.iter().filter(|line| line.other.is_none()) {
            self.all.add(line.bytes);
            self.only_largest.add(line.bytes);
        }
        for (line, is_off) in asked.iter().zip(is_off) {
            self.all.add(line.bytes);
            match line.other {
                None => self.only_largest.add(line.bytes),
                Some(_) if *is_off => self.not_affine.add(line.bytes),
                Some((_, bytes)) if bytes != line.bytes => self.growing.add(line.bytes),
                Some(_) => {}
            }
        }
    }

    /// Returns a recording of the requests at a value of the parameter, without events and stacks.
    pub fn at(&self, value: u64) -> Recording {
        let mut recording = self.base.clone();
        let mut lines = self.lines.iter();
        Arc::make_mut(&mut recording.workload).ops.change(|mut op| {
            if let Op::Allocate { bytes, .. } = &mut op
                && let Some(line) = lines.next()
            {
                *bytes = line.at(value, self.base_value);
            }
            op
        });
        recording.live_peak_bytes = live_peak_bytes(&recording.workload);
        recording
    }

    /// Returns the largest value at which the program runs on a device of `total_bytes` with each order of
    /// addresses, found by bisection. `None` if it does not run at 1. Writes no files.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the configuration builds no allocator, or the allocator fails for a reason other
    /// than memory.
    pub fn largest(&self, config: &Config, total_bytes: u64) -> Result<Option<u64>, ReplayError> {
        let config = &without_files(config);
        let runs = |value: u64| -> Result<bool, ReplayError> {
            let recording = self.at(value);
            if recording.live_peak_bytes > total_bytes {
                return Ok(false);
            }
            for order in [AddressOrder::Lowest, AddressOrder::Rising, AddressOrder::Falling] {
                if !fits_in_order(&recording, config, total_bytes, order)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        if !runs(1)? {
            return Ok(None);
        }
        let (mut runs_at, mut fails_at) = (1, 2);
        while fails_at < VALUE_MAX && runs(fails_at)? {
            (runs_at, fails_at) = (fails_at, fails_at * 2);
        }
        while fails_at - runs_at > 1 {
            let middle = runs_at + (fails_at - runs_at) / 2;
            if runs(middle)? { runs_at = middle } else { fails_at = middle }
        }
        Ok(Some(runs_at))
    }
}

/// Values of a parameter are smaller than this.
pub const VALUE_MAX: u64 = 1 << 32;

impl Asked {
    /// Returns true if this request at the smaller of two values may be `larger` at the other: if the size
    /// does not fall, and does not grow faster than the parameter.
    fn may_grow_to(self, larger: Self, [value, of]: [u64; 2]) -> bool {
        let slack = MIN_BLOCK_BYTES;
        let scaled = |bytes: u64, by: u64| u128::from(bytes) * u128::from(by);
        self.heap == larger.heap
            && self.bytes <= larger.bytes.saturating_add(slack)
            && scaled(larger.bytes, value) <= scaled(self.bytes.saturating_add(slack), of)
    }
}

/// Returns the blocks that lived before a recording began, in the order of the operations.
fn before(sample: &Sample) -> Vec<BlockBefore> {
    let Workload { ops, seeded, .. } = &*sample.recording.workload;
    let block = |op: Op| match op {
        Op::Allocate { bytes, stream, pool, .. } => Some(BlockBefore {
            bytes,
            on_default_stream: stream == StreamId::DEFAULT,
            in_default_pool: pool == PoolId::DEFAULT,
        }),
        _ => None,
    };
    ops.iter().take(*seeded as usize).filter_map(block).collect()
}

/// Returns the requests of a workload in order, without the blocks that lived before it began.
fn asked(workload: &Workload) -> Vec<Asked> {
    let mut streams: HashMap<StreamId, usize> = HashMap::new();
    let mut pools: HashMap<PoolId, usize> = HashMap::new();
    let mut asked = Vec::new();
    for op in workload.ops.range(workload.seeded as usize..workload.ops.len()) {
        if let Op::Allocate { bytes, stream, pool, .. } = op {
            let (next_stream, next_pool) = (streams.len(), pools.len());
            let stream = *streams.entry(stream).or_insert(next_stream);
            let pool = *pools.entry(pool).or_insert(next_pool);
            asked.push(Asked { bytes, heap: [stream, pool] });
        }
    }
    asked
}

#[cfg(test)]
mod tests {
    use quickcheck::quickcheck;

    use super::*;

    /// A request: its bytes at 0, and by how many it grows with the parameter.
    type Request = (u64, u64);

    /// Returns a recording of a program at a value. The order of the frees differs between even and odd
    /// values.
    fn sample(value: u64, program: &[Request]) -> Sample {
        let (stream, pool) = (StreamId(value * 64), PoolId::DEFAULT);
        let request = |(id, request): (u32, &Request)| Op::Allocate {
            id,
            bytes: request.0 + request.1 * value,
            stream,
            pool,
        };
        let mut ops: Vec<Op> = (0..).zip(program).map(request).collect();
        let blocks = u32::try_from(program.len()).unwrap();
        let frees = (0..blocks).map(|id| Op::Free { id });
        match value % 2 {
            0 => ops.extend(frees),
            _ => ops.extend(frees.rev()),
        }
        let workload = Arc::new(Workload { ops: ops.into(), blocks, ..Workload::default() });
        let recording = Recording::new(Trace::default(), None, Memory::default());
        Sample::new(value, Recording { workload, ..recording })
    }

    fn sizes(recording: &Recording) -> Vec<u64> {
        asked(&recording.workload).iter().map(|asked| asked.bytes).collect()
    }

    quickcheck! {
        fn sizes_on_lines_are_exact_at_any_value(program: Vec<(u16, u16)>, value: u16) -> bool {
            let program: Vec<Request> =
                program.into_iter().map(|(bytes, more)| (u64::from(bytes) + 1, more.into())).collect();
            let value = u64::from(value) + 1;
            let smaller = [3, 4].map(|value| sample(value, &program));
            let forecast = match Forecast::of(&smaller, &sample(7, &program)) {
                Ok(forecast) => forecast,
                Err(error) => {
                    let grows = program.iter().any(|request| request.1 > 0);
                    return error == ForecastError::Constant && !grows;
                }
            };
            let found = forecast.at(value);
            let expected = sample(value, &program).recording;
            sizes(&found) == sizes(&expected)
                && found.live_peak_bytes == live_peak_bytes(&expected.workload)
                && [forecast.not_affine, forecast.missing] == [Sizes::default(); 2]
        }
    }

    const PROGRAM: [Request; 4] = [(900_000, 0), (4096, 2048), (20_000, 1000), (500_000, 70_000)];

    #[test]
    fn requests_of_one_recording_are_counted_and_others_still_have_their_lines() {
        let mut with_workspace = PROGRAM.to_vec();
        with_workspace.insert(2, (90_000, 0));
        let forecast = Forecast::of(&[sample(2, &PROGRAM)], &sample(4, &with_workspace)).unwrap();
        assert_eq!(forecast.only_largest, Sizes { requests: 1, bytes: 90_000 });
        with_workspace[2] = (0, 90_000 / 4);
        assert_eq!(sizes(&forecast.at(10)), sizes(&sample(10, &with_workspace).recording));
        with_workspace[2] = (90_000, 0);
        let forecast = Forecast::of(&[sample(2, &with_workspace)], &sample(4, &PROGRAM)).unwrap();
        assert_eq!(forecast.missing, Sizes { requests: 1, bytes: 90_000 });
        assert_eq!(forecast.only_largest, Sizes::default());
        assert_eq!(sizes(&forecast.at(10)), sizes(&sample(10, &PROGRAM).recording));
    }

    #[test]
    fn a_size_that_is_on_no_line_is_counted() {
        let mut other = PROGRAM;
        other[1].0 += 1000;
        let forecast =
            Forecast::of(&[sample(2, &other), sample(4, &PROGRAM)], &sample(6, &PROGRAM));
        let off = Sizes { requests: 1, bytes: 4096 + 6 * 2048 };
        assert_eq!(forecast.unwrap().not_affine, off);
        other[0].0 -= 500_000;
        let refused = Forecast::of(&[sample(2, &other), sample(4, &PROGRAM)], &sample(6, &PROGRAM));
        assert_eq!(refused.unwrap_err(), ForecastError::NotAffine { percent: 49 });
    }

    /// Returns the same recording with blocks of these sizes before it, in reverse order at odd values.
    fn late(value: u64, before: &[u64], program: &[Request]) -> Sample {
        let mut late = sample(value, program);
        let workload = Arc::make_mut(&mut late.recording.workload);
        let (stream, pool) = (StreamId::DEFAULT, PoolId::DEFAULT);
        let mut sizes = before.to_vec();
        if value % 2 == 1 {
            sizes.reverse();
        }
        let seeded = u32::try_from(sizes.len()).unwrap();
        let seeds = (workload.blocks..).zip(sizes);
        let seeds = seeds.map(|(id, bytes)| Op::Allocate { id, bytes, stream, pool });
        workload.ops = seeds.chain(workload.ops.iter()).collect();
        (workload.blocks, workload.seeded) = (workload.blocks + seeded, seeded);
        late
    }

    #[test]
    fn blocks_that_lived_before_all_recordings_and_are_equal_are_constant() {
        let before = [8_000_000, 512, 3_000_000, 512];
        let smaller = [2, 4].map(|value| late(value, &before, &PROGRAM));
        let forecast = Forecast::of(&smaller, &late(7, &before, &PROGRAM)).unwrap();
        assert_eq!(forecast.before, Sizes { requests: 4, bytes: 11_001_024 });
        assert_eq!(forecast.all.requests, 4);
        assert_eq!([forecast.only_largest, forecast.missing], [Sizes::default(); 2]);
        let found = forecast.at(11);
        let expected = late(11, &before, &PROGRAM).recording;
        assert_eq!(sizes(&found), sizes(&expected));
        assert_eq!(found.live_peak_bytes, live_peak_bytes(&expected.workload));
    }

    #[test]
    fn blocks_that_lived_before_and_differ_are_refused_unless_they_are_a_small_part() {
        let of = |value: u64| [8_000_000, 50_000 * value, 3_000_000];
        let forecast = Forecast::of(&[late(2, &of(2), &PROGRAM)], &late(4, &of(4), &PROGRAM));
        let forecast = forecast.unwrap();
        assert_eq!(forecast.before, Sizes { requests: 2, bytes: 11_000_000 });
        assert_eq!(forecast.only_largest, Sizes { requests: 1, bytes: 200_000 });
        assert_eq!(forecast.missing, Sizes { requests: 1, bytes: 100_000 });
        let large = |value: u64| [8_000_000, 800_000 * value];
        let refused = Forecast::of(&[late(2, &large(2), &PROGRAM)], &late(4, &large(4), &PROGRAM));
        let error = ForecastError::Late { values: [2, 4], bytes: 3_200_000 };
        assert_eq!(refused.unwrap_err(), error);
        // One recording begins late, the other does not.
        let one = Forecast::of(&[sample(2, &PROGRAM)], &late(4, &of(4), &PROGRAM));
        assert_eq!(one.unwrap_err(), ForecastError::Late { values: [2, 4], bytes: 11_200_000 });
    }

    #[test]
    fn a_size_never_falls_below_one_byte() {
        let forecast = Forecast::of(&[sample(8, &[(0, 1000)])], &sample(9, &[(500, 1000)]));
        assert_eq!(sizes(&forecast.unwrap().at(1)), [1]);
    }
}
