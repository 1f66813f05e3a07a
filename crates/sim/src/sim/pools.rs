//! Stream-ordered pools of the simulated device, modelled on `cudaMallocAsync`.
//!
//! A pool takes memory from the device in steps of 32 MiB and allocates the smallest idle range that fits.
//! The stream that freed a range may reuse it at once. Other streams may reuse it once the free has been
//! reached. If no idle range is large enough, the pool first moves idle pages together at new addresses, and
//! takes only the rest from the device. When a call synchronises, a pool releases idle memory above its
//! release threshold. A trim releases idle memory above a given size. `tests/malloc_async.rs` compares this
//! model with recordings of a real driver.
//!
//! Allocations on a captured stream come from memory of graphs, which all captures share. A range that was
//! freed inside the capture may be reused where the graph orders the new use after the free.

use std::collections::BTreeMap;
use std::sync::Arc;

use hashbrown::HashSet;

use super::backing::Backing;
use super::graph::Graphs;
use super::idle::{Freed, Idle, IdleRanges};
use super::pool_books::PoolBooks;
use super::ranges::{AddressSpace, Budget};
use super::work::Work;
use super::{AddressOrder, Done, Kind, SimulatedDevice, State, ensure, invalid, not_supported};
use stratalloc::driver::call::{calls, forward};
use stratalloc::driver::{CaptureStatus, DriverPoolId, DriverPoolUsage, MemoryPools, NodeId};
use stratalloc::ids::{DeviceId, StreamId};
use stratalloc::size::{MIB, MIN_BLOCK_BYTES, align_up};

/// Memory is taken from the device in multiples of this, unless too little is left.
const STEP_BYTES: u64 = 32 * MIB;
/// Unit in which idle memory moves to other addresses or is released.
const PAGE_BYTES: u64 = 2 * MIB;

#[derive(Debug)]
pub(super) struct Pools {
    space: AddressSpace,
    /// The first is the default pool.
    pools: Vec<Pool>,
    /// Memory for allocations on captured streams.
    graphs: Pool,
    /// Allocations by address.
    pub(super) live: BTreeMap<u64, Live>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    size_bytes: u64,
    origin: Origin,
}

/// Where the memory of an allocation comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Pool(usize),
    /// The memory of graphs, in the capture with this number.
    Graph(u64),
}

#[derive(Debug, Default)]
struct Pool {
    books: PoolBooks,
    /// Start and size of each segment. An idle range never spans two segments.
    segments: BTreeMap<u64, u64>,
    idle: IdleRanges,
}

impl Pool {
    /// Makes ranges usable by any stream once their free has been reached.
    fn finish_frees(&mut self, work: &Work, graphs: &Graphs, now_ns: u64) {
        let reached = |freed: Freed| match freed {
            Freed::On(_, mark) => work.is_finished(mark, now_ns),
            Freed::At(node) => !graphs.contains(node),
        };
        for start in self.idle.reached(reached) {
            if let Some(Idle { size_bytes, .. }) = self.idle.remove(start) {
                self.idle.insert(start, Idle { size_bytes, freed: None }, &self.segments);
            }
        }
    }

    /// Allocates the first bytes of the range that [`IdleRanges::best`] returns.
    fn take(&mut self, size_bytes: u64, on: StreamId, behind: &HashSet<NodeId>) -> Option<u64> {
        let start = self.idle.best(size_bytes, on, behind)?;
        let range = self.idle.remove(start)?;
        if range.size_bytes > size_bytes {
            let rest = Idle { size_bytes: range.size_bytes - size_bytes, ..range };
            self.idle.insert(start + size_bytes, rest, &self.segments);
        }
        Some(start)
    }

