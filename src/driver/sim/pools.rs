//! Stream-ordered pools of the simulated device, as `cudaMallocAsync` keeps them.
//!
//! A pool takes segments of at least 32 MiB and hands out ranges of them first fit by address. A
//! freed range may be used again on the stream that freed it at once, and on others when the free
//! has been reached there. Idle segments go back when somebody synchronises, down to the release
//! threshold, and when the pool is trimmed. Nothing moves inside a segment.
//!
//! What a captured stream asks for comes from memory of graphs, which is no pool: a range that was
//! freed inside the capture may be used again where the graph puts the new use after the free.

use std::collections::BTreeMap;

use hashbrown::HashSet;

use super::graph::Graphs;
use super::ranges::{AddressSpace, Budget};
use super::work::{Mark, Work};
use super::{Sim, State, invalid, not_supported};
use crate::driver::call::Call;
use crate::driver::keepers::{Keepers, NO_KEEPER};
use crate::driver::{
    CaptureStatus, DriverPoolId, DriverPoolUsage, DriverResult, MemoryPools, NodeId,
};
use crate::ids::{DeviceId, StreamId};
use crate::size::{MIB, MIN_BLOCK_BYTES, align_up};

const SEGMENT_MIN_BYTES: u64 = 32 * MIB;

/// All pools.
#[derive(Debug)]
pub(super) struct Pools {
    space: AddressSpace,
    /// The first is the default pool.
    pools: Vec<Pool>,
    /// Memory of captured graphs.
    graphs: Pool,
    live: BTreeMap<u64, Live>,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    size_bytes: u64,
    home: Home,
}

/// Where a range comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Pool(usize),
    /// Memory of graphs, asked for in this capture.
    Graph(u64),
}

#[derive(Debug, Default)]
struct Pool {
    destroyed: bool,
    threshold_bytes: u64,
    keepers: Keepers,
    usage: DriverPoolUsage,
    /// Start and size.
    segments: BTreeMap<u64, u64>,
    /// Ranges that nobody holds, by address. None reaches over the end of its segment.
    idle: BTreeMap<u64, Idle>,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    size_bytes: u64,
    /// The free that not everybody has seen. `None`: everybody may use the range.
    freed: Option<Freed>,
}

#[derive(Clone, Copy, Debug)]
enum Freed {
    /// In the order of a stream.
    On(StreamId, Mark),
    /// In a capture that has not ended.
    At(NodeId),
}

impl Pool {
    fn reset_high_marks(&mut self) {
        self.usage.used_high_bytes = self.usage.used_bytes;
        self.usage.reserved_high_bytes = self.usage.reserved_bytes;
    }

    /// Opens ranges to everybody whose free has been reached, and joins neighbours.
    fn settle(&mut self, work: &Work, graphs: &Graphs, now_ns: u64) {
        let idle = std::mem::take(&mut self.idle);
        let mut last: Option<(u64, Idle)> = None;
        for (start, mut range) in idle {
            range.freed = range.freed.filter(|freed| match *freed {
                Freed::On(_, mark) => !work.is_finished(mark, now_ns),
                Freed::At(node) => graphs.knows(node),
            });
            if let Some((last_start, last_range)) = &mut last
                && *last_start + last_range.size_bytes == start
                && !self.segments.contains_key(&start)
                && last_range.freed.is_none()
                && range.freed.is_none()
            {
                last_range.size_bytes += range.size_bytes;
                continue;
            }
            self.idle.extend(last.replace((start, range)));
        }
        self.idle.extend(last);
    }

    /// Takes the lowest idle range that fits and that `on`, behind these nodes, may use.
    fn take(&mut self, size_bytes: u64, on: StreamId, behind: &HashSet<NodeId>) -> Option<u64> {
        let found = self.idle.iter().find(|(_, range)| {
            range.size_bytes >= size_bytes
                && range.freed.is_none_or(|freed| match freed {
                    Freed::On(stream, _) => stream == on,
                    Freed::At(node) => behind.contains(&node),
                })
        });
        let (start, range) = found.map(|(start, range)| (*start, *range))?;
        self.idle.remove(&start);
        if range.size_bytes > size_bytes {
            let rest = Idle { size_bytes: range.size_bytes - size_bytes, ..range };
            self.idle.insert(start + size_bytes, rest);
        }
        Some(start)
    }

