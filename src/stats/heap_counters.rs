//! The counters of one heap, kept under its lock.
//!
//! There are eight counters for each kind of pool. Each has a limit for its kind and one for the sum of
//! both kinds. A heap at or below its limits cannot raise a peak of the device, so an operation only
//! compares. A heap that passes a limit calls the `ledger`.
//!
//! Only five counters change on a hit. For each of them the heap stores its *room*: the limit minus the
//! current value. Negative room means that a limit is passed. The current value is `bound` minus room.
//! Active blocks are live blocks and draining blocks; the latter are counted separately, because their
//! number changes rarely. So live and active blocks share one room, that of the tighter limit. The excess
//! of the other limit is stored in `beyond_live` or `beyond_active`.

use crate::heap::{AllocatedBlock, Completed, SplitChange};
use crate::size::PoolKind;

/// The number of counters.
pub(crate) const COUNTERS: usize = 8;

/// The index of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CounterIndex {
    /// Live blocks: allocated and not freed.
    Allocation,
    /// Their bytes.
    AllocatedBytes,
    /// Live and draining blocks.
    Active,
    /// Their bytes.
    ActiveBytes,
    /// Requested bytes of active blocks.
    RequestedBytes,
    /// Free parts of split segments (PyTorch's *inactive split*).
    InactiveSplit,
    /// Their bytes.
    InactiveSplitBytes,
    /// Live oversize blocks.
    Oversize,
}

/// One value for each counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(align(64))]
pub(crate) struct CounterValues(pub [i64; COUNTERS]);

impl CounterValues {
    /// Combines two sets of values counter by counter.
    #[inline]
    #[must_use]
    pub(crate) fn zip(self, other: Self, f: impl Fn(i64, i64) -> i64) -> Self {
        let mut result = self;
        for (a, b) in result.0.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        result
    }

    /// Returns one counter.
    #[must_use]
    pub(crate) const fn of(&self, counter: CounterIndex) -> i64 {
        self.0[counter as usize]
    }
}

/// The classes of values: the two kinds of pools, and their sum.
pub(crate) const CLASSES: usize = 3;
/// The index of the sum; the kinds have their own indices.
pub(crate) const ALL: usize = 2;

/// The five counters that change on a hit (live blocks and their bytes, requested bytes of active blocks,
/// inactive splits and their bytes), and live oversize blocks.
type Hot = [i64; HOT];
const HOT: usize = 6;
const BLOCKS: usize = 0;
const BYTES: usize = 1;
const REQUESTED: usize = 2;
const PARTS: usize = 3;
const PART_BYTES: usize = 4;
const OVERSIZE: usize = 5;

/// A number of blocks and their bytes.
type Amount = [i64; 2];

/// The counters of one heap.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapCounters {
    /// The room of each counter, for each class. Negative after a limit was passed.
    room: [Hot; CLASSES],
    /// By how much the limits of live blocks exceed the room.
    beyond_live: [Amount; CLASSES],
    /// By how much the limits of active blocks exceed the room. At most one of the two is not zero.
    beyond_active: [Amount; CLASSES],
    /// The current value plus the room, for each kind.
    bound: [Hot; 2],
    freed: [Hot; 2],
    draining: [Amount; 2],
    /// All counters at the last reset of accumulated values.
    base: [CounterValues; 2],
    /// Draining blocks at the last reset of accumulated values.
    base_draining: [Amount; 2],
    /// Whether the ledger lists this heap as one that may have spare. An unlisted heap has none.
    listed: bool,
    calls_at_last_check: u64,
    /// Requests served by a cached block.
    pub(crate) hits: u64,
    /// Requests that needed more than a search of the cache.
    pub(crate) misses: u64,
}

#[inline]
#[expect(clippy::cast_possible_wrap, reason = "sizes of blocks are below 2^63")]
fn signed(bytes: u64) -> i64 {
    bytes as i64
}

#[inline]
fn less(a: i64, b: i64) -> i64 {
    a - b
}

/// Combines two arrays element by element.
#[inline]
fn zip<const N: usize>(a: [i64; N], b: [i64; N], f: impl Fn(i64, i64) -> i64) -> [i64; N] {
    let mut result = a;
    for counter in 0..N {
        result[counter] = f(a[counter], b[counter]);
    }
    result
}

