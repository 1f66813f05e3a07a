//! The sentences about pinned host memory.

use super::{counted_as, mib, near};
use crate::host::{HostCode, HostFigures};

/// The most rows of code that the sentences name.
const NAMED: usize = 5;

/// Returns sentences about pinned host memory: its peak, what is in use and idle at the end, and its code.
#[must_use]
pub fn host_sentence(host: &HostFigures) -> String {
    let HostFigures { live_bytes, peak_live_bytes, .. } = *host;
    let mut text = format!(
        "Pinned host memory: {} MiB at most; {} MiB at the end, {} MiB of them live",
        mib(host.peak_reserved_bytes),
        mib(host.reserved_bytes),
        mib(live_bytes)
    );
    if host.idle_bytes > 0 {
        text += &format!(", {} MiB idle", mib(host.idle_bytes));
    }
    text.push('.');
    match host.rounding_bytes {
        Some(0) => {}
        Some(bytes) => {
            text += &format!(" {} MiB of the live bytes were added by rounding.", near(bytes));
        }
        None => {
            text += " Requests are rounded to powers of two and only the rounded sizes are recorded: up to half of \
                     the live bytes may be lost to rounding.";
        }
    }
    let has_code = |rows: &[HostCode]| rows.iter().any(|row| row.asked_for_by.is_some());
    if has_code(&host.at_end) {
        text += &format!(" Live at the end: {}.", listed(&host.at_end, live_bytes));
    }
    let is_other_moment = host.at_peak != host.at_end && peak_live_bytes > 0;
    if is_other_moment && has_code(&host.at_peak) {
        let peak = near(peak_live_bytes);
        text += &format!(
            " At the peak of its live bytes ({peak} MiB): {}.",
            listed(&host.at_peak, peak_live_bytes)
        );
    }
    if let (Some(from), Some(to)) = (host.grew_from_bytes, host.grew_to_bytes) {
        text += &format!(
            " The live bytes grew throughout: at least {} MiB in the second quarter of the entries, at least {} MiB \
             in the last.",
            near(from),
            near(to)
        );
    }
    let needs_code = live_bytes > 0 && !has_code(&host.at_end) && !has_code(&host.at_peak);
    if needs_code {
        text += " Its code was not recorded: _record_memory_history(record_pinned_host_memory=True) of PyTorch \
                 2.14 or later records it.";
    }
    text
}

/// Returns the first rows of code as text. `all_bytes` are the bytes of all code.
fn listed(rows: &[HostCode], all_bytes: u64) -> String {
    let row = |row: &HostCode| {
        let code = row.asked_for_by.as_deref().unwrap_or("without a recorded stack");
        let blocks = counted_as(row.blocks, "block", "blocks");
        format!("{code}, {} MiB in {blocks}", near(row.bytes))
    };
    let mut all: Vec<String> = rows.iter().take(NAMED).map(row).collect();
    let more = rows.iter().take(NAMED).fold(all_bytes, |rest, row| rest.saturating_sub(row.bytes));
    all.extend((more > 0).then(|| format!("others, {} MiB", near(more))));
    all.join("; ")
}
