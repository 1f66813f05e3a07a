//! Stream-ordered pools of the host device, modelled on `cudaMallocAsync`.
//!
//! A pool takes segments of at least 32 MiB and allocates ranges first fit by address. The stream that
//! freed a range may reuse it at once. Other streams may reuse it once the freeing stream has passed the
//! free. A pool releases idle segments down to its release threshold when a call synchronises. It also
//! does so when it is trimmed, and when memory is short. No call here waits: if only unfinished work
//! prevents a request, it fails with out of memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::budget::Budget;
use super::errors::{length, short};
use super::memory::Region;
use super::span::{Part, Span};
use super::work::{Mark, Queues};
use super::{Device, Host, Memory};
use crate::pool_books::{KeepsPoolBooks, PoolBooks};
use crate::refusal::{Done, ensure, invalid};
use stratalloc::driver::call::{Call, calls, forward};
use stratalloc::driver::{DriverPoolId, DriverPoolUsage, DriverResult, MemoryPools};
use stratalloc::ids::{DeviceId, StreamId};
use stratalloc::size::{MIB, MIN_BLOCK_BYTES, align_up};

const SEGMENT_MIN_BYTES: u64 = 32 * MIB;
const SEGMENT_ROUND_BYTES: u64 = 2 * MIB;
const DEFAULT_POOL: DriverPoolId = DriverPoolId(0);

/// All pools, and the live allocations from them.
#[derive(Debug)]
pub(super) struct Pools {
    pools: BTreeMap<DriverPoolId, Pool>,
    live: BTreeMap<u64, Live>,
    last_pool: u64,
}

#[derive(Debug)]
struct Live {
    size_bytes: u64,
    pool: DriverPoolId,
    /// Start of the segment that contains the range.
    segment: u64,
}

#[derive(Debug, Default)]
struct Pool {
    books: PoolBooks,
    segments: BTreeMap<u64, Segment>,
}

#[derive(Debug)]
struct Segment {
    region: Arc<Region>,
    /// Ranges that are not allocated, by address.
    idle: BTreeMap<u64, Idle>,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    size_bytes: u64,
    /// The free of this range, while its stream has not passed it. `None`: any stream may use the range.
    freed: Option<Mark>,
}

impl Segment {
    fn size_bytes(&self) -> u64 {
        self.region.size_bytes() as u64
    }

    /// Makes ranges usable by any stream once their free has been passed, and coalesces neighbours that
    /// the same streams may use.
    fn finish_frees(&mut self, queues: &Queues) {
        let mut last: Option<(u64, Idle)> = None;
        for (start, mut range) in std::mem::take(&mut self.idle) {
            range.freed = range.freed.filter(|mark| !queues.is_passed(*mark));
            if let Some((last_start, before)) = &mut last
                && *last_start + before.size_bytes == start
                && before.freed.map(|mark| mark.stream) == range.freed.map(|mark| mark.stream)
            {
                before.size_bytes += range.size_bytes;
                before.freed = before.freed.zip(range.freed).map(|(a, b)| a.later(b));
                continue;
            }
            self.idle.extend(last.replace((start, range)));
        }
        self.idle.extend(last);
    }

    /// Allocates from the lowest idle range that fits and that `on` may use.
    fn take(&mut self, size_bytes: u64, on: StreamId) -> Option<u64> {
        let found = self.idle.iter().find(|(_, range)| {
            range.size_bytes >= size_bytes && range.freed.is_none_or(|mark| mark.stream == on)
        });
        let (start, range) = found.map(|(start, range)| (*start, *range))?;
        self.idle.remove(&start);
        if range.size_bytes > size_bytes {
            let rest = Idle { size_bytes: range.size_bytes - size_bytes, ..range };
            self.idle.insert(start + size_bytes, rest);
        }
        Some(start)
    }

    fn is_idle(&self) -> bool {
        let first = self.idle.values().next();
        first.is_some_and(|r| r.size_bytes == self.size_bytes() && r.freed.is_none())
    }
}

impl Pool {
    fn finish_frees(&mut self, queues: &Queues) {
        self.segments.values_mut().for_each(|segment| segment.finish_frees(queues));
    }

