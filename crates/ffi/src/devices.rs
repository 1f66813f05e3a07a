//! The process's allocators of devices: one per device, found by the device's ordinal without a lock.
//!
//! The functions for PyTorch and those for other libraries use them. They are never freed, because blocks
//! may outlive everything that could destroy them. `table` stores them.
//!
//! PyTorch does not announce copies between devices. So all devices that have an allocator give each
//! other peer access, with any strategy. They do so before the second device allocates its first block.
//! `peers:none` prevents it.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use super::fork;
use super::guard::Failure;
use super::instance::{InForce, Instance, environment_over, further, parse};
use super::messages::warn_once;
use super::table::{PERMANENT, Permanent};
use stratalloc::allocator::{Counters, DeviceAllocator};
use stratalloc::config::Config;
use stratalloc::registry::built_in;
use stratalloc::stats::Statistics;
use stratalloc::sync::{Global, Rank};

/// The variable with the kind of device to open. `cuda` if it is not set.
const VARIABLE: &str = "STRATALLOC_DEVICE";

/// The default of `expandable_segments_ipc`, unless the environment sets it.
static SHARES_PAGES: AtomicBool = AtomicBool::new(false);

/// The allocators of all devices.
#[derive(Debug)]
struct Devices {
    existing: &'static Permanent,
    /// The configuration of allocators that are created later. `None`, which means the environment's,
    /// until a string was applied to all devices. Locked while an allocator is created or all are
    /// changed.
    opening: Global<Option<Config>>,
}

static DEVICES: Devices = Devices::of(&PERMANENT);

impl Devices {
    const fn of(existing: &'static Permanent) -> Self {
        Self { existing, opening: Global::new(Rank::Devices, None) }
    }

    fn all(&self) -> impl Iterator<Item = &'static Instance> {
        self.existing.all().map(|(_, instance)| instance)
    }

    /// Creates a device's allocator with `make`, unless there is one. After a failure, the next call
    /// tries again. Other threads can find the allocator only after peer access between its device and
    /// the others was enabled.
    #[cold]
    fn open(
        &'static self,
        device: c_int,
        make: impl FnOnce(Option<&Config>) -> Result<Instance, Failure>,
    ) -> Result<&'static Instance, Failure> {
        let entry = self.existing.entry(device).ok_or_else(|| none(device))?;
        let later = self.opening.lock();
        if let Some(open) = entry.get() {
            return Ok(open);
        }
        let instance = {
            let _here = fork::while_holding(Rank::Devices);
            make(later.as_ref())?
        };
        for other in self.all() {
            introduce(other, &instance);
            introduce(&instance, other);
        }
        Ok(entry.put(instance))
    }

    /// Applies a configuration string to all devices, including those that are opened later. If that
    /// fails, the devices keep their former configuration, with the exception below.
    ///
    /// First checks on all devices what can be checked without changes. If a driver fails afterwards,
    /// restores the former configuration of the devices that were already changed. A device on which that
    /// fails, too, keeps the new one, and a warning is written.
    #[cold]
    fn set_conf(
        &'static self,
        text: &str,
        environment: impl FnOnce() -> Result<Config, Failure>,
    ) -> Result<(), Failure> {
        let mut later = self.opening.lock();
        let _here = fork::while_holding(Rank::Devices);
        let before = later.clone().map_or_else(environment, Ok)?;
        let next = further(&before, text)?;
        for open in self.all() {
            open.check_conf(text)?;
        }
        let mut changed = Vec::new();
        for open in self.all() {
            let in_force = open.in_force();
            if let Err(failure) = open.set_conf(text) {
                for (instance, before) in changed.into_iter().rev() {
                    restore(instance, before);
                }
                return Err(failure);
            }
            changed.push((open, in_force));
        }
        *later = Some(next);
        Ok(())
    }
}

fn restore(instance: &Instance, before: InForce) {
    if let Err(failure) = instance.restore(before) {
        let device = instance.driver.info().device;
        let what = "keeps a configuration that others refused";
        warn_once(format_args!("device {device} {what}: {}", failure.text));
    }
}

/// Gives the device of `other` access to the memory of `instance`. A failure only causes a warning,
/// because both allocators work without this access.
fn introduce(instance: &Instance, other: &Instance) {
    let devices = [instance, other].map(|instance| instance.driver.info().device);
    if let Err(failure) = instance.enable_peer(devices[1]) {
        let [own, other] = devices;
        let text = failure.text;
        warn_once(format_args!("device {other} cannot use the memory of device {own}: {text}"));
    }
}

/// Returns the allocator of a device. Creates it if there is none yet.
#[inline]
pub(super) fn open_device(device: c_int) -> Result<&'static Instance, Failure> {
    match find(device) {
        Some(open) => Ok(open),
        None => DEVICES.open(device, |later| open(device, later)),
    }
}

/// Returns the allocator of a device, or a failure if it has none.
#[inline]
pub(super) fn opened(device: c_int) -> Result<&'static Instance, Failure> {
    find(device).ok_or_else(|| none(device))
}

