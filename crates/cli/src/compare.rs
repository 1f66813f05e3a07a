//! `stratalloc compare`: compares strategies on the same recordings.

use std::io::Write;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::config::{Compat, TorchVersion, shown};
use stratalloc_analysis::{
    BESIDES, Capacity, Need, Paste, Recording, SearchOptions, Setting, Trial, Tried, measure,
};
use stratalloc_recording::Trace;

use super::host::Host;
use super::options::ComparedConfs;
use super::outcome::{Outcome, Result, out};
use super::recordings::{Devices, Recordings, limit_json};
use super::settings::{NamedConf, need_of};
use super::show::{
    LUCK, NEED_HEADING, PYTORCHS, UNKNOWN, check_sort, columns, is_json, joined, near, need_cells,
    paste_json, progress, say, shown_conf, table, value_or_dash,
};

/// Compare strategies on the same recordings.
#[derive(Args, Debug)]
pub(crate) struct Compare {
    #[command(flatten)]
    confs: ComparedConfs,
    #[command(flatten)]
    recordings: Recordings,
}

/// The number of passes over each recording. All but the first are timed.
const PASSES: u32 = 5;

/// The result of one configuration on one recording. The trial runs under the recording's limit.
#[derive(Clone)]
struct ComparedConf {
    conf: String,
    need: Need,
    trial: Trial,
}

/// The headings of the tables besides [`NEED_HEADING`].
const UNDER_LIMIT_HEADING: &str = "reserved MiB: | oom:";
const TIME_HEADING: &str = "ns/op:";
const RANKS_HEADING: &str = "configuration | largest need MiB: | of";

pub(crate) fn run(args: &Compare) -> Result<Outcome> {
    check_sort(&[NEED_HEADING, UNDER_LIMIT_HEADING, TIME_HEADING, RANKS_HEADING])?;
    let confs = args.confs.parsed(&args.recordings)?;
    let mut all = Vec::new();
    let mut compare = |name: &str, trace: Trace| -> Result<Outcome> {
        let recording = args.recordings.with_history(name, trace, "no row as recorded")?;
        let confs = args.confs.with_recorded(&confs, &recording);
        let bar = progress(confs.len() as u64, &format!("comparing on {}", shown(name)));
        let host = &Host::default();
        let mut rows = Vec::new();
        for (text, config) in &confs {
            // The same step sizes as in `advise` and `report`, so that all of them print the same need.
            let options = SearchOptions { lucky: true, ..SearchOptions::QUICK };
            let need = need_of(&recording, config, &options)?;
            let trial = measure(&recording, config, Capacity::Limited, PASSES, host)?;
            rows.push(ComparedConf { conf: text.clone(), need, trial });
            bar.inc(1);
        }
        bar.finish_and_clear();
        if is_json() {
            write_json(name, &recording, &rows, &args.confs)?;
        } else {
            rows.sort_by_key(|row| row.need.needs_bytes.unwrap_or(u64::MAX));
            write_table(name, &recording, &rows)?;
            write_pastes(&rows, args.confs.torch)?;
            write_difference(&recording, &rows, own_row(&confs, &recording))?;
            writeln!(out())?;
        }
        all.push((name.to_owned(), rows));
        Ok(Outcome::Good)
    };
    let outcome = args.recordings.each(Devices::Each, &mut compare)?;
    if !is_json() {
        write_ranks(&all)?;
    }
    Ok(outcome)
}

/// Returns the text of the row that repeats the recorded configuration with PyTorch's exact decisions.
fn own_row<'a>(confs: &'a [NamedConf], recording: &Recording) -> Option<&'a str> {
    let own = recording.config.clone()?.with_compat(Compat::PyTorch);
    let row = confs.iter().find(|(_, config)| config.settings() == own.settings());
    row.map(|(text, _)| text.as_str())
}

impl ComparedConf {
    fn peak_reserved_bytes(&self) -> i64 {
        self.trial.run.statistics.reserved_bytes.all.peak
    }

