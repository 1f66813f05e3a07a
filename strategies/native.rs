//! `backend:native`: the caching allocator that makes PyTorch's decisions.
//!
//! Segments of fixed size come from the driver and are cut into blocks; freed blocks are joined and
//! kept for the stream they belong to. A hit takes one lock of that stream's heap and calls no
//! driver. This file only says which engine it is: the engine's way of working is told in
//! [`cache`](crate::cache), the rounding rules in [`size`](crate::size).

use std::sync::Arc;

use crate::allocator::{
    Allocation, Caching, Counters, CrossStream, DeviceAllocator, Pressure, RawAddresses, Request,
};
use crate::cache::{Engine, EngineOptions};
use crate::driver::Driver;
use crate::error::{AllocError, DriverError, FreeError};

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
    /// [`DriverError`] when the driver cannot say what its device is.
    pub fn new(driver: Arc<dyn Driver>, options: &EngineOptions) -> Result<Self, DriverError> {
        Ok(Self { engine: Box::new(Engine::new(driver, options)?) })
    }

    /// The engine, for those who want to look inside.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

impl DeviceAllocator for NativeAllocator {
    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.engine.allocate(request)
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.engine.free(allocation)
    }

    fn name(&self) -> &str {
        "native"
    }

    fn cross_stream(&self) -> Option<&dyn CrossStream> {
        Some(&*self.engine)
    }

    fn caching(&self) -> Option<&dyn Caching> {
        Some(&*self.engine)
    }

    fn counters(&self) -> Option<&dyn Counters> {
        Some(&*self.engine)
    }

    fn raw_addresses(&self) -> Option<&dyn RawAddresses> {
        self.engine.keeps_addresses().then_some(&*self.engine as &dyn RawAddresses)
    }

    fn pressure(&self) -> Option<&dyn Pressure> {
        Some(&*self.engine)
    }
}
