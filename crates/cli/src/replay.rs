//! `stratalloc replay`: repeats recordings on an allocator, and verifies its decisions.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::config::{Config, shown};
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::stats::Statistics;
use stratalloc_analysis::{
    Answer, Capacity, Memory, Question, Recording, SearchOptions, counted, counted_as, described,
    measure, snapshot_of,
};
use stratalloc_recording::{
    self, Run, Trace, Until, Verification, Workload, started, verify_until,
};

use super::device::{Device, OpenDevice};
use super::host::{Host, Terminal};
use super::outcome::{BadArguments, Outcome, Result, out, unless_closed, write_note};
use super::recordings::{Devices, Recordings, limit_json, write_remarks};
use super::settings::{self, NamedConf};
use super::show::{is_json, joined, near, say, shown_conf, shown_path};
use super::{files, text, values};

/// Repeat recordings on an allocator.
#[derive(Args, Debug)]
pub(crate) struct Replay {
    /// Configuration to use. Default: the one in the recording.
    #[arg(long, value_parser = values::conf(), hide_possible_values = true)]
    conf: Option<String>,
    /// Compare every decision with the recorded one: addresses, segment events and the final layout, no
    /// counters. Implies compat:pytorch, except for snapshots of stratalloc.
    #[arg(long)]
    verify: bool,
    /// Begin with the layout right after this many events of the recording, which the recorded settings
    /// led to, and go on from there with --conf.
    #[arg(long, value_name = "EVENT", value_parser = event_number)]
    at: Option<usize>,
    /// Device: sim, host or cuda:N.
    #[arg(long, default_value = "sim")]
    device: Device,
    /// Number of passes over the recording; all but the first are timed.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeat: u32,
    /// Write the final statistics to this file, as flat JSON with PyTorch's keys.
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Write a snapshot with the final layout and the history of the replay to this file, for PyTorch's
    /// viewers: a pickle, or JSON if the name ends in .json.
    #[arg(long, value_name = "FILE")]
    snapshot: Option<PathBuf>,
    #[command(flatten)]
    recordings: Recordings,
}

pub(crate) fn run(args: &Replay) -> Result<Outcome> {
    let (stats, snapshot) = (args.stats.is_some(), args.snapshot.is_some());
    let (several, real) = (args.recordings.files.len() > 1, args.device != Device::Sim);
    let refused = [
        (
            args.verify && real,
            "--verify needs --device sim: no other answers with recorded addresses",
        ),
        (args.at.is_some() && real, "--at needs --device sim"),
        (args.at.is_some() && several, "--at is the number of an event of one trace"),
        (stats && several, "--stats writes the statistics of one trace"),
        (snapshot && several, "--snapshot writes the snapshot of one trace"),
        (snapshot && real, "--snapshot needs --device sim"),
    ];
    if let Some((_, why)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        return Err(BadArguments(why.to_owned()).into());
    }
    for file in [&args.stats, &args.snapshot].into_iter().flatten() {
        files::spare(&args.recordings.files, file)?;
    }
    let chosen = args.recordings.parse_confs(args.conf.as_slice())?.pop();
    // Statistics, snapshots and events are those of one device.
    let wanted =
        if stats || snapshot || args.at.is_some() { Devices::First } else { Devices::Each };
    args.recordings.each(wanted, &mut |name, trace| replay_one(args, chosen.as_ref(), name, trace))
}

