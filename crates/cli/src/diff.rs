//! `stratalloc diff`: compares two recordings of one program.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{ArgAction, Args};
use serde::Serialize;
use serde_json::{Value, json};

use stratalloc::config::shown;
use stratalloc_analysis::{
    Diff, Growth, KeptSegment, ShownRequest, Side as Recorded, counted_as, difference, grouped,
};
use stratalloc_recording::Trace;

use super::assertion::{DifferenceBound, DifferenceVerdict, Judgement};
use super::host::Terminal;
use super::junit::TestCase;
use super::options::Conditions;
use super::outcome::{BadArguments, Outcome, Result, out, unless_closed, write_note};
use super::recordings::{Devices, Recordings, limit_json, name_of};
use super::show::{
    UNKNOWN, columns, emphasised, is_json, joined, near, progress, say, shown_path, table,
    value_or_dash, with_sign,
};

/// Compare two recordings of one program: which code holds more memory, and the first request that
/// differs.
#[derive(Args, Debug)]
#[command(
    override_usage = "stratalloc diff [OPTIONS] <A> <B>",
    mut_arg("files", |files| files.num_args(2).action(ArgAction::Set).value_names(["A", "B"]))
)]
pub(crate) struct DiffArguments {
    #[command(flatten)]
    conditions: Conditions<DifferenceBound>,
    #[command(flatten)]
    recordings: Recordings,
}

/// The number of equal requests listed before the first one that differs.
const BEFORE_SHOWN: usize = 3;
/// The maximum number of holders and of segments in the tables.
const ROWS_SHOWN: usize = 10;
/// The maximum number of places with different requests in the JSON object.
const PLACES_MAX: usize = 100;

pub(crate) fn run(args: &DiffArguments) -> Result<Outcome> {
    let files = &args.recordings.files;
    if files.len() != 2 {
        return Err(BadArguments(format!("diff compares 2 recordings, not {}", files.len())).into());
    }
    let conditions = &args.conditions.assert;
    args.conditions.check(!conditions.is_empty(), files)?;
    let mut sides: Vec<(String, Recorded)> = Vec::new();
    let mut read = |name: &str, trace: Trace| -> Result<Outcome> {
        let recording =
            args.recordings.with_history(name, trace, "compared with PyTorch's default")?;
        let terminal = Terminal::new(1, &format!("replaying {}", shown(name)));
        sides.push((name.to_owned(), Recorded::of(recording, &terminal)?));
        Ok(Outcome::Good)
    };
    let mut failed = Vec::new();
    let outcome = args.recordings.each_or(Devices::First, &mut read, &mut failed)?;
    let [(name_a, a), (name_b, b)] = sides.as_slice() else {
        let errors: Vec<String> = failed.into_iter().map(|failed| failed.error).collect();
        args.write_junit(conditions.iter().map(|one| one.unjudged(&errors.join(", and "))))?;
        return Ok(outcome);
    };
    let bar = progress(1, "aligning requests");
    let diff = &Diff::of(a, b);
    bar.finish_and_clear();
    if diff.requests.are_unrelated() {
        let same = counted_as(diff.requests.same as u64, "request is", "requests are");
        write_note(format_args!(
            "only {same} the same: these may be recordings of two programs, which a difference does not compare"
        ));
    }
    let verdicts = conditions.iter().map(|one| one.check_difference(diff));
    let verdicts: Vec<DifferenceVerdict> = verdicts.collect::<Result<_>>()?;
    let found = Differences { files, names: [name_a, name_b], diff, verdicts: &verdicts };
    unless_closed(match is_json() {
        true => writeln!(out(), "{}", found.json()),
        false => found.write(),
    })?;
    args.write_junit(verdicts.iter().map(|verdict| verdict.judgement.clone()))?;
    Ok(verdicts.iter().map(|verdict| verdict.judgement.outcome).max().unwrap_or_default())
}

impl DiffArguments {
    fn write_junit(&self, judgements: impl Iterator<Item = Judgement>) -> Result<()> {
        let names: Vec<String> = self.recordings.files.iter().rev().map(|at| name_of(at)).collect();
        let name = names.join(" against ");
        let cases: Vec<TestCase> =
            judgements.map(|judgement| TestCase { name: name.clone(), judgement }).collect();
        self.conditions.write("diff", &cases)
    }
}

/// Formats the difference between two sizes, in MiB and as a percentage of the first.
pub(crate) fn change([a, b]: [u64; 2]) -> String {
    let bytes = difference([a, b]) as f64;
    let percent =
        if a == 0 { String::new() } else { format!(", {:+.1} %", bytes * 100.0 / a as f64) };
    format!("{} MiB{percent}", with_sign(difference([a, b])))
}

/// The results for two recordings.
struct Differences<'a> {
    files: &'a [PathBuf],
    names: [&'a str; 2],
    diff: &'a Diff<'a>,
    verdicts: &'a [DifferenceVerdict],
}

