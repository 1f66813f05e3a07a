//! The moments at which a recording is looked at, under the recorded configuration.

use super::causes::{Causes, Moment, Picture, heaps_of};
use super::holders::Holders;
use super::recording::Recording;
use super::streams::Streams;
use super::trial::Room;
use crate::config::{Compat, Config};
use crate::history::SegmentLayout;
use crate::replay::ReplayError;

/// Where the reserved bytes are when it matters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Why {
    pub(crate) streams: Streams,
    pub(crate) peak: Option<Picture>,
    pub(crate) failure: Option<Picture>,
}

impl Why {
    /// The peak and the first failure of a replay of the recorded configuration, or of the default one.
    ///
    /// # Errors
    ///
    /// As [`Picture::take`].
    pub(crate) fn of(recording: &Recording) -> Result<Self, ReplayError> {
        let config = recording.config.clone().unwrap_or_default().with_compat(Compat::PyTorch);
        let take = |config: &Config, moment| {
            // What was there when the recording began is there on the recorded device.
            let starts = recording.layout_for(config).is_some()
                && recording.figures.peak_reserved_bytes <= recording.total_bytes();
            let limited = recording.limit.is_some() || starts;
            let room = if limited { Room::Limited } else { Room::Endless };
            Picture::take(recording, config, room, moment)
        };
        Ok(Self {
            streams: Streams::of(&recording.workload),
            peak: take(&config, Moment::PeakReserved)?,
            failure: take(&config, Moment::FirstFailure)?,
        })
    }
}

impl Picture {
    /// What a layout shows, without a replay: nobody says who holds the live bytes.
    pub(crate) fn of_layout(layout: &[SegmentLayout], moment: Moment, operations: usize) -> Self {
        let mut heaps = heaps_of(layout);
        let mut causes = Causes::default();
        heaps.iter().for_each(|heap| causes.add(&heap.causes));
        heaps.sort_by_key(|heap| std::cmp::Reverse(heap.causes.total_bytes()));
        Self { moment, operations, failed: None, causes, heaps, holders: Holders::default() }
    }
}
