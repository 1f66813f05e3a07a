//! The library for other languages: a C interface, and the symbols that PyTorch's pluggable allocator
//! loads.
//!
//! Both use `Instance`, which identifies blocks by address. The functions of the C interface take a
//! handle of an allocator. They are in `calls`, `figures`, `host`, `text`, `pools`, `checkpoints`, `tags`,
//! `sharing`, `dlpack`, `history`, `hooks` and `snapshots`. The functions for PyTorch are in `torch`, and
//! those for other libraries in `libraries`. Most of them take a device ordinal instead of a handle.
//!
//! Callers are not trusted. Every function that can fail checks its pointers (`pointers`) and runs under
//! `guard`, which catches panics. A failure becomes a status and the thread's last error. A handle is a
//! number that is never reused (`table`, `user_data`). It is looked up and never dereferenced. An
//! allocator stays alive while a call on it runs.
//!
//! `user_data` holds the `user` pointers of callers' functions, and `gate` counts the running calls of
//! these functions. `uncached` serves requests while the cache is off. `device` opens devices by name, and
//! `devices` creates the process's allocator of each. `messages` writes to the standard error stream, and
//! `fork` keeps the library usable after a fork. None of these files uses `torch`.
//!
//! `tests/header.rs` generates `include/stratalloc.h` from these files, with their doc comments.

#[cfg(feature = "advise")]
mod advice;
mod calls;
mod checkpoints;
mod device;
mod devices;
mod dlpack;
mod figures;
mod fork;
mod gate;
mod guard;
mod history;
mod hooks;
mod host;
mod instance;
mod libraries;
mod messages;
mod pointers;
mod pools;
mod sharing;
mod snapshots;
mod table;
mod tags;
#[cfg(test)]
mod tests;
mod text;
mod torch;
mod uncached;
mod user_data;

pub use calls::*;
pub use checkpoints::*;
pub use dlpack::*;
pub use figures::*;
pub use guard::Status;
pub use history::*;
pub use hooks::*;
pub use host::*;
pub use libraries::*;
pub use pools::*;
pub use sharing::*;
pub use snapshots::*;
pub use table::DEVICE_HANDLE;
pub use tags::*;
pub use text::*;
pub use torch::*;
pub use user_data::*;
