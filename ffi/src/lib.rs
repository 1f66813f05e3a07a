//! `libstratalloc`: the shared library that C programs and PyTorch load.
//!
//! It exports the functions of `src/ffi` and adds nothing. It is a separate package, so that building the
//! Rust library or the command line links no shared library.

pub use stratalloc_core::ffi::*;
