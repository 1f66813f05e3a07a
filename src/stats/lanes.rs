//! The counters of one heap, kept under its lock.
//!
//! Outwards there are eight counters for each kind of pool, and a limit for each and for the sum of
//! both kinds: a heap at or below its limits cannot make a new peak of the whole device, so an
//! operation only compares. Who passes a limit goes to the `ledger`.
//!
//! Inwards only five change on a hit. Active blocks are those in callers' hands and those that
//! drain, and what drains changes rarely: its limits are folded into those of the five (`bound`). Of
//! the five a hit keeps only what is left of their bounds (`room`): a room below zero asks for the
//! ledger, and what is held is a bound less its room.

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

/// The five counters that change on a hit: blocks and bytes in callers' hands, what was asked for of
/// active blocks, free parts of segments and their bytes.
type Hot = [i64; HOT];
const HOT: usize = 5;
const BLOCKS: usize = 0;
const BYTES: usize = 1;
const REQUESTED: usize = 2;
const PARTS: usize = 3;
const PART_BYTES: usize = 4;

/// Counters that do not change on a usual hit.
#[derive(Clone, Copy, Debug, Default)]
struct Cold {
    draining_blocks: i64,
    draining_bytes: i64,
    oversize: i64,
    oversize_freed: i64,
}

/// The counters of one heap.
#[derive(Clone, Debug, Default)]
pub struct HeapCounters {
    /// What is left of `bound`, for each kind and for both.
    room: [Hot; 2],
    room_of_both: Hot,
    /// What each of the five may reach, for each kind and both: from `limit` and what drains.
    bound: [Hot; CLASSES],
    freed: [Hot; 2],
    cold: [Cold; 2],
    limit: [Lanes; CLASSES],
    /// All counters when accumulated values were reset.
    base: [Lanes; 2],
    /// What drained when accumulated values were reset: blocks, bytes.
    base_draining: [(i64, i64); 2],
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

fn less(a: i64, b: i64) -> i64 {
    a - b
}

fn zip(a: Hot, b: Hot, f: impl Fn(i64, i64) -> i64) -> Hot {
    std::array::from_fn(|lane| f(a[lane], b[lane]))
}

impl HeapCounters {
    /// A block was handed out. True when a limit is passed: then the ledger must be asked.
    #[inline]
    #[must_use]
    pub fn handed_out(&mut self, out: &HandOut, requested_bytes: u64, oversize: bool) -> bool {
        let HandOut { kind, inactive: SplitChange { count, bytes }, .. } = *out;
        let change = [1, signed(out.size_bytes), signed(requested_bytes), count, bytes];
        let signs = self.take_room::<BLOCKS>(kind, change);
        self.freed[kind.index()][PARTS] -= count.min(0);
        self.add_freed(kind.index(), PART_BYTES, -bytes.min(0));
        if oversize { self.oversize_handed_out(kind) || signs < 0 } else { signs < 0 }
    }

    /// Sums of bytes pass 2^63 some day.
    #[inline]
    fn add_freed(&mut self, kind: usize, lane: usize, bytes: i64) {
        let sum = &mut self.freed[kind][lane];
        *sum = sum.wrapping_add(bytes);
    }

    /// Books a change of the five. Below zero when one of them, from `FIRST` on, passed a limit.
    #[inline]
    fn take_room<const FIRST: usize>(&mut self, kind: PoolKind, change: Hot) -> i64 {
        let (own, both) = (&mut self.room[kind.index()], &mut self.room_of_both);
        let mut signs = 0;
        for (lane, change) in change.into_iter().enumerate() {
            own[lane] -= change;
            both[lane] -= change;
            if lane >= FIRST {
                signs |= own[lane] | both[lane];
            }
        }
        signs
    }

    #[cold]
    fn oversize_handed_out(&mut self, kind: PoolKind) -> bool {
        self.cold[kind.index()].oversize += 1;
        let over =
            |class| self.current(class).of(Lane::Oversize) > self.limit[class].of(Lane::Oversize);
        over(kind.index()) || over(ALL)
    }

    #[cold]
    fn oversize_given_back(&mut self, kind: PoolKind) {
        self.cold[kind.index()].oversize -= 1;
        self.cold[kind.index()].oversize_freed += 1;
    }

    /// The caller gave a block back that still drains.
    pub fn given_back(&mut self, kind: PoolKind, size_bytes: u64, oversize: bool) {
        let (own, size) = (kind.index(), signed(size_bytes));
        self.take_room::<HOT>(kind, [-1, -size, 0, 0, 0]);
        self.add_freed(own, BYTES, size);
        self.freed[own][BLOCKS] += 1;
        self.cold[own].draining_blocks += 1;
        self.cold[own].draining_bytes += size;
        if oversize {
            self.oversize_given_back(kind);
        }
        self.bind();
    }

