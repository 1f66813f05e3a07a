//! How results are shown: colours, the width of lines and the amount of detail.

use super::*;

const BOLD: &str = "\u{1b}[1m";

/// Runs `advise` on a short recording with these arguments and variables.
fn shown(args: &[&str], variables: &[(&str, &str)]) -> Ended {
    let mut command = stratalloc();
    command.args(["advise", "--quick", &trace("multistream.default")]).args(args);
    ended(command.envs(variables.iter().copied()))
}

#[test]
fn colours_follow_the_option_before_the_environment() {
    for (args, variables, has_colours) in [
        (&[][..], &[][..], false),
        (&[], &[("CLICOLOR_FORCE", "1")], true),
        (&[], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")], false),
        (&["--color", "always"], &[("NO_COLOR", "1")], true),
        (&["--color=never"], &[("CLICOLOR_FORCE", "1")], false),
    ] {
        let stdout = shown(args, variables).stdout;
        assert_eq!(stdout.contains(BOLD), has_colours, "{args:?} {variables:?}: {stdout}");
    }
    for (colour, has_colours) in [("always", true), ("never", false)] {
        let error = fails(&["advise", "--colour-of", "--color", colour], 2, "--colour-of").stderr;
        assert_eq!(error.contains('\u{1b}'), has_colours, "{error}");
        let help = ok(&["advise", "--help", "--color", colour]).stdout;
        assert_eq!(help.contains('\u{1b}'), has_colours, "{help}");
    }
    fails(&["advise", "--color", "pink", "x"], 2, "pink");
}

#[test]
fn quiet_leaves_notes_out_and_keeps_results_and_errors() {
    let path = &trace("multistream.default");
    let replay = ["replay", path, "--conf", "expandable_segments_reserve:0.5"];
    let (loud, quiet) = (ok(&replay), ok(&[&replay[..], &["-q"]].concat()));
    assert!(loud.stderr.contains("note: "), "{}", loud.stderr);
    assert_eq!((quiet.stderr.as_str(), quiet.stdout.is_empty()), ("", false));
    fails(&["replay", "-q", "no/such/file"], 2, "no/such/file");
    fails(&["replay", "-q", "-v", path], 2, "--verbose");
    assert!(ok(&["explain", "-v"]).stdout.contains("cpu_alignment"));
}

#[test]
fn tables_are_sorted_and_printed_as_asked() {
    let sorted = ["explain", "--sort", "value", "--format", "markdown"];
    let stdout = run(&[&sorted[..], &["compat:pytorch,backend:cpu"]].concat()).stdout;
    let rows: Vec<&str> = stdout.lines().filter(|line| line.starts_with("| ")).collect();
    for (at, row) in [(0, "| key | value |"), (2, "| backend | cpu |"), (3, "| compat | pytorch |")]
    {
        assert!(rows[at].starts_with(row), "{stdout}");
    }
    fails(&["explain", "--sort", "price", "backend:cpu"], 2, "");
    fails(&["completions", "bash", "--format", "json"], 2, "");
}