    /// Returns the address of an allocated range and the start of its segment.
    fn take(&mut self, size_bytes: u64, on: StreamId) -> Option<(u64, u64)> {
        let mut segments = self.segments.iter_mut();
        segments.find_map(|(start, own)| own.take(size_bytes, on).map(|address| (address, *start)))
    }

    fn grow(&mut self, size_bytes: u64, budget: &Arc<Budget>) -> Done<()> {
        let whole_bytes = align_up(size_bytes, SEGMENT_ROUND_BYTES);
        let roomy_bytes = whole_bytes.max(SEGMENT_MIN_BYTES);
        let hold = budget.take(roomy_bytes).map(|hold| (hold, roomy_bytes));
        let (hold, segment_bytes) = match hold {
            Ok(roomy) => roomy,
            Err(_) => (budget.take(whole_bytes)?, whole_bytes),
        };
        let region = Arc::new(Region::map(length(segment_bytes)?, hold)?);
        let start = region.address();
        let all = Idle { size_bytes: segment_bytes, freed: None };
        self.segments.insert(start, Segment { region, idle: BTreeMap::from([(start, all)]) });
        self.books.grow(segment_bytes);
        Ok(())
    }

    /// Releases idle segments, highest first, while the pool holds more than `keep_bytes`.
    fn release(&mut self, keep_bytes: u64) {
        let idle = self.segments.iter().filter(|(_, segment)| segment.is_idle());
        let idle: Vec<u64> = idle.map(|(start, _)| *start).collect();
        for start in idle.into_iter().rev() {
            if self.books.usage.reserved_bytes <= keep_bytes {
                break;
            }
            if let Some(segment) = self.segments.remove(&start) {
                self.books.usage.reserved_bytes -= segment.size_bytes();
            }
        }
    }
}

impl Default for Pools {
    fn default() -> Self {
        let pools = BTreeMap::from([(DEFAULT_POOL, Pool::default())]);
        Self { pools, live: BTreeMap::new(), last_pool: DEFAULT_POOL.0 }
    }
}

impl Pools {
    /// Returns the number of live allocations.
    pub(super) fn ranges(&self) -> u64 {
        self.live.len() as u64
    }

    /// Returns the bytes of a range, if one live allocation contains it.
    pub(super) fn span(&self, address: u64, size_bytes: u64) -> Option<Span> {
        let (start, live) = self.live.range(..=address).next_back()?;
        let end = address.checked_add(size_bytes)?;
        let segment = self.pools.get(&live.pool)?.segments.get(&live.segment)?;
        if end > start + live.size_bytes {
            return None;
        }
        let offset = usize::try_from(address - live.segment).ok()?;
        let count = usize::try_from(size_bytes).ok()?;
        Some(Span(vec![Part::of_region(&segment.region, offset, count)]))
    }

    /// Releases memory of every pool down to its threshold. Runs after a call has synchronised.
    pub(super) fn synchronized(&mut self, queues: &Queues) {
        for pool in self.pools.values_mut() {
            if pool.books.usage.reserved_bytes > pool.books.threshold_bytes {
                pool.finish_frees(queues);
                pool.release(pool.books.threshold_bytes);
            }
        }
        self.pools.retain(|_, pool| !pool.books.destroyed || !pool.segments.is_empty());
    }

    fn pool(&mut self, id: DriverPoolId) -> Done<&mut Pool> {
        let known = self.pools.get_mut(&id).filter(|pool| !pool.books.destroyed);
        known.ok_or_else(|| invalid(format!("there is no pool {}", id.0)))
    }
}

/// The state that the calls of pools use.
struct PoolCall<'a> {
    device: &'a Device,
    pools: &'a mut Pools,
    queues: &'a Queues,
}

