//! `stratalloc replay`: repeat recordings through an allocator, and verify its decisions.

use std::error::Error;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use crate::analysis::{add_taken, counted};
use crate::config::{Compat, Config, Size, shown};
use crate::driver::sim::EventMode;
use crate::history::{Action, BlockStateName, SegmentLayout};
use crate::ids::StreamId;
use crate::registry::{self, BuildOptions};
use crate::replay::{self, Limits, Manner, Run, Trace, Verification, Workload, reader};
use crate::stats::Statistics;

use super::device::{Device, Opened, open_sim};
use super::files;
use super::outcome::{BadWords, Outcome, each, fraction, out, tell};
use super::settings;
use super::show::{grouped, mib, progress, shown_conf, shown_path};

/// Arguments of `replay`.
#[derive(Args, Debug)]
pub(crate) struct Replay {
    /// PyTorch memory snapshots (.pickle or .json) or logs of requests in RMM's format (.csv), plain, .xz,
    /// .gz or .zst.
    #[arg(required = true)]
    trace: Vec<PathBuf>,
    /// The configuration. Default: the one recorded in the trace.
    #[arg(long)]
    conf: Option<String>,
    /// Compare every decision with the recorded one; implies compat:pytorch.
    #[arg(long)]
    verify: bool,
    /// sim, host or cuda:N.
    #[arg(long, default_value = "sim")]
    device: Device,
    /// Memory of the device: 32GiB, 40G, 512MiB, or a number of bytes.
    #[arg(long, value_parser = Size::in_bytes)]
    total_memory: Option<u64>,
    /// Part of the device's memory that may be reserved.
    #[arg(long, value_parser = fraction)]
    memory_fraction: Option<f64>,
    /// The device of the recording that is replayed. Default: the one with the most events.
    #[arg(long)]
    recorded_device: Option<u32>,
    /// Passes over the recording; times come from all but the first.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    repeat: u32,
    /// Write the final statistics to this file, as flat JSON with PyTorch's keys.
    #[arg(long)]
    stats: Option<PathBuf>,
    /// Refuse recordings that decode to more bytes than this.
    #[arg(long, value_parser = Size::in_bytes, default_value_t = Limits::default().decoded_bytes)]
    max_input: u64,
    /// One JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Serialize)]
struct Row<'a> {
    trace: &'a str,
    conf: &'a str,
    device: &'a str,
    allocations: u64,
    frees: u64,
    peak_requested_bytes: i64,
    peak_allocated_bytes: i64,
    peak_reserved_bytes: i64,
    device_allocs: i64,
    device_frees: i64,
    retries: i64,
    ooms: u64,
    empty_caches_inferred: u32,
    ns_per_op: f64,
    wall_s: f64,
    #[serde(flatten)]
    verified: Option<Verified>,
    recorded_ooms: u64,
    first_out_of_memory: Option<String>,
}

#[derive(Serialize)]
struct Verified {
    address_mismatches: u64,
    segment_mismatches: u64,
    layout_mismatches: u64,
    first_mismatch: Option<String>,
}

pub(crate) fn run(args: &Replay) -> Result<Outcome, Box<dyn Error>> {
    if args.verify && args.device != Device::Sim {
        let why = "--verify needs --device sim: no other answers with recorded addresses";
        return Err(BadWords(why.to_owned()).into());
    }
    if args.stats.is_some() && args.trace.len() > 1 {
        return Err(BadWords("--stats writes the statistics of one trace".to_owned()).into());
    }
    if let Some(file) = &args.stats {
        files::spare(&args.trace, file)?;
    }
    let asked = match &args.conf {
        Some(text) => {
            Some((text.as_str(), asked_for(text, &args.trace, args.memory_fraction.is_some())?))
        }
        None => None,
    };
    each(&args.trace, |path| {
        let trace = read(path, args.max_input, args.recorded_device)?;
        replay_one(args, asked.as_ref(), path, &trace)
    })
}

