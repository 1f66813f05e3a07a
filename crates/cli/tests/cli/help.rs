//! Help texts, tips, completions and man pages.

use super::options::COMMANDS;
use super::*;

fn help(command: &str) -> String {
    ok(&[command, "--help"]).stdout
}

#[test]
fn every_help_text_ends_with_an_example_and_the_exit_codes() {
    for command in COMMANDS {
        let text = help(command);
        let (_, end) = text.split_once("\nExample").unwrap_or_else(|| panic!("{command}: {text}"));
        assert!(end.contains(&format!("\n  stratalloc {command}")), "{command}: {end}");
        let codes = end.split_once("Exit codes:\n").expect("it has codes").1;
        let has_one = ["advise", "diff", "replay"].contains(&command);
        let codes: Vec<&str> = codes.lines().map(|line| line.trim_start().split_at(1).0).collect();
        assert_eq!(codes, if has_one { vec!["0", "1", "2"] } else { vec!["0", "2"] }, "{command}");
        let lines = ended(stratalloc().args([command, "--help"]).env("COLUMNS", "80")).stdout;
        for line in lines.lines() {
            assert!(line.chars().count() <= 80, "{command}: {line}");
        }
    }
}

#[test]
fn the_examples_of_help_texts_are_accepted() {
    for command in COMMANDS {
        let text = help(command);
        let examples = text.split_once("\nExample").expect("it has some").1;
        for example in examples.lines().filter_map(|line| line.strip_prefix("  stratalloc ")) {
            let words: Vec<String> =
                example.split(' ').map(|word| word.trim_matches('"').to_owned()).collect();
            if ["info", "bench", "completions", "man"].contains(&command) {
                continue;
            }
            // The arguments are right; the files are not there.
            let ended = ended(stratalloc().args(&words).current_dir(Folder::new("help").path("")));
            let is_refused = ended.stderr.contains("Usage:") || ended.stderr.contains("error:");
            assert!(!is_refused, "{example}: {}", ended.stderr);
        }
    }
}

#[test]
fn the_purpose_of_a_command_precedes_the_options_of_all_recordings() {
    for (command, purposes) in [
        ("advise", vec!["--quick", "--fits", "--assert"]),
        ("report", vec!["--output", "--open", "--no-search", "--quick"]),
        ("diff", vec!["--assert"]),
        ("forecast", vec!["--for", "--fits"]),
        ("sweep", vec!["--output", "--state"]),
        ("replay", vec!["--verify", "--conf"]),
        ("compare", vec!["--conf"]),
    ] {
        let text = help(command);
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{command}: {part}"));
        for purpose in purposes {
            assert!(
                at(&format!("{purpose} ")).min(at(purpose)) < at("Recording options:"),
                "{purpose}"
            );
        }
        assert!(at("Arguments:") < at("Options:"), "{command}: {text}");
        assert!(at("Recording options:") < at("Output options:"), "{command}");
    }
    let program = ok(&["--help"]).stdout;
    let at = |command: &str| program.find(&format!("\n  {command} ")).expect("it is listed");
    assert!(at("advise") < at("report") && at("report") < at("explain"), "{program}");
}

#[test]
fn a_tip_names_the_command_that_has_an_option() {
    for (args, tip, absent) in [
        (&["advise", "-o", "x"][..], "'-o' is an option of report and sweep", "as a value"),
        (&["advise", "--output=x", "y"], "'--output' is an option of report and sweep", "-- "),
        (
            &["compare", "--quick", "x"],
            "'--quick' is an option of advise, report and sweep",
            "quiet",
        ),
        (
            &["diff", "--conf", "x", "a", "b"],
            "'--conf' is an option of advise, report,",
            "-- --conf",
        ),
        (&["info", "--verify"], "'--verify' is an option of replay", "-- --verify"),
        (&["advise", "--torhc", "2.8"], "a similar argument exists: '--torch'", "is an option of"),
        (&["advise", "--nothing"], "unexpected argument '--nothing'", "tip:"),
    ] {
        let ended = fails(args, 2, tip);
        assert!(!ended.stderr.contains(absent), "{args:?}: {}", ended.stderr);
    }
}

#[test]
fn commands_of_the_python_package_are_named() {
    for (name, tip) in [
        ("run", "python -m stratalloc run"),
        ("hook", "python -m stratalloc hook --install"),
        ("preload", "python -m stratalloc preload"),
        ("watch", "stratalloc.watch()"),
        ("account", "stratalloc info --pid"),
    ] {
        let ended = fails(&[name, "train.py"], 2, tip);
        assert!(!ended.stderr.contains("similar"), "{name}: {}", ended.stderr);
    }
    fails(&["advsie"], 2, "a similar subcommand exists: 'advise'");
    let path = trace("serve.default");
    fails(&[&path], 2, &format!("stratalloc advise {path}"));
}

#[test]
fn completions_have_the_keys_the_versions_and_files_only_for_files() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        ok(&["completions", shell]);
    }
    let bash = ok(&["completions", "bash"]).stdout;
    let advise = bash
        .split_once("stratalloc__subcmd__advise)")
        .or_else(|| bash.split_once("stratalloc__advise)"));
    let advise = advise.expect("it completes advise").1.split_once("esac").expect("it ends").0;
    let of = |option: &str| {
        let cases = advise.split_once(&format!("{option})")).unwrap_or_else(|| panic!("{option}"));
        cases.1.split_once(";;").expect("it ends").0.to_owned()
    };
    assert!(of("--torch").contains("2.1 2.2") && of("--torch").contains("2.15"));
    assert!(of("--conf").contains("max_split_size_mb: "), "{}", of("--conf"));
    for option in ["--fits", "--seconds", "--total-memory", "--assert"] {
        assert!(!of(option).contains("compgen -f"), "{option}: {}", of(option));
    }
    assert!(of("--junit").contains("compgen -f"), "{}", of("--junit"));
    for (script, words) in [
        (ok(&["completions", "zsh"]).stdout, ["max_split_size_mb", "2.15"]),
        (ok(&["completions", "fish"]).stdout, ["max_split_size_mb:", "2.15"]),
    ] {
        assert!(words.iter().all(|word| script.contains(word)), "{words:?}");
    }
}

#[test]
fn completions_and_man_pages_are_written_into_folders() {
    let folder = Folder::new("manual");
    let man = folder.path("share/man/man1");
    let printed = ok(&["man", &man]).stdout;
    assert_eq!(printed.lines().count(), COMMANDS.len() + 1);
    for file in printed.lines() {
        let page = std::fs::read_to_string(file).expect("it was written");
        assert!(page.contains(".SH NAME") && page.contains(".SH EXIT STATUS\n"), "{file}");
        assert!(page.contains(".SH EXAMPLES\n.nf\n  stratalloc "), "{file}");
    }
    let advise =
        std::fs::read_to_string(format!("{man}/stratalloc-advise.1")).expect("it is there");
    for part in ["advise", "\\-\\-fits", "\\-\\-max\\-input", "\\-\\-verbose"] {
        assert!(advise.contains(part), "{part}: {advise}");
    }
    let report =
        std::fs::read_to_string(format!("{man}/stratalloc-report.1")).expect("it is there");
    assert!(!report.contains("\\-\\-json"), "{report}");
    let scripts = folder.path("completions");
    let written = ok(&["completions", "zsh", &scripts]).stdout;
    assert_eq!(written.trim_end(), format!("{scripts}/_stratalloc"));
    let occupied = folder.file("occupied", "");
    fails(&["man", &occupied], 2, "occupied");
}
