//! The command line as scripts use it: fields, exit codes, carets, pipes.

#[cfg(target_os = "linux")]
mod account;
mod advice;
mod advise;
mod answer;
mod at;
mod bench;
mod cases;
#[path = "../../../../tests/common/mod.rs"]
mod common;
mod defaults;
mod devices;
mod diff;
mod files;
mod forecast;
mod forms;
mod gate;
mod growth;
mod guide;
mod help;
mod limits;
mod luck;
mod made;
mod names;
mod needs;
mod newer;
mod options;
mod pastes;
mod pinned;
mod pluggable;
mod pools;
mod progress;
mod report;
mod short;
mod sweep;
mod truth;
mod verified;
mod view;
mod width;
mod words;

use std::io::Write;
use std::process::Output;

use serde_json::Value;

use crate::common::prelude::*;
use crate::common::shared_library;

fn trace(name: &str) -> String {
    format!("{}/tests/traces/{name}.pickle.xz", shared_library::root().display())
}

/// A recording with a property that few have.
fn case(name: &str) -> String {
    format!("{}/tests/cases/{name}.pickle.xz", shared_library::root().display())
}

fn stratalloc() -> Command {
    let mut command = unconfigured(env!("CARGO_BIN_EXE_stratalloc"));
    for variable in ["COLUMNS", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"] {
        command.env_remove(variable);
    }
    command
}

/// The exit code and the output of a run.
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).expect("the program writes text")
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let (stdout, stderr) = (text(output.stdout), text(output.stderr));
        Self { code: output.status.code(), stdout, stderr }
    }
}

impl Ended {
    /// Returns the JSON object that the run printed. It must have printed exactly one.
    #[track_caller]
    fn json(&self) -> Value {
        let parsed = serde_json::from_str(&self.stdout);
        parsed.unwrap_or_else(|error| panic!("{error}: {} {}", self.stdout, self.stderr))
    }
}

fn ended(command: &mut Command) -> Ended {
    command.output().expect("the program runs").into()
}

/// Returns the arguments of a command that prints all of its answer, not the short form for a screen.
fn in_full<'a>(args: &[&'a str]) -> Vec<&'a str> {
    let all = (args.first() == Some(&"advise")).then_some("--all");
    args.iter().copied().take(1).chain(all).chain(args.iter().copied().skip(1)).collect()
}

/// Runs a command. `advise` prints all of its answer.
fn run(args: &[&str]) -> Ended {
    ended(stratalloc().args(in_full(args)))
}

/// Runs a command and checks that it succeeds.
#[track_caller]
fn ok(args: &[&str]) -> Ended {
    let ended = run(args);
    assert_eq!(ended.code, Some(0), "{args:?}: {}", ended.stderr);
    ended
}

/// Runs a command. Checks that it exits with `code` and prints an error that contains `words`.
#[track_caller]
fn fails(args: &[&str], code: i32, words: &str) -> Ended {
    let ended = run(args);
    assert_eq!(ended.code, Some(code), "{args:?}: {}", ended.stderr);
    assert!(ended.stderr.contains(words), "{args:?}: {}", ended.stderr);
    ended
}

/// Does the same as `run`, with `input` as the standard input.
fn run_with(args: &[&str], input: &str) -> Ended {
    let mut command = stratalloc();
    command.args(in_full(args)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the program runs");
    let mut pipe = child.stdin.take().expect("it is piped");
    pipe.write_all(input.as_bytes()).expect("the program reads");
    drop(pipe);
    child.wait_with_output().expect("the program ends").into()
}

/// Returns the recordings with one of these endings in the folder given by the variable
/// `STRATALLOC_RECORDINGS`. These recordings are not part of the package.
fn recordings_from_elsewhere(endings: &[&str]) -> Vec<String> {
    let Some(folder) = std::env::var_os("STRATALLOC_RECORDINGS") else {
        eprintln!("skipped: STRATALLOC_RECORDINGS names no folder");
        return Vec::new();
    };
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    let paths = entries.map(|entry| entry.expect("it can be read").path());
    let mut paths: Vec<_> = paths
        .map(|path| path.to_str().expect("names are text").to_owned())
        .filter(|path| {
            endings.iter().any(|end| path.contains(end)) && !path.ends_with("stats.json")
        })
        .collect();
    paths.sort();
    paths
}

#[test]
fn verify_prints_every_field_and_succeeds() {
    let path = &trace("serve.default");
    let row = ok(&["replay", path, "--verify", "--repeat", "3", "--json"]).json();
    let fields = "trace conf device allocations frees peak_requested_bytes peak_allocated_bytes \
                  peak_reserved_bytes device_allocs device_frees retries ooms \
                  empty_caches_inferred device_ms ns_per_op wall_s address_mismatches \
                  segment_mismatches layout_mismatches first_mismatch probably_lacks recorded_ooms \
                  first_out_of_memory limit_bytes limit_below_bytes limit_from limit_inferred \
                  limit_certainty unknown_entries \
                  reserved_unlimited_bytes needs_bytes needs_with_luck_bytes";
    let names: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, fields.split_whitespace().collect::<Vec<_>>());
    assert_eq!(row["trace"], "serve.default");
    assert_eq!(row["allocations"], 5050);
    assert_eq!(row["peak_reserved_bytes"], 8_984_199_168u64);
    assert!(row["ns_per_op"].as_f64().unwrap() > 0.0);
}

