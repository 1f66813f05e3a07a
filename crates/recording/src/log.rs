//! A log of requests: its operations, without the events that they stand for.
//!
//! A row of a log becomes one operation, which is much smaller than events. Addresses only connect a free
//! with its request, so those of requests are not stored.

use std::sync::Arc;

use hashbrown::HashMap;

use super::ops::{Op, Ops};
use super::start::LiveBlock;
use super::trace::TraceEvent;
use super::workload::Workload;
use stratalloc::history::Action;
use stratalloc::ids::{PoolId, StreamId};

/// The requests and frees of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Log {
    workload: Arc<Workload>,
    /// The blocks from before the log, in address order.
    before: Vec<BlockBefore>,
    /// Frees of addresses without a block, in order.
    ignored: Vec<IgnoredFree>,
}

/// A block that the log frees and does not allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct BlockBefore {
    address: u64,
    bytes: u64,
    stream: StreamId,
}

/// A free of an address without a block. It is no operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct IgnoredFree {
    /// The number of operations before it.
    at: u32,
    bytes: u64,
}

impl Log {
    /// Returns the operations.
    pub(crate) fn workload(&self) -> &Arc<Workload> {
        &self.workload
    }

    /// Returns the blocks that lived before the log began, in address order.
    pub(crate) fn blocks_before(&self) -> impl Iterator<Item = LiveBlock> + '_ {
        let Self { before, .. } = self;
        before.iter().map(|block| LiveBlock::freed(block.address, block.bytes, block.stream))
    }

    /// Returns the number of events that the rows stand for.
    pub(crate) fn event_count(&self) -> u64 {
        let ops = self.own_ops().map(|op| if op.is_request() { 1 } else { 2 });
        ops.sum::<u64>() + 2 * self.ignored.len() as u64
    }

    /// Returns the requests in order, as events without addresses.
    pub(crate) fn requests(&self) -> impl Iterator<Item = TraceEvent> + '_ {
        self.own_ops().filter_map(|op| request(&op))
    }

    /// Returns the events that the rows stand for, without addresses. A row of a free stands for two.
    pub(crate) fn events(&self) -> impl Iterator<Item = TraceEvent> + '_ {
        let Workload { ops, seeded, .. } = &*self.workload;
        let mut live: HashMap<u32, (u64, StreamId)> =
            (0..).zip(&self.before).map(|(id, block)| (id, (block.bytes, block.stream))).collect();
        let mut ignored = self.ignored.iter().peekable();
        // After the last operation, frees may follow that are none.
        (*seeded as usize..=ops.len()).flat_map(move |at| {
            let mut events = Vec::new();
            while let Some(free) = ignored.next_if(|free| free.at as usize <= at) {
                events.extend(free_events(free.bytes, StreamId::DEFAULT));
            }
            match ops.get(at) {
                Some(Op::Free { id }) => {
                    let (bytes, stream) = live.remove(&id).unwrap_or_default();
                    events.extend(free_events(bytes, stream));
                }
                Some(op) => {
                    if let Op::Allocate { id, bytes, stream, .. } = op {
                        live.insert(id, (bytes, stream));
                    }
                    events.extend(request(&op));
                }
                None => {}
            }
            events
        })
    }

    /// Returns the operations of the log itself.
    fn own_ops(&self) -> impl Iterator<Item = Op> + '_ {
        let Workload { ops, seeded, .. } = &*self.workload;
        ops.range(*seeded as usize..ops.len())
    }
}

fn request(op: &Op) -> Option<TraceEvent> {
    match *op {
        Op::Allocate { bytes, stream, .. } => {
            Some(TraceEvent::new(Action::Alloc, 0, bytes, stream))
        }
        Op::AllocateFailing { bytes, stream, .. } => {
            Some(TraceEvent::new(Action::OutOfMemory, 0, bytes, stream))
        }
        _ => None,
    }
}

fn free_events(bytes: u64, stream: StreamId) -> [TraceEvent; 2] {
    [Action::FreeRequested, Action::FreeCompleted]
        .map(|action| TraceEvent::new(action, 0, bytes, stream))
}

