//! Options that several commands share: their names, texts and order.

use std::collections::BTreeMap;

use super::*;

pub(super) const COMMANDS: [&str; 12] = [
    "explain",
    "info",
    "replay",
    "advise",
    "compare",
    "diff",
    "forecast",
    "sweep",
    "report",
    "bench",
    "completions",
    "man",
];

/// The options of more than one command, in the order of every help text.
const SHARED: [&str; 23] = [
    "-o, --output <FILE>",
    "--device <DEVICE>",
    "--all",
    "-h, --help",
    "-V, --version",
    "--fits <SIZE>",
    "--assert <CONDITION>",
    "--junit <FILE>",
    "--quick",
    "--seconds <SECONDS>",
    "--torch <VERSION>",
    "--conf <CONF>",
    "--total-memory <SIZE>",
    "--memory-fraction <SHARE>",
    "--recorded-device <N>",
    "--max-input <SIZE>",
    "--json",
    "--format <FORMAT>",
    "--sort <COLUMN>",
    "--wide",
    "-v, --verbose",
    "-q, --quiet",
    "--color <WHEN>",
];

/// Options whose meaning depends on the command.
const OWN_TEXT: [&str; 6] = [
    "--all",
    "--conf <CONF>",
    "--device <DEVICE>",
    "--fits <SIZE>",
    "--assert <CONDITION>",
    "-o, --output <FILE>",
];

/// Returns the options in a help text with their texts, in order.
fn options(command: &str) -> Vec<(String, String)> {
    let mut options: Vec<(String, String)> = Vec::new();
    for line in ok(&[command, "--help"]).stdout.lines() {
        if line.trim_start().starts_with('-') && line.len() - line.trim_start().len() < 8 {
            options.push((line.trim().to_owned(), String::new()));
        } else if let Some((_, text)) = options.last_mut().filter(|_| line.starts_with("    ")) {
            text.push_str(line);
        }
    }
    options
}

/// Commands that print neither tables nor JSON.
const NO_RESULTS: [&str; 3] = ["report", "completions", "man"];

#[test]
fn an_option_of_several_commands_has_one_name_one_text_and_one_place() {
    let mut texts: BTreeMap<String, (String, &str)> = BTreeMap::new();
    for command in COMMANDS {
        let options = options(command);
        let place = |name: &str| SHARED.iter().position(|shared| *shared == name);
        // An option of its own meaning stands among the command's own.
        let alike = options.iter().filter(|(name, _)| !OWN_TEXT.contains(&name.as_str()));
        let places: Vec<usize> = alike.filter_map(|(name, _)| place(name)).collect();
        assert!(places.is_sorted(), "{command}: {options:?}");
        for (name, text) in options {
            let (known, first) = texts.entry(name.clone()).or_insert((text.clone(), command));
            assert!(*first == command || place(&name).is_some(), "{name} of {first} and {command}");
            let is_same = *known == text || OWN_TEXT.contains(&name.as_str());
            assert!(is_same, "{name} of {first} and {command}: {known} | {text}");
        }
    }
    for (option, commands) in [
        ("--quick", vec!["advise", "sweep", "report"]),
        ("--seconds <SECONDS>", vec!["advise", "sweep", "report"]),
        ("--torch <VERSION>", vec!["advise", "compare", "forecast", "sweep", "report"]),
        ("--json", COMMANDS.iter().copied().filter(|name| !NO_RESULTS.contains(name)).collect()),
    ] {
        for command in commands {
            let has = options(command).iter().any(|(name, _)| name == option);
            assert!(has, "{command} has no {option}");
        }
    }
}

