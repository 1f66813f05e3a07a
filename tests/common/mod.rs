//! Code shared by the test programs: devices to run on, and the invariants that every layout obeys.
//!
//! Each test program compiles this folder for itself and uses a part of it. Checks return violations as text
//! instead of panicking, so that a property test can shorten its input quietly. Read next:
//!
//! - `fixture`: a device with an allocator on it; `prelude`: the imports of most tests.
//! - `machine`: drivers whose work a test completes; `gpu`: a real device, if there is one.
//! - `invariants`: tiling, sums, statistics; `claims`: ownership of bytes across threads.
//! - `base`: devices to wrap; `plain`: one without optional parts; `crowded`: one with other processes.
//! - `racing`: a device on which another thread acts between two calls; `meeting`: one whose allocations
//!   wait for each other.
//! - `threaded`: a device with a per-thread default stream.
//! - `folder`: temporary files; `compiled`: libraries in C; `shared_library`: the C library of this project.
//! - `stacks`: counted call stacks; `rng`: random numbers; `runs`: the number of random histories.

#![allow(dead_code, unused_imports, unused_macros, reason = "each test program uses a part")]

pub(crate) mod base;
pub(crate) mod claims;
#[cfg(target_os = "linux")]
pub(crate) mod compiled;
pub(crate) mod crowded;
pub(crate) mod fixture;
pub(crate) mod folder;
#[cfg(target_os = "linux")]
pub(crate) mod gpu;
pub(crate) mod invariants;
pub(crate) mod meeting;
pub(crate) mod plain;
pub(crate) mod prelude;
pub(crate) mod racing;
pub(crate) mod rng;
pub(crate) mod runs;
pub(crate) mod shared_library;
pub(crate) mod stacks;
pub(crate) mod threaded;

pub(crate) use stratalloc_conformance::machine;

/// The variables with defaults of the command line's options.
const DEFAULTS: [&str; 7] = [
    "STRATALLOC_TORCH",
    "STRATALLOC_TOTAL_MEMORY",
    "STRATALLOC_MEMORY_FRACTION",
    "STRATALLOC_RECORDED_DEVICE",
    "STRATALLOC_MAX_INPUT",
    "STRATALLOC_SECONDS",
    "STRATALLOC_CONF",
];

/// Returns a command whose environment contains no configuration of the allocator.
pub(crate) fn unconfigured(program: impl AsRef<std::ffi::OsStr>) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    for variable in stratalloc::config::VARIABLES.into_iter().chain(DEFAULTS) {
        command.env_remove(variable);
    }
    command
}

/// A violation as text, or nothing.
pub(crate) type Checked = Result<(), String>;

/// Which kind of segments a random history allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segments {
    Fixed,
    Expandable,
    /// Each operation of the history chooses.
    Switching,
}

impl Segments {
    /// Returns true if new segments are expandable. `chosen` is the choice of the operation.
    pub(crate) fn expandable(self, chosen: bool) -> bool {
        match self {
            Self::Fixed => false,
            Self::Expandable => true,
            Self::Switching => chosen,
        }
    }
}

/// Returns an error with the text unless the condition holds.
macro_rules! ensure {
    ($holds:expr, $($text:tt)+) => {{
        if !$holds {
            return Err(format!($($text)+));
        }
    }};
}

/// Returns an error with both sides unless they are equal.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $($text:tt)+) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            return Err(format!("{}: {left:?} is not {right:?}", format_args!($($text)+)));
        }
    }};
}

pub(crate) use ensure;
pub(crate) use ensure_eq;
