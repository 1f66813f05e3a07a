//! Builds an allocator from a configuration: names and their constructors.
//!
//! A name is looked up among the built-in strategies first, then among those that users added with
//! [`register`] or, with keys of their own, with a [`Registration`]. The requirements of a strategy on
//! the driver are checked before anything is built.
//!
//! A name keeps its meaning for the lifetime of the process. A configuration that was parsed before a
//! registration does not have the new keys, so register before anything is built.

mod backends;

use std::error::Error;
use std::sync::Arc;

use thiserror::Error;

use crate::allocator::{DeviceAllocator, MemoryKind};
use crate::config::{
    Config, ConfigError, EnvironmentError, HistorySettings, KeyTable, LayerSetting, Settings,
    UserKey, from_process,
};
use crate::driver::Driver;
use crate::error::DriverError;
use crate::history::{History, RecordOptions};
use crate::layers::front::front;
use crate::layers::on_oom::{has_adviser, on_oom};
use crate::layers::record::{named, record_as};
use crate::layers::{self, LayerError};
use crate::size::MIN_BLOCK_BYTES;
use crate::strategies::plugin::{Callbacks, LibraryError};
use crate::strategies::{PluggableAllocator, Strategy};
use crate::sync::{Global, Rank};

pub use backends::{BUILT_IN, Backend};
use backends::{Build, device_count};

/// The error of a registered constructor: any error type.
pub type ConstructError = Box<dyn Error + Send + Sync>;
/// The result of a registered constructor.
pub type Constructed = Result<Box<dyn DeviceAllocator>, ConstructError>;
/// Builds a user-defined allocator over a driver.
pub type Constructor = Arc<dyn Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync>;

/// The longest name that can be registered.
const NAME_MAX_BYTES: usize = 64;
/// The registered strategies.
static REGISTERED: Global<Vec<Registered>> = Global::new(Rank::Backends, Vec::new());

struct Registered {
    name: String,
    about: String,
    constructor: Constructor,
    keys: Vec<UserKey>,
}

/// A name that `backend:` accepts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownBackend {
    /// The name.
    pub name: String,
    /// A description in one line.
    pub about: String,
}

/// Build options that are not part of the configuration.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuildOptions {
    /// Whether live blocks can be found by their bare address.
    pub raw_addresses: bool,
}

/// The reason why no allocator was built.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum BuildError {
    /// `backend:` names an unknown strategy.
    #[error("unknown backend:{name}; known backends: {}", known.join(", "))]
    UnknownBackend {
        /// The unknown name.
        name: String,
        /// All known names.
        known: Vec<String>,
    },
    /// The configuration string is invalid.
    #[error("configuration {text:?}: {error}")]
    Configuration {
        /// The string.
        text: String,
        /// The error, with its position in the string.
        error: ConfigError,
    },
    /// The configuration in the environment is invalid.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// This system, or this build of the library, does not support a setting.
    #[error("{what} is not available in this build or on this system")]
    NotAvailable {
        /// The key and its value.
        what: String,
    },
    /// A layer cannot be built.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A key that the strategy needs is missing.
    #[error("backend:{backend} needs the key {key}")]
    MissingKey {
        /// The strategy.
        backend: String,
        /// The key.
        key: &'static str,
    },
    /// The library of `backend:pluggable` cannot be used.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A registered constructor failed.
    #[error("backend:{name} was not built: {source}")]
    Refused {
        /// The strategy.
        name: String,
        /// The error of the constructor.
        source: ConstructError,
    },
}

/// A name or a key that cannot be registered.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// The name is already registered.
    #[error("an allocator is already registered as {0}")]
    Taken(String),
    /// The name is invalid: expected letters, digits, `_` and `-`, beginning with a letter.
    #[error(
        "{0:?} is not a valid name: expected at most 64 letters, digits, _ and -, beginning \
         with a letter"
    )]
    BadName(String),
    /// The key lacks the strategy's prefix, or has a character that keys may not have.
    #[error(
        "{key:?} is not a valid key of {name}: expected at most 64 small letters, digits and _, \
         beginning with {prefix}"
    )]
    BadKey {
        /// The strategy.
        name: String,
        /// The key.
        key: String,
        /// The prefix that its keys must have.
        prefix: String,
    },
    /// The key is already defined.
    #[error("the key {key} of {name} is already defined")]
    KeyTaken {
        /// The strategy.
        name: String,
        /// The key.
        key: String,
    },
}

