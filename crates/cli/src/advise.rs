//! `stratalloc advise`: finds a setting with which a program needs less memory, and the causes of its
//! need.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::config::{TorchVersion, shown};
use stratalloc_analysis::{
    Advice, AdviceOptions, BESIDES, Callers, Causes, Choice, CodeHolder, Compared, ForTorch,
    Holders, Picture, Recording, Streams, Tried, Why, counted_as, grouped, heap_name,
    host_sentence, with_failed,
};
use stratalloc_recording::{Frame, FrameKind, ReplayError, StackId, Trace};

use super::assertion::{Assertion, Verdict, fits};
use super::dump;
use super::junit::{self, Case};
use super::outcome::{Outcome, Result, out, unless_closed};
use super::recordings::{Devices, NotJudged, Recordings, limit_json};
use super::show::Side::{Left, Right};
use super::show::{
    LUCK, NEED_HEADING, PYTORCHS, UNKNOWN, emphasised, joined, mib, need_cells, paste_json,
    progress, shown_conf, table,
};

/// Arguments of `advise`.
#[derive(Args, Debug)]
pub(crate) struct Advise {
    #[command(flatten)]
    recordings: Recordings,
    /// Try only the settings that help most often: seconds instead of up to a minute.
    #[arg(long)]
    quick: bool,
    /// Compare stacks by all their frames, and print all of them: also those of the unwinder, the allocator,
    /// the dispatcher, autograd's engine, Python's interpreter and generated wrappers.
    #[arg(long)]
    all_frames: bool,
    /// Version of PyTorch that the settings are for, such as 2.8. Default: the oldest that can have made
    /// the recording.
    #[arg(long, value_name = "VERSION")]
    torch: Option<TorchVersion>,
    /// Check whether the program fits in this much memory as it is. The exit code is 1 if it needs more, or
    /// if requests failed when it was recorded. If it needs more, the cheapest setting with which it fits is
    /// named. A size such as 24GiB, or a share of --total-memory, such as 80%.
    #[arg(long, value_name = "SIZE", value_parser = fits)]
    fits: Option<Assertion>,
    /// Check a condition, such as needs<=24GiB, live_peak<20GiB or failures==0. The exit code is 1 if it does
    /// not hold. Can be given several times. needs is the need as recorded, least_need the smallest of all
    /// settings that are tried, failures the number of failed requests.
    #[arg(long, value_name = "CONDITION")]
    assert: Vec<Assertion>,
    /// Write the results of the conditions to this file, in JUnit's format.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Print one JSON object per recording.
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &Advise) -> Result<Outcome> {
    let has_conditions = args.assertions().next().is_some();
    junit::check(args.junit.as_deref(), has_conditions, &args.recordings.files)?;
    let mut cases = Vec::new();
    let mut act = |name: &str, trace| advise(args, name, trace, &mut cases);
    let mut failed = Vec::new();
    let outcome = args.recordings.each_or(Devices::Each, &mut act, &mut failed)?;
    for NotJudged { name, error } in &failed {
        cases.extend(
            args.assertions()
                .map(|assertion| Case { name: name.clone(), answer: assertion.unjudged(error) }),
        );
    }
    if let Some(file) = &args.junit {
        junit::write(file, "advise", &cases)?;
    }
    Ok(outcome)
}

impl Advise {
    fn assertions(&self) -> impl Iterator<Item = &Assertion> {
        self.fits.iter().chain(&self.assert)
    }

    fn options(&self, recording: &Recording) -> AdviceOptions {
        // The strictest condition decides: if the recorded setting meets it, no other setting is
        // searched.
        let total_bytes = recording.memory.total_bytes;
        let enough = self.assertions().map(|assertion| assertion.enough_bytes(total_bytes));
        let enough = enough.collect::<Option<Vec<u64>>>();
        let enough_bytes = enough.and_then(|all| all.into_iter().min());
        let (quick, torch) = (self.quick, self.torch);
        AdviceOptions { quick, torch, enough_bytes, ..AdviceOptions::default() }
    }
}