/// Reads a recording with a progress bar; `-` is standard input.
pub(crate) fn read(
    path: &Path,
    max_input: u64,
    device: Option<u32>,
) -> Result<Trace, Box<dyn Error>> {
    let name = shown_path(path);
    let (file, length): (Box<dyn Read>, u64) = if path == Path::new("-") {
        (Box::new(std::io::stdin().lock()), 0)
    } else {
        let file = std::fs::File::open(path).map_err(|error| format!("{name}: {error}"))?;
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        (Box::new(file), length)
    };
    let bar = progress(length, &format!("reading {name}"));
    let limits = Limits { decoded_bytes: max_input, device, ..Limits::default() };
    let trace = reader::read_bytes(&name, file, &limits, Some(&|done| bar.set_position(done)))?;
    bar.finish_and_clear();
    if trace.events.is_empty() {
        let why = format!("{name}: {}", nothing_in(&trace, device));
        let live =
            |segment: &SegmentLayout| segment.bytes_in(&[BlockStateName::ActiveAllocated]) > 0;
        if !trace.segments.iter().any(live) {
            return Err(why.into());
        }
        tell(format_args!("note: only the blocks that lived are taken: {why}"));
    }
    if trace.other_devices > 0 {
        let (device, others) = (trace.device, trace.other_devices);
        tell(format_args!(
            "note: {name}: events of device {device} are taken, {others} more have some: \
             --recorded-device N takes another"
        ));
    }
    Ok(trace)
}

/// What a recording without events lacks, and why it may. `device`: the one that was asked for.
fn nothing_in(trace: &Trace, device: Option<u32>) -> String {
    match device {
        _ if trace.requests_only => "it holds no requests".to_owned(),
        Some(device) => format!("it holds no events of device {device}; others may have some"),
        None => "it holds no events: was torch.cuda.memory._record_memory_history on while the \
                 program ran?"
            .to_owned(),
    }
}

/// How often the recorded program ran out of memory.
pub(crate) fn recorded_ooms(trace: &Trace) -> u64 {
    trace.events.iter().filter(|event| event.action == Action::OutOfMemory).count() as u64
}

/// Says that a replay may have had more memory than what was recorded, unless somebody said how much.
pub(crate) fn may_have_had_more(recorded_ooms: u64, ooms: u64, is_said: bool) -> Option<String> {
    (ooms < recorded_ooms && !is_said).then(|| {
        format!(
            "the recorded program ran out of memory {recorded_ooms} times: --memory-fraction or \
             --total-memory says how much it had"
        )
    })
}

/// The name of a recording: its file's, without the endings.
pub(crate) fn name_of(path: &Path) -> String {
    let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let known = [".xz", ".gz", ".zst", ".pickle", ".json", ".csv"];
    known
        .iter()
        .fold(file, |name, ending| name.strip_suffix(ending).map(str::to_owned).unwrap_or(name))
}

/// What `--conf` says, looked at before any recording is read.
pub(crate) fn asked_for(
    text: &str,
    recordings: &[PathBuf],
    has_limit: bool,
) -> Result<Config, Box<dyn Error>> {
    let config = settings::parse("--conf", text)?;
    files::spare_from(&config, recordings)?;
    settings::tell_idle_keys(&config, has_limit);
    Ok(config)
}

/// A configuration as its string says it, and parsed.
type Said<'a> = (&'a str, Config);

