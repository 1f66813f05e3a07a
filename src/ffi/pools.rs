//! Private pools by handle: memory that only those share who ask for it.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::c_void;

use super::calls::stream_of;
use super::guard::{Failure, Status, status};
use super::table;
use super::text::Place;
use crate::allocator::{PoolOptions, PrivatePools, ScopeFilter};
use crate::error::PoolError;
use crate::ids::PoolId;

/// Requests to the default pool may take idle blocks from the pool before they fail.
pub const POOL_USE_ON_OOM: u32 = 1;
/// Blocks of the pool are always handed out whole.
pub const POOL_NO_SPLIT: u32 = 2;

/// Names a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// Number of a graph capture's pool, or 0.
    pub capture: u64,
    /// Number of a user's pool, or 0.
    pub user: u64,
}

impl From<Pool> for PoolId {
    fn from(pool: Pool) -> Self {
        Self { capture: pool.capture, user: pool.user }
    }
}

/// Makes a pool with one user, the caller, and stores its name. `options` is a sum of
/// `STRATALLOC_POOL_USE_ON_OOM` and `STRATALLOC_POOL_NO_SPLIT`, or 0.
///
/// # Safety
///
/// `pool` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_pool_create(
    handle: u64,
    options: u32,
    pool: *mut Pool,
) -> Status {
    status(|| {
        // SAFETY: our caller's promise.
        let place = unsafe { Place::new(pool, "pool") }?;
        if options & !(POOL_USE_ON_OOM | POOL_NO_SPLIT) != 0 {
            let text = format_args!("options {options:#x}: expected a sum of 1 and 2");
            return Err(Failure::new(Status::InvalidArgument, text));
        }
        let options = PoolOptions {
            use_on_oom: options & POOL_USE_ON_OOM != 0,
            no_split: options & POOL_NO_SPLIT != 0,
            ..PoolOptions::default()
        };
        let id = PoolId::next_user();
        table::find(handle)?.pools()?.create_pool(id, options)?;
        place.put(Pool { capture: id.capture, user: id.user });
        Ok(())
    })
}

/// Adds a user to a pool.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_retain(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.retain_pool(pool.into())?))
}

/// Removes a user from a pool. With the last one the pool serves nobody any more, and its idle memory
/// goes back to the device, as far as its driver lets it; blocks that are still live keep theirs until they
/// are freed and memory is released.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_release(handle: u64, pool: Pool) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        let pools = instance.pools()?;
        pools.release_pool(pool.into())?;
        // The user has gone, and what is still idle goes when memory is released. Where the allocator was
        // switched away from, it went with its last user.
        let _ = pools.empty_pool(pool.into());
        Ok(())
    })
}

/// Routes the requests of the calling thread to a pool, before all scopes that are open already. A
/// pool has one open scope at a time, which counts as a user.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_open_thread(handle: u64, pool: Pool) -> Status {
    status(|| table::find(handle)?.open_scope(pool.into(), ScopeFilter::this_thread()))
}

/// Routes the requests on `stream` to a pool, from all threads.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_open_stream(
    handle: u64,
    pool: Pool,
    stream: *mut c_void,
) -> Status {
    status(|| {
        let filter = ScopeFilter::Stream(stream_of(stream));
        table::find(handle)?.open_scope(pool.into(), filter)
    })
}

/// Ends the routing to a pool, from any thread. Where the driver fails, the scope is closed all the same and
/// its user has gone.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_close(handle: u64, pool: Pool) -> Status {
    status(|| Ok(close(table::find(handle)?.pools()?, pool.into())?))
}

/// Closes a scope and removes its user.
fn close(pools: &dyn PrivatePools, pool: PoolId) -> Result<(), PoolError> {
    let closed = pools.close_scope(pool);
    if closed.as_ref().is_err_and(|error| !error.ends_scope()) {
        return closed;
    }
    let released = match pools.release_pool(pool) {
        // The caller has released the scope's user, too.
        Err(PoolError::Released { .. } | PoolError::Unknown { .. }) => Ok(()),
        released => released,
    };
    closed.and(released)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allocator::{DeviceAllocator, Request};
    use crate::config::Config;
    use crate::driver::sim::SimOptions;
    use crate::driver::{Capture, Driver, FaultPlan, Faulty, Sim};
    use crate::error::DriverErrorKind;
    use crate::registry::build;

    /// A block that other streams use and that is freed during a capture waits for the scope's end, which
    /// then asks the driver.
    #[test]
    fn a_scope_whose_end_the_driver_spoils_leaves_no_user_behind() {
        for conf in
            ["backend:cudaMallocAsync", "backend:native,graph_capture_record_stream_reuse:True"]
        {
            let faulty = Arc::new(Faulty::new(Sim::new(SimOptions::default())));
            let driver = Arc::<Faulty<Sim>>::clone(&faulty) as Arc<dyn Driver>;
            let config = Config::parse(conf, &Default::default()).unwrap();
            let allocator = build(&config, driver, Default::default()).unwrap();
            let pools = allocator.private_pools().unwrap();
            let [own, other] = [(); 2].map(|()| faulty.create_stream().unwrap());
            let pool = PoolId::next_user();
            pools.create_pool(pool, PoolOptions::default()).unwrap();
            let block = allocator.allocate(Request::new(4096, own).in_pool(pool)).unwrap();
            allocator.cross_stream().unwrap().record_stream(&block, other).unwrap();
            let capture = Capture::begin(&*faulty, own).unwrap();
            pools.open_scope(pool, ScopeFilter::Capture(capture)).unwrap();
            allocator.free(block).unwrap();
            Capture::end(&*faulty, own).unwrap();
            let (kind, only) = (DriverErrorKind::Other, Some("record_event"));
            faulty.arm(FaultPlan { at: 0, kind, repeat: false, only });
            let closed = close(pools, pool);
            assert!(matches!(closed, Err(PoolError::Driver(_))), "{conf}: {closed:?}");
            assert_eq!(pools.pool_users(pool), Some(1), "{conf}");
            assert_eq!(close(pools, pool), Err(PoolError::ScopeClosed { pool }), "{conf}");
            assert_eq!(pools.pool_users(pool), Some(1), "{conf}: a second close removes nobody");
        }
    }
}
