//! Draws recordings on one HTML page.
//!
//! `analysis` computes every figure, sentence and lifetime. `rows` reduces the lifetimes to a limited size
//! without losing a peak. `sheet` writes a recording as the data of a page, and `page` is the page itself.
//! Nothing here replays, searches, prints or writes files.
//!
//! The page can show any moment from two tables of lifetimes: it selects the rows that live at the
//! moment. The data is reduced here, not in the browser. `docs/report.md` describes the format of the data.

mod growth;
mod layers;
mod page;
mod rows;
mod sheet;
mod stacks;
mod sweep;
mod tables;
#[cfg(test)]
mod tests;

use stratalloc_analysis::{Answer, Curve, Timeline, host_sentence};

pub use sweep::sweep_page;

/// The maximum size of a page of recordings of up to a million events each, in bytes.
pub const PAGE_BYTES: usize = 10_000_000;
/// The events of a recording from which on the page may be larger.
const EVENTS_USUAL: u32 = 1_000_000;
/// The bytes of each further event.
const EVENT_BYTES: usize = 10;

/// The answer is on the page if it needs at most this part of the page's bytes.
const ANSWER_SHARE: usize = 10;

/// The number of holders that the answers for a page should list.
pub const HOLDERS: usize = 300;

/// A recording as it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Drawn<'a> {
    /// The answer about it.
    pub answer: &'a Answer,
    /// Its events and lifetimes.
    pub timeline: &'a Timeline<'a>,
    /// The curves of its settings.
    pub curves: &'a [Curve],
    /// Remarks of the caller.
    pub notes: &'a [String],
}

impl Drawn<'_> {
    /// Returns the remarks to show.
    fn notes(&self) -> Vec<String> {
        let replay = "The file is a log of requests: what is shown is a replay of them.";
        let replay = self.timeline.is_replay.then(|| replay.to_owned());
        let bare = "The file has no history: only what lived at the end is shown.";
        let has_layout = self.answer.no_history.is_some() && self.answer.totals_alone().is_none();
        let bare = has_layout.then(|| bare.to_owned());
        let host = self.answer.host.as_ref().map(host_sentence);
        let remarks = self.answer.remarks.iter().map(|remark| sentence(remark));
        let platform = self.answer.platform_sentence().map(str::to_owned);
        let first = self.notes.iter().cloned().chain(host).chain(platform);
        first.chain(bare).chain(replay).chain(remarks).collect()
    }
}

/// Returns a remark with a capital and a full stop.
fn sentence(remark: &str) -> String {
    let mut signs = remark.chars();
    let first = signs.next().map(|first| first.to_uppercase().to_string());
    first.unwrap_or_default() + signs.as_str() + "."
}

/// The data of one recording as JSON that was escaped for script elements.
#[derive(Debug)]
struct Sheet {
    /// The data that the page draws.
    drawn: String,
    /// The answer, if there is space for it.
    answer: Option<String>,
}

/// A page to which recordings are added.
#[derive(Debug)]
pub struct Report {
    /// The bytes of the page that each file may use.
    share_bytes: usize,
    sheets: Vec<Sheet>,
    /// The number of recordings that did not fit on the page.
    pub left_out: usize,
}

impl Report {
    /// Creates an empty page for `files` files.
    #[must_use]
    pub fn new(files: usize) -> Self {
        let share_bytes = (PAGE_BYTES - page::frame_bytes() - 64 * 1024) / files.max(1);
        Self { share_bytes, sheets: Vec::new(), left_out: 0 }
    }

    /// Returns the number of recordings on the page.
    #[must_use]
    pub fn recordings(&self) -> usize {
        self.sheets.len()
    }

    /// Adds a recording, which is one device of a file.
    pub fn add(&mut self, drawn: &Drawn<'_>) {
        let devices = drawn.answer.devices.len().max(1);
        let further = drawn.timeline.lives.events.saturating_sub(EVENTS_USUAL) as usize;
        let share_bytes = self.share_bytes / devices + further * EVENT_BYTES;
        let answer = sheet::escaped(&serde_json::to_string(drawn.answer).unwrap_or_default());
        let answer = Some(answer).filter(|answer| answer.len() <= share_bytes / ANSWER_SHARE);
        let used_bytes = answer.as_ref().map_or(0, String::len);
        let sheet = sheet::sheet(drawn, share_bytes - used_bytes);
        self.left_out += usize::from(sheet.is_none());
        self.sheets.extend(sheet.map(|drawn| Sheet { drawn, answer }));
    }

    /// Returns the page as HTML.
    #[must_use]
    pub fn page(&self) -> String {
        page::page(&self.sheets)
    }
}
