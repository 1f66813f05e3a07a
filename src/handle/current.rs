//! The current allocator of each device, for everybody in this process: made once, found by all, changed
//! while it is used.
//!
//! It is a [`Handle`]; whoever has one keeps it. Changing the allocator of a device is [`Handle::switch`],
//! so everybody who holds the handle has the new one at once and old blocks find their maker. Current
//! allocators know blocks by bare address, because programs in other languages share them. The table's
//! lock is never held while an allocator is built or dropped.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;

use super::Handle;
use crate::config::{Config, ConfigError};
use crate::driver::Driver;
use crate::ids::DeviceId;
use crate::registry::{self, BuildError, BuildOptions};
use crate::switch::SwitchError;

static CURRENT: RwLock<BTreeMap<DeviceId, Handle>> = RwLock::new(BTreeMap::new());

/// Why there is no current allocator, or no other one. Nothing has changed then.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum CurrentError {
    /// Nobody has made one for this device.
    #[error("device {device} has no current allocator")]
    Missing {
        /// The device.
        device: DeviceId,
    },
    /// There is one; it can be changed.
    #[error("device {device} has a current allocator already; change it instead")]
    Exists {
        /// The device.
        device: DeviceId,
    },
    /// The configuration string cannot be used.
    #[error("configuration {text:?}: {error}")]
    Configuration {
        /// The string.
        text: String,
        /// What is wrong with it, and where.
        error: ConfigError,
    },
    /// The allocator was not built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The allocator was not changed.
    #[error(transparent)]
    Switch(#[from] SwitchError),
}

/// Makes the current allocator of the driver's device from a configuration string.
///
/// # Errors
///
/// [`CurrentError`].
pub fn create(conf: &str, driver: Arc<dyn Driver>) -> Result<Handle, CurrentError> {
    let parsed = Config::parse(conf, &registry::key_table());
    let refused = |error| CurrentError::Configuration { text: conf.to_owned(), error };
    create_with(&parsed.map_err(refused)?, driver)
}

/// The same with a configuration that was parsed before.
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
    // Somebody else may have been faster; then this one goes, with the lock let go of first.
    if current.contains_key(&device) {
        drop(current);
        return Err(CurrentError::Exists { device });
    }
    current.insert(device, handle.clone());
    Ok(handle)
}

/// The current allocator of a device.
///
/// # Errors
///
/// [`CurrentError::Missing`].
pub fn get(device: DeviceId) -> Result<Handle, CurrentError> {
    CURRENT.read().get(&device).cloned().ok_or(CurrentError::Missing { device })
}

/// Changes the allocator of a device, for everybody who has it. May wait as [`Handle::switch`] does.
///
/// # Errors
///
/// [`CurrentError`].
pub fn change(device: DeviceId, conf: &str) -> Result<(), CurrentError> {
    Ok(get(device)?.switch(conf)?)
}

/// Takes the allocator of a device out of the table and returns it. It lives as long as anybody has it;
/// the device can get another one.
///
/// # Errors
///
/// [`CurrentError::Missing`].
pub fn remove(device: DeviceId) -> Result<Handle, CurrentError> {
    let removed = CURRENT.write().remove(&device);
    removed.ok_or(CurrentError::Missing { device })
}

/// The devices that have one, ascending.
#[must_use]
pub fn devices() -> Vec<DeviceId> {
    CURRENT.read().keys().copied().collect()
}
