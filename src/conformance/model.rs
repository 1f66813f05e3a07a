//! What must be true of an allocator, as plain data: which blocks live, and who still uses which
//! memory that was freed. It calls neither the allocator nor the driver.

use std::collections::BTreeSet;

use crate::allocator::{Allocation, Token};
use crate::ids::{EventId, OwnerId, StreamId};

/// A block in the test's hands.
#[derive(Debug)]
pub(super) struct Live {
    /// Its name in the lines that are printed: the how-many-th block it was.
    pub(super) name: usize,
    /// The block.
    pub(super) allocation: Allocation,
    /// What was asked for.
    pub(super) bytes: u64,
    /// Its own stream.
    pub(super) stream: StreamId,
    /// Other streams that use it.
    pub(super) others: BTreeSet<StreamId>,
    /// What was written into it; `None` once others' work has spoilt it.
    pub(super) seed: Option<u64>,
}

impl Live {
    /// Its first byte.
    #[must_use]
    pub(super) fn start(&self) -> u64 {
        self.allocation.address()
    }

    /// The byte after the last one that was asked for.
    #[must_use]
    pub(super) fn end(&self) -> u64 {
        self.start().saturating_add(self.bytes)
    }
}

/// A block that was freed: what its handle was, and which work uses its memory.
#[derive(Clone, Debug)]
pub(super) struct Freed {
    /// Its name in the lines that are printed.
    pub(super) name: usize,
    /// Where it began.
    pub(super) start: u64,
    /// How many bytes were asked for.
    pub(super) bytes: u64,
    /// Its handle's parts.
    pub(super) owner: OwnerId,
    /// Its handle's parts.
    pub(super) token: Token,
    /// How many bytes its handle spoke of.
    pub(super) handle_bytes: u64,
    /// Streams whose work used it, each with an event behind that work. The block's own is first.
    pub(super) uses: Vec<(StreamId, EventId)>,
    /// Whether all that work counts as finished, because memory went back to the driver since.
    pub(super) excused: bool,
}

impl Freed {
    /// Its handle again, as a program would have it that keeps a copy.
    pub(super) fn twin(&self) -> Allocation {
        Allocation::new(self.start, self.handle_bytes, self.owner, self.token)
    }

    /// Whether it has a byte of a range.
    #[must_use]
    pub(super) fn touches(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.start.saturating_add(self.bytes)
    }
}

/// Everything that was handed out and given back.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// Blocks in the test's hands.
    pub(super) live: Vec<Live>,
    /// Blocks whose memory may still be used by work.
    pub(super) freed: Vec<Freed>,
    /// Handles of blocks that are gone, the latest last.
    pub(super) stale: Vec<Freed>,
    /// How many blocks were handed out.
    pub(super) handed_out: usize,
    /// The most blocks that were live at once since peaks were reset.
    pub(super) most_live: usize,
}

/// So many stale handles are kept.
const STALE_MAX: usize = 16;

impl Model {
    /// Bytes that were asked for and are live.
    #[must_use]
    pub(super) fn requested_bytes(&self) -> u64 {
        self.live.iter().map(|live| live.bytes).sum()
    }

    /// Notes that a block was handed out.
    pub(super) fn hand_out(&mut self, live: Live) {
        self.handed_out += 1;
        self.live.push(live);
        self.most_live = self.most_live.max(self.live.len());
    }

    /// Notes that a block was freed.
    pub(super) fn retire(&mut self, freed: Freed) {
        if self.stale.len() == STALE_MAX {
            self.stale.remove(0);
        }
        self.stale.push(Freed { uses: Vec::new(), ..freed.clone() });
        self.freed.push(freed);
    }
}
