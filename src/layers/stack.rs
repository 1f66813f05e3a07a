//! Builds a list of layers around an allocator.
//!
//! The list goes from outermost to innermost, so it is built from its end. Each layer is boxed. `guard`,
//! which needs host memory, is checked against the device here.

use std::io;
use std::path::Path;
use std::sync::Arc;

use thiserror::Error;

use super::{align, fault, front, guard, limit, log, oom_retry, statistics, track};
use crate::allocator::DeviceAllocator;
use crate::config::LayerSetting;
use crate::driver::Driver;

/// A layer that could not be built.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum LayerError {
    /// The file of a log cannot be written.
    #[error("layers:[log:{path:?}]: the file cannot be written: {source}")]
    Log {
        /// The file.
        path: String,
        /// The error.
        source: io::Error,
    },
    /// The layer does not support this device.
    #[error("layers:[{layer}]: {why}; this device's driver is {driver}")]
    NotHere {
        /// The layer.
        layer: &'static str,
        /// The requirement that the device does not meet.
        why: &'static str,
        /// The driver of the device.
        driver: &'static str,
    },
}

/// Returns `inner` wrapped in `layers`, which are listed from outermost to innermost. Blocks of `inner`
/// start at multiples of `aligned_bytes` (1 if unknown). Opens the files of logs.
///
/// # Errors
///
/// [`LayerError`] for the first layer that cannot be built, starting with the innermost. `inner` is
/// dropped then.
pub fn wrap(
    inner: Box<dyn DeviceAllocator>,
    layers: &[LayerSetting],
    driver: &Arc<dyn Driver>,
    aligned_bytes: u64,
) -> Result<Box<dyn DeviceAllocator>, LayerError> {
    layers.iter().rev().try_fold(inner, |inner, layer| -> Result<Box<dyn DeviceAllocator>, _> {
        Ok(match layer {
            LayerSetting::Limit { bytes } => Box::new(limit::limit(inner, *bytes)),
            LayerSetting::Statistics => Box::new(statistics::statistics(inner)),
            LayerSetting::Track => track::track(inner),
            LayerSetting::Log { path } => match log::log(inner, Path::new(path)) {
                Ok(logged) => Box::new(logged),
                Err(source) => return Err(LayerError::Log { path: path.clone(), source }),
            },
            LayerSetting::Fault(when) => Box::new(fault::fault(inner, *when)),
            LayerSetting::OomRetry { times } => Box::new(oom_retry::retry(inner, *times)),
            LayerSetting::Front { block_max_bytes } => {
                Box::new(front::front(inner, *block_max_bytes))
            }
            // The blocks of `inner` are already aligned to `bytes`.
            LayerSetting::Align { bytes } if *bytes <= aligned_bytes => inner,
            LayerSetting::Align { bytes } => Box::new(align::align(inner, *bytes, aligned_bytes)),
            LayerSetting::Guard => {
                let name = driver.info().driver;
                if name != "host" {
                    let why = "only host memory can be checked whenever a block is freed";
                    return Err(LayerError::NotHere { layer: "guard", why, driver: name });
                }
                Box::new(guard::guard(inner, Arc::clone(driver)))
            }
        })
    })
}