impl PoolCall<'_> {
    fn default_pool(&mut self) -> Done<DriverPoolId> {
        Ok(DEFAULT_POOL)
    }

    fn create_pool(&mut self) -> Done<DriverPoolId> {
        self.pools.last_pool += 1;
        let id = DriverPoolId(self.pools.last_pool);
        self.pools.pools.insert(id, Pool::default());
        Ok(id)
    }

    fn destroy_pool(&mut self, pool: DriverPoolId) -> Done<()> {
        ensure!(pool != DEFAULT_POOL, "the default pool cannot be destroyed");
        let books = self.books(pool)?;
        books.destroyed = true;
        books.threshold_bytes = 0;
        self.pools.synchronized(self.queues);
        Ok(())
    }

    fn open_pool(&mut self, pool: DriverPoolId, other: DeviceId) -> Done<()> {
        self.books(pool)?;
        Err(invalid(format!("device {other} cannot reach this one")))
    }

    fn allocate_async(&mut self, pool: DriverPoolId, bytes: u64, on: StreamId) -> Done<u64> {
        self.queues.check(on)?;
        let (own, budget) = (self.pools.pool(pool)?, &self.device.budget);
        ensure!(bytes > 0, "zero bytes");
        let free_bytes = budget.free_bytes();
        let size_bytes = bytes.checked_next_multiple_of(MIN_BLOCK_BYTES);
        let size_bytes = size_bytes.filter(|size_bytes| *size_bytes <= budget.total_bytes);
        let size_bytes = size_bytes.ok_or(short(bytes, free_bytes))?;
        own.finish_frees(self.queues);
        let (address, segment) = match own.take(size_bytes, on) {
            Some(found) => found,
            None => {
                self.grow(pool, size_bytes)?;
                let own = self.pools.pool(pool)?;
                own.take(size_bytes, on).expect("the pool just grew for this range")
            }
        };
        self.books(pool)?.allocate(size_bytes);
        self.pools.live.insert(address, Live { size_bytes, pool, segment });
        Ok(address)
    }

    /// Adds a segment to a pool. When memory is short, all pools release their idle segments first.
    fn grow(&mut self, pool: DriverPoolId, size_bytes: u64) -> Done<()> {
        let budget = &self.device.budget;
        if self.pools.pool(pool)?.grow(size_bytes, budget).is_ok() {
            return Ok(());
        }
        for pool in self.pools.pools.values_mut() {
            pool.finish_frees(self.queues);
            pool.release(0);
        }
        self.pools.pool(pool)?.grow(size_bytes, budget)
    }

    fn free_async(&mut self, address: u64, on: StreamId) -> Done<()> {
        self.queues.check(on)?;
        let live = self.pools.live.remove(&address);
        let unknown = || invalid(format!("no allocation of a pool starts at {address:#x}"));
        let Live { size_bytes, pool, segment } = live.ok_or_else(unknown)?;
        let pool = self.pools.pools.get_mut(&pool).expect("pools stay while anything is live");
        pool.books.usage.used_bytes -= size_bytes;
        let segment = pool.segments.get_mut(&segment).expect("segments of live ranges stay");
        segment.idle.insert(address, Idle { size_bytes, freed: Some(self.queues.end_of(on)) });
        if pool.books.destroyed {
            self.pools.synchronized(self.queues);
        }
        Ok(())
    }

    fn trim(&mut self, pool: DriverPoolId, keep_bytes: u64) -> Done<()> {
        let pool = self.pools.pool(pool)?;
        pool.finish_frees(self.queues);
        pool.release(keep_bytes);
        Ok(())
    }

    /// Returns zeros: the host device has no graphs.
    fn graph_usage(&mut self) -> Done<DriverPoolUsage> {
        Ok(DriverPoolUsage::default())
    }

    fn reset_graph_high_marks(&mut self) -> Done<()> {
        Ok(())
    }

    fn trim_graphs(&mut self) -> Done<()> {
        Ok(())
    }
}

impl KeepsPoolBooks for PoolCall<'_> {
    fn books(&mut self, pool: DriverPoolId) -> Done<&mut PoolBooks> {
        Ok(&mut self.pools.pool(pool)?.books)
    }
}

impl Host {
    fn pool_call<T>(
        &self,
        call: Call,
        act: impl FnOnce(&mut PoolCall<'_>) -> Done<T>,
    ) -> DriverResult<T> {
        self.call(call, |device| {
            let Memory { pools, .. } = &mut *device.memory.lock();
            act(&mut PoolCall { device, pools, queues: &device.work.lock() })
        })
    }
}

impl MemoryPools for Host {
    calls! { MemoryPools forward Self::pool_call; }
}