    fn grow(
        &mut self,
        call: Call,
        size_bytes: u64,
        space: &mut AddressSpace,
        budget: &mut Budget,
    ) -> DriverResult<()> {
        let whole = align_up(size_bytes, 2 * MIB);
        let roomy = whole.max(SEGMENT_MIN_BYTES);
        let segment_bytes = if roomy <= budget.free_bytes() { roomy } else { whole };
        budget.check(call, segment_bytes)?;
        let start = space.take(call, segment_bytes)?;
        budget.take(segment_bytes);
        self.segments.insert(start, segment_bytes);
        let range = Idle { size_bytes: segment_bytes, freed: None };
        self.idle.insert(start, range);
        self.usage.reserved_bytes += segment_bytes;
        let high = &mut self.usage.reserved_high_bytes;
        *high = (*high).max(self.usage.reserved_bytes);
        Ok(())
    }

    /// Gives back idle segments, highest first, while more than `keep_bytes` are held.
    fn release(&mut self, keep_bytes: u64, space: &mut AddressSpace, budget: &mut Budget) {
        let idle: Vec<u64> = self
            .segments
            .iter()
            .filter(|(start, size_bytes)| {
                let range = self.idle.get(*start);
                range.is_some_and(|r| r.size_bytes == **size_bytes && r.freed.is_none())
            })
            .map(|(start, _)| *start)
            .collect();
        for start in idle.into_iter().rev() {
            if self.usage.reserved_bytes <= keep_bytes {
                break;
            }
            let size_bytes = self.segments.remove(&start).expect("just seen");
            self.idle.remove(&start);
            space
                .give(Call::Trim, start, size_bytes)
                .expect("segments of pools are held in the address space");
            budget.give(size_bytes);
            self.usage.reserved_bytes -= size_bytes;
        }
    }
}

impl Pools {
    /// Ranges in callers' hands.
    pub(super) fn ranges(&self) -> u64 {
        self.live.len() as u64
    }

    pub(super) fn new() -> Self {
        let default = Pool::default();
        Self {
            space: AddressSpace::new(0x7000_0000_0000, 0x7f00_0000_0000),
            pools: vec![default],
            graphs: Pool::default(),
            live: BTreeMap::new(),
        }
    }

    /// Whether one allocation holds all of these bytes.
    pub(super) fn holds(&self, address: u64, size_bytes: u64) -> bool {
        let below = self.live.range(..=address).next_back();
        below.is_some_and(|(start, live)| {
            let end = address.checked_add(size_bytes);
            end.is_some_and(|end| end <= start + live.size_bytes)
        })
    }

    /// After somebody waited: every pool goes back to its threshold.
    pub(super) fn synchronized(
        &mut self,
        work: &Work,
        graphs: &Graphs,
        now_ns: u64,
        budget: &mut Budget,
    ) {
        for pool in &mut self.pools {
            if pool.usage.reserved_bytes > pool.threshold_bytes {
                pool.settle(work, graphs, now_ns);
                pool.release(pool.threshold_bytes, &mut self.space, budget);
            }
        }
    }

    /// The memory of a graph that was dropped without having run.
    pub(super) fn graph_is_gone(&mut self, capture: u64) {
        let of_graph = self.live.extract_if(.., |_, live| live.home == Home::Graph(capture));
        for (address, Live { size_bytes, .. }) in of_graph {
            self.graphs.usage.used_bytes -= size_bytes;
            self.graphs.idle.insert(address, Idle { size_bytes, freed: None });
        }
    }

    fn index(&self, call: Call, pool: DriverPoolId) -> DriverResult<usize> {
        let index = usize::try_from(pool.0).ok();
        let found = index.filter(|i| self.pools.get(*i).is_some_and(|pool| !pool.destroyed));
        found.ok_or_else(|| invalid(call, format!("there is no pool {}", pool.0)))
    }

    fn pool(&mut self, call: Call, pool: DriverPoolId) -> DriverResult<&mut Pool> {
        let index = self.index(call, pool)?;
        Ok(&mut self.pools[index])
    }
}

