//! One allocator per device, found by its ordinal without a lock.
//!
//! PyTorch does not say when it copies from device to device, so devices that have an allocator open their
//! memory to each other (`peers:none` forbids it).

#![expect(unsafe_code, reason = "what is never freed is read without a lock")]

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::ffi::guard::{Failure, Status};
use crate::ffi::instance::{Instance, environment};
use crate::ffi::said::warn_once;
use crate::ffi::table::{self, Keeper};
use crate::stats::Statistics;
use crate::sync::Global;

/// As many as PyTorch counts.
const DEVICES_MAX: usize = 128;

/// What kind of device to open; `cuda` if it is not set.
const VARIABLE: &str = "STRATALLOC_DEVICE";

/// Whether pages may leave the process, unless the environment says so or otherwise.
static SHARES_PAGES: AtomicBool = AtomicBool::new(false);

/// The allocator of one device.
#[derive(Debug)]
pub(super) struct OpenDevice {
    pub(super) instance: Arc<Instance>,
    pub(super) handle: u64,
}

/// Where a device's allocator is, once it is made. It stays until the process ends.
#[derive(Debug)]
struct Place(AtomicPtr<OpenDevice>);

impl Place {
    #[inline]
    fn get(&self) -> Option<&'static OpenDevice> {
        // SAFETY: what stands here was leaked by `put`.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    fn put(&self, open: OpenDevice) -> &'static OpenDevice {
        let open: &'static mut OpenDevice = Box::leak(Box::new(open));
        self.0.store(open, Ordering::Release);
        open
    }
}

/// The allocators of all devices.
#[derive(Debug)]
struct Devices {
    places: [Place; DEVICES_MAX],
    /// Held while an allocator is made.
    opening: Global<()>,
}

static DEVICES: Devices = Devices::new();

thread_local! {
    /// Whether this thread makes an allocator: users' functions run then, and may fork.
    static IS_OPENING: Cell<bool> = const { Cell::new(false) };
}

/// Says so while it lives.
struct OpenedHere;

impl OpenedHere {
    fn begin() -> Self {
        IS_OPENING.set(true);
        Self
    }
}

impl Drop for OpenedHere {
    fn drop(&mut self) {
        IS_OPENING.set(false);
    }
}

impl Devices {
    const fn new() -> Self {
        let places = [const { Place(AtomicPtr::new(null_mut())) }; DEVICES_MAX];
        Self { places, opening: Global::new(()) }
    }

    #[inline]
    fn place(&self, device: c_int) -> Option<&Place> {
        usize::try_from(device).ok().and_then(|device| self.places.get(device))
    }

    fn all(&self) -> impl Iterator<Item = &'static OpenDevice> {
        self.places.iter().filter_map(Place::get)
    }

    /// A failure is not kept: the next call tries again. Nobody finds an allocator before its device and
    /// the others can use each other's memory.
    #[cold]
    fn open(
        &self,
        device: c_int,
        make: impl FnOnce() -> Result<Instance, Failure>,
    ) -> Result<&'static OpenDevice, Failure> {
        let place = self.place(device).ok_or_else(|| none(device))?;
        let _opening = self.opening.lock();
        if let Some(open) = place.get() {
            return Ok(open);
        }
        let instance = {
            let _here = OpenedHere::begin();
            Arc::new(make()?)
        };
        for other in self.all() {
            introduce(&other.instance, &instance);
            introduce(&instance, &other.instance);
        }
        let handle = table::add(Arc::clone(&instance), Keeper::Process)?;
        Ok(place.put(OpenDevice { instance, handle }))
    }
}

/// Keeps the list as it is, for a fork.
pub(in crate::ffi) fn hold() -> impl Sized + 'static {
    (!IS_OPENING.get()).then(|| DEVICES.opening.lock())
}

/// Forgets all allocators, after a fork.
pub(in crate::ffi) fn forget_all() {
    DEVICES.places.iter().for_each(|place| place.0.store(null_mut(), Ordering::Relaxed));
}

/// Opens the memory of `instance` to the device of `other`. Both work without, so a failure is only told.
fn introduce(instance: &Instance, other: &Instance) {
    let devices = [instance, other].map(|instance| instance.driver.info().device);
    if let Err(failure) = instance.let_in(devices[1]) {
        let [own, other] = devices;
        let text = failure.text;
        warn_once(format_args!("device {other} cannot use the memory of device {own}: {text}"));
    }
}

/// The allocator of a device, made if there is none yet.
#[inline]
pub(super) fn open_device(device: c_int) -> Result<&'static OpenDevice, Failure> {
    match find(device) {
        Some(open) => Ok(open),
        None => DEVICES.open(device, || open(device)),
    }
}

/// The allocator of a device that has one.
#[inline]
pub(super) fn opened(device: c_int) -> Result<&'static OpenDevice, Failure> {
    find(device).ok_or_else(|| none(device))
}

/// The allocator of a device, if it has one.
#[inline]
pub(super) fn find(device: c_int) -> Option<&'static OpenDevice> {
    DEVICES.place(device).and_then(Place::get)
}