/// Adds the results of the conditions to `cases`.
fn advise(args: &Advise, name: &str, trace: Trace, cases: &mut Vec<Case>) -> Result<Outcome> {
    let recording = args.recordings.recording(name, trace, "compared with PyTorch's default");
    if let Some(dump) = dump::Answer::of(name, &recording) {
        return without_history(args, &dump);
    }
    let options = args.options(&recording);
    let bar = progress(1, &format!("trying settings on {}", shown(name)));
    let mut advice = Advice::search(&recording, &options, &|done, known| {
        bar.set_length(known as u64);
        bar.set_position(done as u64);
    })?;
    let checks = args.assertions().map(|assertion| assertion.check(&recording, &mut advice));
    let verdicts: Vec<Verdict> = checks.collect::<Result<_, _>>()?;
    cases.extend(
        verdicts
            .iter()
            .map(|verdict| Case { name: name.to_owned(), answer: verdict.answer.clone() }),
    );
    let outcome = verdicts.iter().map(|verdict| verdict.answer.outcome).max().unwrap_or_default();
    bar.finish_and_clear();
    let why = stratalloc_page::why(&recording)?;
    let compared = if args.all_frames { Compared::AllFrames } else { Compared::Code };
    let callers = Callers::of(&recording.trace.stacks, compared);
    let (recording, advice, why) = (&recording, &advice, &why);
    let found = Found { name, recording, advice, why, callers, compared };
    if args.json {
        let mut json = found.json();
        json["assertions"] = verdicts.iter().map(Verdict::json).collect();
        let printed = writeln!(out(), "{json}");
        if verdicts.is_empty() { printed? } else { unless_closed(printed)? }
    } else if verdicts.is_empty() {
        found.write(&options)?;
    } else {
        unless_closed(write_verdicts(name, &verdicts))?;
    }
    Ok(outcome)
}

/// Prints the memory at the moment of the dump. A condition is then an error, because it cannot be judged.
fn without_history(args: &Advise, dump: &dump::Answer<'_>) -> Result<Outcome> {
    let has_conditions = args.assertions().next().is_some();
    let printed = if args.json {
        let why = dump.no_history.to_string();
        let mut json = dump.json();
        json["assertions"] = args.assertions().map(|one| one.unjudged_json(&why)).collect();
        writeln!(out(), "{json}")
    } else if has_conditions {
        dump.write_reason()
    } else {
        dump.write()
    };
    if has_conditions {
        unless_closed(printed)?;
        return Err(ReplayError::from(dump.no_history).into());
    }
    printed?;
    Ok(Outcome::Good)
}

fn write_verdicts(name: &str, verdicts: &[Verdict]) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", shown(name))?;
    for verdict in verdicts {
        writeln!(out, "{}", emphasised(&verdict.answer.sentence))?;
    }
    writeln!(out)
}

fn write_choice(Choice { allocator, set, needs }: &Choice) -> io::Result<()> {
    let allocator = format!("{allocator}:");
    writeln!(out(), "  {allocator:<21} {set}  {needs}")
}

/// The number of settings in the table.
const SHOWN: usize = 3;

fn percent(bytes: u64, of: u64) -> String {
    if of == 0 { "-".to_owned() } else { format!("{:.1}%", bytes as f64 * 100.0 / of as f64) }
}

/// The maximum number of rows for streams and pools in the table.
const HEAPS_SHOWN: usize = 8;

/// The maximum number of callers listed.
const CALLERS_SHOWN: usize = 10;

/// The results for a recording.
struct Found<'a> {
    name: &'a str,
    recording: &'a Recording,
    advice: &'a Advice,
    why: &'a Why,
    callers: Callers<'a>,
    compared: Compared,
}