    /// Adds a segment with room for `size_bytes` on a stream. It consists of idle pages, and of memory from
    /// the device for the rest.
    fn grow(
        &mut self,
        size_bytes: u64,
        on: StreamId,
        space: &mut AddressSpace,
        budget: &mut Budget,
    ) -> Done<()> {
        let whole = align_up(size_bytes, PAGE_BYTES);
        let moved = self.pages(Some(on)).map(|(_, bytes)| bytes).sum::<u64>().min(whole);
        let missing = whole - moved;
        let roomy = align_up(missing, STEP_BYTES);
        let taken = if roomy <= budget.free_bytes() { roomy } else { missing };
        budget.check(taken)?;
        let start = space.take(moved + taken)?;
        let freed = self.move_pages(moved, on, space);
        budget.take(taken);
        self.segments.insert(start, moved + taken);
        self.idle.insert(start, Idle { size_bytes: moved + taken, freed }, &self.segments);
        self.books.grow(taken);
        Ok(())
    }

    /// Returns the whole pages inside ranges that any stream, or only `on`, may use: start and bytes.
    fn pages(&self, on: Option<StreamId>) -> impl Iterator<Item = (u64, u64)> {
        self.idle.usable(on).filter_map(|(size_bytes, start)| {
            let (first, end) = (align_up(start, PAGE_BYTES), (start + size_bytes) / PAGE_BYTES);
            let bytes = (end * PAGE_BYTES).checked_sub(first)?;
            (bytes > 0).then_some((first, bytes))
        })
    }

    /// Unmaps `bytes` of idle pages. Returns the latest of their frees, or `None` if all have been reached.
    fn move_pages(&mut self, bytes: u64, on: StreamId, space: &mut AddressSpace) -> Option<Freed> {
        let (mut left, mut latest) = (bytes, None);
        while left > 0 {
            let (first, there) = self.pages(Some(on)).next().expect("counted a moment ago");
            let part = there.min(left);
            match (self.unmap(first, part, space), &mut latest) {
                (Some(Freed::On(_, mark)), Some(Freed::On(_, last))) => *last = last.later(mark),
                (Some(freed), none) => *none = Some(freed),
                (None, _) => {}
            }
            left -= part;
        }
        latest
    }

    /// Unmaps pages of an idle range and of its segment. The segment is split into the parts before and
    /// after them. Returns the free of the idle range.
    fn unmap(&mut self, first: u64, bytes: u64, space: &mut AddressSpace) -> Option<Freed> {
        let end = first + bytes;
        let (start, range) = self.idle.around(first).expect("idle there");
        let range_end = start + range.size_bytes;
        self.idle.remove(start);
        let (&segment, &size_bytes) = self.segments.range(..=first).next_back().expect("held");
        let segment_end = segment + size_bytes;
        self.segments.remove(&segment);
        for (from, to) in [(segment, first), (end, segment_end)] {
            if from < to {
                self.segments.insert(from, to - from);
            }
        }
        for (from, to) in [(start, first), (end, range_end)] {
            if from < to {
                self.idle.insert(from, Idle { size_bytes: to - from, ..range }, &self.segments);
            }
        }
        space.give_part(first, bytes);
        range.freed
    }

    /// Releases idle pages that any stream may use, largest ranges first, while the pool holds more than
    /// `keep_bytes`.
    fn release(&mut self, keep_bytes: u64, space: &mut AddressSpace, budget: &mut Budget) {
        while self.books.usage.reserved_bytes > keep_bytes {
            let Some((first, there)) = self.pages(None).next() else { break };
            let excess = align_up(self.books.usage.reserved_bytes - keep_bytes, STEP_BYTES);
            let part = there.min(excess);
            self.unmap(first, part, space);
            budget.give(part);
            self.books.usage.reserved_bytes -= part;
        }
    }
}

impl Pools {
    pub(super) fn new(backing: Option<Arc<dyn Backing>>) -> Self {
        let (addresses, order) = (0x7000_0000_0000..0x7f00_0000_0000, AddressOrder::Lowest);
        Self {
            space: AddressSpace::new(addresses, order, backing, true),
            pools: vec![Pool::default()],
            graphs: Pool::default(),
            live: BTreeMap::new(),
        }
    }

    /// Returns whether one allocation contains all of these bytes.
    pub(super) fn holds(&self, address: u64, size_bytes: u64) -> bool {
        let below = self.live.range(..=address).next_back();
        below.is_some_and(|(start, live)| {
            let end = address.checked_add(size_bytes);
            end.is_some_and(|end| end <= start + live.size_bytes)
        })
    }

