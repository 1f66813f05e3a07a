//! The counters of one heap, kept under its lock.
//!
//! A heap has one *account* for each kind of pool. An account counts in two *classes*: its kind, and the
//! sum of both kinds. Each class has eight counters, and each counter has a limit. An account at or below
//! its limits cannot raise a peak of the device, so an operation only compares. An account that passes a
//! limit calls the `ledger`.
//!
//! The difference between a limit and the current value is the account's *spare*. Only five counters
//! change on a hit, and by the same amount in both classes. So for each of them the account stores one
//! *room*: the spare of its tightest limit. Negative room means that a limit is passed. By how much the
//! other limits exceed it is stored in `beyond`.
//!
//! Active blocks are live blocks and draining blocks. The latter are counted separately, because their
//! number changes rarely. So live and active blocks share one room, too.
//!
//! Current values are not stored: they are the difference of two sums, of increases and of decreases.

mod spare;

pub(crate) use spare::LiveBlocks;
pub(super) use spare::{Parked, Taken};

use crate::heap::{AllocatedBlock, Completed, CountParts, SplitChange};
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
        Self(zip(self.0, other.0, f))
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
/// inactive splits and their bytes), and live oversize blocks. Counters that change together are not
/// adjacent: to change two of them with one vector instruction takes more instructions than without.
type Hot = [i64; HOT];
const HOT: usize = 6;
const BLOCKS: usize = 0;
const OVERSIZE: usize = 1;
const BYTES: usize = 2;
const PARTS: usize = 3;
const REQUESTED: usize = 4;
const PART_BYTES: usize = 5;

/// A number of blocks and their bytes.
type Amount = [i64; 2];

/// One value for each limit of a counter. The limits of active blocks equal those of live blocks for
/// counters that make no difference between the two.
type Limits = [i64; LIMITS];
const LIMITS: usize = 4;
const LIVE_OF_KIND: usize = 0;
const ACTIVE_OF_KIND: usize = 1;
const LIVE_OF_BOTH: usize = 2;
const ACTIVE_OF_BOTH: usize = 3;

/// The counters of one kind of pool in one heap.
#[derive(Clone, Debug, Default)]
#[repr(align(64))]
pub(crate) struct Account {
    /// At most the spare of the tightest limit of each counter. Negative after a limit was passed.
    room: Hot,
    /// Draining blocks whose spare is not in `beyond` yet. Each adds spare to the limits of live blocks.
    unsettled: Amount,
    /// Sums of increases, modulo 2^64.
    allocated: Hot,
    /// Sums of decreases, modulo 2^64.
    freed: Hot,
    draining: Amount,
    /// Allocated and freed blocks at the ledger's last check.
    calls_at_last_check: i64,
    /// By how much the spare of each limit exceeds the room of its counter.
    beyond: [Limits; HOT],
    /// A bit for each counter that may have a limit beyond the room.
    has_beyond: u8,
    /// The accumulated values at their last reset.
    at_reset: Accumulated,
}

