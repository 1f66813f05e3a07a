//! What is said: where it goes when nobody can read it, and in which words.

use super::{stratalloc, text, trace};

/// The outcome is told by the exit code, whoever can read the words.
#[cfg(target_os = "linux")]
#[test]
fn streams_that_cannot_be_written_change_no_exit_code_into_a_panic() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let path = trace("multistream.default");
    let path = path.to_str().unwrap();
    let idle = "expandable_segments_reserve:0.5";
    for (args, code) in [
        (vec!["explain", "backend:foo"], 2),
        (vec!["replay", "missing"], 1),
        (vec!["replay", path, "--conf", idle], 0),
        (vec!["compare", path, "--conf", idle], 0),
        (vec!["bench", "--conf", idle, "--case", "pear"], 2),
        (vec!["bogus"], 2),
        (vec!["--help"], 0),
    ] {
        let output = stratalloc().args(&args).stderr(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
    }
    let compare = vec!["compare", path, "--conf", ""];
    for args in [vec!["explain"], vec!["info"], vec!["replay", path], compare] {
        let output = stratalloc().args(&args).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(text(&output.stderr).starts_with("stratalloc: "), "{args:?}");
        let output = stratalloc().args(&args).stdout(full()).stderr(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
    }
}
