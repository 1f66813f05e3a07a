//! How each property is tested: its invariants, operations and devices.

use std::cell::Cell;
#[cfg(target_os = "linux")]
use std::error::Error;

use super::fixture::Fixture;
#[cfg(target_os = "linux")]
use super::gpu;
use super::invariants::{self, Invariant};
use super::machine::{Machine, SimMachine};
use super::property::Property;
use super::report::{Device, Failure, Outcome, Report};
use super::script::{Op, Script};
use super::search::{self, Broken};
use super::{Build, Checked, Options, accounts, leaks};
use stratalloc::allocator::Control;
#[cfg(target_os = "linux")]
use stratalloc::error::{DriverError, DriverErrorKind};
#[cfg(target_os = "linux")]
use stratalloc::registry::BuildError;
use stratalloc_sim::EventMode;

/// An allocator and a device to test it on.
#[derive(Clone, Copy)]
pub(super) struct Case<'a> {
    pub(super) build: &'a Build<'a>,
    pub(super) device: Device,
    pub(super) options: &'a Options,
    pub(super) machines: &'a Machines<'a>,
}

/// A test that runs on one device. The second argument is the size of the device if that is the small one,
/// else `None`. Returns the number of runs.
pub(super) type OnOneSize<'a> = dyn Fn(&Case<'_>, Option<u64>) -> Result<u64, Broken> + 'a;

/// Creates a new device of the given size.
pub(super) type Machines<'a> = dyn Fn(u64) -> Result<Box<dyn Machine>, String> + 'a;

