//! The library for programs in other languages: a C interface, and the symbols that PyTorch's
//! pluggable allocator loads.
//!
//! `calls`, `figures`, `text`, `pools`, `checkpoints`, `sharing`, `history`, `hooks` and `snapshots` are the
//! interface by handles, `torch` is PyTorch's. Callers are treated as hostile: every entry checks its
//! pointers (`pointers`), handles are numbers that are looked up (`table`, `lent`), and nothing unwinds into
//! the caller (`guard`). Functions of callers are held by `lent`, and their calls counted by `gate`. What a
//! device is called is in `device`, what is said to people in `said`, what a fork leaves in `fork`.
//! `include/stratalloc.h` is made from these files by `tests/header.rs`; comments here are its text.

mod calls;
mod checkpoints;
mod device;
mod figures;
mod fork;
mod gate;
mod guard;
mod history;
mod hooks;
mod instance;
mod lent;
mod pointers;
mod pools;
mod said;
mod sharing;
mod snapshots;
mod table;
mod text;
mod torch;
mod uncached;

pub use calls::*;
pub use checkpoints::*;
pub use figures::*;
pub use guard::Status;
pub use history::*;
pub use hooks::*;
pub use lent::*;
pub use pools::*;
pub use sharing::*;
pub use snapshots::*;
pub use table::TORCH_HANDLE;
pub use text::*;
pub use torch::*;