    fn json(&self, trace: &str, recording: &Recording) -> Value {
        let Self { conf, need, trial } = self;
        let (s, cost) = (&trial.run.statistics, need.cost);
        let (reserved, allocated) = (self.peak_reserved_bytes(), s.allocated_bytes.all.peak);
        let waste = if reserved > 0 { 1.0 - allocated as f64 / reserved as f64 } else { 0.0 };
        let need = json!({
            "trace": trace,
            "conf": conf,
            "needs_bytes": need.needs_bytes,
            "needs_with_luck_bytes": need.with_luck_bytes,
            "lucky_bytes": need.lucky_bytes,
            "needs_retries": cost.map(|cost| cost.retries),
            "needs_device_calls": cost.map(|cost| cost.device_calls),
            "needs_device_ms": cost.map(|cost| cost.device_ns as f64 / 1e6),
            "reserved_unlimited_bytes": need.reserved_unlimited_bytes,
        });
        let under_limit = json!({
            "peak_reserved_bytes": reserved,
            "peak_allocated_bytes": allocated,
            "waste": waste,
            "device_calls": s.num_device_alloc + s.num_device_free,
            "retries": s.num_alloc_retries,
            "ooms": trial.run.ooms,
            "device_ms": trial.device_ns as f64 / 1e6,
            "ns_per_op": trial.run.ns_per_op,
        });
        joined([need, limit_json(recording), under_limit])
    }
}

/// Prints one JSON object per line. If the user chose no configurations, the figures of the file come
/// last.
fn write_json(
    name: &str,
    recording: &Recording,
    rows: &[ComparedConf],
    confs: &ComparedConfs,
) -> std::io::Result<()> {
    let mut out = out();
    for row in rows {
        let paste = paste_json(&Paste::of(&row.conf, confs.torch));
        writeln!(out, "{}", joined([row.json(name, recording), paste]))?;
    }
    if confs.are_default() {
        writeln!(out, "{}", recorded_json(name, recording))?;
    }
    Ok(())
}

/// Returns the figures of the file as JSON. Null means that the file does not contain the value.
fn recorded_json(name: &str, recording: &Recording) -> Value {
    let figures = &recording.figures;
    let conf = json!({"trace": name, "conf": RECORDED, "recorded_conf": recording.trace.conf});
    let figures = json!({
        "peak_reserved_bytes": figures.peak_reserved_bytes,
        "peak_allocated_bytes": figures.peak_allocated_bytes,
        "device_calls": figures.device_allocs + figures.device_frees,
        "retries": figures.retries,
        "ooms": figures.ooms,
        "duration_ms": figures.duration_us.map(|us| us as f64 / 1e3),
    });
    joined([conf, limit_json(recording), figures])
}

/// The name of the row with the file's own figures.
const RECORDED: &str = "recorded";

