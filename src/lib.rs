//! Device-memory allocators for accelerators, chosen at run time by one string.
//!
//! One trait, [`DeviceAllocator`](allocator::DeviceAllocator), and several strategies behind it.
//! `ARCHITECTURE.md` shows the house; a request's way is told in [`cache`].

pub mod allocator;
#[cfg(feature = "analysis")]
pub mod analysis;
pub mod cache;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod driver;
pub mod error;
#[cfg(feature = "ffi")]
pub mod ffi;
pub mod handle;
pub mod heap;
pub mod history;
pub mod ids;
pub mod layers;
pub mod registry;
#[cfg(feature = "replay")]
pub mod replay;
pub(crate) mod scopes;
pub mod sharing;
pub mod size;
pub mod stats;
pub mod switch;
pub(crate) mod sync;

#[path = "../strategies/mod.rs"]
pub mod strategies;

/// The README's example is compiled and run with the tests, and so are those of the guide.
#[cfg(all(doctest, target_os = "linux"))]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/rust.md")]
pub struct Readme;

/// A strategy of one's own, from the guide.
#[cfg(all(doctest, feature = "conformance"))]
#[doc = include_str!("../docs/writing-a-strategy.md")]
pub struct WritingAStrategy;
