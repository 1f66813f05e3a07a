//! The per-thread caches of `front`: a few free blocks of each size, all of one stream.
//!
//! Each thread has one cache for each `Front`, so a hit needs no lock and no atomic read-modify-write. A
//! cache is valid while its `state` equals the state of its `Front`. So a change of the `Front`'s state
//! invalidates the caches of all threads. Each is emptied when its thread uses it next. No allocator is
//! called while the thread's caches are borrowed. Blocks that must be freed are returned to the caller
//! instead.
//!
//! The functions of a hit, except `class_by`, are inlined. Otherwise handles would be passed through memory
//! and cause a store-forwarding stall that takes longer than the rest of a hit.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::allocator::{Allocation, Request, Token};
use crate::ids::{OwnerId, StreamId};

/// The difference between neighbouring size classes.
pub(super) const STEP_BYTES: u64 = 512;
/// The most blocks of one size class.
const DEPTH: usize = 8;
/// The most bytes of one cache.
pub(super) const THREAD_MAX_BYTES: u64 = 4 << 20;

/// Returns the size class of a request.
#[inline]
pub(super) fn class_of(bytes: u64) -> u32 {
    // A request of zero bytes gets a class that no cache has.
    u32::try_from(bytes.wrapping_sub(1) / STEP_BYTES).unwrap_or(u32::MAX)
}

/// Returns the bytes requested from the allocator below for a size class.
#[inline]
pub(super) fn bytes_of(class: u32) -> u64 {
    (u64::from(class) + 1) * STEP_BYTES
}

/// A cached block: its address, and the token of its handle in the allocator below.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CachedBlock {
    pub(super) address: u64,
    pub(super) token: Token,
}

/// A block that is removed from a cache and must be freed.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictedBlock {
    pub(super) block: CachedBlock,
    pub(super) bytes: u64,
}

/// The callbacks of a cache to its `Front`.
pub(super) trait FrontCallbacks: fmt::Debug + Send + Sync {
    /// Frees blocks that were removed from a cache.
    fn free_blocks(&self, evicted: Vec<EvictedBlock>);
    /// Adds the counters of an ending thread to the totals.
    fn remember(&self, counts: &Counts);
}

/// The counters of one thread. Only that thread writes them; any thread reads them.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) frees: AtomicU64,
    /// Cached blocks that were freed in the allocator below.
    pub(super) returned: AtomicU64,
    pub(super) held_bytes: AtomicU64,
}

/// Adds to a counter that only this thread writes. Wraps around at 2^64, so negative numbers can be
/// added.
#[inline]
fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// Free blocks of one size class. The last freed one is on top.
#[derive(Clone, Copy, Debug)]
struct Bin {
    len: usize,
    blocks: [CachedBlock; DEPTH],
}

impl Bin {
    #[inline]
    fn keeps(&self, address: u64) -> bool {
        self.blocks.iter().take(self.len).any(|block| block.address == address)
    }
}

/// One thread's cache of one `Front`.
#[derive(Debug)]
pub(super) struct Cache {
    /// The state of the `Front` when this cache was last emptied. 0 for an unused cache: no `Front` has
    /// state 0.
    state: u64,
    stream: StreamId,
    /// A handle of this stream has the owner number `first_owner` plus its size class. So a free finds
    /// the class from the handle alone.
    first_owner: u32,
    /// The owner number and size class of the last block taken. A free of that block finds its class by
    /// a predicted branch, before the load of the handle has completed.
    last: (u32, usize),
    bins: Box<[Bin]>,
    counts: Arc<Counts>,
    front: Option<Weak<dyn FrontCallbacks>>,
}

impl Cache {
    fn unused() -> Self {
        Self {
            state: 0,
            stream: StreamId::DEFAULT,
            first_owner: 0,
            last: (0, usize::MAX),
            bins: Box::default(),
            counts: Arc::default(),
            front: None,
        }
    }