/// The counters of one heap.
#[derive(Clone, Debug, Default)]
pub(crate) struct HeapCounters {
    accounts: [Account; 2],
    /// Whether the ledger lists this heap as one that may have spare. An unlisted heap has none.
    listed: bool,
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
fn plus(a: i64, b: i64) -> i64 {
    a + b
}

#[inline]
fn minus(a: i64, b: i64) -> i64 {
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

/// Returns a value that is negative if one of `values` is, and zero if all are.
#[inline]
fn any<const N: usize>(values: [i64; N]) -> i64 {
    values.into_iter().fold(0, |any, value| any | value)
}

/// Adds to one of the sums. It wraps, because sums can exceed 2^63.
#[inline]
fn count(sum: &mut i64, more: i64) {
    *sum = sum.wrapping_add(more);
}

impl HeapCounters {
    /// Returns the counters of one kind.
    #[inline]
    pub(crate) fn account(&mut self, kind: PoolKind) -> &mut Account {
        &mut self.accounts[kind.index()]
    }

    /// Counts an allocated block. `parts` is the result of counting its change in inactive splits. Returns
    /// true if a limit is passed: then the caller must call the ledger. An unlisted heap has no spare, so it
    /// passes one.
    #[inline]
    #[must_use]
    pub(crate) fn allocated<C>(
        &mut self,
        out: &AllocatedBlock<C>,
        parts: LeastRoom,
        requested_bytes: u64,
        oversize: bool,
    ) -> bool {
        let account = self.account(out.kind);
        let (size, requested) = (signed(out.size_bytes), signed(requested_bytes));
        count(&mut account.allocated[BLOCKS], 1);
        count(&mut account.allocated[BYTES], size);
        count(&mut account.allocated[REQUESTED], requested);
        account.room[BLOCKS] -= 1;
        account.room[BYTES] -= size;
        account.room[REQUESTED] -= requested;
        let mut least = account.room[BLOCKS] | account.room[BYTES] | account.room[REQUESTED];
        least |= parts.0;
        if oversize {
            account.allocated[OVERSIZE] += 1;
            account.room[OVERSIZE] -= 1;
            least |= account.room[OVERSIZE];
        }
        least < 0
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
        let account = self.account(kind);
        let size = signed(size_bytes);
        account.count_freed([1, size], oversize);
        account.draining = zip(account.draining, [1, size], plus);
        account.unsettled = zip(account.unsettled, [1, size], plus);
        !self.listed
    }

    /// Counts a draining block that became free, and its change in inactive splits. Returns true if the
    /// caller must call the ledger.
    #[must_use]
    #[inline]
    pub(crate) fn drained(&mut self, done: &Completed) -> bool {
        let least = self.count_parts(done.kind, done.inactive);
        let account = self.account(done.kind);
        account.drained([1, signed(done.size_bytes)]);
        account.count_requested_freed(done.requested_bytes);
        least.is_passed() || !self.listed
    }

    /// Counts a freed block that is free at once. `parts` is the result of counting its change in inactive
    /// splits. Returns true if the caller must call the ledger.
    #[inline]
    #[must_use]
    pub(crate) fn freed<C>(
        &mut self,
        done: &Completed<C>,
        parts: LeastRoom,
        oversize: bool,
    ) -> bool {
        let account = self.account(done.kind);
        let size = signed(done.size_bytes);
        account.count_freed([1, size], oversize);
        account.room[BLOCKS] += 1;
        account.room[BYTES] += size;
        account.count_requested_freed(done.requested_bytes);
        parts.is_passed() || !self.listed
    }

    /// Counts a change in the inactive splits of a kind.
    pub(crate) fn count_parts(&mut self, kind: PoolKind, change: SplitChange) -> LeastRoom {
        let SplitChange { count: parts, bytes } = change;
        let account = self.account(kind);
        match (parts, bytes) {
            (_, 1..) => account.more(parts, bytes.unsigned_abs()),
            (..=0, _) => account.less(parts, bytes.unsigned_abs()),
            // A block was placed inside a free part.
            (1.., _) => {
                count(&mut account.allocated[PARTS], parts);
                account.remove_parts(parts, bytes);
                LeastRoom(account.room[PARTS])
            }
        }
    }

    /// Returns the current values of a kind or of [`ALL`].
    #[must_use]
    pub(crate) fn current(&self, class: usize) -> CounterValues {
        match self.accounts.get(class) {
            Some(account) => {
                let Accumulated { allocated, freed } = account.accumulated();
                allocated.zip(freed, i64::wrapping_sub)
            }
            None => self.current(0).zip(self.current(1), plus),
        }
    }

    /// Returns the sums of increases and decreases of one kind since the last reset.
    #[must_use]
    pub(crate) fn accumulated(&self, kind: PoolKind) -> Accumulated {
        let account = &self.accounts[kind.index()];
        let (now, then) = (account.accumulated(), account.at_reset);
        Accumulated {
            allocated: now.allocated.zip(then.allocated, i64::wrapping_sub),
            freed: now.freed.zip(then.freed, i64::wrapping_sub),
        }
    }

    /// Resets the accumulated values.
    pub(crate) fn reset_accumulated(&mut self) {
        for account in &mut self.accounts {
            account.at_reset = account.accumulated();
        }
        self.hits = 0;
        self.misses = 0;
    }
}

impl Account {
    /// Counts a freed block, whether it is free at once or draining.
    #[inline]
    fn count_freed(&mut self, [blocks, bytes]: Amount, oversize: bool) {
        count(&mut self.freed[BLOCKS], blocks);
        count(&mut self.freed[BYTES], bytes);
        if oversize {
            self.freed[OVERSIZE] += 1;
            self.room[OVERSIZE] += 1;
        }
    }

    /// Counts fewer draining blocks. If the limits of live blocks still have the spare of these blocks,
    /// that is room now.
    #[inline]
    fn drained(&mut self, blocks: Amount) {
        self.draining = zip(self.draining, blocks, minus);
        let unsettled = zip(self.unsettled, blocks, minus);
        if any(unsettled) < 0 {
            return self.drained_after_settling(blocks);
        }
        self.unsettled = unsettled;
        self.room[BLOCKS] += blocks[0];
        self.room[BYTES] += blocks[1];
    }

    /// Counts the requested bytes of a block that became free.
    #[inline]
    fn count_requested_freed(&mut self, requested_bytes: u64) {
        let requested = signed(requested_bytes);
        count(&mut self.freed[REQUESTED], requested);
        self.room[REQUESTED] += requested;
    }

    /// Counts more bytes in inactive splits; the caller counts the sums of their number. The result is
    /// negative if a limit is passed.
    #[inline]
    fn add_parts(&mut self, parts: i64, bytes: i64) -> i64 {
        count(&mut self.allocated[PART_BYTES], bytes);
        self.room[PARTS] -= parts;
        self.room[PART_BYTES] -= bytes;
        self.room[PARTS] | self.room[PART_BYTES]
    }

    /// Counts fewer bytes in inactive splits; the caller counts the sums of their number.
    #[inline]
    fn remove_parts(&mut self, parts: i64, bytes: i64) {
        debug_assert!(bytes <= 0);
        count(&mut self.freed[PART_BYTES], -bytes);
        self.room[PARTS] -= parts;
        self.room[PART_BYTES] -= bytes;
    }

    /// Returns the sums of all counters.
    fn accumulated(&self) -> Accumulated {
        let [blocks, bytes] = blocks_of(self.freed);
        let [draining, draining_bytes] = self.draining;
        let inactive = [blocks - draining, bytes.wrapping_sub(draining_bytes)];
        Accumulated {
            allocated: with_active(self.allocated, blocks_of(self.allocated)),
            freed: with_active(self.freed, inactive),
        }
    }
}

#[inline]
fn blocks_of(hot: Hot) -> Amount {
    [hot[BLOCKS], hot[BYTES]]
}

/// Returns one value for each counter, in their order.
#[inline]
fn with_active(hot: Hot, active: Amount) -> CounterValues {
    let [blocks, oversize, bytes, parts, requested, part_bytes] = hot;
    let [active_blocks, active_bytes] = active;
    CounterValues([
        blocks,
        bytes,
        active_blocks,
        active_bytes,
        requested,
        parts,
        part_bytes,
        oversize,
    ])
}

impl CountParts for &mut Account {
    type Counted = LeastRoom;

    #[inline(always)]
    fn more(self, parts: i64, bytes: u64) -> LeastRoom {
        if parts < 0 {
            // Free parts on both sides were joined with the block.
            count(&mut self.freed[PARTS], -parts);
        } else {
            count(&mut self.allocated[PARTS], parts);
        }
        LeastRoom(self.add_parts(parts, signed(bytes)))
    }

    #[inline(always)]
    fn less(self, parts: i64, bytes: u64) -> LeastRoom {
        debug_assert!(parts <= 0);
        count(&mut self.freed[PARTS], -parts);
        self.remove_parts(parts, -signed(bytes));
        LeastRoom(0)
    }
}

/// The room of counters whose limits an operation can pass: negative if one is passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeastRoom(i64);

impl LeastRoom {
    #[inline]
    const fn is_passed(self) -> bool {
        self.0 < 0
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
