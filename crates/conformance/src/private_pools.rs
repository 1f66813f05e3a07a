//! Tests private pools: memory of a pool serves no other request, an open scope routes the requests that its
//! filter accepts to its pool, and the pool ends with its last user.
//!
//! Checkpoints, segment allocators and captures are not tested.

use std::fmt;

use super::Checked;
use super::fixture::Fixture;
use super::report::Outcome;
use super::search::Broken;
use super::suite::Case;
use stratalloc::allocator::{
    Allocation, DeviceAllocator, PoolOptions, PrivatePools, Request, ScopeFilter,
};
use stratalloc::error::PoolError;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::MIB;

/// Sizes for each kind of block: small, large, and with a segment of its own.
const SIZES: [u64; 6] = [1, 512, 100_000, MIB, 3 * MIB, 12 * MIB];

impl Case<'_> {
    pub(super) fn private_pools(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.private_pools.is_some())? {
            return Ok(Outcome::NotTested { why: "it offers no private pools" });
        }
        self.once(|fixture| {
            let pool = PoolId::next_user();
            begins(fixture, pool)?;
            SIZES.into_iter().try_for_each(|bytes| keeps_apart(fixture, pool, bytes))?;
            routes_a_thread(fixture, pool)?;
            routes_a_stream(fixture, pool)?;
            routes_to_the_newest(fixture, pool)?;
            ends(fixture, pool)
        })?;
        Ok(Outcome::Passed { runs: 1 })
    }
}

/// A block and its requested bytes.
struct Kept {
    allocation: Allocation,
    bytes: u64,
}

impl Kept {
    fn meets(&self, start: u64, bytes: u64) -> bool {
        let own = self.allocation.address();
        own < start.saturating_add(bytes) && start < own.saturating_add(self.bytes)
    }
}

fn pools<'b>(fixture: &'b Fixture<'_>) -> Result<&'b dyn PrivatePools, String> {
    fixture
        .allocator
        .control()
        .private_pools
        .ok_or_else(|| "the allocator no longer offers private pools".to_owned())
}

/// Returns the result of a call that must succeed.
fn works<T>(
    fixture: &mut Fixture<'_>,
    what: &str,
    done: Result<T, PoolError>,
) -> Result<T, String> {
    fixture.lines.push(what.to_owned());
    done.map_err(|error| format!("to {what} was refused: {error}"))
}

/// Checks that a call is refused with the right error.
fn refused<T, E: fmt::Display>(
    fixture: &mut Fixture<'_>,
    what: &str,
    done: Result<T, E>,
    wanted: &PoolError,
) -> Checked {
    fixture.lines.push(format!("{what}, which must be refused"));
    match done {
        Ok(_) => Err(format!("to {what} was not refused")),
        Err(error) if error.to_string() == wanted.to_string() => Ok(()),
        Err(error) => Err(format!("to {what} was refused, but not with: {wanted}; but: {error}")),
    }
}

/// Allocates in a pool. With `None`, allocates wherever open scopes route the request.
fn take(
    fixture: &mut Fixture<'_>,
    pool: Option<PoolId>,
    bytes: u64,
    stream: StreamId,
) -> Result<Kept, String> {
    let request = Request::new(bytes, stream);
    let (request, from) = match pool {
        Some(pool) => (request.in_pool(pool), format!("in pool {pool}")),
        None => (request, format!("on stream {stream}")),
    };
    let answer = fixture.allocator.allocate(request);
    let allocation = answer.map_err(|error| format!("{bytes} bytes {from}: {error}"))?;
    let start = allocation.address();
    fixture.lines.push(format!("allocate {bytes} bytes {from}: a block at {start:#x}"));
    Ok(Kept { allocation, bytes })
}

fn give(fixture: &mut Fixture<'_>, kept: Kept) -> Checked {
    let start = kept.allocation.address();
    fixture.lines.push(format!("free the block at {start:#x}"));
    let freed = fixture.allocator.free(kept.allocation);
    freed.map_err(|refused| format!("the block at {start:#x} could not be freed: {refused}"))
}

/// Checks that the pool's live blocks are exactly these.
fn holds(fixture: &Fixture<'_>, pool: PoolId, blocks: &[&Kept]) -> Checked {
    let live = pools(fixture)?.live_addresses(pool).map_err(|error| error.to_string())?;
    let mut wanted: Vec<u64> = blocks.iter().map(|kept| kept.allocation.address()).collect();
    wanted.sort_unstable();
    if live == wanted {
        return Ok(());
    }
    Err(format!("pool {pool} lists its live blocks at {live:x?}; they are at {wanted:x?}"))
}

