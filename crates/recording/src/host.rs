//! Pinned host memory of a recording: how much is reserved, in use and idle, and by which code.
//!
//! PyTorch rounds each request for pinned memory to a power of two, takes a segment of that size for it, and
//! keeps the segment when the block is freed. PyTorch 2.15 records the rounded sizes only.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::devices::reserved_before_and_peak;
use super::stacks::StackId;
use super::trace::TraceEvent;
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};

/// Pinned host memory of a recording, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The bytes allocated from the system at the end of the recording.
    pub reserved_bytes: u64,
    /// The part of `reserved_bytes` that is in live blocks.
    pub live_bytes: u64,
    /// The peak of the bytes allocated from the system.
    pub peak_reserved_bytes: u64,
    /// The peak of the bytes in live blocks.
    pub peak_live_bytes: u64,
    /// The bytes that rounding added to the blocks that live at the end. `None` if the recording has rounded
    /// sizes only.
    pub rounding_bytes: Option<u64>,
    /// The live blocks at the end by stack, in the order of the stacks.
    pub at_end: Vec<HostHolder>,
    /// The live blocks at the peak of live bytes; empty if the recording has no entries of the host.
    pub at_peak: Vec<HostHolder>,
    /// Set if the live bytes grew throughout the recording.
    pub growth: Option<HostGrowth>,
}

/// Live blocks of one stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostHolder {
    /// The stack; `None` if it was not recorded.
    pub stack: Option<StackId>,
    /// The bytes of the blocks, after rounding.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// The least live bytes in the second quarter of the entries, and in the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostGrowth {
    /// In the second quarter.
    pub from_bytes: u64,
    /// In the last quarter.
    pub to_bytes: u64,
}

/// The memory that [`HostMemory::of`] may use for each entry and each block, in bytes.
pub(super) const HOLDER_BYTES: u64 = 160;
/// With fewer entries than this, growth is not looked for.
const GROWTH_ENTRIES: usize = 16;
/// Growth by a smaller share of the peak than one of so many is not named.
const GROWTH_PART: u64 = 10;

impl HostMemory {
    /// Computes the figures from the final segments and the entries of the host. `stacks` are those of
    /// blocks, by address. Without `has_room`, leaves out all that takes memory. `None` if there are neither
    /// segments nor entries.
    pub(super) fn of(
        segments: &[SegmentLayout],
        events: &[TraceEvent],
        stacks: &HashMap<u64, StackId>,
        has_room: bool,
    ) -> Option<Self> {
        if segments.is_empty() && events.is_empty() {
            return None;
        }
        let reserved = segments.iter().map(|segment| segment.size_bytes);
        let is_live = |block: &&BlockLayout| block.state != BlockStateName::Inactive;
        let live = || segments.iter().flat_map(|s| &s.blocks).filter(is_live);
        let live_bytes = live().fold(0, |sum: u64, block| sum.saturating_add(block.size_bytes));
        let mut host = Self {
            reserved_bytes: reserved.fold(0, u64::saturating_add),
            live_bytes,
            peak_reserved_bytes: reserved_before_and_peak(segments, events).1,
            peak_live_bytes: live_bytes,
            rounding_bytes: rounding(live()),
            ..Self::default()
        };
        if has_room {
            let whole = Walk::over(events, events.len());
            host.at_end = by_stack(live().map(|block| {
                let recorded = whole.live.get(&block.address).and_then(|live| live.stack);
                let stack = recorded.or_else(|| stacks.get(&block.address).copied());
                HostHolder { stack, bytes: block.size_bytes, blocks: 1 }
            }));
            host.add_peak(&whole, events, live(), stacks);
        }
        Some(host)
    }

