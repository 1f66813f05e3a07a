//! The built-in strategies: one row for each.

use std::sync::Arc;

use super::{BuildError, BuildOptions};
use crate::config::Settings;
use crate::driver::Driver;
use crate::error::{DriverError, DriverErrorKind};
use crate::history::History;
use crate::strategies::native::{Engine, EngineOptions};
use crate::strategies::plugin::{Callbacks, LibraryFunctions};
use crate::strategies::{CpuAllocator, MallocAsyncAllocator, PluggableAllocator, Strategy};

/// A built-in strategy.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// The name that `backend:` accepts.
    pub name: &'static str,
    /// Another name, or the same.
    pub alias: &'static str,
    /// What it is, in a line.
    pub about: &'static str,
    pub(crate) build: fn(Build<'_>) -> Result<Strategy, BuildError>,
    /// Whether allocators with these settings share one pool of the driver.
    pub(crate) shares_pool: fn(&Settings) -> bool,
}

/// What a strategy is built from.
pub(crate) struct Build<'s> {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) settings: &'s Settings,
    pub(crate) options: BuildOptions,
    pub(crate) history: Arc<History>,
}

/// The built-in strategies.
pub const BUILT_IN: &[Backend] = &[
    Backend {
        name: "native",
        alias: "native",
        about: "fixed segments cached per stream; PyTorch's decisions",
        build: native,
        shares_pool: |_| false,
    },
    Backend {
        name: "cudaMallocAsync",
        alias: "hipMallocAsync",
        about: "the driver's stream-ordered pools",
        build: malloc_async,
        shares_pool: |settings| !settings.malloc_async_own_pool,
    },
    Backend {
        name: "pluggable",
        alias: "pluggable",
        about: "your own functions, from a shared library written for PyTorch",
        build: pluggable,
        shares_pool: |_| false,
    },
    Backend {
        name: "cpu",
        alias: "cpu",
        about: "memory of the host, cached by exact size",
        build: cpu,
        shares_pool: |_| false,
    },
];

fn native(build: Build<'_>) -> Result<Strategy, BuildError> {
    let Build { driver, settings, options: BuildOptions { raw_addresses }, history } = build;
    let options = EngineOptions { settings: settings.clone(), raw_addresses, history };
    Ok(Box::new(Engine::new(driver, &options)?).into())
}

fn malloc_async(build: Build<'_>) -> Result<Strategy, BuildError> {
    let mut own = Box::new(MallocAsyncAllocator::new(build.driver, build.settings)?);
    own.history = build.history;
    Ok(own.into())
}

/// On a device that has memory of its own, programs would take an address of the host for one of the
/// device.
fn cpu(build: Build<'_>) -> Result<Strategy, BuildError> {
    let info = build.driver.info();
    if !matches!(info.driver, "host" | "sim") {
        let message = format!(
            "backend:cpu gives out memory of the host, which {}:{} does not take for its own",
            info.driver, info.device
        );
        return Err(DriverError::new(DriverErrorKind::NotSupported, "build", 0, message).into());
    }
    Ok(CpuAllocator::recording_in(info.device, build.settings, build.history)?.into())
}

fn pluggable(build: Build<'_>) -> Result<Strategy, BuildError> {
    let Build { driver, settings, history, .. } = build;
    let own = &settings.pluggable;
    let required = |value: &Option<String>, key: &'static str| {
        let backend = settings.backend.clone();
        value.clone().ok_or(BuildError::MissingKey { backend, key })
    };
    let library = required(&own.library, "library")?;
    let (alloc, free) = (required(&own.alloc_fn, "alloc_fn")?, required(&own.free_fn, "free_fn")?);
    let callbacks = load(&LibraryFunctions {
        library: library.into(),
        alloc,
        free,
        init: own.init_fn.clone(),
        reset: own.reset_fn.clone(),
        memory_fraction: own.memory_fraction_fn.clone(),
        base_alloc: own.base_alloc_fn.clone(),
        record_stream: own.record_stream_fn.clone(),
        begin_allocate_to_pool: own.begin_allocate_to_pool_fn.clone(),
        end_allocate_to_pool: own.end_allocate_to_pool_fn.clone(),
        release_pool: own.release_pool_fn.clone(),
    })?;
    let count = device_count(&*driver);
    let own = PluggableAllocator::new("pluggable", driver, callbacks, settings, count);
    let mut own = Box::new(own);
    own.history = history;
    Ok(own.into())
}

#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
fn load(functions: &LibraryFunctions) -> Result<Callbacks, BuildError> {
    Ok(crate::strategies::plugin::load(functions)?)
}

#[cfg(not(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64")))]
fn load(functions: &LibraryFunctions) -> Result<Callbacks, BuildError> {
    let what = format!(
        "backend:pluggable with library {} (it needs 64-bit Linux and the feature pluggable)",
        functions.library.display()
    );
    Err(BuildError::NotAvailable { what })
}

/// How many devices of its kind there are: for users' functions that want to know.
pub(crate) fn device_count(driver: &dyn Driver) -> u32 {
    let info = driver.info();
    #[cfg(all(feature = "cuda", target_pointer_width = "64", unix))]
    if info.driver == "cuda"
        && let Ok(count) = crate::driver::Cuda::count()
    {
        return count;
    }
    info.device.0 + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::DeviceAllocator;
    use crate::driver::Sim;
    use crate::driver::sim::SimOptions;

    #[test]
    fn a_row_adds_a_strategy() {
        let build: fn(Build<'_>) -> Result<Strategy, BuildError> = |build| {
            let callbacks = Callbacks::new(|_, _, _| None, |_, _, _, _| {});
            let own = PluggableAllocator::new("added", build.driver, callbacks, build.settings, 1);
            Ok(Box::new(own).into())
        };
        let added = Backend { name: "added", alias: "added", about: "", build, ..BUILT_IN[0] };
        let settings = Settings { backend: "added".to_owned(), ..Settings::default() };
        let made = |rows: &[Backend]| {
            let driver = Arc::new(Sim::new(SimOptions::default()));
            super::super::strategy(
                rows,
                &settings,
                driver,
                BuildOptions::default(),
                &Arc::default(),
            )
        };
        assert_eq!(made(&[added]).expect("the row builds it").name(), "added");
        assert!(matches!(made(&[]), Err(BuildError::UnknownBackend { .. })));
    }
}
