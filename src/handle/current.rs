//! The current allocator of each device, shared by the whole process.
//!
//! A current allocator is a [`Handle`]. It lives as long as any clone of the handle. [`Handle::switch`]
//! replaces the strategy of a device for all clones at once. Existing blocks are freed to the strategy
//! that allocated them. Current allocators can find blocks by bare address, because programs in other
//! languages use them. The table's lock is not held while an allocator is built or dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;

use super::Handle;
use crate::config::Config;
use crate::driver::Driver;
use crate::ids::DeviceId;
use crate::registry::{self, BuildError, BuildOptions};
use crate::switch::SwitchError;

static CURRENT: RwLock<BTreeMap<DeviceId, Handle>> = RwLock::new(BTreeMap::new());

/// The error of a function of this module. The failed call has changed nothing.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum CurrentError {
    /// The device has no current allocator.
    #[error("device {device} has no current allocator")]
    Missing {
        /// The device.
        device: DeviceId,
    },
    /// The device already has a current allocator. [`change`] can replace its strategy.
    #[error("device {device} has a current allocator already; change it instead")]
    Exists {
        /// The device.
        device: DeviceId,
    },
    /// The configuration string cannot be used, or the allocator could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The allocator could not be switched.
    #[error(transparent)]
    Switch(#[from] SwitchError),
}

/// Creates the current allocator of the driver's device from a configuration string.
///
/// # Errors
///
/// [`CurrentError`].
pub fn create(conf: &str, driver: Arc<dyn Driver>) -> Result<Handle, CurrentError> {
    create_with(&registry::parse(conf)?, driver)
}

/// Creates the current allocator of the driver's device from a parsed configuration.
///
/// # Errors
///
/// [`CurrentError`].
pub fn create_with(config: &Config, driver: Arc<dyn Driver>) -> Result<Handle, CurrentError> {
    let device = driver.info().device;
    if CURRENT.read().contains_key(&device) {
        return Err(CurrentError::Exists { device });
    }
    let handle = Handle::build_with(config, driver, BuildOptions { raw_addresses: true })?;
    let mut current = CURRENT.write();
    // Another thread may have created one in between. Then this one is dropped, after the lock is
    // released.
    if current.contains_key(&device) {
        drop(current);
        return Err(CurrentError::Exists { device });
    }
    current.insert(device, handle.clone());
    Ok(handle)
}

/// Returns the current allocator of a device.
///
/// # Errors
///
/// [`CurrentError::Missing`].
pub fn get(device: DeviceId) -> Result<Handle, CurrentError> {
    CURRENT.read().get(&device).cloned().ok_or(CurrentError::Missing { device })
}

/// Switches the current allocator of a device, for all clones of its handle. May wait as
/// [`Handle::switch`] does.
///
/// # Errors
///
/// [`CurrentError`].
pub fn change(device: DeviceId, conf: &str) -> Result<(), CurrentError> {
    Ok(get(device)?.switch(conf)?)
}

/// Removes the current allocator of a device from the table and returns it. It lives on while clones of
/// the handle exist. Another current allocator can be created for the device.
///
/// # Errors
///
/// [`CurrentError::Missing`].
pub fn remove(device: DeviceId) -> Result<Handle, CurrentError> {
    let removed = CURRENT.write().remove(&device);
    removed.ok_or(CurrentError::Missing { device })
}

/// Returns the devices that have a current allocator, in ascending order.
#[must_use]
pub fn devices() -> Vec<DeviceId> {
    CURRENT.read().keys().copied().collect()
}
