//! Stream-ordered pools of the host device, as `cudaMallocAsync` keeps them.
//!
//! A pool takes segments of at least 32 MiB and hands out ranges first fit by address. A freed range
//! may be used again at once on the stream that freed it, and on others when that stream has passed
//! the free. Idle segments go back when somebody synchronises, down to the release threshold, when
//! the pool is trimmed, and when memory is short. Nothing here waits: a request that only unfinished
//! work stands in the way of is out of memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::budget::Budget;
use super::errors::{Refusal, length};
use super::memory::Region;
use super::span::{Part, Span};
use super::work::{Mark, Queues};
use super::{Host, Memory};
use crate::driver::keepers::{Keepers, NO_KEEPER};
use crate::driver::{DriverPoolId, DriverPoolUsage, DriverResult, MemoryPools};
use crate::ids::{DeviceId, StreamId};
use crate::size::{MIB, MIN_BLOCK_BYTES, align_up};

const SEGMENT_MIN_BYTES: u64 = 32 * MIB;
const SEGMENT_ROUND_BYTES: u64 = 2 * MIB;
const DEFAULT_POOL: DriverPoolId = DriverPoolId(0);

/// All pools and what is allocated from them.
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
    /// Where the segment starts that the range lies in.
    segment: u64,
}

#[derive(Debug, Default)]
struct Pool {
    /// Nobody can name it any more; it stays until its memory is idle.
    destroyed: bool,
    threshold_bytes: u64,
    keepers: Keepers,
    usage: DriverPoolUsage,
    segments: BTreeMap<u64, Segment>,
}

#[derive(Debug)]
struct Segment {
    region: Arc<Region>,
    /// Ranges that nobody holds, by address.
    idle: BTreeMap<u64, Idle>,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    size_bytes: u64,
    /// The free that only its own stream has seen. `None`: everybody may use the range.
    freed: Option<Mark>,
}

impl Segment {
    fn size_bytes(&self) -> u64 {
        self.region.size_bytes() as u64
    }

    /// Opens ranges to everybody whose free has been passed, and joins neighbours that the same
    /// streams may use.
    fn settle(&mut self, queues: &Queues) {
        let mut last: Option<(u64, Idle)> = None;
        for (start, mut range) in std::mem::take(&mut self.idle) {
            range.freed = range.freed.filter(|mark| !queues.is_passed(*mark));
            if let Some((last_start, before)) = &mut last
                && *last_start + before.size_bytes == start
                && before.freed.map(Mark::stream) == range.freed.map(Mark::stream)
            {
                before.size_bytes += range.size_bytes;
                before.freed = before.freed.zip(range.freed).map(|(a, b)| a.later(b));
                continue;
            }
            self.idle.extend(last.replace((start, range)));
        }
        self.idle.extend(last);
    }