    /// A block that was given back before became free. True when a limit is passed.
    #[must_use]
    pub fn drained(&mut self, done: &Completed) -> bool {
        let own = done.kind.index();
        self.cold[own].draining_blocks -= 1;
        self.cold[own].draining_bytes -= signed(done.size_bytes);
        self.bind();
        self.became_free(done, [0, 0])
    }

    /// A block was given back and is free at once. True when a limit is passed.
    #[inline]
    #[must_use]
    pub fn freed(&mut self, done: &Completed, oversize: bool) -> bool {
        let (own, size) = (done.kind.index(), signed(done.size_bytes));
        self.add_freed(own, BYTES, size);
        self.freed[own][BLOCKS] += 1;
        if oversize {
            self.oversize_given_back(done.kind);
        }
        self.became_free(done, [-1, -size])
    }

    /// Only free parts of segments can become more when a block becomes free.
    #[inline]
    fn became_free(&mut self, done: &Completed, [blocks, bytes]: [i64; 2]) -> bool {
        let own = done.kind.index();
        let requested = signed(done.requested_bytes);
        self.add_freed(own, REQUESTED, requested);
        self.freed[own][PARTS] -= done.inactive.count.min(0);
        self.add_freed(own, PART_BYTES, -done.inactive.bytes.min(0));
        let SplitChange { count, bytes: part_bytes } = done.inactive;
        self.take_room::<PARTS>(done.kind, [blocks, bytes, -requested, count, part_bytes]) < 0
    }

    /// What is held of the five by each kind.
    fn held(&self) -> [Hot; 2] {
        [0, 1].map(|kind: usize| zip(self.bound[kind], self.room[kind], less))
    }

    /// What is held now, for a kind or for [`ALL`].
    #[must_use]
    pub fn current(&self, class: usize) -> Lanes {
        if class == ALL {
            return self.current(0).zip(self.current(1), |a, b| a + b);
        }
        let [blocks, bytes, requested, parts, part_bytes] = self.held()[class];
        let cold = self.cold[class];
        let active = (blocks + cold.draining_blocks, bytes + cold.draining_bytes);
        Lanes([blocks, bytes, active.0, active.1, requested, parts, part_bytes, cold.oversize])
    }

    /// The sums of decreases and of increases of one kind since the last reset.
    #[must_use]
    pub fn accumulated(&self, kind: PoolKind) -> Accumulated {
        let own = kind.index();
        let [blocks, bytes, requested, parts, part_bytes] = self.freed[own];
        let (cold, before) = (self.cold[own], self.base_draining[own]);
        let freed = Lanes([
            blocks,
            bytes,
            blocks - (cold.draining_blocks - before.0),
            bytes.wrapping_sub(cold.draining_bytes - before.1),
            requested,
            parts,
            part_bytes,
            cold.oversize_freed,
        ]);
        let held = self.current(own).zip(freed, i64::wrapping_add);
        Accumulated { allocated: held.zip(self.base[own], i64::wrapping_sub), freed }
    }

    /// Forgets what was summed up.
    pub fn reset_accumulated(&mut self) {
        self.freed = Default::default();
        self.base = [self.current(0), self.current(1)];
        self.base_draining = self.cold.map(|cold| (cold.draining_blocks, cold.draining_bytes));
        self.cold.iter_mut().for_each(|cold| cold.oversize_freed = 0);
        self.hits = 0;
        self.misses = 0;
    }

    /// What each counter may reach, for each kind and for both.
    pub(super) fn limits(&self) -> &[Lanes; CLASSES] {
        &self.limit
    }

    pub(super) fn set_limits(&mut self, limit: [Lanes; CLASSES]) {
        self.limit = limit;
        self.bind();
    }

    /// Folds what drains into the bounds of what is in callers' hands. What is held stays.
    fn bind(&mut self) {
        let held = self.held();
        let [small, large] = self.cold;
        let both = (
            small.draining_blocks + large.draining_blocks,
            small.draining_bytes + large.draining_bytes,
        );
        let draining = [
            (small.draining_blocks, small.draining_bytes),
            (large.draining_blocks, large.draining_bytes),
            both,
        ];
        for (class, (limit, draining)) in self.limit.iter().zip(draining).enumerate() {
            let bound = [
                limit.of(Lane::Allocation).min(limit.of(Lane::Active) - draining.0),
                limit.of(Lane::AllocatedBytes).min(limit.of(Lane::ActiveBytes) - draining.1),
                limit.of(Lane::RequestedBytes),
                limit.of(Lane::InactiveSplit),
                limit.of(Lane::InactiveSplitBytes),
            ];
            self.bound[class] = bound;
        }
        let [small, large] = held;
        self.room = [zip(self.bound[0], small, less), zip(self.bound[1], large, less)];
        self.room_of_both = zip(zip(self.bound[ALL], small, less), large, less);
    }
}

/// Sums since the last reset, modulo 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accumulated {
    /// Of increases.
    pub allocated: Lanes,
    /// Of decreases.
    pub freed: Lanes,
}
