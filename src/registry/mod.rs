//! From a configuration to an allocator: names and their constructors.
//!
//! Built-in names come first; users add theirs with [`register`] or, with keys of their own, with a
//! [`Registration`]. What a strategy needs of the driver is checked here, before anything is built.
//!
//! A name is settled by its first use: once a configuration has named it to [`build`], nobody can
//! register it any more, whether it was known then or not. So one name means one thing for as long as
//! the process lives. Register before anything is built.

mod backends;

use std::error::Error;
use std::sync::Arc;

use thiserror::Error;

use crate::allocator::DeviceAllocator;
use crate::config::{
    Config, ConfigError, HistorySettings, KeyTable, LayerSetting, Settings, UserKey,
};
use crate::driver::Driver;
use crate::error::DriverError;
use crate::history::{History, RecordOptions};
use crate::layers::front::front;
use crate::layers::on_oom::{has_adviser, on_oom};
use crate::layers::record::record;
use crate::layers::{self, LayerError};
use crate::size::MIN_BLOCK_BYTES;
use crate::strategies::plugin::{Callbacks, LibraryError};
use crate::strategies::{PluggableAllocator, Strategy};
use crate::sync::{Global, Rank};

pub use backends::{BUILT_IN, Backend};
use backends::{Build, device_count};

/// Why a constructor made nothing: any error that can say so.
pub type ConstructError = Box<dyn Error + Send + Sync>;
/// What a registered constructor makes.
pub type Constructed = Result<Box<dyn DeviceAllocator>, ConstructError>;
/// Builds a user-defined allocator over a driver.
pub type Constructor = Arc<dyn Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync>;

/// A registered name can be at most this long.
const NAME_MAX_BYTES: usize = 64;
/// So many names that were asked for in vain are remembered; a program that asks for more registers none
/// of them.
const UNKNOWN_MAX: usize = 256;

static NAMES: Global<Names> =
    Global::new(Rank::Backends, Names { registered: Vec::new(), unknown: Vec::new() });

struct Names {
    registered: Vec<Registered>,
    /// Asked for before anybody registered them.
    unknown: Vec<String>,
}

#[derive(Clone)]
struct Registered {
    name: String,
    about: String,
    constructor: Constructor,
    keys: Vec<UserKey>,
    used: bool,
}

/// One name that `backend:` can say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownBackend {
    /// The name.
    pub name: String,
    /// What it is, in a line.
    pub about: String,
}

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
    /// The string is no configuration.
    #[error("configuration {text:?}: {error}")]
    Configuration {
        /// The string.
        text: String,
        /// What is wrong with it, and where.
        error: ConfigError,
    },
    /// This system, or this build of the library, cannot do it.
    #[error("{what} is not available here")]
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
        /// What its constructor said.
        source: ConstructError,
    },
}

/// A name or a key that cannot be registered.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RegisterError {
    /// Somebody has it.
    #[error("an allocator is already registered as {0}")]
    Taken(String),
    /// Somebody has it, and an allocator was built by that name.
    #[error("{0} is in use: an allocator by that name was built, and it cannot be exchanged")]
    InUse(String),
    /// A configuration named it when nobody had registered it.
    #[error("backend:{0} was asked for before it was registered; register before the first use")]
    TooLate(String),
    /// Letters, digits, `_` and `-`, beginning with a letter.
    #[error(
        "{0:?} is no name: expected at most 64 letters, digits, _ and -, beginning with a letter"
    )]
    BadName(String),
    /// A key without the strategy's prefix, or with other characters than a key may have.
    #[error(
        "{key:?} is no key of {name}: expected at most 64 small letters, digits and _, beginning \
         with {prefix}"
    )]
    BadKey {
        /// The strategy.
        name: String,
        /// The key.
        key: String,
        /// What its keys begin with.
        prefix: String,
    },
    /// A key that has a meaning already.
    #[error("the key {key} of {name} is known already")]
    KeyTaken {
        /// The strategy.
        name: String,
        /// The key.
        key: String,
    },
}

