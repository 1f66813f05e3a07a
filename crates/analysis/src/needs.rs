//! Finds the smallest device on which a recording runs under a configuration.
//!
//! A larger device is not always sufficient if a smaller one is: each size leads to other releases at other
//! moments. A program can run on one device, fail on a slightly larger one and run again on a still larger
//! one. So a bisection alone finds any size just above a size that fails, not the largest such size.
//!
//! The search starts from above. It steps down from the bytes reserved without a limit to the first size
//! that fails, then bisects between that size and the next larger one. Then it tries sizes up to a tenth
//! above in fine steps. If one of them fails, the search continues from that size. Smaller sizes that
//! suffice by luck are reported and never ranked. The sizes of one round are independent jobs of
//! [`Progress::each`]. Their number does not depend on how these run, and so the result does not either.
//!
//! The choice between two equal free blocks depends on their addresses, and a recording does not contain
//! the addresses that another device would assign. So needs that are printed are searched with three
//! orders of addresses ([`AddressOrder`]), and the largest is printed.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::recording::Recording;
use super::trial::{Capacity, ENDLESS_BYTES, fits_in_order, measure, without_files};
use stratalloc::config::Config;
use stratalloc::size::MIB;
use stratalloc_recording::{Progress, ReplayError};
use stratalloc_sim::AddressOrder;

/// The need of a recording: the smallest device on which it runs under one configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Need {
    /// The smallest device, in bytes, from which on no request fails on any device that was tried. Up to
    /// a tenth above it, devices were tried in steps of at most 0.5 %, above that in coarser steps.
    /// Exact to 0.25 % or 2 MiB, whichever is larger. The largest value of the address orders that were
    /// tried. `None` if no device suffices.
    pub needs_bytes: Option<u64>,
    /// The need with the luckiest order of addresses: the choice between two free blocks of one size
    /// depends on their addresses, which a recording does not contain for another device. `None` if the
    /// needs of all orders are equal within the precision, or if only one was tried.
    pub with_luck_bytes: Option<u64>,
    /// Whether several orders of addresses were tried: see
    /// [`try_other_addresses`](Self::try_other_addresses).
    pub all_orders: bool,
    /// Smaller devices on which the recording ran by luck, smallest first. On some larger device it
    /// fails.
    pub lucky_bytes: Vec<u64>,
    /// The peak of reserved bytes without a limit.
    pub reserved_unlimited_bytes: u64,
    /// The cost of a run on the smallest sufficient device; `None` if no device suffices.
    pub cost: Option<Cost>,
    /// The number of devices tried.
    pub probes: u64,
}

/// The cost of a replay in device calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Cost {
    /// How often all free segments were released to serve a request.
    pub retries: u64,
    /// Calls that allocated or released memory.
    pub device_calls: u64,
    /// Time of the calls on the simulated clock, in nanoseconds.
    pub device_ns: u64,
}

/// The options of [`Need::search`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchOptions {
    /// The step between sizes more than a tenth above the need, as a share of the size: from 0.005 to
    /// 0.1.
    pub coarse_step: f64,
    /// Whether to try sizes below the need too.
    pub lucky: bool,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self { coarse_step: 0.01, lucky: true }
    }
}

impl SearchOptions {
    /// For searches of many configurations of one recording: larger steps far above the need.
    pub const QUICK: Self = Self { coarse_step: 0.04, lucky: false };
}

/// The largest step between sizes near the need, as a share of the size.
const FINE_STEP: f64 = 0.005;
/// Sizes up to this share above the need are tried in fine steps. Below the need, where the recording may
/// run by luck, sizes are tried down to twice this share.
const NEAR: f64 = 0.1;
/// The search ends when some failing size is at most this share below the need.
const EXACT: f64 = 0.0025;
/// All segments and pages are multiples of this, so sizes between two multiples give equal results.
const GRAIN_BYTES: u64 = 2 * MIB;
/// The number of sizes of one round while the search steps down.
const STEPS_AT_ONCE: usize = 8;
/// The number of parts into which each round of the bisection divides the gap.
const PARTS: u64 = 3;

impl Need {
    /// Searches for the need under a configuration. Takes as long as some 30 to 300 replays, by
    /// [`Progress::each`]. Files that a layer of the configuration names are not written.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the recording has no history, the configuration builds no allocator, the
    /// allocator fails for a reason other than memory, or `progress` cancels.
    pub fn search(
        recording: &Recording,
        config: &Config,
        options: &SearchOptions,
        progress: &dyn Progress,
    ) -> Result<Self, ReplayError> {
        if let Some(no_history) = recording.no_history {
            return Err(no_history.into());
        }
        if recording.live_peak_bytes > ENDLESS_BYTES[1] {
            return Ok(Self::default());
        }
        let config = &without_files(config);
        let endless = measure(recording, config, Capacity::Endless, 1, progress)?;
        let peak = endless.run.statistics.reserved_bytes.all.peak;
        let mut need =
            Self { reserved_unlimited_bytes: u64::try_from(peak).unwrap_or(0), ..Self::default() };
        if endless.run.ooms > 0 {
            return Ok(need);
        }
        let mut search =
            NeedSearch::new((recording, config), options, AddressOrder::Lowest, progress);
        let found = search.smallest(endless.peak_taken_bytes)?;
        if let Some(bytes) = found {
            if options.lucky {
                search.try_luck(bytes)?;
            }
            need.set(recording, config, bytes, progress)?;
            let below = search.known.range(..bytes).filter(|(_, fits)| **fits);
            need.lucky_bytes = below.map(|(bytes, _)| *bytes).collect();
        }
        need.probes = search.known.len() as u64;
        Ok(need)
    }