    /// Adds the peak of live bytes, and the growth.
    fn add_peak<'a>(
        &mut self,
        whole: &Walk,
        events: &[TraceEvent],
        live: impl Iterator<Item = &'a BlockLayout>,
        stacks: &HashMap<u64, StackId>,
    ) {
        if events.is_empty() {
            return;
        }
        let before = live.filter(|block| !whole.live.contains_key(&block.address));
        let before = before.map(|block| HostHolder {
            stack: stacks.get(&block.address).copied(),
            bytes: block.size_bytes,
            blocks: 1,
        });
        let freed_later = whole.freed_before.iter().filter(|(at, _)| *at >= whole.peak_at);
        let freed_later =
            freed_later.map(|(_, bytes)| HostHolder { bytes: *bytes, blocks: 1, stack: None });
        let peak = Walk::over(events, whole.peak_at);
        self.at_peak = by_stack(peak.live.into_values().chain(before).chain(freed_later));
        let sum = |sum: u64, holder: &HostHolder| sum.saturating_add(holder.bytes);
        self.peak_live_bytes = self.at_peak.iter().fold(0, sum).max(self.live_bytes);
        let before = i128::from(self.live_bytes) - whole.now;
        let [_, second, third, last] = whole
            .least
            .map(|least| u64::try_from(before.saturating_add(least).max(0)).unwrap_or(u64::MAX));
        let grown = last.saturating_sub(second);
        let is_growth =
            second < third && third < last && grown >= self.peak_live_bytes / GROWTH_PART;
        if events.len() >= GROWTH_ENTRIES && is_growth {
            self.growth = Some(HostGrowth { from_bytes: second, to_bytes: last });
        }
    }
}

/// Returns the bytes that rounding added to live blocks. `None` if no requested size differs, and some block
/// has a power of two: then its requested size is probably not recorded.
fn rounding<'a>(live: impl Iterator<Item = &'a BlockLayout>) -> Option<u64> {
    let (mut bytes, mut is_rounded) = (0_u64, false);
    for block in live {
        bytes = bytes.saturating_add(block.size_bytes.saturating_sub(block.requested_bytes));
        is_rounded |= block.size_bytes.is_power_of_two();
    }
    (bytes > 0 || !is_rounded).then_some(bytes)
}

/// Adds up blocks of equal stacks.
fn by_stack(blocks: impl Iterator<Item = HostHolder>) -> Vec<HostHolder> {
    let mut all: BTreeMap<Option<StackId>, HostHolder> = BTreeMap::new();
    for block in blocks {
        let sum = all.entry(block.stack).or_default();
        sum.stack = block.stack;
        sum.bytes = sum.bytes.saturating_add(block.bytes);
        sum.blocks += block.blocks;
    }
    all.into_values().collect()
}

/// The live blocks after some of the entries of the host. A block lives until its free is requested.
#[derive(Default)]
struct Walk {
    /// The blocks whose requests are among the entries, by address.
    live: HashMap<u64, HostHolder>,
    /// The frees of blocks that lived before the first entry: the index of the entry, and the bytes.
    freed_before: Vec<(usize, u64)>,
    /// The live bytes, relative to those before the first entry.
    now: i128,
    /// The number of entries at the peak of live bytes.
    peak_at: usize,
    /// The least live bytes in each quarter of the entries.
    least: [i128; 4],
}

impl Walk {
    /// Follows the first `count` entries.
    fn over(events: &[TraceEvent], count: usize) -> Self {
        let mut walk = Self { least: [i128::MAX; 4], ..Self::default() };
        let (mut pending, mut peak) = (HashSet::new(), 0);
        for (at, event) in events[..count].iter().enumerate() {
            let TraceEvent { address, size_bytes, stack, .. } = *event;
            match event.action {
                Action::Alloc => {
                    pending.remove(&address);
                    let block = HostHolder { stack, bytes: size_bytes, blocks: 1 };
                    walk.live.insert(address, block);
                    walk.now += i128::from(size_bytes);
                }
                Action::FreeRequested => {
                    pending.insert(address);
                    walk.free(at, event);
                }
                // A recorder may leave out the request.
                Action::FreeCompleted if !pending.remove(&address) => walk.free(at, event),
                _ => {}
            }
            if walk.now > peak {
                (peak, walk.peak_at) = (walk.now, at + 1);
            }
            let least = &mut walk.least[at * 4 / count];
            *least = walk.now.min(*least);
        }
        walk
    }

    fn free(&mut self, at: usize, event: &TraceEvent) {
        let bytes = match self.live.remove(&event.address) {
            Some(block) => block.bytes,
            None => {
                self.freed_before.push((at, event.size_bytes));
                event.size_bytes
            }
        };
        self.now -= i128::from(bytes);
    }
}
