//! Allocators with their devices, and typed buffers.
//!
//! [`Handle`] is an allocator with its device. It is cheap to clone and is itself a
//! [`DeviceAllocator`]. A [`DeviceVec`] holds values in one block on one stream. It keeps its handle
//! alive, and frees the block when dropped. Values are `bytemuck::Pod`, so copying them is copying
//! bytes, which needs no unsafe code. A view borrows its buffer.
//!
//! Addresses and streams are plain numbers, and the caller is responsible for them. The devices `sim`
//! and `host` check each one. CUDA does not, and a wrong address may even be that of host memory.
//!
//! With the feature `cudarc`, a buffer can be lent to cudarc as a `CudaVec`. [`Handle::switch`] replaces
//! the strategy of a handle that is in use. [`Handle::tag`] returns memory that can be paused. `current`
//! keeps one handle per device for the whole process. `dlpack` passes buffers to other libraries and back;
//! it is the only module here with unsafe code.
//! Read next: `vec`, then `view`.

#[cfg(all(feature = "cudarc", target_pointer_width = "64", unix))]
mod cudarc;
pub mod current;
pub mod dlpack;
mod error;
mod memory;
mod tag;
mod vec;
mod view;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;

use crate::allocator::{Allocation, Control, DeviceAllocator, Request, pass_on};
use crate::config::Config;
use crate::driver::Driver;
use crate::error::{AllocError, FreeError, HandleError};
use crate::ids::StreamId;
use crate::registry::{self, BuildError, BuildOptions};
use crate::stats::Usage;
use crate::strategies::Strategy;
use crate::switch::{CurrentStrategy, SwitchError, Switchable};

pub use error::BufferError;
pub use memory::Released;
pub use tag::Tag;
pub use vec::DeviceVec;
pub use view::{DeviceView, DeviceViewMut};

/// An allocator with the device whose memory it allocates.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::config::{Config, KeyTable};
/// use stratalloc_sim::Sim;
/// use stratalloc::handle::Handle;
/// use stratalloc::ids::StreamId;
///
/// let config = Config::parse("backend:native", &KeyTable::default())?;
/// let handle = Handle::build(&config, Arc::new(Sim::new(Default::default())))?;
/// let weights = handle.zeroed::<f32>(1024, StreamId::DEFAULT)?;
/// assert_eq!(weights.size_bytes(), 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Handle {
    inner: Arc<Inner>,
}

struct Inner {
    switchable: Switchable,
    lost: AtomicU64,
}

/// Builds the allocator that a configuration string names, for `device`. The string may contain keys of
/// registered strategies. Does not wait.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::prelude::*;
/// use stratalloc_sim::Sim;
///
/// let allocator = stratalloc::build("backend:native", Arc::new(Sim::default()))?;
/// let block = allocator.allocate(Request::new(4 << 20, StreamId::DEFAULT))?;
/// allocator.free(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`BuildError`]. Nothing stays allocated from the device then.
pub fn build(conf: &str, device: Arc<dyn Driver>) -> Result<Handle, BuildError> {
    Handle::build(&registry::parse(conf)?, device)
}

/// Builds the allocator that the environment configures, for `device`. The string is that of the first of the
/// [variables](crate::config::VARIABLES) that is set: `ALLOC_CONF`, then `PYTORCH_CUDA_ALLOC_CONF` and
/// PyTorch's other ones. If none is set, the default configuration applies. The string may contain keys of
/// registered strategies. Does not wait.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc_sim::Sim;
///
/// // ALLOC_CONF=backend:native,expandable_segments:True
/// let handle = stratalloc::from_environment(Arc::new(Sim::default()))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`BuildError`]; [`BuildError::Environment`] names the variable whose string is invalid. Nothing stays
/// allocated from the device then.
pub fn from_environment(device: Arc<dyn Driver>) -> Result<Handle, BuildError> {
    Handle::build(&registry::parse_environment()?, device)
}

impl Handle {
    /// Creates a handle from a strategy and the driver that it was built with. The configuration of the
    /// strategy is unknown, so [`Switchable::update`] with any string builds a new strategy.
    #[must_use]
    pub fn new(strategy: Strategy, driver: Arc<dyn Driver>) -> Self {
        let options = BuildOptions { raw_addresses: strategy.control().by_address };
        Self::of(Switchable::around(strategy, driver, options))
    }

    /// Creates a handle from a switchable allocator. It may be shared: a switch affects all its
    /// handles.
    #[must_use]
    pub fn of(switchable: Switchable) -> Self {
        Self { inner: Arc::new(Inner { switchable, lost: AtomicU64::new(0) }) }
    }

    /// Builds the allocator that the configuration names.
    ///
    /// # Errors
    ///
    /// [`BuildError`]. Nothing stays allocated from the device then.
    pub fn build(config: &Config, driver: Arc<dyn Driver>) -> Result<Self, BuildError> {
        Self::build_with(config, driver, BuildOptions::default())
    }

