//! The state that an allocator should have, as plain data: live blocks, and freed memory that work still
//! uses. Calls neither the allocator nor the driver.

use std::collections::BTreeSet;

use stratalloc::allocator::Allocation;
use stratalloc::ids::{EventId, StreamId};

/// A live block of the test.
#[derive(Debug)]
pub(super) struct Live {
    /// The block's name in printed lines: a running number.
    pub(super) name: usize,
    /// The block.
    pub(super) allocation: Allocation,
    /// The requested bytes.
    pub(super) bytes: u64,
    /// The block's own stream.
    pub(super) stream: StreamId,
    /// Other streams that were recorded on the block.
    pub(super) others: BTreeSet<StreamId>,
    /// The seed of the pattern in the block; `None` if none was written or other work may overwrite it.
    pub(super) seed: Option<u64>,
}

impl Live {
    /// Returns the address of the block's first byte.
    #[must_use]
    pub(super) fn start(&self) -> u64 {
        self.allocation.address()
    }

    /// Returns the address after the last requested byte.
    #[must_use]
    pub(super) fn end(&self) -> u64 {
        self.start().saturating_add(self.bytes)
    }
}

/// A freed block, and the work that uses its memory.
#[derive(Debug)]
pub(super) struct Freed {
    /// The block's name in printed lines.
    pub(super) name: usize,
    /// The block's address.
    pub(super) start: u64,
    /// The requested bytes.
    pub(super) bytes: u64,
    /// Streams whose work used the block, each with an event recorded after that work. The block's own
    /// stream is first.
    pub(super) uses: Vec<(StreamId, EventId)>,
    /// True if all that work counts as finished: the allocator has freed memory to the driver since, and
    /// a real device would have waited for all work then.
    pub(super) excused: bool,
}

impl Freed {
    /// Returns true if the block overlaps a range.
    #[must_use]
    pub(super) fn touches(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.start.saturating_add(self.bytes)
    }
}

/// The record of all allocations and frees.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// Live blocks of the test.
    pub(super) live: Vec<Live>,
    /// Freed blocks whose memory may still be used by work.
    pub(super) freed: Vec<Freed>,
    /// Recently freed blocks, the latest last: the number of each in printed lines, and its handle. The test
    /// frees these handles a second time, which the allocator must refuse.
    pub(super) stale: Vec<(usize, Allocation)>,
    /// The number of allocations so far.
    pub(super) handed_out: usize,
    /// The maximum number of blocks live at once since the last reset of the peaks.
    pub(super) most_live: usize,
}

/// The maximum number of stale handles kept.
const STALE_MAX: usize = 16;

impl Model {
    /// Returns the requested bytes of all live blocks.
    #[must_use]
    pub(super) fn requested_bytes(&self) -> u64 {
        self.live.iter().map(|live| live.bytes).sum()
    }

    /// Records an allocation.
    pub(super) fn hand_out(&mut self, live: Live) {
        self.handed_out += 1;
        self.live.push(live);
        self.most_live = self.most_live.max(self.live.len());
    }

    /// Records a free. `stale` is a handle of the freed block.
    pub(super) fn retire(&mut self, freed: Freed, stale: Allocation) {
        if self.stale.len() == STALE_MAX {
            drop(self.stale.remove(0));
        }
        self.stale.push((freed.name, stale));
        self.freed.push(freed);
    }
}

/// Returns a second handle of a block, as if a program had kept a copy.
pub(super) fn twin(of: &Allocation) -> Allocation {
    Allocation::new(of.address(), of.size_bytes(), of.owner(), of.token())
}
