//! Calling a user's own functions, from closures or a library.
//!
//! [`Callbacks`] is the set of functions of PyTorch's `CUDAPluggableAllocator`, as closures. Two of them
//! are required. [`load`] finds the functions in a shared library by name. This module only loads and
//! calls them; the strategy keeps track of blocks.

#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
mod elf;
#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
mod filter;
#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
mod library;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use crate::ids::{DeviceId, PoolId, StreamId};

#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
#[doc(hidden)]
pub use filter::copied;
#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
pub use library::load;

/// Returns true if a stream's requests belong to a pool's scope. May be called from any thread, as long
/// as a reference to the filter exists.
pub type StreamFilter = Arc<dyn Fn(StreamId) -> bool + Send + Sync>;

type Allocate = dyn Fn(u64, DeviceId, StreamId) -> Option<u64> + Send + Sync;
type Free = dyn Fn(u64, u64, DeviceId, StreamId) + Send + Sync;
type BaseOf = dyn Fn(u64) -> Base + Send + Sync;
type BeginPool = dyn Fn(DeviceId, PoolId, StreamFilter) + Send + Sync;
type OnPool = dyn Fn(DeviceId, PoolId) + Send + Sync;

/// The allocation that contains a block, as reported by the user's function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Base {
    /// The allocation's address.
    pub address: u64,
    /// The allocation's size in bytes, if the function reports one.
    pub size_bytes: Option<u64>,
}

/// A user's functions. `allocate` and `free` are required; the others are added one by one.
///
/// The functions are called from any thread, concurrently, and with no lock held, so they may call the
/// allocator that they serve. The function for the memory fraction is an exception: a
/// [switchable](crate::switch::Switchable) allocator may call it while it holds its locks. There it must
/// not make that allocator switch, change its configuration or open or close scopes, because that would
/// deadlock.
///
/// Panics reach the code that called the allocator.
#[derive(Clone)]
pub struct Callbacks {
    pub(crate) allocate: Arc<Allocate>,
    pub(crate) free: Arc<Free>,
    pub(crate) init: Option<Arc<dyn Fn(u32) + Send + Sync>>,
    pub(crate) reset: Option<Arc<dyn Fn() + Send + Sync>>,
    pub(crate) memory_fraction: Option<Arc<dyn Fn(f64, DeviceId) + Send + Sync>>,
    pub(crate) base_of: Option<Arc<BaseOf>>,
    pub(crate) record_stream: Option<Arc<dyn Fn(u64, StreamId) + Send + Sync>>,
    pub(crate) begin_pool: Option<Arc<BeginPool>>,
    pub(crate) end_pool: Option<Arc<OnPool>>,
    pub(crate) release_pool: Option<Arc<OnPool>>,
}

impl Callbacks {
    /// Creates the set of the two required functions. `allocate` receives bytes (at least 1), device and
    /// stream. It returns an address, or `None` if there is not enough memory. `free` receives the
    /// address and the same bytes, device and stream; it is never called for an address that is not
    /// live.
    pub fn new(
        allocate: impl Fn(u64, DeviceId, StreamId) -> Option<u64> + Send + Sync + 'static,
        free: impl Fn(u64, u64, DeviceId, StreamId) + Send + Sync + 'static,
    ) -> Self {
        Self {
            allocate: Arc::new(allocate),
            free: Arc::new(free),
            init: None,
            reset: None,
            memory_fraction: None,
            base_of: None,
            record_stream: None,
            begin_pool: None,
            end_pool: None,
            release_pool: None,
        }
    }

    /// Adds a function that is called with the number of devices, once for each allocator that is built,
    /// before any other function.
    #[must_use]
    pub fn on_init(mut self, init: impl Fn(u32) + Send + Sync + 'static) -> Self {
        self.init = Some(Arc::new(init));
        self
    }

    /// Adds a function that is called when the cache is emptied, also when memory is exhausted.
    #[must_use]
    pub fn on_reset(mut self, reset: impl Fn() + Send + Sync + 'static) -> Self {
        self.reset = Some(Arc::new(reset));
        self
    }

    /// Adds a function that receives a new memory fraction, from 0 to 1. This strategy enforces the
    /// resulting limit too. The function may be called under the locks of a
    /// [switchable](crate::switch::Switchable) allocator, which it must not call.
    #[must_use]
    pub fn on_memory_fraction(
        mut self,
        memory_fraction: impl Fn(f64, DeviceId) + Send + Sync + 'static,
    ) -> Self {
        self.memory_fraction = Some(Arc::new(memory_fraction));
        self
    }

    /// Adds a function that returns the allocation that contains a live block.
    #[must_use]
    pub fn on_base_address(
        mut self,
        base_of: impl Fn(u64) -> Base + Send + Sync + 'static,
    ) -> Self {
        self.base_of = Some(Arc::new(base_of));
        self
    }

    /// Adds a function that is called when work on another stream uses a live block. With this function,
    /// a free does not wait for other streams: it is passed to the user's `free` at once. The user's
    /// functions must then not reuse the memory before that work has completed.
    #[must_use]
    pub fn on_record_stream(
        mut self,
        record_stream: impl Fn(u64, StreamId) + Send + Sync + 'static,
    ) -> Self {
        self.record_stream = Some(Arc::new(record_stream));
        self
    }

    /// Adds functions that manage private pools. `begin` starts routing the requests that its filter
    /// accepts to a pool, and `end` stops that. When the pool has lost its last user, `release` is
    /// called once for each earlier `begin`.
    #[must_use]
    pub fn on_pools(
        self,
        begin: impl Fn(DeviceId, PoolId, StreamFilter) + Send + Sync + 'static,
        end: impl Fn(DeviceId, PoolId) + Send + Sync + 'static,
        release: impl Fn(DeviceId, PoolId) + Send + Sync + 'static,
    ) -> Self {
        Self {
            begin_pool: Some(Arc::new(begin)),
            end_pool: Some(Arc::new(end)),
            release_pool: Some(Arc::new(release)),
            ..self
        }
    }
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").finish_non_exhaustive()
    }
}

/// The reason why a library was not used. None of its functions was called in this case.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LibraryError {
    /// The file does not exist or cannot be read.
    #[error("library {}: cannot be read: {message}", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// The system's error message.
        message: String,
    },
    /// The path is not a regular file, or the file is not a shared library for this machine.
    #[error("library {}: expected {expected}", path.display())]
    Unfit {
        /// The path.
        path: PathBuf,
        /// The kind of file that can be loaded here.
        expected: &'static str,
    },
    /// The system's loader failed to load the library.
    #[error("library {}: cannot be loaded: {message}", path.display())]
    NotLoaded {
        /// The path.
        path: PathBuf,
        /// The loader's message.
        message: String,
    },
    /// The library lacks a function.
    #[error("library {}: has no function {name}, which {key} names", path.display())]
    NoFunction {
        /// The path.
        path: PathBuf,
        /// The configuration key with the function's name.
        key: &'static str,
        /// The name of the missing function.
        name: String,
    },
}