fn replay_one(
    args: &Replay,
    asked: Option<&Said<'_>>,
    path: &Path,
    trace: &Trace,
) -> Result<Outcome, Box<dyn Error>> {
    let (text, config) = match asked {
        Some((text, config)) => (*text, config.clone()),
        None => (trace.conf.as_str(), settings::recorded(&trace.conf)?),
    };
    let verification = args.verify.then(|| verify(args, trace, &config)).transpose()?;
    let workload = match &verification {
        Some(verification) => verification.workload.clone(),
        None => workload_of(trace, args.total_memory, args.memory_fraction),
    };
    // Verification has compared every decision of one pass; further passes are for time.
    let run = match &verification {
        Some(_) if args.repeat == 1 => None,
        Some(_) => Some(repeat(args, &config.clone().with_compat(Compat::PyTorch), &workload)?),
        None => Some(repeat(args, &config, &workload)?),
    };
    let statistics = match (&verification, &run) {
        (Some(verification), _) => &verification.statistics,
        (None, Some(run)) => &run.statistics,
        (None, None) => unreachable!("without verification there is a run"),
    };
    if let Some(file) = &args.stats {
        write_statistics(file, statistics)?;
    }
    let ran = Ran { run: run.as_ref(), verification: verification.as_ref() };
    report(args, path, text, trace, &workload, statistics, &ran)?;
    let exact = verification.as_ref().is_none_or(Verification::is_exact);
    Ok(if exact { Outcome::Good } else { Outcome::Failed })
}

fn total_bytes(total_memory: Option<u64>) -> u64 {
    total_memory.unwrap_or(crate::driver::sim::SimOptions::default().total_bytes)
}

fn verify(args: &Replay, trace: &Trace, config: &Config) -> Result<Verification, Box<dyn Error>> {
    let config = config.clone().with_compat(Compat::PyTorch);
    Ok(replay::verify(trace, &config, total_bytes(args.total_memory), args.memory_fraction)?)
}

/// What a recording asked for. Its calls of `empty_cache` are inferred with the recorded
/// allocator's state at hand where that can be repeated exactly, and from the events otherwise.
pub(crate) fn workload_of(
    trace: &Trace,
    total_memory: Option<u64>,
    memory_fraction: Option<f64>,
) -> Workload {
    let recorded = settings::recorded(&trace.conf).ok();
    let total = total_bytes(total_memory);
    let exact = recorded.and_then(|config| {
        let config = config.with_compat(Compat::PyTorch);
        replay::verify(trace, &config, total, memory_fraction).ok().filter(Verification::is_exact)
    });
    exact.map_or_else(|| Workload::of(trace, total), |verification| verification.workload)
}

fn repeat(args: &Replay, config: &Config, workload: &Workload) -> Result<Run, Box<dyn Error>> {
    let opened = match args.device {
        Device::Sim => open_sim(args.total_memory, EventMode::Manual),
        Device::Host | Device::Cuda(_) => args.device.open(args.total_memory)?,
    };
    let workload = &with_real_streams(workload, &opened)?;
    let strategy = registry::build(config, opened.driver, BuildOptions::default())?;
    if let Some(fraction) = args.memory_fraction {
        let caching = strategy.caching_or_refuse()?;
        caching.set_memory_fraction(fraction)?;
    }
    let strategy = counted(strategy);
    let look = |s: &mut Statistics| {
        if let Some(sim) = &opened.sim {
            add_taken(s, sim);
        }
    };
    let bar = progress(args.repeat.into(), "replaying");
    let done = |passes: u32| bar.set_position(passes.into());
    let manner = Manner { passes: args.repeat, look: &look, progress: &done, ..Manner::default() };
    let run = replay::run_as(workload, &strategy, opened.brake, manner)?;
    bar.finish_and_clear();
    Ok(run)
}

/// The recording's streams as streams of the device. The default stream stays what it is.
fn with_real_streams(workload: &Workload, opened: &Opened) -> Result<Workload, Box<dyn Error>> {
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

/// The most streams that are made for a recording; more share them.
const REAL_STREAMS_MAX: usize = 64;

fn write_statistics(file: &Path, statistics: &Statistics) -> Result<(), Box<dyn Error>> {
    let keys: serde_json::Map<String, serde_json::Value> =
        statistics.keys().into_iter().map(|(key, n)| (key, n.into())).collect();
    std::fs::write(file, serde_json::to_string_pretty(&keys)? + "\n")
        .map_err(|error| format!("{}: {error}", shown_path(file)).into())
}

/// What was done: a pass or several, or a verification, or both.
#[derive(Clone, Copy)]
struct Ran<'a> {
    run: Option<&'a Run>,
    verification: Option<&'a Verification>,
}