fn has_users(fixture: &Fixture<'_>, pool: PoolId, wanted: Option<u32>) -> Checked {
    let users = pools(fixture)?.pool_users(pool);
    if users == wanted {
        return Ok(());
    }
    Err(format!("pool {pool} should have {wanted:?} users and reports {users:?}"))
}

fn begins(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let done = pools(fixture)?.retain_pool(pool);
    refused(fixture, "use a pool that was never created", done, &PoolError::Unknown { pool })?;
    let done = pools(fixture)?.release_pool(pool);
    refused(fixture, "release it", done, &PoolError::Unknown { pool })?;
    let done = pools(fixture)?.empty_pool(pool);
    refused(fixture, "empty it", done, &PoolError::Unknown { pool })?;
    let done = pools(fixture)?.live_addresses(pool);
    refused(fixture, "list its live blocks", done, &PoolError::Unknown { pool })?;
    let done = fixture.allocator.allocate(Request::new(512, fixture.streams[0]).in_pool(pool));
    refused(fixture, "allocate in it", done, &PoolError::Unknown { pool })?;
    let done = pools(fixture)?.create_pool(PoolId::DEFAULT, PoolOptions::default());
    refused(fixture, "make the default pool", done, &PoolError::IsDefault)?;
    let done = pools(fixture)?.create_pool(pool, PoolOptions::default());
    works(fixture, "make a pool", done)?;
    let done = pools(fixture)?.create_pool(pool, PoolOptions::default());
    refused(fixture, "make it again", done, &PoolError::Taken { pool })?;
    has_users(fixture, pool, Some(1))
}

/// Checks that live blocks of the pool and other live blocks do not overlap, and that memory which the
/// pool keeps after a free serves no request outside the pool.
fn keeps_apart(fixture: &mut Fixture<'_>, pool: PoolId, bytes: u64) -> Checked {
    let stream = fixture.streams[0];
    let own = take(fixture, Some(pool), bytes, stream)?;
    let other = take(fixture, None, bytes, stream)?;
    holds(fixture, pool, &[&own])?;
    let (start, in_use) = (own.allocation.address(), other.allocation.address());
    if own.meets(in_use, bytes) {
        return Err(format!("{bytes} bytes at {start:#x} and at {in_use:#x} meet"));
    }
    let used = fixture.machine.used_bytes();
    give(fixture, own)?;
    holds(fixture, pool, &[])?;
    let keeps_it = used > 0 && fixture.machine.used_bytes() == used;
    let more = take(fixture, None, bytes, stream)?;
    if keeps_it && more.meets(start, bytes) {
        return Err(format!(
            "memory that pool {pool} keeps at {start:#x} was allocated outside it"
        ));
    }
    let again = take(fixture, Some(pool), bytes, stream)?;
    if [&other, &more].iter().any(|kept| kept.meets(again.allocation.address(), bytes)) {
        return Err(format!("a request in pool {pool} got a live block from outside it"));
    }
    holds(fixture, pool, &[&again])?;
    [other, more, again].into_iter().try_for_each(|kept| give(fixture, kept))
}

fn routes_a_thread(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let stream = fixture.streams[0];
    let done = pools(fixture)?.open_scope(pool, ScopeFilter::this_thread());
    works(fixture, "open a scope of this thread", done)?;
    let done = pools(fixture)?.open_scope(pool, ScopeFilter::Stream(stream));
    refused(fixture, "open a second scope of the pool", done, &PoolError::ScopeOpen { pool })?;
    let own = take(fixture, None, 4096, stream)?;
    holds(fixture, pool, &[&own])?;
    let theirs = take_elsewhere(fixture, stream)?;
    holds(fixture, pool, &[&own])?;
    [own, theirs].into_iter().try_for_each(|kept| give(fixture, kept))?;
    closes(fixture, pool)
}

