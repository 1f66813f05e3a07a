//! Tools for recordings of real programs: replays, the memory that a program needs and why, the report and
//! the command line.
//!
//! [`replay`] reads recordings and replays them on any allocator. [`analysis`] finds the smallest device
//! and better settings, on simulated devices. `report` writes one HTML page. [`cli`] is the program
//! `stratalloc`; a program with strategies of its own can call it too.

#![cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        unused_imports,
        reason = "without the command line, what only it calls is unused"
    )
)]

pub mod analysis;
#[cfg(feature = "cli")]
pub mod cli;
pub mod replay;
#[cfg(feature = "cli")]
mod report;

use stratalloc::ids::StreamId;

/// Serializes a stream as its number.
fn stream_number<S: serde::Serializer>(stream: &StreamId, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(stream.0)
}

/// Deserializes a stream from its number.
fn stream_of_number<'a, D: serde::Deserializer<'a>>(from: D) -> Result<StreamId, D::Error> {
    serde::Deserialize::deserialize(from).map(StreamId)
}
