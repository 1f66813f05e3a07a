//! Needs of recordings, including recordings with a limit and recordings that lack their beginning.

use stratalloc_analysis::{Capacity, Figures, LimitSource, Memory, Recording, measure};
use stratalloc_recording::{Limits, Op, Silent, Trace, reader};

use super::*;
use crate::common::prelude::*;

fn read(name: &str) -> Trace {
    reader::read(trace(name).as_ref(), &Limits::default()).expect("shipped recordings are sound")
}

fn recording(trace: Trace) -> Recording {
    let config = Config::parse(&trace.conf, &KeyTable::default());
    Recording::new(trace, Some(config.expect("shipped recordings are sound")), Memory::default())
}

/// Replays the recording on devices of several sizes. It must fit on all from the need on, and fail on
/// some slightly smaller one.
fn fits_from_its_need_on(path: &str, conf: &str, known_mib: Option<f64>) {
    let row = run(&["compare", path, "--conf", conf, "--json"]).json();
    let need = row["needs_bytes"].as_u64().unwrap_or_else(|| panic!("{path}, {conf}: {row}"));
    if let Some(mib) = known_mib {
        let off = (need as f64 / (mib * 1_048_576.0) - 1.0).abs();
        assert!(off < 0.015, "{path}, {conf}: {need}");
    }
    let ooms = |bytes: u64| {
        let bytes = format!("{bytes}B");
        let more = ["--memory-fraction", "1", "--total-memory", &bytes];
        let stdout = run(&[&["replay", path, "--conf", conf][..], &more].concat()).stdout;
        !stdout.contains(" 0 out of memory")
    };
    for thousandths in [1000, 1012, 1050, 1100, 1300, 2000] {
        let above = need / 1000 * thousandths + need % 1000;
        assert!(!ooms(above), "{path}, {conf}: {above} does not, {need} does");
    }
    // Just below the need the program may fit on some devices by luck, so one failure suffices. Only
    // multiples of the page size are tried, because sizes in between are equivalent.
    const PAGE_BYTES: u64 = 2 << 20;
    let mut below = (1..=need / 50 / PAGE_BYTES).map(|pages| need - pages * PAGE_BYTES);
    assert!(below.any(ooms), "{path}, {conf}: less than {need} does");
}

#[test]
fn a_need_is_where_the_program_begins_to_run() {
    let known = [
        ("serve.default", "backend:native", Some(2100.0)),
        ("serve.default", "expandable_segments:True", Some(1540.0)),
        ("serve.default", "max_split_size_mb:64", Some(1493.0)),
        ("unet.expandable", "backend:native", None),
        ("unet.frac045", "expandable_segments:True", None),
        ("multistream.default", "backend:native", None),
        ("fuzz.streams.1.frac025", "backend:native", None),
    ];
    // The other cases run only in a full run.
    let cases = usize::try_from(crate::common::runs::runs(3)).unwrap();
    for (name, conf, known_mib) in known.into_iter().take(cases) {
        fits_from_its_need_on(&trace(name), conf, known_mib);
    }
}

/// Tests the same for the recordings in the folder given by `STRATALLOC_RECORDINGS`. Skips those with
/// private pools, because a capture keeps its pool's memory even if no request uses it.
#[test]
fn needs_hold_on_recordings_from_elsewhere() {
    for path in &recordings_from_elsewhere(&[".pickle"]) {
        let trace = reader::read(path.as_ref(), &Limits::default()).expect("it is a recording");
        // Recordings of PyTorch 2.11 contain pools only in the final layout.
        let private = |op: Op| matches!(op, Op::Allocate { pool, .. } if pool != PoolId::DEFAULT);
        if recording(trace).workload.ops.iter().any(private) {
            continue;
        }
        let known = |conf: &str| match path.rsplit('/').next() {
            Some("unet.default.pickle.xz") => match conf {
                "backend:native" => Some(6650.0),
                "expandable_segments:True" => Some(6131.0),
                _ => Some(6346.0),
            },
            Some("llama_var.default.pickle.xz") if conf == "backend:native" => Some(10_468.0),
            _ => None,
        };
        for conf in ["backend:native", "expandable_segments:True", "max_split_size_mb:64"] {
            fits_from_its_need_on(path, conf, known(conf));
            eprintln!("{path}, {conf}: ok");
        }
    }
}

#[test]
fn limits_are_found_in_recordings() {
    let h200 = 150_109_880_320.0;
    for (name, fraction) in [
        ("unet.frac045", 0.045),
        ("fuzz.streams.1.frac025", 0.025),
        ("fuzz.splitgc.1.frac02", 0.02),
        ("fuzz.expsplitgc.1.frac02", 0.02),
    ] {
        let recording = recording(read(name));
        assert!(recording.exact.is_some(), "{name}");
        let limit = recording.limit.unwrap();
        assert!(recording.limit_is_inferred(), "{name}: {limit:?}");
        let off = (limit.bytes as f64 / (fraction * h200) - 1.0).abs();
        assert!(off < 0.02, "{name}: {limit:?}");
        // Both ends are found to a thousandth.
        let below = limit.below_bytes.unwrap() as f64;
        assert!(matches!(limit.source, LimitSource::Inferred(_)), "{name}: {limit:?}");
        let is_within = limit.bytes as f64 <= fraction * h200 * 1.001 && below > fraction * h200;
        assert!(is_within, "{name}: {limit:?}");
        assert_eq!(recording.figures.retries.is_some(), recording.exact.is_some());
    }
    assert_eq!(recording(read("serve.default")).limit, None);
}

/// Removes the first half, or the first four fifths, of each recording. A replay of the rest must
/// reserve the same memory and allocate segments at the same events. The layout at the start is derived
/// from the layout at the end and from the events.
#[test]
fn a_recording_that_begins_late_starts_with_what_was_there() {
    for name in [
        "resnet50.default",
        "serve.default",
        "multistream.default",
        "multistream.expandable",
        "unet.expandable",
    ] {
        for part in [2, 5] {
            let mut late = read(name);
            let from = late.events.len() - late.events.len() / part;
            late.events.drain(..from);
            let recorded = Figures::of(&late);
            let recording = recording(late);
            let start = recording.start.as_ref().expect("something lived");
            assert_eq!(start.reserved_bytes(), recorded.reserved_before_bytes, "{name}");
            let config = recording.config.clone().unwrap();
            assert!(recording.layout_for(&config).is_some(), "{name}, last 1/{part}");
            let trial = measure(&recording, &config, Capacity::Limited, 1, &Silent).unwrap();
            let counters = &trial.run.statistics;
            let peak = counters.reserved_bytes.all.peak as f64;
            let off = (peak / recorded.peak_reserved_bytes as f64 - 1.0).abs();
            assert!(off < 0.02, "{name}, last 1/{part}: {peak} of {recorded:?}");
            let took = u64::try_from(counters.num_device_alloc).unwrap();
            assert_eq!(took, recorded.device_allocs, "{name}, last 1/{part}");
            assert!(recording.exact.is_some(), "{name}, last 1/{part}");
            // Replays under other settings start from the live blocks only. Their counters also begin at
            // the first event.
            let other = Config::parse("large_segment_size_mb:64", &KeyTable::default()).unwrap();
            assert!(recording.layout_for(&other).is_none());
            let trial = measure(&recording, &other, Capacity::Limited, 1, &Silent).unwrap();
            assert_eq!(trial.run.ooms, 0, "{name}");
        }
    }
}
