//! The spare of a heap, which the ledger moves between heaps.

use super::{
    ACTIVE_OF_BOTH, ACTIVE_OF_KIND, Account, Amount, BLOCKS, BYTES, CounterValues, HOT,
    HeapCounters, Hot, LIMITS, LIVE_OF_BOTH, LIVE_OF_KIND, any, blocks_of, plus, with_active, zip,
};
use crate::size::PoolKind;

/// Room of each kind that heaps have left with the ledger.
#[derive(Debug, Default)]
#[repr(align(64))]
pub(in crate::stats) struct Parked([Hot; 2]);

/// Live blocks, or the spare of the limits of both kinds for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LiveBlocks {
    pub(crate) count: i64,
    pub(crate) bytes: i64,
}

impl LiveBlocks {
    pub(in crate::stats) fn minus(self, other: Self) -> Self {
        Self { count: self.count - other.count, bytes: self.bytes - other.bytes }
    }
}

impl Parked {
    /// Returns the parked spare for live blocks.
    pub(in crate::stats) fn live(&self) -> LiveBlocks {
        let [small, large] = self.0.map(blocks_of);
        let [count, bytes] = zip(small, large, plus);
        LiveBlocks { count, bytes }
    }

    /// Returns the spare of each limit of a kind; it is the same of the limits of the sum.
    #[cfg(test)]
    pub(in crate::stats) fn of(&self, kind: PoolKind) -> CounterValues {
        let room = self.0[kind.index()];
        with_active(room, blocks_of(room))
    }
}

/// The result of taking spare from another heap.
pub(in crate::stats) struct Taken {
    /// Whether the taker passes no limit now.
    pub(in crate::stats) is_enough: bool,
    /// Whether the other heap has spare left. If not, it is no longer marked as listed.
    pub(in crate::stats) is_left: bool,
}

impl HeapCounters {
    /// Returns true if this heap is marked as listed.
    #[inline]
    pub(in crate::stats) fn is_listed(&self) -> bool {
        self.listed
    }

    /// Marks this heap as listed if it has spare or has passed a limit. Returns true if it was not listed
    /// before and is now.
    #[inline]
    pub(in crate::stats) fn enter_list(&mut self) -> bool {
        let enters = !self.listed && self.has_spare();
        self.listed |= enters;
        enters
    }

    /// Returns true if the account of `kind` has passed no limit.
    #[inline]
    pub(in crate::stats) fn is_covered(&self, kind: PoolKind) -> bool {
        any(self.accounts[kind.index()].room) >= 0
    }

    /// Parks the room of the account of `kind`.
    #[inline(always)]
    pub(in crate::stats) fn park(&mut self, kind: PoolKind, parked: &mut Parked) {
        let parked = &mut parked.0[kind.index()];
        *parked = zip(*parked, std::mem::take(&mut self.account(kind).room), plus);
    }

    /// Returns the spare for live blocks.
    pub(in crate::stats) fn spare_of_live(&self) -> LiveBlocks {
        let [small, large] = &self.accounts;
        let [count, bytes] = zip(small.spare_of_live(), large.spare_of_live(), plus);
        LiveBlocks { count, bytes }
    }

    /// Takes all spare of `other` and marks it as unlisted, if it was not used since its last check.
    pub(in crate::stats) fn take_if_unused(&mut self, other: &mut Self) {
        if other.accounts.each_mut().map(Account::was_used_since_last_check) == [false; 2] {
            self.take_all(PoolKind::Small, other);
            other.listed = other.has_spare();
        }
    }

    /// Takes the parked room of `kind`. Returns true if the account then has no room and passes no limit.
    #[inline(always)]
    pub(in crate::stats) fn take_parked(&mut self, kind: PoolKind, parked: &mut Parked) -> bool {
        let account = self.account(kind);
        account.room = zip(account.room, std::mem::take(&mut parked.0[kind.index()]), plus);
        any(account.room) == 0
    }

