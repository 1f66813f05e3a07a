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