    /// Returns true if [`try_other_addresses`](Self::try_other_addresses) would change nothing.
    #[must_use]
    pub(crate) fn is_confirmed(&self) -> bool {
        self.all_orders || self.needs_bytes.is_none()
    }

    /// Searches again on devices that assign rising and falling addresses and reuse none. Does nothing if
    /// that was done before. If the results differ by more than the precision, sets `needs_bytes` to the
    /// largest and `with_luck_bytes` to the smallest. Takes some 40 replays if the results are equal,
    /// otherwise as long as a [`search`](Self::search) for each order.
    ///
    /// # Errors
    ///
    /// The same as [`search`](Self::search).
    pub fn try_other_addresses(
        &mut self,
        recording: &Recording,
        config: &Config,
        options: &SearchOptions,
        progress: &dyn Progress,
    ) -> Result<(), ReplayError> {
        let Some(first) = self.needs_bytes.filter(|_| !self.is_confirmed()) else {
            return Ok(());
        };
        let config = &without_files(config);
        self.all_orders = true;
        let (mut least, mut most) = (first, Some(first));
        for order in [AddressOrder::Rising, AddressOrder::Falling] {
            let mut search = NeedSearch::new((recording, config), options, order, progress);
            let found = search.confirmed(first, self.reserved_unlimited_bytes)?;
            self.probes += search.known.len() as u64;
            least = least.min(found.unwrap_or(u64::MAX));
            most = most.zip(found).map(|(most, found)| most.max(found));
        }
        let luck = most.is_none_or(|most| most - least > close(most));
        self.with_luck_bytes = luck.then_some(least);
        match most {
            Some(most) if luck && most > first => self.set(recording, config, most, progress)?,
            Some(_) => {}
            // In one of the address orders no device suffices.
            None => (self.needs_bytes, self.cost) = (None, None),
        }
        Ok(())
    }

    /// Sets the need to a device size, and the cost to that of a run on this device.
    fn set(
        &mut self,
        recording: &Recording,
        config: &Config,
        total_bytes: u64,
        progress: &dyn Progress,
    ) -> Result<(), ReplayError> {
        let at_need = measure(recording, config, Capacity::Device { total_bytes }, 1, progress)?;
        self.cost = Some(Cost {
            retries: u64::try_from(at_need.run.statistics.num_alloc_retries).unwrap_or(0),
            device_calls: at_need.device_calls(),
            device_ns: at_need.device_ns,
        });
        self.needs_bytes = Some(total_bytes);
        Ok(())
    }
}

/// A search in progress: the device sizes tried so far, and whether the recording runs on them.
struct NeedSearch<'a> {
    recording: &'a Recording,
    config: &'a Config,
    known: BTreeMap<u64, bool>,
    coarse_step: f64,
    order: AddressOrder,
    progress: &'a dyn Progress,
}

impl<'a> NeedSearch<'a> {
    fn new(
        (recording, config): (&'a Recording, &'a Config),
        options: &SearchOptions,
        order: AddressOrder,
        progress: &'a dyn Progress,
    ) -> Self {
        let coarse_step = options.coarse_step.clamp(FINE_STEP, NEAR);
        Self { recording, config, known: BTreeMap::new(), coarse_step, order, progress }
    }

    /// Returns the need, starting from the estimate `bytes`. `taken_bytes` is the memory used on an
    /// endless device.
    fn confirmed(&mut self, bytes: u64, taken_bytes: u64) -> Result<Option<u64>, ReplayError> {
        let floor = self.floor();
        let below = bytes.saturating_sub(close(bytes)).max(floor);
        self.learn(&[below, bytes])?;
        if self.known[&bytes] && (bytes <= floor || !self.known[&below]) {
            self.learn(&steps_up(bytes, scaled(bytes, 1.0 + NEAR), FINE_STEP))?;
            if self.highest_failure().is_none_or(|failed| failed < bytes) {
                return Ok(Some(bytes));
            }
        }
        self.smallest(taken_bytes.max(bytes))
    }

    /// Returns the need without an estimate. `taken_bytes` is the memory used on an endless device.
    fn smallest(&mut self, taken_bytes: u64) -> Result<Option<u64>, ReplayError> {
        let Some(top) = self.top(up(taken_bytes))? else {
            return Ok(None);
        };
        let Some(mut edge) = self.first_failure(top)? else {
            return Ok(Some(self.floor()));
        };
        loop {
            let bytes = self.between(edge)?;
            let near = scaled(bytes, 1.0 + NEAR).min(top);
            self.learn(&steps_up(bytes, near, FINE_STEP))?;
            let Some(failed) = self.highest_failure() else {
                return Ok(Some(bytes));
            };
            if failed < bytes {
                return Ok(Some(bytes));
            }
            edge = failed;
        }
    }

