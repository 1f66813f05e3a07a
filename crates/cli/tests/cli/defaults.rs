//! Defaults of options from environment variables and from `stratalloc.toml` in the working folder.

use crate::common::prelude::*;

use super::*;

/// Runs a command in a folder whose file has this text, with these variables.
fn run_in(text: Option<&str>, variables: &[(&str, &str)], args: &[&str]) -> Ended {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let folder = Folder::new(&format!("defaults-{}", RUNS.fetch_add(1, Ordering::Relaxed)));
    if let Some(text) = text {
        folder.file("stratalloc.toml", text);
    }
    let mut command = stratalloc();
    command.current_dir(folder.path("")).args(args).envs(variables.iter().copied());
    ended(&mut command)
}

fn limit_of(ended: &Ended) -> (u64, String) {
    let json = ended.json();
    let limit = json["limit_bytes"].as_u64().expect("a limit");
    (limit, json["limit_from"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn an_option_precedes_a_variable_and_a_variable_the_file() {
    let (path, file) = (trace("cudagraph.default"), "total-memory = \"30GiB\"\n");
    let replay = |text, variables: &[(&str, &str)], more: &[&str]| {
        run_in(text, variables, &[&["replay", &path, "--json"], more].concat())
    };
    let gib = |gib: u64| (gib << 30, "set as the memory of the device".to_owned());
    let variable = [("STRATALLOC_TOTAL_MEMORY", "20GiB")];
    assert_eq!(limit_of(&replay(Some(file), &[], &[])), gib(30));
    assert_eq!(limit_of(&replay(Some(file), &variable, &[])), gib(20));
    assert_eq!(limit_of(&replay(None, &variable, &[])), gib(20));
    let option = ["--total-memory", "10GiB"];
    assert_eq!(limit_of(&replay(Some(file), &variable, &option)), gib(10));
    // An empty variable is not set.
    assert_eq!(limit_of(&replay(Some(file), &[("STRATALLOC_TOTAL_MEMORY", "")], &[])), gib(30));
    let none = replay(None, &[], &[]).json();
    assert_eq!(none["limit_bytes"], Value::Null);
}

#[test]
fn every_key_has_the_effect_of_its_option() {
    let path = trace("cudagraph.default");
    let text = "# of the CI\ntorch = '2.3'\ntotal-memory = \"40GiB\"\nmemory-fraction = 0.5\n\
                recorded-device = 0\nmax-input = \"1GiB\"\nseconds = 77\n\
                conf = [\"max_split_size_mb:40\", 'expandable_segments:True']\n";
    let args = ["advise", &path, "--quick", "--json"];
    let set = run_in(Some(text), &[], &args).json();
    assert_eq!((&set["torch"], &set["limit_bytes"]), (&"2.3".into(), &(20_u64 << 30).into()));
    let asked = |json: &Value| json["asked"].as_array().map(Vec::len);
    assert_eq!(asked(&set), Some(1), "{set}");
    let options = [
        "--torch=2.3",
        "--total-memory=40GiB",
        "--memory-fraction=0.5",
        "--conf=max_split_size_mb:40",
        "--conf=expandable_segments:True",
    ];
    assert_eq!(run_in(None, &[], &[&args[..], &options].concat()).json(), set);
    // A list of an option replaces that of the file.
    let other = run_in(Some(text), &[], &[&args[..], &["--conf", "max_split_size_mb:50"]].concat());
    assert_eq!(other.json()["asked"][0]["conf"], "max_split_size_mb:50");
    let small = run_in(Some("max-input = \"1KiB\""), &[], &["advise", &path]);
    assert_eq!(small.code, Some(2));
    assert!(small.stderr.contains("more than 1024 decoded bytes"), "{}", small.stderr);
    let hurried = run_in(Some("seconds = 0"), &[], &["advise", &path, "--json"]);
    assert_eq!(hurried.json()["is_cut_short"], true);
    let device = run_in(Some("recorded-device = 7"), &[], &["advise", &path]);
    assert!(device.stderr.contains("device 7"), "{}", device.stderr);
}

#[test]
fn the_file_that_was_used_is_printed_on_request() {
    let path = trace("cudagraph.default");
    let text = "\ntorch = \"2.8\"\nseconds = 30\n";
    let variables = [("STRATALLOC_MEMORY_FRACTION", "0.9")];
    let args = ["advise", &path, "--quick", "-v", "--torch", "2.9"];
    let printed = run_in(Some(text), &variables, &args).stderr;
    assert!(printed.contains("note: stratalloc.toml:3: --seconds 30"), "{printed}");
    assert!(
        printed.contains("note: STRATALLOC_MEMORY_FRACTION: --memory-fraction 0.9"),
        "{printed}"
    );
    assert!(!printed.contains("--torch"), "{printed}");
    let quiet = run_in(Some(text), &[], &["advise", &path, "--quick"]).stderr;
    assert!(!quiet.contains("stratalloc.toml"), "{quiet}");
}

#[test]
fn a_wrong_file_is_an_error_with_its_line() {
    let path = trace("cudagraph.default");
    for (text, error) in [
        (
            "torch = \"2.8\"\ntotal_memory = \"80GiB\"",
            "stratalloc.toml:2: unknown key total_memory: did you mean total-memory?",
        ),
        (
            "quick = true",
            "stratalloc.toml:1: unknown key quick: expected one of torch, total-memory",
        ),
        ("\n\ntorch = 2.8", "stratalloc.toml:3: torch: expected a value such as torch = \"2.8\""),
        ("torch = \"nine\"", "stratalloc.toml:1: torch: invalid value 'nine'"),
        ("total-memory = \"24\"", "stratalloc.toml:1: total-memory: invalid value '24'"),
        ("memory-fraction = 1.5", "stratalloc.toml:1: memory-fraction: invalid value '1.5'"),
        ("seconds = -1", "stratalloc.toml:1: seconds: invalid value '-1'"),
        ("conf = [1]", "stratalloc.toml:1: conf: expected a value such as conf = ["),
        ("conf = \"max_splt_size_mb:64\"", "stratalloc.toml:1: conf: "),
        ("conf = \"backend:pluggable,pluggable_library:/tmp/x.so\"", "stratalloc.toml:1: conf: "),
        ("conf = \"layers:record,record_file:/tmp/x\"", "stratalloc.toml:1: conf: "),
        ("torch = \"2.8\ntorch", "stratalloc.toml:"),
        ("torch = \"2.8\"\ntorch = \"2.9\"", "stratalloc.toml:2: "),
        ("[advise]\ntorch = \"2.8\"", "stratalloc.toml:1: unknown key advise"),
        ("\u{1b}[31m = 1", "stratalloc.toml:1: "),
    ] {
        let ended = run_in(Some(text), &[], &["advise", "--quick", &path]);
        assert_eq!((ended.code, ended.stdout.as_str()), (Some(2), ""), "{text}");
        assert!(ended.stderr.contains(error), "{text}: {}", ended.stderr);
        assert!(!ended.stderr.contains('\u{1b}'), "{text}: {:?}", ended.stderr);
    }
    let long = format!("# {}\n", "x".repeat(70_000));
    let ended = run_in(Some(&long), &[], &["advise", &path]);
    assert!(ended.stderr.contains("larger than 64 KiB"), "{}", ended.stderr);
    let deep = format!("conf = {}", "[".repeat(60_000));
    assert_eq!(run_in(Some(&deep), &[], &["advise", &path]).code, Some(2));
    let variable = [("STRATALLOC_TORCH", "nine")];
    let ended = run_in(None, &variable, &["advise", &path]);
    assert!(
        ended.stderr.contains("STRATALLOC_TORCH: torch: invalid value 'nine'"),
        "{}",
        ended.stderr
    );
    // Commands that read no recording do not read the file.
    for args in [&["explain", "max_split_size_mb:64"][..], &["advise", "--help"], &["info"]] {
        assert_eq!(run_in(Some("wrong"), &variable, args).code, Some(0), "{args:?}");
    }
}

#[test]
fn a_configuration_of_the_file_replaces_no_recorded_one() {
    let path = trace("cudagraph.default");
    let text = "conf = \"expandable_segments:True\"\nseconds = 5\n";
    let verified = run_in(Some(text), &[], &["replay", "--verify", &path]);
    assert_eq!(verified.code, Some(0), "{}", verified.stderr);
    let folder = Folder::new("defaults-page");
    let out = folder.path("out.html");
    let args = ["report", "--no-search", &path, "-o", &out];
    assert_eq!(run_in(Some(text), &[], &args).code, Some(0));
}