/// The host device must delay the work of other streams until the recording completes it, as the
/// simulated device does.
#[cfg(target_os = "linux")]
#[test]
fn a_recording_of_several_streams_reserves_the_same_on_the_host() {
    let path = &trace("multistream.default");
    for device in ["sim", "host"] {
        let args = ["replay", path, "--device", device, "--repeat", "2", "--json"];
        let row = ok(&args).json();
        assert_eq!(row["peak_reserved_bytes"], 2_187_329_536u64, "{device}");
    }
}

#[test]
fn each_device_of_a_recording_is_shown() {
    let event = |address: u64, bytes: u64| {
        format!(r#"{{"action":"alloc","addr":{address},"size":{bytes},"stream":0}}"#)
    };
    let (first, second) = ([event(4096, 512)], [event(4096, 1024), event(8192, 1024)]);
    let lists = [first.join(","), second.join(",")].map(|events| format!("[{events}]")).join(",");
    let folder = Folder::new("two");
    let recording = format!(r#"{{"segments":[],"device_traces":[{lists}]}}"#);
    let file = folder.file("two.json", &recording);
    let replay = |more: &[&str]| run(&[&["replay", &file, "--json"][..], more].concat());
    let rows = |ended: &Ended| -> Vec<Value> {
        let rows = serde_json::Deserializer::from_str(&ended.stdout).into_iter();
        rows.map(Result::unwrap).collect()
    };
    let allocations = |ended: &Ended| -> Vec<(String, u64)> {
        let of = |row: &Value| {
            (row["trace"].as_str().unwrap().to_owned(), row["allocations"].as_u64().unwrap())
        };
        rows(ended).iter().map(of).collect()
    };
    let each = replay(&[]);
    let devices = [("two device 1".to_owned(), 2), ("two device 0".to_owned(), 1)];
    assert_eq!(allocations(&each), devices, "{}", each.stderr);
    assert!(
        each.stderr.contains("2 devices. Peaks of reserved and of live bytes: device 1 "),
        "{}",
        each.stderr
    );
    let piped = run_with(&["replay", "-", "--json"], &recording);
    assert_eq!(allocations(&piped), [("- device 1".to_owned(), 2), ("- device 0".to_owned(), 1)]);
    let advised = rows(&run(&["advise", "--quick", &file, "--json"]));
    let names: Vec<&str> = advised.iter().map(|value| value["trace"].as_str().unwrap()).collect();
    assert_eq!(names, ["two device 1", "two device 0"]);
    let one = replay(&["--recorded-device", "0"]);
    assert_eq!(allocations(&one), [("two".to_owned(), 1)]);
    assert_eq!(one.stderr, "");
    // The statistics are those of one device, so only its events are replayed.
    let statistics = folder.path("statistics.json");
    let first = replay(&["--stats", &statistics]);
    assert_eq!(allocations(&first), [("two".to_owned(), 2)]);
    assert!(first.stderr.contains("Device 1 is taken"), "{}", first.stderr);
}

#[test]
fn a_mismatch_ends_with_one() {
    let path = &trace("unet.frac045");
    let ended = fails(&["replay", path, "--verify", "--memory-fraction", "0.05"], 1, "");
    assert!(ended.stdout.contains("first: at event"));
}

#[test]
fn statistics_have_pytorchs_keys() {
    let folder = Folder::new("statistics");
    let file = folder.path("statistics.json");
    let path = &trace("resnet50.default");
    ok(&["replay", path, "--verify", "--stats", &file]);
    let read = |path: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    let (ours, recorded) = (read(&file), read(&path.replace(".pickle.xz", ".stats.json")));
    for (key, value) in recorded.as_object().unwrap() {
        assert_eq!(&ours[key], value, "{key}");
    }
}

#[test]
fn a_bad_string_gets_a_caret_and_two() {
    // The recording must exist, because some commands read it before they parse the configuration.
    let (path, bad) = (&trace("multistream.default"), "expandable_segmets:True");
    for args in [
        &["explain", bad][..],
        &["replay", path, "--conf", bad],
        &["compare", path, "--conf", bad],
        &["bench", "--conf", bad],
    ] {
        let stderr = fails(args, 2, "did you mean expandable_segments?").stderr;
        assert!(stderr.contains("\n^^^^^^^^^^^^^^^^^^"), "{stderr}");
    }
}

#[test]
fn unknown_words_end_with_two() {
    fails(&["repaly"], 2, "");
    fails(&["replay"], 2, "");
    fails(&["bench", "--device", "abacus"], 2, "");
}

#[test]
fn a_missing_or_broken_file_is_named_and_ends_with_two() {
    fails(&["replay", "no/such/file.pickle"], 2, "no/such/file.pickle");
    let here = format!("{}/{}", env!("CARGO_MANIFEST_DIR"), file!());
    let stderr = fails(&["replay", &here], 2, "").stderr;
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[test]
fn explain_lists_every_key_and_where_it_came_from() {
    let mut command = stratalloc();
    command.env("ALLOC_CONF", "max_split_size_mb:40,max_split_size_mb:50");
    command.env("PYTORCH_ALLOC_CONF", "max_split_size_mb:60");
    let Ended { code, stdout, .. } = ended(command.args(["explain", "--all"]));
    assert_eq!(code, Some(0));
    assert!(stdout.starts_with("source: ALLOC_CONF\n"), "{stdout}");
    for key in stratalloc::config::BUILT_IN {
        assert!(stdout.lines().any(|line| line.starts_with(key.name)), "{}", key.name);
    }
    assert!(stdout.contains("max_split_size_mb is set at byte 0 and at byte 21"), "{stdout}");
    assert!(stdout.contains("ALLOC_CONF and PYTORCH_ALLOC_CONF are both set and differ"));
}

#[test]
fn explain_lists_what_was_set_and_the_rest_on_request() {
    let conf = "PYTORCH_CUDA_ALLOC_CONF=roundup_power2_divisions:8,large_segment_size_mb:64MiB";
    let stdout = ok(&["explain", conf]).stdout;
    let keys: Vec<&str> =
        stdout.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let output = ["source:", "key", "roundup_power2_divisions", "large_segment_size_mb"];
    assert_eq!(keys[..4], output, "{stdout}");
    assert!(stdout.starts_with("source: PYTORCH_CUDA_ALLOC_CONF\n"), "{stdout}");
    assert!(!stdout.contains("cpu_alignment") && stdout.contains(": --all shows all."));
    assert!(run(&["explain", conf, "--all"]).stdout.contains("cpu_alignment"));
}

#[test]
fn explain_and_info_print_json() {
    let data = ok(&["explain", "large_segment_size_mb:32,compat:pytorch", "--json"]).json();
    assert!(data["source"] == "the argument" && data["error"].is_null(), "{data}");
    let keys = data["keys"].as_array().unwrap();
    let row = |at: usize| ["key", "value", "from", "pytorch"].map(|name| &keys[at][name]);
    let expected = ["large_segment_size_mb", "32", "byte 0", "2.11"];
    assert_eq!(row(0), expected.map(Value::from).each_ref());
    assert!(keys[1]["pytorch"].is_null());
    let all = ok(&["explain", "--all", "--format", "json"]).json();
    assert_eq!(all["keys"].as_array().unwrap().len(), stratalloc::config::BUILT_IN.len());
    let refused = fails(&["explain", "backend:pluggable", "--json"], 2, "").json();
    assert!(refused["error"].is_string(), "{refused}");
    let info = ok(&["info", "--json"]).json();
    let devices = info["devices"].as_array().unwrap();
    let sim = devices.iter().find(|device| device["device"] == "sim").unwrap();
    assert!(sim["memory_bytes"].as_u64().unwrap() > 1 << 30, "{info}");
    let backends = info["backends"].as_array().unwrap();
    assert!(backends.iter().any(|backend| backend["name"] == "native"), "{info}");
}

#[test]
fn explain_shows_the_first_version_of_pytorch_that_has_a_key() {
    let stdout = run(&["explain", "max_non_split_rounding_mb:40,cpu_zero_fill:True"]).stdout;
    let cells = |key: &str| {
        let line = stdout.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().map(ToOwned::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(cells("key")[..4], ["key", "value", "from", "PyTorch"]);
    assert_eq!(cells("max_non_split_rounding_mb")[4..6], ["2.6", "on"], "{stdout}");
    assert_eq!(cells("cpu_zero_fill")[4], "-", "{stdout}");
}

#[test]
fn explain_reports_what_cannot_be_built_and_loads_nothing_to_find_out() {
    fails(&["explain", "backend:pluggable"], 2, "this cannot be built: ");
    let folder = Folder::new("explain");
    let log = folder.path("log.csv");
    ok(&["explain", &format!("layers:[log:\"{log}\"]")]);
    assert!(!Path::new(&log).exists());
}

#[test]
fn keys_that_do_nothing_with_the_backend_are_named() {
    let path = &trace("multistream.default");
    let conf = "backend:cudaMallocAsync,expandable_segments:True,per_process_memory_fraction:0.9";
    for command in ["replay", "compare"] {
        let stderr = ok(&[command, path, "--conf", conf, "--json"]).stderr;
        assert!(stderr.contains("note: expandable_segments does nothing here"), "{stderr}");
        assert_eq!(stderr.lines().filter(|line| line.starts_with("note: ")).count(), 1, "{stderr}");
    }
}

/// A limit set on the command line counts when keys without effect are listed.
#[test]
fn a_key_that_acts_below_a_limit_is_not_called_idle_beside_one() {
    let path = &trace("multistream.default");
    let conf = "backend:native,garbage_collection_threshold:0.5";
    for command in ["replay", "compare"] {
        let output = |more: &[&str]| {
            let args = [&[command, path, "--conf", conf, "--json"][..], more];
            run(&args.concat()).stderr
        };
        assert!(
            output(&[]).contains("garbage_collection_threshold does nothing here"),
            "{command}"
        );
        assert_eq!(output(&["--memory-fraction", "0.5"]), "", "{command}");
    }
}

#[test]
fn explain_takes_no_built_in_backend_for_a_registered_one() {
    for stratalloc::registry::Backend { name, .. } in stratalloc::registry::BUILT_IN {
        let output = format!("backend:{name},per_process_memory_fraction:0.5");
        // `pluggable` fails because the configuration names no functions.
        let expected = if *name == "pluggable" { 2 } else { 0 };
        let Ended { code, stdout, .. } = run(&["explain", &output]);
        assert_eq!(code, Some(expected), "{name}");
        assert!(!stdout.contains("not in effect"), "{name}: {stdout}");
    }
}

#[test]
fn compare_marks_the_best_and_prints_json() {
    let path = &trace("multistream.default");
    assert!(ok(&["compare", path]).stdout.contains('*'));
    let row = run(&["compare", path, "--conf", "backend:native", "--json"]).json();
    assert_eq!(row["peak_reserved_bytes"], 2086u64 << 20);
}

/// Returns the first two cells of each row of a table: the name, and the need in MiB.
fn needs_of(table: &str) -> Vec<(&str, f64)> {
    let cells =
        |line: &str| line.split_whitespace().nth(1).map(|cell| cell.replace(['*', ','], ""));
    let row = |line: &'_ str| cells(line).and_then(|cell| cell.parse().ok());
    table.lines().filter_map(|line| Some((line.split(' ').next()?, row(line)?))).collect()
}

#[test]
fn compare_ranks_by_need_and_shows_a_configuration_once() {
    let path = &trace("multistream.default");
    let confs = ["backend:native", "max_split_size_mb:64", "", "expandable_segments:True"];
    let confs = confs.iter().flat_map(|conf| ["--conf", conf]);
    let args: Vec<&str> = ["compare", path].into_iter().chain(confs).collect();
    let table = run(&args).stdout;
    let rows = needs_of(&table);
    assert_eq!(rows.len(), 3, "the empty configuration is native: {table}");
    assert!(rows.is_sorted_by(|a, b| a.1 <= b.1), "{table}");
    let least = table.lines().nth(2).unwrap();
    assert!(least.contains('*'), "{table}");
    assert!(table.contains("\nrecorded: (default) ") && !table.contains("waste"), "{table}");
}

/// Recordings whose names differ only in numbers are treated as ranks of one job. Others are listed one
/// by one.
#[test]
fn the_largest_need_of_a_job_has_its_rank() {
    let folder = Folder::new("ranks");
    let (small, large) = (folder.path("job.rank0.pickle.xz"), folder.path("job.rank1.pickle.xz"));
    std::fs::copy(trace("multistream.default"), &small).unwrap();
    std::fs::copy(trace("resnet50.default"), &large).unwrap();
    let native = ["--conf", "backend:native"];
    let table = run(&[&["compare", &small, &large][..], &native].concat()).stdout;
    let most = table.split("job.rankN (2 recordings of one job)").nth(1).unwrap();
    assert!(most.contains("backend:native") && most.contains("job.rank1"), "{table}");
    let other = &trace("serve.default");
    let table = run(&[&["compare", &small, other][..], &native].concat()).stdout;
    assert!(!table.contains("of one job") && !table.contains("sum"), "{table}");
}

#[test]
fn compare_counts_the_calls_of_the_drivers_pools() {
    let path = &trace("multistream.default");
    let conf = ["--conf", "backend:cudaMallocAsync", "--json"];
    let row = run(&[&["compare", path][..], &conf].concat()).json();
    assert!(row["device_calls"].as_u64().unwrap() > 1000, "{row}");
}

#[test]
fn a_limit_is_found_in_the_recording() {
    let path = &trace("unet.frac045");
    let row =
        |more: &[&str]| -> Value { run(&[&["replay", path, "--json"][..], more].concat()).json() };
    let with_room = row(&["--memory-fraction", "1"]);
    assert_eq!(with_room["ooms"], 0);
    assert!(with_room["recorded_ooms"].as_u64().unwrap() > 0, "{with_room}");
    let limit = (&with_room["limit_bytes"], &with_room["limit_inferred"]);
    assert_eq!(limit, (&Value::Null, &false.into()));
    // Without an option the limit is inferred from the recording.
    let inferred = row(&[]);
    assert_eq!(inferred["ooms"], inferred["recorded_ooms"], "{inferred}");
    assert_eq!(inferred["limit_inferred"], true);
    let limit = inferred["limit_bytes"].as_f64().unwrap() / f64::from(1 << 20);
    assert!((limit / 6442.0 - 1.0).abs() < 0.02, "{limit}");
    assert_eq!(inferred["needs_bytes"], with_room["needs_bytes"], "no limit decides on needs");
    let exact = row(&["--verify", "--total-memory", "150109880320B"]);
    assert_eq!(exact["first_mismatch"], Value::Null, "{exact}");
    let stdout = run(&["replay", path]).stdout;
    let words = ["limit: ", "--memory-fraction 1 turns it off"];
    assert!(words.iter().all(|words| stdout.contains(words)), "{stdout}");
    // A device of another size than the recorded one is another device, so no limit is inferred.
    let other = row(&["--total-memory", "7516192768B"]);
    assert_eq!((&other["ooms"], &other["limit_inferred"]), (&0.into(), &false.into()), "{other}");
    let as_it_was = row(&["--memory-fraction", "0.045", "--verify"]);
    assert_eq!(as_it_was["ooms"], as_it_was["recorded_ooms"], "{as_it_was}");
    let stdout = run(&["replay", path, "--memory-fraction", "0.045"]).stdout;
    assert!(!stdout.contains("the recorded program"));
    fails(&["replay", path, "--recorded-device", "7"], 2, "no device 7");
}

#[test]
fn a_replay_that_runs_out_of_memory_shows_the_first_report() {
    let path = &trace("resnet50.default");
    let short = ["replay", path, "--memory-fraction", "0.02"];
    let shown = run(&short).stdout;
    let report: Vec<&str> = shown.lines().skip_while(|l| !l.starts_with("  first: ")).collect();
    assert!(report.first().is_some_and(|l| l.contains("out of memory on device 0")), "{shown}");
    let hint = |l: &&&str| l.starts_with("    Hint: ") && l.contains("raise the memory fraction");
    assert_eq!(report.iter().filter(hint).count(), 1, "{shown}");
    let row = run(&[&short[..], &["--json"]].concat()).json();
    let first = row["first_out_of_memory"].as_str().unwrap();
    assert!(first.starts_with("out of memory on device 0") && first.contains("\nHint: "), "{row}");
    assert!(!run(&["replay", path]).stdout.contains("first:"));
}

#[test]
fn compare_shows_where_no_device_suffices() {
    let path = &trace("multistream.default");
    let confs = ["--conf", "per_process_memory_fraction:0", "--conf", "backend:native"];
    let table = run(&[&["compare", path][..], &confs].concat()).stdout;
    let rows: Vec<&str> = table.lines().skip(2).take(2).collect();
    assert!(rows[0].starts_with("backend:native") && rows[0].contains('*'), "{table}");
    let last = rows[1].starts_with("per_process") && !rows[1].contains('*');
    assert!(last && rows[1].contains("none fits"), "{table}");
}

#[test]
fn a_recording_with_private_pools_replays_without_verification() {
    let path = &trace("cudagraph.default");
    let row = ok(&["replay", path, "--json"]).json();
    assert_eq!(row["allocations"], 673);
}

#[test]
fn a_missing_strategy_is_reported() {
    let path = &trace("multistream.default");
    let conf = "backend:cpu,cpu_numa_node:900";
    let text = fails(&["replay", path, "--conf", conf], 2, "").stderr;
    assert!(text.starts_with("stratalloc: "), "{text}");
    for (args, carets) in [
        (&["explain", "backend:nativ"][..], "\n        ^^^^^\n"),
        (&["compare", path, "--conf", "backend: natvie"], "\n         ^^^^^^\n"),
        (&["bench", "--conf", "backend:Native"], "\n        ^^^^^^\n"),
    ] {
        let stderr = fails(args, 2, "; did you mean native?").stderr;
        assert!(stderr.contains(carets), "{stderr}");
    }
    fails(&["explain", "backend:end"], 2, "\n        ^^^\n");
    let by_variable = ended(stratalloc().arg("explain").env("ALLOC_CONF", "backend:cudamalloc"));
    assert_eq!(by_variable.code, Some(2));
    assert!(by_variable.stderr.contains("did you mean cudaMallocAsync?"));
}

#[test]
fn a_reader_that_closes_the_pipe_ends_the_program_quietly() {
    let mut command = stratalloc();
    command.args(["explain", "backend:native"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait_with_output().unwrap().stderr, b"");
}

#[test]
fn a_log_that_a_replay_writes_can_be_replayed_and_not_verified() {
    let folder = Folder::new("log");
    let path = &folder.path("log.csv");
    let conf = format!("backend:native,layers:[log:\"{path}\",front]");
    let recorded = &trace("multistream.default");
    let first = ok(&["replay", recorded, "--conf", &conf, "--json"]).json();
    let second = ok(&["replay", path, "--json"]).json();
    assert!(first["allocations"].as_u64().unwrap() > 1000);
    assert_eq!(first["allocations"], second["allocations"]);
    fails(&["replay", path, "--verify"], 2, "a log of requests");
    fails(&["replay", recorded, "--verify", "--conf", "layers:[track]"], 2, "");
}

/// A driver's own pool on an H200 (driver 580, 2026-11-21) reserved 3,488 MiB for this recording.
#[test]
fn simulated_driver_pools_hold_about_what_a_real_one_holds() {
    const H200_BYTES: u64 = 3488 << 20;
    let path = &trace("resnet50.default");
    let conf = "backend:cudaMallocAsync";
    let row = ok(&["replay", path, "--conf", conf, "--json"]).json();
    let reserved = row["peak_reserved_bytes"].as_u64().unwrap();
    assert!(reserved.abs_diff(H200_BYTES) < H200_BYTES / 8, "{reserved}");
}