impl Differences<'_> {
    fn write(&self) -> io::Result<()> {
        let Self { files, diff, verdicts, .. } = self;
        let mut out = out();
        for (side, file) in ["A", "B"].iter().zip(*files) {
            say(&mut out, format_args!("{side}: {}", shown_path(file)))?;
        }
        for verdict in *verdicts {
            let text = format!("{}  {}", verdict.judgement.condition, verdict.judgement.sentence);
            writeln!(out, "{}", emphasised(&text))?;
        }
        if diff.is_empty() {
            let requests = counted_as(diff.requests.same as u64, "request", "requests");
            return say(
                &mut out,
                format_args!(
                    "Nothing differs: {requests}, the live bytes at the peak, the segments and the need are the same."
                ),
            );
        }
        if verdicts.is_empty() {
            writeln!(out, "{}", emphasised(self.sentence()))?;
        }
        writeln!(out)?;
        self.write_figures()?;
        self.write_requests()?;
        self.write_growth()?;
        self.write_kept()
    }

    fn sentence(&self) -> String {
        let needs = self.diff.sides().map(|side| side.need.needs_bytes);
        match needs {
            [Some(a), Some(b)] if a == b => {
                format!("B needs as much memory as A: {} MiB.", near(a))
            }
            [Some(a), Some(b)] => {
                format!("B needs {} MiB, A {} MiB ({}).", near(b), near(a), change([a, b]))
            }
            [None, None] => "No device suffices for A or B.".to_owned(),
            [None, _] => "No device suffices for A.".to_owned(),
            [_, None] => "No device suffices for B.".to_owned(),
        }
    }

    fn write_figures(&self) -> io::Result<()> {
        let [a, b] = self.diff.sides().map(figures);
        let cell = |value: Option<u64>| value_or_dash(value.map(near));
        let rows = FIGURES.iter().zip(a).zip(b).map(|(((name, _), a), b)| {
            let change = a.zip(b).map(|(a, b)| with_sign(difference([a, b])));
            vec![(*name).to_owned(), cell(a), cell(b), value_or_dash(change)]
        });
        let rows: Vec<_> = rows.collect();
        let mut out = out();
        table(&mut out, &columns("MiB | A: | B: | B - A:"), &rows)?;
        writeln!(out)
    }

    fn write_requests(&self) -> io::Result<()> {
        let (diff, mut out) = (self.diff, out());
        let requests = &diff.requests;
        let Some(first) = self.first() else {
            let same = counted_as(requests.same as u64, "request", "requests");
            return say(&mut out, format_args!("Both make the same {same}.\n"));
        };
        say(&mut out, "The first request that differs:")?;
        let cells = |which: &str, side: usize, request: &ShownRequest| {
            let failed = if request.failed { " (failed)" } else { "" };
            vec![
                which.to_owned(),
                grouped(request.request),
                grouped(request.event.into()),
                format!("{}{failed}", grouped(request.bytes)),
                diff.stream_label(side, request.stream),
                value_or_dash(request.requested_by.as_ref()),
            ]
        };
        let before = first.before.iter().map(|request| cells("both", 0, request));
        let a = first.a.iter().map(|request| cells("A", 0, request));
        let b = first.b.iter().map(|request| cells("B", 1, request));
        let rows = before.chain(a).chain(b);
        let heading = columns(" | request: | event: | bytes: | stream: | requested by (called by)");
        table(&mut out, &heading, &rows.collect::<Vec<_>>())?;
        let [only_a, only_b] = requests.only.map(|count| count as u64);
        say(
            &mut out,
            format_args!(
                "{} the same, {} different, {} only in A, {} only in B, in {}.\n",
                counted_as(requests.same as u64, "request is", "requests are"),
                grouped(requests.changed as u64),
                grouped(only_a),
                grouped(only_b),
                counted_as(requests.places.len() as u64, "place", "places")
            ),
        )
    }

    /// Returns the first place at which the requests differ.
    fn first(&self) -> Option<First> {
        let place = self.diff.requests.places.first()?;
        // All requests before the first place are in both recordings, so their numbers are equal.
        let at = place[0].start;
        let before: Vec<usize> = (at.saturating_sub(BEFORE_SHOWN)..at).collect();
        let [a, b] = [0, 1].map(|side| {
            let indices: Vec<usize> = place[side].clone().take(1).collect();
            self.diff.shown_requests(side, &indices).pop()
        });
        Some(First { before: self.diff.shown_requests(0, &before), a, b })
    }

    fn write_growth(&self) -> io::Result<()> {
        let grew = &self.diff.grew;
        let mut out = out();
        if grew.is_empty() {
            return say(&mut out, "At the peak of live bytes each line of code holds as much.\n");
        }
        say(&mut out, "At each recording's peak of live bytes these hold more or less:")?;
        let row = |row: &Growth| {
            let [a, b] = row.bytes.map(near);
            let [blocks_a, blocks_b] = row.blocks.map(grouped);
            vec![with_sign(row.difference()), a, b, blocks_a, blocks_b, row.label()]
        };
        let heading = columns("MiB: | A: | B: | blocks A: | blocks B: | requested by (called by)");
        let rows: Vec<_> = grew.iter().take(ROWS_SHOWN).map(row).collect();
        table(&mut out, &heading, &rows)?;
        if grew.len() > ROWS_SHOWN {
            say(&mut out, format_args!("(the largest {ROWS_SHOWN} of {})", self.diff.grew_count))?;
        }
        writeln!(out)
    }

    fn write_kept(&self) -> io::Result<()> {
        let kept = &self.diff.kept;
        if kept.is_empty() {
            return Ok(());
        }
        let mut out = out();
        say(
            &mut out,
            format_args!(
                "At the peak of reserved bytes B has {} with live blocks that A has not:",
                counted_as(self.diff.kept_count, "segment", "segments")
            ),
        )?;
        let row = |segment: &KeptSegment| {
            vec![
                near(segment.size_bytes),
                near(segment.free_bytes),
                self.diff.stream_label(1, segment.stream),
                grouped(segment.blocks),
                near(segment.largest_bytes),
                match &segment.largest {
                    Some(ShownRequest { request, requested_by: Some(label), .. }) => {
                        format!("{label} (request {})", grouped(*request))
                    }
                    Some(request) => format!("request {}", grouped(request.request)),
                    None => UNKNOWN.to_owned(),
                },
            ]
        };
        let heading =
            columns("MiB: | free: | stream: | blocks: | largest: | requested by (called by)");
        let rows: Vec<_> = kept.iter().take(ROWS_SHOWN).map(row).collect();
        table(&mut out, &heading, &rows)
    }

    fn json(&self) -> Value {
        let Self { names, diff, verdicts, .. } = self;
        let sides = diff.sides();
        let side = |at: usize| side_json(names[at], sides[at]);
        let [a, b] = sides.map(figures);
        let changes = [0, 1, 2, 3].map(|at| a[at].zip(b[at]).map(|(a, b)| difference([a, b])));
        let requests = &diff.requests;
        let places = &requests.places[..requests.places.len().min(PLACES_MAX)];
        let mut first = [0, 1].map(|side| {
            let indices: Vec<usize> = places.iter().flat_map(|p| p[side].clone().take(1)).collect();
            diff.shown_requests(side, &indices).into_iter()
        });
        let place = |place: &[std::ops::Range<usize>; 2]| {
            let [a, b] = [0, 1].map(|side| {
                let count = place[side].len();
                json!({"requests": count, "first": (count > 0).then(|| first[side].next()).flatten()})
            });
            json!({"a": a, "b": b})
        };
        let list: Vec<Value> = places.iter().map(place).collect();
        let growth = |row: &Growth| {
            json!({
                "requested_by": row.label(),
                "difference_bytes": row.difference(),
                "a": {"requested_by": row.requested_by[0], "bytes": row.bytes[0], "blocks": row.blocks[0]},
                "b": {"requested_by": row.requested_by[1], "bytes": row.bytes[1], "blocks": row.blocks[1]},
            })
        };
        json!({
            "a": side(0),
            "b": side(1),
            "is_same": diff.is_empty(),
            "difference": figures_json(changes),
            "requests": {
                "same": requests.same,
                "changed": requests.changed,
                "only_a": requests.only[0],
                "only_b": requests.only[1],
                "places": requests.places.len(),
                "first": self.first(),
                "list": list,
            },
            "grew": diff.grew.iter().map(growth).collect::<Vec<_>>(),
            "grew_count": diff.grew_count,
            "kept_segments": diff.kept,
            "kept_segments_count": diff.kept_count,
            "assertions": verdicts.iter().map(DifferenceVerdict::json).collect::<Vec<_>>(),
        })
    }
}

