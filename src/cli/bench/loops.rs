//! The timed loops of the strategies, as functions of the program that calls them.
//!
//! Compiled beside the allocator a loop is not what a user's is: the compiler knows both sides and chooses
//! differently (70 ns a pair by address instead of 55, Intel Xeon, 2026-11-21). So the caller of
//! [`main`](crate::cli::main) makes them in its own crate, without doing anything for it.

use super::cases::{self, Effort, Raw, Tail, Together, Typed};
use crate::driver::Driver;
use crate::handle::Handle;
use crate::ids::StreamId;
use crate::strategies::Strategy;

/// One function for each case of [`cases`], on strategies.
#[derive(Clone, Copy, Debug)]
pub struct Loops {
    pub(super) pair: fn(&Typed<'_, Strategy>, u64, Effort) -> f64,
    pub(super) pair_handle: fn(&Typed<'_, Handle>, u64, Effort) -> f64,
    pub(super) pair_raw: fn(&Raw<'_>, u64, Effort) -> f64,
    pub(super) streams: fn(&Typed<'_, Strategy>, &[StreamId], Effort) -> f64,
    pub(super) streams_raw: fn(&Raw<'_>, &[StreamId], Effort) -> f64,
    pub(super) serve: fn(&Typed<'_, Strategy>, &[StreamId], Effort) -> f64,
    pub(super) serve_raw: fn(&Raw<'_>, &[StreamId], Effort) -> f64,
    pub(super) mix: fn(&Typed<'_, Strategy>, Effort) -> f64,
    pub(super) mix_raw: fn(&Raw<'_>, Effort) -> f64,
    pub(super) holes: fn(&Typed<'_, Strategy>, usize, Effort) -> f64,
    pub(super) tail: fn(&Typed<'_, Strategy>) -> Tail,
    pub(super) threads: fn(&Typed<'_, Strategy>, &dyn Driver, usize, &[StreamId]) -> Together,
    pub(super) threads_raw: fn(&Raw<'_>, &dyn Driver, usize, &[StreamId]) -> Together,
    pub(super) record_stream: fn(&Strategy, StreamId, Effort) -> Option<f64>,
}

impl Loops {
    /// Those of the crate that calls this.
    #[inline]
    #[must_use]
    pub fn here() -> Self {
        Self {
            pair: |client, bytes, effort| cases::pair(client, bytes, effort),
            pair_handle: |client, bytes, effort| cases::pair(client, bytes, effort),
            pair_raw: |client, bytes, effort| cases::pair(client, bytes, effort),
            streams: |client, streams, effort| cases::streams(client, streams, effort),
            streams_raw: |client, streams, effort| cases::streams(client, streams, effort),
            serve: |client, streams, effort| cases::serve(client, streams, effort),
            serve_raw: |client, streams, effort| cases::serve(client, streams, effort),
            mix: |client, effort| cases::mix(client, effort),
            mix_raw: |client, effort| cases::mix(client, effort),
            holes: |client, holes, effort| cases::holes(client, holes, effort),
            tail: |client| cases::tail(client),
            threads: |client, device, threads, streams| {
                cases::threads(client, device, threads, streams)
            },
            threads_raw: |client, device, threads, streams| {
                cases::threads(client, device, threads, streams)
            },
            record_stream: |strategy, other, effort| cases::record_stream(strategy, other, effort),
        }
    }
}
