//! The smallest device on which a recording runs under a configuration.
//!
//! Fits are islands: a program can run on a device, fail on a slightly larger one and run again on a
//! still larger one, because each size leads to other releases at other moments. So a bisection alone
//! finds some edge, not the last. The search comes from above: down from what is reserved without a
//! limit to the first size that fails, then between that and the one above it. Then everything up to a
//! tenth above is tried in fine steps; whatever fails there moves the edge up, and the search goes on
//! from there. Sizes of one round are tried at once, on all processors.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::recording::Recording;
use super::trial::{Room, fits_in_order, measure, without_files};
use crate::config::Config;
use crate::driver::sim::AddressOrder;
use crate::replay::ReplayError;
use crate::size::MIB;

/// What a recording needs under one configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Need {
    /// The smallest device, in bytes, on which no request fails, and on no larger one that was tried:
    /// steps of at most 0.5 % up to a tenth above, coarser from there on. Exact to 0.25 % or 2 MiB,
    /// whichever is larger, for the addresses that the device gives out; the larger need of those orders that
    /// were tried. `None` if no device suffices.
    pub needs_bytes: Option<u64>,
    /// What it needs with lucky addresses: which of two free blocks of one size is taken depends on their
    /// addresses, and recordings do not contain those of another device. `None` if all orders need the same,
    /// or one order was tried.
    pub with_luck_bytes: Option<u64>,
    /// Whether several orders of addresses were tried: see
    /// [`try_other_addresses`](Self::try_other_addresses).
    pub all_orders: bool,
    /// Smaller devices on which it ran by luck, smallest first: a larger one fails.
    pub lucky_bytes: Vec<u64>,
    /// The most that is reserved where nothing limits it.
    pub reserved_unlimited_bytes: u64,
    /// What running on the smallest device costs; `None` where none suffices.
    pub cost: Option<Cost>,
    /// How many devices were tried.
    pub probes: u64,
}

/// What a replay asked of its device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Times at which everything idle was released to serve a request.
    pub retries: u64,
    /// Calls that took memory or gave it back.
    pub device_calls: u64,
    /// What the calls took on the simulated clock, in nanoseconds.
    pub device_ns: u64,
}

/// How thoroughly [`Need::search`] looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SearchOptions {
    /// The step from a tenth above the need on, as a part of the size: from 0.005 to 0.1.
    pub coarse_step: f64,
    /// Whether smaller sizes are tried for luck.
    pub lucky: bool,
}

impl Default for SearchOptions {
    fn default() -> Self {
        Self { coarse_step: 0.01, lucky: true }
    }
}

impl SearchOptions {
    /// For many configurations of one recording: larger steps where they do not decide.
    pub const QUICK: Self = Self { coarse_step: 0.04, lucky: false };
}

/// Up to a tenth above the need, no step is larger.
const FINE_STEP: f64 = 0.005;
/// How far above the need steps are fine; luck is looked for twice as far below.
const NEAR: f64 = 0.1;
/// The largest gap between a size that fails and the need.
const EXACT: f64 = 0.0025;
/// All segments and pages are multiples of this: sizes between two multiples are alike.
const GRAIN_BYTES: u64 = 2 * MIB;

impl Need {
    /// Searches the need of a configuration. Takes as long as some 30 to 300 replays, on all
    /// processors; files that a layer of the configuration names are not written.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the configuration builds no allocator, or the allocator fails in a way that
    /// is not about memory.
    pub fn search(
        recording: &Recording,
        config: &Config,
        options: &SearchOptions,
    ) -> Result<Self, ReplayError> {
        let config = &without_files(config);
        let endless = measure(recording, config, Room::Endless, 1)?;
        let peak = endless.run.statistics.reserved_bytes.all.peak;
        let mut need =
            Self { reserved_unlimited_bytes: u64::try_from(peak).unwrap_or(0), ..Self::default() };
        if endless.run.ooms > 0 {
            return Ok(need);
        }
        let mut search = Search::new(recording, config, options, AddressOrder::Lowest);
        let found = search.smallest(endless.peak_taken_bytes)?;
        if let Some(bytes) = found {
            if options.lucky {
                search.try_luck(bytes)?;
            }
            need.set(recording, config, bytes)?;
            let below = search.known.range(..bytes).filter(|(_, fits)| **fits);
            need.lucky_bytes = below.map(|(bytes, _)| *bytes).collect();
        }
        need.probes = search.known.len() as u64;
        Ok(need)
    }

    /// Whether [`try_other_addresses`](Self::try_other_addresses) has nothing more to find.
    #[must_use]
    pub(crate) fn is_settled(&self) -> bool {
        self.all_orders || self.needs_bytes.is_none()
    }

    /// Searches again on devices that give out rising addresses and falling ones and use none again, unless
    /// that was done. The largest need is the need then, and the smallest the one with luck. Takes some 40
    /// replays if the needs are the same, otherwise as long as [`search`](Self::search) each.
    ///
    /// # Errors
    ///
    /// As [`search`](Self::search).
    pub fn try_other_addresses(
        &mut self,
        recording: &Recording,
        config: &Config,
        options: &SearchOptions,
    ) -> Result<(), ReplayError> {
        let Some(first) = self.needs_bytes.filter(|_| !self.is_settled()) else {
            return Ok(());
        };
        let config = &without_files(config);
        self.all_orders = true;
        let (mut least, mut most) = (first, Some(first));
        for order in [AddressOrder::Rising, AddressOrder::Falling] {
            let mut search = Search::new(recording, config, options, order);
            let found = search.confirmed(first, self.reserved_unlimited_bytes)?;
            self.probes += search.known.len() as u64;
            least = least.min(found.unwrap_or(u64::MAX));
            most = most.zip(found).map(|(most, found)| most.max(found));
        }
        let luck = most.is_none_or(|most| most - least > close(most));
        self.with_luck_bytes = luck.then_some(least);
        match most {
            Some(most) if luck && most > first => self.set(recording, config, most)?,
            Some(_) => {}
            // No device suffices in one of the orders.
            None => (self.needs_bytes, self.cost) = (None, None),
        }
        Ok(())
    }

