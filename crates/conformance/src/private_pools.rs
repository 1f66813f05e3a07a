//! Private pools: memory of a pool serves no other request, scopes route requests by their filter, and
//! the pool ends with its last user.
//!
//! Checkpoints, segment allocators and captures are not tested.

use std::fmt;

use super::Checked;
use super::bed::Bed;
use super::report::Outcome;
use super::search::Broken;
use super::suite::Case;
use stratalloc::allocator::{
    Allocation, DeviceAllocator, PoolOptions, PrivatePools, Request, ScopeFilter,
};
use stratalloc::error::PoolError;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::MIB;

/// One of each kind of block: small, large, and with a segment of its own.
const SIZES: [u64; 6] = [1, 512, 100_000, MIB, 3 * MIB, 12 * MIB];

impl Case<'_> {
    pub(super) fn private_pools(&self) -> Result<Outcome, Broken> {
        if !self.asks(|allocator| allocator.control().private_pools.is_some())? {
            return Ok(Outcome::NotTested { why: "it offers no private pools" });
        }
        self.once(&|bed| {
            let pool = PoolId::next_user();
            begins(bed, pool)?;
            SIZES.into_iter().try_for_each(|bytes| keeps_apart(bed, pool, bytes))?;
            routes_a_thread(bed, pool)?;
            routes_a_stream(bed, pool)?;
            routes_to_the_newest(bed, pool)?;
            ends(bed, pool)
        })?;
        Ok(Outcome::Held { runs: 1 })
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

fn pools<'b>(bed: &'b Bed<'_>) -> Result<&'b dyn PrivatePools, String> {
    bed.allocator.control().private_pools.ok_or_else(|| "the private pools have gone".to_owned())
}

/// Returns the result of a call that must succeed.
fn works<T>(bed: &mut Bed<'_>, what: &str, done: Result<T, PoolError>) -> Result<T, String> {
    bed.lines.push(what.to_owned());
    done.map_err(|error| format!("to {what} was refused: {error}"))
}

/// Checks that a call is refused with the right error.
fn refused<T, E: fmt::Display>(
    bed: &mut Bed<'_>,
    what: &str,
    done: Result<T, E>,
    wanted: &PoolError,
) -> Checked {
    bed.lines.push(format!("{what}, which must be refused"));
    match done {
        Ok(_) => Err(format!("to {what} was not refused")),
        Err(error) if error.to_string() == wanted.to_string() => Ok(()),
        Err(error) => Err(format!("to {what} was refused, but not with: {wanted}; but: {error}")),
    }
}

/// Allocates in a pool, or with `None` wherever the request is routed.
fn take(
    bed: &mut Bed<'_>,
    pool: Option<PoolId>,
    bytes: u64,
    stream: StreamId,
) -> Result<Kept, String> {
    let request = Request::new(bytes, stream);
    let (request, whose) = match pool {
        Some(pool) => (request.in_pool(pool), format!("in pool {pool}")),
        None => (request, format!("on stream {stream}")),
    };
    let answer = bed.allocator.allocate(request);
    let allocation = answer.map_err(|error| format!("{bytes} bytes {whose}: {error}"))?;
    let start = allocation.address();
    bed.lines.push(format!("allocate {bytes} bytes {whose}: a block at {start:#x}"));
    Ok(Kept { allocation, bytes })
}

fn give(bed: &mut Bed<'_>, kept: Kept) -> Checked {
    let start = kept.allocation.address();
    bed.lines.push(format!("free the block at {start:#x}"));
    let freed = bed.allocator.free(kept.allocation);
    freed.map_err(|refused| format!("the block at {start:#x} could not be freed: {refused}"))
}

/// Checks that the pool's live blocks are exactly these.
fn holds(bed: &Bed<'_>, pool: PoolId, blocks: &[&Kept]) -> Checked {
    let live = pools(bed)?.live_addresses(pool).map_err(|error| error.to_string())?;
    let mut wanted: Vec<u64> = blocks.iter().map(|kept| kept.allocation.address()).collect();
    wanted.sort_unstable();
    if live == wanted {
        return Ok(());
    }
    Err(format!("pool {pool} says that its live blocks are at {live:x?}; they are at {wanted:x?}"))
}

fn has_users(bed: &Bed<'_>, pool: PoolId, wanted: Option<u32>) -> Checked {
    let users = pools(bed)?.pool_users(pool);
    if users == wanted {
        return Ok(());
    }
    Err(format!("pool {pool} should have {wanted:?} users and says {users:?}"))
}

fn begins(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let done = pools(bed)?.retain_pool(pool);
    refused(bed, "use a pool that nobody made", done, &PoolError::Unknown { pool })?;
    let done = pools(bed)?.release_pool(pool);
    refused(bed, "release it", done, &PoolError::Unknown { pool })?;
    let done = pools(bed)?.empty_pool(pool);
    refused(bed, "empty it", done, &PoolError::Unknown { pool })?;
    let done = pools(bed)?.live_addresses(pool);
    refused(bed, "list its live blocks", done, &PoolError::Unknown { pool })?;
    let done = bed.allocator.allocate(Request::new(512, bed.streams[0]).in_pool(pool));
    refused(bed, "allocate in it", done, &PoolError::Unknown { pool })?;
    let done = pools(bed)?.create_pool(PoolId::DEFAULT, PoolOptions::default());
    refused(bed, "make the default pool", done, &PoolError::IsDefault)?;
    let done = pools(bed)?.create_pool(pool, PoolOptions::default());
    works(bed, "make a pool", done)?;
    let done = pools(bed)?.create_pool(pool, PoolOptions::default());
    refused(bed, "make it again", done, &PoolError::Taken { pool })?;
    has_users(bed, pool, Some(1))
}

/// Checks that blocks of the pool and other blocks never overlap, also after frees.
fn keeps_apart(bed: &mut Bed<'_>, pool: PoolId, bytes: u64) -> Checked {
    let stream = bed.streams[0];
    let own = take(bed, Some(pool), bytes, stream)?;
    let other = take(bed, None, bytes, stream)?;
    holds(bed, pool, &[&own])?;
    let (start, in_use) = (own.allocation.address(), other.allocation.address());
    if own.meets(in_use, bytes) {
        return Err(format!("{bytes} bytes at {start:#x} and at {in_use:#x} meet"));
    }
    let used = bed.machine.used_bytes();
    give(bed, own)?;
    holds(bed, pool, &[])?;
    let keeps_it = used > 0 && bed.machine.used_bytes() == used;
    let more = take(bed, None, bytes, stream)?;
    if keeps_it && more.meets(start, bytes) {
        return Err(format!("what pool {pool} keeps at {start:#x} was given to somebody else"));
    }
    let again = take(bed, Some(pool), bytes, stream)?;
    if [&other, &more].iter().any(|kept| kept.meets(again.allocation.address(), bytes)) {
        return Err(format!("pool {pool} handed out somebody else's block"));
    }
    holds(bed, pool, &[&again])?;
    [other, more, again].into_iter().try_for_each(|kept| give(bed, kept))
}

fn routes_a_thread(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let stream = bed.streams[0];
    let done = pools(bed)?.open_scope(pool, ScopeFilter::this_thread());
    works(bed, "open a scope of this thread", done)?;
    let done = pools(bed)?.open_scope(pool, ScopeFilter::Stream(stream));
    refused(bed, "open a second scope of the pool", done, &PoolError::ScopeOpen { pool })?;
    let own = take(bed, None, 4096, stream)?;
    holds(bed, pool, &[&own])?;
    let theirs = take_elsewhere(bed, stream)?;
    holds(bed, pool, &[&own])?;
    [own, theirs].into_iter().try_for_each(|kept| give(bed, kept))?;
    closes(bed, pool)
}

/// Allocates a block on another thread.
fn take_elsewhere(bed: &mut Bed<'_>, stream: StreamId) -> Result<Kept, String> {
    bed.lines.push(format!("another thread allocates 4096 bytes on stream {stream}"));
    let allocator = &bed.allocator;
    let made = std::thread::scope(|scope| {
        scope.spawn(|| allocator.allocate(Request::new(4096, stream))).join()
    });
    let made = made.map_err(|_| "another thread's request panicked")?;
    let allocation = made.map_err(|error| format!("another thread's request: {error}"))?;
    Ok(Kept { allocation, bytes: 4096 })
}

fn routes_a_stream(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let (stream, other) = (bed.streams[1], bed.streams[0]);
    let done = pools(bed)?.open_scope(pool, ScopeFilter::Stream(stream));
    works(bed, "open a scope of a stream", done)?;
    let own = take_elsewhere(bed, stream)?;
    let theirs = take(bed, None, 4096, other)?;
    holds(bed, pool, &[&own])?;
    [own, theirs].into_iter().try_for_each(|kept| give(bed, kept))?;
    closes(bed, pool)?;
    let theirs = take(bed, None, 4096, stream)?;
    holds(bed, pool, &[])?;
    give(bed, theirs)
}

/// Checks that of two open scopes which accept a request the newer one serves it.
fn routes_to_the_newest(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let (stream, inner) = (bed.streams[0], PoolId::next_user());
    let done = pools(bed)?.create_pool(inner, PoolOptions::default());
    works(bed, "make a second pool", done)?;
    let done = pools(bed)?.open_scope(pool, ScopeFilter::Stream(stream));
    works(bed, "open a scope of a stream", done)?;
    let done = pools(bed)?.open_scope(inner, ScopeFilter::this_thread());
    works(bed, "open a scope of this thread and the second pool", done)?;
    let newer = take(bed, None, 4096, stream)?;
    holds(bed, inner, &[&newer])?;
    closes(bed, inner)?;
    let older = take(bed, None, 4096, stream)?;
    holds(bed, pool, &[&older])?;
    closes(bed, pool)?;
    [newer, older].into_iter().try_for_each(|kept| give(bed, kept))?;
    // The second pool has two users, its creator and its scope; the first pool has one more for its
    // scope.
    for used in [inner, inner, pool] {
        let done = pools(bed)?.release_pool(used);
        works(bed, &format!("release pool {used}"), done)?;
    }
    Ok(())
}

fn closes(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let done = pools(bed)?.close_scope(pool);
    works(bed, "close the scope", done)?;
    let done = pools(bed)?.close_scope(pool);
    refused(bed, "close it again", done, &PoolError::ScopeClosed { pool })
}

/// Checks the end of a pool with three users: its creator and two scopes.
fn ends(bed: &mut Bed<'_>, pool: PoolId) -> Checked {
    let stream = bed.streams[0];
    let last = take(bed, Some(pool), 3 * MIB, stream)?;
    for users in [2, 1, 0] {
        has_users(bed, pool, Some(users + 1))?;
        let done = pools(bed)?.release_pool(pool);
        works(bed, "release the pool", done)?;
    }
    has_users(bed, pool, Some(0))?;
    let done = pools(bed)?.release_pool(pool);
    refused(bed, "release a pool without users", done, &PoolError::Released { pool })?;
    let done = pools(bed)?.retain_pool(pool);
    refused(bed, "use a pool without users", done, &PoolError::Released { pool })?;
    let done = pools(bed)?.open_scope(pool, ScopeFilter::this_thread());
    refused(bed, "open a scope of a pool without users", done, &PoolError::Released { pool })?;
    let done = bed.allocator.allocate(Request::new(512, stream).in_pool(pool));
    refused(bed, "allocate in a pool without users", done, &PoolError::Released { pool })?;
    holds(bed, pool, &[&last])?;
    give(bed, last)?;
    bed.finish_all()?;
    let Some(caching) = bed.allocator.control().caching else {
        if pools(bed)?.pool_users(pool).is_some() {
            let done = pools(bed)?.empty_pool(pool);
            works(bed, "empty the pool", done)?;
        }
        return has_users(bed, pool, None);
    };
    caching.empty_cache().map_err(|error| format!("the cache could not be emptied: {error}"))?;
    bed.lines.push("empty the cache".to_owned());
    has_users(bed, pool, None)?;
    match bed.reserved_bytes() {
        0 => Ok(()),
        left => Err(format!("nothing is live and the cache is empty; {left} bytes are reserved")),
    }
}
