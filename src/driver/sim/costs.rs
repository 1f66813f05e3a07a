//! What each call costs on the simulated clock.
//!
//! The defaults are what the calls took on an idle H200 (driver 580), split and drawn linear where
//! only sums or end points were measured. They are for comparing strategies, not for predicting a
//! program's time: work of kernels and copies costs nothing here, only the calls themselves do.

use crate::size::MIB;

/// Cost of one call, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// For each call, or for each handle where the call works on handles.
    pub fixed_ns: u64,
    /// For each whole MiB.
    pub per_mib_ns: u64,
}

impl Cost {
    /// A cost that does not depend on the size.
    #[must_use]
    pub const fn fixed(fixed_ns: u64) -> Self {
        Self { fixed_ns, per_mib_ns: 0 }
    }

    /// What a call of `size_bytes` costs, in nanoseconds.
    #[must_use]
    pub const fn of(self, size_bytes: u64) -> u64 {
        self.fixed_ns.saturating_add((size_bytes / MIB).saturating_mul(self.per_mib_ns))
    }
}

/// Cost of every call, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallCosts {
    /// `allocate`.
    pub allocate: Cost,
    /// `free`. Waiting for running work is not included: it takes no time here.
    pub free: Cost,
    /// `reserve` and `unreserve`.
    pub reserve: Cost,
    /// `create`.
    pub create: Cost,
    /// `release`.
    pub release: Cost,
    /// `map`.
    pub map: Cost,
    /// `set_access`, for each handle.
    pub set_access: Cost,
    /// `unmap`, for each handle.
    pub unmap: Cost,
    /// `export` and `import`.
    pub export: Cost,
    /// Everything else: streams, events, copies' submission, stream-ordered pools, questions.
    pub other: Cost,
}

impl CallCosts {
    /// Every call is free, so that only the test moves the clock.
    pub const NONE: Self = {
        let none = Cost::fixed(0);
        Self {
            allocate: none,
            free: none,
            reserve: none,
            create: none,
            release: none,
            map: none,
            set_access: none,
            unmap: none,
            export: none,
            other: none,
        }
    };

    /// An idle H200. Allocate and free together took 77 us at 2 MiB and 440 us at 1 GiB, release
    /// 13 us and 496 us; the other figures are the middle of what was seen.
    pub const H200: Self = Self {
        allocate: Cost { fixed_ns: 40_290, per_mib_ns: 190 },
        free: Cost { fixed_ns: 36_000, per_mib_ns: 165 },
        reserve: Cost::fixed(4_000),
        create: Cost::fixed(15_000),
        release: Cost { fixed_ns: 12_054, per_mib_ns: 473 },
        map: Cost::fixed(2_500),
        set_access: Cost::fixed(38_000),
        unmap: Cost::fixed(24_000),
        export: Cost::fixed(680_000),
        other: Cost::fixed(1_000),
    };
}

impl Default for CallCosts {
    fn default() -> Self {
        Self::H200
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::GIB;

    #[test]
    fn defaults_meet_the_measured_end_points() {
        let costs = CallCosts::default();
        let pair_us = |bytes| (costs.allocate.of(bytes) + costs.free.of(bytes)) / 1000;
        assert_eq!(pair_us(2 * MIB), 77);
        assert_eq!(pair_us(GIB), 439);
        assert_eq!(costs.release.of(2 * MIB) / 1000, 13);
        assert_eq!(costs.release.of(GIB) / 1000, 496);
    }
}