impl State {
    fn allocate_async(
        &mut self,
        pool: DriverPoolId,
        bytes: u64,
        on: StreamId,
    ) -> DriverResult<u64> {
        let call = Call::AllocateAsync;
        let index = self.pools.index(call, pool)?;
        if bytes == 0 {
            return Err(invalid(call, "0 bytes asked"));
        }
        if bytes > self.budget.total_bytes {
            return self.budget.check(call, bytes).map(|()| 0);
        }
        self.work.stream(call, on)?;
        self.graphs.check_takes_work(call, on)?;
        let size_bytes = align_up(bytes, MIN_BLOCK_BYTES);
        let (pools, now_ns) = (&mut self.pools, self.now_ns);
        let (pool, home) = match self.graphs.status(on) {
            CaptureStatus::Active { capture } => (&mut pools.graphs, Home::Graph(capture)),
            _ => (&mut pools.pools[index], Home::Pool(index)),
        };
        let behind = self.graphs.before(on);
        pool.settle(&self.work, &self.graphs, now_ns);
        let address = match pool.take(size_bytes, on, &behind) {
            Some(address) => address,
            None => {
                if self.budget.check(call, align_up(size_bytes, 2 * MIB)).is_err() {
                    pool.release(0, &mut pools.space, &mut self.budget);
                }
                pool.grow(call, size_bytes, &mut pools.space, &mut self.budget)?;
                pool.take(size_bytes, on, &behind).expect("just grown for it")
            }
        };
        pool.usage.used_bytes += size_bytes;
        pool.usage.used_high_bytes = pool.usage.used_high_bytes.max(pool.usage.used_bytes);
        pools.live.insert(address, Live { size_bytes, home });
        self.submit(call, on)?;
        Ok(address)
    }

    fn free_async(&mut self, address: u64, on: StreamId) -> DriverResult<()> {
        let call = Call::FreeAsync;
        let live = self.live_at(call, address)?;
        let stream = self.work.stream(call, on)?;
        self.check_may_free(call, address, live.home, on)?;
        let freed = match self.graphs.add_node(call, on)? {
            Some((_, node)) => Freed::At(node),
            None => Freed::On(on, self.work.mark(stream, self.now_ns)),
        };
        self.take_back(address, live, freed);
        Ok(())
    }

    pub(super) fn free_behind(
        &mut self,
        address: u64,
        on: StreamId,
        nodes: &[NodeId],
    ) -> DriverResult<NodeId> {
        let call = Call::FreeBehind;
        let live = self.live_at(call, address)?;
        let capture = self.graphs.check_nodes(call, on, nodes)?;
        self.check_may_free(call, address, live.home, on)?;
        let node = self.graphs.add_leaf(capture, nodes);
        self.take_back(address, live, Freed::At(node));
        Ok(node)
    }

    fn live_at(&self, call: Call, address: u64) -> DriverResult<Live> {
        let live = self.pools.live.get(&address).copied();
        live.ok_or_else(|| invalid(call, format!("nothing starts at {address:#x}")))
    }

    fn take_back(&mut self, address: u64, live: Live, freed: Freed) {
        self.pools.live.remove(&address);
        let pool = match live.home {
            Home::Pool(index) => &mut self.pools.pools[index],
            Home::Graph(_) => &mut self.pools.graphs,
        };
        pool.usage.used_bytes -= live.size_bytes;
        pool.idle.insert(address, Idle { size_bytes: live.size_bytes, freed: Some(freed) });
        if let Home::Pool(index) = live.home {
            self.release_destroyed(index);
        }
    }

    /// A captured stream frees what its own capture asked for; other streams free everything else,
    /// and what a capture asked for once it has ended.
    fn check_may_free(
        &self,
        call: Call,
        address: u64,
        home: Home,
        on: StreamId,
    ) -> DriverResult<()> {
        match (self.graphs.status(on), home) {
            (CaptureStatus::None, Home::Pool(_)) => Ok(()),
            (CaptureStatus::None, Home::Graph(capture)) if !self.graphs.is_open(capture) => Ok(()),
            (CaptureStatus::Active { capture }, Home::Graph(own)) if own == capture => Ok(()),
            _ => {
                let message = format!("{address:#x} and stream {on} are not in the same capture");
                Err(invalid(call, message))
            }
        }
    }

    /// Gives back the memory of a destroyed pool as far as its frees have been reached; what is
    /// left goes when somebody synchronises.
    fn release_destroyed(&mut self, index: usize) {
        let pool = &mut self.pools.pools[index];
        if pool.destroyed && pool.usage.used_bytes == 0 {
            pool.settle(&self.work, &self.graphs, self.now_ns);
            pool.release(0, &mut self.pools.space, &mut self.budget);
        }
    }
}

impl MemoryPools for Sim {
    fn default_pool(&self) -> DriverResult<DriverPoolId> {
        drop(self.enter_other(Call::DefaultPool));
        Ok(DriverPoolId(0))
    }