/// A user-defined allocator on its way into the registry.
#[must_use = "nothing is registered before `register` is called"]
pub struct Registration(Registered);

impl Registration {
    /// An allocator that `constructor` builds, to be registered as `name`. The constructor runs with no
    /// lock held, each time a configuration names it; what it panics with reaches the caller of
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
            used: false,
        })
    }

    /// What it is, in a line, for those who list what there is.
    pub fn about(mut self, about: &str) -> Self {
        self.0.about = about.to_owned();
        self
    }

    /// Adds a key of its own. Its name begins with the strategy's name (`-` is written `_`) and `_`.
    pub fn key(mut self, key: UserKey) -> Self {
        self.0.keys.push(key.owned_by(&self.0.name));
        self
    }

    /// Makes the name and the keys known. Configurations are parsed with [`key_table`], so those that
    /// were parsed before know nothing of the keys.
    ///
    /// # Errors
    ///
    /// [`RegisterError`]; nothing has changed then.
    pub fn register(self) -> Result<(), RegisterError> {
        let own = self.0;
        let legal = own.name.starts_with(|c: char| c.is_ascii_alphabetic())
            && own.name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
            && own.name.len() <= NAME_MAX_BYTES;
        if !legal {
            return Err(RegisterError::BadName(own.name));
        }
        let mut names = NAMES.lock();
        if let Some(other) = names.registered.iter().find(|other| other.name == own.name) {
            let error = if other.used { RegisterError::InUse } else { RegisterError::Taken };
            return Err(error(own.name));
        }
        let is_called = |known: &Backend| [known.name, known.alias].contains(&own.name.as_str());
        if BUILT_IN.iter().any(is_called) {
            return Err(RegisterError::Taken(own.name));
        }
        if names.unknown.contains(&own.name) {
            return Err(RegisterError::TooLate(own.name));
        }
        check_keys(&own, &names)?;
        names.registered.push(own);
        Ok(())
    }
}

fn check_keys(own: &Registered, names: &Names) -> Result<(), RegisterError> {
    let name = &own.name;
    let prefix = format!("{}_", name.replace('-', "_").to_ascii_lowercase());
    let mut table = names.key_table();
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
        if table.knows(text) {
            return Err(RegisterError::KeyTaken { name: name.clone(), key: text.to_owned() });
        }
        table = table.with(key.clone());
    }
    Ok(())
}

impl Names {
    fn key_table(&self) -> KeyTable {
        let keys = self.registered.iter().flat_map(|registered| &registered.keys);
        keys.fold(KeyTable::default(), |table, key| table.with(key.clone()))
    }
}

/// Adds a user-defined allocator under a name that `backend:` can then say. [`Registration`] does the
/// same for one with keys of its own.
///
/// # Errors
///
/// [`RegisterError`]; nothing has changed then.
pub fn register(
    name: &str,
    constructor: impl Fn(Arc<dyn Driver>, &Settings) -> Constructed + Send + Sync + 'static,
) -> Result<(), RegisterError> {
    Registration::new(name, constructor).register()
}

/// Adds a user-defined allocator made of closures, with everything that
/// [`PluggableAllocator`] gives them.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use stratalloc::allocator::{DeviceAllocator, Request};
/// use stratalloc::config::Config;
/// use stratalloc::driver::{Sim, sim::SimOptions};
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
/// [`RegisterError`]; nothing has changed then.
pub fn register_callbacks(name: &str, callbacks: Callbacks) -> Result<(), RegisterError> {
    let own_name = name.to_owned();
    let make = move |driver: Arc<dyn Driver>, settings: &Settings| -> Constructed {
        let count = device_count(&*driver);
        let callbacks = callbacks.clone();
        Ok(Box::new(PluggableAllocator::new(&own_name, driver, callbacks, settings, count)))
    };
    Registration::new(name, make).about("closures registered by the user").register()
}

