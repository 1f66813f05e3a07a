//! The strategies: what a user can name in `backend:`. A folder each; no strategy imports another.
//!
//! | name | folder | memory | when to use |
//! |---|---|---|---|
//! | `native` | `native/` | fixed segments, cached per stream | the default: PyTorch's decisions, at a fraction of the cost |
//! | `native` with `expandable_segments:True` | `native/` | one growing range per stream and kind | sizes vary, or memory is short |
//! | `cudaMallocAsync` | `malloc_async/` | the driver's stream-ordered pools | memory is shared with other libraries that use those pools |
//! | `pluggable` | `pluggable/` | your own functions, from a shared library or as closures | to bring an allocator that was written for PyTorch |
//! | `cpu` | `cpu/` | the host's own, cached by exact size | programs on the host that ask for the same sizes again and again |
//! | any other | yours | yours | registered with [`registry`](crate::registry) |
//!
//! [`Strategy`] dispatches statically to the built-in ones; user-defined ones ride in a box. Only the
//! engine's hit is inlined there: what the others would save for themselves it would pay.

mod cpu;
mod malloc_async;
pub mod native;
mod pluggable;

use enum_dispatch::enum_dispatch;

use crate::allocator::{Allocation, Caching, Control, DeviceAllocator, Request};
use crate::error::{AllocError, FreeError, HandleError};
use crate::ids::StreamId;
use crate::layers::front::Front;
use crate::stats::Usage;

pub use cpu::{
    Clock, CpuAllocator, CpuBuffer, CpuCachingGuard, current, system, with_cpu_caching_allocator,
};
pub use malloc_async::MallocAsyncAllocator;
pub use native::Engine;
pub use pluggable::{PluggableAllocator, plugin};

/// An allocator chosen at run time.
#[enum_dispatch(DeviceAllocator)]
#[non_exhaustive]
#[derive(Debug)]
pub enum Strategy {
    /// `backend:native`, with fixed or expandable segments. Boxed: its tables are large, and a strategy is
    /// moved about.
    Native(Box<Engine>),
    /// `backend:cudaMallocAsync`.
    MallocAsync(Box<MallocAsyncAllocator>),
    /// `backend:pluggable`.
    Pluggable(Box<PluggableAllocator>),
    /// `backend:cpu`.
    Cpu(CpuAllocator),
    /// Registered by a user, or any strategy that wears layers.
    User(Box<dyn DeviceAllocator>),
    /// Any of these whose outermost layer is `front`: its hits are worth a static call.
    Fronted(Front<Box<dyn DeviceAllocator>>),
}

/// A strategy that keeps no cache was asked for what only caches can do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("backend:{name} has no cache to control")]
pub struct NoCache {
    /// The strategy.
    pub name: String,
}

impl Strategy {
    /// Control over cached memory.
    ///
    /// # Errors
    ///
    /// [`NoCache`] when the strategy keeps none.
    pub fn caching_or_refuse(&self) -> Result<&dyn Caching, NoCache> {
        self.control().caching.ok_or_else(|| NoCache { name: self.name().to_owned() })
    }

    /// The allocator itself, for layers: without the choice around it a call is one jump less.
    pub(crate) fn into_box(self) -> Box<dyn DeviceAllocator> {
        match self {
            Self::Native(own) => own,
            Self::MallocAsync(own) => own,
            Self::Pluggable(own) => own,
            Self::Cpu(own) => Box::new(own),
            Self::User(own) => own,
            Self::Fronted(own) => Box::new(own),
        }
    }

    /// The engine behind the strategy, if it has one of ours.
    #[must_use]
    pub fn engine(&self) -> Option<&Engine> {
        match self {
            Self::Native(engine) => Some(engine),
            _ => None,
        }
    }
}
