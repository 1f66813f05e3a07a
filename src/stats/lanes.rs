//! The counters of one heap, kept under its lock.
//!
//! Eight counters side by side, for each kind of pool. Next to them a limit for each counter and
//! for the sum of both kinds: a heap at or below its limits cannot make a new peak of the whole
//! device, so an operation only compares. Who passes a limit goes to the `ledger`.

use crate::heap::{Completed, HandOut, SplitChange};
use crate::size::PoolKind;

/// How many counters are kept side by side.
pub const LANES: usize = 8;

/// Which counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Blocks in callers' hands.
    Allocation,
    /// Their bytes.
    AllocatedBytes,
    /// Blocks in callers' hands or draining.
    Active,
    /// Their bytes.
    ActiveBytes,
    /// What was asked for, of active blocks.
    RequestedBytes,
    /// Free parts of segments.
    InactiveSplit,
    /// Their bytes.
    InactiveSplitBytes,
    /// Oversize blocks in callers' hands.
    Oversize,
}

/// One value for each counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
pub struct Lanes(pub [i64; LANES]);

impl Lanes {
    /// Lane by lane.
    #[inline]
    #[must_use]
    pub fn zip(self, other: Self, f: impl Fn(i64, i64) -> i64) -> Self {
        let mut result = self;
        for (a, b) in result.0.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        result
    }

    /// Whether no lane is below zero.
    #[inline]
    #[must_use]
    pub fn none_negative(self) -> bool {
        self.0.iter().fold(0, |signs, &n| signs | n) >= 0
    }

    /// One lane.
    #[must_use]
    pub const fn of(&self, lane: Lane) -> i64 {
        self.0[lane as usize]
    }
}

/// For whom a value counts: one kind of pool, or both together.
pub const CLASSES: usize = 3;
/// The class of both kinds together; the kinds have their own index.
pub const ALL: usize = 2;

/// The counters of one heap.
#[derive(Clone, Debug, Default)]
pub struct HeapCounters {
    current: [Lanes; 2],
    freed: [Lanes; 2],
    limit: [Lanes; CLASSES],
    /// `current` when accumulated values were reset.
    base: [Lanes; 2],
    /// Requests that a cached block served.
    pub hits: u64,
    /// Requests that needed more than a search.
    pub misses: u64,
}

#[inline]
#[expect(clippy::cast_possible_wrap, reason = "sizes of blocks are below 2^63")]
fn signed(bytes: u64) -> i64 {
    bytes as i64
}

impl HeapCounters {
    /// A block was handed out. True when a limit is passed: then the ledger must be asked.
    #[inline]
    #[must_use]
    pub fn handed_out(
        &mut self,
        kind: PoolKind,
        out: &HandOut,
        requested_bytes: u64,
        oversize: bool,
    ) -> bool {
        let size = signed(out.size_bytes);
        let SplitChange { count, bytes } = out.inactive;
        let change =
            Lanes([1, size, 1, size, signed(requested_bytes), count, bytes, i64::from(oversize)]);
        let freed = &mut self.freed[kind.index()].0;
        freed[Lane::InactiveSplit as usize] += (-count).max(0);
        freed[Lane::InactiveSplitBytes as usize] += (-bytes).max(0);
        self.add(kind, change);
        self.passes_a_limit(kind)
    }

    /// The caller gave a block back that still drains.
    pub fn given_back(&mut self, kind: PoolKind, size_bytes: u64, oversize: bool) {
        let size = signed(size_bytes);
        let (current, freed) = (&mut self.current[kind.index()].0, &mut self.freed[kind.index()].0);
        for (lane, n) in [
            (Lane::Allocation, 1),
            (Lane::AllocatedBytes, size),
            (Lane::Oversize, i64::from(oversize)),
        ] {
            current[lane as usize] -= n;
            freed[lane as usize] += n;
        }
    }

    /// A block that was given back before became free. True when a limit is passed.
    #[must_use]
    pub fn drained(&mut self, done: &Completed) -> bool {
        self.became_free(done, 0, 0, 0)
    }

    /// A block was given back and is free at once. True when a limit is passed.
    #[inline]
    #[must_use]
    pub fn freed(&mut self, done: &Completed, oversize: bool) -> bool {
        self.became_free(done, 1, signed(done.size_bytes), i64::from(oversize))
    }

    #[inline]
    fn became_free(&mut self, done: &Completed, count: i64, bytes: i64, oversize: i64) -> bool {
        let size = signed(done.size_bytes);
        let inactive = done.inactive;
        let change = Lanes([
            -count,
            -bytes,
            -1,
            -size,
            -signed(done.requested_bytes),
            inactive.count,
            inactive.bytes,
            -oversize,
        ]);
        let freed = Lanes([
            count,
            bytes,
            1,
            size,
            signed(done.requested_bytes),
            (-inactive.count).max(0),
            (-inactive.bytes).max(0),
            oversize,
        ]);
        let own = &mut self.freed[done.kind.index()];
        *own = own.zip(freed, |a, b| a + b);
        self.add(done.kind, change);
        self.passes_a_limit(done.kind)
    }

    #[inline]
    fn add(&mut self, kind: PoolKind, change: Lanes) {
        let current = &mut self.current[kind.index()];
        *current = current.zip(change, |a, b| a + b);
    }

    #[inline]
    fn passes_a_limit(&self, kind: PoolKind) -> bool {
        let [small, large] = self.current;
        let own = self.limit[kind.index()].zip(self.current[kind.index()], |a, b| a - b);
        let all = self.limit[ALL].zip(small, |a, b| a - b).zip(large, |a, b| a - b);
        !own.zip(all, |a, b| a | b).none_negative()
    }

    /// What is held now, for a kind or for [`ALL`].
    #[must_use]
    pub fn current(&self, class: usize) -> Lanes {
        let [small, large] = self.current;
        if class == ALL { small.zip(large, |a, b| a + b) } else { self.current[class] }
    }

    /// The sums of decreases and of increases of one kind since the last reset.
    #[must_use]
    pub fn accumulated(&self, kind: PoolKind) -> Accumulated {
        let i = kind.index();
        let freed = self.freed[i];
        let allocated = self.current[i].zip(freed, |a, b| a + b).zip(self.base[i], |a, b| a - b);
        Accumulated { allocated, freed }
    }

    /// Forgets what was summed up.
    pub fn reset_accumulated(&mut self) {
        self.freed = Default::default();
        self.base = self.current;
        self.hits = 0;
        self.misses = 0;
    }

    pub(super) fn limit_mut(&mut self) -> &mut [Lanes; CLASSES] {
        &mut self.limit
    }
}

/// Sums since the last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accumulated {
    /// Of increases.
    pub allocated: Lanes,
    /// Of decreases.
    pub freed: Lanes,
}
