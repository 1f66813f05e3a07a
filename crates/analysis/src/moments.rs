//! The important moments of a recording: the first failure, the peaks, and the end.

use super::answer::CHART_COLUMNS;
use super::causes::{Moment, Picture};
use super::dump::Dump;
use super::lives::Lives;
use super::passes::Passes;
use super::recording::{Memory, Recording};
use super::repeated::lives_of_replay;
use super::streams::Streams;
use super::trial::Capacity;
use stratalloc::config::{Compat, Config};
use stratalloc_recording::{Lack, Mark, NoHistory, ReplayError, Trace};

/// The important moments of a recording, all computed from the same lifetimes.
#[derive(Clone, Debug, Default)]
pub struct Moments {
    /// The use of each stream.
    pub streams: Streams,
    /// The moments. The most important one is first: the first failure; without one, the peak of live bytes;
    /// without a history, the moment of the dump.
    pub pictures: Vec<Picture>,
}

/// Returns the capacity of replays that show the recorded program's memory.
pub(super) fn room_of(recording: &Recording, config: &Config) -> Capacity {
    // The layout before the first event is used only with `Limited`. It needs room for the recorded peak.
    let starts = recording.layout_for(config).is_some()
        && recording.figures.peak_reserved_bytes <= recording.total_bytes();
    let limited = recording.limit.is_some() || starts;
    if limited { Capacity::Limited } else { Capacity::Endless }
}

/// Returns the lifetimes of the recorded events, with at most `columns` columns of a time line. `config` is
/// the recorded configuration, if it is known.
#[must_use]
pub fn lives_of(trace: &Trace, config: Option<&Config>, memory: &Memory, columns: usize) -> Lives {
    let config = config.cloned().unwrap_or_default().with_compat(Compat::PyTorch);
    let default = stratalloc_sim::SimOptions::default().total_bytes;
    let total_bytes = memory.total_bytes.unwrap_or(0).max(default);
    Lives::of(trace, config.settings(), total_bytes, columns)
}

/// The events that a picture of a recording shows, and the lifetimes in them.
#[derive(Clone, Debug)]
pub struct Timeline<'a> {
    /// The recording.
    pub trace: &'a Trace,
    /// The lifetimes of its blocks and segments. For a log of requests, which has no decisions of an
    /// allocator, those of a replay.
    pub lives: Lives,
    /// Whether the lifetimes are those of a replay.
    pub is_replay: bool,
}

impl<'a> Timeline<'a> {
    /// Returns the recorded events; for a log of requests, those of a replay. The time line has at most
    /// `columns` columns.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when the replay fails for a reason other than memory.
    pub fn recorded(recording: &'a Recording, columns: usize) -> Result<Self, ReplayError> {
        let trace = &recording.trace;
        if recording.no_history.is_some() {
            // Only the layout at the end is known.
            let (events, annotations) = (Vec::new(), Vec::new());
            let end = Trace { events, annotations, ..trace.clone() };
            return Ok(Self::of(&end, recording, columns));
        }
        match trace.requests_only {
            true => Self::replayed(recording, columns),
            false => Ok(Self::of(trace, recording, columns)),
        }
    }

    /// Returns the events from which moments are taken: if the caller set the memory, those of a replay with
    /// that memory, else the recorded ones. The time line has the columns of a small chart.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when a replay fails for a reason other than memory.
    pub fn judged(recording: &'a Recording) -> Result<Self, ReplayError> {
        let is_replayed = recording.is_memory_set && recording.no_history.is_none();
        if is_replayed && !recording.trace.requests_only {
            let replayed = Self::replayed(recording, CHART_COLUMNS)?;
            // A model of the driver's own pools has no events.
            if replayed.lives.events > 0 {
                return Ok(replayed);
            }
        }
        Self::recorded(recording, CHART_COLUMNS)
    }

    fn replayed(recording: &'a Recording, columns: usize) -> Result<Self, ReplayError> {
        let lives = lives_of_replay(recording, columns)?;
        Ok(Self { trace: &recording.trace, lives, is_replay: true })
    }

    fn of(events: &Trace, recording: &'a Recording, columns: usize) -> Self {
        let lives = lives_of(events, recording.config.as_ref(), &recording.memory, columns);
        Self { trace: &recording.trace, lives, is_replay: false }
    }

    /// Returns the passes of the recorded program.
    pub(crate) fn passes(&self) -> Passes<'a> {
        match self.is_replay {
            true => Passes::of_replay(&self.lives, &self.trace.stacks),
            false => Passes::of(self.trace),
        }
    }

    /// Returns the marks whose numbers of events are those of the lifetimes.
    pub(crate) fn marks(&self) -> &'a [Mark] {
        if self.is_replay { &[] } else { &self.trace.marks }
    }
}

impl Moments {
    /// Finds the moments of a recording in a timeline of its events.
    #[must_use]
    pub fn of(recording: &Recording, timeline: &Timeline<'_>) -> Self {
        if let Some(NoHistory { lack, .. }) = recording.no_history {
            // Of totals no moment is known with its blocks.
            let has_layout = lack != Lack::Totals;
            let pictures = has_layout.then(|| Dump::of(&recording.trace).picture);
            let pictures = pictures.into_iter().collect();
            return Self { pictures, ..Self::default() };
        }
        let lives = &timeline.lives;
        let failure = lives.failures.first().map(|one| (Moment::FirstFailure, one.moment));
        let others = [
            (Moment::PeakLive, lives.peak_live.moment),
            (Moment::PeakReserved, lives.peak_reserved.moment),
            (Moment::End, lives.events),
        ];
        let all = failure.into_iter().chain(others);
        let passes = timeline.passes();
        let picture = |(which, at)| Picture::at(recording, lives, &passes, which, at);
        let pictures = all.map(picture).collect();
        Self { streams: Streams::of(&recording.workload), pictures }
    }

    /// Returns the most important moment.
    #[must_use]
    pub fn main(&self) -> Option<&Picture> {
        self.pictures.first()
    }

    /// Returns the reserved bytes at their peak; 0 without a history.
    pub(crate) fn peak_reserved_bytes(&self) -> u64 {
        let peak = self.pictures.iter().find(|one| one.moment == Moment::PeakReserved);
        peak.map_or(0, |peak| peak.causes.total_bytes())
    }

    /// Returns the peak of reserved bytes, if it is not at the most important moment.
    #[must_use]
    pub fn reserved(&self) -> Option<&Picture> {
        let main_at = self.main()?.at;
        let mut pictures = self.pictures.iter();
        pictures.find(|one| one.moment == Moment::PeakReserved && one.at != main_at)
    }
}
