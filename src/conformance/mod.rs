//! The conformance suite: what every allocator must do, as tests for anybody's allocator.
//!
//! The input is a constructor, as the registry takes it; the suite uses the allocator through its trait
//! alone and asks for capabilities by their accessors. What an allocator does not offer is not tested,
//! and the report says so. [`run`] is for programs; [`conformance_tests!`](crate::conformance_tests)
//! writes one test for each property and device. A failure comes with the shortest sequence of
//! operations that shows it. Read next: `script` (operations), `bed` (what they do), `laws` (what must
//! hold after each), `machine` (the devices; `gates` hold their work back).
//!
//! ```
//! use std::sync::Arc;
//! use stratalloc::conformance::{Device, Options, constructor, run};
//! use stratalloc::config::Settings;
//! use stratalloc::strategies::plugin::Callbacks;
//! use stratalloc::strategies::PluggableAllocator;
//!
//! // Gives out numbers and never the same one twice; running out is nothing it knows.
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
//! # Ok::<(), stratalloc::conformance::Failure>(())
//! ```
//!
//! On `cuda` an allocator gets a part of the first CUDA device, of [`Options::device_bytes`], and gives all
//! of it back after each script. Where there is none, each test that
//! [`conformance_tests!`](crate::conformance_tests) wrote says so on standard error;
//! `STRATALLOC_REQUIRE_CUDA=1` makes that a failure. What a constructor refuses with
//! [`NotSupported`](crate::error::DriverErrorKind::NotSupported) is not tested there. Of the calls of a
//! script only some fail there on purpose. What other programs use of the device changes nothing as long as
//! [`Options::device_bytes`] of it are free. With an empty `CUDA_VISIBLE_DEVICES` there is no such device.
//!
//! On `sim` work finishes when the suite says so or when a call waits for it: an allocator that waits by
//! asking again and again waits for ever. Not tested are sharing between processes, access between devices
//! and, of private pools, checkpoints, segment allocators of their own and captures.

mod accounts;
mod bed;
mod cases;
#[cfg(target_os = "linux")]
mod gates;
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[doc(hidden)]
pub mod gpu;
mod laws;
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

use crate::config::Config;
use crate::driver::Driver;
use crate::registry::{self, BuildOptions, Constructed};

pub use property::Property;
pub use report::{Device, Failure, Outcome, Report};
#[doc(hidden)]
pub use search::histories;
pub use suite::{run, test};

/// What is wrong, or nothing.
pub type Checked = Result<(), String>;

/// Makes the allocator that is tested, again and again, each time over a new device.
pub type Build<'b> = dyn Fn(Arc<dyn Driver>) -> Constructed + Sync + 'b;

/// How much is tested. What is too little to test anything is taken for the least that does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How many random scripts each property gets on each device; on a GPU a tenth of them.
    pub scripts: u64,
    /// How many operations a script has at most.
    pub longest: usize,
    /// Where the random numbers begin. The same seed gives the same scripts.
    pub seed: u64,
    /// How much memory the devices have, in bytes.
    pub device_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { scripts: 40, longest: 60, seed: 1, device_bytes: 256 << 20 }
    }
}

impl Options {
    /// Nothing is said to hold that was not tried.
    fn at_least_something(&self) -> Self {
        Self {
            scripts: self.scripts.max(1),
            longest: self.longest.max(2),
            seed: self.seed,
            device_bytes: self.device_bytes.max(1 << 20),
        }
    }

    /// Calls of a real device take long: a tenth of the scripts.
    #[cfg(all(feature = "cuda", target_os = "linux"))]
    fn on_a_gpu(&self) -> Self {
        Self { scripts: self.scripts.div_ceil(10), ..self.clone() }
    }

    /// The default, with as many scripts as the variable `CONFORMANCE_RUNS` says.
    ///
    /// # Errors
    ///
    /// When the variable is no whole number of at least 1.
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

/// A constructor of what a configuration string names, with bare addresses where there are any.
pub fn configured(text: &str) -> impl Fn(Arc<dyn Driver>) -> Constructed + Sync + '_ {
    move |driver| {
        let config = Config::parse(text, &registry::key_table())?;
        let built = registry::build(&config, driver, BuildOptions { raw_addresses: true })?;
        Ok(Box::new(built))
    }
}

/// The same constructor. Closures that are written in its place get their types from here.
pub fn constructor<F>(build: F) -> F
where
    F: Fn(Arc<dyn Driver>) -> Constructed + Sync,
{
    build
}

/// Tests one property and panics with the shortest failing sequence; says why on standard error when it is
/// not tested. What [`conformance_tests!`](crate::conformance_tests) writes calls this.
///
/// # Panics
///
/// When the property does not hold, `CONFORMANCE_RUNS` is no number, or there is no CUDA device and
/// [`skip::REQUIRE_CUDA`] asks for one.
pub fn assert_holds(name: &str, build: &Build<'_>, property: Property, device: Device) {
    let options = Options::from_environment();
    let tested = options.and_then(|options| {
        test(name, build, property, device, &options).map_err(|failure| failure.to_string())
    });
    let what = || format!("{name} on {device}: {property}");
    match tested {
        Ok(Outcome::Held { .. }) => {}
        Ok(Outcome::NotTested { why }) => skip::skipped(what(), why),
        Ok(Outcome::NoDevice { detail }) => skip::for_want_of_a_device(what(), &detail),
        Err(what) => panic!("{what}"),
    }
}
