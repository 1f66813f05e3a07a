//! `forecast`: needs at sizes at which a program was not recorded, and refusals.
//!
//! The recordings in `forecast/` were made with PyTorch 2.11 on an H100: three training steps of a
//! transformer, of the same with checkpoints of its activations, and of a ResNet, at five sizes of the batch.

use super::advise::recording_that_begins_late;
use super::made::{MIB, Made};
use super::*;

/// Returns a recording of a program at a size of the batch.
pub(super) fn recorded(program: &str, batch: u64) -> String {
    let root = env!("CARGO_MANIFEST_DIR");
    format!("{root}/tests/cli/forecast/{program}.{batch}.pickle.xz")
}

/// Returns the arguments for a forecast from the three smallest recorded sizes.
fn at(program: &str, batch: u64) -> Vec<String> {
    let smallest = if program == "resnet" { [8, 16, 24] } else { [2, 4, 6] };
    let given = smallest.map(|batch| format!("batch={batch}:{}", recorded(program, batch)));
    let mut args = vec!["forecast".to_owned(), "--for".to_owned(), format!("batch={batch}")];
    args.extend(given);
    args
}

fn json(args: &[String], more: &[&str]) -> Value {
    let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
    ok(&args).json()
}

const CONFS: [&str; 2] = ["backend:native", "backend:native,expandable_segments:True"];

/// Returns the need of each configuration, in MiB.
fn needs(rows: &Value, conf: &str) -> f64 {
    let rows = rows.as_array().expect("a list");
    let row = rows.iter().find(|row| row["conf"] == conf).expect("it was replayed");
    row["needs_bytes"].as_f64().expect("a device suffices") / MIB as f64
}

#[test]
fn needs_at_larger_sizes_are_within_three_percent() {
    let confs: Vec<&str> = CONFS.iter().flat_map(|conf| ["--conf", conf]).collect();
    for (program, batches) in [("gpt", [12, 24]), ("resnet", [48, 96]), ("checkpoint", [12, 24])] {
        for batch in batches {
            let forecast = json(&at(program, batch), &[&confs[..], &["--json"]].concat());
            let actual = recorded(program, batch);
            let actual = ok(&[&["compare", &actual, "--json"], &confs[..]].concat()).stdout;
            let rows = actual.lines().map(|line| line.parse().expect("each line is JSON"));
            let actual = Value::Array(rows.collect());
            for conf in CONFS {
                let [forecast, actual] = [&forecast["rows"], &actual].map(|rows| needs(rows, conf));
                let off = (forecast / actual - 1.0).abs();
                assert!(off < 0.03, "{program} {batch} {conf}: {forecast} of {actual} MiB");
            }
        }
    }
}

#[test]
fn the_largest_size_that_fits_and_the_error_of_the_forecast_are_found() {
    let [native, _] = CONFS;
    let args = at("gpt", 24);
    let found = json(&args, &["--conf", native, "--fits", "20GiB", "--json"]);
    let largest = found["rows"][0]["largest"].as_u64().expect("some batch fits");
    let need =
        |batch: u64| needs(&json(&at("gpt", batch), &["--conf", native, "--json"])["rows"], native);
    // Between neighbouring values a program may run by luck.
    assert!(
        need(largest - 1) < 20_480.0 * 1.01 && need(largest + 2) > 20_480.0 * 0.99,
        "{largest}"
    );
    let check = &found["check"];
    let [forecast, recorded] =
        ["forecast_bytes", "recorded_bytes"].map(|name| check[name].as_f64());
    let off = forecast.expect("a need") / recorded.expect("a need") - 1.0;
    assert!(off.abs() < 0.03, "{check}");
    let args: Vec<&str> = args.iter().map(String::as_str).chain(["--conf", native]).collect();
    let text = ok(&args).stdout;
    assert!(text.contains("batch=24 needs 10,"), "{text}");
    assert!(text.contains("Recorded at batch=2, 4 and 6: 2,418 requests"), "{text}");
    assert!(
        text.contains("Check under (default): from batch=2 and 4 alone, batch=6 needs "),
        "{text}"
    );
    let args = at("gpt", 9_000_000);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let nowhere = ok(&[&args[..], &["--fits", "1GiB"]].concat()).stdout;
    assert!(nowhere.contains("batch=9000000 runs on no device of up to 8 TiB."), "{nowhere}");
    assert!(nowhere.contains("In 1,024 MiB it does not run even with batch=1."), "{nowhere}");
}

/// A forecast replays under settings that may come from an untrusted recording.
#[test]
fn replays_write_no_files_and_the_recorded_configuration_wins_ties() {
    let folder = Folder::new("forecast-files");
    let log = folder.path("log.csv");
    let conf = format!("layers:[log:{log}]");
    let args = at("gpt", 8);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    ok(&[&args[..], &["--conf", &conf, "--fits", "8GiB"]].concat());
    assert!(!Path::new(&log).exists());
    let confs =
        ["--conf", "large_segment_size_mb:20", "--conf", "compat:pytorch", "--fits", "8GiB"];
    let text = ok(&[&args[..], &confs].concat()).stdout;
    let lines: Vec<&str> = text.lines().take(2).collect();
    assert!(
        lines
            .iter()
            .all(|line| line.ends_with(" with the default settings of PyTorch 2.1 or later.")),
        "{lines:?}"
    );
}

