//! Tools for recordings of real programs: replays, the memory that a program needs and why, the report and
//! the command line.
//!
//! [`replay`] reads recordings and repeats them on any allocator; [`analysis`] finds the smallest device and
//! better settings, on simulated devices; `report` draws one page; [`cli`] is the program `stratalloc`, which
//! a program with strategies of its own can call too.

pub mod analysis;
pub mod cli;
pub mod replay;
mod report;

use stratalloc::ids::StreamId;

/// Writes a stream as its number.
fn stream_number<S: serde::Serializer>(stream: &StreamId, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(stream.0)
}