fn write_table(name: &str, recording: &Recording, rows: &[ComparedConf]) -> std::io::Result<()> {
    let limit = recording.limit;
    let mut heading = columns(NEED_HEADING);
    if limit.is_some() {
        heading.extend(columns(UNDER_LIMIT_HEADING));
    }
    heading.extend(columns(TIME_HEADING));
    let least = rows.iter().filter_map(|row| row.need.needs_bytes).min();
    let differ = rows.iter().any(|row| row.need.needs_bytes != least);
    let needs = |need: &Need| match need.needs_bytes {
        None => "none fits".to_owned(),
        Some(bytes) => {
            let star = if differ && Some(bytes) == least { "*" } else { "" };
            let luck = need.with_luck_bytes.map(near);
            let luck = luck.map_or_else(String::new, |luck| format!(" ({luck} with luck)"));
            format!("{star}{}{luck}", near(bytes))
        }
    };
    let cells = rows.iter().map(|ComparedConf { conf, need, trial }| {
        let setting = Setting::new(&Tried::new(conf.clone(), need.clone()), Paste::of(conf, None));
        let recorded_ms = recording.figures.duration_us.map(|us| us as f64 / 1e3);
        let mut cells = need_cells(shown_conf(conf), needs(need), &setting, recorded_ms);
        if limit.is_some() {
            let reserved = trial.run.statistics.reserved_bytes.all.peak;
            cells.extend([near(u64::try_from(reserved).unwrap_or(0)), trial.run.ooms.to_string()]);
        }
        cells.push(format!("{:.0}", trial.run.ns_per_op));
        cells
    });
    let figures = &recording.figures;
    let reserved = near(figures.peak_reserved_bytes);
    let calls = (figures.device_allocs + figures.device_frees).to_string();
    let mut recorded = vec![
        format!("{RECORDED}: {}", shown_conf(&recording.trace.conf)),
        UNKNOWN.to_owned(),
        value_or_dash(figures.retries),
        calls,
        UNKNOWN.to_owned(),
    ];
    match limit {
        None => recorded.push(reserved),
        Some(_) => recorded.extend([UNKNOWN.to_owned(), reserved, figures.ooms.to_string()]),
    }
    recorded.push(UNKNOWN.to_owned());
    let cells: Vec<_> =
        cells.chain([recorded].into_iter().filter(|_| has_figures(recording))).collect();
    let mut out = out();
    say(&mut out, format_args!("{}", shown(name)))?;
    table(&mut out, &heading, &cells)?;
    say(
        &mut out,
        format_args!(
            "* least. needs: the smallest device on which no request fails; retries, device calls and device \
         ms (simulated, from call costs measured on an H200; in brackets the part of the recorded time) are \
         there."
        ),
    )?;
    say(&mut out, format_args!("{BESIDES}"))?;
    if rows.iter().any(|row| row.need.with_luck_bytes.is_some()) {
        say(&mut out, format_args!("{LUCK}"))?;
    }
    if let Some(limit) = limit {
        let bytes = near(limit.bytes);
        say(
            &mut out,
            format_args!(
                "reserved MiB and oom: under the limit of {bytes} MiB ({}).",
                limit.source
            ),
        )?;
    }
    for row in rows.iter().filter(|row| row.need.needs_bytes.is_some()) {
        if let Some(lucky) = row.need.lucky_bytes.first() {
            let (conf, bytes) = (shown_conf(&row.conf), near(*lucky));
            say(
                &mut out,
                format_args!("{conf} also ran on {bytes} MiB by luck, and failed on more."),
            )?;
        }
    }
    Ok(())
}

/// Prints the lines that set the configurations with the least need, one for each allocator.
fn write_pastes(rows: &[ComparedConf], torch: Option<TorchVersion>) -> std::io::Result<()> {
    let mut out = out();
    if rows.iter().any(|row| row.conf.contains("compat:")) {
        say(&mut out, format_args!("{PYTORCHS}"))?;
    }
    let fits = rows.iter().filter(|row| row.need.needs_bytes.is_some());
    let pastes: Vec<(Paste, &ComparedConf)> =
        fits.map(|row| (Paste::of(&row.conf, torch), row)).collect();
    for for_pytorch in [true, false] {
        let least = pastes.iter().find(|(paste, _)| paste.is_for_pytorch == for_pytorch);
        if let Some((paste, row)) = least {
            say(
                &mut out,
                format_args!(
                    "The least need, {} MiB: {}",
                    row.need.in_mib(),
                    shown(&paste.to_string())
                ),
            )?;
        }
    }
    Ok(())
}

/// Returns true if the file has figures of its allocator. Logs of requests have none.
fn has_figures(recording: &Recording) -> bool {
    !recording.trace.requests_only
}

/// Prints why the replay of the recorded configuration differs from the recording, if it does.
fn write_difference(
    recording: &Recording,
    rows: &[ComparedConf],
    own: Option<&str>,
) -> std::io::Result<()> {
    let Some(row) = rows.iter().find(|row| Some(row.conf.as_str()) == own) else {
        return Ok(());
    };
    let figures = &recording.figures;
    let reserved = u64::try_from(row.peak_reserved_bytes()).unwrap_or(0);
    if !has_figures(recording)
        || (reserved, row.trial.run.ooms) == (figures.peak_reserved_bytes, figures.ooms)
    {
        return Ok(());
    }
    let why = if recording.exact.is_some() {
        "with the recorded addresses it is exact; which of two equal blocks is taken depends on the \
         addresses that the driver gave"
    } else {
        "not every recorded decision can be repeated; `replay --verify` shows the first"
    };
    say(&mut out(), format_args!("{RECORDED} and {} differ: {why}.", shown_conf(&row.conf)))
}