    /// Returns the pool that a range comes from, and the addresses of all pools.
    fn at(&mut self, origin: Origin) -> (&mut Pool, &mut AddressSpace) {
        let pool = match origin {
            Origin::Pool(index) => &mut self.pools[index],
            Origin::Graph(_) => &mut self.graphs,
        };
        (pool, &mut self.space)
    }

    /// Frees the memory of a graph that was dropped without having run.
    pub(super) fn graph_is_gone(&mut self, capture: u64) {
        let of_graph = self.live.extract_if(.., |_, live| live.origin == Origin::Graph(capture));
        for (address, Live { size_bytes, .. }) in of_graph {
            self.graphs.books.usage.used_bytes -= size_bytes;
            let range = Idle { size_bytes, freed: None };
            self.graphs.idle.insert(address, range, &self.graphs.segments);
        }
    }

    fn index(&self, pool: DriverPoolId) -> Done<usize> {
        let index = usize::try_from(pool.0).ok();
        let found = index.filter(|i| self.pools.get(*i).is_some_and(|pool| !pool.books.destroyed));
        found.ok_or_else(|| invalid(format!("there is no pool {}", pool.0)))
    }
}

impl State {
    fn allocate_async(&mut self, pool: DriverPoolId, bytes: u64, on: StreamId) -> Done<u64> {
        let index = self.pools.index(pool)?;
        ensure!(bytes > 0, "0 bytes requested");
        if bytes > self.budget.total_bytes {
            return self.budget.check(bytes).map(|()| 0);
        }
        self.work.stream(on)?;
        self.graphs.check_takes_work(on)?;
        let size_bytes = align_up(bytes, MIN_BLOCK_BYTES);
        let origin = match self.graphs.status(on) {
            CaptureStatus::Active { capture } => Origin::Graph(capture),
            _ => Origin::Pool(index),
        };
        let behind = self.graphs.before(on);
        let (pool, space) = self.pools.at(origin);
        pool.finish_frees(&self.work, &self.graphs, self.now_ns);
        let address = match pool.take(size_bytes, on, &behind) {
            Some(address) => address,
            None => {
                pool.grow(size_bytes, on, space, &mut self.budget)?;
                pool.take(size_bytes, on, &behind).expect("just grown for it")
            }
        };
        pool.books.allocate(size_bytes);
        self.pools.live.insert(address, Live { size_bytes, origin });
        self.graphs.add_node(on)?;
        Ok(address)
    }

    fn free_async(&mut self, address: u64, on: StreamId) -> Done<()> {
        let live = self.live_at(address)?;
        let stream = self.work.stream(on)?;
        self.check_may_free(address, live.origin, on)?;
        let freed = match self.graphs.add_node(on)? {
            Some((_, node)) => Freed::At(node),
            None => Freed::On(on, self.work.mark(stream, self.now_ns)),
        };
        self.return_range(address, live, freed);
        Ok(())
    }

    pub(super) fn free_behind(
        &mut self,
        address: u64,
        on: StreamId,
        nodes: &[NodeId],
    ) -> Done<NodeId> {
        let live = self.live_at(address)?;
        let capture = self.graphs.check_nodes(on, nodes)?;
        self.check_may_free(address, live.origin, on)?;
        let node = self.graphs.add_leaf(capture, nodes);
        self.return_range(address, live, Freed::At(node));
        Ok(node)
    }

    fn live_at(&self, address: u64) -> Done<Live> {
        let live = self.pools.live.get(&address).copied();
        live.ok_or_else(|| invalid(format!("nothing starts at {address:#x}")))
    }

    fn return_range(&mut self, address: u64, live: Live, freed: Freed) {
        self.pools.live.remove(&address);
        let (pool, _) = self.pools.at(live.origin);
        pool.books.usage.used_bytes -= live.size_bytes;
        let range = Idle { size_bytes: live.size_bytes, freed: Some(freed) };
        pool.idle.insert(address, range, &pool.segments);
        self.release_destroyed(live.origin);
    }