/// Returns the allocator of a device, if it has one.
#[inline]
pub(super) fn find(device: c_int) -> Option<&'static Instance> {
    PERMANENT.get(device)
}

/// Returns the counters of a device's allocator. Returns zeros if there is none yet, and creates none.
pub(super) fn statistics(device: c_int) -> Result<Statistics, Failure> {
    let entry = PERMANENT.entry(device).ok_or_else(|| none(device))?;
    Ok(entry.get().map_or_else(Statistics::default, |open| open.allocator.statistics()))
}

/// Returns all existing allocators, with the ordinals of their devices.
pub(super) fn open_devices() -> impl Iterator<Item = (c_int, &'static Instance)> {
    PERMANENT.all()
}

/// Returns the strategy of a device's allocator. Returns the configured one if there is no allocator
/// yet.
pub(super) fn name_in_force(device: c_int) -> Result<String, Failure> {
    let entry = PERMANENT.entry(device).ok_or_else(|| none(device))?;
    match entry.get() {
        Some(open) => Ok(open.allocator.name().to_owned()),
        None => {
            let later = DEVICES.opening.read().clone();
            let config = later.map_or_else(environment_with_defaults, Ok)?;
            Ok(config.settings().backend.clone())
        }
    }
}

/// Returns the line with which PyTorch's own out-of-memory errors begin on this device. Empty for most
/// strategies.
pub(super) fn oom_line(device: c_int) -> Result<String, Failure> {
    let words = built_in(&name_in_force(device)?).map_or("", |own| own.torch_oom_words);
    Ok(match words {
        "" => String::new(),
        words => format!("Allocation on device {device} {words}\n"),
    })
}

/// Applies a configuration string to all devices or to none. See [`Devices::set_conf`].
pub(super) fn set_conf(text: &str) -> Result<(), Failure> {
    DEVICES.set_conf(text, environment_with_defaults)
}

#[cold]
fn none(device: c_int) -> Failure {
    Failure::invalid(format_args!("device {device} has no allocator"))
}

#[cold]
fn open(device: c_int, later: Option<&Config>) -> Result<Instance, Failure> {
    // A value that is not UTF-8 names no kind of device. Converted lossily, so that the error message
    // can contain it.
    let kind = std::env::var_os(VARIABLE);
    let kind = kind.map_or_else(|| "cuda".to_owned(), |kind| kind.to_string_lossy().into_owned());
    let config = later.cloned().map_or_else(environment_with_defaults, Ok)?;
    fork::prepare_for();
    Instance::open_over(defaults(), &config, &format!("{kind}:{device}"))
}

/// Returns the default values of the devices' allocators that differ from the built-in ones, as a
/// configuration string.
fn defaults() -> &'static str {
    if SHARES_PAGES.load(Ordering::Relaxed) { "expandable_segments_ipc:True" } else { "" }
}

/// Returns the configuration of the devices' allocators if the environment sets nothing.
pub(super) fn default_config() -> Result<Config, Failure> {
    parse(defaults())
}

/// Reads the configuration from the environment, over the default values of the devices'
/// allocators.
fn environment_with_defaults() -> Result<Config, Failure> {
    environment_over(defaults())
}