/// Every key that a configuration may say now: the built-in ones and those of registered strategies.
#[must_use]
pub fn key_table() -> KeyTable {
    NAMES.read().key_table()
}

/// Whether allocators with these settings share one pool of the driver.
pub(crate) fn shares_pool(settings: &Settings) -> bool {
    let own = BUILT_IN.iter().find(|own| own.name == settings.backend);
    own.is_some_and(|own| (own.shares_pool)(settings))
}

/// Every name that `backend:` can say now, with what it is.
#[must_use]
pub fn backends() -> Vec<KnownBackend> {
    let names = NAMES.read();
    let users = names.registered.iter().map(|own| (own.name.as_str(), own.about.as_str()));
    let all = BUILT_IN.iter().map(|own| (own.name, own.about)).chain(users);
    all.map(|(name, about)| KnownBackend { name: name.to_owned(), about: about.to_owned() })
        .collect()
}

/// Every name that `backend:` can say now.
#[must_use]
pub fn names() -> Vec<String> {
    backends().into_iter().map(|backend| backend.name).collect()
}

/// Whether a name is known now.
///
/// # Errors
///
/// [`BuildError::UnknownBackend`], with all that are.
#[cfg(any(feature = "cli", feature = "ffi"))]
pub(crate) fn check_name(name: &str) -> Result<(), BuildError> {
    let known = names();
    if known.iter().any(|one| one == name) {
        return Ok(());
    }
    Err(BuildError::UnknownBackend { name: name.to_owned(), known })
}

/// The constructor of a registered name, which is settled from now on.
fn settle(name: &str) -> Option<Constructor> {
    let mut names = NAMES.lock();
    if let Some(own) = names.registered.iter_mut().find(|own| own.name == name) {
        own.used = true;
        return Some(Arc::clone(&own.constructor));
    }
    let new = name.len() <= NAME_MAX_BYTES && !names.unknown.iter().any(|known| known == name);
    if new && names.unknown.len() < UNKNOWN_MAX {
        names.unknown.push(name.to_owned());
    }
    None
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
    build_recording_in(&Arc::default(), config, driver, options)
}

/// The same; what happens goes to `history`, where the strategy records at all.
pub(crate) fn build_recording_in(
    history: &Arc<History>,
    config: &Config,
    driver: Arc<dyn Driver>,
    options: BuildOptions,
) -> Result<Strategy, BuildError> {
    let settings = config.settings();
    let strategy = strategy(BUILT_IN, settings, Arc::clone(&driver), options, history)?;
    let info = driver.info();
    history.describe(info.device, info.total_bytes, config);
    let was_on = history.is_on();
    let strategy = layered(settings, strategy, &driver)?;
    let HistorySettings { entries_max, snapshot_on_oom, advise_on_oom } = settings.history.clone();
    if advise_on_oom && !has_adviser() {
        return Err(BuildError::NotAvailable { what: "advise_on_oom:True".to_owned() });
    }
    if let Some(entries_max) = entries_max.filter(|_| !was_on) {
        let entries_max = usize::try_from(entries_max).unwrap_or(usize::MAX);
        // `layers:[track]` has it gather stacks.
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
    if settings.backend == "cpu" && settings.layers.contains(&LayerSetting::Guard) {
        let why = "backend:cpu takes its memory from the system, and the device cannot look at it";
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
    let Some(make) = settle(name) else {
        return Err(BuildError::UnknownBackend { name: name.to_owned(), known: names() });
    };
    match make(driver, settings) {
        Ok(made) if made.control().recording.is_some() => Ok(made.into()),
        Ok(made) => {
            let made: Box<dyn DeviceAllocator> = Box::new(record(made, history));
            Ok(made.into())
        }
        Err(source) => Err(match source.downcast::<DriverError>() {
            Ok(driver) => BuildError::Driver(*driver),
            Err(source) => BuildError::Refused { name: name.to_owned(), source },
        }),
    }
}
