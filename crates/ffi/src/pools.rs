//! Private pools for programs in other languages.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::calls::{pointer_to, stream_of, stream_to};
use super::guard::{Failure, Status, status};
use super::pointers::{read_struct, store, write_all};
use super::table;
use super::user_data::{Release, UserData};
use stratalloc::allocator::{PoolOptions, PrivatePools, ScopeFilter, SegmentAllocator};
use stratalloc::error::PoolError;
use stratalloc::ids::{PoolId, StreamId};

/// Requests to the default pool may use free blocks of this pool before they fail.
pub const POOL_USE_ON_OOM: u32 = 1;
/// Blocks of the pool are never split.
pub const POOL_NO_SPLIT: u32 = 2;

/// The id of a pool, as PyTorch's `MempoolId_t`: two numbers, both 0 for the default pool.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pool {
    /// The number of a graph capture's pool, or 0.
    pub capture: u64,
    /// The number of a user's pool, or 0.
    pub user: u64,
}

impl From<Pool> for PoolId {
    fn from(pool: Pool) -> Self {
        Self { capture: pool.capture, user: pool.user }
    }
}

/// A source of a pool's segments, in place of the device. The functions are called on any thread, with
/// no lock of the library held. They may use the allocator, but not the pool that they serve, and must
/// not unwind. `user` is passed to each.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentSource {
    /// Returns the address of `size` bytes (a multiple of 512) for `stream`, aligned to 512. Returns
    /// null if there is not enough memory.
    pub allocate: Option<
        unsafe extern "C" fn(user: *mut c_void, size: u64, stream: *mut c_void) -> *mut c_void,
    >,
    /// Frees memory that `allocate` returned.
    pub free: Option<
        unsafe extern "C" fn(
            user: *mut c_void,
            pointer: *mut c_void,
            size: u64,
            stream: *mut c_void,
        ),
    >,
    /// Called when the pool no longer exists. May be null.
    pub release: Release,
    /// Passed to each function.
    pub user: *mut c_void,
}

/// A filter for a scope: selects the requests that go to the scope's pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StreamFilter {
    /// Returns nonzero if a request on `stream` goes to the pool. Called at each request, on the
    /// requesting thread. It must not call the allocator, and must not unwind.
    pub accepts: Option<unsafe extern "C" fn(user: *mut c_void, stream: *mut c_void) -> c_int>,
    /// Called when the scope no longer exists. May be null.
    pub release: Release,
    /// Passed to each function.
    pub user: *mut c_void,
}

impl StreamFilter {
    /// Calls `open` with a scope filter that calls `filter`. If this fails, the `user` in `filter`
    /// still belongs to the caller.
    ///
    /// # Safety
    ///
    /// `filter` is null, or may be read and meets the requirements of `stratalloc_stream_filter`.
    pub(super) unsafe fn lend(
        filter: *const Self,
        open: impl FnOnce(ScopeFilter) -> Result<(), Failure>,
    ) -> Status {
        status(|| {
            // SAFETY: required of the caller (`# Safety`).
            let Self { accepts, release, user } = unsafe { read_struct(filter, "filter") }?;
            let accepts = accepts.ok_or_else(|| Failure::null("the filter's function"))?;
            UserData::to(user, release, |user_data| {
                let filter = move |stream: StreamId| {
                    // SAFETY: the caller's function, with the caller's pointer.
                    let call = |user| unsafe { accepts(user, stream_to(stream)) != 0 };
                    user_data.call(call).unwrap_or(false)
                };
                open(ScopeFilter::Where(Arc::new(filter)))
            })
        })
    }
}

/// A [`SegmentSource`] whose functions are all present.
#[derive(Debug)]
struct Segments {
    allocate: unsafe extern "C" fn(*mut c_void, u64, *mut c_void) -> *mut c_void,
    free: unsafe extern "C" fn(*mut c_void, *mut c_void, u64, *mut c_void),
    user_data: Arc<UserData>,
}

