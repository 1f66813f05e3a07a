//! The built-in strategies, one row for each.

use std::sync::Arc;

use super::{BuildError, BuildOptions};
use crate::config::{PluggableSettings, Settings};
use crate::driver::Driver;
use crate::error::{DriverError, DriverErrorKind};
use crate::history::History;
use crate::strategies::native::{Engine, EngineOptions};
use crate::strategies::plugin::Callbacks;
use crate::strategies::{
    CpuAllocator, MallocAsyncAllocator, PinnedAllocator, PluggableAllocator, Strategy,
};

/// A built-in strategy.
#[derive(Clone, Copy, Debug)]
pub struct Backend {
    /// The name that `backend:` accepts.
    pub name: &'static str,
    /// A second name that `backend:` accepts; equal to `name` if there is none.
    pub alias: &'static str,
    /// A description in one line.
    pub about: &'static str,
    /// The words that PyTorch's own out-of-memory errors have with this strategy only, and that programs
    /// search for. Empty if there are none.
    pub torch_oom_words: &'static str,
    pub(crate) build: fn(Build<'_>) -> Result<Strategy, BuildError>,
    /// Returns true if allocators with these settings share one memory pool of the driver.
    pub(crate) shares_pool: fn(&Settings) -> bool,
}

/// The arguments from which a strategy is built.
pub(crate) struct Build<'s> {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) settings: &'s Settings,
    pub(crate) options: BuildOptions,
    pub(crate) history: Arc<History>,
}

/// The built-in strategies.
pub const BUILT_IN: &[Backend] = &[
    row("native", native, "fixed segments cached per stream; PyTorch's decisions"),
    Backend {
        alias: "hipMallocAsync",
        torch_oom_words: "would exceed allowed memory. (out of memory)",
        shares_pool: |settings| !settings.malloc_async_own_pool,
        ..row("cudaMallocAsync", malloc_async, "the driver's stream-ordered pools")
    },
    row("pluggable", pluggable, "your own functions, from a shared library written for PyTorch"),
    row("cpu", cpu, "memory of the host, cached by exact size"),
    row("pinned", pinned, "page-locked memory of the host, cached by size"),
];

const fn row(
    name: &'static str,
    build: fn(Build<'_>) -> Result<Strategy, BuildError>,
    about: &'static str,
) -> Backend {
    Backend { name, alias: name, about, torch_oom_words: "", build, shares_pool: |_| false }
}

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

/// Refuses a device that has memory of its own. Its kernels cannot use the host addresses of
/// `backend:cpu`.
fn cpu(build: Build<'_>) -> Result<Strategy, BuildError> {
    let info = build.driver.info();
    if !matches!(info.driver, "host" | "sim") {
        let message = format!(
            "backend:cpu allocates host memory, which {}:{} cannot use as device memory",
            info.driver, info.device
        );
        return Err(DriverError::new(DriverErrorKind::NotSupported, "build", 0, message).into());
    }
    Ok(CpuAllocator::recording_in(info.device, build.settings, build.history)?.into())
}

fn pinned(build: Build<'_>) -> Result<Strategy, BuildError> {
    Ok(PinnedAllocator::recording_in(build.driver, build.settings, build.history)?.into())
}

fn pluggable(build: Build<'_>) -> Result<Strategy, BuildError> {
    let Build { driver, settings, history, .. } = build;
    let own = &settings.pluggable;
    for (key, value) in
        [("library", &own.library), ("alloc_fn", &own.alloc_fn), ("free_fn", &own.free_fn)]
    {
        if value.is_none() {
            return Err(BuildError::MissingKey { backend: settings.backend.clone(), key });
        }
    }
    let callbacks = load(own)?;
    let count = device_count(&*driver);
    let own = PluggableAllocator::new("pluggable", driver, callbacks, settings, count);
    let mut own = Box::new(own);
    own.history = history;
    Ok(own.into())
}

#[cfg(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64"))]
fn load(own: &PluggableSettings) -> Result<Callbacks, BuildError> {
    Ok(crate::strategies::plugin::load(own)?)
}

#[cfg(not(all(feature = "pluggable", target_os = "linux", target_pointer_width = "64")))]
fn load(own: &PluggableSettings) -> Result<Callbacks, BuildError> {
    let what = format!(
        "backend:pluggable with library {} (it needs 64-bit Linux and the feature pluggable)",
        own.library.as_deref().unwrap_or_default()
    );
    Err(BuildError::NotAvailable { what })
}

/// Returns the number of devices of this kind. The library of `backend:pluggable` receives it in
/// `init_fn`.
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
    use crate::config::BUILT_IN_BACKENDS;
    use crate::driver::call::{Call, calls, forward};
    use crate::driver::{CaptureStatus, DeviceInfo, DriverResult, MemoryInfo, lacking};
    use crate::ids::{DeviceId, EventId, StreamId};

    /// A device on which every call fails.
    #[derive(Debug)]
    struct Refuses;

    fn refuse<T>(
        _: &Refuses,
        call: Call,
        _: impl FnOnce(&Refuses) -> DriverResult<T>,
    ) -> DriverResult<T> {
        Err(lacking(call))
    }

    impl Driver for Refuses {
        fn info(&self) -> DeviceInfo {
            DeviceInfo { device: DeviceId(0), name: String::new(), driver: "none", total_bytes: 0 }
        }

        calls! { Driver forward refuse; }
    }

    #[test]
    fn the_keys_know_every_row() {
        assert!(BUILT_IN.iter().map(|row| row.name).eq(BUILT_IN_BACKENDS));
    }

    #[test]
    fn a_row_adds_a_strategy() {
        let build: fn(Build<'_>) -> Result<Strategy, BuildError> = |build| {
            let callbacks = Callbacks::new(|_, _, _| None, |_, _, _, _| {});
            let own = PluggableAllocator::new("added", build.driver, callbacks, build.settings, 1);
            Ok(Box::new(own).into())
        };
        let added = row("added", build, "");
        let settings = Settings { backend: "added".to_owned(), ..Settings::default() };
        let made = |rows: &[Backend]| {
            let driver = Arc::new(Refuses);
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
