//! The timed loops over strategies, compiled in the crate of the caller.
//!
//! A loop in the allocator's own crate is compiled differently from a user's loop, because the compiler
//! sees both sides and makes other inlining decisions. That changes the times. So the generic loops are
//! instantiated in the crate that calls [`main`](crate::main), without any code there.

use super::cases::{self, Effort, Raw, Steps, Tail, Together, Typed};
use stratalloc::driver::Driver;
use stratalloc::handle::Handle;
use stratalloc::ids::StreamId;
use stratalloc::strategies::Strategy;

/// The timed loop for each kind of call and case, on strategies.
#[derive(Clone, Copy, Debug)]
pub struct Loops {
    pub(super) typed: fn(&Typed<'_, Strategy>, Steps, &[StreamId], Effort) -> f64,
    pub(super) raw: fn(&Raw<'_>, Steps, &[StreamId], Effort) -> f64,
    pub(super) handle: fn(&Typed<'_, Handle>, Steps, &[StreamId], Effort) -> f64,
    pub(super) tail: fn(&Typed<'_, Strategy>) -> Tail,
    pub(super) threads: fn(&Typed<'_, Strategy>, &dyn Driver, usize, &[StreamId]) -> Together,
    pub(super) threads_raw: fn(&Raw<'_>, &dyn Driver, usize, &[StreamId]) -> Together,
    pub(super) record_stream: fn(&Strategy, StreamId, Effort) -> Option<f64>,
}

impl Loops {
    /// Returns the loops, instantiated in the crate that calls this.
    #[inline]
    #[must_use]
    pub fn here() -> Self {
        Self {
            typed: |client, steps, streams, effort| steps.time(client, streams, effort),
            raw: |client, steps, streams, effort| steps.time(client, streams, effort),
            handle: |client, steps, streams, effort| steps.time(client, streams, effort),
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
