//! From a configuration to an allocator: names and their constructors.
//!
//! Built-in names come first; users add theirs with [`register`]. What a strategy needs of the
//! driver is checked here, before anything is built.

use std::sync::Arc;

use parking_lot::RwLock;
use thiserror::Error;

use crate::allocator::DeviceAllocator;
use crate::cache::EngineOptions;
use crate::config::{Config, LayerSetting, Settings};
use crate::driver::Driver;
use crate::error::DriverError;
use crate::layers::front::front;
use crate::layers::{self, LayerError};
use crate::size::MIN_BLOCK_BYTES;
use crate::strategies::{ExpandableAllocator, NativeAllocator, Strategy};

/// What a registered constructor makes.
pub type Constructed = Result<Box<dyn DeviceAllocator>, DriverError>;
/// Builds a user-defined allocator over a driver.
pub type Constructor = Arc<dyn Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync>;

/// The built-in names, with what to say about each.
pub const BUILT_IN: [(&str, &str); 1] =
    [("native", "fixed segments cached per stream; PyTorch's decisions")];

/// Names that are known and come with a later version.
const PLANNED: [&str; 3] = ["cudaMallocAsync", "cpu", "pluggable"];

static REGISTERED: RwLock<Vec<(String, Constructor)>> = RwLock::new(Vec::new());

/// How an allocator is built, apart from its configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuildOptions {
    /// Whether live blocks can be found by bare address.
    pub raw_addresses: bool,
}

/// Why no allocator was built.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum BuildError {
    /// `backend:` names nothing that is known.
    #[error("backend:{name} is not known here; known are {}", known.join(", "))]
    UnknownBackend {
        /// What was asked for.
        name: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The strategy exists in the plan, not in this version.
    #[error("{what} is not available in this version")]
    NotAvailable {
        /// The key and value.
        what: String,
    },
    /// A layer cannot be put on.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// A name that cannot be registered.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// Somebody has it.
    #[error("an allocator is already registered as {0}")]
    Taken(String),
    /// Letters, digits, `_` and `-`, beginning with a letter.
    #[error("{0:?} is no name: expected letters, digits, _ and -, beginning with a letter")]
    BadName(String),
}

/// Adds a user-defined allocator under a name that `backend:` can then say.
///
/// # Errors
///
/// [`RegisterError`]; nothing has changed then.
pub fn register(
    name: &str,
    constructor: impl Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync + 'static,
) -> Result<(), RegisterError> {
    let legal = name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if !legal {
        return Err(RegisterError::BadName(name.to_owned()));
    }
    let mut registered = REGISTERED.write();
    let taken = BUILT_IN.iter().map(|(name, _)| *name).chain(PLANNED).any(|n| n == name)
        || registered.iter().any(|(n, _)| n == name);
    if taken {
        return Err(RegisterError::Taken(name.to_owned()));
    }
    registered.push((name.to_owned(), Arc::new(constructor)));
    Ok(())
}

/// Every name that `backend:` can say now.
#[must_use]
pub fn names() -> Vec<String> {
    let registered = REGISTERED.read();
    let users = registered.iter().map(|(name, _)| name.clone());
    BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).chain(users).collect()
}

/// Builds the allocator that the configuration names, with the layers that it lists. Without layers a
/// built-in strategy is dispatched to statically; with some, it rides in a box.
///
/// # Errors
///
/// [`BuildError`]; nothing was taken from the device then.
pub fn build(
    config: &Config,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
) -> Result<Strategy, BuildError> {
    let settings = config.settings();
    let strategy = strategy(settings, Arc::clone(&driver), options)?;
    if settings.layers.is_empty() {
        return Ok(strategy);
    }
    let aligned_bytes = if strategy.engine().is_some() { MIN_BLOCK_BYTES } else { 1 };
    let wear = |layers| layers::wear(Box::new(strategy), layers, &driver, aligned_bytes);
    Ok(match settings.layers.as_slice() {
        [LayerSetting::Front { block_max_bytes }, rest @ ..] => {
            front(wear(rest)?, *block_max_bytes).into()
        }
        all => wear(all)?.into(),
    })
}

fn strategy(
    settings: &Settings,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
) -> Result<Strategy, BuildError> {
    let name = settings.backend.as_str();
    if name == "native" {
        let options =
            EngineOptions { settings: settings.clone(), raw_addresses: options.raw_addresses };
        if settings.expandable_segments {
            return Ok(ExpandableAllocator::new(driver, &options)?.into());
        }
        return Ok(NativeAllocator::new(driver, &options)?.into());
    }
    if PLANNED.contains(&name) {
        return Err(BuildError::NotAvailable { what: format!("backend:{name}") });
    }
    let constructor =
        REGISTERED.read().iter().find(|(n, _)| n == name).map(|(_, make)| Arc::clone(make));
    match constructor {
        Some(make) => Ok(make(driver, settings)?.into()),
        None => Err(BuildError::UnknownBackend { name: name.to_owned(), known: names() }),
    }
}