/// Allocates a block on another thread.
fn take_elsewhere(fixture: &mut Fixture<'_>, stream: StreamId) -> Result<Kept, String> {
    fixture.lines.push(format!("another thread allocates 4096 bytes on stream {stream}"));
    let allocator = &fixture.allocator;
    let made = std::thread::scope(|scope| {
        scope.spawn(|| allocator.allocate(Request::new(4096, stream))).join()
    });
    let made = made.map_err(|_| "another thread's request panicked")?;
    let allocation = made.map_err(|error| format!("another thread's request: {error}"))?;
    Ok(Kept { allocation, bytes: 4096 })
}

fn routes_a_stream(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let (stream, other) = (fixture.streams[1], fixture.streams[0]);
    let done = pools(fixture)?.open_scope(pool, ScopeFilter::Stream(stream));
    works(fixture, "open a scope of a stream", done)?;
    let own = take_elsewhere(fixture, stream)?;
    let theirs = take(fixture, None, 4096, other)?;
    holds(fixture, pool, &[&own])?;
    [own, theirs].into_iter().try_for_each(|kept| give(fixture, kept))?;
    closes(fixture, pool)?;
    let theirs = take(fixture, None, 4096, stream)?;
    holds(fixture, pool, &[])?;
    give(fixture, theirs)
}

/// Checks that if two open scopes accept a request, the newer one serves it.
fn routes_to_the_newest(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let (stream, inner) = (fixture.streams[0], PoolId::next_user());
    let done = pools(fixture)?.create_pool(inner, PoolOptions::default());
    works(fixture, "make a second pool", done)?;
    let done = pools(fixture)?.open_scope(pool, ScopeFilter::Stream(stream));
    works(fixture, "open a scope of a stream", done)?;
    let done = pools(fixture)?.open_scope(inner, ScopeFilter::this_thread());
    works(fixture, "open a scope of this thread and the second pool", done)?;
    let newer = take(fixture, None, 4096, stream)?;
    holds(fixture, inner, &[&newer])?;
    closes(fixture, inner)?;
    let older = take(fixture, None, 4096, stream)?;
    holds(fixture, pool, &[&older])?;
    closes(fixture, pool)?;
    [newer, older].into_iter().try_for_each(|kept| give(fixture, kept))?;
    // The creation of a pool and each scope add a user. This releases both users of `inner`, and of `pool`
    // the user that this scope added.
    for used in [inner, inner, pool] {
        let done = pools(fixture)?.release_pool(used);
        works(fixture, &format!("release pool {used}"), done)?;
    }
    Ok(())
}

fn closes(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let done = pools(fixture)?.close_scope(pool);
    works(fixture, "close the scope", done)?;
    let done = pools(fixture)?.close_scope(pool);
    refused(fixture, "close it again", done, &PoolError::ScopeClosed { pool })
}

/// Checks the end of a pool with three users: its creator and two scopes.
fn ends(fixture: &mut Fixture<'_>, pool: PoolId) -> Checked {
    let stream = fixture.streams[0];
    let last = take(fixture, Some(pool), 3 * MIB, stream)?;
    for users in [2, 1, 0] {
        has_users(fixture, pool, Some(users + 1))?;
        let done = pools(fixture)?.release_pool(pool);
        works(fixture, "release the pool", done)?;
    }
    has_users(fixture, pool, Some(0))?;
    let done = pools(fixture)?.release_pool(pool);
    refused(fixture, "release a pool without users", done, &PoolError::Released { pool })?;
    let done = pools(fixture)?.retain_pool(pool);
    refused(fixture, "use a pool without users", done, &PoolError::Released { pool })?;
    let done = pools(fixture)?.open_scope(pool, ScopeFilter::this_thread());
    refused(fixture, "open a scope of a pool without users", done, &PoolError::Released { pool })?;
    let done = fixture.allocator.allocate(Request::new(512, stream).in_pool(pool));
    refused(fixture, "allocate in a pool without users", done, &PoolError::Released { pool })?;
    holds(fixture, pool, &[&last])?;
    give(fixture, last)?;
    fixture.finish_all()?;
    let Some(caching) = fixture.allocator.control().caching else {
        if pools(fixture)?.pool_users(pool).is_some() {
            let done = pools(fixture)?.empty_pool(pool);
            works(fixture, "empty the pool", done)?;
        }
        return has_users(fixture, pool, None);
    };
    caching.empty_cache().map_err(|error| format!("the cache could not be emptied: {error}"))?;
    fixture.lines.push("empty the cache".to_owned());
    has_users(fixture, pool, None)?;
    fixture.check_nothing_is_reserved()
}
