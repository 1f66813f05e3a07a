//! `libstratalloc`: the library for other languages, as one file that C programs and PyTorch load.
//!
//! It holds the functions of `src/ffi` and nothing of its own. It is a package apart so that building
//! the Rust library or the command line links no shared library.

pub use stratalloc_core::ffi::*;
