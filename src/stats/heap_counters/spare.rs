//! The spare of a heap, which the ledger moves between heaps.

use super::{
    Account, BLOCKS, CounterValues, HOT, HeapCounters, Hot, LIMITS, LIVE_OF_BOTH, LIVE_OF_KIND,
    any, blocks_of, plus, with_active, zip,
};
use crate::size::PoolKind;

/// The result of taking spare from another heap.
pub(in crate::stats) struct Taken {
    /// Whether the taker passes no limit now.
    pub(in crate::stats) is_enough: bool,
    /// Whether the other heap has spare left. If not, it is no longer marked as listed.
    pub(in crate::stats) is_left: bool,
}

impl HeapCounters {
    /// Marks this heap as listed. Returns true if it was not listed before.
    #[inline]
    pub(in crate::stats) fn enter_list(&mut self) -> bool {
        !std::mem::replace(&mut self.listed, true)
    }

    /// Returns true if the account of `kind` has passed no limit.
    #[inline]
    pub(in crate::stats) fn is_covered(&self, kind: PoolKind) -> bool {
        any(self.accounts[kind.index()].room) >= 0
    }

    /// Takes spare from `other`, because the account of `kind` has passed a limit. If `other` was used since
    /// its last check and half of its spare suffices, both then have the same. Otherwise takes all of it.
    #[inline]
    pub(in crate::stats) fn take_spare(&mut self, kind: PoolKind, other: &mut Self) -> Taken {
        let (own, there) = (self.account(kind), other.account(kind));
        let is_enough = match there.was_used_since_last_check() {
            true => own.share_room(there) || self.share_spare(kind, other),
            false => own.take_room(there),
        };
        let is_enough = is_enough || self.take_all(kind, other);
        other.listed = other.has_spare();
        Taken { is_enough, is_left: other.listed }
    }

    /// Takes all spare of `other`. Returns true if that suffices.
    #[inline(never)]
    fn take_all(&mut self, kind: PoolKind, other: &mut Self) -> bool {
        for (own, there) in self.accounts.iter_mut().zip(&mut other.accounts) {
            own.take_room(there);
            own.take_beyond(there);
        }
        self.take_from_other_kind(kind)
    }

    /// Takes a part of the spare of each limit of `other` that can help. Returns true if it suffices.
    #[inline(never)]
    fn share_spare(&mut self, kind: PoolKind, other: &mut Self) -> bool {
        let [there, their_other] = other.own_first(kind);
        let [own, _] = self.own_first(kind);
        own.take::<LIVE_OF_KIND>(there)
            || own.take::<LIVE_OF_BOTH>(their_other)
            || self.take_from_other_kind(kind)
    }

    /// Returns true if the account of `kind` has passed limits of the sum only, and the room of this heap's
    /// other account suffices for them. Then both have the same room, or less if a limit of the kind is
    /// near.
    #[inline]
    pub(in crate::stats) fn covers_itself(&mut self, kind: PoolKind) -> bool {
        if !self.listed {
            return false;
        }
        let [own, other] = self.own_first(kind);
        (0..HOT).all(|counter| own.exchange(other, counter))
    }

    /// Takes spare of the sum of both kinds from this heap's other account. Returns true if the account of
    /// `kind` has passed no limit then.
    pub(in crate::stats) fn take_from_other_kind(&mut self, kind: PoolKind) -> bool {
        let [own, other] = self.own_first(kind);
        own.take::<LIVE_OF_BOTH>(other)
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
            account.beyond = Default::default();
            account.has_beyond = 0;
        }
        self.listed = false;
    }

    /// Returns the limits of an account: of its kind, and of the sum.
    #[cfg(test)]
    pub(in crate::stats) fn limits(&self, kind: PoolKind) -> [CounterValues; 2] {
        let account = &self.accounts[kind.index()];
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

    /// Returns true if any limit exceeds its current value.
    #[inline]
    fn has_spare(&self) -> bool {
        let [small, large] = &self.accounts;
        let beyond = i64::from(small.has_beyond | large.has_beyond);
        any(zip(small.room, large.room, |a, b| a | b)) | beyond != 0
    }

    #[inline]
    fn account(&mut self, kind: PoolKind) -> &mut Account {
        &mut self.accounts[kind.index()]
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
    /// Divides the room of two accounts of one kind evenly, because this one has passed a limit. This moves
    /// the same amount of all limits of a counter, so it leaves what is beyond. Returns false if it does
    /// not suffice; the rooms may have changed.
    #[inline]
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
        for counter in 0..HOT {
            if other.has_beyond & (1 << counter) != 0 {
                let more = std::mem::take(&mut other.beyond[counter]);
                self.beyond[counter] = zip(self.beyond[counter], more, plus);
                self.settle(counter);
            }
        }
        other.has_beyond = 0;
    }

    /// Takes spare from the other account, for each counter with a passed limit: of the limits from `FIRST`
    /// on. Returns true if no limit is passed then.
    fn take<const FIRST: usize>(&mut self, other: &mut Self) -> bool {
        let mut least = 0;
        for counter in 0..HOT {
            let (room, other_room) = (self.room[counter], other.room[counter]);
            if room >= 0 {
                continue;
            }
            for limit in FIRST..LIMITS {
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

    /// Takes room of the account of the other kind, if one of this counter's limits of the sum is passed.
    /// Only the limits of the sum change: the other account keeps those of its kind beyond its room.
    /// Returns false if a limit is passed then.
    #[inline]
    fn exchange(&mut self, other: &mut Self, counter: usize) -> bool {
        let (own, room) = (self.room[counter], other.room[counter]);
        if own >= 0 {
            return true;
        }
        let [live, active, ..] = &mut self.beyond[counter];
        let part = ((room - own) / 2).min(*live).min(*active);
        if part > room || own + part < 0 {
            return false;
        }
        self.room[counter] += part;
        *live -= part;
        *active -= part;
        let [live, active, ..] = &mut other.beyond[counter];
        other.room[counter] -= part;
        *live += part;
        *active += part;
        other.has_beyond |= 1 << counter;
        true
    }

    /// Moves what all limits of a counter have beyond the room to the room.
    #[inline]
    pub(super) fn settle(&mut self, counter: usize) {
        let beyond = &mut self.beyond[counter];
        let [live, active, live_of_both, active_of_both] = *beyond;
        let least = live.min(active).min(live_of_both.min(active_of_both));
        self.room[counter] += least;
        *beyond = beyond.map(|beyond| beyond - least);
        let has_beyond = any(*beyond) != 0;
        self.has_beyond &= !(1 << counter);
        self.has_beyond |= u8::from(has_beyond) << counter;
    }
}
