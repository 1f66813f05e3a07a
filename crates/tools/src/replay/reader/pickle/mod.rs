//! Parses the pickle form of a snapshot. Builds only data, never objects.
//!
//! `machine` runs the opcodes and fills a [`Heap`](super::heap::Heap). Shared parts are never copied,
//! cycles are harmless, and nothing recurses, not even on drop.

mod machine;
mod opcode;

pub(super) use machine::parse;
