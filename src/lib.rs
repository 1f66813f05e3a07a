//! Device-memory allocators for accelerators, selected at run time by a configuration string.
//!
//! One trait, [`DeviceAllocator`], has several implementations (*strategies*):
//!
//! - a caching allocator that makes the same decisions as PyTorch's, with fixed segments or with
//!   segments that grow by pages,
//! - an allocator over the driver's own memory pools,
//! - an allocator for host memory,
//! - and user-defined allocators.
//!
//! A [`Handle`] is an allocator with its device. Its buffers free their memory when dropped.
//!
//! ```
//! use std::sync::Arc;
//! use stratalloc::config::KeyTable;
//! use stratalloc_sim::Sim;
//! use stratalloc::{Config, Handle, StreamId};
//!
//! let config = Config::parse("backend:native,expandable_segments:True", &KeyTable::default())?;
//! let handle = Handle::build(&config, Arc::new(Sim::new(Default::default())))?;
//! let weights = handle.zeroed::<f32>(1 << 20, StreamId::DEFAULT)?;
//! println!("4 MiB at {:#x}", weights.address());
//! handle.switch("backend:cudaMallocAsync")?; // live blocks stay valid
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Modules
//!
//! - [`config`]: the configuration string and the environment variables that hold it.
//! - [`handle`]: typed buffers; [`allocator`]: untyped blocks and the interface of an allocator.
//! - [`driver`]: the interface of devices, and CUDA's.
//! - [`registry`]: strategies by name, including user-defined ones.
//! - [`layers`]: limits, logs and leak reports around any strategy.
//! - [`switch`]: replaces the strategy while blocks are live.
//!
//! Other packages build on this one: `stratalloc-sim` has devices for machines without a GPU,
//! `stratalloc-conformance` tests user-defined strategies, `stratalloc-analysis` evaluates recordings of real
//! programs, `stratalloc-cli` is the command line, `stratalloc-ffi` is the library for C and PyTorch.
//!
//! # Features
//!
//! | feature | contents |
//! |---|---|
//! | `cuda` (default) | CUDA devices; libcuda is loaded at run time, so building needs no toolkit |
//! | `cudarc` | buffers that cudarc's functions accept as their own slices |
//! | `cuda-dynamic` | `cudarc` with CUDA 12.9, loaded at run time |
//! | `pluggable` | `backend:pluggable`: allocation functions from a shared library |
//! | `stacks` | call stacks of the program for the history and `layers:[track]` |
//! | `metrics` | the counters as text for Prometheus |
//! | `gzip` | compressed snapshots |
//! | `tracepoints` | static tracepoints at `malloc` and `free`, for bpftrace and other tools |

// docs.rs shows which feature an item needs.
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod allocator;
pub mod blocks;
pub mod config;
#[doc(hidden)]
pub mod diagnostics;
pub mod driver;
pub mod error;
pub(crate) mod event_queue;
#[doc(hidden)]
pub mod files;
pub mod handle;
pub(crate) mod heap;
pub mod history;
pub mod ids;
pub mod layers;
pub(crate) mod limit;
mod live_blocks;
mod refusal;
pub mod registry;
pub(crate) mod scopes;
pub mod sharing;
pub mod size;
pub mod stats;
pub mod switch;
#[doc(hidden)]
pub mod sync;
pub mod system;
#[doc(hidden)]
pub mod threads;
pub(crate) mod tracepoints;

#[path = "../strategies/mod.rs"]
pub mod strategies;

pub use allocator::{Allocation, DeviceAllocator, Request};
pub use config::Config;
pub use error::{AllocError, FreeError};
pub use handle::{DeviceVec, Handle, build, from_environment};
pub use ids::StreamId;
pub use registry::register;

/// Imports for a first program and for authors of strategies.
pub mod prelude {
    pub use crate::allocator::{Allocation, Control, DeviceAllocator, Request};
    pub use crate::blocks::Blocks;
    pub use crate::driver::Driver;
    pub use crate::error::{AllocError, DriverError, FreeError, HandleError};
    pub use crate::handle::{DeviceVec, Handle};
    pub use crate::ids::StreamId;
    pub use crate::registry::Constructed;
}

/// Compiles and runs the examples of the README and of the guides as doc tests.
#[cfg(all(doctest, target_os = "linux"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/rust.md")]
#[doc = include_str!("../docs/history.md")]
#[doc = include_str!("../docs/interop.md")]
#[doc = include_str!("../docs/strategies.md")]
pub struct Readme;
