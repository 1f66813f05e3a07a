//! Device-memory allocators for accelerators, chosen at run time by one string.
//!
//! One trait, [`DeviceAllocator`], and several strategies behind it: a caching allocator that makes
//! PyTorch's very decisions, one over pages that are mapped as it grows, one over the driver's own
//! pools, one for memory of the host, and yours. A [`Handle`] is an allocator and its device; its
//! buffers free themselves.
//!
//! ```
//! use std::sync::Arc;
//! use stratalloc::config::KeyTable;
//! use stratalloc::driver::Sim;
//! use stratalloc::{Config, Handle, StreamId};
//!
//! let config = Config::parse("backend:native,expandable_segments:True", &KeyTable::default())?;
//! let handle = Handle::build(&config, Arc::new(Sim::new(Default::default())))?;
//! let weights = handle.zeroed::<f32>(1 << 20, StreamId::DEFAULT)?;
//! println!("4 MiB at {:#x}", weights.address());
//! handle.switch("backend:cudaMallocAsync")?; // what lives stays valid
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Where to go on
//!
//! - [`config`]: the string, and the variables that hold it.
//! - [`handle`]: typed buffers; [`allocator`]: blocks without them, and what an allocator can be asked.
//! - [`driver`]: devices; `sim` and `host` need no GPU.
//! - [`registry`]: strategies by name, and your own; `conformance` tests them.
//! - [`layers`]: limits, logs, leaks around any of them.
//! - [`switch`]: another strategy while blocks live.
//! - `analysis` and `replay`: what recordings of real runs say.
//!
//! # Features
//!
//! | feature | what it brings |
//! |---|---|
//! | `cli` (default) | the command line, and with it `analysis`, `cuda` and `pluggable` |
//! | `cuda` | CUDA devices, found at run time: building needs no toolkit |
//! | `cudarc` | buffers that cudarc's code takes for its own |
//! | `cuda-dynamic` | the same, with CUDA's version and linking chosen |
//! | `pluggable` | `backend:pluggable`: allocation functions from a shared library |
//! | `stacks` | stacks of the program itself for the history and `layers:[track]`; in `ffi`, too |
//! | `tracepoints` | static tracepoints of `malloc` and `free` for bpftrace and others |
//! | `replay`, `analysis` | readers of recordings, replays, and what fits |
//! | `conformance` | what every allocator must do, as tests for yours |
//! | `ffi` | the C interface and PyTorch's symbols |
//! | `mimalloc` | its rows beside ours in `bench --conf backend:cpu` |

pub mod allocator;
#[cfg(feature = "analysis")]
#[doc(hidden)]
pub mod analysis;
pub mod blocks;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
pub(crate) mod diagnostics;
pub mod driver;
pub mod error;
pub(crate) mod event_queue;
#[cfg(feature = "ffi")]
#[doc(hidden)]
pub mod ffi;
pub mod handle;
pub(crate) mod heap;
pub mod history;
pub mod ids;
pub mod layers;
pub(crate) mod limit;
mod live_blocks;
pub mod registry;
#[cfg(feature = "replay")]
#[doc(hidden)]
pub mod replay;
#[cfg(feature = "cli")]
pub(crate) mod report;
pub(crate) mod scopes;
pub mod sharing;
pub mod size;
pub mod stats;
pub mod switch;
pub(crate) mod sync;
pub(crate) mod threads;
pub(crate) mod tracepoints;

#[path = "../strategies/mod.rs"]
pub mod strategies;

pub use allocator::{Allocation, DeviceAllocator, Request};
#[cfg(feature = "analysis")]
pub use analysis::advise_on_oom;
pub use config::Config;
pub use error::{AllocError, FreeError};
pub use handle::{DeviceVec, Handle, build};
pub use ids::StreamId;
pub use registry::register;

/// What a first program and an author of a strategy import.
pub mod prelude {
    pub use crate::allocator::{Allocation, Control, DeviceAllocator, Request};
    pub use crate::blocks::Blocks;
    pub use crate::driver::{Driver, Sim};
    pub use crate::error::{AllocError, DriverError, FreeError, HandleError};
    pub use crate::handle::{DeviceVec, Handle};
    pub use crate::ids::StreamId;
    pub use crate::registry::Constructed;
}

/// The README's example is compiled and run with the tests, and so are those of the guide.
#[cfg(all(doctest, target_os = "linux"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/rust.md")]
#[doc = include_str!("../docs/history.md")]
pub struct Readme;
