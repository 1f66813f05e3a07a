//! The behaviour of PyTorch's caching allocator as PyTorch's own tests check it, tested on a simulated
//! device through the public trait.
//!
//! Each test name states a behaviour. A comment, if any, cites PyTorch's test or behaviour, or states a
//! deliberate difference (listed in `docs/differences.md`). `exactness` compares the decisions on recorded
//! programs. A simulated device has no bytes, so these tests compare address ranges instead.

mod collector;
mod config;
mod counters;
mod hints;
mod holders;
mod limits;
mod oom_report;
mod pressure;
mod streams;

use crate::common::prelude::*;

/// The memory of an H200.
pub(crate) const H200_BYTES: u64 = 150_109_880_320;

/// Returns the default settings with PyTorch's rules or the default ones.
fn rules(compat: Compat) -> Settings {
    Settings { compat, ..Settings::default() }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).expect("test sizes are far below 2^63")
}

impl Fixture {
    fn apply(&self, settings: Settings) {
        self.caching().apply(&Config::from_settings(settings)).expect("the device can");
    }

    /// Returns everything that a refused call must not change.
    fn state(&self) -> (Vec<SegmentLayout>, Statistics, u64) {
        (self.layout(), self.stats(), self.device.total_calls())
    }

    /// Checks every invariant, and that each counter equals its increases minus its decreases.
    #[track_caller]
    fn check_sums(&self) {
        self.check();
        let now = self.stats();
        for (name, family) in invariants::families(&now) {
            for counter in [family.all, family.small, family.large] {
                assert_eq!(counter.allocated - counter.freed, counter.current, "{name}");
            }
        }
        assert_eq!(now.cached_bytes(), now.memory_reserved() - now.active_bytes.all.current);
    }
}
