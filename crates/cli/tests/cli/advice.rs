//! Results of `advise` on all shipped recordings: the first sentence agrees with the table, a need has
//! the same value in all outputs, and the line to paste has only keys that the given version of PyTorch
//! accepts.

use super::made::{MIB, Made};
use super::*;
use crate::common::prelude::*;

/// Returns the names of all shipped recordings in a full run. Otherwise returns three for which a search
/// is quick: two without a limit, and one with a limit under which some settings help.
fn names() -> Vec<String> {
    let some = [SHORT, "2.12.1.default", "unet.frac045"];
    match runs(1) {
        1 => some.map(str::to_owned).to_vec(),
        _ => all_names(),
    }
}

fn all_names() -> Vec<String> {
    let entries = std::fs::read_dir(shared_library::root().join("tests/traces"))
        .expect("recordings are shipped");
    let file =
        |entry: std::io::Result<std::fs::DirEntry>| entry.ok()?.file_name().into_string().ok();
    let name = |file: String| file.strip_suffix(".pickle.xz").map(ToOwned::to_owned);
    let mut names: Vec<String> = entries.filter_map(file).filter_map(name).collect();
    names.sort();
    assert!(names.len() >= 18, "{names:?}");
    names
}

fn json(args: &[&str]) -> Value {
    run(args).json()
}

fn bytes(value: &Value) -> u64 {
    value.as_u64().unwrap_or(u64::MAX)
}

fn word(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// Checks that the first sentence agrees with the table of settings that were tried.
fn agrees(name: &str, json: &Value) {
    let (sentence, set) = (word(&json["sentence"]), list(&json["set"]));
    let tried = list(&json["tried"]);
    let before = bytes(&json["recorded"]["needs_bytes"]);
    let recorded = format!("{},compat:pytorch", word(&json["recorded"]["conf"]));
    let recorded =
        tried.iter().find(|tried| word(&tried["conf"]) == recorded.trim_start_matches(','));
    let fails = recorded.expect("it was tried")["runs_under_limit"] == false;
    let model = |tried: &Value| tried["conf"] == "backend:cudaMallocAsync";
    let least =
        tried.iter().filter(|tried| !model(tried)).map(|tried| bytes(&tried["needs_bytes"]));
    let least = least.min().expect("there is one");
    match word(&json["headline"]) {
        "worth it" => {
            let choice = &json["choice"];
            let needs = bytes(&choice["needs_bytes"]);
            assert!(sentence.starts_with("Set ") || sentence.starts_with("Use "), "{sentence}");
            assert!(tried.contains(choice), "{name}: {choice} is in the table");
            assert!(needs <= before - before / 50 || fails, "{name}: {sentence}");
            assert_ne!(choice["runs_under_limit"], false, "{name}: {sentence}");
            assert!(!set.is_empty(), "{name}");
        }
        "not worth it" => {
            assert!(sentence.starts_with("No setting is worth its cost: "), "{name}: {sentence}");
            assert!(set.is_empty() && !fails, "{name}: {sentence}");
            let saves_much = least < before - before / 50;
            assert_eq!(saves_much, sentence.contains(" but its device calls "), "{sentence}");
        }
        "cannot help" => {
            assert!(sentence.starts_with("No setting "), "{name}: {sentence}");
            assert!(sentence.contains(" Largest holder: "), "{name}: {sentence}");
            let runs = |tried: &Value| !model(tried) && tried["runs_under_limit"] == true;
            assert!(set.is_empty() && !tried.iter().any(runs), "{name}: {sentence}");
        }
        other => panic!("{name}: {other}"),
    }
}

/// Returns the need of the recorded configuration, read from the data of a page.
fn need_on_page(page: &str) -> u64 {
    let [data] = &super::report::recordings(page)[..] else { panic!("one recording") };
    let rows = list(&data["needs"]["rows"]);
    let recorded = rows.iter().find(|row| row["recorded"] == true).expect("there is one");
    bytes(&recorded["needs_bytes"])
}

const VERSIONS: [&str; 7] = ["2.4", "2.6", "2.8", "2.10", "2.11", "2.13", "2.15"];

/// Returns the options for the search: all settings in a full run or for a short recording, else
/// `--quick`.
fn search_of(name: &str) -> &'static [&'static str] {
    let is_short = name == SHORT;
    if runs(1) > 1 || is_short { &[] } else { &["--quick"] }
}

const SHORT: &str = "cudagraph.default";

