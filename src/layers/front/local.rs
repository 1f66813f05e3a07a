//! What one thread keeps: a few free blocks of each size, of one stream, for each allocator that wears a
//! `front`.
//!
//! A cache is its thread's alone, so a hit takes no lock and no atomic read-modify-write. It is valid
//! while its `state` equals the front's; whoever wants it emptied changes the front's. Nothing here calls
//! an allocator while the thread's caches are borrowed: what has to go is handed to the caller.
//!
//! What a hit takes is always inlined: a handle that is written to memory in pieces and read back as a
//! whole makes a processor wait longer than all the rest takes.

use std::cell::RefCell;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::allocator::{Allocation, Request, Token};
use crate::ids::{OwnerId, StreamId};

/// Sizes are kept apart in steps of this.
pub(super) const STEP_BYTES: u64 = 512;
/// The most blocks of one size.
const DEPTH: usize = 8;
/// The most bytes of one cache.
pub(super) const THREAD_MAX_BYTES: u64 = 4 << 20;

/// The number of a request's size.
#[inline]
pub(super) fn class_of(bytes: u64) -> u32 {
    // Zero bytes become a class that no cache has.
    u32::try_from(bytes.wrapping_sub(1) / STEP_BYTES).unwrap_or(u32::MAX)
}

/// What the allocator below is asked for on behalf of requests of a class.
#[inline]
pub(super) fn bytes_of(class: u32) -> u64 {
    (u64::from(class) + 1) * STEP_BYTES
}

/// A block that waits, as the allocator below knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) address: u64,
    pub(super) token: Token,
}

/// A block on its way back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leaving {
    pub(super) held: Held,
    pub(super) bytes: u64,
}

/// Where blocks go when their thread ends.
pub(super) trait Home: fmt::Debug + Send + Sync {
    /// Frees them.
    fn take_back(&self, leaving: Vec<Leaving>);
    /// Adds up what the thread counted.
    fn remember(&self, counts: &Counts);
}

/// What a thread counts. Written by it alone, read by anybody.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) frees: AtomicU64,
    /// Of the blocks that were kept, those that went back below.
    pub(super) returned: AtomicU64,
    pub(super) held_bytes: AtomicU64,
}

/// Adds to a counter that only this thread writes, modulo 2^64.
#[inline]
fn bump(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// Free blocks of one size, the last freed on top.
#[derive(Clone, Copy, Debug)]
struct Bin {
    len: usize,
    blocks: [Held; DEPTH],
}

impl Bin {
    #[inline]
    fn keeps(&self, address: u64) -> bool {
        self.blocks.iter().take(self.len).any(|held| held.address == address)
    }
}

/// One thread's blocks of one allocator.
#[derive(Debug)]
pub(super) struct Cache {
    /// The front's when this was last emptied; 0 is no front's.
    state: u64,
    stream: StreamId,
    /// Handles of the front's blocks on this stream carry this number plus that of their size as their
    /// owner: a free finds its place by it alone.
    first_owner: u32,
    /// The owner number of the last block taken, and the number of its size: a free of a block that was
    /// just taken is guessed to be of that size, so that its place is known before the handle, which is
    /// on its way through memory, can be read.
    last: (u32, usize),
    bins: Box<[Bin]>,
    counts: Arc<Counts>,
    home: Option<Weak<dyn Home>>,
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
            home: None,
        }
    }

    fn new(classes: u32, counts: Arc<Counts>, home: Weak<dyn Home>) -> Self {
        let bin = Bin { len: 0, blocks: [Held::default(); DEPTH] };
        Self {
            bins: vec![bin; classes as usize].into(),
            counts,
            home: Some(home),
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
        let held = *bin.blocks.get(top)?;
        bin.len = top;
        bump(&self.counts.hits, 1);
        bump(&self.counts.held_bytes, bytes_of(class).wrapping_neg());
        let owner = OwnerId::numbered(self.first_owner.wrapping_add(class));
        self.last = (owner.number(), class as usize);
        Some(Allocation::new(held.address, request.bytes, owner, held.token))
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
        let held = self.counts.held_bytes.load(Ordering::Relaxed) + bytes;
        if bin.keeps(allocation.address()) {
            return false;
        }
        let Some(place) = bin.blocks.get_mut(bin.len).filter(|_| held <= THREAD_MAX_BYTES) else {
            return false;
        };
        *place = Held { address: allocation.address(), token: allocation.token() };
        bin.len += 1;
        bump(&self.counts.frees, 1);
        self.counts.held_bytes.store(held, Ordering::Relaxed);
        true
    }

    /// The number of a size by an owner number. Those of other owners are no size's. A call, so that the
    /// choice above is a branch, which can be guessed, and no arithmetic, which waits.
    #[inline(never)]
    fn class_by(&self, owner: u32) -> usize {
        owner.wrapping_sub(self.first_owner) as usize
    }

    /// Everything that is kept.
    fn drain(&mut self) -> Vec<Leaving> {
        let mut leaving = Vec::new();
        for (bytes, bin) in (1..).map(|n| n * STEP_BYTES).zip(&mut self.bins) {
            let kept = bin.blocks.iter().take(std::mem::take(&mut bin.len));
            leaving.extend(kept.map(|held| Leaving { held: *held, bytes }));
        }
        bump(&self.counts.returned, leaving.len() as u64);
        self.counts.held_bytes.store(0, Ordering::Relaxed);
        leaving
    }

    fn is_of(&self, front: u64) -> bool {
        self.state >> 32 == front >> 32
    }
}