/// The first place at which the requests of two recordings differ.
#[derive(Serialize)]
struct First {
    /// The last requests before it, which both recordings have.
    before: Vec<ShownRequest>,
    /// The request of the first recording there; `None` if the second one has more requests there.
    a: Option<ShownRequest>,
    b: Option<ShownRequest>,
}

/// The figures that are compared: their names in the table and in JSON.
const FIGURES: [(&str, &str); 4] = [
    ("needs", "needs_bytes"),
    ("live bytes at the peak", "live_peak_bytes"),
    ("peak reserved, recorded", "peak_reserved_bytes"),
    ("reserved without a limit", "reserved_unlimited_bytes"),
];

fn figures_json<T: Serialize>(figures: [Option<T>; 4]) -> Value {
    let field = |((_, key), figure): (&(_, &str), _)| ((*key).to_owned(), json!(figure));
    FIGURES.iter().zip(figures).map(field).collect()
}

/// Returns the values of [`FIGURES`].
fn figures(side: &Recorded) -> [Option<u64>; 4] {
    let (need, recording) = (&side.need, &side.recording);
    let peak_reserved = Some(recording.figures.peak_reserved_bytes);
    [
        need.needs_bytes,
        Some(recording.live_peak_bytes),
        peak_reserved.filter(|_| !recording.trace.requests_only),
        Some(need.reserved_unlimited_bytes),
    ]
}

fn side_json(name: &str, side: &Recorded) -> Value {
    let own = json!({
        "trace": name,
        "conf": side.recording.trace.conf,
        "requests": side.requests(),
        "needs_with_luck_bytes": side.need.with_luck_bytes,
    });
    joined([own, figures_json(figures(side)), limit_json(&side.recording)])
}
