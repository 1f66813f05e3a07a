//! Private pools by handle: memory that only those share who ask for it.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::c_void;

use super::calls::stream_of;
use super::guard::{Failure, Status, status};
use super::table;
use super::text::Place;
use crate::allocator::{PoolOptions, ScopeFilter};
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

/// Ends the routing to a pool, from any thread.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_close(handle: u64, pool: Pool) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        let pools = instance.pools()?;
        pools.close_scope(pool.into())?;
        match pools.release_pool(pool.into()) {
            // The caller has released the scope's user, too.
            Err(PoolError::Released { .. } | PoolError::Unknown { .. }) => Ok(()),
            released => Ok(released?),
        }
    })
}