impl HeapCounters {
    /// Counts an allocated block. Returns true if a limit is passed: then the caller must call the
    /// ledger. An unlisted heap has no spare, so it passes one.
    #[inline]
    #[must_use]
    pub(crate) fn allocated(
        &mut self,
        out: &AllocatedBlock,
        requested_bytes: u64,
        oversize: bool,
    ) -> bool {
        let AllocatedBlock { kind, inactive: SplitChange { count, bytes }, .. } = *out;
        let change = [1, signed(out.size_bytes), signed(requested_bytes), count, bytes];
        let signs = self.take_room::<BLOCKS>(kind, change);
        self.freed[kind.index()][PARTS] -= count.min(0);
        self.add_freed(kind.index(), PART_BYTES, -bytes.min(0));
        if oversize { self.oversize_allocated(kind) || signs < 0 } else { signs < 0 }
    }

    /// Adds to a sum of freed bytes. It wraps, because sums can exceed 2^63.
    #[inline]
    fn add_freed(&mut self, kind: usize, counter: usize, bytes: i64) {
        let sum = &mut self.freed[kind][counter];
        *sum = sum.wrapping_add(bytes);
    }

    /// Subtracts a change of the five counters from the room. The result is negative if a counter from
    /// `FIRST` on has passed a limit.
    #[inline]
    fn take_room<const FIRST: usize>(&mut self, kind: PoolKind, change: [i64; OVERSIZE]) -> i64 {
        let (kinds, both) = self.room.split_at_mut(ALL);
        let (own, both) = (&mut kinds[kind.index()], &mut both[0]);
        let mut signs = 0;
        for (counter, change) in change.into_iter().enumerate() {
            own[counter] -= change;
            both[counter] -= change;
            if counter >= FIRST {
                signs |= own[counter] | both[counter];
            }
        }
        signs
    }

    #[cold]
    fn oversize_allocated(&mut self, kind: PoolKind) -> bool {
        for class in [kind.index(), ALL] {
            self.room[class][OVERSIZE] -= 1;
        }
        self.room[kind.index()][OVERSIZE] < 0 || self.room[ALL][OVERSIZE] < 0
    }

    #[cold]
    fn oversize_freed(&mut self, kind: PoolKind) {
        for class in [kind.index(), ALL] {
            self.room[class][OVERSIZE] += 1;
        }
        self.freed[kind.index()][OVERSIZE] += 1;
    }

    /// Counts a freed block that other streams still use. Returns true if the caller must call the
    /// ledger.
    #[must_use]
    #[inline]
    pub(crate) fn began_draining(
        &mut self,
        kind: PoolKind,
        size_bytes: u64,
        oversize: bool,
    ) -> bool {
        let (own, size) = (kind.index(), signed(size_bytes));
        self.take_room::<OVERSIZE>(kind, [-1, -size, 0, 0, 0]);
        self.add_freed(own, BYTES, size);
        self.freed[own][BLOCKS] += 1;
        if oversize {
            self.oversize_freed(kind);
        }
        self.drain(own, [1, size]);
        !self.listed
    }

    /// Counts a draining block that became free. Returns true if the caller must call the ledger.
    #[must_use]
    #[inline]
    pub(crate) fn drained(&mut self, done: &Completed) -> bool {
        self.drain(done.kind.index(), [-1, -signed(done.size_bytes)]);
        self.became_free(done, [0, 0])
    }

    /// Changes the number of draining blocks. They are active but not live, so they use only the limits
    /// of active blocks.
    #[inline]
    fn drain(&mut self, kind: usize, more: Amount) {
        self.draining[kind] = zip(self.draining[kind], more, |n, more| n + more);
        for class in [kind, ALL] {
            self.beyond_active[class] = zip(self.beyond_active[class], more, less);
            self.even_out(class);
        }
    }

    /// Counts a freed block that is free at once. Returns true if the caller must call the ledger.
    #[inline]
    #[must_use]
    pub(crate) fn freed(&mut self, done: &Completed, oversize: bool) -> bool {
        let (own, size) = (done.kind.index(), signed(done.size_bytes));
        self.add_freed(own, BYTES, size);
        self.freed[own][BLOCKS] += 1;
        if oversize {
            self.oversize_freed(done.kind);
        }
        self.became_free(done, [-1, -size])
    }

