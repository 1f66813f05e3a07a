//! What the test programs share: machines to run on, and the laws that every layout obeys.
//!
//! Each test program compiles this folder for itself and uses a part of it. Laws return what is
//! wrong as text instead of panicking, so that a property test can shrink without noise.
//! Read next: `bed` (a device with an allocator on it), `prelude` (what most tests import),
//! `machine` (drivers with their hand brakes), `law` (tiling, sums, statistics), `claims`
//! (who holds what, for many threads), `base` (devices to wrap), `plain` (one without optional parts),
//! `racing` (one on which others act between two calls), `threaded` (one with a stream of each thread),
//! `crowded` (one with other processes on it), `folder` (for a test's files), `stacks` (who asked,
//! counted), `runs` (how many random histories), `gpu` (a real one, and what is said where there is none).

#![allow(dead_code, unused_imports, unused_macros, reason = "each test program uses a part")]

pub(crate) mod base;
pub(crate) mod bed;
pub(crate) mod claims;
pub(crate) mod crowded;
pub(crate) mod dice;
pub(crate) mod folder;
#[cfg(all(feature = "cuda", target_os = "linux"))]
pub(crate) mod gpu;
pub(crate) mod law;
pub(crate) mod meeting;
pub(crate) mod plain;
pub(crate) mod prelude;
pub(crate) mod racing;
pub(crate) mod runs;
#[cfg(feature = "ffi")]
pub(crate) mod shared_library;
pub(crate) mod stacks;
pub(crate) mod threaded;

pub(crate) use stratalloc::conformance::machine;

/// A program without a configuration in its environment.
pub(crate) fn unconfigured(program: impl AsRef<std::ffi::OsStr>) -> std::process::Command {
    let mut command = std::process::Command::new(program);
    for variable in stratalloc::config::VARIABLES {
        command.env_remove(variable);
    }
    command
}

/// What is wrong, or nothing.
pub(crate) type Checked = Result<(), String>;

/// Which segments the new ones of a random history are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segments {
    Fixed,
    Expandable,
    /// As the history asks.
    Switching,
}

impl Segments {
    /// Whether new segments are expandable when an operation asks for it, or not.
    pub(crate) fn expandable(self, asked: bool) -> bool {
        match self {
            Self::Fixed => false,
            Self::Expandable => true,
            Self::Switching => asked,
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