/// A user-defined allocator that is not yet registered.
#[must_use = "nothing is registered before `register` is called"]
pub struct Registration(Registered);

impl Registration {
    /// Prepares the registration of `constructor` as `name`. The constructor is called each time an
    /// allocator with this name is built, with no lock held. A panic in it reaches the caller of
    /// [`build`].
    pub fn new(
        name: &str,
        constructor: impl Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync + 'static,
    ) -> Self {
        Self(Registered {
            name: name.to_owned(),
            about: "registered by the user".to_owned(),
            constructor: Arc::new(constructor),
            keys: Vec::new(),
        })
    }

    /// Sets the description for lists of strategies. It should be one line.
    pub fn about(mut self, about: &str) -> Self {
        self.0.about = about.to_owned();
        self
    }

    /// Adds a key of the strategy. The key must begin with the strategy's name (with `_` for `-`) and
    /// `_`.
    pub fn key(mut self, key: UserKey) -> Self {
        self.0.keys.push(key.owned_by(&self.0.name));
        self
    }

    /// Registers the name and the keys. Configurations that were parsed before do not have the keys:
    /// parse with [`key_table`] after this call.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]. Nothing was registered then.
    pub fn register(self) -> Result<(), RegisterError> {
        let own = self.0;
        let legal = own.name.starts_with(|c: char| c.is_ascii_alphabetic())
            && own.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
            && own.name.len() <= NAME_MAX_BYTES;
        if !legal {
            return Err(RegisterError::BadName(own.name));
        }
        let mut registered = REGISTERED.lock();
        let is_called = |known: &Backend| [known.name, known.alias].contains(&own.name.as_str());
        if BUILT_IN.iter().any(is_called) || registered.iter().any(|other| other.name == own.name) {
            return Err(RegisterError::Taken(own.name));
        }
        check_keys(&own, &registered)?;
        registered.push(own);
        Ok(())
    }
}

fn check_keys(own: &Registered, registered: &[Registered]) -> Result<(), RegisterError> {
    let name = &own.name;
    let prefix = format!("{}_", name.replace('-', "_").to_ascii_lowercase());
    let mut table = key_table_of(registered);
    for key in &own.keys {
        let text = key.name();
        let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let legal = text.strip_prefix(&prefix).is_some_and(|rest| !rest.is_empty())
            && text.chars().all(part)
            && text.len() <= NAME_MAX_BYTES;
        if !legal {
            let (name, key) = (name.clone(), text.to_owned());
            return Err(RegisterError::BadKey { name, key, prefix });
        }
        if table.contains(text) {
            return Err(RegisterError::KeyTaken { name: name.clone(), key: text.to_owned() });
        }
        table = table.with(key.clone());
    }
    Ok(())
}

fn key_table_of(registered: &[Registered]) -> KeyTable {
    let keys = registered.iter().flat_map(|registered| &registered.keys);
    keys.fold(KeyTable::default(), |table, key| table.with(key.clone()))
}

/// Registers a user-defined allocator under a name for `backend:`. Allocators built by this name have it as
/// their [`name`](DeviceAllocator::name). Use [`Registration`] for an allocator with keys of its own.
///
/// # Errors
///
/// [`RegisterError`]. Nothing was registered then.
pub fn register(
    name: &str,
    constructor: impl Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync + 'static,
) -> Result<(), RegisterError> {
    Registration::new(name, constructor).register()
}