    /// Counts a block that became free. Only inactive splits can grow then. All other counters have spare
    /// now, so an unlisted heap must be listed: the result is true for it too.
    #[inline]
    fn became_free(&mut self, done: &Completed, [blocks, bytes]: Amount) -> bool {
        let own = done.kind.index();
        let requested = signed(done.requested_bytes);
        self.add_freed(own, REQUESTED, requested);
        self.freed[own][PARTS] -= done.inactive.count.min(0);
        self.add_freed(own, PART_BYTES, -done.inactive.bytes.min(0));
        let SplitChange { count, bytes: part_bytes } = done.inactive;
        let change = [blocks, bytes, -requested, count, part_bytes];
        self.take_room::<PARTS>(done.kind, change) < 0 || !self.listed
    }

    /// Returns the current values of a kind or of [`ALL`].
    #[must_use]
    pub(crate) fn current(&self, class: usize) -> CounterValues {
        if class == ALL {
            return self.current(0).zip(self.current(1), |a, b| a + b);
        }
        let [blocks, bytes, requested, parts, part_bytes, oversize] =
            zip(self.bound[class], self.room[class], less);
        let active = zip([blocks, bytes], self.draining[class], |live, draining| live + draining);
        CounterValues([blocks, bytes, active[0], active[1], requested, parts, part_bytes, oversize])
    }

    /// Returns the sums of increases and decreases of one kind since the last reset.
    #[must_use]
    pub(crate) fn accumulated(&self, kind: PoolKind) -> Accumulated {
        let own = kind.index();
        let [blocks, bytes, requested, parts, part_bytes, oversize] = self.freed[own];
        let still = zip(self.draining[own], self.base_draining[own], less);
        let active = (blocks - still[0], bytes.wrapping_sub(still[1]));
        let freed = CounterValues([
            blocks, bytes, active.0, active.1, requested, parts, part_bytes, oversize,
        ]);
        let held = self.current(own).zip(freed, i64::wrapping_add);
        Accumulated { allocated: held.zip(self.base[own], i64::wrapping_sub), freed }
    }

    /// Resets the accumulated values.
    pub(crate) fn reset_accumulated(&mut self) {
        self.freed = Default::default();
        self.base = [self.current(0), self.current(1)];
        self.base_draining = self.draining;
        self.hits = 0;
        self.misses = 0;
    }
}

/// How much spare one heap took from another.
pub(super) enum Spare {
    /// A part of it; the taker then passes no limit.
    Shared {
        /// Whether the other heap has spare left.
        is_left: bool,
    },
    /// All of it.
    All,
}

/// Limits, for the ledger. A limit is the current value plus the heap's **spare**.
impl HeapCounters {
    /// Marks this heap as listed. Returns true if it was not listed before.
    #[inline]
    pub(super) fn enter_list(&mut self) -> bool {
        !std::mem::replace(&mut self.listed, true)
    }

    /// Returns true if no limit is passed.
    #[inline]
    pub(super) fn is_covered(&self) -> bool {
        let [small, large, both] = &self.room;
        (0..HOT).fold(0, |signs, counter| signs | small[counter] | large[counter] | both[counter])
            >= 0
    }

    /// Takes spare from `other`. If that suffices and `other` was used since its last check, takes a part:
    /// in those classes where this heap has passed a limit, both heaps then have the same room. Otherwise
    /// takes all spare.
    #[inline(never)]
    pub(super) fn take_spare(&mut self, other: &mut Self) -> Spare {
        let ([small, large, both], [small_there, large_there, both_there]) =
            (&self.room, &other.room);
        let is_enough = (0..HOT).fold(0, |signs, counter| {
            let sums =
                (small[counter] + small_there[counter]) | (large[counter] + large_there[counter]);
            signs | sums | (both[counter] + both_there[counter])
        }) >= 0;
        let shares = other.used_since_last_check() && is_enough;
        if !shares {
            self.take_all_spare(other);
            return Spare::All;
        }
        let mut left = 0;
        for class in 0..CLASSES {
            let (own, others) = (self.room[class], other.room[class]);
            if own.iter().fold(0, |signs, room| signs | room) < 0 {
                let half = zip(others, own, |others, own| ((others - own) >> 1).max(0));
                self.add_room(class, half);
                other.add_room(class, zip([0; HOT], half, less));
            }
            let [blocks, bytes] =
                zip(other.beyond_live[class], other.beyond_active[class], |a, b| a | b);
            left |= blocks | bytes;
            for spare in other.room[class] {
                left |= spare;
            }
        }
        other.listed = left != 0;
        Spare::Shared { is_left: other.listed }
    }

