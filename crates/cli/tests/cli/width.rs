//! No command prints a line that is longer than the terminal is wide.
//!
//! Two kinds of lines may be longer, because they exist to be copied or have no place for a break: lines
//! with a setting to paste, and lines that consist of one word, such as a path.

use super::*;

const COLUMNS: usize = 80;

/// Returns true if a line may be longer than the terminal is wide.
fn may_be_longer(line: &str) -> bool {
    line.contains("ALLOC_CONF=") || !line.trim().contains(' ')
}

/// A recording with long paths, long stacks, several streams and a request that failed.
fn recording(name: &str, scale: u64) -> String {
    let frame = |file: &str, line: u64, function: &str| {
        let folder = "/home/somebody/projects/a_folder_with_a_long_name/another_one/src";
        format!(r#"{{"filename":"{folder}/{file}.py","line":{line},"name":"{function}"}}"#)
    };
    let stack = |at: u64| {
        let inner =
            frame("a_module_with_a_long_name_of_its_own", at, "a_function_with_a_long_name");
        let outer = frame("the_trainer_that_calls_everything", 31, "train_the_model_for_one_epoch");
        format!("[{inner},{outer}]")
    };
    let event = |action: &str, at: u64, bytes: u64| {
        let (address, stream) = (0x7f00_0000_0000 + (at << 32), 0x55d0_0000 * (at % 3));
        let stack = stack(at);
        format!(
            r#"{{"action":"{action}","addr":{address},"size":{bytes},"stream":{stream},"time_us":{},"frames":{stack}}}"#,
            1_000 + at
        )
    };
    let bytes = |at: u64| ((at + 3) * scale) << 20;
    let mut events = Vec::new();
    for at in 0..12 {
        events.push(event("segment_alloc", at, bytes(at)));
        events.push(event("alloc", at, bytes(at)));
    }
    for at in 0..3 {
        events.push(event("free_requested", at, bytes(at)));
        events.push(event("free_completed", at, bytes(at)));
    }
    let failed = event("oom", 20, 7 << 30);
    events.push(failed.replace(r#""addr""#, r#""device_free""#));
    let recording = format!(r#"{{"segments":[],"device_traces":[[{}]]}}"#, events.join(","));
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).expect("there is room");
    let file = folder.join("a_recording_whose_name_is_long_too_as_those_of_jobs_are.json");
    std::fs::write(&file, recording).expect("there is room");
    file.display().to_string()
}

/// Returns the lines of a command that are too long.
#[track_caller]
fn too_long(args: &[&str]) -> Vec<String> {
    let mut command = stratalloc();
    let ended = ended(command.args(args).env("COLUMNS", COLUMNS.to_string()));
    assert!(!ended.stdout.is_empty() || !ended.stderr.is_empty(), "{args:?} prints nothing");
    let lines = ended.stdout.lines().chain(ended.stderr.lines());
    let lines = lines.filter(|line| line.chars().count() > COLUMNS && !may_be_longer(line));
    lines.map(|line| format!("{args:?}: {line}")).collect()
}

#[test]
fn every_command_fits_80_columns() {
    let folder = Folder::new("width");
    let (a, b) = (&recording(&folder.path("a"), 1), &recording(&folder.path("b"), 2));
    let page = &folder.path("page.html");
    let conf = "expandable_segments:True,max_split_size_mb:64,garbage_collection_threshold:0.8,\
                roundup_power2_divisions:[256:1,512:2,1024:4,>:8]";
    let missing = &folder.path("missing.pickle");
    let (two, four) = (&forecast::recorded("gpt", 2), &forecast::recorded("gpt", 4));
    let given = [(2, two), (4, four)].map(|(size, path)| format!("batch={size}:{path}"));
    let serve = &trace("serve.default");
    let commands = [
        &["advise", "--quick", a][..],
        &["advise", "--quick", "--all", a],
        &["advise", "--quick", "-v", serve],
        &["advise", "--quick", "--all-frames", a],
        &["advise", "--quick", "--fits", "1GiB", a],
        &["advise", "--quick", "--assert", "needs<=1GiB", "--assert", "live_peak<1MiB", a],
        &["advise", "--quick", "--conf", conf, a],
        &["advise", "--all", &case("state_only")],
        &["advise", "--all", "--quick", &case("two_devices_second_fails")],
        &["advise", missing],
        &["replay", a],
        &["replay", "--verify", &case("torch215_ring")],
        &["replay", "--conf", conf, a],
        &["replay", "--at", "20", a],
        &["replay", &case("state_only")],
        &["replay", &case("two_devices_second_fails")],
        &["compare", a, b],
        &["compare", "--conf", conf, "--conf", "backend:native", serve],
        &["diff", a, b],
        &["diff", a, b, "--assert", "needs<=+2%"],
        &["diff", serve, &trace("multistream.default")],
        &["forecast", &given[0], &given[1], "--for", "batch=6", "--fits", "80GiB"],
        &["sweep", "--quick", a, b, serve, missing],
        &["report", "--quick", a, "-o", page],
        &["explain", conf],
        &["explain", "--all"],
        &["explain", "--all", "-v", conf],
        &["explain", "expandable_segmets:True,max_split_size_mb:64"],
        &["info"],
        &["info", "--pid", "4194304"],
        &["bench", "--case", "pair:512B"],
        &["bench", "--case", "pear"],
        &["completions", "dos"],
        &["repaly"],
        &["advise", "--no-such-option"],
        &[],
    ];
    let found: Vec<String> = commands.into_iter().flat_map(too_long).collect();
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_help_text_fits_80_columns() {
    let help = ok(&["--help"]).stdout;
    let commands = help.split("Commands:").nth(1).expect("a list").lines();
    let commands = commands.skip(1).take_while(|line| !line.trim().is_empty());
    let commands: Vec<&str> = commands.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.len() > 10 && commands.contains(&"advise"), "{commands:?}");
    let mut found = too_long(&["--help"]);
    for command in commands {
        found.extend(too_long(&[command, "--help"]));
        found.extend(too_long(&[command, "-h"]));
    }
    assert!(found.is_empty(), "{found:#?}");
}