    /// Builds the allocator with options, which also apply after a switch.
    ///
    /// # Errors
    ///
    /// [`BuildError`]. Nothing stays allocated from the device then.
    pub fn build_with(
        config: &Config,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Result<Self, BuildError> {
        Ok(Self::of(Switchable::build(config, driver, options)?))
    }

    /// Replaces the strategy of this handle and of all its clones by the one that the string names. The
    /// new strategy serves new requests. Existing buffers stay valid and are freed to the strategy that
    /// allocated them. [`Switchable::switch`] describes the details, and when the call waits.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use stratalloc::config::Config;
    /// use stratalloc_sim::Sim;
    /// use stratalloc::handle::Handle;
    /// use stratalloc::ids::StreamId;
    ///
    /// let handle = Handle::build(&Config::default(), Arc::new(Sim::new(Default::default())))?;
    /// let before = handle.zeroed::<f32>(1024, StreamId::DEFAULT)?;
    /// handle.switch("backend:native,expandable_segments:True")?;
    /// let after = handle.zeroed::<f32>(1024, StreamId::DEFAULT)?;
    /// drop((before, after));
    /// assert_eq!(handle.switchable().retired(), 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`SwitchError`]. Nothing has changed then.
    pub fn switch(&self, conf: &str) -> Result<(), SwitchError> {
        self.inner.switchable.switch(conf)
    }

    /// Returns the allocator as a [`Switchable`].
    #[must_use]
    pub fn switchable(&self) -> &Switchable {
        &self.inner.switchable
    }

    /// Returns the strategy that serves requests now, and keeps it alive until the result is dropped.
    /// Use it only to inspect the strategy: a request to it directly bypasses the handle.
    #[must_use]
    pub fn strategy(&self) -> CurrentStrategy {
        self.inner.switchable.strategy()
    }

    /// Returns the device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.inner.switchable.driver()
    }

    /// Returns the number of blocks that could not be freed when their buffer was dropped: the driver
    /// failed, or the block was already freed by address. They are counted, because a drop cannot
    /// return an error.
    #[must_use]
    pub fn lost_blocks(&self) -> u64 {
        self.inner.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn lost_one(&self) {
        self.inner.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes later work on `after` wait for the work submitted to `before` so far. The calling thread
    /// does not wait. Does nothing if both are the same stream.
    ///
    /// If a stream is the per-thread default stream, the stream of the calling thread is meant. Work
    /// that another thread submitted to its own per-thread default stream is not ordered. Synchronize
    /// that stream on the other thread before a buffer moves to this thread.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device refuses.
    pub fn order(&self, before: StreamId, after: StreamId) -> Result<(), BufferError> {
        if before == after {
            return Ok(());
        }
        let driver = self.driver();
        let event = driver.create_event()?;
        let ordered =
            driver.record_event(event, before).and_then(|()| driver.wait_event(after, event));
        // Destroyed even if the wait failed. A wait that was submitted no longer needs the event.
        let destroyed = driver.destroy_event(event);
        Ok(ordered.and(destroyed)?)
    }

    /// Orders two streams as [`order`](Self::order) does. If the device refuses, waits on the host.
    fn wait_on_stream(&self, before: StreamId, after: StreamId) {
        if self.order(before, after).is_err() {
            // If this fails too, the device is lost, and no work is running on it.
            let _ = self.driver().synchronize_stream(before);
        }
    }

    /// Allocates an uninitialized buffer of `len` values. May wait as
    /// [`allocate`](DeviceAllocator::allocate) does.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when there is not enough memory, or when the size overflows.
    pub fn uninit<T: Pod>(
        &self,
        len: usize,
        stream: StreamId,
    ) -> Result<DeviceVec<T>, BufferError> {
        let size_bytes = size_of_many::<T>(len)?;
        let block = match size_bytes {
            0 => None,
            bytes => Some(self.allocate(Request::new(bytes, stream))?),
        };
        Ok(DeviceVec::of_block(self.clone(), block, len, stream))
    }

    /// Allocates a buffer of zeros. The zeros are written on `stream`, so a reader on another stream
    /// must wait for `stream`.
    ///
    /// # Errors
    ///
    /// [`BufferError`]. Nothing stays allocated then.
    pub fn zeroed<T: Pod>(
        &self,
        len: usize,
        stream: StreamId,
    ) -> Result<DeviceVec<T>, BufferError> {
        let mut vec = self.uninit(len, stream)?;
        vec.view_mut().fill_zero()?;
        Ok(vec)
    }

    /// Allocates a buffer with a copy of these values. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`]. Nothing stays allocated then.
    pub fn from_slice<T: Pod>(
        &self,
        values: &[T],
        stream: StreamId,
    ) -> Result<DeviceVec<T>, BufferError> {
        let mut vec = self.uninit(values.len(), stream)?;
        vec.view_mut().copy_from_host(values)?;
        Ok(vec)
    }
}

/// Returns the size in bytes of `len` values.
fn size_of_many<T>(len: usize) -> Result<u64, BufferError> {
    let too_long = BufferError::TooLong { len, item_bytes: size_of::<T>() };
    let bytes = len.checked_mul(size_of::<T>()).ok_or(too_long)?;
    Ok(bytes as u64)
}

impl DeviceAllocator for Handle {
    pass_on!(self => self.switchable());
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.driver().info().device;
        f.debug_struct("Handle").field("name", &self.name()).field("device", &device).finish()
    }
}