fn replay_one(
    args: &Replay,
    chosen: Option<&NamedConf>,
    name: &str,
    trace: Trace,
) -> Result<Outcome> {
    let own = settings::recorded(&trace.conf);
    let (text, config) = match chosen {
        Some(chosen) => chosen.clone(),
        None => (trace.conf.clone(), settings::recorded(&trace.conf)?),
    };
    let memory = args.recordings.memory();
    let mut recording = match args.at {
        Some(events) => begun_at(events, name, trace, own.ok(), memory)?,
        None => Recording::timed(trace, own.ok(), memory, &Host::default()),
    };
    write_remarks(name, &recording);
    if recording.no_history.is_some() {
        let question = Question::default();
        return without_history(args, &described(name, &recording, &question)?, &question);
    }
    if args.verify {
        // The recording was made under the recorded limit, even if the user sets another device size.
        let shown = recording.inferred_limit.filter(|_| recording.exact.is_some());
        recording.limit = shown.or(recording.limit);
    }
    let verification = args.verify.then(|| verify(&mut recording, &config)).transpose()?;
    let config = match args.verify {
        true => recording.trace.as_recorded(config),
        false => config,
    };
    // The verification was one pass already. Further passes are only timed.
    let (run, device_ns) = match &verification {
        Some(verified) if args.repeat == 1 => (verified.run.clone(), None),
        _ => repeat(args, &config, &recording)?,
    };
    let verification = verification.as_ref();
    let statistics = verification.map_or(&run.statistics, |verified| &verified.run.statistics);
    if let Some(file) = &args.stats {
        write_statistics(file, statistics)?;
    }
    if let Some(file) = &args.snapshot {
        let saved = snapshot_of(&recording, &config)?.save(file);
        saved.map_err(|error| format!("{}: {error}", shown_path(file)))?;
    }
    // The need is searched only for JSON output, because that takes many replays.
    let needed = match is_json() && args.device == Device::Sim {
        true => {
            let need = settings::need_of(&recording, &config, &SearchOptions::QUICK)?;
            json!({
                "reserved_unlimited_bytes": need.reserved_unlimited_bytes,
                "needs_bytes": need.needs_bytes,
                "needs_with_luck_bytes": need.with_luck_bytes,
            })
        }
        false => Value::Null,
    };
    let replayed =
        Replayed { recording: &recording, statistics, run: &run, device_ns, verification };
    let heading = [name, &text, &args.device.to_string()];
    let printed = match is_json() {
        true => writeln!(out(), "{}", joined([replayed.json(heading), needed])),
        false => replayed
            .write(heading, args.recordings.memory() != Memory::default())
            .and_then(|()| write_limit(&recording)),
    };
    if args.verify {
        unless_closed(printed)?
    } else {
        printed?
    }
    Ok(Outcome::of(verification.is_none_or(Verification::is_exact)))
}

/// Replays nothing, because there are hardly any requests. Prints the memory at the moment of the dump,
/// unless the user wants a verification or files.
fn without_history(args: &Replay, found: &Answer, question: &Question) -> Result<Outcome> {
    let why = found.no_history.map(|no_history| no_history.to_string()).unwrap_or_default();
    let name = shown(&found.trace);
    if args.verify || args.stats.is_some() || args.snapshot.is_some() || args.at.is_some() {
        let what = if args.verify { "nothing can be verified" } else { "nothing can be replayed" };
        return Err(format!("{name}: {what}: {why}").into());
    }
    if is_json() {
        let device = json!({
            "conf": found.recorded.conf,
            "device": args.device.to_string(),
            "peak_requested_bytes": null,
            "peak_allocated_bytes": null,
            "peak_reserved_bytes": null,
            "reserved_unlimited_bytes": null,
            "needs_bytes": null,
            "needs_with_luck_bytes": null,
        });
        // The recorded device is part of the answer under the name of the replay's.
        let answer = joined([json!(found), device]);
        writeln!(out(), "{answer}")?;
    } else {
        write_note(format_args!("{name}: {why}"));
        text::write(found, question)?;
    }
    Ok(Outcome::Good)
}

/// Returns the part of a recording behind its first `events` events. All replays start with the layout then.
fn begun_at(
    events: usize,
    name: &str,
    trace: Trace,
    own: Option<Config>,
    memory: Memory,
) -> Result<Recording> {
    let (name, count) = (shown(name), trace.events.len());
    if trace.requests_only {
        let why = format!("{name}: a log of requests shows no layout, which --at begins with");
        return Err(BadArguments(why).into());
    }
    if events >= count {
        let why = format!("{name}: --at {events} is not before the end: it has {count} events");
        return Err(BadArguments(why).into());
    }
    Ok(Recording::begun_at(events, trace, own, memory, &Host::default()))
}

/// Compares every decision with the recorded one. Reuses the result for the recorded configuration if it
/// is exact.
fn verify(recording: &mut Recording, config: &Config) -> Result<Verification> {
    let own = recording.config.as_ref();
    let same = own.is_some_and(|own| {
        let as_recorded = |config: &Config| recording.trace.as_recorded(config.clone());
        as_recorded(own).settings() == as_recorded(config).settings()
    });
    if let Some(exact) = recording.exact.take_if(|_| same) {
        return Ok(exact);
    }
    let config = recording.trace.as_recorded(config.clone());
    let total_bytes = recording.total_bytes();
    let fraction = recording.fraction_of(total_bytes);
    let (until, host) = (Until::End, &Host::default());
    let mut found =
        verify_until(&recording.trace, &config, total_bytes, fraction, until, &started, host)?;
    recording.workload = Arc::new(std::mem::take(&mut found.workload));
    Ok(found)
}