/// Checks that the line to paste has only keys that this version accepts. Returns the number of
/// configurations tried for PyTorch's own allocator that contain the newest key.
fn has_keys_of(version: &str, name: &str, json: &Value) -> usize {
    assert_eq!(json["torch"], version);
    for set in list(&json["set"]) {
        if let Some(conf) = word(set).strip_prefix("PYTORCH_CUDA_ALLOC_CONF=") {
            let config = Config::parse(conf, &KeyTable::default()).expect("there is one");
            assert!(
                config.is_accepted_by(version.parse().expect("a version")),
                "{name} {version}: {conf}"
            );
        }
    }
    let is_new = |tried: &&Value| {
        let conf = word(&tried["conf"]);
        conf.contains("large_segment_size_mb") && conf.ends_with("compat:pytorch")
    };
    list(&json["tried"]).iter().filter(is_new).count()
}

/// Runs `advise` on each recording once, for the oldest version of PyTorch. Tries only the quick settings
/// unless the recording is short.
#[test]
fn no_headline_contradicts_its_table_and_a_need_has_one_value() {
    let folder = Folder::new("advice");
    let page = folder.path("page.html");
    let version = VERSIONS[0];
    for name in names() {
        let path = &trace(&name);
        let search = search_of(&name);
        let value = json(&[&["advise", path, "--torch", version, "--json"][..], search].concat());
        agrees(&name, &value);
        assert_eq!(has_keys_of(version, &name, &value), 0, "{name}");
        let needs = &value["recorded"]["needs_bytes"];
        let recorded = value["recorded"]["conf"].as_str().unwrap();
        let comma = if recorded.is_empty() { "" } else { "," };
        let conf = format!("{recorded}{comma}compat:pytorch");
        let compared = json(&["compare", path, "--conf", &conf, "--json"]);
        assert_eq!(&compared["needs_bytes"], needs, "{name}");
        if search.is_empty() {
            // `report` repeats the search, so it takes as long again.
            ok(&["report", path, "--torch", version, "-o", &page]);
            let page = std::fs::read_to_string(&page).unwrap();
            assert_eq!(need_on_page(&page), bytes(needs), "{name}");
        }
    }
}

/// Tests two versions on a short recording; in a full run, all versions on all recordings.
#[test]
fn every_key_of_the_line_to_paste_is_one_that_the_version_has() {
    for name in names().into_iter().filter(|name| search_of(name).is_empty()) {
        let versions = if runs(1) > 1 { &VERSIONS[..] } else { &["2.8", "2.15"] };
        for &version in versions {
            let path = &trace(&name);
            let value = json(&["advise", path, "--torch", version, "--json"]);
            let newest = has_keys_of(version, &name, &value);
            let has_it = ["2.11", "2.13", "2.15"].contains(&version);
            assert!(has_it || newest == 0, "{name} {version}");
            assert!(!has_it || name != SHORT || newest > 0, "{version}");
        }
    }
}

#[test]
fn the_version_is_named_beside_the_line_and_its_absence_with_the_option() {
    let path = &trace("multistream.default");
    let printed = |more: &[&str]| {
        let args = [&["advise", "--quick", path][..], more].concat();
        run(&args).stdout
    };
    let set = printed(&["--torch", "2.8"]);
    assert!(set.contains("\n  PyTorch 2.8:  ") && !set.contains("the version of PyTorch"), "{set}");
    let unknown = printed(&[]);
    assert!(unknown.contains("\n  PyTorch 2.1 or later: "), "{unknown}");
    assert!(unknown.contains("\nThe recording does not show:\n"), "{unknown}");
    assert!(unknown.contains("  - the version of PyTorch (--torch sets it"), "{unknown}");
    assert!(unknown.contains("  - the memory limit (--total-memory"), "{unknown}");
    for command in ["advise", "compare", "report"] {
        let refused = run(&[command, path, "--torch", "1.13"]);
        assert_eq!(refused.code, Some(2), "{command}");
    }
}

/// `compare` includes a key that the version lacks only if the caller requested it explicitly.
#[test]
fn compare_has_only_keys_of_the_version() {
    let path = &trace(SHORT);
    let compared = |more: &[&str]| {
        let output = run(&[&["compare", path, "--json"][..], more].concat());
        (output.stdout, output.stderr)
    };
    let new = "large_segment_size_mb";
    assert!(!compared(&["--torch", "2.8"]).0.contains(new));
    assert!(compared(&["--torch", "2.11"]).0.contains(new));
    let conf = ["--torch", "2.8", "--conf", "large_segment_size_mb:64"];
    let (stdout, stderr) = compared(&conf);
    assert!(stdout.contains(new), "{stdout}");
    let note = "note: PyTorch 2.8 does not accept large_segment_size_mb:64\n";
    assert_eq!(stderr, note);
}