/// Registers a user-defined allocator made of closures, with the capabilities of [`PluggableAllocator`].
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use stratalloc::allocator::{DeviceAllocator, Request};
/// use stratalloc::config::Config;
/// use stratalloc_sim::{Sim, SimOptions};
/// use stratalloc::ids::StreamId;
/// use stratalloc::registry::{self, BuildOptions};
/// use stratalloc::strategies::plugin::Callbacks;
///
/// let next = AtomicU64::new(0x1000);
/// let allocate =
///     move |bytes: u64, _, _| Some(next.fetch_add(bytes.next_multiple_of(512), Ordering::Relaxed));
/// registry::register_callbacks("counting", Callbacks::new(allocate, |_, _, _, _| {}))?;
///
/// let config = Config::parse("backend:counting", &registry::key_table())?;
/// let device = Arc::new(Sim::new(SimOptions::default()));
/// let allocator = registry::build(&config, device, BuildOptions::default())?;
/// let block = allocator.allocate(Request::new(1 << 20, StreamId::DEFAULT))?;
/// allocator.free(block)?;
/// assert_eq!(allocator.control().counters.unwrap().statistics().max_memory_allocated(), 1 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`RegisterError`]. Nothing was registered then.
pub fn register_callbacks(name: &str, callbacks: Callbacks) -> Result<(), RegisterError> {
    let own_name = name.to_owned();
    let make = move |driver: Arc<dyn Driver>, settings: &Settings| -> Constructed {
        let count = device_count(&*driver);
        let callbacks = callbacks.clone();
        Ok(Box::new(PluggableAllocator::new(&own_name, driver, callbacks, settings, count)))
    };
    Registration::new(name, make).about("closures registered by the user").register()
}

/// Returns every key that a configuration accepts now: built-in keys and those of registered strategies.
#[must_use]
pub fn key_table() -> KeyTable {
    key_table_of(&REGISTERED.read())
}

/// Parses a configuration string, which may contain keys of registered strategies.
pub(crate) fn parse(text: &str) -> Result<Config, BuildError> {
    let refused = |error| BuildError::Configuration { text: text.to_owned(), error };
    Config::parse(text, &key_table()).map_err(refused)
}

/// Parses the configuration in the environment, which may contain keys of registered strategies. Logs its
/// warnings.
pub(crate) fn parse_environment() -> Result<Config, BuildError> {
    let config = from_process(&key_table())?.config;
    config.warnings().iter().for_each(|warning| log::warn!("{warning}"));
    Ok(config)
}

/// Returns true if all allocators with these settings use the same memory pool of the driver.
pub(crate) fn shares_pool(settings: &Settings) -> bool {
    built_in(&settings.backend).is_some_and(|own| (own.shares_pool)(settings))
}

/// Returns the built-in strategy of this name.
#[must_use]
pub fn built_in(name: &str) -> Option<&'static Backend> {
    BUILT_IN.iter().find(|own| own.name == name)
}

/// Returns every name that `backend:` accepts now, with its description.
#[must_use]
pub fn backends() -> Vec<KnownBackend> {
    let registered = REGISTERED.read();
    let users = registered.iter().map(|own| (own.name.as_str(), own.about.as_str()));
    let all = BUILT_IN.iter().map(|own| (own.name, own.about)).chain(users);
    all.map(|(name, about)| KnownBackend { name: name.to_owned(), about: about.to_owned() })
        .collect()
}

/// Returns every name that `backend:` accepts now.
#[must_use]
pub fn names() -> Vec<String> {
    backends().into_iter().map(|backend| backend.name).collect()
}

/// Checks that a name is known now.
///
/// # Errors
///
/// [`BuildError::UnknownBackend`], with all known names.
#[doc(hidden)]
pub fn check_name(name: &str) -> Result<(), BuildError> {
    let known = names();
    if known.iter().any(|one| one == name) {
        return Ok(());
    }
    Err(BuildError::UnknownBackend { name: name.to_owned(), known })
}

fn constructor_of(name: &str) -> Option<Constructor> {
    let registered = REGISTERED.read();
    let found = registered.iter().find(|own| own.name == name);
    found.map(|own| Arc::clone(&own.constructor))
}