/// The newest block at an address.
#[derive(Clone, Copy)]
enum Newest {
    /// Live. The number of its request.
    Live(u32),
    /// Allocated and freed.
    Freed,
    /// Freed and never allocated. The index in `before`.
    Before(u32),
}

/// Builds a log from its rows.
#[derive(Default)]
pub(crate) struct LogBuilder {
    ops: Ops,
    /// The number of requests, which is that of the next block.
    requests: u32,
    newest: HashMap<u64, Newest>,
    before: Vec<BlockBefore>,
    ignored: Vec<IgnoredFree>,
}

impl LogBuilder {
    /// Adds a request that succeeded. Returns false if a block is live at the address.
    pub(crate) fn allocate(&mut self, address: u64, bytes: u64, stream: StreamId) -> bool {
        let id = self.requests;
        if let Some(Newest::Live(_)) = self.newest.insert(address, Newest::Live(id)) {
            return false;
        }
        self.requests += 1;
        self.ops.push(Op::Allocate { id, bytes, stream, pool: PoolId::DEFAULT });
        true
    }

    /// Adds a request that failed.
    pub(crate) fn fail(&mut self, bytes: u64, stream: StreamId) {
        self.ops.push(Op::AllocateFailing { id: self.requests, bytes, stream });
        self.requests += 1;
    }

    /// Adds a free.
    pub(crate) fn free(&mut self, address: u64, bytes: u64, stream: StreamId) {
        match self.newest.get_mut(&address) {
            Some(newest @ Newest::Live(_)) => {
                if let Newest::Live(id) = std::mem::replace(newest, Newest::Freed) {
                    self.ops.push(Op::Free { id });
                }
            }
            None => {
                let number = u32::try_from(self.before.len()).unwrap_or(u32::MAX);
                self.newest.insert(address, Newest::Before(number));
                self.before.push(BlockBefore { address, bytes: bytes.max(1), stream });
                self.ops.push(Op::Free { id: u32::MAX - number });
            }
            Some(newest) => {
                // Of several frees without a request between them, the last describes the block.
                if let Newest::Before(number) = *newest {
                    self.before[number as usize] =
                        BlockBefore { address, bytes: bytes.max(1), stream };
                }
                let at = u32::try_from(self.ops.len()).unwrap_or(u32::MAX);
                self.ignored.push(IgnoredFree { at, bytes });
            }
        }
    }

    /// Returns the log. Blocks from before it get the lowest numbers, in address order, and are allocated
    /// first.
    pub(crate) fn build(self) -> Log {
        let Self { mut ops, requests, newest, mut before, mut ignored } = self;
        drop(newest);
        let seeded = u32::try_from(before.len()).unwrap_or(u32::MAX);
        if seeded > 0 {
            let mut order: Vec<u32> = (0..seeded).collect();
            order.sort_unstable_by_key(|number| before[*number as usize].address);
            let mut ids = vec![0; before.len()];
            (0..).zip(&order).for_each(|(id, number)| ids[*number as usize] = id);
            drop(order);
            before.sort_unstable_by_key(|block| block.address);
            let seeds = (0..).zip(&before).map(|(id, block)| {
                let BlockBefore { bytes, stream, .. } = *block;
                Op::Allocate { id, bytes, stream, pool: PoolId::DEFAULT }
            });
            let renumbered = ops.iter().map(|op| match op {
                Op::Free { id } if id >= requests => Op::Free { id: ids[(u32::MAX - id) as usize] },
                Op::Free { id } => Op::Free { id: id + seeded },
                Op::Allocate { id, bytes, stream, pool } => {
                    Op::Allocate { id: id + seeded, bytes, stream, pool }
                }
                Op::AllocateFailing { id, bytes, stream } => {
                    Op::AllocateFailing { id: id + seeded, bytes, stream }
                }
                other => other,
            });
            let all: Ops = seeds.chain(renumbered).collect();
            ops = all;
            ignored.iter_mut().for_each(|free| free.at = free.at.saturating_add(seeded));
        }
        let workload = Workload { ops, blocks: requests + seeded, seeded, ..Workload::default() };
        Log { workload: Arc::new(workload), before, ignored }
    }
}
