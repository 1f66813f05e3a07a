//! Cost of each call on the simulated clock.
//!
//! [`CallCosts::H200`] has the times of the calls on an idle H200 (driver 580). Where only the sum of two
//! calls was measured, it is split between them. Times between measured sizes are interpolated linearly. The
//! costs serve to compare strategies, not to predict the run time of a program: kernels and copies take no
//! time here, only the calls do.

use stratalloc::size::MIB;

/// Cost of one call, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Per call. For `set_access` and `unmap`: per mapped piece.
    pub fixed_ns: u64,
    /// Per whole MiB.
    pub per_mib_ns: u64,
}

impl Cost {
    /// Returns a cost that does not depend on the size.
    #[must_use]
    pub const fn fixed(fixed_ns: u64) -> Self {
        Self { fixed_ns, per_mib_ns: 0 }
    }

    /// Returns the cost of a call on `size_bytes`, in nanoseconds.
    #[must_use]
    pub const fn of(self, size_bytes: u64) -> u64 {
        self.fixed_ns.saturating_add((size_bytes / MIB).saturating_mul(self.per_mib_ns))
    }
}

/// Cost of every call, in nanoseconds. By default calls cost nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallCosts {
    /// `allocate`.
    pub allocate: Cost,
    /// `free`, without the wait for running work.
    pub free: Cost,
    /// `reserve` and `unreserve`.
    pub reserve: Cost,
    /// `create`.
    pub create: Cost,
    /// `release`.
    pub release: Cost,
    /// `map`.
    pub map: Cost,
    /// `set_access`, per mapped piece.
    pub set_access: Cost,
    /// `unmap`, per mapped piece.
    pub unmap: Cost,
    /// `export` and `import`.
    pub export: Cost,
    /// All other calls: streams, events, submission of copies, stream-ordered pools, queries.
    pub other: Cost,
}

impl CallCosts {
    /// An idle H200. Allocate and free together took 77 us at 2 MiB and 440 us at 1 GiB. Release took 13 us
    /// and 496 us at these sizes. The other values are medians.
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

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::size::GIB;

    #[test]
    fn defaults_meet_the_measured_end_points() {
        let costs = CallCosts::H200;
        let pair_us = |bytes| (costs.allocate.of(bytes) + costs.free.of(bytes)) / 1000;
        assert_eq!(pair_us(2 * MIB), 77);
        assert_eq!(pair_us(GIB), 439);
        assert_eq!(costs.release.of(2 * MIB) / 1000, 13);
        assert_eq!(costs.release.of(GIB) / 1000, 496);
    }
}