    /// Takes the lowest idle range that fits and that `on` may use.
    fn take(&mut self, size_bytes: u64, on: StreamId) -> Option<u64> {
        let found = self.idle.iter().find(|(_, range)| {
            range.size_bytes >= size_bytes && range.freed.is_none_or(|mark| mark.stream() == on)
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
    fn settle(&mut self, queues: &Queues) {
        self.segments.values_mut().for_each(|segment| segment.settle(queues));
    }

    /// The address of a range and the start of its segment.
    fn take(&mut self, size_bytes: u64, on: StreamId) -> Option<(u64, u64)> {
        let mut segments = self.segments.iter_mut();
        segments.find_map(|(start, own)| own.take(size_bytes, on).map(|address| (address, *start)))
    }

    fn grow(&mut self, size_bytes: u64, budget: &Arc<Budget>) -> Result<(), Refusal> {
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
        let usage = &mut self.usage;
        usage.reserved_bytes += segment_bytes;
        usage.reserved_high_bytes = usage.reserved_high_bytes.max(usage.reserved_bytes);
        Ok(())
    }

    /// Gives back idle segments, highest first, while more than `keep_bytes` are held.
    fn release(&mut self, keep_bytes: u64) {
        let idle = self.segments.iter().filter(|(_, segment)| segment.is_idle());
        let idle: Vec<u64> = idle.map(|(start, _)| *start).collect();
        for start in idle.into_iter().rev() {
            if self.usage.reserved_bytes <= keep_bytes {
                break;
            }
            if let Some(segment) = self.segments.remove(&start) {
                self.usage.reserved_bytes -= segment.size_bytes();
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
    /// Ranges in callers' hands.
    pub(super) fn ranges(&self) -> u64 {
        self.live.len() as u64
    }

    /// The bytes of a range, if one live allocation holds them all.
    pub(super) fn span(&self, address: u64, size_bytes: u64) -> Option<Span> {
        let (start, live) = self.live.range(..=address).next_back()?;
        let end = address.checked_add(size_bytes)?;
        let segment = self.pools.get(&live.pool)?.segments.get(&live.segment)?;
        if end > start + live.size_bytes {
            return None;
        }
        let offset = usize::try_from(address - live.segment).ok()?;
        let count = usize::try_from(size_bytes).ok()?;
        Some(Span::new(vec![Part::of_region(&segment.region, offset, count)]))
    }

    /// After somebody waited: every pool goes back to its threshold.
    pub(super) fn synchronized(&mut self, queues: &Queues) {
        for pool in self.pools.values_mut() {
            if pool.usage.reserved_bytes > pool.threshold_bytes {
                pool.settle(queues);
                pool.release(pool.threshold_bytes);
            }
        }
        self.pools.retain(|_, pool| !pool.destroyed || !pool.segments.is_empty());
    }

    fn pool(&mut self, id: DriverPoolId) -> Result<&mut Pool, Refusal> {
        let known = self.pools.get_mut(&id).filter(|pool| !pool.destroyed);
        known.ok_or_else(|| Refusal::Illegal(format!("there is no pool {}", id.0)))
    }

    fn allocate(
        &mut self,
        id: DriverPoolId,
        bytes: u64,
        on: StreamId,
        queues: &Queues,
        budget: &Arc<Budget>,
    ) -> Result<u64, Refusal> {
        let pool = self.pool(id)?;
        if bytes == 0 {
            return Err(Refusal::Illegal("zero bytes".to_owned()));
        }
        let free_bytes = budget.free_bytes();
        let size_bytes = bytes.checked_next_multiple_of(MIN_BLOCK_BYTES);
        let size_bytes = size_bytes.filter(|size_bytes| *size_bytes <= budget.total_bytes());
        let size_bytes = size_bytes.ok_or(Refusal::Short { asked_bytes: bytes, free_bytes })?;
        pool.settle(queues);
        let (address, segment) = match pool.take(size_bytes, on) {
            Some(found) => found,
            None => {
                self.grow(id, size_bytes, queues, budget)?;
                self.pool(id)?.take(size_bytes, on).expect("the pool just grew for this range")
            }
        };
        let usage = &mut self.pool(id)?.usage;
        usage.used_bytes += size_bytes;
        usage.used_high_bytes = usage.used_high_bytes.max(usage.used_bytes);
        self.live.insert(address, Live { size_bytes, pool: id, segment });
        Ok(address)
    }

    /// Grows a pool; when memory is short, after all pools gave back what is idle.
    fn grow(
        &mut self,
        id: DriverPoolId,
        size_bytes: u64,
        queues: &Queues,
        budget: &Arc<Budget>,
    ) -> Result<(), Refusal> {
        if let Ok(()) = self.pool(id)?.grow(size_bytes, budget) {
            return Ok(());
        }
        for pool in self.pools.values_mut() {
            pool.settle(queues);
            pool.release(0);
        }
        self.pool(id)?.grow(size_bytes, budget)
    }

    fn free(&mut self, address: u64, mark: Mark, queues: &Queues) -> Result<(), Refusal> {
        let Some(live) = self.live.remove(&address) else {
            return Err(Refusal::Illegal(format!(
                "no allocation of a pool starts at {address:#x}"
            )));
        };
        let pool = self.pools.get_mut(&live.pool).expect("pools stay while anything is live");
        pool.usage.used_bytes -= live.size_bytes;
        let segment = pool.segments.get_mut(&live.segment).expect("segments of live ranges stay");
        segment.idle.insert(address, Idle { size_bytes: live.size_bytes, freed: Some(mark) });
        if pool.destroyed {
            self.synchronized(queues);
        }
        Ok(())
    }
}

impl Host {
    /// Does something with the pools and the queues.
    fn with_pools<T>(
        &self,
        call: &'static str,
        work: impl FnOnce(&mut Pools, &Queues) -> Result<T, Refusal>,
    ) -> DriverResult<T> {
        let Memory { pools, .. } = &mut *self.memory.lock();
        work(pools, &self.work.lock()).map_err(|refusal| refusal.of(call))
    }
}

impl MemoryPools for Host {
    fn default_pool(&self) -> DriverResult<DriverPoolId> {
        Ok(DEFAULT_POOL)
    }

    fn create_pool(&self) -> DriverResult<DriverPoolId> {
        self.with_pools("create_pool", |pools, _| {
            pools.last_pool += 1;
            let id = DriverPoolId(pools.last_pool);
            pools.pools.insert(id, Pool::default());
            Ok(id)
        })
    }

    fn destroy_pool(&self, pool: DriverPoolId) -> DriverResult<()> {
        self.with_pools("destroy_pool", |pools, queues| {
            if pool == DEFAULT_POOL {
                let message = "the default pool cannot be destroyed".to_owned();
                return Err(Refusal::Illegal(message));
            }
            let own = pools.pool(pool)?;
            own.destroyed = true;
            own.threshold_bytes = 0;
            pools.synchronized(queues);
            Ok(())
        })
    }

    fn set_release_threshold(&self, pool: DriverPoolId, bytes: u64) -> DriverResult<()> {
        self.with_pools("set_release_threshold", |pools, _| {
            pools.pool(pool)?.threshold_bytes = bytes;
            Ok(())
        })
    }

    fn release_threshold(&self, pool: DriverPoolId) -> DriverResult<u64> {
        self.with_pools("release_threshold", |pools, _| Ok(pools.pool(pool)?.threshold_bytes))
    }

    fn keep_memory(&self, pool: DriverPoolId, keep: bool) -> DriverResult<()> {
        self.with_pools("keep_memory", |pools, _| {
            let pool = pools.pool(pool)?;
            let changed = pool.keepers.after(keep, pool.threshold_bytes);
            let (keepers, set) = changed.ok_or_else(|| Refusal::Illegal(NO_KEEPER.to_owned()))?;
            pool.keepers = keepers;
            pool.threshold_bytes = set.unwrap_or(pool.threshold_bytes);
            Ok(())
        })
    }

    fn allow_reuse(&self, pool: DriverPoolId) -> DriverResult<()> {
        // Nothing else is done here.
        self.with_pools("allow_reuse", |pools, _| pools.pool(pool).map(drop))
    }

    fn open_pool(&self, pool: DriverPoolId, other: DeviceId) -> DriverResult<()> {
        self.with_pools("open_pool", |pools, _| {
            pools.pool(pool)?;
            Err(Refusal::Illegal(format!("device {other} cannot reach this one")))
        })
    }

    fn allocate_async(&self, pool: DriverPoolId, bytes: u64, on: StreamId) -> DriverResult<u64> {
        let call = "allocate_async";
        self.check_stream(call, on)?;
        self.with_pools(call, |pools, queues| pools.allocate(pool, bytes, on, queues, &self.budget))
    }

    fn free_async(&self, address: u64, on: StreamId) -> DriverResult<()> {
        let call = "free_async";
        self.check_stream(call, on)?;
        self.with_pools(call, |pools, queues| pools.free(address, queues.end_of(on), queues))
    }

    fn trim(&self, pool: DriverPoolId, keep_bytes: u64) -> DriverResult<()> {
        self.with_pools("trim", |pools, queues| {
            let pool = pools.pool(pool)?;
            pool.settle(queues);
            pool.release(keep_bytes);
            Ok(())
        })
    }

    fn usage(&self, pool: DriverPoolId) -> DriverResult<DriverPoolUsage> {
        self.with_pools("usage", |pools, _| Ok(pools.pool(pool)?.usage))
    }

    fn reset_high_marks(&self, pool: DriverPoolId) -> DriverResult<()> {
        self.with_pools("reset_high_marks", |pools, _| {
            let usage = &mut pools.pool(pool)?.usage;
            usage.used_high_bytes = usage.used_bytes;
            usage.reserved_high_bytes = usage.reserved_bytes;
            Ok(())
        })
    }

    /// Nothing: the host captures no graphs.
    fn graph_usage(&self) -> DriverResult<DriverPoolUsage> {
        Ok(DriverPoolUsage::default())
    }

    fn reset_graph_high_marks(&self) -> DriverResult<()> {
        Ok(())
    }

    fn trim_graphs(&self) -> DriverResult<()> {
        Ok(())
    }
}
