//! A type for each kind of id, so that a stream cannot be passed where a pool is expected.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The ordinal of a device, as the driver numbers devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

/// A stream: the driver's handle as a number. 0 is the default stream.
///
/// Where streams must be in an order, they are ordered by this number, as in PyTorch.
///
/// CUDA's per-thread default stream has the number 2, which names a different stream on each thread:
/// see [`Driver::is_per_thread_stream`](crate::driver::Driver::is_per_thread_stream). An allocator
/// takes this number to mean the calling thread's own stream. A free is therefore ordered only after
/// the work of the freeing thread. So free a block on the thread whose work used it last, or first make
/// that thread's stream wait for the work of the other threads. A caching allocator reuses the block on
/// another thread only after the work before the free has finished. An allocator over stream-ordered
/// pools frees it on the freeing thread's stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

impl StreamId {
    /// The default stream of a device.
    pub const DEFAULT: Self = Self(0);
}

/// An event: the driver's handle as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub u64);

/// A pool. (0, 0) is the default pool, (n, 0) is the pool of a graph capture, (0, n) is a user's pool.
///
/// Source: PyTorch's `MempoolId_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId {
    /// The number of a capture's pool, or 0.
    pub capture: u64,
    /// The number of a user's pool, or 0.
    pub user: u64,
}

impl PoolId {
    /// The pool of all requests that no scope routes to another pool.
    pub const DEFAULT: Self = Self { capture: 0, user: 0 };

    /// The id of heaps that belong to no pool yet.
    pub(crate) const NONE: Self = Self { capture: u64::MAX, user: u64::MAX };

    /// The first id of each kind that this process creates. PyTorch counts the ids of its pools from 1, and
    /// both kinds meet under PyTorch.
    const FIRST: u64 = 1 << 32;

    /// Returns an id for a user's pool that no other pool of this process has.
    #[must_use]
    pub fn next_user() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(PoolId::FIRST);
        Self { capture: 0, user: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Returns an id for a capture's pool that no other pool of this process has.
    #[must_use]
    pub fn next_capture() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(PoolId::FIRST);
        Self { capture: NEXT.fetch_add(1, Ordering::Relaxed), user: 0 }
    }
}

/// Identifies one allocator in this process. Frees are routed by it, and an allocator refuses a handle
/// with another id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)] // See `allocator::halves`.
pub struct OwnerId(u32);

static NEXT_OWNER: AtomicU32 = AtomicU32::new(1);

impl OwnerId {
    /// Returns a number that no other allocator of this process has.
    ///
    /// # Panics
    ///
    /// After 2^32 - 1 allocators. If a number were reused, one allocator could free blocks of another.
    #[must_use]
    pub fn next() -> Self {
        let after = |n: u32| n.checked_add(1);
        let taken = NEXT_OWNER.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after);
        Self(taken.expect("owner numbers are never reused"))
    }

    /// Returns the first of `count` consecutive numbers that no other allocator has. Returns `None`
    /// when half of all numbers are used, because the other half is kept for [`next`](Self::next).
    pub(crate) fn next_row(count: u32) -> Option<Self> {
        const END: u32 = u32::MAX / 2;
        let after = |n: u32| n.checked_add(count).filter(|after| *after <= END);
        NEXT_OWNER.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).ok().map(Self)
    }

    /// Returns the owner with a number that [`next_row`](Self::next_row) reserved.
    #[inline]
    pub(crate) const fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// Returns the number, for messages.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// Identifies a hook of an allocator. Needed to remove the hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HookId(pub u64);

impl HookId {
    /// Returns a number that no other hook of this process has.
    #[must_use]
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The number of a thread. No other thread of this process has it or had it.
///
/// Unlike [`std::thread::ThreadId`], it can be read until the very end of the thread, including in
/// destructors of C++ `thread_local`s and of pthread keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ThreadNumber(u64);

impl ThreadNumber {
    /// Returns the calling thread's number: 1, 2, .. in the order in which threads first call this
    /// function.
    #[inline]
    #[must_use]
    #[doc(hidden)]
    pub fn current() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static OWN: Cell<u64> = const { Cell::new(0) };
        }
        if OWN.get() == 0 {
            OWN.set(NEXT.fetch_add(1, Ordering::Relaxed));
        }
        Self(OWN.get())
    }

    /// Returns the low 32 bits. They are sufficient to order two entries with the same time.
    pub(crate) fn low_half(self) -> u32 {
        let [a, b, c, d, ..] = self.0.to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

impl fmt::Display for ThreadNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for StreamId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {})", self.capture, self.user)
    }
}