impl Case<'_> {
    /// Creates a new device.
    pub(super) fn machine(&self) -> Result<Box<dyn Machine>, String> {
        (self.machines)(self.options.device_bytes)
    }

    /// Creates a simulated device whose work finishes at once.
    pub(super) fn sim_at_once(&self) -> SimMachine {
        SimMachine::with_events(self.options.device_bytes, EventMode::Immediate)
    }

    /// Returns whether a new allocator has a capability.
    pub(super) fn supports(&self, has: impl Fn(&Control<'_>) -> bool) -> Result<bool, Broken> {
        let probed = search::guarded(|| {
            let machine = self.machine()?;
            let made = (self.build)(machine.driver());
            let allocator = made.map_err(|error| format!("{}{error}", search::NOT_BUILT))?;
            Ok(has(&allocator.control()))
        });
        Ok(probed?)
    }

    /// Runs `work` once on a new fixture.
    pub(super) fn once<T>(
        &self,
        work: impl FnOnce(&mut Fixture<'_>) -> Result<T, String>,
    ) -> Result<T, Broken> {
        let machine = self.machine()?;
        search::on_a_fixture(&*machine, machine.driver(), self.build, work)
    }

    /// Runs half of `options.scripts` on the device, and the others on a device so small that scripts
    /// exhaust it, if the allocator works on that. Returns the number of runs.
    pub(super) fn on_a_small_device_too(
        &self,
        options: &Options,
        work: &OnOneSize<'_>,
    ) -> Result<u64, Broken> {
        let device_bytes = options.device_bytes / SMALL_PART;
        let few = options.scripts / 2;
        let most = options.scripts - few;
        let seed = options.seed.wrapping_add(most);
        let small = Options { scripts: few, seed, device_bytes, ..options.clone() };
        let small = Case { options: &small, ..*self };
        // If the allocator fails on the small device even with an empty script, all scripts run on the large
        // device. They find a fault that does not depend on the size.
        if few == 0 || small.with_a_failure(&Script::default(), None).is_err() {
            return work(&Case { options, ..*self }, None);
        }
        let large = Options { scripts: most, ..options.clone() };
        Ok(work(&Case { options: &large, ..*self }, None)? + work(&small, Some(device_bytes))?)
    }

    /// Runs random scripts, each on a new fixture. Returns the number of scripts.
    fn random(
        &self,
        keep: fn(&Op) -> bool,
        work: &dyn Fn(&mut Fixture<'_>, &Script) -> Checked,
    ) -> Result<u64, Broken> {
        search::scripts(self.options, keep, &|script| self.once(|fixture| work(fixture, script)))?;
        Ok(self.options.scripts)
    }

    /// Runs random scripts and checks an invariant.
    fn scripts(&self, keep: fn(&Op) -> bool, invariant: Invariant) -> Result<Outcome, Broken> {
        self.scripts_where(keep, invariant, |_| true, "")
    }

    /// Like [`scripts`](Self::scripts). The result is "not tested" because of `why` if `tests` holds for
    /// no fixture at the end of its script.
    fn scripts_where(
        &self,
        keep: fn(&Op) -> bool,
        invariant: Invariant,
        tests: fn(&Fixture<'_>) -> bool,
        why: &'static str,
    ) -> Result<Outcome, Broken> {
        let tested = Cell::new(false);
        let runs = self.random(keep, &|fixture, script| {
            let done = search::follow(fixture, script, &[invariant]);
            tested.set(tested.get() || tests(fixture));
            done
        })?;
        Ok(Outcome::of(tested.get(), runs, why))
    }

    fn test(&self, property: Property) -> Result<Outcome, Broken> {
        match property {
            Property::LiveBlocksNeverOverlap => {
                self.scripts(Op::is_plain, invariants::live_blocks_never_overlap)
            }
            Property::BlocksAreLargeEnough => {
                self.scripts(Op::is_plain, invariants::blocks_are_large_enough)
            }
            Property::BytesStayIntact => match self.device {
                Device::Sim => Ok(Outcome::NotTested { why: "the device has no bytes" }),
                Device::Host | Device::Cuda => self.scripts_where(
                    Op::is_plain,
                    invariants::bytes_stay_intact,
                    |fixture| fixture.from_driver == Some(true),
                    ELSEWHERE,
                ),
            },
            Property::ReuseWaitsForWork => self.scripts_where(
                Op::is_plain,
                invariants::reuse_waits_for_work,
                |fixture| fixture.from_driver.is_some() && !fixture.is_streamless(),
                "its memory is not the device's and it supports no streams",
            ),
            Property::IllegalRequestsAreRefused => {
                let keep = |op: &Op| match op {
                    Op::Misuse { what, .. } => what.is_request(),
                    _ => matches!(op, Op::Allocate { .. } | Op::Free { .. }),
                };
                self.strange_places()?;
                self.scripts(keep, invariants::misuse_is_refused)
            }
            Property::WrongHandlesAreRefused => {
                let keep = |op: &Op| match op {
                    Op::Misuse { what, .. } => !what.is_request(),
                    _ => true,
                };
                self.scripts(keep, invariants::misuse_is_refused)
            }
            Property::CountersEqualARecount => self.counters(),
            Property::EmptyingTheCacheKeepsLiveBlocks => self.emptying(),
            Property::EverythingIsReleased => self.giving_back(),
            Property::RunningOutIsAnError => self.running_out(),
            Property::PressureHooksAreCalled => self.pressure(),
            Property::DriverFailuresLoseNothing => self.driver_failures(),
            Property::LimitsAreRespected => self.limits(),
            Property::BareAddressesAreChecked => self.bare_addresses(),
            Property::PrivatePoolsAreApart => self.private_pools(),
            Property::ThreadsGetBlocksOfTheirOwn => self.threads(),
        }
    }

    /// Tests a property on a real device, where a constructor may report that the device lacks a
    /// feature.
    #[cfg(target_os = "linux")]
    fn test_what_can_be(&self, property: Property) -> Result<Outcome, Broken> {
        let made = search::guarded(|| Ok((self.build)(self.machine()?.driver()).err()));
        match made {
            Ok(Some(error)) if lacks(&*error) => Ok(Outcome::NotTested { why: LACKS }),
            // Other errors of the constructor are found again, and reported, by the test itself.
            _ => self.test(property),
        }
    }

    fn counters(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.counters.is_some())? {
            return Ok(Outcome::NotTested { why: "it offers no counters" });
        }
        let runs = self.on_a_small_device_too(self.options, &|case, _| {
            case.random(|_| true, &|fixture, script| {
                search::follow(fixture, script, &[accounts::counters_equal_a_recount])?;
                fixture.free_everything()?;
                accounts::counters_end_at_nothing(fixture)
            })
        })?;
        Ok(Outcome::Passed { runs })
    }

    fn emptying(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.caching.is_some())? {
            return Ok(Outcome::NotTested { why: NO_CACHE });
        }
        let runs = self.random(Op::is_plain, &|fixture, script| {
            search::follow(fixture, script, &[invariants::live_blocks_are_reachable])?;
            fixture.free_everything()?;
            fixture.perform(&Op::EmptyCache)?;
            fixture.check_nothing_is_reserved()
        })?;
        Ok(Outcome::Passed { runs })
    }

    fn giving_back(&self) -> Result<Outcome, Broken> {
        let from_driver = Cell::new(false);
        let keep = |op: &Op| !matches!(op, Op::Misuse { .. });
        search::scripts(self.options, keep, &|script| {
            // The allocator is dropped once with all blocks freed, and once with live blocks.
            self.goes(script, true, &from_driver)?;
            self.goes(script, false, &from_driver)
        })?;
        Ok(Outcome::of(from_driver.get(), 2 * self.options.scripts, ELSEWHERE))
    }

    fn goes(
        &self,
        script: &Script,
        handed_back: bool,
        from_driver: &Cell<bool>,
    ) -> Result<(), Broken> {
        let machine = self.machine()?;
        let before = machine.held();
        let lines = search::on_a_fixture(&*machine, machine.driver(), self.build, |fixture| {
            search::follow(fixture, script, &[])?;
            if handed_back {
                fixture.free_everything()?;
            }
            fixture.forget_all()?;
            fixture.lines.push(format!("it goes with {} blocks in use", fixture.model.live.len()));
            from_driver.set(from_driver.get() || fixture.from_driver == Some(true));
            Ok(fixture.lines.clone())
        })?;
        let released = leaks::all_came_back(&before, &machine.held());
        released.map_err(|what| Broken { what, lines, seed: None })
    }
}

/// Returns true if a constructor reports that the device lacks a feature.
#[cfg(target_os = "linux")]
fn lacks(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref::<DriverError>() {
        return error.kind() == DriverErrorKind::NotSupported;
    }
    match error.downcast_ref::<BuildError>() {
        Some(BuildError::Driver(error)) => error.kind() == DriverErrorKind::NotSupported,
        Some(BuildError::Refused { source, .. }) => lacks(&**source),
        _ => false,
    }
}

/// The small device has the memory of the large one divided by this.
const SMALL_PART: u64 = 8;

/// The reason for not testing properties of memory of the driver.
pub(super) const ELSEWHERE: &str = "its memory does not come from the driver";

/// The reason for not testing the cache.
pub(super) const NO_CACHE: &str = "it offers no control over cached memory";

/// The reason for not testing on a device.
#[cfg(target_os = "linux")]
const LACKS: &str = "its constructor reports that the device lacks a feature it needs";

/// Tests one property of the allocator that `build` makes, on one device. Tests on the CUDA device run one at
/// a time.
///
/// # Errors
///
/// [`Failure`], with the shortest sequence of operations found that shows it.
pub fn test(
    name: &str,
    build: &Build<'_>,
    property: Property,
    device: Device,
    options: &Options,
) -> Result<Outcome, Failure> {
    let options = &options.at_least_something();
    let broken = |Broken { what, lines, seed }| Failure {
        name: name.to_owned(),
        property,
        device,
        what,
        lines,
        seed: seed.unwrap_or(options.seed),
    };
    let on = |machines: &Machines<'_>| {
        Case { build, device, options, machines }.test(property).map_err(broken)
    };
    let absent = |what: String| broken(what.into());
    match device {
        Device::Sim => on(&|bytes| Ok(Box::new(SimMachine::new(bytes)))),
        #[cfg(target_os = "linux")]
        Device::Host => on(&|bytes| Ok(Box::new(super::machine::HostMachine::new(bytes)))),
        #[cfg(not(target_os = "linux"))]
        Device::Host => Err(absent("the host driver needs Linux".to_owned())),
        #[cfg(target_os = "linux")]
        Device::Cuda => {
            let cuda = match gpu::first() {
                Ok(cuda) => cuda,
                Err(error) if gpu::is_absent(&error) => {
                    return Ok(Outcome::NoDevice { detail: error.to_string() });
                }
                Err(error) => return Err(absent(format!("the CUDA device: {error}"))),
            };
            let _alone = gpu::alone();
            let options = &options.on_a_gpu();
            let machines: &Machines<'_> = &|bytes| Ok(gpu::part(&cuda, bytes));
            let case = Case { build, device, options, machines };
            case.test_what_can_be(property).map_err(broken)
        }
        #[cfg(not(target_os = "linux"))]
        Device::Cuda => Err(absent("CUDA devices need Linux".to_owned())),
    }
}

/// Tests every property on every kind of device of this system.
///
/// # Errors
///
/// The first [`Failure`].
pub fn run(name: &str, build: &Build<'_>, options: &Options) -> Result<Report, Failure> {
    let mut outcomes = Vec::new();
    for &device in Device::ALL {
        for &property in Property::ALL {
            let outcome = test(name, build, property, device, options)?;
            outcomes.push((property, device, outcome));
        }
    }
    Ok(Report { name: name.to_owned(), outcomes })
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
