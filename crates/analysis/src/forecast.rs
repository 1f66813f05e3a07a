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

use hashbrown::HashMap;

use super::diff::{DIFFERENCES_MAX, fewest};
use super::figures::live_peak_bytes;
use super::recording::{Memory, Recording};
use super::trial::{fits_in_order, without_files};
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
}

/// The reason why there is no forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForecastError {
    /// Blocks lived before the first event. Their order is not that of their requests.
    #[error("the recording at {value} begins late: record the program from its start")]
    Late {
        /// The value of the parameter.
        value: u64,
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
            if recording.workload.seeded > 0 {
                return Err(ForecastError::Late { value: *value });
            }
        }
        let asked = asked(&largest.recording.workload);
        let lines = asked.iter().map(|asked| Fit { bytes: asked.bytes, other: None }).collect();
        let mut forecast = Self {
            base_value: largest.value,
            base: largest.recording.clone(),
            lines,
            all: Sizes::default(),
            growing: Sizes::default(),
            not_affine: Sizes::default(),
            only_largest: Sizes::default(),
            missing: Sizes::default(),
        };
        let mut is_off = vec![false; asked.len()];
        for sample in smaller.iter().rev() {
            forecast.add(sample, &asked, &mut is_off)?;
        }
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
            let (line, bytes) = (&mut self.lines[y], smaller[x].bytes);
            if line.other.is_some() {
                is_off[y] = line.at(sample.value, of).abs_diff(bytes) > MIN_BLOCK_BYTES;
            } else {
                line.other = Some((sample.value, bytes));
            }
        }
        Ok(())
    }

    fn count(&mut self, is_off: &[bool]) {
        for (line, is_off) in self.lines.iter().zip(is_off) {
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
        for op in &mut recording.workload.ops {
            if let Op::Allocate { bytes, .. } = op
                && let Some(line) = lines.next()
            {
                *bytes = line.at(value, self.base_value);
            }
        }
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

/// Returns the requests of a workload in order.
fn asked(workload: &Workload) -> Vec<Asked> {
    let mut streams: HashMap<StreamId, usize> = HashMap::new();
    let mut pools: HashMap<PoolId, usize> = HashMap::new();
    let mut asked = Vec::new();
    for op in &workload.ops {
        if let Op::Allocate { bytes, stream, pool, .. } = *op {
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
        let workload = Workload { ops, blocks, ..Workload::default() };
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

    #[test]
    fn a_size_never_falls_below_one_byte() {
        let forecast = Forecast::of(&[sample(8, &[(0, 1000)])], &sample(9, &[(500, 1000)]));
        assert_eq!(sizes(&forecast.unwrap().at(1)), [1]);
    }
}