impl Found<'_> {
    fn write(&self, options: &AdviceOptions) -> io::Result<()> {
        self.write_advice()?;
        self.write_tried(options)?;
        let mut out = out();
        if let Some(picture) = &self.why.main {
            write_picture(picture, &self.why.streams)?;
            if let Some(label) = self.failed_by(picture) {
                writeln!(out, "The failed request came from {}.\n", shown(&label))?;
            }
            self.write_holders(&picture.holders)?;
            writeln!(out)?;
        }
        if let Some(picture) = &self.why.reserved {
            write_picture(picture, &self.why.streams)?;
        }
        let unknown = self.advice.unknown(self.recording);
        if !unknown.is_empty() {
            writeln!(out, "The recording does not show:")?;
        }
        for what in unknown {
            writeln!(out, "  - {what}")?;
        }
        writeln!(out)
    }

    /// Returns the label of the code that made the failed request.
    fn failed_by(&self, picture: &Picture) -> Option<String> {
        let stack = picture.failed?.stack?;
        Some(self.callers.labels(&[self.callers.of_stack(stack)]).concat())
    }

    fn write_advice(&self) -> io::Result<()> {
        let Self { recording, advice, .. } = self;
        let mut out = out();
        writeln!(out, "{}", shown(self.name))?;
        writeln!(out, "{}", emphasised(&advice.sentence_with_holder(recording, self.why)))?;
        if let Some(limit) = recording.limit_sentence() {
            writeln!(out, "{limit}")?;
        }
        if let Some(host) = &recording.trace.host {
            writeln!(out, "{}", host_sentence(host))?;
        }
        advice.choices(recording).iter().try_for_each(write_choice)?;
        writeln!(out)
    }

    fn write_tried(&self, options: &AdviceOptions) -> io::Result<()> {
        let Self { recording, advice, .. } = *self;
        let row = |what: String, tried: &Tried| {
            need_cells(what, tried.need.in_mib(), &tried.need, recording)
        };
        let others = advice.tried.iter().filter(|tried| tried.conf != advice.recorded.conf);
        let named = advice.headline(recording).choice().map(|choice| choice.conf.as_str());
        let is_shown = |(at, tried): &(usize, &Tried)| *at < SHOWN || named == Some(&tried.conf);
        let best = others.enumerate().filter(is_shown);
        let mut rows: Vec<_> = best.map(|(_, tried)| row(shown_conf(&tried.conf), tried)).collect();
        let recorded = &advice.recorded;
        rows.push(row(format!("as recorded: {}", shown_conf(&recorded.conf)), recorded));
        if let Some(modelled) = &advice.modelled {
            rows.push(row(format!("{} (a model)", modelled.conf), modelled));
        }
        let mut out = out();
        table(&mut out, &NEED_HEADING, &rows)?;
        let (searched, failed) = (advice.searched(), with_failed(recording));
        let live = mib(recording.live_peak_bytes as f64);
        writeln!(out, "{PYTORCHS}")?;
        writeln!(out, "{searched}; live bytes alone: {live} MiB{failed}")?;
        writeln!(out, "needs: the smallest device size from which on no request fails. {BESIDES}")?;
        if recording.figures.duration_us.is_some() {
            writeln!(out, "device ms: simulated; in brackets as a share of the recorded time")?;
        }
        let mut all = advice.tried.iter().chain([&advice.recorded]);
        if all.any(|tried| tried.need.with_luck_bytes.is_some()) {
            writeln!(out, "{}", LUCK)?;
        }
        if advice.is_cut_short {
            let seconds = Duration::as_secs(&options.time);
            writeln!(out, "Not all settings were tried: {seconds} s had passed.")?;
        }
        writeln!(out)
    }

    fn write_holders(&self, holders: &Holders) -> io::Result<()> {
        let mut out = out();
        let blocks = counted_as(holders.blocks, "block", "blocks");
        writeln!(out, "Then {blocks} hold {} MiB:", mib(holders.requested_bytes as f64))?;
        let cells = |bytes: u64, blocks: u64, more: &[String]| {
            share_cells(bytes, holders.requested_bytes, blocks, more)
        };
        let heading = |what| [("MiB", Right), ("", Right), ("blocks", Right), (what, Left)];
        let has_stacks = holders.by_stack.iter().any(|holder| holder.stack.is_some());
        if has_stacks {
            let rows = holders.by_code(&self.callers, CALLERS_SHOWN);
            let row = |CodeHolder { asked_for_by, holder, .. }: &CodeHolder| {
                let (newest, oldest) = (holder.newest_requests, holder.oldest_requests);
                let ago = match newest.zip(oldest) {
                    None => UNKNOWN.to_owned(),
                    Some((newest, oldest)) if newest == oldest => grouped(oldest.into()),
                    Some((newest, oldest)) => {
                        format!("{} to {}", grouped(newest.into()), grouped(oldest.into()))
                    }
                };
                cells(holder.requested_bytes, holder.blocks, &[ago, asked_for_by.clone()])
            };
            let [mib, share, blocks, by] = heading("requested by (called by)");
            let heading = [mib, share, blocks, ("requests ago", Right), by];
            table(&mut out, &heading, &rows.iter().map(row).collect::<Vec<_>>())?;
            if self.compared == Compared::AllFrames {
                self.write_stacks(&rows)?;
            }
        }
        write_sizes(holders, if has_stacks { SHOWN } else { usize::MAX })?;
        let ages = holders.by_age.iter().map(|class| {
            let age = match class.up_to_requests {
                _ if class.lived_before => "before the recording began".to_owned(),
                Some(end) => format!("at most {} requests ago", grouped(end.into())),
                None => "longer ago".to_owned(),
            };
            cells(class.requested_bytes, class.blocks, &[age])
        });
        table(&mut out, &heading("requested"), &ages.collect::<Vec<_>>())
    }

    /// Prints all frames of each holder's stack, innermost first.
    fn write_stacks(&self, rows: &[CodeHolder]) -> io::Result<()> {
        let mut out = out();
        for CodeHolder { asked_for_by, holder, .. } in rows {
            let Some(stack) = holder.stack else { continue };
            writeln!(out, "{} MiB, {}", mib(holder.requested_bytes as f64), shown(asked_for_by))?;
            for Frame { file, line, function } in self.recording.trace.stacks.frames(stack) {
                writeln!(out, "    {}", shown(&format!("{file}:{line} {function}")))?;
            }
        }
        Ok(())
    }

    fn picture_json(&self, picture: &Picture) -> Value {
        let mut all = picture_json(picture, &self.why.streams);
        all["failed_by"] = json!(self.failed_by(picture));
        all
    }

    fn causes_json(&self) -> Option<Value> {
        let Why { streams, main, reserved } = self.why;
        let mut causes = self.picture_json(main.as_ref()?);
        let reserved = reserved.as_ref().or(main.as_ref());
        causes["peak_reserved"] = json!(reserved.map(|picture| self.picture_json(picture)));
        causes["live_peak_bytes"] = json!(streams.peak_live_bytes);
        causes["streams_busy_together"] = json!(streams.busy_together);
        causes["streams"] = json!(streams.streams);
        Some(causes)
    }

    fn holders_json(&self, holders: &Holders) -> Value {
        let is_shown = |frame: &Frame<'_>| {
            self.compared == Compared::AllFrames || !matches!(frame.kind(), FrameKind::Runtime(_))
        };
        let frames = |stack: StackId| -> Vec<Value> {
            let frames = self.recording.trace.stacks.frames(stack).filter(is_shown);
            let frame = |frame: Frame<'_>| json!({"filename": frame.file, "line": frame.line, "name": frame.function});
            frames.map(frame).collect()
        };
        let by_stack = holders.by_code(&self.callers, CALLERS_SHOWN).into_iter().map(|row| {
            let code = json!({
                "asked_for_by": row.asked_for_by,
                "category": row.caller.and_then(|caller| self.callers.category_name(caller)),
                "lived_before": row.holder.lived_before,
                "frames": row.holder.stack.map(frames),
            });
            joined([json!(row.holder), code])
        });
        json!({
            "requested_bytes": holders.requested_bytes,
            "blocks": holders.blocks,
            "by_stack": by_stack.collect::<Vec<_>>(),
            "by_size": holders.by_size,
            "by_age": holders.by_age,
        })
    }

    fn json(&self) -> Value {
        let Self { recording, advice, .. } = *self;
        let holders = self.why.main.as_ref().map(|picture| &picture.holders);
        let tried = |tried: &Tried| joined([tried_json(tried), paste_json(&advice.paste(tried))]);
        let found = json!({
            "trace": self.name,
            "sentence": advice.sentence_with_holder(recording, self.why),
            "headline": advice.headline(recording).name(),
            "choice": advice.headline(recording).choice().map(tried),
            "torch": match advice.torch {
                ForTorch::Unknown => None,
                ForTorch::Set(version) | ForTorch::Shown(version) => Some(version.to_string()),
            },
            "set": advice.choices(recording).into_iter().map(|choice| choice.set).collect::<Vec<_>>(),
            "not_shown": advice.unknown(recording),
        });
        let figures = json!({
            "host": recording.trace.host,
            "recorded": {
                "conf": recording.trace.conf,
                "needs_bytes": advice.recorded.need.needs_bytes,
                "needs_with_luck_bytes": advice.recorded.need.with_luck_bytes,
                "duration_ms": recording.figures.duration_us.map(|us| us as f64 / 1e3),
            },
            "best": advice.best().map(tried),
            "tried": advice.tried.iter().chain(&advice.modelled).map(tried).collect::<Vec<_>>(),
            "passed_over": advice.passed_over,
            "causes": self.causes_json(),
            "holders": holders.map(|holders| self.holders_json(holders)),
        });
        joined([found, limit_json(recording), figures])
    }
}

