//! The pickle form of a snapshot: a machine that only ever builds data.
//!
//! `machine` runs the opcodes into a [`Heap`](super::heap::Heap). Shared parts are never copied,
//! cycles are harmless, and nothing here recurses, not even when it is dropped.

mod machine;
mod opcode;

pub(super) use machine::parse;
