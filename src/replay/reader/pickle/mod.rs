//! The pickle form of a snapshot: a machine that only ever builds data.
//!
//! `machine` runs the opcodes into a `Heap`; `interpret` reads the snapshot out of it. Values
//! are eight bytes and refer to containers by number, so shared parts are never copied, cycles
//! are harmless, and nothing here recurses, not even when it is dropped.
//!
//! Memory: the decoded bytes are never held, dictionaries keep only the keys that are read, and
//! numbers are stored in as many bytes as they need. Recordings take less than one byte per
//! decoded byte. A pickle of many tiny values could take more; `budget` ends that.

mod budget;
mod heap;
mod interpret;
mod machine;
mod opcode;
mod stack_reader;

pub(super) use interpret::interpret;
pub(super) use machine::parse;
