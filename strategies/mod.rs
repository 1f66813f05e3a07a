//! The strategies: the values of `backend:`. Each has a folder; no strategy imports another.
//!
//! | name | folder | memory | when to use |
//! |---|---|---|---|
//! | `native` | `native/` | fixed segments, cached per stream | the default: PyTorch's decisions, at a fraction of the cost |
//! | `native` with `expandable_segments:True` | `native/` | one growing range per stream and kind | sizes vary, or memory is short |
//! | `cudaMallocAsync` | `malloc_async/` | the driver's stream-ordered pools | memory is shared with other libraries that use those pools |
//! | `pluggable` | `pluggable/` | your own functions, from a shared library or as closures | to bring an allocator that was written for PyTorch |
//! | `cpu` | `cpu/` | the host's own, cached by exact size | programs on the host that ask for the same sizes again and again |
//! | `pinned` | `pinned/` | page-locked host memory, cached by size | buffers for copies from and to the device |
//! | any other | yours | yours | registered with [`registry`](crate::registry) |
//!
//! [`Strategy`] dispatches statically to the built-in strategies; user-defined ones are boxed. Only the
//! engine's hit path is inlined there: inlining the others would slow it down.
//!
//! `scopes` (routing of requests), `event_queue`, `live_blocks`, `limit`, `allocator/hooks`,
//! `driver::open_to_peer` and `stats::PerPool` are shared by the strategies. `malloc_async` and
//! `pluggable` have no common core although both pass requests through. `malloc_async` passes a free to
//! the driver at once, in stream order or as a leaf node of a graph. `pluggable` waits for events, keeps
//! free blocks for its private pools, and may forward scopes to the user's functions.

mod cpu;
mod malloc_async;
pub mod native;
mod pinned;
mod pluggable;

use enum_dispatch::enum_dispatch;

use crate::allocator::{Allocation, Caching, Control, DeviceAllocator, Request};
use crate::error::{AllocError, FreeError, HandleError};
use crate::ids::StreamId;
use crate::layers::front::Front;
use crate::stats::Usage;

pub use cpu::{
    Clock, CpuAllocator, CpuBuffer, CpuCachingGuard, current, with_cpu_caching_allocator,
};
pub use malloc_async::MallocAsyncAllocator;
pub use native::Engine;
pub use pinned::PinnedAllocator;
pub use pluggable::{PluggableAllocator, plugin};

/// An allocator chosen at run time.
#[enum_dispatch(DeviceAllocator)]
#[non_exhaustive]
#[derive(Debug)]
pub enum Strategy {
    /// `backend:native`, with fixed or expandable segments. Boxed, because its tables are large and a
    /// `Strategy` is moved.
    Native(Box<Engine>),
    /// `backend:cudaMallocAsync`.
    MallocAsync(Box<MallocAsyncAllocator>),
    /// `backend:pluggable`.
    Pluggable(Box<PluggableAllocator>),
    /// `backend:cpu`.
    Cpu(CpuAllocator),
    /// `backend:pinned`.
    Pinned(PinnedAllocator),
    /// A strategy that a user registered, or any strategy with layers.
    User(Box<dyn DeviceAllocator>),
    /// Any of these with `front` as the outermost layer. A variant of its own, so that its hits are
    /// called statically.
    Fronted(Front<Box<dyn DeviceAllocator>>),
}

/// The error for a cache operation on a strategy without a cache.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("backend:{name} has no cache to control")]
pub struct NoCache {
    /// The strategy.
    pub name: String,
}

impl Strategy {
    /// Returns control over cached memory.
    ///
    /// # Errors
    ///
    /// [`NoCache`] when the strategy has no cache.
    pub fn caching_or_refuse(&self) -> Result<&dyn Caching, NoCache> {
        self.control().caching.ok_or_else(|| NoCache { name: self.name().to_owned() })
    }

    /// Returns the allocator itself, for layers: calls without the enum save one jump.
    pub(crate) fn into_box(self) -> Box<dyn DeviceAllocator> {
        match self {
            Self::Native(own) => own,
            Self::MallocAsync(own) => own,
            Self::Pluggable(own) => own,
            Self::Cpu(own) => Box::new(own),
            Self::Pinned(own) => Box::new(own),
            Self::User(own) => own,
            Self::Fronted(own) => Box::new(own),
        }
    }

    /// Returns the engine behind the strategy, if it has one.
    #[must_use]
    pub fn engine(&self) -> Option<&Engine> {
        match self {
            Self::Native(engine) => Some(engine),
            _ => None,
        }
    }
}
