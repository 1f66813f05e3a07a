//! Commands as gates in continuous integration: exit codes, JUnit files, and conditions.

use super::made::{MIB, Made};
use super::*;

/// A recording of one block.
fn one_block(bytes: u64) -> String {
    let mut made = Made::default();
    made.segment(1 << 40, bytes);
    made.alloc(1 << 40, bytes);
    made.json()
}

#[test]
fn an_unreadable_recording_is_exit_code_2_and_an_error_in_the_junit_file() {
    let folder = Folder::new("unreadable");
    let good = folder.file("good.json", &one_block(40 * MIB));
    let (bad, missing) = (folder.file("bad.json", "{"), folder.path("missing.pickle"));
    let junit = folder.path("junit.xml");
    let errors = |args: &[&str], tests: usize, failures: usize, errors: usize| {
        let _ = std::fs::remove_file(&junit);
        let ended = fails(&[args, &["--junit", &junit]].concat(), 2, "");
        let xml = std::fs::read_to_string(&junit).expect("the file is written");
        let counts = format!("tests=\"{tests}\" failures=\"{failures}\" errors=\"{errors}\">");
        assert_eq!(xml.matches(&counts).count(), 2, "{args:?}: {xml}");
        assert_eq!(xml.matches("<error message=\"It cannot be judged: ").count(), errors, "{xml}");
        assert!(ended.stderr.contains("stratalloc: "), "{}", ended.stderr);
    };
    let advise = ["advise", "--quick", "--assert", "live_peak<1TiB", "--assert", "live_peak<1MiB"];
    errors(&[&advise[..], &[&missing]].concat(), 2, 0, 2);
    // 2 takes precedence over 1: the first condition holds for the readable file, the second does not.
    errors(&[&advise[..], &[&good, &bad, &missing]].concat(), 6, 1, 4);
    for pair in [[&good, &bad], [&missing, &good]] {
        let diff = ["diff", pair[0], pair[1], "--assert", "live_peak<=+2%"];
        errors(&diff, 1, 0, 1);
    }
}

#[test]
fn every_command_ends_with_2_if_a_recording_has_no_result() {
    let folder = Folder::new("no_result");
    let good = folder.file("good.json", &one_block(40 * MIB));
    let other = folder.file("other.json", &one_block(40 * MIB));
    let (bad, out) = (folder.file("bad.json", "{"), folder.path("page.html"));
    let commands: [&[&str]; 5] = [
        &["advise", "--quick"],
        &["compare", "--conf", "backend:native"],
        &["replay", "--verify"],
        &["sweep", "--quick"],
        &["report", "--quick", "-o", &out],
    ];
    for command in commands {
        fails(&[command, &[&bad]].concat(), 2, "");
        fails(&[command, &[&good, &bad, &other]].concat(), 2, "");
        assert_eq!(run(&[command, &[&good, &other]].concat()).code, Some(0), "{command:?}");
    }
    let [one, two, broken] =
        [("1", &good), ("2", &other), ("3", &bad)].map(|(at, file)| format!("batch={at}:{file}"));
    let forecast = ["forecast", &one, &two, &broken, "--for", "batch=9"];
    assert_eq!(fails(&forecast, 2, "bad.json").stdout, "");
}

/// A gate whose output is cut off by `head` must not be green.
#[test]
fn a_closed_pipe_does_not_hide_that_a_condition_fails() {
    let folder = Folder::new("closed");
    let [small, large] = [2, 40].map(|mib| {
        let name = format!("block{mib}.json");
        folder.file(&name, &one_block(mib * MIB))
    });
    let commands: [&[&str]; 4] = [
        &["advise", "--quick", &large, "--assert", "live_peak<1MiB"],
        &["advise", "--quick", &small, &large, "--assert", "live_peak<10MiB"],
        &["advise", "--quick", &large, "--assert", "live_peak<1MiB", "--json"],
        &["diff", &small, &large, "--assert", "live_peak<=+1MiB"],
    ];
    for command in commands {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = ended(stratalloc().args(command).stdout(writer));
        assert_eq!(ended.code, Some(1), "{command:?}: {}", ended.stderr);
    }
}