impl SegmentAllocator for Segments {
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64> {
        // SAFETY: the caller's function, with the caller's pointer.
        let call = |user| unsafe { (self.allocate)(user, size_bytes, stream_to(stream)) };
        let segment = self.user_data.call(call)?;
        (!segment.is_null()).then(|| segment.addr() as u64)
    }

    fn free(&self, address: u64, size_bytes: u64, stream: StreamId) {
        // This cannot fail, because the address was a pointer before.
        let Ok(segment) = pointer_to(address) else { return };
        // SAFETY: the caller's function, with the caller's pointers.
        let call = |user| unsafe { (self.free)(user, segment, size_bytes, stream_to(stream)) };
        let _ = self.user_data.call(call);
    }
}

fn options_of(options: u32) -> Result<PoolOptions, Failure> {
    if options & !(POOL_USE_ON_OOM | POOL_NO_SPLIT) != 0 {
        let text = format_args!("options {options:#x}: expected a sum of 1 and 2");
        return Err(Failure::invalid(text));
    }
    Ok(PoolOptions {
        use_on_oom: options & POOL_USE_ON_OOM != 0,
        no_split: options & POOL_NO_SPLIT != 0,
        ..PoolOptions::default()
    })
}

/// Creates a pool with one user, the caller, and stores its id. `options` is a sum of
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
    let work = || {
        let options = options_of(options)?;
        let id = PoolId::next_user();
        table::find(handle)?.pools()?.create_pool(id, options)?;
        Ok(id.into())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pool, "pool", work) }
}

/// Creates a pool with an id that the caller chooses and one user. If the pool exists, adds a user to
/// it. `options` and `source` apply only if the pool is created. `source` allocates the pool's
/// segments; null selects the device. If the pool existed and the call succeeds, the source's `user` is
/// released at once.
///
/// # Safety
///
/// `source` is null, or may be read and meets the requirements of `stratalloc_segment_source`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_pool_ensure(
    handle: u64,
    pool: Pool,
    options: u32,
    source: *const SegmentSource,
) -> Status {
    status(|| {
        let options = options_of(options)?;
        let instance = table::find(handle)?;
        if source.is_null() {
            return instance.ensure_pool(pool.into(), options);
        }
        // SAFETY: required of the caller (`# Safety`).
        let source = unsafe { source.read_unaligned() };
        let missing = || Failure::null("a function of the source");
        let allocate = source.allocate.ok_or_else(missing)?;
        let free = source.free.ok_or_else(missing)?;
        UserData::to(source.user, source.release, |user_data| {
            let allocator: Arc<dyn SegmentAllocator> =
                Arc::new(Segments { allocate, free, user_data });
            let options = PoolOptions { allocator: Some(allocator), ..options };
            instance.ensure_pool(pool.into(), options)
        })
    })
}

/// Changes the options of a pool that has users. `STRATALLOC_POOL_NO_SPLIT` can only be set before the
/// pool has served a request.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_set_options(handle: u64, pool: Pool, options: u32) -> Status {
    status(|| {
        let options = options_of(options)?;
        Ok(table::find(handle)?.pools()?.set_pool_options(pool.into(), &options)?)
    })
}

/// Stores the number of a pool's users. Stores 0 if the pool is unknown.
///
/// # Safety
///
/// `users` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_pool_users(handle: u64, pool: Pool, users: *mut u32) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        store(users, "users", || {
            Ok(table::find(handle)?.pools()?.pool_users(pool.into()).unwrap_or(0))
        })
    }
}

/// Writes the addresses of the pool's live blocks in ascending order, and stores their number in
/// `count`. If they do not fit in `room`, writes no address. If `room` is 0, stores only the number.
///
/// # Safety
///
/// `room` pointers from `addresses` may be written, unless it is null; `count` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_pool_live(
    handle: u64,
    pool: Pool,
    addresses: *mut *mut c_void,
    room: usize,
    count: *mut usize,
) -> Status {
    let live = || {
        if count.is_null() {
            return Err(Failure::null("count"));
        }
        let live = table::find(handle)?.pools()?.live_addresses(pool.into())?;
        live.into_iter().map(pointer_to).collect()
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { write_all(addresses, room, count, live) }
}

/// Releases the free memory of a pool without users to the device. First waits for the streams that
/// still use freed blocks of the pool. Does nothing for a pool with users.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_empty(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.empty_pool(pool.into())?))
}

