//! What users hold: an allocator together with its device, and typed buffers of it.
//!
//! [`Handle`] is cheap to clone and is itself a [`DeviceAllocator`]. A [`DeviceVec`] keeps its handle
//! alive, frees its block when it is dropped, and knows its stream. Nothing here decides where memory
//! comes from. With the feature `cudarc` a buffer becomes one that cudarc's code takes for its own. The
//! strategy behind a handle can change while the handle is used ([`Handle::switch`]); `current` keeps one
//! handle per device for the whole process.
//! Read next: `vec`, then `view`.

#[cfg(all(feature = "cudarc", target_pointer_width = "64", unix))]
mod cudarc;
pub mod current;
mod error;
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
pub use vec::{DeviceVec, Released};
pub use view::{DeviceView, DeviceViewMut};

/// An allocator and the device whose memory it hands out.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::config::{Config, KeyTable};
/// use stratalloc::driver::Sim;
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

/// Builds the allocator that a configuration string names over `device`. The string may have the keys of
/// registered strategies too. Does not wait.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::prelude::*;
///
/// let allocator = stratalloc::build("backend:native", Arc::new(Sim::default()))?;
/// let block = allocator.allocate(Request::new(4 << 20, StreamId::DEFAULT))?;
/// allocator.free(block)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`BuildError`]; nothing was taken from the device then.
pub fn build(conf: &str, device: Arc<dyn Driver>) -> Result<Handle, BuildError> {
    let parsed = Config::parse(conf, &registry::key_table());
    let config =
        parsed.map_err(|error| BuildError::Configuration { text: conf.to_owned(), error })?;
    Handle::build(&config, device)
}

impl Handle {
    /// Puts an allocator and the driver that it was built over together. Nobody knows what it was built
    /// from, so any further string ([`Switchable::update`]) switches.
    #[must_use]
    pub fn new(strategy: Strategy, driver: Arc<dyn Driver>) -> Self {
        let options = BuildOptions { raw_addresses: strategy.control().by_address };
        Self::of(Switchable::around(strategy, driver, options))
    }

    /// A handle of an allocator that may be shared with others, who see its switches.
    #[must_use]
    pub fn of(switchable: Switchable) -> Self {
        Self { inner: Arc::new(Inner { switchable, lost: AtomicU64::new(0) }) }
    }

    /// Builds the allocator that the configuration names.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing was taken from the device then.
    pub fn build(config: &Config, driver: Arc<dyn Driver>) -> Result<Self, BuildError> {
        Self::build_with(config, driver, BuildOptions::default())
    }

    /// The same with options, which later allocators get too.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; nothing was taken from the device then.
    pub fn build_with(
        config: &Config,
        driver: Arc<dyn Driver>,
        options: BuildOptions,
    ) -> Result<Self, BuildError> {
        Ok(Self::of(Switchable::build(config, driver, options)?))
    }

    /// Puts the strategy that the string names behind this handle and all its clones. New requests go
    /// there; buffers from before stay valid and go back to the strategy that made them. See
    /// [`Switchable::switch`], also for when it waits.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use stratalloc::config::Config;
    /// use stratalloc::driver::Sim;
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
    /// [`SwitchError`]; everything is as it was then.
    pub fn switch(&self, conf: &str) -> Result<(), SwitchError> {
        self.inner.switchable.switch(conf)
    }

    /// The allocator, which can be switched.
    #[must_use]
    pub fn switchable(&self) -> &Switchable {
        &self.inner.switchable
    }

    /// The strategy that serves requests now, held until it is dropped. For a look: blocks of its own go
    /// past the handle.
    #[must_use]
    pub fn strategy(&self) -> CurrentStrategy {
        self.inner.switchable.strategy()
    }

    /// The device.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        self.inner.switchable.driver()
    }

    /// Blocks of dropped buffers that the allocator refused to take back: the driver failed, or somebody
    /// freed them by address. A drop cannot tell, so it counts.
    #[must_use]
    pub fn lost_blocks(&self) -> u64 {
        self.inner.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn lost_one(&self) {
        self.inner.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes work that is submitted to `after` from now on wait for what was submitted to `before` so
    /// far. The caller does not wait. Nothing to do when both are the same.
    ///
    /// A stream that is another one on each thread is the calling thread's here: work that another thread
    /// gave its own is ordered by nothing, so wait for it there before a buffer changes threads.
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
        // Destroyed in any case; the wait outlives its event.
        let destroyed = driver.destroy_event(event);
        Ok(ordered.and(destroyed)?)
    }

    /// A buffer of `len` values whose bytes are whatever was there. May wait as
    /// [`allocate`](DeviceAllocator::allocate) does.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when there is no memory, or no size for so many values.
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

    /// A buffer of zeros. The zeros are written in the order of the stream: who reads on another stream
    /// waits for this one.
    ///
    /// # Errors
    ///
    /// [`BufferError`]; nothing stays allocated then.
    pub fn zeroed<T: Pod>(
        &self,
        len: usize,
        stream: StreamId,
    ) -> Result<DeviceVec<T>, BufferError> {
        let mut vec = self.uninit(len, stream)?;
        vec.view_mut().fill_zero()?;
        Ok(vec)
    }

    /// A buffer with a copy of these values. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`]; nothing stays allocated then.
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

/// The bytes of so many values.
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