    fn take_all_spare(&mut self, other: &mut Self) {
        for class in 0..CLASSES {
            self.add_room(class, other.room[class]);
            let add = |a, b| a + b;
            self.beyond_live[class] = zip(self.beyond_live[class], other.beyond_live[class], add);
            self.beyond_active[class] =
                zip(self.beyond_active[class], other.beyond_active[class], add);
            self.even_out(class);
        }
        other.forget_spare();
    }

    /// Raises each passed limit to the current value, and returns by how much each one rose.
    pub(super) fn cover(&mut self) -> [CounterValues; CLASSES] {
        let mut rises = [CounterValues::default(); CLASSES];
        for (class, risen) in rises.iter_mut().enumerate() {
            let [blocks, bytes, requested, parts, part_bytes, oversize] = self.room[class];
            let add = |a, b| a + b;
            let live = zip([blocks, bytes], self.beyond_live[class], add);
            let active = zip([blocks, bytes], self.beyond_active[class], add);
            let spare =
                [live[0], live[1], active[0], active[1], requested, parts, part_bytes, oversize];
            *risen = CounterValues(spare).zip(CounterValues::default(), |spare, _| -spare.min(0));
            let [blocks, bytes, active_blocks, active_bytes, rest @ ..] = risen.0;
            let active = [active_blocks, active_bytes];
            self.beyond_live[class] = zip(self.beyond_live[class], [blocks, bytes], add);
            self.beyond_active[class] = zip(self.beyond_active[class], active, add);
            let [requested, parts, part_bytes, oversize] = rest;
            self.add_room(class, [0, 0, requested, parts, part_bytes, oversize]);
            self.even_out(class);
        }
        rises
    }

    /// Lowers each limit to the current value and marks the heap as unlisted.
    pub(super) fn forget_spare(&mut self) {
        for (bound, room) in self.bound.iter_mut().zip(&self.room) {
            *bound = zip(*bound, *room, less);
        }
        self.room = Default::default();
        self.beyond_live = Default::default();
        self.beyond_active = Default::default();
        self.listed = false;
    }

    /// Returns true if a block was allocated or freed since the last call.
    #[inline]
    fn used_since_last_check(&mut self) -> bool {
        let freed = self.freed[0][BLOCKS].wrapping_add(self.freed[1][BLOCKS]);
        let calls = self.hits.wrapping_add(self.misses).wrapping_add_signed(freed);
        std::mem::replace(&mut self.calls_at_last_check, calls) != calls
    }

    /// Adds to the room of one class, without changing the current values.
    #[inline]
    fn add_room(&mut self, class: usize, more: Hot) {
        self.room[class] = zip(self.room[class], more, |room, more| room + more);
        if let Some(bound) = self.bound.get_mut(class) {
            *bound = zip(*bound, more, |bound, more| bound + more);
        }
    }

    /// Moves the excess that both limits have in common to the room.
    #[inline]
    fn even_out(&mut self, class: usize) {
        let of_both = zip(self.beyond_live[class], self.beyond_active[class], i64::min);
        self.beyond_live[class] = zip(self.beyond_live[class], of_both, less);
        self.beyond_active[class] = zip(self.beyond_active[class], of_both, less);
        self.add_room(class, [of_both[0], of_both[1], 0, 0, 0, 0]);
    }
}

/// Sums since the last reset, modulo 2^64.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Accumulated {
    /// Of increases.
    pub(crate) allocated: CounterValues,
    /// Of decreases.
    pub(crate) freed: CounterValues,
}