    fn create_pool(&self) -> DriverResult<DriverPoolId> {
        let pools = &mut self.enter_other(Call::CreatePool).pools.pools;
        pools.push(Pool::default());
        Ok(DriverPoolId(pools.len() as u64 - 1))
    }

    fn destroy_pool(&self, pool: DriverPoolId) -> DriverResult<()> {
        let call = Call::DestroyPool;
        let state = &mut *self.enter_other(call);
        if pool.0 == 0 {
            return Err(invalid(call, "the default pool cannot be destroyed"));
        }
        let index = state.pools.index(call, pool)?;
        let pool = &mut state.pools.pools[index];
        pool.destroyed = true;
        pool.threshold_bytes = 0;
        state.release_destroyed(index);
        Ok(())
    }

    fn set_release_threshold(&self, pool: DriverPoolId, bytes: u64) -> DriverResult<()> {
        let call = Call::SetReleaseThreshold;
        let state = &mut *self.enter_other(call);
        state.pools.pool(call, pool)?.threshold_bytes = bytes;
        Ok(())
    }

    fn release_threshold(&self, pool: DriverPoolId) -> DriverResult<u64> {
        let call = Call::ReleaseThreshold;
        Ok(self.enter_other(call).pools.pool(call, pool)?.threshold_bytes)
    }

    fn keep_memory(&self, pool: DriverPoolId, keep: bool) -> DriverResult<()> {
        let call = Call::KeepMemory;
        let state = &mut *self.enter_other(call);
        let pool = state.pools.pool(call, pool)?;
        let changed = pool.keepers.after(keep, pool.threshold_bytes);
        let (keepers, set) = changed.ok_or_else(|| invalid(call, NO_KEEPER.to_owned()))?;
        pool.keepers = keepers;
        pool.threshold_bytes = set.unwrap_or(pool.threshold_bytes);
        Ok(())
    }

    fn allow_reuse(&self, pool: DriverPoolId) -> DriverResult<()> {
        // Nothing else is done here.
        let call = Call::AllowReuse;
        self.enter_other(call).pools.pool(call, pool).map(drop)
    }

    fn open_pool(&self, pool: DriverPoolId, other: DeviceId) -> DriverResult<()> {
        let call = Call::OpenPool;
        let state = &mut *self.enter_other(call);
        state.pools.pool(call, pool)?;
        if self.reaches(other) {
            return Ok(());
        }
        Err(not_supported(call, format!("device {other} cannot reach this one")))
    }

    fn allocate_async(&self, pool: DriverPoolId, bytes: u64, on: StreamId) -> DriverResult<u64> {
        let mut state = self.enter_other(Call::AllocateAsync);
        state.allocate_async(pool, bytes, on)
    }

    fn free_async(&self, address: u64, on: StreamId) -> DriverResult<()> {
        self.enter_other(Call::FreeAsync).free_async(address, on)
    }

    fn trim(&self, pool: DriverPoolId, keep_bytes: u64) -> DriverResult<()> {
        let call = Call::Trim;
        let state = &mut *self.enter_other(call);
        let index = state.pools.index(call, pool)?;
        let pool = &mut state.pools.pools[index];
        pool.settle(&state.work, &state.graphs, state.now_ns);
        pool.release(keep_bytes, &mut state.pools.space, &mut state.budget);
        Ok(())
    }

    fn usage(&self, pool: DriverPoolId) -> DriverResult<DriverPoolUsage> {
        let call = Call::Usage;
        Ok(self.enter_other(call).pools.pool(call, pool)?.usage)
    }

    fn reset_high_marks(&self, pool: DriverPoolId) -> DriverResult<()> {
        let call = Call::ResetHighMarks;
        let state = &mut *self.enter_other(call);
        state.pools.pool(call, pool)?.reset_high_marks();
        Ok(())
    }

    fn graph_usage(&self) -> DriverResult<DriverPoolUsage> {
        Ok(self.enter_other(Call::GraphUsage).pools.graphs.usage)
    }

    fn reset_graph_high_marks(&self) -> DriverResult<()> {
        self.enter_other(Call::ResetGraphHighMarks).pools.graphs.reset_high_marks();
        Ok(())
    }

    fn trim_graphs(&self) -> DriverResult<()> {
        let state = &mut *self.enter_other(Call::TrimGraphs);
        let graphs = &mut state.pools.graphs;
        graphs.settle(&state.work, &state.graphs, state.now_ns);
        graphs.release(0, &mut state.pools.space, &mut state.budget);
        Ok(())
    }
}