/// Sets the default of `expandable_segments_ipc` for allocators that are created later.
pub(super) fn share_pages(on: bool) {
    SHARES_PAGES.store(on, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use stratalloc::config::KeyTable;
    use stratalloc::driver::Driver;
    use stratalloc::error::DriverErrorKind;
    use stratalloc::ids::{DeviceId, PoolId, StreamId};
    use stratalloc::size::MIB;
    use stratalloc_sim::{FaultControl, FaultPlan, Faulty, Sim, SimOptions};

    /// Returns three devices. The first two can access each other, and no device can access the last.
    fn sims() -> [Arc<Sim>; 3] {
        [(0, 1), (1, 1), (2, 0)].map(|(device, reachable_devices)| {
            let device = DeviceId(device);
            let options = SimOptions { device, reachable_devices, ..SimOptions::default() };
            Arc::new(Sim::new(options))
        })
    }

    fn none_open() -> &'static Devices {
        Box::leak(Box::new(Devices::of(Box::leak(Box::new(Permanent::new())))))
    }

    fn instance(conf: &str, driver: Arc<dyn Driver>) -> Result<Instance, Failure> {
        Instance::build(&Config::parse(conf, &KeyTable::default()).unwrap(), driver)
    }

    /// Uses each device in turn, then the first two once more.
    fn use_all(conf: &str, sims: &[Arc<Sim>; 3]) {
        let devices = none_open();
        for device in [0, 1, 2, 1, 0] {
            let sim = Arc::clone(&sims[usize::try_from(device).unwrap()]);
            let open = devices.open(device, |_| instance(conf, sim)).unwrap();
            for bytes in [512, 25 * MIB] {
                open.allocate(bytes, StreamId::DEFAULT).unwrap();
            }
        }
    }

    #[test]
    fn devices_that_are_used_open_their_memory_to_each_other() {
        for conf in ["", "expandable_segments:True", "layers:[statistics],expandable_segments:True"]
        {
            let sims = sims();
            use_all(conf, &sims);
            for (sim, other) in [(0, 1), (1, 0)] {
                let (sim, other) = (&sims[sim], DeviceId(other));
                assert_eq!(sim.mapped_bytes_open_to(other), sim.held().mapped_bytes(), "{conf}");
                assert_eq!(sim.calls("enable_access"), 1, "{conf}");
                assert_eq!(sim.mapped_bytes_open_to(DeviceId(2)), 0);
            }
            assert_eq!(sims[2].calls("enable_access"), 0, "no device can reach it");
        }
        for conf in ["", "malloc_async_own_pool:True"] {
            let sims = sims();
            use_all(&format!("backend:cudaMallocAsync,{conf}"), &sims);
            let opened = sims.each_ref().map(|sim| sim.calls("open_pool"));
            assert_eq!(opened, [1, 1, 0], "{conf}");
        }
    }

    #[test]
    fn one_device_and_peers_none_enable_no_access() {
        let sims = sims();
        use_all("expandable_segments:True,peers:none", &sims);
        let alone = none_open();
        alone.open(0, |_| instance("expandable_segments:True", sims[0].clone())).unwrap();
        assert_eq!(sims.map(|sim| sim.calls("enable_access")), [0; 3]);
    }

    #[test]
    fn a_device_that_cannot_be_given_access_does_not_stop_the_allocator() {
        let sims = sims();
        let devices = none_open();
        let conf = "expandable_segments:True";
        let faulty = Arc::new(Faulty::new(Arc::clone(&sims[0])));
        devices.open(0, |_| instance(conf, faulty.clone())).unwrap();
        let only = Some("enable_access");
        faulty.arm(FaultPlan { at: 0, kind: DriverErrorKind::Other, repeat: true, only });
        let open = devices.open(1, |_| instance(conf, sims[1].clone())).unwrap();
        open.allocate(512, StreamId::DEFAULT).unwrap();
        assert_eq!(sims[1].mapped_bytes_open_to(DeviceId(0)), 2 * MIB, "the other way is open");
        devices.open(0, |_| unreachable!()).unwrap().allocate(512, StreamId::DEFAULT).unwrap();
        assert_eq!(sims[0].mapped_bytes_open_to(DeviceId(1)), 0);
    }

    /// Opens two devices. The result can open a third one.
    fn two_open(drivers: [Arc<dyn Driver>; 2]) -> &'static Devices {
        let devices = none_open();
        for (device, driver) in (0..).zip(drivers) {
            devices.open(device, |_| instance("", driver)).unwrap();
        }
        devices
    }

    fn configurations(devices: &Devices) -> Vec<(String, Option<u64>)> {
        let of = |open: &Instance| {
            let InForce { config, .. } = open.in_force();
            (open.allocator.name().to_owned(), config.settings().max_split_bytes)
        };
        devices.all().map(of).collect()
    }

    fn nothing() -> Result<Config, Failure> {
        Ok(Config::default())
    }

    #[test]
    fn a_string_that_one_device_refuses_changes_none() {
        let [first, second, third] = sims();
        let devices = two_open([first, second]);
        devices.set_conf("max_split_size_mb:64", nothing).unwrap();
        let both = vec![("native".to_owned(), Some(64 * MIB)); 2];
        assert_eq!(configurations(devices), both);
        let pool = PoolId { capture: 0, user: 7 };
        let used = devices.existing.get(1).unwrap();
        used.pools().unwrap().create_pool(pool, Default::default()).unwrap();
        let switch = "backend:cudaMallocAsync,max_split_size_mb:200";
        assert!(devices.set_conf(switch, nothing).is_err(), "a pool of the second has a user");
        assert_eq!(configurations(devices), both);
        let open = devices.open(2, |later| {
            let config = later.cloned().unwrap();
            Instance::build(&config, third)
        });
        let config = open.unwrap().in_force().config;
        assert_eq!(config.settings().max_split_bytes, Some(64 * MIB), "the last accepted string");
    }

    #[test]
    fn a_driver_that_refuses_late_brings_the_former_configuration_back() {
        let [first, second, _] = sims();
        let faulty = Arc::new(Faulty::new(second));
        let devices = two_open([first, faulty.clone()]);
        devices.set_conf("max_split_size_mb:64", nothing).unwrap();
        let before = configurations(devices);
        let limited = devices.existing.get(0).unwrap();
        limited.caching().unwrap().set_limit_bytes(Some(30 * MIB));
        let only = Some("create_pool");
        faulty.arm(FaultPlan { at: 0, kind: DriverErrorKind::Other, repeat: true, only });
        let switch = "backend:cudaMallocAsync,malloc_async_own_pool:True";
        assert!(devices.set_conf(switch, nothing).is_err());
        assert_eq!(configurations(devices), before);
        assert_eq!(limited.caching().unwrap().limit_bytes(), Some(30 * MIB));
    }
}
