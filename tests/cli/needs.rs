//! What recordings need, and recordings as people have them: with a limit, and without their beginning.

use std::path::Path;

use stratalloc::analysis::{Figures, Memory, Recording, Room, measure};
use stratalloc::config::{Config, KeyTable};
use stratalloc::replay::{Limits, Trace, reader};

use super::{run, trace};

fn read(name: &str) -> Trace {
    reader::read(Path::new(&trace(name)), &Limits::default()).expect("shipped recordings are sound")
}

fn recording(trace: Trace) -> Recording {
    let config = Config::parse(&trace.conf, &KeyTable::default());
    Recording::new(trace, Some(config.expect("shipped recordings are sound")), Memory::default())
}

/// The program is asked about each device by itself: it fits from the need on, and not just below.
#[test]
fn a_need_is_where_the_program_begins_to_run() {
    let known = [
        ("serve.default", "backend:native", Some(2100)),
        ("serve.default", "expandable_segments:True", Some(1540)),
        ("serve.default", "max_split_size_mb:64", Some(1493)),
        ("unet.expandable", "backend:native", None),
        ("unet.frac045", "expandable_segments:True", None),
        ("multistream.default", "backend:native", None),
        ("fuzz.streams.1.frac025", "backend:native", None),
    ];
    // The others in the full size.
    let cases = usize::try_from(crate::common::runs::runs(3)).unwrap();
    for (name, conf, known_mib) in known.into_iter().take(cases) {
        let path = trace(name);
        let path = path.to_str().unwrap();
        let output = run(&["compare", path, "--conf", conf, "--json"]);
        let row: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let need = row["needs_bytes"].as_u64().unwrap();
        if let Some(mib) = known_mib {
            let off = (need as f64 / (f64::from(mib) * 1_048_576.0) - 1.0).abs();
            assert!(off < 0.015, "{name}, {conf}: {need}");
        }
        let ooms = |bytes: u64| {
            let bytes = bytes.to_string();
            let more = ["--memory-fraction", "1", "--total-memory", &bytes];
            let output = run(&[&["replay", path, "--conf", conf][..], &more].concat());
            let told = String::from_utf8(output.stdout).unwrap();
            !told.contains(" 0 out of memory")
        };
        for thousandths in [1000, 1012, 1050, 1100, 1300, 2000] {
            let above = need / 1000 * thousandths + need % 1000;
            assert!(!ooms(above), "{name}, {conf}: {above} does not, {need} does");
        }
        let mut below = (1..=8).map(|step| need - (step * need / 400).max(step << 21));
        assert!(below.any(ooms), "{name}, {conf}: less than {need} does");
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
        assert_eq!(recording.figures.retries.is_some(), recording.exact.is_some());
    }
    assert_eq!(recording(read("serve.default")).limit, None);
}

/// Without their first half, and without four fifths, recordings reserve what they reserved, and grow when
/// they grew: from what was there, which the end and the events tell.
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
            assert_eq!(start.reserved_bytes, recorded.reserved_before_bytes, "{name}");
            let config = recording.config.clone().unwrap();
            assert!(recording.layout_for(&config).is_some(), "{name}, last 1/{part}");
            let trial = measure(&recording, &config, Room::Limited, 1).unwrap();
            let counters = &trial.run.statistics;
            let peak = counters.reserved_bytes.all.peak as f64;
            let off = (peak / recorded.peak_reserved_bytes as f64 - 1.0).abs();
            assert!(off < 0.02, "{name}, last 1/{part}: {peak} of {recorded:?}");
            let took = u64::try_from(counters.num_device_alloc).unwrap();
            assert_eq!(took, recorded.device_allocs, "{name}, last 1/{part}");
            assert!(recording.exact.is_some(), "{name}, last 1/{part}");
            // Others start from the live blocks alone, and their figures count from the first event too.
            let other = Config::parse("large_segment_size_mb:64", &KeyTable::default()).unwrap();
            assert!(recording.layout_for(&other).is_none());
            let trial = measure(&recording, &other, Room::Limited, 1).unwrap();
            assert_eq!(trial.run.ooms, 0, "{name}");
        }
    }
}