/// Returns the result of the passes over the recording, and on a simulated device the time of the device
/// calls.
fn repeat(args: &Replay, config: &Config, recording: &Recording) -> Result<(Run, Option<u64>)> {
    let terminal = &Terminal::new(args.repeat.into(), "replaying");
    Ok(match args.device {
        Device::Sim => {
            let trial = measure(recording, config, Capacity::Limited, args.repeat, terminal)?;
            (trial.run, Some(trial.device_ns))
        }
        Device::Host | Device::Cuda(_) => {
            let opened = args.device.open(args.recordings.total_memory)?;
            let workload = &with_real_streams(&recording.workload, &opened)?;
            let total_bytes = opened.driver.info().total_bytes;
            let config = &recording.trace.resolved(config);
            let strategy = registry::build(config, opened.driver, BuildOptions::default())?;
            if let Some(fraction) = recording.fraction_of(total_bytes) {
                strategy.caching_or_refuse()?.set_memory_fraction(fraction)?;
            }
            let strategy = counted(strategy);
            (
                stratalloc_recording::run(
                    workload,
                    &strategy,
                    opened.work_gate,
                    args.repeat,
                    terminal,
                )?,
                None,
            )
        }
    })
}

/// Replaces the recorded streams by streams created on the device. The default stream stays the same.
fn with_real_streams(workload: &Workload, opened: &OpenDevice) -> Result<Workload> {
    let mut workload = workload.clone();
    if opened.driver.info().driver == "cuda" {
        let named: Vec<_> =
            workload.streams().into_iter().filter(|s| *s != StreamId::DEFAULT).collect();
        let real = opened.streams(named.len().min(REAL_STREAMS_MAX))?;
        workload.rename_streams(|stream| match named.binary_search(&stream) {
            Ok(at) => real[at % real.len()],
            Err(_) => stream,
        });
    }
    Ok(workload)
}

/// The maximum number of streams created for a recording. If it has more, several recorded streams share
/// one.
const REAL_STREAMS_MAX: usize = 64;

fn write_statistics(file: &Path, statistics: &Statistics) -> Result<()> {
    let keys: serde_json::Map<String, serde_json::Value> =
        statistics.keys().into_iter().map(|(key, n)| (key, n.into())).collect();
    let text = serde_json::to_string_pretty(&keys)? + "\n";
    stratalloc::files::write(file, text.as_bytes())
        .map_err(|error| format!("{}: {error}", shown_path(file)).into())
}

/// The results of a replay: of one or several passes, a verification, or both.
struct Replayed<'a> {
    recording: &'a Recording,
    statistics: &'a Statistics,
    run: &'a Run,
    /// The time of the device calls, if known.
    device_ns: Option<u64>,
    verification: Option<&'a Verification>,
}

