//! The library as programs in C and C++ use it, and the guide's pages about it.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "ffi/guide.rs"]
mod guide;
#[path = "ffi/programs.rs"]
mod programs;