/// Treats recordings whose names differ only in numbers as one job. Prints, for each configuration, the
/// job's largest need and the recording that has it.
fn write_ranks(all: &[(String, Vec<ComparedConf>)]) -> std::io::Result<()> {
    type Named = (String, Vec<ComparedConf>);
    let mut jobs: Vec<(String, Vec<&Named>)> = Vec::new();
    for recording in all {
        let job = without_numbers(&recording.0);
        match jobs.iter_mut().find(|(known, _)| *known == job) {
            Some((_, ranks)) => ranks.push(recording),
            None => jobs.push((job, vec![recording])),
        }
    }
    for (job, ranks) in jobs.into_iter().filter(|(_, ranks)| ranks.len() > 1) {
        let mut cells = Vec::new();
        let confs = ranks[0].1.iter().map(|row| &row.conf);
        for conf in confs {
            let rows = ranks.iter().map(|(name, rows)| {
                let row = rows.iter().find(|row| row.conf == *conf)?;
                Some((name, row.need.needs_bytes.unwrap_or(u64::MAX)))
            });
            let Some(rows) = rows.collect::<Option<Vec<_>>>() else { continue };
            if let Some((name, bytes)) = rows.into_iter().rev().max_by_key(|(_, bytes)| *bytes) {
                let most = if bytes == u64::MAX { "none fits".into() } else { near(bytes) };
                cells.push(vec![shown_conf(conf), most, name.clone()]);
            }
        }
        let heading = columns(RANKS_HEADING);
        let mut out = out();
        say(&mut out, format_args!("{job} ({} recordings of one job)", ranks.len()))?;
        table(&mut out, &heading, &cells)?;
    }
    Ok(())
}

/// Replaces every run of digits in a name by `N`.
fn without_numbers(name: &str) -> String {
    let mut text = String::new();
    for sign in name.chars() {
        match sign.is_ascii_digit() {
            false => text.push(sign),
            true if text.ends_with('N') => {}
            true => text.push('N'),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::settings;
    use stratalloc::allocator::{Allocation, DeviceAllocator, Request, Token};
    use stratalloc::driver::Driver;
    use stratalloc::error::{AllocError, FreeError};
    use stratalloc::ids::{OwnerId, PoolId, StreamId};
    use stratalloc::registry;
    use stratalloc::size::MIB;
    use stratalloc_analysis::Memory;
    use stratalloc_recording::{Op, Workload};

    /// A minimal strategy: the two required methods, forwarded to the driver.
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
        let workload = Arc::new(Workload { ops: ops.into(), blocks: 3, ..Workload::default() });
        let recording =
            Recording { workload, ..Recording::new(Trace::default(), None, Memory::default()) };
        let config = settings::parse("--conf", "backend:straight").unwrap();
        let counting = settings::parse("--conf", "backend:straight,layers:[statistics]").unwrap();
        for config in [config, counting] {
            let trial =
                measure(&recording, &config, Capacity::Limited, 1, &Host::default()).unwrap();
            let row =
                ComparedConf { conf: "backend:straight".to_owned(), need: Need::default(), trial };
            let row = row.json("none", &recording);
            assert_eq!(row["peak_allocated_bytes"], 20 << 20);
            assert_eq!(row["peak_reserved_bytes"], 40 << 20);
            // The recording allocates three blocks and frees one. The replay frees the other two at the
            // end.
            assert_eq!((&row["device_calls"], &row["ooms"]), (&json!(4), &json!(0)));
            assert!((row["waste"].as_f64().unwrap() - 0.5).abs() < 1e-9);
        }
    }
}
