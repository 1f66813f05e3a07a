//! `backend:native,expandable_segments:True`: segments that grow by mapping pages.
//!
//! Each stream and kind of pool has one range of address space, nine eighths of the device or as
//! configured, and maps pages of 2 MiB (small) or `large_segment_size_mb` (large) at its lowest gap.
//! Free neighbours join across what would be segments, so large requests find room; under pressure
//! whole free pages are unmapped. The device needs virtual memory. The engine's way of working is
//! told in [`cache`](crate::cache).

use std::sync::Arc;

use crate::allocator::DeviceAllocator;
use crate::cache::{Engine, EngineOptions};
use crate::config::Settings;
use crate::driver::Driver;
use crate::error::DriverError;

/// The caching allocator over expandable segments of one device.
#[derive(Debug)]
pub struct ExpandableAllocator {
    /// Boxed: the engine's tables are large, and a strategy is moved about.
    engine: Box<Engine>,
}

impl ExpandableAllocator {
    /// An allocator over `driver` that holds nothing yet.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device cannot do what the settings ask for.
    pub fn new(driver: Arc<dyn Driver>, options: &EngineOptions) -> Result<Self, DriverError> {
        let settings = Settings { expandable_segments: true, ..options.settings.clone() };
        let options = EngineOptions { settings, ..options.clone() };
        Ok(Self { engine: Box::new(Engine::new(driver, &options)?) })
    }

    /// The engine, for those who want to look inside.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl DeviceAllocator for ExpandableAllocator {
    crate::forward_device_allocator!(self => self.engine);
}