fn report(
    args: &Replay,
    path: &Path,
    conf: &str,
    trace: &Trace,
    workload: &Workload,
    statistics: &Statistics,
    ran: &Ran<'_>,
) -> Result<(), Box<dyn Error>> {
    let Ran { run, verification } = *ran;
    let row = Row {
        trace: &name_of(path),
        conf,
        device: &args.device.to_string(),
        allocations: run
            .map_or_else(|| verification.map_or(0, |v| v.allocations), |r| r.allocations),
        frees: run.map_or_else(|| verification.map_or(0, |v| v.frees), |r| r.frees),
        peak_requested_bytes: statistics.requested_bytes.all.peak,
        peak_allocated_bytes: statistics.allocated_bytes.all.peak,
        peak_reserved_bytes: statistics.reserved_bytes.all.peak,
        device_allocs: statistics.num_device_alloc,
        device_frees: statistics.num_device_free,
        retries: statistics.num_alloc_retries,
        ooms: run.map_or_else(|| verification.map_or(0, |v| v.ooms), |r| r.ooms),
        recorded_ooms: recorded_ooms(trace),
        empty_caches_inferred: workload.empty_caches,
        ns_per_op: run.map_or(0.0, |r| (r.ns_per_op * 10.0).round() / 10.0),
        wall_s: run.map_or_else(|| verification.map_or(0.0, |v| v.wall_s), |r| r.wall_s),
        first_out_of_memory: run
            .and_then(|r| r.first_out_of_memory.as_ref())
            .map(|report| report.to_string().trim_end().to_owned()),
        verified: verification.map(|v| Verified {
            address_mismatches: v.address_mismatches,
            segment_mismatches: v.segment_mismatches,
            layout_mismatches: v.layout_mismatches,
            first_mismatch: v.first_mismatch.clone(),
        }),
    };
    if args.json {
        writeln!(out(), "{}", serde_json::to_string(&row)?)?;
    } else {
        write_row(&row, args.memory_fraction.is_some() || args.total_memory.is_some())?;
    }
    Ok(())
}

/// The first that differs, without the end of long lists of events.
fn shortened(text: &str) -> String {
    const SHOWN_CHARS: usize = 600;
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{} ... (--json has all of it)", &text[..end]),
        None => text.to_owned(),
    }
}

fn write_row(row: &Row<'_>, room_is_said: bool) -> std::io::Result<()> {
    let bytes = |n: i64| mib(n as f64);
    let mut out = out();
    writeln!(out, "{}  [{}] on {}", shown(row.trace), shown_conf(row.conf), row.device)?;
    writeln!(
        out,
        "  {} allocations, {} frees, {} out of memory, {} retries, {} calls of empty_cache",
        grouped(row.allocations),
        grouped(row.frees),
        row.ooms,
        row.retries,
        row.empty_caches_inferred
    )?;
    writeln!(
        out,
        "  peak MiB: requested {}, allocated {}, reserved {}; device allocations {}, frees {}",
        bytes(row.peak_requested_bytes),
        bytes(row.peak_allocated_bytes),
        bytes(row.peak_reserved_bytes),
        row.device_allocs,
        row.device_frees
    )?;
    if let Some(note) = may_have_had_more(row.recorded_ooms, row.ooms, room_is_said) {
        writeln!(out, "  {note}")?;
    }
    if let Some(report) = &row.first_out_of_memory {
        writeln!(out, "  first: {}", report.replace('\n', "\n    "))?;
    }
    if row.ns_per_op > 0.0 {
        writeln!(out, "  {:.1} ns an operation, {:.2} s in all", row.ns_per_op, row.wall_s)?;
    }
    if let Some(verified) = &row.verified {
        writeln!(
            out,
            "  mismatches: {} addresses, {} segment events, {} segments of the final layout",
            verified.address_mismatches, verified.segment_mismatches, verified.layout_mismatches
        )?;
        if let Some(first) = &verified.first_mismatch {
            writeln!(out, "  first: {}", shortened(first))?;
        }
    }
    Ok(())
}
