//! `bench`: its output as JSON and as text.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use super::*;

#[test]
fn bench_prints_the_fixed_fields() {
    let row = ok(&["bench", "--conf", "backend:native", "--case", "pair:512B", "--json"]).json();
    let names: Vec<&str> = row.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["case", "threads", "conf", "device", "ns_per_op", "mops", "spread"]);
}

#[test]
fn bench_prints_configurations_side_by_side() {
    let confs = ["--conf", "backend:native", "--conf", "backend:native,expandable_segments:True"];
    let output =
        run(&[&["bench", "--case", "pair:512B", "--case", "pair_raw:512B"][..], &confs].concat());
    let printed = &output.stdout;
    let lines: Vec<Vec<&str>> =
        printed.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["case", "threads", "A", "B"], "{printed}");
    for (line, case) in lines[1..3].iter().zip(["pair:512B", "pair_raw:512B"]) {
        assert_eq!((line[0], line.len()), (case, 6), "{printed}");
        assert!(line[3].starts_with('±') && line[5].ends_with('%'), "{printed}");
    }
    assert_eq!(lines[3], ["A:", "backend:native", "on", "sim"], "{printed}");
    assert_eq!(
        lines[4],
        ["B:", "backend:native,expandable_segments:True", "on", "sim"],
        "{printed}"
    );
}

#[test]
fn bench_in_turns_answers_each_line_with_a_line() {
    let mut child = stratalloc()
        .args(["bench", "--turns", "--json", "--device", "sim", "--threads", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut requests, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut answers = BufReader::new(answers).lines();
    for (line, case, conf) in [
        ("floor:lock_pair", "floor:lock_pair", ""),
        ("pair:512B backend:native", "pair:512B", "backend:native"),
        ("mix_raw:4096live backend:cudaMallocAsync", "mix_raw:4096live", "backend:cudaMallocAsync"),
        ("pair:64KiB driver", "pair:64KiB", "driver"),
        ("holes:4096 backend:native", "holes:4096", "backend:native"),
        ("streams_raw:8 backend:native", "streams_raw:8", "backend:native"),
        ("serve:8 driver", "serve:8", "driver"),
    ] {
        writeln!(requests, "{line}").unwrap();
        let answer = answers.next().unwrap().unwrap();
        let row: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((row["case"].as_str(), row["conf"].as_str()), (Some(case), Some(conf)));
        assert!(row["ns_per_op"].as_f64().unwrap() > 0.0, "{answer}");
    }
    writeln!(requests, "holes:4096 driver").unwrap();
    assert_eq!(answers.next().unwrap().unwrap(), "null", "the driver alone has no such case");
    writeln!(requests, "pear:512B backend:native").unwrap();
    assert!(answers.next().is_none());
    let output = Ended::from(child.wait_with_output().unwrap());
    assert_eq!(output.code, Some(2));
    assert!(output.stderr.contains("\"pear:512B\""), "{}", output.stderr);
}
