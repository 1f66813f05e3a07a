//! Analyses a recording: how small a device it runs on under each setting, and which code holds the
//! memory.
//!
//! A [`Recording`] is read once. It holds the requests, the configuration, the limit and the figures.
//! [`measure`] replays it on a device of a given [`Capacity`]. [`Need::search`] replays it on many
//! devices to find the smallest on which no request fails. [`Moments::of`] classifies the reserved bytes at
//! the important moments. [`Advice::search`] searches for a setting that needs a smaller device. `forecast`
//! derives the requests of a program at another size from recordings at small ones. `sweep` analyses the
//! recordings of many ranks, those with equal requests once. A recording without history
//! ([`Recording::no_history`]) gets none of these: only the memory at its end is known.
//!
//! Everything runs on the simulated device; nothing uses a real one. Nothing prints, opens a file, starts a
//! thread or reads a clock: the caller's [`Progress`] does that for it. Calls take
//! milliseconds to about a minute.
//!
//! ```no_run
//! use stratalloc_analysis::{Memory, Need, Recording, SearchOptions};
//! use stratalloc::config::{Config, KeyTable};
//! use stratalloc_recording::{Limits, Silent, reader};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let trace = reader::read("snapshot.pickle".as_ref(), &Limits::default())?;
//! let recorded = Config::parse(&trace.conf, &KeyTable::default()).ok();
//! let recording = Recording::new(trace, recorded, Memory::default());
//! let config = Config::parse("expandable_segments:True", &KeyTable::default())?;
//! let need = Need::search(&recording, &config, &SearchOptions::default(), &Silent)?;
//! println!("runs from {:?} bytes on", need.needs_bytes);
//! # Ok(())
//! # }
//! ```
//!
//! Read next: `recording`, then `needs`, then `causes`.

mod advice;
mod answer;
mod budget;
mod callers;
mod categories;
mod causes;
mod curves;
mod device;
mod diff;
mod dump;
mod figures;
mod forecast;
mod graph_pools;
mod growth;
mod holders;
mod host;
mod layers;
mod limit;
pub mod lives;
mod missing;
mod moments;
mod needs;
mod passes;
mod paste;
mod recording;
mod refusals;
mod repeated;
mod served;
mod snapshot;
mod streams;
mod sweep;
mod temporary;
mod torch;
mod trial;
mod verdict;
mod words;

pub use advice::{Advice, AdviceOptions, Tried};
pub use answer::{
    Answer, Basis, BasisKind, CodeFigures, Field, FrameFigures, HeapFigures, HolderList,
    LimitFigures, MainCauses, MomentCauses, MomentFigures, OverTime, Question, Recorded, Setting,
    VERSION, answer, described, described_on, fields, schema,
};
pub use budget::Budget;
pub use callers::{Callers, Compared};
pub use categories::Category;
pub use causes::{Causes, Failed, HeapCauses, Moment, Picture};
pub use curves::{Curve, curves, points};
pub use device::{counted, open_sim};
pub use diff::{Diff, Growth, KeptSegment, ShownRequest, Side, difference};
pub use dump::{Dump, FreeClass};
pub use figures::Figures;
pub use forecast::{Forecast, ForecastError, Sample, Sizes, VALUE_MAX};
pub use graph_pools::{GraphPools, ProgramPools};
pub use growth::{GrowthCourse, GrowthRow, StepBytes, StepGrowth};
pub use holders::{AgeClass, CategoryBytes, FoundBy, Holder, Holders, SizeClass};
pub use host::{HostCode, HostFigures};
pub use layers::{Division, Layers};
pub use moments::{Moments, Timeline, lives_of};
pub use needs::{Cost, Need, SearchOptions};
pub use paste::Paste;
pub use recording::{Evidence, Limit, LimitSource, Memory, Recording, RefusedWithFree};
pub use served::advise_on_oom;
pub use snapshot::snapshot_of;
pub use stratalloc_recording::{Cancelled, Progress, Silent, Stage};
pub use streams::{StreamUse, Streams};
pub use sweep::{Advised, Difference, Fingerprint, Found, Group, Rank, Scanned};
pub use temporary::{Temporary, TemporaryRow};
pub use torch::{ForTorch, TorchBuild};
pub use trial::{Capacity, Trial, fits, measure};
pub use trial::{Watched, failed_requests, watch, without_files};
pub use verdict::{CodeBytes, Hindrance, LargestHolder, LivePeak, UnderLimit, Verdict};
pub use words::{
    BESIDES, CausesColumn, Choice, NotShown, Sentences, StreamNumber, StreamNumbers, Summary,
    counted_as, device_remark, devices_headline, devices_sentence, grouped, host_sentence, near,
    ranks_sentence, remarks, size_text, totals_rows, totals_sentence,
};