#[test]
fn the_version_is_taken_from_a_recording_that_shows_it() {
    let path = &trace("2.12.1.default");
    let value = json(&["advise", "--quick", "--json", path]);
    assert_eq!(value["torch"], "2.12");
    let not_shown = value["not_shown"].to_string();
    assert!(!not_shown.contains("version"), "{not_shown}");
    // The recorded configuration has a key of PyTorch 2.6.
    let path = &trace("unet.frac045");
    let value = json(&["advise", "--quick", "--json", path]);
    assert_eq!((&value["torch"], &value["not_shown"]), (&"2.6".into(), &Value::Array(Vec::new())));
}

#[test]
fn whether_a_program_fits_is_answered_with_the_cheapest_setting_and_by_the_exit_code() {
    let path = &trace("2.12.1.default");
    let stdout = |more: &[&str]| {
        let output = run(&[&["advise", "--quick", path][..], more].concat());
        (output.code, output.stdout)
    };
    let (code, value) = stdout(&["--fits", "4GiB"]);
    assert_eq!(code, Some(0), "{value}");
    assert!(value.contains("\nYes: the recording needs 3,230 MiB as it is; "), "{value}");
    assert!(!value.contains("ALLOC_CONF"), "{value}");
    let with = "`PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32` (PyTorch 2.12 or later)";
    let (code, value) = stdout(&["--fits", "3200MiB"]);
    assert_eq!(code, Some(1), "{value}");
    let needs = "the recording needs 3,230 MiB as it is";
    let no = format!("\nNo: {needs}; with {with} it needs 3,080 MiB and would fit in 3.12 GiB.\n");
    assert!(value.contains(&no), "{value}");
    let (code, value) = stdout(&["--assert", "least_need<=3200MiB"]);
    assert_eq!(code, Some(0), "{value}");
    let yes = format!(
        "\nYes: with {with} the recording needs 3,080 MiB; 3.12 GiB suffice. But {needs}.\n"
    );
    assert!(value.contains(&yes), "{value}");
    for condition in ["needs<=3000MiB", "least_need<=3000MiB"] {
        let (code, value) = stdout(&["--assert", condition]);
        assert_eq!(code, Some(1), "{value}");
        assert!(value.contains(&format!("\nNo: {needs}. The least need of ")), "{value}");
        assert!(!value.contains("ALLOC_CONF"), "{value}");
    }
    for (condition, code) in
        [("needs>700MiB", 0), ("live_peak >= 4000MiB", 1), ("peak<1GiB", 2), ("needs=1GiB", 2)]
    {
        assert_eq!(stdout(&["--assert", condition]).0, Some(code), "{condition}");
    }
    let conditions = ["--fits", "3200MiB", "--assert", "live_peak<1MiB", "--json"];
    let output = run(&[&["advise", "--quick", path][..], &conditions].concat());
    assert_eq!(output.code, Some(1));
    let value = output.json();
    let (fits, live) = (&value["assertions"][0], &value["assertions"][1]);
    assert_eq!((&fits["assertion"], &fits["holds"]), (&"needs<=3200MiB".into(), &false.into()));
    assert_eq!(fits["value_bytes"], value["recorded"]["needs_bytes"]);
    assert!(bytes(&fits["needs_bytes"]) <= 3200 * MIB && fits["is_recorded"] == false, "{fits}");
    assert_eq!(fits["paste"], "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32");
    assert_eq!((&live["holds"], &live["conf"]), (&false.into(), &Value::Null));
}

#[test]
fn live_bytes_beyond_the_limit_name_the_excess_and_the_largest_holder() {
    let mut made = Made::default();
    for at in 1..=3_u64 {
        made.segment(at << 30, 40 * MIB);
        made.alloc(at << 30, 40 * MIB);
    }
    made.out_of_memory(40 * MIB, 10 * MIB);
    let folder = Folder::new("beyond");
    let file = folder.file("beyond.json", &made.json());
    let value = json(&["advise", "--quick", "--json", &file]);
    assert_eq!(
        value["sentence"],
        "No setting can help: the live bytes alone (160 MiB, with the request that failed) exceed the limit \
         (130 MiB) by 30 MiB. Largest holder: 120 MiB in 3 blocks of 41,943,040 bytes."
    );
    assert_eq!((&value["headline"], &value["choice"]), (&"cannot help".into(), &Value::Null));
    assert!(value["set"].as_array().unwrap().is_empty());
    let printed = run(&["advise", "--quick", &file]).stdout;
    assert!(!printed.contains("ALLOC_CONF="), "{printed}");
    assert!(
        printed.contains("live bytes alone: 160 MiB, with the request that failed\n"),
        "{printed}"
    );
    assert!(printed.contains("A device needs more than that: the CUDA context"), "{printed}");
}