    /// Takes the parked room of the other kind, because the account of `kind` has passed a limit. Returns
    /// true if it passes none then.
    pub(in crate::stats) fn take_parked_of_other_kind(
        &mut self,
        kind: PoolKind,
        parked: &mut Parked,
    ) -> bool {
        let parked = &mut parked.0[1 - kind.index()];
        if any(*parked) == 0 {
            return false;
        }
        let [_, other] = self.own_first(kind);
        other.room = zip(other.room, std::mem::take(parked), plus);
        self.exchange_between_kinds(kind)
    }

    /// Takes spare from `other`, because the account of `kind` has passed a limit. If `other` was used since
    /// its last check and half of its room suffices, both then have the same. Otherwise takes all of its
    /// room, or all of its spare.
    #[inline(always)]
    pub(in crate::stats) fn take_spare(&mut self, kind: PoolKind, other: &mut Self) -> Taken {
        let (own, there) = (self.account(kind), other.account(kind));
        let was_used = there.was_used_since_last_check();
        let is_enough =
            was_used && own.share_room(there) || own.take_room(there) || self.take_all(kind, other);
        other.listed = other.has_spare();
        Taken { is_enough, is_left: other.listed }
    }

    /// Takes all spare of `other`. Returns true if that suffices.
    #[inline(never)]
    pub(in crate::stats) fn take_all(&mut self, kind: PoolKind, other: &mut Self) -> bool {
        for (own, there) in self.accounts.iter_mut().zip(&mut other.accounts) {
            there.settle_draining();
            own.take_room(there);
            own.take_beyond(there);
        }
        self.exchange_between_kinds(kind)
    }

    /// Returns true if the account of `kind` has passed limits of the sum only, and the spare of this heap's
    /// other account suffices for them. Then both have the same, or less if a limit of the kind is near.
    #[inline]
    pub(in crate::stats) fn covers_itself(&mut self, kind: PoolKind) -> bool {
        self.listed && self.exchange_between_kinds(kind)
    }

    /// As [`covers_itself`](Self::covers_itself), for an account that has passed its limit of blocks only, if
    /// the room of the other one suffices. At the peak of blocks this occurs whenever a block of one kind is
    /// allocated after one of the other kind was freed.
    #[inline(always)]
    pub(in crate::stats) fn exchanges_blocks(&mut self, kind: PoolKind) -> bool {
        const { assert!(BLOCKS == 0) };
        let [own, other] = self.own_first(kind);
        let [_, rest @ ..] = own.room;
        any(rest) >= 0 && own.exchange::<false>(other, BLOCKS)
    }

    /// Covers the account of `kind` as [`covers_itself`](Self::covers_itself) does. If that fails, a part of
    /// the spare may have moved.
    #[inline(never)]
    fn exchange_between_kinds(&mut self, kind: PoolKind) -> bool {
        let [own, other] = self.own_first(kind);
        (0..HOT).all(|counter| own.room[counter] >= 0 || own.exchange::<true>(other, counter))
    }

    /// Takes spare of the sum of both kinds from this heap's other account. Returns true if the account of
    /// `kind` has passed no limit then.
    pub(in crate::stats) fn take_from_other_kind(&mut self, kind: PoolKind) -> bool {
        let [own, other] = self.own_first(kind);
        own.take_of_both(other)
    }

    /// Raises each passed limit of an account to the current value. Returns by how much the limits of the
    /// kind and those of the sum rose.
    pub(in crate::stats) fn cover(&mut self, kind: PoolKind) -> [CounterValues; 2] {
        let account = self.account(kind);
        let mut rises = [Hot::default(); LIMITS];
        for counter in 0..HOT {
            let room = account.room[counter];
            for (beyond, rises) in account.beyond[counter].iter_mut().zip(&mut rises) {
                let rise = -(room + *beyond).min(0);
                rises[counter] = rise;
                *beyond += rise;
            }
            account.settle(counter);
        }
        let [live, active, live_of_both, active_of_both] = rises;
        let of_both = with_active(live_of_both, blocks_of(active_of_both));
        [with_active(live, blocks_of(active)), of_both]
    }

