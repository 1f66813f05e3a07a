//! The answer for a recording without history: the memory at the moment of the dump. No peak, need, age or
//! setting is printed, because none follows from such a recording.

use std::io::{self, Write};

use serde_json::{Value, json};

use stratalloc::config::shown;
use stratalloc_analysis::{
    Dump, FreeClass, Picture, Recording, Streams, counted_as, grouped, host_sentence,
};
use stratalloc_recording::NoHistory;

use super::advise::{picture_json, share_cells, write_picture, write_sizes};
use super::outcome::out;
use super::recordings::limit_json;
use super::show::Side::{Left, Right};
use super::show::{emphasised, joined, mib, table};

/// A recording without history.
pub(super) struct Answer<'a> {
    pub(super) name: &'a str,
    pub(super) recording: &'a Recording,
    pub(super) no_history: NoHistory,
    dump: Dump,
}

impl<'a> Answer<'a> {
    /// Returns `None` if the recording has a history.
    pub(super) fn of(name: &'a str, recording: &'a Recording) -> Option<Self> {
        let no_history = recording.no_history?;
        let dump = Dump::of(&recording.trace);
        Some(Self { name, recording, no_history, dump })
    }

    /// Prints the reason, and how to make a better recording.
    pub(super) fn write_reason(&self) -> io::Result<()> {
        let mut out = out();
        writeln!(out, "{}", shown(self.name))?;
        writeln!(out, "{}", emphasised(&self.no_history.sentence()))?;
        writeln!(out, "{}", self.no_history.remedy())
    }

    pub(super) fn write(&self) -> io::Result<()> {
        self.write_reason()?;
        let Self { recording, dump, .. } = self;
        let mut out = out();
        let host = recording.trace.host.as_ref().map(host_sentence);
        for line in [host, dump.failed_sentence()].into_iter().flatten() {
            writeln!(out, "{line}")?;
        }
        writeln!(out)?;
        write_picture(&dump.picture, &Streams::default())?;
        let holders = &dump.picture.holders;
        let blocks = counted_as(holders.blocks, "block", "blocks");
        writeln!(out, "Then {blocks} hold {} MiB:", mib(holders.requested_bytes as f64))?;
        write_sizes(holders, usize::MAX)?;
        writeln!(out, "\n{}", dump.free_sentence())?;
        let free = self.free_bytes();
        let row = |class: &FreeClass| {
            let each =
                format!("{} bytes on stream {:#x}", grouped(class.each_bytes), class.stream.0);
            share_cells(class.bytes, free, class.ranges, &[each])
        };
        let rows: Vec<_> = dump.free.iter().map(row).collect();
        if !rows.is_empty() {
            let heading = [("MiB", Right), ("", Right), ("ranges", Right), ("each", Left)];
            table(&mut out, &heading, &rows)?;
        }
        writeln!(out)
    }

    /// Returns the bytes of all free ranges.
    fn free_bytes(&self) -> u64 {
        let causes = &self.dump.picture.causes;
        causes.split_rest_bytes.saturating_add(causes.idle_segment_bytes)
    }

    /// Returns the object of `advise --json`. The values that the recording does not support are null.
    pub(super) fn json(&self) -> Value {
        let Self { name, recording, no_history, dump } = self;
        let Picture { holders, .. } = &dump.picture;
        let found = json!({
            "trace": name,
            "sentence": format!("{} {}", no_history.sentence(), no_history.remedy()),
            "headline": "no history",
            "no_history": no_history,
            "choice": null,
            "torch": null,
            "set": [],
            "not_shown": [],
        });
        let figures = json!({
            "host": recording.trace.host,
            "recorded": {
                "conf": recording.trace.conf,
                "needs_bytes": null,
                "needs_with_luck_bytes": null,
                "duration_ms": null,
            },
            "best": null,
            "tried": [],
            "passed_over": 0,
            "causes": picture_json(&dump.picture, &Streams::default()),
            "holders": {
                "requested_bytes": holders.requested_bytes,
                "blocks": holders.blocks,
                "by_stack": [],
                "by_size": holders.by_size,
                "by_age": [],
            },
            "free_ranges": dump.free,
            "assertions": [],
        });
        joined([found, limit_json(recording), figures])
    }
}