/// The counters of a device's allocator; zeros if there is none yet, because to ask makes none.
pub(super) fn statistics(device: c_int) -> Result<Statistics, Failure> {
    let place = DEVICES.place(device).ok_or_else(|| none(device))?;
    place.get().map_or_else(|| Ok(Statistics::default()), |open| open.instance.statistics())
}

/// All allocators there are, with the ordinals of their devices.
pub(super) fn open_devices() -> impl Iterator<Item = (c_int, &'static OpenDevice)> {
    (0..).zip(&DEVICES.places).filter_map(|(device, place)| Some((device, place.get()?)))
}

/// The strategy of a device's allocator; what the environment says if there is none yet.
pub(super) fn name_in_force(device: c_int) -> Result<String, Failure> {
    let place = DEVICES.place(device).ok_or_else(|| none(device))?;
    match place.get() {
        Some(open) => Ok(open.instance.name().to_owned()),
        None => Ok(environment()?.settings().backend.clone()),
    }
}

#[cold]
fn none(device: c_int) -> Failure {
    Failure::new(Status::InvalidArgument, format_args!("device {device} has no allocator"))
}

#[cold]
fn open(device: c_int) -> Result<Instance, Failure> {
    // What is no text is no kind of device, which is said then.
    let kind = std::env::var_os(VARIABLE);
    let kind = kind.map_or_else(|| "cuda".to_owned(), |kind| kind.to_string_lossy().into_owned());
    let defaults =
        if SHARES_PAGES.load(Ordering::Relaxed) { "expandable_segments_ipc:True" } else { "" };
    Instance::open_over(defaults, &format!("{kind}:{device}"))
}

/// Says so for allocators that are made from now on.
pub(super) fn share_pages(on: bool) {
    SHARES_PAGES.store(on, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, KeyTable};
    use crate::driver::sim::SimOptions;
    use crate::driver::{Driver, FaultPlan, Faulty, Sim};
    use crate::error::DriverErrorKind;
    use crate::ids::{DeviceId, StreamId};
    use crate::size::MIB;

    /// Three devices: all but the last reach each other, and the last is reached by nobody.
    fn sims() -> [Arc<Sim>; 3] {
        [(0, 1), (1, 1), (2, 0)].map(|(device, reachable_devices)| {
            let device = DeviceId(device);
            let options = SimOptions { device, reachable_devices, ..SimOptions::default() };
            Arc::new(Sim::new(options))
        })
    }

    fn instance(conf: &str, driver: Arc<dyn Driver>) -> Result<Instance, Failure> {
        Instance::build(&Config::parse(conf, &KeyTable::default()).unwrap(), driver)
    }

    /// Uses the devices one after the other, and both before again.
    fn use_all(conf: &str, sims: &[Arc<Sim>; 3]) {
        let seats = Devices::new();
        for device in [0, 1, 2, 1, 0] {
            let sim = Arc::clone(&sims[usize::try_from(device).unwrap()]);
            let open = seats.open(device, || instance(conf, sim)).unwrap();
            for bytes in [512, 25 * MIB] {
                open.instance.allocate(bytes, StreamId::DEFAULT).unwrap();
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
            assert_eq!(sims[2].calls("enable_access"), 0, "nobody reaches it");
        }
        for conf in ["", "malloc_async_own_pool:True"] {
            let sims = sims();
            use_all(&format!("backend:cudaMallocAsync,{conf}"), &sims);
            let opened = sims.each_ref().map(|sim| sim.calls("open_pool"));
            assert_eq!(opened, [1, 1, 0], "{conf}");
        }
    }

    #[test]
    fn a_device_alone_and_one_that_is_told_not_to_open_nothing() {
        let sims = sims();
        use_all("expandable_segments:True,peers:none", &sims);
        let alone = Devices::new();
        alone.open(0, || instance("expandable_segments:True", sims[0].clone())).unwrap();
        assert_eq!(sims.map(|sim| sim.calls("enable_access")), [0; 3]);
    }

    #[test]
    fn a_device_that_cannot_be_let_in_does_not_stop_the_allocator() {
        let sims = sims();
        let seats = Devices::new();
        let conf = "expandable_segments:True";
        let faulty = Arc::new(Faulty::new(Arc::clone(&sims[0])));
        seats.open(0, || instance(conf, faulty.clone())).unwrap();
        let only = Some("enable_access");
        faulty.arm(FaultPlan { at: 0, kind: DriverErrorKind::Other, repeat: true, only });
        let open = seats.open(1, || instance(conf, sims[1].clone())).unwrap();
        open.instance.allocate(512, StreamId::DEFAULT).unwrap();
        assert_eq!(sims[1].mapped_bytes_open_to(DeviceId(0)), 2 * MIB, "the other way is open");
        seats
            .open(0, || unreachable!())
            .unwrap()
            .instance
            .allocate(512, StreamId::DEFAULT)
            .unwrap();
        assert_eq!(sims[0].mapped_bytes_open_to(DeviceId(1)), 0);
    }
}
