//! The conformance suite: tests of the requirements on every allocator.
//!
//! The input is a constructor that builds the allocator over a given driver. The suite uses the allocator
//! only through its trait, and finds its capabilities with `control`. A capability that an allocator lacks is
//! not tested; the report lists it.
//!
//! [`run`] is for programs; [`conformance_tests!`](crate::conformance_tests) generates one test for each
//! property and device. A failure is reported with the shortest sequence of operations found that causes it.
//! Read next: `script` (operations), `fixture` (their execution), `invariants` (checks after each operation),
//! `machine` (the devices; `gates` delay their work).
//!
//! ```
//! use std::sync::Arc;
//! use stratalloc_conformance::{Device, Options, constructor, run};
//! use stratalloc::config::Settings;
//! use stratalloc::strategies::plugin::Callbacks;
//! use stratalloc::strategies::PluggableAllocator;
//!
//! // Returns ever higher addresses, and is out of memory only for single requests of 1 TiB or more.
//! let mine = constructor(|driver| {
//!     let next = std::sync::atomic::AtomicU64::new(1 << 30);
//!     let order = std::sync::atomic::Ordering::Relaxed;
//!     let allocate = move |bytes: u64, _, _| {
//!         (bytes < 1 << 40).then(|| next.fetch_add(bytes.next_multiple_of(512), order))
//!     };
//!     let callbacks = Callbacks::new(allocate, |_, _, _, _| {});
//!     Ok(Box::new(PluggableAllocator::new("mine", driver, callbacks, &Settings::default(), 1)))
//! });
//! let options = Options { scripts: 4, ..Options::default() };
//! let report = run("mine", &mine, &options)?;
//! assert_eq!(report.outcomes.iter().filter(|(_, device, _)| *device == Device::Sim).count(), 16);
//! println!("{report}");
//! # Ok::<(), stratalloc_conformance::Failure>(())
//! ```
//!
//! On `cuda` an allocator gets a part of the first CUDA device, of [`Options::device_bytes`]. All of that
//! part is released after each script. Without a device, each test that
//! [`conformance_tests!`](crate::conformance_tests) generated prints to standard error that it was skipped;
//! `STRATALLOC_REQUIRE_CUDA=1` makes that a failure. If the constructor returns
//! [`NotSupported`](stratalloc::error::DriverErrorKind::NotSupported), nothing is tested on `cuda`. To save
//! time, fewer scripts run there, and [`Property::DriverFailuresLoseNothing`] makes fewer driver calls fail.
//! Other programs on the device do not affect the tests as long as [`Options::device_bytes`] are free. An
//! empty `CUDA_VISIBLE_DEVICES` hides the device.
//!
//! On `sim` work finishes when the suite finishes it or when a call waits for it. An allocator that polls an
//! event until its work has finished would never return.
//!
//! Not tested are sharing between processes, peer access and, of private pools, checkpoints, segment
//! allocators and captures.

mod accounts;
mod cases;
mod fixture;
#[cfg(target_os = "linux")]
mod gates;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub mod gpu;
mod invariants;
mod leaks;
#[doc(hidden)]
pub mod machine;
mod model;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub mod part;
mod private_pools;
mod property;
mod report;
mod script;
mod search;
#[doc(hidden)]
pub mod skip;
mod suite;
mod tests_macro;
mod threads;

use std::sync::Arc;

use stratalloc::config::Config;
use stratalloc::driver::Driver;
use stratalloc::registry::{self, BuildOptions, Constructed};

pub use property::Property;
pub use report::{Device, Failure, Outcome, Report};
#[doc(hidden)]
pub use search::histories;
pub use suite::{run, test};

/// The result of a check: `Err` describes the violation.
pub type Checked = Result<(), String>;

/// Builds the allocator under test over a driver. The suite passes the driver of a new device each time.
pub type Build<'b> = dyn Fn(Arc<dyn Driver>) -> Constructed + Sync + 'b;

/// The extent of the tests. Values too small to test anything are raised to the smallest useful ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The number of scripts (random sequences of operations) for each property on each device. Some
    /// properties run fewer scripts or none, and a GPU runs a tenth.
    pub scripts: u64,
    /// The maximum number of operations of a script.
    pub longest: usize,
    /// The seed of the random numbers. The same seed gives the same scripts.
    pub seed: u64,
    /// The memory of the devices, in bytes.
    pub device_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { scripts: 40, longest: 60, seed: 1, device_bytes: 256 << 20 }
    }
}

impl Options {
    /// Returns the options with values raised that are too small to test anything.
    fn at_least_something(&self) -> Self {
        Self {
            scripts: self.scripts.max(1),
            longest: self.longest.max(2),
            seed: self.seed,
            device_bytes: self.device_bytes.max(1 << 20),
        }
    }

    /// Returns the options with a tenth of the scripts, because calls of a real device take long.
    #[cfg(target_os = "linux")]
    fn on_a_gpu(&self) -> Self {
        Self { scripts: self.scripts.div_ceil(10), ..self.clone() }
    }

    /// Returns the default options, with the number of scripts from the environment variable
    /// `CONFORMANCE_RUNS` if it is set.
    ///
    /// # Errors
    ///
    /// When the variable is not a whole number of at least 1.
    pub fn from_environment() -> Result<Self, String> {
        let Ok(text) = std::env::var("CONFORMANCE_RUNS") else { return Ok(Self::default()) };
        match text.parse() {
            Ok(scripts) if scripts >= 1 => Ok(Self { scripts, ..Self::default() }),
            _ => {
                Err(format!("CONFORMANCE_RUNS is {text:?}: expected a whole number of at least 1"))
            }
        }
    }
}

/// Returns a constructor for a configuration string. It enables frees by address, without a handle, if the
/// strategy supports them.
pub fn configured(text: &str) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync + '_ {
    move |driver| {
        let config = Config::parse(text, &registry::key_table())?;
        let built = registry::build(&config, driver, BuildOptions { raw_addresses: true })?;
        Ok(Box::new(built))
    }
}

/// Returns its argument. Lets the compiler infer the argument types of a closure passed to it.
pub fn constructor<F>(build: F) -> F
where
    F: Fn(Arc<dyn Driver>) -> Constructed + Sync,
{
    build
}

/// Tests one property. If it does not hold, panics with the shortest failing sequence of operations. If it is
/// not tested, prints the reason to standard error. Called by the tests of
/// [`conformance_tests!`](crate::conformance_tests).
///
/// # Panics
///
/// When the property does not hold, when `CONFORMANCE_RUNS` is not a whole number of at least 1, or when
/// there is no CUDA device and [`skip::REQUIRE_CUDA`] requires one.
pub fn assert_holds(name: &str, build: &Build<'_>, property: Property, device: Device) {
    let options = Options::from_environment();
    let tested = options.and_then(|options| {
        test(name, build, property, device, &options).map_err(|failure| failure.to_string())
    });
    let what = || format!("{name} on {device}: {property}");
    match tested {
        Ok(Outcome::Passed { .. }) => {}
        Ok(Outcome::NotTested { why }) => skip::skipped(what(), why),
        Ok(Outcome::NoDevice { detail }) => skip::for_want_of_a_device(what(), &detail),
        Err(what) => panic!("{what}"),
    }
}
