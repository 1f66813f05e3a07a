//! Builds one page that shows how recordings used their memory.
//!
//! `analysis` computes the lifetimes of blocks and segments, the needs and the sentences. `rows` reduces
//! the lifetimes to a limited size without losing a peak. `sheet` writes all of this as the data of a
//! page, and `page` is the page itself. Nothing here prints or writes files.
//!
//! The page can show any moment from two tables of lifetimes: it selects the rows that live at the
//! moment and needs no replay. The data is reduced here, not in the browser. `docs/report.md` describes
//! the format of the data.

mod headline;
mod holders;
mod page;
mod rows;
mod sheet;
mod stacks;
mod sweep;
#[cfg(test)]
mod tests;
mod words;

use stratalloc::config::{Compat, Config};
use stratalloc::history::Action;
use stratalloc::size::MIB;
use stratalloc_analysis::{
    Advice, AdviceOptions, Dump, Limit, Memory, Moment, Picture, Recording, Streams, Why,
    counted_as, host_sentence,
};
use stratalloc_recording::{NoHistory, ReplayError, Trace};

use sheet::Parts;
use stratalloc_analysis::lives::Lives;
use stratalloc_analysis::{curves as settings, repeated as logs};
use words::{AdviceData, NeedsData, PictureData};

pub use sweep::sweep_page;

/// The maximum size of a page, in bytes.
pub const PAGE_BYTES: usize = 10_000_000;

/// For recordings with more operations than this, needs are searched and settings are replayed only on
/// request. Logs of requests are replayed once in any case.
const OPERATIONS_SEARCHED: usize = 1_000_000;

/// Options of a page.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The memory that the caller set.
    pub memory: Memory,
    /// How settings are searched.
    pub advice: AdviceOptions,
    /// Whether to search for needs even if a recording is large.
    pub needs: bool,
    /// Further settings to show.
    pub settings: Vec<(String, Config)>,
}

/// A page to which recordings are added.
#[derive(Debug)]
pub struct Report {
    options: Options,
    /// The bytes of the page that each file may use.
    share_bytes: usize,
    sheets: Vec<String>,
    /// The number of recordings that did not fit on the page.
    pub left_out: usize,
}

impl Report {
    /// Creates an empty page for `files` files.
    pub fn new(options: Options, files: usize) -> Self {
        let share_bytes = (PAGE_BYTES - page::frame_bytes() - 64 * 1024) / files.max(1);
        Self { options, share_bytes, sheets: Vec::new(), left_out: 0 }
    }

    /// Returns the number of recordings on the page.
    pub fn recordings(&self) -> usize {
        self.sheets.len()
    }