    /// Checks that `on` may free a range. A captured stream frees only allocations of its own capture.
    /// Other streams free allocations from pools, and those of captures that have ended.
    fn check_may_free(&self, address: u64, origin: Origin, on: StreamId) -> Done<()> {
        match (self.graphs.status(on), origin) {
            (CaptureStatus::None, Origin::Pool(_)) => Ok(()),
            (CaptureStatus::None, Origin::Graph(capture)) if !self.graphs.is_open(capture) => {
                Ok(())
            }
            (CaptureStatus::Active { capture }, Origin::Graph(own)) if own == capture => Ok(()),
            _ => Err(invalid(format!("{address:#x} and stream {on} are not in the same capture"))),
        }
    }

    /// Releases the idle memory of a destroyed pool without allocations, where the free has been reached. The
    /// rest is released when a call synchronises.
    fn release_destroyed(&mut self, origin: Origin) {
        let (Pool { books, .. }, _) = self.pools.at(origin);
        if books.destroyed && books.usage.used_bytes == 0 {
            self.trim_idle(origin, 0);
        }
    }

    /// Releases idle memory whose free has been reached, while the pool holds more than `keep_bytes`.
    fn trim_idle(&mut self, origin: Origin, keep_bytes: u64) {
        let (pool, space) = self.pools.at(origin);
        pool.finish_frees(&self.work, &self.graphs, self.now_ns);
        pool.release(keep_bytes, space, &mut self.budget);
    }

    /// Releases memory of every pool down to its threshold. Runs after a call has synchronised.
    pub(super) fn shrink_pools(&mut self) {
        for index in 0..self.pools.pools.len() {
            let PoolBooks { usage, threshold_bytes, .. } = self.pools.pools[index].books;
            if usage.reserved_bytes > threshold_bytes {
                self.trim_idle(Origin::Pool(index), threshold_bytes);
            }
        }
    }

    fn default_pool(&mut self) -> Done<DriverPoolId> {
        Ok(DriverPoolId(0))
    }

    fn create_pool(&mut self) -> Done<DriverPoolId> {
        let pools = &mut self.pools.pools;
        pools.push(Pool::default());
        Ok(DriverPoolId(pools.len() as u64 - 1))
    }

    fn destroy_pool(&mut self, pool: DriverPoolId) -> Done<()> {
        ensure!(pool.0 != 0, "the default pool cannot be destroyed");
        let index = self.pools.index(pool)?;
        let pool = &mut self.pools.pools[index];
        pool.books.destroyed = true;
        pool.books.threshold_bytes = 0;
        self.release_destroyed(Origin::Pool(index));
        Ok(())
    }

    fn open_pool(&mut self, pool: DriverPoolId, other: DeviceId) -> Done<()> {
        self.pools.index(pool)?;
        ensure!(self.reaches(other), not_supported: "device {other} cannot reach this one");
        Ok(())
    }

    /// Returns the counters and settings of a pool, or an error if it was destroyed.
    pub(super) fn books(&mut self, pool: DriverPoolId) -> Done<&mut PoolBooks> {
        let index = self.pools.index(pool)?;
        Ok(&mut self.pools.pools[index].books)
    }

    fn trim(&mut self, pool: DriverPoolId, keep_bytes: u64) -> Done<()> {
        let index = self.pools.index(pool)?;
        self.trim_idle(Origin::Pool(index), keep_bytes);
        Ok(())
    }

    fn graph_usage(&mut self) -> Done<DriverPoolUsage> {
        Ok(self.pools.graphs.books.usage)
    }

    fn reset_graph_high_marks(&mut self) -> Done<()> {
        self.pools.graphs.books.reset_high_marks();
        Ok(())
    }

    fn trim_graphs(&mut self) -> Done<()> {
        // All captures share one pool, so the number of the capture has no effect.
        self.trim_idle(Origin::Graph(0), 0);
        Ok(())
    }
}

impl<K: Kind> MemoryPools for SimulatedDevice<K> {
    calls! { MemoryPools forward Self::call; }
}