/// Returns a recording with blocks of these sizes, all of which stay live.
fn made(sizes: impl Iterator<Item = u64>) -> String {
    let mut made = Made::default();
    for (at, bytes) in (1_u64..).zip(sizes) {
        made.segment(at << 32, bytes);
        made.alloc(at << 32, bytes);
    }
    made.json()
}

#[test]
fn programs_that_change_with_the_size_are_refused() {
    let folder = Folder::new("forecast");
    let file = |name: &str, json: &str| folder.file(&format!("{name}.json"), json);
    let refused = |files: [String; 2], words: &str| {
        let [a, b] = files.map(|file| format!("layers={file}"));
        fails(&["forecast", &a, &b, "--for", "layers=9"], 2, words);
    };
    // More layers have more requests.
    let layers = |count: u64| made((0..count * 300).map(|_| 2 * MIB));
    let files = [2, 4].map(|n| format!("{n}:{}", file(&format!("layers{n}"), &layers(n))));
    refused(files, "more than 512 requests are only at 2 or only at 4");
    // Sizes that grow with the square follow no line.
    let square = |n: u64| made((0..20).map(|_| n * n * MIB));
    let files = [2, 4].map(|n| format!("{n}:{}", file(&format!("square{n}"), &square(n))));
    refused(
        files,
        "100 % of the requested bytes are in requests whose sizes are no affine function",
    );
    let mut failed = Made::default();
    failed.segment(1 << 32, 20 * MIB);
    failed.alloc(1 << 32, 20 * MIB);
    failed.entry("oom", 0, 30 * MIB);
    let failed = file("failed", &failed.json());
    let twice = |file: &str| [2, 4].map(|value| format!("{value}:{file}"));
    refused(twice(&failed), "requests failed in the recording at 2");
    let same = file("same", &made([2 * MIB].into_iter()));
    refused(twice(&same), "no request grows with the parameter");
    let late = file("late", &recording_that_begins_late());
    refused(twice(&late), "no request grows with the parameter");
    let files = [("late", late.clone()), ("same", same)].map(|(_, file)| file);
    let [a, b] = [2, 4];
    refused(
        [format!("{a}:{}", files[0]), format!("{b}:{}", files[1])],
        "what lived before the recordings at 2 and 4 began differs by 80.0 MiB",
    );
}

/// Programs are often recorded after they have warmed up.
#[test]
fn recordings_without_the_first_step_give_the_forecast_of_the_whole_ones() {
    let folder = Folder::new("forecast-late");
    for (program, batches, first_step, target) in
        [("gpt", [2, 4, 6], 1006, 12), ("resnet", [8, 16, 24], 646, 48)]
    {
        let mut late = vec!["forecast".to_owned(), "--for".to_owned(), format!("batch={target}")];
        for batch in batches {
            let text = report::without_first(&recorded(program, batch), first_step);
            let file = folder.file(&format!("{program}{batch}.json"), &text);
            late.push(format!("batch={batch}:{file}"));
        }
        let more = ["--conf", CONFS[0], "--json"];
        let [whole, late] = [&at(program, target), &late].map(|args| json(args, &more));
        let [from_whole, from_late] = [&whole, &late].map(|one| needs(&one["rows"], CONFS[0]));
        let off = (from_late / from_whole - 1.0).abs();
        // What was free before the first event is not part of the late one.
        assert!(off < 0.05, "{program}: {from_late} of {from_whole} MiB");
        assert!(late["before"]["bytes"].as_u64().unwrap() > 100 * MIB, "{}", late["before"]);
        assert_eq!(whole["before"]["blocks"], 0);
    }
}

#[test]
fn arguments_that_do_not_belong_together_are_refused() {
    let [two, four] = [2, 4].map(|batch| recorded("gpt", batch));
    let both = |a: &str, b: &str, words: &str| {
        fails(
            &["forecast", &format!("{a}:{two}"), &format!("{b}:{four}"), "--for", "batch=8"],
            2,
            words,
        );
    };
    both("batch=2", "batch=2", "two recordings have the same value");
    both("batch=2", "length=4", "length=4 and batch=8 are different parameters");
    both("batch=2", "batch", "expected NAME=VALUE");
    both("batch=0", "batch=2", "expected NAME=VALUE");
    both("=2", "batch=4", "expected NAME=VALUE");
    let one = format!("batch=2:{two}");
    fails(
        &["forecast", &one, "--for", "batch=8"],
        2,
        "2 or 3 recordings as NAME=VALUE:TRACE, not 1",
    );
    fails(&["forecast", &two, &four, "--for", "batch=8"], 2, "expected NAME=VALUE");
    fails(&["forecast", &one, &one, "--for", "24"], 2, "expected NAME=VALUE, such as batch=24");
}