    /// Returns a size that suffices: the memory used on an endless device, or more for strategies that
    /// may not use all of a device. Returns `None` if 128 times as much does not suffice.
    fn top(&mut self, taken_bytes: u64) -> Result<Option<u64>, ReplayError> {
        let doubled =
            std::iter::successors(Some(taken_bytes.max(GRAIN_BYTES)), |b| b.checked_mul(2));
        for bytes in doubled.take(8) {
            self.learn(&[bytes])?;
            if self.known[&bytes] {
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    }

    /// Returns the size of the smallest device that could suffice.
    fn floor(&self) -> u64 {
        up(self.recording.live_peak_bytes).max(GRAIN_BYTES)
    }

    /// Steps down from `top` until a size fails. Returns the largest that failed, if any did.
    fn first_failure(&mut self, top: u64) -> Result<Option<u64>, ReplayError> {
        let floor = self.floor();
        let mut sizes = steps_down(top, floor, self.coarse_step);
        sizes.push(floor);
        for round in sizes.chunks(STEPS_AT_ONCE) {
            self.learn(round)?;
            if let Some(failed) = self.highest_failure() {
                return Ok(Some(failed));
            }
        }
        Ok(None)
    }

    /// Returns the largest size that failed.
    fn highest_failure(&self) -> Option<u64> {
        self.known.iter().rev().find(|(_, fits)| !**fits).map(|(bytes, _)| *bytes)
    }

    /// Narrows the gap between the largest size that failed and the next larger one, and returns the
    /// latter.
    fn between(&mut self, mut fails: u64) -> Result<u64, ReplayError> {
        loop {
            let mut above = self.known.range(fails + 1..);
            let suffices = above.next().map(|(bytes, _)| *bytes).expect("the top suffices");
            if suffices - fails <= close(suffices) {
                return Ok(suffices);
            }
            let gap = suffices - fails;
            let mut sizes: Vec<u64> =
                (1..PARTS).map(|part| up(fails + gap / PARTS * part)).collect();
            sizes.retain(|bytes| (fails + 1..suffices).contains(bytes));
            sizes.dedup();
            if sizes.is_empty() {
                return Ok(suffices);
            }
            self.learn(&sizes)?;
            fails = self.highest_failure().unwrap_or(fails);
        }
    }

    /// Tries sizes below the need, which may suffice by luck.
    fn try_luck(&mut self, bytes: u64) -> Result<(), ReplayError> {
        let lowest = scaled(bytes, 1.0 - 2.0 * NEAR).max(self.floor());
        self.learn(&steps_down(bytes, lowest, FINE_STEP))
    }

    /// Replays the recording on devices of these sizes, except those whose result is known.
    fn learn(&mut self, sizes: &[u64]) -> Result<(), ReplayError> {
        let unknown: Vec<u64> =
            sizes.iter().copied().filter(|bytes| !self.known.contains_key(bytes)).collect();
        let (recording, config, order) = (self.recording, self.config, self.order);
        let fits = |at: usize| fits_in_order(recording, config, unknown[at], order);
        let fit = self.progress.collect(unknown.len(), fits)?;
        self.known.extend(unknown.into_iter().zip(fit));
        Ok(())
    }
}

/// Returns the precision of a need, in bytes.
fn close(bytes: u64) -> u64 {
    scaled(bytes, EXACT).max(GRAIN_BYTES)
}

/// Rounds up to a multiple of [`GRAIN_BYTES`].
fn up(bytes: u64) -> u64 {
    bytes.div_ceil(GRAIN_BYTES).saturating_mul(GRAIN_BYTES)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "sizes of devices are far below 2^52, and factors are positive"
)]
fn scaled(bytes: u64, factor: f64) -> u64 {
    (bytes as f64 * factor) as u64
}

/// Returns increasing sizes above `from` up to `to`. Each is larger than the previous one by at most the
/// share `step`, or by [`GRAIN_BYTES`] if that is more.
fn steps_up(from: u64, to: u64, step: f64) -> Vec<u64> {
    let next = |bytes: &u64| {
        let further = scaled(*bytes, 1.0 + step) / GRAIN_BYTES * GRAIN_BYTES;
        Some(further.max(bytes + GRAIN_BYTES)).filter(|next| *next <= to)
    };
    std::iter::successors(Some(from), next).skip(1).collect()
}

/// Returns decreasing sizes below `from` down to `to`. Each is smaller than the previous one by at most the
/// share `step`, or by [`GRAIN_BYTES`] if that is more.
fn steps_down(from: u64, to: u64, step: f64) -> Vec<u64> {
    let next = |bytes: &u64| {
        let further = up(scaled(*bytes, 1.0 / (1.0 + step)));
        Some(further.min(bytes.saturating_sub(GRAIN_BYTES))).filter(|next| *next >= to.max(1))
    };
    std::iter::successors(Some(from), next).skip(1).collect()
}