/// Adds a user to a pool.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_retain(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.retain_pool(pool.into())?))
}

/// Removes a user from a pool. Without users, the pool serves no more requests, and its free memory is
/// released to the device as far as the driver allows. Memory of live blocks is released after they are
/// freed, the next time the allocator releases memory. Does nothing in a forked child, if the allocator is of
/// the parent.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_release(handle: u64, pool: Pool) -> Status {
    table::release_on(handle, |instance| {
        let pools = instance.pools()?;
        pools.release_pool(pool.into())?;
        // An error is ignored, because the user is removed in any case. Memory that could not be
        // released now is released later.
        let _ = pools.empty_pool(pool.into());
        Ok(())
    })
}

/// Routes the requests of the calling thread to a pool. The new scope takes precedence over all scopes
/// that are already open. A pool has at most one open scope, which counts as a user.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_open_thread(handle: u64, pool: Pool) -> Status {
    status(|| table::find(handle)?.open_scope(pool.into(), ScopeFilter::this_thread()))
}

/// Routes the requests of all threads on `stream` to a pool.
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

/// Routes the requests that a filter accepts to a pool.
///
/// # Safety
///
/// `filter` may be read and meets the requirements of `stratalloc_stream_filter`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_pool_scope_open_filter(
    handle: u64,
    pool: Pool,
    filter: *const StreamFilter,
) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        StreamFilter::lend(filter, |filter| table::find(handle)?.open_scope(pool.into(), filter))
    }
}

/// Closes the scope of a pool. May be called on any thread. If the driver fails, the scope is closed
/// all the same and its user removed. Does nothing in a forked child, if the allocator is of the parent.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_pool_scope_close(handle: u64, pool: Pool) -> Status {
    table::release_on(handle, |instance| Ok(close(instance.pools()?, pool.into())?))
}

/// Closes a scope and removes its user.
fn close(pools: &dyn PrivatePools, pool: PoolId) -> Result<(), PoolError> {
    let closed = pools.close_scope(pool);
    if closed.as_ref().is_err_and(|error| !error.ends_scope()) {
        return closed;
    }
    let released = match pools.release_pool(pool) {
        // The caller has already released the user of the scope.
        Err(PoolError::Released { .. } | PoolError::Unknown { .. }) => Ok(()),
        released => released,
    };
    closed.and(released)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use stratalloc::allocator::{DeviceAllocator, Request};
    use stratalloc::config::Config;
    use stratalloc::driver::{Capture, Driver};
    use stratalloc::error::DriverErrorKind;
    use stratalloc::registry::build;
    use stratalloc_sim::{FaultControl, FaultPlan, Faulty, Sim, SimOptions};

    /// Closing the scope of a capture calls the driver if a block that other streams use was freed
    /// during the capture. In this test that call fails.
    #[test]
    fn a_failed_close_of_a_scope_leaves_no_user() {
        for conf in
            ["backend:cudaMallocAsync", "backend:native,graph_capture_record_stream_reuse:True"]
        {
            let faulty = Arc::new(Faulty::new(Sim::new(SimOptions::default())));
            let driver = Arc::<Faulty<Sim>>::clone(&faulty) as Arc<dyn Driver>;
            let config = Config::parse(conf, &Default::default()).unwrap();
            let allocator = build(&config, driver, Default::default()).unwrap();
            let pools = allocator.control().private_pools.unwrap();
            let [own, other] = [(); 2].map(|()| faulty.create_stream().unwrap());
            let pool = PoolId::next_user();
            pools.create_pool(pool, PoolOptions::default()).unwrap();
            let block = allocator.allocate(Request::new(4096, own).in_pool(pool)).unwrap();
            allocator.control().cross_stream.unwrap().record_stream(&block, other).unwrap();
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
            assert_eq!(pools.pool_users(pool), Some(1), "{conf}: a second close removes no user");
        }
    }
}
