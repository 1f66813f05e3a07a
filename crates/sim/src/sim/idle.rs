//! Idle ranges of a driver pool: which streams may use them, and the smallest that fits.
//!
//! It only does bookkeeping, like `ranges`. Neighbours that any stream may use, or that one stream freed, are
//! coalesced.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::{HashMap, HashSet};

use super::work::Mark;
use stratalloc::driver::NodeId;
use stratalloc::ids::StreamId;

#[derive(Clone, Copy, Debug)]
pub(super) struct Idle {
    pub(super) size_bytes: u64,
    /// The free that made this range idle, until it has been reached. `None`: any stream may use the range.
    pub(super) freed: Option<Freed>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Freed {
    /// A free on a stream, and its mark.
    On(StreamId, Mark),
    /// A free in a capture, and its node.
    At(NodeId),
}

impl Freed {
    /// Returns the free of two adjacent ranges together, if they may be coalesced. Otherwise returns `None`.
    fn joined(one: Option<Self>, other: Option<Self>) -> Option<Option<Self>> {
        match (one, other) {
            (None, None) => Some(None),
            (Some(Self::On(stream, mark)), Some(Self::On(same, other))) if stream == same => {
                Some(Some(Self::On(stream, mark.later(other))))
            }
            _ => None,
        }
    }
}

/// Size and address.
type Sizes = BTreeSet<(u64, u64)>;

/// Ranges that are not allocated.
#[derive(Debug, Default)]
pub(super) struct IdleRanges {
    by_address: BTreeMap<u64, Idle>,
    /// Size and address of ranges that any stream may use.
    open: Sizes,
    /// Size and address of ranges that only one stream may use.
    own: HashMap<StreamId, Sizes>,
    /// Addresses of ranges that were freed in a capture.
    captured: HashSet<u64>,
}

impl IdleRanges {
    /// Adds a range and coalesces it with its neighbours in the same segment.
    pub(super) fn insert(&mut self, start: u64, range: Idle, segments: &BTreeMap<u64, u64>) {
        let (mut start, mut range) = (start, range);
        let below = self.by_address.range(..start).next_back().map(|(at, below)| (*at, *below));
        if let Some((at, below)) = below
            && at + below.size_bytes == start
            && !segments.contains_key(&start)
            && let Some(freed) = Freed::joined(below.freed, range.freed)
        {
            self.remove(at);
            (start, range) = (at, Idle { size_bytes: below.size_bytes + range.size_bytes, freed });
        }
        let end = start + range.size_bytes;
        if let Some(above) = self.by_address.get(&end).copied()
            && !segments.contains_key(&end)
            && let Some(freed) = Freed::joined(range.freed, above.freed)
        {
            self.remove(end);
            range = Idle { size_bytes: range.size_bytes + above.size_bytes, freed };
        }
        match range.freed {
            None => self.open.insert((range.size_bytes, start)),
            Some(Freed::On(stream, _)) => {
                self.own.entry(stream).or_default().insert((range.size_bytes, start))
            }
            Some(Freed::At(_)) => self.captured.insert(start),
        };
        self.by_address.insert(start, range);
    }

    pub(super) fn remove(&mut self, start: u64) -> Option<Idle> {
        let range = self.by_address.remove(&start)?;
        match range.freed {
            None => _ = self.open.remove(&(range.size_bytes, start)),
            Some(Freed::At(_)) => _ = self.captured.remove(&start),
            Some(Freed::On(stream, _)) => {
                if let Some(own) = self.own.get_mut(&stream) {
                    own.remove(&(range.size_bytes, start));
                }
            }
        }
        Some(range)
    }

    /// Returns the idle range that contains an address, if any, or else the nearest one below it.
    pub(super) fn around(&self, address: u64) -> Option<(u64, Idle)> {
        self.by_address.range(..=address).next_back().map(|(start, range)| (*start, *range))
    }

    /// Returns the addresses of the ranges that not every stream may use yet and whose free `reached`
    /// accepts.
    pub(super) fn reached(&self, reached: impl Fn(Freed) -> bool) -> Vec<u64> {
        let own = self.own.values().flatten().map(|(_, start)| start);
        let all = own.chain(&self.captured).copied();
        all.filter(|start| self.by_address[start].freed.is_some_and(&reached)).collect()
    }

    /// Returns the smallest range that fits and that `on` may use, and of equal sizes the lowest. A range
    /// that was freed in a capture may be used if its free is one of the nodes `behind`.
    pub(super) fn best(
        &self,
        size_bytes: u64,
        on: StreamId,
        behind: &HashSet<NodeId>,
    ) -> Option<u64> {
        let first = |sizes: &Sizes| sizes.range((size_bytes, 0)..).next().copied();
        let captured = self.captured.iter().filter_map(|start| {
            let range = self.by_address[start];
            let Some(Freed::At(node)) = range.freed else { return None };
            let fits = behind.contains(&node) && range.size_bytes >= size_bytes;
            fits.then_some((range.size_bytes, *start))
        });
        let own = self.own.get(&on).and_then(first);
        captured.chain(own).chain(first(&self.open)).min().map(|(_, start)| start)
    }

    /// Returns size and address of the ranges that any stream may use, and then of those that only `on`
    /// may use. Both lists begin with the largest range.
    pub(super) fn usable(&self, on: Option<StreamId>) -> impl Iterator<Item = (u64, u64)> {
        let own = on.and_then(|on| self.own.get(&on)).into_iter().flatten().rev();
        self.open.iter().rev().chain(own).copied()
    }
}