    fn new(classes: u32, counts: Arc<Counts>, front: Weak<dyn FrontCallbacks>) -> Self {
        let bin = Bin { len: 0, blocks: [CachedBlock::default(); DEPTH] };
        Self {
            bins: vec![bin; classes as usize].into(),
            counts,
            front: Some(front),
            ..Self::unused()
        }
    }

    #[inline(always)]
    fn is_in_force(&self, stream: StreamId, state: u64) -> bool {
        self.state == state && self.stream == stream
    }

    #[inline(always)]
    fn take(&mut self, request: Request, state: u64) -> Option<Allocation> {
        if !self.is_in_force(request.stream, state) {
            return None;
        }
        let class = class_of(request.bytes);
        let bin = self.bins.get_mut(class as usize)?;
        let top = bin.len.checked_sub(1)?;
        let block = *bin.blocks.get(top)?;
        bin.len = top;
        bump(&self.counts.hits, 1);
        bump(&self.counts.held_bytes, bytes_of(class).wrapping_neg());
        let owner = OwnerId::numbered(self.first_owner.wrapping_add(class));
        self.last = (owner.number(), class as usize);
        Some(Allocation::new(block.address, request.bytes, owner, block.token))
    }

    #[inline(always)]
    fn keep(&mut self, allocation: &Allocation, state: u64) -> bool {
        if self.state != state {
            return false;
        }
        let owner = allocation.owner().number();
        let class = if owner == self.last.0 { self.last.1 } else { self.class_by(owner) };
        let Some(bin) = self.bins.get_mut(class) else {
            return false;
        };
        let bytes = (class as u64 + 1) * STEP_BYTES;
        let held_bytes = self.counts.held_bytes.load(Ordering::Relaxed) + bytes;
        if bin.keeps(allocation.address()) {
            return false;
        }
        let Some(free) = bin.blocks.get_mut(bin.len).filter(|_| held_bytes <= THREAD_MAX_BYTES)
        else {
            return false;
        };
        *free = CachedBlock { address: allocation.address(), token: allocation.token() };
        bin.len += 1;
        bump(&self.counts.frees, 1);
        self.counts.held_bytes.store(held_bytes, Ordering::Relaxed);
        true
    }

    /// Returns the size class of an owner number. The result is out of range for owners of other caches.
    /// Not inlined, so that the compiler keeps the branch in `keep`. If inlined, both sides would be
    /// computed, and the result would wait for the load of the handle.
    #[inline(never)]
    fn class_by(&self, owner: u32) -> usize {
        owner.wrapping_sub(self.first_owner) as usize
    }

    /// Removes and returns all cached blocks.
    fn drain(&mut self) -> Vec<EvictedBlock> {
        let mut evicted = Vec::new();
        for (bytes, bin) in (1..).map(|n| n * STEP_BYTES).zip(&mut self.bins) {
            let kept = bin.blocks.iter().take(std::mem::take(&mut bin.len));
            evicted.extend(kept.map(|block| EvictedBlock { block: *block, bytes }));
        }
        bump(&self.counts.returned, evicted.len() as u64);
        self.counts.held_bytes.store(0, Ordering::Relaxed);
        evicted
    }

    fn is_of(&self, front: u64) -> bool {
        self.state >> 32 == front >> 32
    }
}

impl Drop for Cache {
    /// Runs when the thread ends, or when a new `Front` reuses the index of a dropped one. If the
    /// cache's own `Front` was dropped, its blocks were dropped with the allocator below.
    fn drop(&mut self) {
        if let Some(front) = self.front.as_ref().and_then(Weak::upgrade) {
            let evicted = self.drain();
            front.remember(&self.counts);
            front.free_blocks(evicted);
        }
    }
}

thread_local! {
    /// The caches of this thread. The index is that of the `Front`.
    static LOCAL: RefCell<Vec<Cache>> = const { RefCell::new(Vec::new()) };
}

/// Leaks this thread's caches after a fork: the child must not call the allocators of the parent.
pub fn forget_all() {
    let _ = LOCAL.try_with(|caches| {
        if let Ok(mut caches) = caches.try_borrow_mut() {
            std::mem::forget(std::mem::take(&mut *caches));
        }
    });
}

