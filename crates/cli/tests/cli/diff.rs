//! `diff`: two recordings of one program, conditions on their difference, and JUnit files.

use super::made::{MIB, Made};
use super::*;

fn compared(a: &str, b: &str) -> Value {
    ok(&["diff", a, b, "--json"]).json()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("{value} is no list"))
}

/// Returns the frames of a stack as a part of an entry, innermost first.
pub(super) fn frames(of: &[(&str, u32, &str)]) -> String {
    let frame = |(file, line, name): &(&str, u32, &str)| {
        format!(r#"{{"filename":"{file}","line":{line},"name":"{name}"}}"#)
    };
    let frames: Vec<String> = of.iter().map(frame).collect();
    format!(r#","frames":[{}]"#, frames.join(","))
}

/// Returns a recording whose requests have these sizes in MiB. Each is made by this line of `train.py` in
/// `step`, and has a segment of its own. All blocks stay live.
fn recording(folder: &str, requests: &[(u64, u32)]) -> String {
    let mut made = Made::default();
    for (at, (mib, line)) in (1_u64..).zip(requests) {
        made.segment(at << 32, mib * MIB);
        let file = format!("{folder}/train.py");
        made.alloc_with(at << 32, mib * MIB, &frames(&[(&file, *line, "step")]));
    }
    made.json()
}

#[test]
fn a_recording_does_not_differ_from_itself() {
    let path = &trace("multistream.default");
    let json = compared(path, path);
    assert_eq!(json["is_same"], true);
    let requests = &json["requests"];
    assert_eq!((&requests["same"], &requests["places"]), (&3230.into(), &0.into()));
    assert_eq!(requests["first"], Value::Null);
    for empty in [&requests["list"], &json["grew"], &json["kept_segments"], &json["assertions"]] {
        assert_eq!(list(empty).len(), 0, "{json}");
    }
    assert_eq!(json["difference"]["needs_bytes"], 0);
    assert_eq!(json["a"]["needs_bytes"], json["b"]["needs_bytes"]);
    let stdout = ok(&["diff", path, path]).stdout;
    assert!(stdout.contains("\nNothing differs: 3,230 requests, the live bytes"), "{stdout}");
}

/// Returns a snapshot in which the `number`-th request, from 0, is `more` bytes larger, and the request's
/// old size.
fn enlarged(snapshot: &str, number: usize, more: u64) -> (String, u64) {
    let mut json: Value = serde_json::from_str(snapshot).expect("a snapshot is JSON");
    let entries = json["device_traces"][0].as_array_mut().expect("a list of entries");
    let is_request = |entry: &&mut Value| entry["action"] == "alloc";
    let entry = entries.iter_mut().filter(is_request).nth(number).expect("there are so many");
    let bytes = entry["size"].as_u64().expect("a size");
    entry["size"] = (bytes + more).into();
    (json.to_string(), bytes)
}

#[test]
fn the_one_request_that_was_made_larger_is_named() {
    let folder = Folder::new("larger");
    let a = folder.path("a.json");
    ok(&["replay", &trace("resnet50.default"), "--snapshot", &a]);
    let (copy, bytes) = enlarged(&std::fs::read_to_string(&a).unwrap(), 1000, 64 * MIB);
    let b = folder.file("b.json", &copy);
    let json = compared(&a, &b);
    let requests = &json["requests"];
    let counts = ["same", "changed", "only_a", "only_b", "places"].map(|name| &requests[name]);
    assert_eq!(counts, [&5085.into(), &1.into(), &0.into(), &0.into(), &1.into()] as [&Value; 5]);
    let first = &requests["first"];
    assert_eq!((&first["a"]["request"], &first["b"]["request"]), (&1001.into(), &1001.into()));
    assert_eq!(first["a"]["bytes"], bytes);
    assert_eq!(first["b"]["bytes"], bytes + 64 * MIB);
    assert_eq!(first["a"]["event"], first["b"]["event"]);
    let before: Vec<_> = list(&first["before"]).iter().map(|one| &one["request"]).collect();
    assert_eq!(before, [998, 999, 1000]);
    let stdout = ok(&["diff", &a, &b]).stdout;
    assert!(stdout.contains("\nThe first request that differs:\n"), "{stdout}");
    assert!(stdout.contains(
        "5,085 requests are the same, 1 different, 0 only in A, 0 only in B, in 1 place."
    ));
}

#[test]
fn code_that_moved_to_other_lines_and_folders_is_the_same_code() {
    let folder = Folder::new("moved");
    let a = folder.file("a.json", &recording("/one", &[(30, 10), (40, 11), (30, 10), (40, 11)]));
    let moved = [(30, 20), (40, 21), (30, 20), (40, 21)];
    let b = folder.file("b.json", &recording("/two/code", &moved));
    assert_eq!(compared(&a, &b)["is_same"], true);

    // A line was inserted, so that the next one moved.
    let inserted = [(30, 10), (100, 11), (40, 12), (30, 10), (100, 11), (40, 12)];
    let c = folder.file("c.json", &recording("/one", &inserted));
    let json = compared(&a, &c);
    let requests = &json["requests"];
    assert_eq!((&requests["same"], &requests["only_b"]), (&4.into(), &2.into()));
    assert_eq!((&requests["changed"], &requests["places"]), (&0.into(), &2.into()));
    let first = &requests["first"];
    assert_eq!(first["a"], Value::Null);
    assert_eq!(first["b"]["requested_by"], "train.py:11 step");
    let places = list(&requests["list"]);
    assert_eq!(places[1]["a"], serde_json::json!({"requests": 0, "first": null}));
    assert_eq!(
        (&places[1]["b"]["requests"], &places[1]["b"]["first"]["request"]),
        (&1.into(), &5.into())
    );
    let [grew] = &list(&json["grew"])[..] else { panic!("{json}") };
    assert_eq!(grew["requested_by"], "train.py:11 step");
    assert_eq!(grew["difference_bytes"], 200 * MIB);
    assert_eq!((&grew["a"]["blocks"], &grew["b"]["blocks"]), (&0.into(), &2.into()));
    assert_eq!(json["difference"]["live_peak_bytes"], 200 * MIB);
    let back = compared(&c, &a);
    assert_eq!(back["requests"]["only_a"], 2);
    assert_eq!(back["grew"][0]["difference_bytes"], -200 * i64::try_from(MIB).unwrap());

    let stdout = ok(&["diff", &a, &c]).stdout;
    let headline = "B needs 340 MiB, A 140 MiB (+200 MiB, +142.9 %).";
    assert!(stdout.contains(headline), "{stdout}");
    assert!(stdout.lines().any(|line| line.trim_start().starts_with("+200  0.0  200")), "{stdout}");
}

#[test]
fn a_block_that_keeps_a_segment_is_named() {
    // In A the cache serves the second request from the segment of the first. In B a small block remains in
    // that segment.
    let step = |line| frames(&[("train.py", line, "step")]);
    let (first, second) = (1_u64 << 32, 2_u64 << 32);
    let recording = |keeps: bool| {
        let mut made = Made::default();
        made.segment(first, 40 * MIB);
        made.alloc_with(first, 2 * MIB, &step(10));
        made.alloc_with(first + 2 * MIB, 38 * MIB, &step(11));
        made.free(first + 2 * MIB, 38 * MIB);
        if !keeps {
            made.free(first, 2 * MIB);
            made.alloc_with(first, 40 * MIB, &step(12));
        } else {
            made.segment(second, 40 * MIB);
            made.alloc_with(second, 40 * MIB, &step(12));
        }
        made.json()
    };
    let folder = Folder::new("keeps");
    let (a, b) =
        (folder.file("a.json", &recording(false)), folder.file("b.json", &recording(true)));
    let json = compared(&a, &b);
    let [kept] = &list(&json["kept_segments"])[..] else { panic!("{json}") };
    assert_eq!((&kept["blocks"], &kept["largest_bytes"]), (&1.into(), &(2 * MIB).into()));
    assert_eq!(kept["largest"]["requested_by"], "train.py:10 step");
    assert_eq!(kept["largest"]["request"], 1);
    assert!(kept["free_bytes"].as_u64().unwrap() > 10 * MIB, "{kept}");
    assert_eq!(json["requests"]["places"], 0);
    let stdout = ok(&["diff", &a, &b]).stdout;
    assert!(stdout.contains("B has 1 segment with live blocks that A has not:"), "{stdout}");
    assert!(stdout.contains("train.py:10 step (request 1)"), "{stdout}");
}

#[test]
fn conditions_on_differences_decide_the_exit_code_and_are_test_cases() {
    let folder = Folder::new("conditions");
    let a = folder.file("a.json", &recording("/one", &[(100, 10)]));
    let b = folder.file("b<1>.json", &recording("/one", &[(100, 10), (20, 11)]));
    for (condition, holds) in [
        ("live_peak<=+20%", true),
        ("live_peak<=+19.9%", false),
        ("live_peak<=+20MiB", true),
        ("live_peak<+20MiB", false),
        ("needs<=+1GiB", true),
        ("needs<=+0%", false),
        ("needs>=+1MiB", true),
        ("live_peak<=-1%", false),
    ] {
        let ended = run(&["diff", &a, &b, "--assert", condition, "--json"]);
        assert_eq!(ended.code, Some(i32::from(!holds)), "{condition}: {}", ended.stderr);
        let json = ended.json();
        let [assertion] = &list(&json["assertions"])[..] else { panic!("{json}") };
        assert_eq!(
            (&assertion["assertion"], &assertion["holds"]),
            (&condition.into(), &holds.into())
        );
        assert_eq!(assertion["difference_bytes"], 20 * MIB, "{condition}");
        let same = run(&["diff", &a, &a, "--assert", condition]);
        let of_same = !condition.contains(['-']) && !condition.contains(">=");
        assert_eq!(same.code, Some(i32::from(!of_same)), "{condition}: {}", same.stdout);
    }
    let junit = folder.path("junit.xml");
    let conditions = ["--assert", "live_peak<=+20%", "--assert", "needs<+1%", "--junit", &junit];
    let ended = fails(&[&["diff", &a, &b][..], &conditions].concat(), 1, "");
    let sentence = "No: B needs 120.0 MiB, A 100.0 MiB (+20.0 MiB, +20.0 %).";
    assert!(ended.stdout.contains(&format!("needs<+1%  {sentence}")), "{}", ended.stdout);
    let written = std::fs::read_to_string(&junit).unwrap();
    assert!(
        written.contains(r#"<testsuite name="stratalloc diff" tests="2" failures="1" errors="0">"#)
    );
    let passed =
        r#"<testcase classname="stratalloc diff.b&lt;1&gt; against a" name="live_peak&lt;=+20%"/>"#;
    assert!(written.contains(passed), "{written}");
    assert!(written.contains(&format!(r#"<failure message="{sentence}">"#)), "{written}");

    let conditions = ["--assert", "needs<=1GiB", "--fits", "50MiB", "--junit", &junit];
    fails(&[&["advise", "--quick", &a, &b][..], &conditions].concat(), 1, "");
    let written = std::fs::read_to_string(&junit).unwrap();
    assert!(
        written
            .contains(r#"<testsuite name="stratalloc advise" tests="4" failures="2" errors="0">"#)
    );
    let failed = r#"<testcase classname="stratalloc advise.a" name="needs&lt;=50MiB">"#;
    assert!(written.contains(failed), "{written}");
}

#[test]
fn wrong_arguments_and_wrong_files_are_refused() {
    let folder = Folder::new("refused");
    let content = recording("/one", &[(100, 10)]);
    let (a, b) = (folder.file("a.json", &content), folder.file("b.json", &content));
    fails(&["diff", &a], 2, "2 values required");
    fails(&["diff", &a, &b, &a], 2, "diff [OPTIONS] <A> <B>");
    fails(&["diff", &a, &b, "--assert", "needs<=1GiB"], 2, "a difference with its sign");
    fails(&["advise", &a, "--assert", "needs<=+1GiB"], 2, "expected a size");
    let over = ["--assert", "needs<=+1GiB", "--junit", &b];
    fails(&[&["diff", &a, &b][..], &over].concat(), 2, "would be written over the recording");
    for command in [&["diff", &a, &b][..], &["advise", &a]] {
        fails(&[command, &["--junit", "junit.xml"]].concat(), 2, "--assert adds one");
    }
    assert_eq!(std::fs::read_to_string(&b).unwrap(), content);
    let cut = folder.file("cut.json", &content[..content.len() / 2]);
    let mut zero = Made::default();
    zero.alloc(1 << 40, 0);
    let zero = folder.file("zero.json", &zero.json());
    let none = folder.file("none.json", r#"{"segments":[],"device_traces":[]}"#);
    for bad in [&cut, &zero, &none] {
        let ended = fails(&["diff", &a, bad], 2, "");
        let error = ended.stderr.lines().last().unwrap();
        assert!(error.starts_with(&format!("stratalloc: {bad}: ")), "{}", ended.stderr);
        assert_eq!(ended.stdout, "");
    }
    let help = ok(&["diff", "--help"]).stdout;
    assert!(help.contains("Example:\n  stratalloc diff "), "{help}");
}

/// Requests of few sizes in random order have many alignments. The time and the memory are bounded.
#[test]
fn names_are_shown_without_control_characters_and_requests_in_random_order_are_aligned() {
    let made = |seed: u64| {
        let (mut made, mut random) = (Made::default(), seed);
        made.segment(1 << 40, 20 * MIB);
        for _ in 0..20_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = (1 + (random >> 60)) * 512;
            let stack = frames(&[("train.py", 7, "step\\u001b[2J")]);
            made.alloc_with(1 << 40, bytes, &stack);
            made.free(1 << 40, bytes);
        }
        made.json()
    };
    let folder = Folder::new("random");
    let (a, b) = (folder.file("a.json", &made(1)), folder.file("b.json", &made(2)));
    let requests = &compared(&a, &b)["requests"];
    let count = |name: &str| requests[name].as_u64().unwrap();
    assert_eq!(count("same") + count("changed") + count("only_a"), 20_000);
    assert_eq!(count("same") + count("changed") + count("only_b"), 20_000);
    assert!(count("same") > 4_000 && count("places") > 100, "{}", count("same"));
    let ended = ok(&["diff", &a, &b]);
    assert!(ended.stdout.contains("train.py:7 step?[2J"), "{}", ended.stdout);
    assert!(!ended.stdout.contains('\u{1b}'));
}