#[test]
fn a_search_without_time_states_that_time_ran_out() {
    let path = &trace("cudagraph.default");
    let json = |args: &[&str]| {
        let printed = ok(&[&["advise", path, "--json"], args].concat()).stdout;
        serde_json::from_str::<serde_json::Value>(&printed).expect("it is JSON")
    };
    let none = json(&["--seconds", "0"]);
    assert_eq!((&none["headline"], &none["is_cut_short"]), (&"not searched".into(), &true.into()));
    assert!(none["sentence"].as_str().is_some_and(|text| text.contains("Time ran out")), "{none}");
    assert_eq!(none["recorded"]["needs_bytes"], serde_json::Value::Null);
    assert!(none["causes"]["reserved_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{none}");
    let all = json(&["--quick", "--seconds", "600"]);
    assert!(all["tried"].as_array().is_some_and(|tried| tried.len() > 2), "{all}");
    assert_eq!(all["is_cut_short"], false);
    // A condition is judged, however long it takes.
    let judged = json(&["--seconds", "0", "--assert", "needs<=64GiB"]);
    assert_eq!(judged["assertions"][0]["holds"], true, "{judged}");
    fails(&["advise", path, "--seconds", "1000001"], 2, "--seconds");
}

#[test]
fn json_is_an_option_of_all_commands_in_any_place() {
    let before = ok(&["--json", "explain", "max_split_size_mb:64"]).stdout;
    assert_eq!(before, ok(&["explain", "max_split_size_mb:64", "--format", "json"]).stdout);
    assert!(before.starts_with("{\"source\":"), "{before}");
    for command in NO_RESULTS {
        for option in ["--json", "--format=markdown", "--sort=x", "--wide"] {
            let name = option.split('=').next().expect("a name");
            let value = if command == "completions" { "bash" } else { "x" };
            fails(&[command, option, value], 2, &format!("{name} is no option of {command}"));
            let offered = options(command);
            assert!(offered.iter().all(|(known, _)| !known.starts_with(name)), "{command}");
        }
    }
}

#[test]
fn a_forecast_leaves_out_configurations_that_the_version_refuses() {
    let given = [2, 4].map(|batch| format!("batch={batch}:{}", forecast::recorded("gpt", batch)));
    let mut args = vec!["forecast", &given[0], &given[1], "--for", "batch=6", "--json"];
    let has_new_key = |args: &[&str]| ok(args).stdout.contains("large_segment_size_mb");
    assert!(has_new_key(&args));
    args.extend(["--torch", "2.8"]);
    assert!(!has_new_key(&args));
}

#[test]
fn sizes_have_one_format_everywhere() {
    let path = &trace("multistream.default");
    let reserved = |total: &str| {
        let row = run(&["replay", path, "--total-memory", total, "--json"]).json();
        row["retries"].as_u64().unwrap()
    };
    for total in ["1GiB", "1GB", "1gb", "1 GiB", "1g", "1.0G", "1024m", "1073741824B"] {
        assert_eq!(reserved("1G"), reserved(total), "{total}");
    }
    assert!(reserved("1024MiB") > 0 && reserved("40GiB") == 0);
    for option in ["--total-memory", "--max-input"] {
        fails(&["replay", path, option, "24"], 2, "24 has no unit: write 24GiB or 24B");
        fails(&["replay", path, option, "0"], 2, "24GiB or 24B");
        fails(&["replay", path, option, "80%"], 2, "80% is a share");
        fails(&["replay", path, option, "24Gi"], 2, "write 24GiB");
    }
    for (option, wrong) in
        [("--fits", "24"), ("--assert", "needs<=24"), ("--assert", "live_peak<24")]
    {
        fails(&["advise", path, option, wrong], 2, "24 has no unit: write 24GiB or 24B");
    }
    fails(&["diff", path, path, "--assert", "needs<=+2"], 2, "2 has no unit: write 2GiB or 2B");
    let forecast = ["forecast", "a=1:x", "a=2:y", "--for", "a=3", "--fits"];
    fails(&[&forecast[..], &["24"]].concat(), 2, "24 has no unit: write 24GiB or 24B");
    fails(&[&forecast[..], &["80%"]].concat(), 2, "--total-memory sets it");
    fails(&["replay", path, "--max-input", "1KiB"], 2, "");
    fails(&["explain", "layers:[limit:8]"], 2, "a number needs a unit");
}