/// Calls `act` with this thread's cache number `index`. Returns `None` if there is no such cache, the
/// thread is ending, or `act` returns `None`.
#[inline(always)]
fn with<T>(index: usize, act: impl FnOnce(&mut Cache) -> Option<T>) -> Option<T> {
    let found = LOCAL.try_with(|caches| {
        let mut caches = caches.try_borrow_mut().ok()?;
        act(caches.get_mut(index)?)
    });
    found.ok().flatten()
}

/// Returns a cached block for the request, if this thread has one.
#[inline(always)]
pub(super) fn take(index: usize, request: Request, state: u64) -> Option<Allocation> {
    with(index, |cache| cache.take(request, state))
}

/// Caches a block if this thread's cache is valid and has room. Returns true if it did; the caller's handle
/// is then invalid.
#[inline(always)]
pub(super) fn keep(index: usize, allocation: &Allocation, state: u64) -> bool {
    with(index, |cache| cache.keep(allocation, state).then_some(())).is_some()
}

/// Returns true if this thread caches the block. A free with `allocation` is then a double free.
pub(super) fn keeps(index: usize, allocation: &Allocation, state: u64) -> bool {
    with(index, |cache| {
        let class = cache.class_by(allocation.owner().number());
        let bin = cache.bins.get(class).filter(|_| cache.state == state)?;
        bin.keeps(allocation.address()).then_some(())
    })
    .is_some()
}

/// Counts a miss and returns the first owner number, if this thread's cache is valid for `stream`.
pub(super) fn missed(index: usize, stream: StreamId, state: u64) -> Option<u32> {
    with(index, |cache| {
        cache.is_in_force(stream, state).then(|| bump(&cache.counts.misses, 1))?;
        Some(cache.first_owner)
    })
}

/// Returns true if this thread's cache is valid for `stream`.
pub(super) fn is_in_force(index: usize, stream: StreamId, state: u64) -> bool {
    with(index, |cache| cache.is_in_force(stream, state).then_some(())).is_some()
}

/// The result of [`put_in_force`]: the blocks that the cache held, which the caller must free, and the
/// replaced cache (unused, or of a dropped `Front` with the same index), which the caller must drop. Both
/// must happen while no cache is borrowed.
pub(super) type Out = (Vec<EvictedBlock>, Option<Cache>);

/// Empties this thread's cache and binds it to `stream` and `state`. Returns `None` if the thread is
/// ending.
pub(super) fn put_in_force(
    index: usize,
    state: u64,
    stream: StreamId,
    first_owner: u32,
    make: impl FnOnce() -> (u32, Arc<Counts>, Weak<dyn FrontCallbacks>),
) -> Option<Out> {
    let put = LOCAL.try_with(|caches| {
        let mut caches = caches.try_borrow_mut().ok()?;
        if caches.len() <= index {
            caches.resize_with(index + 1, Cache::unused);
        }
        let cache = caches.get_mut(index)?;
        let out = if cache.is_of(state) {
            (cache.drain(), None)
        } else {
            let (classes, counts, front) = make();
            (Vec::new(), Some(std::mem::replace(cache, Cache::new(classes, counts, front))))
        };
        (cache.state, cache.stream, cache.first_owner) = (state, stream, first_owner);
        cache.last = (first_owner, 0);
        Some(out)
    });
    put.ok().flatten()
}

/// Removes and returns this thread's cached blocks of the `Front` with this state.
pub(super) fn drain(index: usize, state: u64) -> Vec<EvictedBlock> {
    with(index, |cache| cache.is_of(state).then(|| cache.drain())).unwrap_or_default()
}

/// Returns this thread's counters for the `Front` with this state.
pub(super) fn counts(index: usize, state: u64) -> Option<Arc<Counts>> {
    with(index, |cache| cache.is_of(state).then(|| Arc::clone(&cache.counts)))
}