impl Replayed<'_> {
    fn ns_per_op(&self) -> f64 {
        (self.run.ns_per_op * 10.0).round() / 10.0
    }

    fn first_out_of_memory(&self) -> Option<String> {
        let report = self.run.first_out_of_memory.as_ref()?;
        Some(report.to_string().trim_end().to_owned())
    }

    /// Returns a sentence about what the recording probably lacks, if the replay differs from it.
    fn probably_lacks(&self) -> Option<String> {
        let differs = self.verification.filter(|verification| !verification.is_exact())?;
        Some(self.recording.probably_lacks(differs))
    }

    fn json(&self, [trace, conf, device]: [&str; 3]) -> Value {
        let s = self.statistics;
        let Run { allocations, frees, ooms, wall_s, .. } = self.run;
        let run = json!({
            "trace": trace,
            "conf": conf,
            "device": device,
            "allocations": allocations,
            "frees": frees,
            "peak_requested_bytes": s.requested_bytes.all.peak,
            "peak_allocated_bytes": s.allocated_bytes.all.peak,
            "peak_reserved_bytes": s.reserved_bytes.all.peak,
            "device_allocs": s.num_device_alloc,
            "device_frees": s.num_device_free,
            "retries": s.num_alloc_retries,
            "ooms": ooms,
            "empty_caches_inferred": self.recording.workload.empty_caches,
            "device_ms": self.device_ns.map(|ns| ns as f64 / 1e6),
            "ns_per_op": self.ns_per_op(),
            "wall_s": wall_s,
        });
        let verified = self.verification.map(|v| {
            json!({
                "address_mismatches": v.address_mismatches,
                "segment_mismatches": v.segment_mismatches,
                "layout_mismatches": v.layout_mismatches,
                "first_mismatch": v.first_mismatch,
                "probably_lacks": self.probably_lacks(),
            })
        });
        let recorded = json!({
            "recorded_ooms": self.recording.figures.ooms,
            "first_out_of_memory": self.first_out_of_memory(),
        });
        joined([run, verified.unwrap_or_default(), recorded, limit_json(self.recording)])
    }

    fn write(&self, [trace, conf, device]: [&str; 3], limit_is_set: bool) -> std::io::Result<()> {
        let (s, ns_per_op) = (self.statistics, self.ns_per_op());
        let Run { allocations, frees, ooms, wall_s, .. } = *self.run;
        let bytes = |n: i64| near(u64::try_from(n).unwrap_or(0));
        let mut out = out();
        say(&mut out, format_args!("{}  [{}] on {}", shown(trace), shown_conf(conf), device))?;
        say(
            &mut out,
            format_args!(
                "  {}, {}, {} out of memory, {}, {} of empty_cache",
                counted_as(allocations, "allocation", "allocations"),
                counted_as(frees, "free", "frees"),
                ooms,
                counted_as(s.num_alloc_retries.unsigned_abs(), "retry", "retries"),
                counted_as(self.recording.workload.empty_caches.into(), "call", "calls")
            ),
        )?;
        say(
            &mut out,
            format_args!(
                "  peak MiB: requested {}, allocated {}, reserved {}; device allocations {}, frees {}",
                bytes(s.requested_bytes.all.peak),
                bytes(s.allocated_bytes.all.peak),
                bytes(s.reserved_bytes.all.peak),
                s.num_device_alloc,
                s.num_device_free
            ),
        )?;
        let recorded_ooms = self.recording.figures.ooms;
        // If fewer requests failed than in the recording, the replay may have had more memory than the
        // recorded program.
        if ooms < recorded_ooms && !limit_is_set {
            let times = counted_as(recorded_ooms, "time", "times");
            say(
                &mut out,
                format_args!(
                    "  the recorded program ran out of memory {times}: --memory-fraction or --total-memory \
                 sets how much it had"
                ),
            )?;
        }
        if let Some(report) = self.first_out_of_memory() {
            say(&mut out, format_args!("  first: {}", report.replace('\n', "\n    ")))?;
        }
        if ns_per_op > 0.0 {
            say(&mut out, format_args!("  {ns_per_op:.1} ns an operation, {wall_s:.2} s in all"))?;
        }
        if let Some(verified) = self.verification {
            say(
                &mut out,
                format_args!(
                    "  mismatches: {} addresses, {} segment events, {} segments of the final layout",
                    verified.address_mismatches,
                    verified.segment_mismatches,
                    verified.layout_mismatches
                ),
            )?;
            if s.num_alloc_retries > 0 || self.recording.workload.empty_caches > 0 {
                say(
                    &mut out,
                    format_args!(
                        "  not compared: retries and calls of empty_cache, which leave the same events"
                    ),
                )?;
            }
            if let Some(first) = &verified.first_mismatch {
                say(&mut out, format_args!("  first: {}", shortened(first)))?;
            }
            if let Some(lacks) = self.probably_lacks() {
                say(&mut out, format_args!("  the recording probably lacks {lacks}"))?;
            }
        }
        Ok(())
    }
}

/// Parses the number of an event.
fn event_number(text: &str) -> Result<usize, String> {
    let expected = || "expected a number of events, such as 1000".to_owned();
    text.replace([',', '_'], "").parse().map_err(|_| expected())
}

/// Prints the limit that the replay used, if the user set none.
fn write_limit(recording: &Recording) -> std::io::Result<()> {
    const OFF: &str = "--memory-fraction 1 turns it off";
    let Some(limit) = recording.limit.filter(|_| recording.limit_is_inferred()) else {
        return Ok(());
    };
    let (bounds, source) = (limit.between_in_mib(), limit.source);
    match limit.known() {
        Some(_) => say(&mut out(), format_args!("  limit: {bounds}, {source}; {OFF}")),
        None => say(
            &mut out(),
            format_args!("  {source}; replayed with a memory fraction {bounds}; {OFF}"),
        ),
    }
}

/// Returns the description of the first difference, shortened if it is a long list of events.
fn shortened(text: &str) -> String {
    const SHOWN_CHARS: usize = 600;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{} ... (--json has all of it)", &text[..end]),
        None => text.to_owned(),
    }
}
