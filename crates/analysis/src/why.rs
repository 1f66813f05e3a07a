//! The reserved bytes at the important moments of a recording, under the recorded configuration.

use super::causes::{Moment, Picture};
use super::dump::Dump;
use super::recording::Recording;
use super::streams::Streams;
use super::trial::Capacity;
use stratalloc::config::{Compat, Config};
use stratalloc_recording::ReplayError;

/// The reserved bytes at the important moments.
#[derive(Clone, Debug, Default)]
pub struct Why {
    /// The streams.
    pub streams: Streams,
    /// The moment of the first failed request; without one, the peak of live bytes; without a history, the
    /// moment of the dump.
    pub main: Option<Picture>,
    /// The moment of the peak of reserved bytes, if it differs from `main`.
    pub reserved: Option<Picture>,
}

/// Returns the capacity of replays that show the recorded program's memory.
pub(super) fn room_of(recording: &Recording, config: &Config) -> Capacity {
    // The layout before the first event is used only with `Limited`. It needs room for the recorded peak.
    let starts = recording.layout_for(config).is_some()
        && recording.figures.peak_reserved_bytes <= recording.total_bytes();
    let limited = recording.limit.is_some() || starts;
    if limited { Capacity::Limited } else { Capacity::Endless }
}

impl Why {
    /// Finds the moments in a replay of the recorded configuration, or of the default one.
    ///
    /// # Errors
    ///
    /// The same as [`Picture::take`].
    pub fn of(recording: &Recording) -> Result<Self, ReplayError> {
        if recording.no_history.is_some() {
            let main = Some(Dump::of(&recording.trace).picture);
            return Ok(Self { main, ..Self::default() });
        }
        let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
        let room = room_of(recording, &config);
        let take = |moment| Picture::take(recording, &config, room, moment);
        let main = match take(Moment::FirstFailure)? {
            Some(failure) => Some(failure),
            None => take(Moment::PeakLive)?,
        };
        let at = main.as_ref().map(|picture| picture.operations);
        let reserved = take(Moment::PeakReserved)?;
        let reserved = reserved.filter(|picture| Some(picture.operations) != at);
        Ok(Self { streams: Streams::of(&recording.workload), main, reserved })
    }

    /// Returns the moments, the most important one first.
    pub fn pictures(&self) -> impl Iterator<Item = &Picture> {
        self.main.iter().chain(&self.reserved)
    }
}