/// Builds the allocator that the configuration names, with the layers that it lists. A built-in
/// strategy without layers is dispatched statically. An allocator with layers is boxed.
///
/// # Errors
///
/// [`BuildError`]. Nothing stays allocated from the device then.
pub fn build(
    config: &Config,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
) -> Result<Strategy, BuildError> {
    build_recording_in(&Arc::default(), config, driver, options)
}

/// Builds as [`build`] does, and records in `history` if the strategy supports recording.
pub(crate) fn build_recording_in(
    history: &Arc<History>,
    config: &Config,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
) -> Result<Strategy, BuildError> {
    let settings = config.settings();
    let strategy = strategy(BUILT_IN, settings, Arc::clone(&driver), options, history)?;
    let info = driver.info();
    let total_bytes = strategy.control().caching.and_then(|caching| caching.total_bytes().ok());
    history.describe(info.device, total_bytes.unwrap_or(info.total_bytes), config);
    let was_on = history.is_on();
    let strategy = layered(settings, strategy, &driver)?;
    let HistorySettings { entries_max, snapshot_on_oom, advise_on_oom } = settings.history.clone();
    if advise_on_oom && !has_adviser() {
        let what = "advise_on_oom:True (no adviser is set: build the C library with its feature advise, or \
                    call stratalloc_analysis::advise_on_oom)";
        return Err(BuildError::NotAvailable { what: what.to_owned() });
    }
    if let Some(entries_max) = entries_max.filter(|_| !was_on) {
        let entries_max = usize::try_from(entries_max).unwrap_or(usize::MAX);
        // Keeps the level of stacks, which `layers:[track]` may have raised.
        history.start(&RecordOptions::at_most(entries_max).with_stacks(history.stacks()));
    }
    Ok(match snapshot_on_oom.is_some() || advise_on_oom {
        true => {
            let inner = strategy.into_box();
            let around: Box<dyn DeviceAllocator> =
                Box::new(on_oom(inner, snapshot_on_oom, advise_on_oom));
            around.into()
        }
        false => strategy,
    })
}

fn layered(
    settings: &Settings,
    strategy: Strategy,
    driver: &Arc<dyn Driver>,
) -> Result<Strategy, BuildError> {
    if settings.layers.is_empty() {
        return Ok(strategy);
    }
    let from_system = strategy.control().memory == MemoryKind::Host;
    if from_system && settings.layers.contains(&LayerSetting::Guard) {
        let why = "the device cannot access the strategy's memory, which is the system's (as with backend:cpu)";
        let driver = driver.info().driver;
        return Err(LayerError::NotHere { layer: "guard", why, driver }.into());
    }
    let aligned_bytes = if strategy.engine().is_some() { MIN_BLOCK_BYTES } else { 1 };
    let wrap = |layers| layers::wrap(strategy.into_box(), layers, driver, aligned_bytes);
    Ok(match settings.layers.as_slice() {
        [LayerSetting::Front { block_max_bytes }, rest @ ..] => {
            front(wrap(rest)?, *block_max_bytes).into()
        }
        all => wrap(all)?.into(),
    })
}

fn strategy(
    built_in: &[Backend],
    settings: &Settings,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
    history: &Arc<History>,
) -> Result<Strategy, BuildError> {
    let history = Arc::clone(history);
    let name = settings.backend.as_str();
    if let Some(backend) = built_in.iter().find(|backend| backend.name == name) {
        return (backend.build)(Build { driver, settings, options, history });
    }
    let Some(make) = constructor_of(name) else {
        return Err(BuildError::UnknownBackend { name: name.to_owned(), known: names() });
    };
    match make(driver, settings) {
        Ok(made) => {
            let records = made.control().recording.is_some();
            let own: Box<dyn DeviceAllocator> = match records {
                true if made.name() == name => made,
                true => Box::new(named(made, name)),
                false => Box::new(record_as(made, name, history)),
            };
            Ok(own.into())
        }
        Err(source) => Err(match source.downcast::<DriverError>() {
            Ok(driver) => BuildError::Driver(*driver),
            Err(source) => BuildError::Refused { name: name.to_owned(), source },
        }),
    }
}