impl Drop for Cache {
    /// The thread ends, or another front has the place of one that has gone. If the front is gone, the
    /// blocks went with the allocator below.
    fn drop(&mut self) {
        if let Some(home) = self.home.as_ref().and_then(Weak::upgrade) {
            let leaving = self.drain();
            home.remember(&self.counts);
            home.take_back(leaving);
        }
    }
}

thread_local! {
    /// The caches of this thread, each at the place of its front.
    static LOCAL: RefCell<Vec<Cache>> = const { RefCell::new(Vec::new()) };
}

/// Forgets what this thread keeps, after a fork: nobody may ask the fronts of the parent for anything.
#[cfg(feature = "ffi")]
pub(crate) fn forget_all() {
    let _ = LOCAL.try_with(|caches| {
        if let Ok(mut caches) = caches.try_borrow_mut() {
            std::mem::forget(std::mem::take(&mut *caches));
        }
    });
}

/// Does something with this thread's cache number `index`; `None` when there is none, or the thread ends.
#[inline(always)]
fn with<T>(index: usize, act: impl FnOnce(&mut Cache) -> Option<T>) -> Option<T> {
    let found = LOCAL.try_with(|caches| {
        let mut caches = caches.try_borrow_mut().ok()?;
        act(caches.get_mut(index)?)
    });
    found.ok().flatten()
}

/// A block for the request, if this thread keeps one.
#[inline(always)]
pub(super) fn take(index: usize, request: Request, state: u64) -> Option<Allocation> {
    with(index, |cache| cache.take(request, state))
}

/// Keeps a block, if there is room for it. The handle is then used up.
#[inline(always)]
pub(super) fn keep(index: usize, allocation: &Allocation, state: u64) -> bool {
    with(index, |cache| cache.keep(allocation, state).then_some(())).is_some()
}

/// Whether this thread keeps the very block: its handle was used before.
pub(super) fn keeps(index: usize, allocation: &Allocation, state: u64) -> bool {
    with(index, |cache| {
        let class = cache.class_by(allocation.owner().number());
        let bin = cache.bins.get(class).filter(|_| cache.state == state)?;
        bin.keeps(allocation.address()).then_some(())
    })
    .is_some()
}

/// Counts a miss if this thread's cache is in force for `stream`. Its first owner number if so.
pub(super) fn missed(index: usize, stream: StreamId, state: u64) -> Option<u32> {
    with(index, |cache| {
        cache.is_in_force(stream, state).then(|| bump(&cache.counts.misses, 1))?;
        Some(cache.first_owner)
    })
}

/// Whether this thread's cache is in force for `stream`.
pub(super) fn is_in_force(index: usize, stream: StreamId, state: u64) -> bool {
    with(index, |cache| cache.is_in_force(stream, state).then_some(())).is_some()
}

/// What [`put_in_force`] takes out, once nothing is borrowed: blocks of the same front, to be given back, or
/// the cache of a front that has gone, to be dropped.
pub(super) type Out = (Vec<Leaving>, Option<Cache>);

/// Makes this thread's cache one of `stream`, empty; `None` when the thread ends.
pub(super) fn put_in_force(
    index: usize,
    state: u64,
    stream: StreamId,
    first_owner: u32,
    make: impl FnOnce() -> (u32, Arc<Counts>, Weak<dyn Home>),
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
            let (classes, counts, home) = make();
            (Vec::new(), Some(std::mem::replace(cache, Cache::new(classes, counts, home))))
        };
        (cache.state, cache.stream, cache.first_owner) = (state, stream, first_owner);
        cache.last = (first_owner, 0);
        Some(out)
    });
    put.ok().flatten()
}

/// Takes out what this thread keeps of the front with this state.
pub(super) fn drain(index: usize, state: u64) -> Vec<Leaving> {
    with(index, |cache| cache.is_of(state).then(|| cache.drain())).unwrap_or_default()
}

/// What this thread counted for the front with this state.
pub(super) fn counts(index: usize, state: u64) -> Option<Arc<Counts>> {
    with(index, |cache| cache.is_of(state).then(|| Arc::clone(&cache.counts)))
}
