//! `backend:native` with one defect, which the conformance tests must detect.

use stratalloc::allocator::{BaseAllocation, CacheInfo, Place};
use stratalloc_conformance::configured;

use crate::common::prelude::*;

/// The defect of a [`Bent`] allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bend {
    /// No defect.
    Nothing,
    TakesNoLimit,
    TakesAnyFraction,
    EmptiesNothing,
    FreesAnyAddress,
    CallsNoHook,
    /// Serves requests to a private pool from the default pool.
    HasOnePool,
    /// Scopes route no request.
    RoutesNothing,
    /// Scopes route every request that names no pool to their pool.
    RoutesEverything,
    /// Releasing a pool does not reduce its number of users.
    EndsNoPool,
}

#[derive(Debug)]
struct Bent {
    inner: Box<dyn DeviceAllocator>,
    bend: Bend,
    counts: bool,
    limit: Mutex<Option<u64>>,
    /// Hooks that accept callbacks but are never called.
    unused_hooks: Hooks,
    /// The pool to which every request is routed, for [`Bend::RoutesEverything`].
    routed: Mutex<Option<PoolId>>,
}

/// Returns a constructor of a [`Bent`] allocator, with counters if `counts` is true.
pub(crate) fn bent(bend: Bend, counts: bool) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync {
    let native = configured("backend:native");
    move |driver| {
        let (limit, routed) = (Mutex::default(), Mutex::default());
        Ok(Box::new(Bent {
            inner: native(driver)?,
            bend,
            counts,
            limit,
            unused_hooks: Hooks::new(),
            routed,
        }))
    }
}

impl Bent {
    fn inner(&self) -> &dyn Caching {
        self.inner.caching()
    }

    fn pools(&self) -> &dyn PrivatePools {
        self.inner.private_pools()
    }
}

impl DeviceAllocator for Bent {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let routed = *self.routed.lock();
        self.inner.allocate(match (request.place, routed) {
            (Place::Pool(_), _) if self.bend == Bend::HasOnePool => {
                request.in_pool(PoolId::DEFAULT)
            }
            (Place::Anywhere, Some(pool)) => request.in_pool(pool),
            _ => request,
        })
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.inner.free(allocation)
    }

    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        let done = self.inner.free_raw(address);
        if self.bend == Bend::FreesAnyAddress { done.or(Ok(0)) } else { done }
    }

    fn record_stream_raw(&self, address: u64, stream: StreamId) -> Result<(), HandleError> {
        self.inner.record_stream_raw(address, stream)
    }

    fn control(&self) -> Control<'_> {
        let mut control = self.inner.control();
        control.caching = Some(self);
        control.counters = control.counters.filter(|_| self.counts);
        control.private_pools = Some(self);
        if self.bend == Bend::CallsNoHook {
            control.hooks = Some(&self.unused_hooks);
        }
        control
    }
}

impl Caching for Bent {
    fn empty_cache(&self) -> Result<(), DriverError> {
        if self.bend == Bend::EmptiesNothing { Ok(()) } else { self.inner().empty_cache() }
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        *self.limit.lock() = limit_bytes;
        if self.bend != Bend::TakesNoLimit {
            self.inner().set_limit_bytes(limit_bytes);
        }
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        let legal = self.bend == Bend::TakesAnyFraction;
        if legal { Ok(()) } else { self.inner().set_memory_fraction(fraction) }
    }

    fn limit_bytes(&self) -> Option<u64> {
        *self.limit.lock()
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.inner().apply(config)
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.inner().cache_info()
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.inner().layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.inner().base_allocation(allocation)
    }
}

impl PrivatePools for Bent {
    fn create_pool(&self, pool: PoolId, options: PoolOptions) -> Result<(), PoolError> {
        self.pools().create_pool(pool, options)
    }

    fn retain_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools().retain_pool(pool)
    }

    fn release_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        if self.bend == Bend::EndsNoPool && self.pool_users(pool).is_some() {
            Ok(())
        } else {
            self.pools().release_pool(pool)
        }
    }

    fn pool_users(&self, pool: PoolId) -> Option<u32> {
        self.pools().pool_users(pool)
    }

    fn open_scope(&self, pool: PoolId, filter: ScopeFilter) -> Result<(), PoolError> {
        let filter = match self.bend {
            Bend::RoutesNothing => ScopeFilter::Stream(StreamId(u64::MAX)),
            _ => filter,
        };
        self.pools().open_scope(pool, filter)?;
        if self.bend == Bend::RoutesEverything {
            *self.routed.lock() = Some(pool);
        }
        Ok(())
    }

    fn close_scope(&self, pool: PoolId) -> Result<(), PoolError> {
        *self.routed.lock() = None;
        self.pools().close_scope(pool)
    }

    fn empty_pool(&self, pool: PoolId) -> Result<(), PoolError> {
        self.pools().empty_pool(pool)
    }

    fn pool_layout(&self, pool: PoolId) -> Result<Vec<SegmentLayout>, PoolError> {
        self.pools().pool_layout(pool)
    }
}