/// The program failed under its limit, and fits in 6.3 GiB only with another setting.
#[test]
fn a_need_is_that_of_the_program_as_it_is_and_failed_requests_are_no_yes() {
    let path = &trace("unet.frac045");
    let judged = |more: &[&str], code: i32| {
        let ended = run(&[&["advise", "--quick", path, "--json"][..], more].concat());
        assert_eq!(ended.code, Some(code), "{more:?}: {}", ended.stdout);
        ended.json()["assertions"][0].clone()
    };
    let fits = judged(&["--fits", "6.3GiB"], 1);
    let sentence = fits["sentence"].as_str().unwrap();
    assert!(sentence.starts_with("No: the recording needs 6,540 MiB as it is; with `"), "{fits}");
    assert_eq!((&fits["assertion"], &fits["holds"]), (&"needs<=6.3GiB".into(), &false.into()));
    let needs = fits["value_bytes"].as_u64().unwrap();
    let least = judged(&["--assert", "least_need<=6.3GiB"], 0);
    assert_eq!(least["conf"], fits["conf"]);
    assert!(least["value_bytes"].as_u64().unwrap() < needs, "{least}");
    // More memory than it needs, but it was recorded under its limit, where 33 requests failed.
    let fails = judged(&["--fits", "8GiB"], 1);
    assert_eq!((&fails["assertion"], &fails["failures"]), (&"failures==0".into(), &33.into()));
    let sentence = fails["sentence"].as_str().unwrap();
    assert!(sentence.starts_with("No: 33 requests failed when it was recorded, "), "{sentence}");
    let without = judged(&["--fits", "8GiB", "--memory-fraction", "1"], 0);
    assert_eq!((&without["value_bytes"], &without["is_recorded"]), (&needs.into(), &true.into()));
    judged(&["--fits", "90%", "--total-memory", "8GiB"], 0);
    assert_eq!(judged(&["--fits", "90%"], 2)["holds"], Value::Null);
    for (condition, code) in
        [("failures==0", 1), ("failures!=0", 0), ("failures<=33", 0), ("failures<33", 1)]
    {
        assert_eq!(judged(&["--assert", condition], code)["failures"], 33);
    }
    let set = ["--assert", "failures==0", "--total-memory", "8GiB"];
    assert_eq!(judged(&set, 0)["failures"], 0);
}

/// `needs` is no result of a search, and has one value in all commands.
#[test]
fn a_need_as_recorded_does_not_depend_on_the_settings_that_are_searched() {
    let path = &trace("cudagraph.default");
    let judged = |more: &[&str]| {
        let args =
            ["advise", path, "--assert", "needs<=1B", "--assert", "least_need<=1B", "--json"];
        let ended = fails(&[&args[..], more].concat(), 1, "");
        let assertions = ended.json()["assertions"].clone();
        [0, 1].map(|at| assertions[at]["value_bytes"].as_u64().expect("a device suffices"))
    };
    let ([needs, least], [quick, _]) = (judged(&[]), judged(&["--quick"]));
    assert_eq!(needs, quick);
    assert!(least <= needs);
    let diff = ["diff", path, path, "--json", "--assert", "needs<=+0", "--assert", "failures<=+0"];
    let assertions = ok(&diff).json()["assertions"].clone();
    assert_eq!(assertions[0]["b_bytes"], needs);
    assert_eq!((&assertions[1]["b_failures"], &assertions[1]["holds"]), (&0.into(), &true.into()));
}

#[test]
fn a_configuration_that_cannot_be_replayed_is_no_need_as_recorded() {
    let mut made = Made::with_conf("some_key:7");
    made.segment(1 << 40, 40 * MIB);
    made.alloc(1 << 40, 40 * MIB);
    let folder = Folder::new("unknown-conf");
    let file = folder.file("unknown.json", &made.json());
    let commands: [&[&str]; 2] = [
        &["advise", "--quick", &file, "--assert", "needs<=1GiB"],
        &["diff", &file, &file, "--assert", "needs<=+0"],
    ];
    for command in commands {
        let ended = fails(command, 2, "");
        assert!(ended.stdout.contains("It cannot be judged: "), "{}", ended.stdout);
    }
    ok(&["advise", "--quick", &file, "--assert", "live_peak<=1GiB"]);
}