    /// Sets the need and what running on it costs.
    fn set(
        &mut self,
        recording: &Recording,
        config: &Config,
        total_bytes: u64,
    ) -> Result<(), ReplayError> {
        let at_need = measure(recording, config, Room::Device { total_bytes }, 1)?;
        self.cost = Some(Cost {
            retries: u64::try_from(at_need.run.statistics.num_alloc_retries).unwrap_or(0),
            device_calls: at_need.device_calls(),
            device_ns: at_need.device_ns,
        });
        self.needs_bytes = Some(total_bytes);
        Ok(())
    }
}

/// Sizes of devices and whether the recording runs on them.
struct Search<'a> {
    recording: &'a Recording,
    config: &'a Config,
    known: BTreeMap<u64, bool>,
    coarse_step: f64,
    order: AddressOrder,
}

impl<'a> Search<'a> {
    fn new(
        recording: &'a Recording,
        config: &'a Config,
        options: &SearchOptions,
        order: AddressOrder,
    ) -> Self {
        let coarse_step = options.coarse_step.clamp(FINE_STEP, NEAR);
        Self { recording, config, known: BTreeMap::new(), coarse_step, order }
    }

    /// The need, which is probably about `bytes`. `taken_bytes` is what an endless device gave.
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

    /// The need. `taken_bytes` is what an endless device gave.
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

    /// A size that suffices: what an endless device gave, or more for those who may not use all that
    /// the device has.
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

    /// No device can be smaller.
    fn floor(&self) -> u64 {
        up(self.recording.live_peak_bytes).max(GRAIN_BYTES)
    }

    /// Goes down from `top` until a size fails.
    fn first_failure(&mut self, top: u64) -> Result<Option<u64>, ReplayError> {
        let floor = self.floor();
        let at_once = rayon::current_num_threads() * 4;
        let mut sizes = steps_down(top, floor, self.coarse_step);
        sizes.push(floor);
        for round in sizes.chunks(at_once.max(1)) {
            self.learn(round)?;
            if let Some(failed) = self.highest_failure() {
                return Ok(Some(failed));
            }
        }
        Ok(None)
    }

    /// The largest size that failed.
    fn highest_failure(&self) -> Option<u64> {
        self.known.iter().rev().find(|(_, fits)| !**fits).map(|(bytes, _)| *bytes)
    }

    /// Closes in on the edge between the largest size that failed and the next that did not.
    fn between(&mut self, mut fails: u64) -> Result<u64, ReplayError> {
        loop {
            let mut above = self.known.range(fails + 1..);
            let suffices = above.next().map(|(bytes, _)| *bytes).expect("the top suffices");
            if suffices - fails <= close(suffices) {
                return Ok(suffices);
            }
            // As many sizes at once as there are processors.
            let parts = rayon::current_num_threads().clamp(1, 8) as u64 + 1;
            let gap = suffices - fails;
            let mut sizes: Vec<u64> =
                (1..parts).map(|part| up(fails + gap / parts * part)).collect();
            sizes.retain(|bytes| (fails + 1..suffices).contains(bytes));
            sizes.dedup();
            if sizes.is_empty() {
                return Ok(suffices);
            }
            self.learn(&sizes)?;
            fails = self.highest_failure().unwrap_or(fails);
        }
    }

    /// Tries sizes below the need.
    fn try_luck(&mut self, bytes: u64) -> Result<(), ReplayError> {
        let lowest = scaled(bytes, 1.0 - 2.0 * NEAR).max(self.floor());
        self.learn(&steps_down(bytes, lowest, FINE_STEP))
    }

    /// Repeats the recording on devices of these sizes, as far as it is not known.
    fn learn(&mut self, sizes: &[u64]) -> Result<(), ReplayError> {
        let unknown: Vec<u64> =
            sizes.iter().copied().filter(|bytes| !self.known.contains_key(bytes)).collect();
        let (recording, config, order) = (self.recording, self.config, self.order);
        let found: Result<Vec<(u64, bool)>, ReplayError> = unknown
            .into_par_iter()
            .map(|bytes| Ok((bytes, fits_in_order(recording, config, bytes, order)?)))
            .collect();
        self.known.extend(found?);
        Ok(())
    }
}

/// The precision of a need.
fn close(bytes: u64) -> u64 {
    scaled(bytes, EXACT).max(GRAIN_BYTES)
}

/// The next multiple of the grain.
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

/// Sizes above `from` up to `to`, each at most `step` of itself above the one before.
fn steps_up(from: u64, to: u64, step: f64) -> Vec<u64> {
    let next = |bytes: &u64| {
        let further = scaled(*bytes, 1.0 + step) / GRAIN_BYTES * GRAIN_BYTES;
        Some(further.max(bytes + GRAIN_BYTES)).filter(|next| *next <= to)
    };
    std::iter::successors(Some(from), next).skip(1).collect()
}

/// Sizes below `from` down to `to`, each at most `step` of itself below the one before.
fn steps_down(from: u64, to: u64, step: f64) -> Vec<u64> {
    let next = |bytes: &u64| {
        let further = up(scaled(*bytes, 1.0 / (1.0 + step)));
        Some(further.min(bytes.saturating_sub(GRAIN_BYTES))).filter(|next| *next >= to.max(1))
    };
    std::iter::successors(Some(from), next).skip(1).collect()
}