    /// Lowers each limit to the current value and marks the heap as unlisted.
    pub(in crate::stats) fn forget_spare(&mut self) {
        for account in &mut self.accounts {
            account.room = Hot::default();
            account.unsettled = Default::default();
            account.beyond = Default::default();
            account.has_beyond = 0;
        }
        self.listed = false;
    }

    /// Returns the limits of an account: of its kind, and of the sum.
    #[cfg(test)]
    pub(in crate::stats) fn limits(&self, kind: PoolKind) -> [CounterValues; 2] {
        let mut account = self.accounts[kind.index()].clone();
        account.settle_draining();
        let mut spare = [Hot::default(); LIMITS];
        for counter in 0..HOT {
            for (spare, beyond) in spare.iter_mut().zip(account.beyond[counter]) {
                spare[counter] = account.room[counter] + beyond;
            }
        }
        let current = self.current(kind.index());
        let limits = |live, active| with_active(live, blocks_of(active)).zip(current, plus);
        let [live, active, live_of_both, active_of_both] = spare;
        [limits(live, active), limits(live_of_both, active_of_both)]
    }

    /// Returns true if any limit exceeds its current value or is passed.
    #[inline]
    pub(in crate::stats) fn has_spare(&self) -> bool {
        let [small, large] = &self.accounts;
        let room = any(zip(small.room, large.room, |a, b| a | b));
        let unsettled = any(zip(small.unsettled, large.unsettled, |a, b| a | b));
        room | unsettled | i64::from(small.has_beyond | large.has_beyond) != 0
    }

    /// Returns the account of `kind`, then the other one.
    fn own_first(&mut self, kind: PoolKind) -> [&mut Account; 2] {
        let [small, large] = &mut self.accounts;
        match kind {
            PoolKind::Small => [small, large],
            PoolKind::Large => [large, small],
        }
    }
}

/// Divides the sum of two spares evenly if `own` is the smaller one. Returns false if the sum is negative.
#[inline]
fn share(own: &mut i64, other: &mut i64) -> bool {
    if *own >= *other {
        return true;
    }
    let sum = *own + *other;
    if sum < 0 {
        return false;
    }
    *own = sum / 2;
    *other = sum - *own;
    true
}

impl Account {
    /// Returns the spare of the limits of both kinds for live blocks.
    fn spare_of_live(&self) -> Amount {
        // Read only where it is not zero, because it is on another cache line.
        let beyond = match self.has_beyond {
            0 => [0; 2],
            _ => [BLOCKS, BYTES].map(|counter| self.beyond[counter][LIVE_OF_BOTH]),
        };
        zip(zip(blocks_of(self.room), self.unsettled, plus), beyond, plus)
    }

    /// Divides the room of two accounts of one kind evenly, because this one has passed a limit. This moves
    /// the same amount of all limits of a counter, so it leaves what is beyond. Returns false if it does
    /// not suffice; the rooms may have changed.
    #[inline(always)]
    fn share_room(&mut self, other: &mut Self) -> bool {
        self.room.iter_mut().zip(&mut other.room).all(|(own, other)| share(own, other))
    }

    /// Returns true if a block was allocated or freed since the last call.
    #[inline]
    fn was_used_since_last_check(&mut self) -> bool {
        let calls = self.allocated[BLOCKS].wrapping_add(self.freed[BLOCKS]);
        std::mem::replace(&mut self.calls_at_last_check, calls) != calls
    }

    /// Takes the room of another account of the kind. Returns true if no limit is passed then.
    #[inline]
    fn take_room(&mut self, other: &mut Self) -> bool {
        self.room = zip(self.room, std::mem::take(&mut other.room), plus);
        any(self.room) >= 0
    }

    /// Takes the spare of another account of the kind that is beyond its room.
    fn take_beyond(&mut self, other: &mut Self) {
        let mut counters = std::mem::take(&mut other.has_beyond);
        while counters != 0 {
            let counter = counters.trailing_zeros() as usize;
            counters &= counters - 1;
            let more = std::mem::take(&mut other.beyond[counter]);
            self.beyond[counter] = zip(self.beyond[counter], more, plus);
            self.settle(counter);
        }
    }

