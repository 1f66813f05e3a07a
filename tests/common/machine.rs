//! The library's machines.

pub(crate) use stratalloc::conformance::machine::*;
