//! `backend:native`: the caching allocator that makes PyTorch's decisions.
//!
//! Segments of fixed size come from the driver and are cut into blocks; freed blocks are joined and
//! kept for the stream they belong to. A hit takes one lock of that stream's heap and calls no
//! driver. This file only says which engine it is: the engine's way of working is told in
//! [`cache`](crate::cache), the rounding rules in [`size`](crate::size).

use std::sync::Arc;

use crate::allocator::DeviceAllocator;
use crate::cache::{Engine, EngineOptions};
use crate::config::Settings;
use crate::driver::Driver;
use crate::error::DriverError;

/// The native caching allocator of one device.
#[derive(Debug)]
pub struct NativeAllocator {
    /// Boxed: the engine's tables are large, and a strategy is moved about.
    engine: Box<Engine>,
}

impl NativeAllocator {
    /// An allocator over `driver` that holds nothing yet.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device cannot do what the settings ask for.
    pub fn new(driver: Arc<dyn Driver>, options: &EngineOptions) -> Result<Self, DriverError> {
        let settings = Settings { expandable_segments: false, ..options.settings.clone() };
        let options = EngineOptions { settings, ..options.clone() };
        Ok(Self { engine: Box::new(Engine::new(driver, &options)?) })
    }

    /// The engine, for those who want to look inside.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl DeviceAllocator for NativeAllocator {
    crate::forward_device_allocator!(self => self.engine);
}