    /// Takes spare of the sum of both kinds from the other account, for each counter with a passed limit.
    /// Returns true if no limit is passed then.
    fn take_of_both(&mut self, other: &mut Self) -> bool {
        self.settle_draining();
        other.settle_draining();
        let mut least = 0;
        for counter in 0..HOT {
            let (room, other_room) = (self.room[counter], other.room[counter]);
            if room >= 0 {
                continue;
            }
            for limit in [LIVE_OF_BOTH, ACTIVE_OF_BOTH] {
                let beyond = &mut self.beyond[counter][limit];
                let other_beyond = &mut other.beyond[counter][limit];
                let (mut spare, mut other_spare) = (room + *beyond, other_room + *other_beyond);
                if !share(&mut spare, &mut other_spare) {
                    spare += std::mem::take(&mut other_spare);
                }
                (*beyond, *other_beyond) = (spare - room, other_spare - other_room);
            }
            self.settle(counter);
            other.settle(counter);
            least |= self.room[counter];
        }
        least >= 0
    }

    /// Takes spare of the sum from the account of the other kind, because one of this counter's limits of the
    /// sum is passed: with `BEYOND`, first what is beyond its room. The other account keeps the limits of its
    /// kind. Returns false if a limit is passed then.
    #[inline(always)]
    fn exchange<const BEYOND: bool>(&mut self, other: &mut Self, counter: usize) -> bool {
        let (own, room) = (self.room[counter], other.room[counter]);
        debug_assert!(own < 0, "a limit of this counter is passed");
        let [live, active, ..] = &mut self.beyond[counter];
        let [other_live, other_active, live_of_both, active_of_both] = &mut other.beyond[counter];
        let beyond = if BEYOND { (*live_of_both).min(*active_of_both) } else { 0 };
        // If this is more than the other account has, even all of that would not suffice.
        let part = ((room + beyond - own) >> 1).min(*live).min(*active);
        if own + part < 0 {
            return false;
        }
        self.room[counter] += part;
        *live -= part;
        *active -= part;
        let of_beyond = if BEYOND { part.min(beyond) } else { 0 };
        *live_of_both -= of_beyond;
        *active_of_both -= of_beyond;
        let of_room = part - of_beyond;
        other.room[counter] -= of_room;
        *other_live += of_room;
        *other_active += of_room;
        other.has_beyond |= 1 << counter;
        true
    }

    /// Counts draining blocks that became free, if not all of their spare is unsettled. This adds spare to
    /// the limits of active blocks.
    #[cold]
    pub(super) fn drained_after_settling(&mut self, blocks: Amount) {
        self.settle_draining();
        self.add_beyond([ACTIVE_OF_KIND, ACTIVE_OF_BOTH], blocks);
    }

    /// Moves the spare of draining blocks to the limits of live blocks.
    #[inline]
    fn settle_draining(&mut self) {
        if any(self.unsettled) != 0 {
            let blocks = std::mem::take(&mut self.unsettled);
            self.add_beyond([LIVE_OF_KIND, LIVE_OF_BOTH], blocks);
        }
    }

    /// Adds spare to these limits of blocks and of their bytes.
    #[inline(never)]
    fn add_beyond(&mut self, limits: [usize; 2], more: Amount) {
        for (counter, more) in [BLOCKS, BYTES].into_iter().zip(more) {
            for limit in limits {
                self.beyond[counter][limit] += more;
            }
            self.settle(counter);
        }
    }

    /// Moves what all limits of a counter have beyond the room to the room.
    #[inline]
    fn settle(&mut self, counter: usize) {
        let beyond = &mut self.beyond[counter];
        let [live, active, live_of_both, active_of_both] = *beyond;
        let least = live.min(active).min(live_of_both.min(active_of_both));
        self.room[counter] += least;
        for beyond in &mut *beyond {
            *beyond -= least;
        }
        let has_beyond = any(*beyond) != 0;
        self.has_beyond &= !(1 << counter);
        self.has_beyond |= u8::from(has_beyond) << counter;
    }
}
