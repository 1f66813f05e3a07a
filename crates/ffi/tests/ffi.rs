//! The library as programs in C, C++ and Python use it, its header, and the guide's pages about it.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "ffi/guide.rs"]
mod guide;
mod header;
#[path = "ffi/programs.rs"]
mod programs;
mod python;
