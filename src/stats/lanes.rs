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
    /// By kind, and for [`ALL`].
    current: [Lanes; CLASSES],
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
        // All lanes at once: a store of one lane would stall the next load of several.
        let freed = Lanes([0, 0, 0, 0, 0, (-count).max(0), (-bytes).max(0), 0]);
        let own = &mut self.freed[kind.index()];
        *own = own.zip(freed, |a, b| a + b);
        self.add(kind, change)
    }

    /// The caller gave a block back that still drains.
    pub fn given_back(&mut self, kind: PoolKind, size_bytes: u64, oversize: bool) {
        let size = signed(size_bytes);
        for (lane, n) in [
            (Lane::Allocation, 1),
            (Lane::AllocatedBytes, size),
            (Lane::Oversize, i64::from(oversize)),
        ] {
            self.current[kind.index()].0[lane as usize] -= n;
            self.current[ALL].0[lane as usize] -= n;
            self.freed[kind.index()].0[lane as usize] += n;
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
        self.add(done.kind, change)
    }

    /// Adds the change. True when a limit is passed. Old values are read before new ones are
    /// written: reading back what was just written in another width would stall.
    #[inline]
    fn add(&mut self, kind: PoolKind, change: Lanes) -> bool {
        let own = self.current[kind.index()].zip(change, |a, b| a + b);
        let all = self.current[ALL].zip(change, |a, b| a + b);
        let own_room = self.limit[kind.index()].zip(own, |a, b| a - b);
        let all_room = self.limit[ALL].zip(all, |a, b| a - b);
        self.current[kind.index()] = own;
        self.current[ALL] = all;
        !own_room.zip(all_room, |a, b| a | b).none_negative()
    }

    /// What is held now, for a kind or for [`ALL`].
    #[must_use]
    pub fn current(&self, class: usize) -> Lanes {
        self.current[class]
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
        let [small, large, _] = self.current;
        self.base = [small, large];
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