/// Returns the table cells for blocks or ranges: their bytes, the share of `of`, their number, and `more`.
pub(super) fn share_cells(bytes: u64, of: u64, count: u64, more: &[String]) -> Vec<String> {
    [&[mib(bytes as f64), percent(bytes, of), grouped(count)], more].concat()
}

/// Prints the first `shown` sizes of live blocks.
pub(super) fn write_sizes(holders: &Holders, shown: usize) -> io::Result<()> {
    let sizes = holders.by_size.iter().map(|class| {
        let (each, stream) = (grouped(class.each_bytes), class.stream.0);
        let each = format!("{each} bytes on stream {stream:#x}");
        share_cells(class.requested_bytes, holders.requested_bytes, class.blocks, &[each])
    });
    let heading = [("MiB", Right), ("", Right), ("blocks", Right), ("each", Left)];
    table(&mut out(), &heading, &sizes.take(shown).collect::<Vec<_>>())
}

/// Prints the reserved bytes at a moment by cause, for all streams and for each.
pub(super) fn write_picture(picture: &Picture, streams: &Streams) -> io::Result<()> {
    let mut out = out();
    writeln!(out, "{}", picture.sentence(streams))?;
    let total = picture.causes.total_bytes();
    let mut heading = vec![("MiB reserved", Left), ("all", Right), ("", Right)];
    let several = if picture.heaps.len() > 1 { HEAPS_SHOWN } else { 0 };
    let heaps = || picture.heaps.iter().take(several);
    let names: Vec<String> = heaps().map(heap_name).collect();
    heading.extend(names.iter().map(|name| (name.as_str(), Right)));
    let mut rows = Vec::new();
    for (at, (name, bytes)) in picture.causes.rows().into_iter().enumerate() {
        if bytes == 0 && name != "requested and live" {
            continue;
        }
        let mut row = vec![name.to_owned(), mib(bytes as f64), percent(bytes, total)];
        row.extend(heaps().map(|heap| mib(heap.causes.rows()[at].1 as f64)));
        rows.push(row);
    }
    let mut sum = vec!["together".to_owned(), mib(total as f64), percent(total, total)];
    sum.extend(heaps().map(|heap| mib(heap.causes.total_bytes() as f64)));
    rows.push(sum);
    table(&mut out, &heading, &rows)?;
    writeln!(out)
}

