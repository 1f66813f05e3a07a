//! Streams of other contexts, and primary contexts of other devices.
//!
//! An event can be recorded only on a stream of its own context. For a stream of another context, the
//! driver creates a second event in that context and records it on the stream. A stream of the device's
//! own context, the *bridge*, then waits for the second event, and the requested event is recorded on the
//! bridge. So blocks of this device can be used on streams of other contexts, of this device or another.
//!
//! Source: CUDA driver API, `cuEventRecord` (event and stream must be of one context) and
//! `cuStreamWaitEvent` (accepts events of any context).

use super::api::{Status, got};
use super::{Cuda, NO_TIMING, NON_BLOCKING};
use crate::driver::{CaptureStatus, DriverResult};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};

/// `CUDA_ERROR_INVALID_HANDLE`.
pub(super) const INVALID_HANDLE: u32 = 400;
/// `CUDA_ERROR_INVALID_VALUE`, `CUDA_ERROR_INVALID_CONTEXT`, `CUDA_ERROR_CONTEXT_IS_DESTROYED`.
const CONTEXT_DESTROYED: [i64; 3] = [1, 201, 709];

impl Cuda {
    /// Records `event` after the work submitted to `stream` so far, if the stream belongs to another
    /// context. Otherwise returns `refused`, the error of the first attempt to record `event` on
    /// `stream`.
    #[cold]
    pub(super) fn record_across(
        &self,
        event: EventId,
        stream: StreamId,
        refused: Status,
    ) -> DriverResult<()> {
        let mut theirs = 0;
        let queried = self.api.stream_context(stream.0, &mut theirs).ok();
        if queried.is_err() || theirs == 0 || theirs == self.context {
            return refused.ok();
        }
        let mut between = 0;
        let made = self
            .enter_context(theirs)
            .and_then(|_entered| self.api.event_create(&mut between, NO_TIMING).ok());
        match made {
            Ok(()) => {}
            // The other context was destroyed, and its streams with it.
            Err(error) if CONTEXT_DESTROYED.contains(&error.code()) => return refused.ok(),
            Err(error) => return Err(error),
        }
        let recorded = self.record_behind(event, between, theirs, stream);
        // Safe although the bridge may still wait for the event: CUDA keeps the event until the wait has
        // ended.
        let destroyed = self.api.event_destroy(between).ok();
        recorded.and(destroyed)
    }

    fn record_behind(
        &self,
        event: EventId,
        between: u64,
        theirs: u64,
        stream: StreamId,
    ) -> DriverResult<()> {
        {
            let _entered = self.enter_context(theirs)?;
            self.api.event_record(between, stream.0).ok()?;
            // Fail before the wait below: a stream that waits for an event of a capture joins that
            // capture.
            if self.status_of(stream)? != CaptureStatus::None {
                let message = format!("stream {stream} is being captured");
                let kind = DriverErrorKind::CaptureActive;
                return Err(DriverError::new(kind, "cuEventRecord", 0, message));
            }
        }
        let _entered = self.enter()?;
        // Locked until `event_record` below. Otherwise another thread could add a wait to the bridge
        // before it, and the event would also wait for that thread's work.
        let mut bridge = self.bridge.lock();
        let ours = match *bridge {
            Some(ours) => ours,
            None => {
                let made = got(|made| self.api.stream_create(made, NON_BLOCKING))?;
                *bridge.insert(made)
            }
        };
        self.api.stream_wait(ours, between, 0).ok()?;
        self.api.event_record(event.0, ours).ok()
    }

    /// Returns CUDA's handle (`CUdevice`) of another device.
    pub(super) fn number_of(&self, other: DeviceId) -> DriverResult<i32> {
        let ordinal = i32::try_from(other.0).unwrap_or(i32::MAX);
        got(|device| self.api.device_get(device, ordinal))
    }

    /// Returns the primary context of another device, and retains it until this `Cuda` is dropped.
    /// Destroying the context would end the access that was enabled for it.
    pub(super) fn context_of(&self, other: DeviceId) -> DriverResult<u64> {
        let device = self.number_of(other)?;
        let mut retained = self.others.lock();
        if let Some((_, context)) = retained.iter().find(|(known, _)| *known == device) {
            return Ok(*context);
        }
        let context = got(|context| self.api.context_retain(context, device))?;
        retained.push((device, context));
        Ok(context)
    }
}

#[cfg(test)]
mod tests;