    /// Adds a recording, which is one device of a file. `config` is its configuration, or the reason why
    /// it cannot be replayed. `progress` is called with the number of settings done and the number known
    /// so far.
    ///
    /// # Errors
    ///
    /// [`ReplayError`] when a replay fails for a reason other than memory.
    pub fn add(
        &mut self,
        name: &str,
        trace: Trace,
        config: Result<Config, String>,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<(), ReplayError> {
        let most = self.share_bytes / (trace.other_devices as usize + 1);
        let options = &self.options;
        let mut notes = Vec::new();
        if let Err(error) = &config {
            notes.push(format!("Shown with PyTorch's default settings: {error}"));
        }
        let config = config.ok();
        notes.extend(trace.host.as_ref().map(host_sentence));
        if let Some(no_history) = NoHistory::of(&trace) {
            notes.push("The file has no history: only what lived at the end is shown.".to_owned());
            self.add_dump(name, trace, config, no_history, notes);
            return Ok(());
        }
        if operations(&trace) > OPERATIONS_SEARCHED && !options.needs {
            // A log of requests has no segment events until it is replayed.
            let trace = match trace.requests_only {
                true => logs::repeated(&Recording::new(trace, config.clone(), Memory::default()))?,
                false => trace,
            };
            let lives = lives_of(&trace, config.as_ref(), &options.memory);
            notes.extend(began_late(&lives));
            let limit = limit_of(&trace, config.as_ref(), &options.memory);
            let advice = &unsearched(&lives, limit);
            let (notes, trace, lives) = (&notes, &trace, &lives);
            let needs = &NeedsData { missing: Some(UNSEARCHED.to_owned()), ..NeedsData::default() };
            let (limit, no_history) = (limit.and_then(Limit::known), None);
            let parts = Parts { name, notes, trace, lives, no_history, limit, advice, needs };
            self.keep(sheet::sheet(&parts, most));
            return Ok(());
        }
        let recording = Recording::new(trace, config, options.memory);
        let shown = match recording.trace.requests_only {
            true => {
                notes.push(
                    "The file is a log of requests: what is shown is a replay of them.".to_owned(),
                );
                Some(logs::repeated(&recording)?)
            }
            false => None,
        };
        let trace = shown.as_ref().unwrap_or(&recording.trace);
        let lives = lives_of(trace, recording.config.as_ref(), &options.memory);
        notes.extend(began_late(&lives));
        let advice = Advice::search(&recording, &options.advice, progress)?;
        let mut why = Why::of(&recording)?;
        as_recorded(&mut why, &recording, &lives);
        let rows = settings::settings(&recording, &lives, &advice, &options.settings)?;
        let needs = &NeedsData { missing: None, points: settings::points(&lives), rows };
        let (notes, lives) = (&notes, &lives);
        let limit = recording.limit.and_then(Limit::known);
        let advice = &AdviceData::of(&recording, &advice, &why);
        let no_history = None;
        let parts = Parts { name, notes, trace, lives, no_history, limit, advice, needs };
        self.keep(sheet::sheet(&parts, most));
        Ok(())
    }

    /// Adds the moment of the dump of a recording without history.
    fn add_dump(
        &mut self,
        name: &str,
        mut trace: Trace,
        config: Option<Config>,
        no_history: NoHistory,
        notes: Vec<String>,
    ) {
        let most = self.share_bytes / (trace.other_devices as usize + 1);
        let dump = Dump::of(&trace);
        (trace.events, trace.annotations) = (Vec::new(), Vec::new());
        let memory = &self.options.memory;
        let lives = &lives_of(&trace, config.as_ref(), memory);
        let advice = &AdviceData {
            sentence: format!("No setting follows from it. {}", no_history.remedy()),
            pictures: vec![PictureData::of(&dump.picture, &Streams::default())],
            ..AdviceData::default()
        };
        let missing = Some(format!("No needs: {}", no_history.sentence()));
        let needs = &NeedsData { missing, ..NeedsData::default() };
        let limit = memory.limit(config.as_ref()).and_then(Limit::known);
        let (notes, trace) = (&notes, &trace);
        let no_history = Some(no_history);
        self.keep(sheet::sheet(
            &Parts { name, notes, trace, lives, no_history, limit, advice, needs },
            most,
        ));
    }

    fn keep(&mut self, sheet: Option<String>) {
        self.left_out += usize::from(sheet.is_none());
        self.sheets.extend(sheet);
    }

    /// Returns the page as HTML.
    pub fn page(&self) -> String {
        page::page(&self.sheets)
    }
}

const UNSEARCHED: &str = "Settings were not searched, because the recording has more than a million operations: run the command again \
     with --needs, which takes minutes.";

fn operations(trace: &Trace) -> usize {
    let is_operation =
        |action| matches!(action, Action::Alloc | Action::FreeRequested | Action::OutOfMemory);
    trace.events.iter().filter(|event| is_operation(event.action)).count()
}

fn lives_of(trace: &Trace, config: Option<&Config>, memory: &Memory) -> Lives {
    let config = config.cloned().unwrap_or_default().with_compat(Compat::PyTorch);
    let default = stratalloc_sim::SimOptions::default().total_bytes;
    let total_bytes = memory.total_bytes.unwrap_or(0).max(default);
    Lives::of(trace, config.settings(), total_bytes, sheet::COLUMNS)
}

fn began_late(lives: &Lives) -> Option<String> {
    let before = || lives.segments.iter().filter(|segment| segment.born == 0);
    if lives.events == 0 || before().next().is_none() {
        return None;
    }
    let sizes = before().map(|segment| segment.size_bytes);
    let reserved = sizes.fold(0, u64::saturating_add);
    let blocks = lives.blocks.iter().filter(|block| block.born == 0).count() as u64;
    Some(format!(
        "It begins late: {} lived and {} MiB were reserved before its first event.",
        counted_as(blocks, "block", "blocks"),
        stratalloc_analysis::grouped(reserved.div_ceil(MIB))
    ))
}

/// Returns the limit of a recording that is not replayed: the one that the caller set, or else the one
/// that its failed requests show.
fn limit_of(trace: &Trace, config: Option<&Config>, memory: &Memory) -> Option<Limit> {
    memory.limit(config).or_else(|| match memory.fraction {
        None => Limit::shown_by_failures(trace, config),
        Some(_) => None,
    })
}

/// Returns the figures of the recorded events, for a recording whose settings are not searched.
fn unsearched(lives: &Lives, limit: Option<Limit>) -> AdviceData {
    let main = match lives.failures.first() {
        Some(failure) => {
            let mut picture = recorded(lives, Moment::FirstFailure, failure.moment);
            picture.failed = Some(stratalloc_analysis::Failed {
                requested_bytes: failure.requested_bytes,
                stream: lives.streams.items[failure.stream as usize],
                stack: failure.stack,
            });
            picture
        }
        None => recorded(lives, Moment::PeakLive, lives.peak_live.moment),
    };
    let reserved = recorded(lives, Moment::PeakReserved, lives.peak_reserved.moment);
    let is_another = reserved.operations != main.operations;
    let pictures = std::iter::once(main).chain(is_another.then_some(reserved));
    let pictures = pictures.map(|picture| PictureData::of(&picture, &Streams::default()));
    AdviceData {
        sentence: UNSEARCHED.to_owned(),
        limit: limit.map(|limit| limit.sentence()),
        pictures: pictures.collect(),
        ..AdviceData::default()
    }
}

fn recorded(lives: &Lives, which: Moment, moment: u32) -> Picture {
    Picture::of_layout(&lives.layout(moment), which, moment as usize)
}

/// Replaces the replayed peaks by the recorded ones, so that the page shows only one value for each
/// peak. Keeps the replayed ones if the caller set the memory, and for a log of requests, which has no
/// decisions of its own.
fn as_recorded(why: &mut Why, recording: &Recording, lives: &Lives) {
    let is_described = recording.memory != Memory::default();
    if is_described || recording.trace.requests_only || lives.events == 0 {
        return;
    }
    for picture in why.main.iter_mut().chain(&mut why.reserved) {
        let moment = match picture.moment {
            Moment::FirstFailure | Moment::Dump => continue,
            Moment::PeakLive => lives.peak_live.moment,
            Moment::PeakReserved => lives.peak_reserved.moment,
        };
        let Picture { causes, heaps, .. } = recorded(lives, picture.moment, moment);
        (picture.causes, picture.heaps) = (causes, heaps);
    }
}

/// Returns the important moments of a recording, with the figures that a page shows for them.
///
/// # Errors
///
/// The same as [`Why::of`].
pub fn why(recording: &Recording) -> Result<Why, ReplayError> {
    let mut why = Why::of(recording)?;
    let lives = lives_of(&recording.trace, recording.config.as_ref(), &recording.memory);
    as_recorded(&mut why, recording, &lives);
    Ok(why)
}
