//! `stratalloc compare`: strategies side by side on the same recordings.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::config::{Compat, Config, shown};
use crate::driver::sim::EventMode;
use crate::registry::{self, BuildOptions};
use crate::replay::{self, Limits, Trace, Workload};
use crate::stats::Statistics;

use super::device::{add_taken, counted, open_sim};
use super::outcome::{Outcome, fraction, out, tell};
use super::replay::{asked_for, may_have_had_more, name_of, read, recorded_ooms, workload_of};
use super::settings;
use super::show::{Side, mib, progress, shown_conf, table};

/// Arguments of `compare`.
#[derive(Args, Debug, Default)]
pub(crate) struct Compare {
    /// PyTorch memory snapshots (.pickle or .json) or logs of requests in RMM's format (.csv), plain, .xz,
    /// .gz or .zst.
    #[arg(required = true)]
    trace: Vec<PathBuf>,
    /// A configuration; can be given several times. Default: a useful set.
    #[arg(long)]
    conf: Vec<String>,
    /// Memory of the device, in bytes.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    total_memory: Option<u64>,
    /// Part of the device's memory that may be reserved.
    #[arg(long, value_parser = fraction)]
    memory_fraction: Option<f64>,
    /// The device of the recording that is replayed. Default: the one with the most events.
    #[arg(long)]
    recorded_device: Option<u32>,
    /// Refuse recordings that decode to more bytes than this.
    #[arg(long, default_value_t = Limits::default().decoded_bytes)]
    max_input: u64,
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

/// What is compared when nobody says otherwise: each saves memory somewhere.
const DEFAULT_CONFS: [&str; 7] = [
    "backend:native",
    "backend:native,expandable_segments:True",
    "backend:native,compat:pytorch",
    "backend:native,max_split_size_mb:64",
    "backend:native,max_split_size_mb:256",
    "backend:native,roundup_power2_divisions:8",
    "backend:native,large_segment_size_mb:64",
];

/// Passes over each recording: times come from all but the first.
const PASSES: u32 = 5;

#[derive(Clone, Serialize)]
struct Row {
    trace: String,
    conf: String,
    peak_reserved_bytes: i64,
    peak_allocated_bytes: i64,
    waste: f64,
    device_calls: i64,
    retries: i64,
    ooms: u64,
    device_ms: f64,
    ns_per_op: f64,
}

pub(crate) fn run(args: &Compare) -> Result<Outcome, Box<dyn Error>> {
    let texts: Vec<String> = if args.conf.is_empty() {
        DEFAULT_CONFS.map(str::to_owned).to_vec()
    } else {
        args.conf.clone()
    };
    let has_limit = args.memory_fraction.is_some();
    let confs: Vec<(String, Config)> = texts
        .into_iter()
        .map(|text| asked_for(&text, &args.trace, has_limit).map(|config| (text, config)))
        .collect::<Result<_, _>>()?;
    let (mut all, mut modes) = (Vec::new(), Vec::new());
    for path in &args.trace {
        let trace = read(path, args.max_input, args.recorded_device)?;
        let workload = workload_of(&trace, args.total_memory, args.memory_fraction);
        let name = name_of(path);
        let bar = progress(confs.len() as u64, &format!("comparing on {}", shown(&name)));
        let mut rows = Vec::new();
        for (text, config) in &confs {
            rows.push(measure(args, &name, text, config, &workload)?);
            bar.inc(1);
        }
        let own = as_recorded(args, &name, &trace, &workload)?;
        bar.finish_and_clear();
        // Where nobody asked for it, the recording's own configuration is shown if it is no row yet.
        let shown = |row: &&Row| rows.iter().all(|known| known.conf != row.conf);
        if args.conf.is_empty() && !trace.conf.is_empty() {
            let more: Vec<Row> = own.iter().filter(shown).cloned().collect();
            rows.extend(more);
        }
        modes.push(own);
        if args.json {
            rows.iter().try_for_each(|row| -> Result<(), Box<dyn Error>> {
                Ok(writeln!(out(), "{}", serde_json::to_string(row)?)?)
            })?;
        } else {
            write_rows(&name, &rows)?;
            let ooms = rows.iter().map(|row| row.ooms).max().unwrap_or(0);
            let is_said = args.memory_fraction.is_some() || args.total_memory.is_some();
            if let Some(note) = may_have_had_more(recorded_ooms(&trace), ooms, is_said) {
                writeln!(out(), "{note}\n")?;
            }
        }
        all.push(rows);
    }
    if !args.json {
        let texts = if args.trace.len() > 1 { confs } else { Vec::new() };
        write_summary(&texts, &all, &modes)?;
    }
    Ok(Outcome::Good)
}

/// A recording in its own configuration: with our rules and with PyTorch's letter. Nothing where that
/// configuration is not one of ours.
fn as_recorded(
    args: &Compare,
    name: &str,
    trace: &Trace,
    workload: &Workload,
) -> Result<Vec<Row>, Box<dyn Error>> {
    let config = match settings::recorded(&trace.conf) {
        Ok(config) => config,
        Err(error) => {
            tell(format_args!("note: {}: no row as recorded: {error}", shown(name)));
            return Ok(Vec::new());
        }
    };
    let comma = if trace.conf.is_empty() { "" } else { "," };
    let letter = format!("{}{comma}compat:pytorch", trace.conf);
    [(trace.conf.clone(), Compat::Default), (letter, Compat::PyTorch)]
        .into_iter()
        .map(|(text, compat)| {
            measure(args, name, &text, &config.clone().with_compat(compat), workload)
        })
        .collect()
}

fn measure(
    args: &Compare,
    trace: &str,
    text: &str,
    config: &Config,
    workload: &Workload,
) -> Result<Row, Box<dyn Error>> {
    let build = || -> Result<_, Box<dyn Error>> {
        let opened = open_sim(args.total_memory, EventMode::Manual);
        let strategy = registry::build(config, opened.driver, BuildOptions::default())?;
        if let Some(fraction) = args.memory_fraction {
            strategy.caching_or_refuse()?.set_memory_fraction(fraction)?;
        }
        Ok((strategy, opened.sim, opened.brake))
    };
    // One pass for what the device had to do, on a clock of its own; then passes for time.
    let (strategy, sim, brake) = build()?;
    let look = |s: &mut Statistics| {
        if let Some(sim) = &sim {
            add_taken(s, sim);
        }
    };
    let strategy = counted(strategy);
    let first = replay::run_and_look(workload, &strategy, brake, 1, &|_| {}, &look)?;
    let device_ns = sim.map_or(0, |sim| sim.elapsed_ns());
    let (strategy, _, brake) = build()?;
    let timed = replay::run(workload, &strategy, brake, PASSES, &|_| {})?;
    let s = &first.statistics;
    let (reserved, allocated) = (s.reserved_bytes.all.peak, s.allocated_bytes.all.peak);
    Ok(Row {
        trace: trace.to_owned(),
        conf: text.to_owned(),
        peak_reserved_bytes: reserved,
        peak_allocated_bytes: allocated,
        waste: if reserved > 0 { 1.0 - allocated as f64 / reserved as f64 } else { 0.0 },
        device_calls: s.num_device_alloc + s.num_device_free,
        retries: s.num_alloc_retries,
        ooms: first.ooms,
        device_ms: device_ns as f64 / 1e6,
        ns_per_op: timed.ns_per_op,
    })
}

const HEADING: [(&str, Side); 9] = [
    ("configuration", Side::Left),
    ("reserved MiB", Side::Right),
    ("allocated MiB", Side::Right),
    ("waste", Side::Right),
    ("device calls", Side::Right),
    ("retries", Side::Right),
    ("oom", Side::Right),
    ("device ms", Side::Right),
    ("ns/op", Side::Right),
];

/// Marks the least cells of a column, unless all are equal. A row that ran out of memory more often
/// than another did less of the work, so its cells are no best ones.
fn marked(values: &[f64], ooms: &[f64], show: impl Fn(f64) -> String) -> Vec<String> {
    let shown: Vec<String> = values.iter().map(|value| show(*value)).collect();
    let fewest = ooms.iter().copied().fold(f64::MAX, f64::min);
    let did_all: Vec<bool> = ooms.iter().map(|count| *count == fewest).collect();
    let rivals = values.iter().zip(&did_all).filter(|(_, all)| **all);
    let best = show(rivals.map(|(value, _)| *value).fold(f64::MAX, f64::min));
    if shown.iter().all(|cell| *cell == best) {
        return shown;
    }
    let mark = |(cell, all)| if all && cell == best { format!("*{cell}") } else { cell };
    shown.into_iter().zip(did_all).map(mark).collect()
}

fn write_rows(trace: &str, rows: &[Row]) -> std::io::Result<()> {
    let column = |value: fn(&Row) -> f64| rows.iter().map(value).collect::<Vec<f64>>();
    let ooms = column(|r| r.ooms as f64);
    let columns = [
        marked(&column(|r| r.peak_reserved_bytes as f64), &ooms, mib),
        column(|r| r.peak_allocated_bytes as f64).into_iter().map(mib).collect(),
        marked(&column(|r| r.waste), &ooms, |x| format!("{:.1}%", x * 100.0)),
        marked(&column(|r| r.device_calls as f64), &ooms, |n| format!("{n:.0}")),
        marked(&column(|r| r.retries as f64), &ooms, |n| format!("{n:.0}")),
        marked(&ooms, &ooms, |n| format!("{n:.0}")),
        marked(&column(|r| r.device_ms), &ooms, |ms| format!("{ms:.1}")),
        marked(&column(|r| r.ns_per_op), &ooms, |ns| format!("{ns:.0}")),
    ];
    let cells: Vec<Vec<String>> = rows
        .iter()
        .enumerate()
        .map(|(i, row)| {
            let rest = columns.iter().map(|column| column[i].clone());
            std::iter::once(shown_conf(&row.conf)).chain(rest).collect()
        })
        .collect();
    let mut out = out();
    writeln!(out, "{}", shown(trace))?;
    table(&mut out, &HEADING, &cells)?;
    writeln!(
        out,
        "* least, of those with the fewest oom. waste: reserved at the peak and not allocated. device \
         ms: simulated, from call costs measured on an H200.\n"
    )
}

/// The two modes of a recording's own configuration, in the order of [`as_recorded`].
const MODES: [&str; 2] = ["as recorded", "as recorded,compat:pytorch"];

/// Sums over all recordings, for each configuration and for both modes of each recording's own.
fn write_summary(
    confs: &[(String, Config)],
    all: &[Vec<Row>],
    modes: &[Vec<Row>],
) -> std::io::Result<()> {
    let column = |value: fn(&Row) -> f64| -> Vec<f64> {
        // Rows stand in the order of the configurations; one that is given twice has two.
        let of_conf = |conf: usize| all.iter().filter_map(|rows| rows.get(conf)).map(value).sum();
        let of_mode = |mode: usize| modes.iter().filter_map(|m| m.get(mode)).map(value).sum();
        let confs = (0..confs.len()).map(of_conf);
        confs.chain((0..MODES.len()).map(of_mode)).collect()
    };
    // A sum over some recordings is no rival of one over all.
    let modes_are_whole = modes.iter().all(|rows| rows.len() == MODES.len());
    let mut ooms = column(|r| r.ooms as f64);
    if !modes_are_whole {
        ooms[confs.len()..].fill(f64::INFINITY);
    }
    let columns = [
        marked(&column(|r| r.peak_reserved_bytes as f64), &ooms, mib),
        marked(&ooms, &ooms, |n| format!("{n:.0}")),
        marked(&column(|r| r.device_ms), &ooms, |ms| format!("{ms:.1}")),
    ];
    let texts = confs.iter().map(|(text, _)| text.as_str()).chain(MODES);
    let rows: Vec<Vec<String>> = texts
        .enumerate()
        .map(|(i, text)| {
            let is_whole = i < confs.len() || modes_are_whole;
            let cell = |column: &Vec<String>| if is_whole { column[i].clone() } else { "-".into() };
            std::iter::once(shown_conf(text)).chain(columns.iter().map(cell)).collect()
        })
        .collect();
    let heading = [HEADING[0], ("sum of reserved MiB", Side::Right), HEADING[6], HEADING[7]];
    let mut out = out();
    writeln!(out, "all recordings ({})", modes.len())?;
    table(&mut out, &heading, &rows)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allocator::{Allocation, DeviceAllocator, Request, Token};
    use crate::driver::Driver;
    use crate::error::{AllocError, FreeError};
    use crate::ids::{OwnerId, PoolId, StreamId};
    use crate::replay::Op;
    use crate::size::MIB;

    /// What a user begins with: the two required methods, here straight to the driver.
    #[derive(Debug)]
    struct Straight(Arc<dyn Driver>, OwnerId);

    impl DeviceAllocator for Straight {
        fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
            let address = self.0.allocate(2 * request.bytes)?;
            Ok(Allocation::new(address, request.bytes, self.1, Token([0; 3])))
        }

        fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
            let freed = self.0.free(allocation.address(), 2 * allocation.size_bytes());
            freed.expect("the test frees what it took");
            Ok(())
        }
    }

    #[test]
    fn a_strategy_that_counts_nothing_is_measured_from_outside() {
        registry::register("straight", |driver, _| Ok(Box::new(Straight(driver, OwnerId::next()))))
            .unwrap();
        let (stream, pool) = (StreamId::DEFAULT, PoolId::DEFAULT);
        let take = |id| Op::Allocate { id, bytes: 10 * MIB, stream, pool };
        let ops = vec![take(0), take(1), Op::Free { id: 0 }, take(2)];
        let workload = Workload { ops, blocks: 3, ..Workload::default() };
        let config = settings::parse("--conf", "backend:straight").unwrap();
        let counting = settings::parse("--conf", "backend:straight,layers:[statistics]").unwrap();
        for config in [config, counting] {
            let row = measure(&Compare::default(), "none", "backend:straight", &config, &workload);
            let row = row.unwrap();
            assert_eq!(row.peak_allocated_bytes, 20 << 20);
            assert_eq!(row.peak_reserved_bytes, 40 << 20);
            // Three blocks came and one went; the others go after the recording.
            assert_eq!((row.device_calls, row.ooms), (4, 0));
            assert!((row.waste - 0.5).abs() < 1e-9);
        }
    }
}