/// Returns the reserved bytes at a moment as JSON, without the code of a failed request.
pub(super) fn picture_json(picture: &Picture, streams: &Streams) -> Value {
    let mut all = causes_json(&picture.causes);
    let heaps = picture.heaps.iter().map(|heap| {
        let mut one = causes_json(&heap.causes);
        one["stream"] = json!(heap.stream.0);
        one["pool"] = json!([heap.pool.capture, heap.pool.user]);
        one["largest_free_bytes"] = json!(heap.largest_free_bytes);
        one
    });
    all["moment"] = json!(picture.moment.name());
    all["operations"] = json!(picture.operations);
    all["failed_bytes"] = json!(picture.failed.map(|failed| failed.requested_bytes));
    all["why"] = json!(picture.sentence(streams));
    all["heaps"] = heaps.collect();
    all
}

fn tried_json(tried: &Tried) -> Value {
    let cost = tried.need.cost;
    json!({
        "conf": tried.conf,
        "needs_bytes": tried.need.needs_bytes,
        "needs_with_luck_bytes": tried.need.with_luck_bytes,
        "all_address_orders": tried.need.all_orders,
        "device_ms": cost.map(|cost| cost.device_ns as f64 / 1e6),
        "retries": cost.map(|cost| cost.retries),
        "device_calls": cost.map(|cost| cost.device_calls),
        "reserved_unlimited_bytes": tried.need.reserved_unlimited_bytes,
        "runs_under_limit": tried.runs_under_limit,
    })
}

fn causes_json(causes: &Causes) -> Value {
    joined([json!({"reserved_bytes": causes.total_bytes()}), json!(causes)])
}
