//! Parses the pickle form of a snapshot. Builds only data, never objects.
//!
//! `machine` runs the opcodes and fills a [`Heap`](super::heap::Heap), whose containers refer to each other
//! by number. So shared parts are not copied, cycles are harmless, and nothing recurses, not even on drop.

mod machine;
mod opcode;

pub(super) use machine::parse;
