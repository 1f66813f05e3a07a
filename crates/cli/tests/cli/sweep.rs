//! `sweep`: groups of ranks, the one that differs, resumption, and agreement of its outputs.

use std::io::{BufRead, BufReader};

use super::diff::frames;
use super::made::{MIB, Made};
use super::*;

/// Returns a rank's recording: 12 requests by lines of `train.py`, of which every third is freed. Its
/// addresses, stream and times are those of the rank. The request number `odd`, from 0, is 8 MiB larger.
fn rank(rank: u64, odd: Option<u64>) -> String {
    let mut made = Made::default();
    let base = (rank + 1) << 40;
    for _ in 0..rank {
        made.entry("snapshot", 0, 0);
    }
    for line in 10..22 {
        let at = u64::from(line) - 10;
        made.on_stream(if at % 4 == 3 { 0x1000 * (rank + 1) } else { 0 });
        let bytes = (at + 2 + if odd == Some(at) { 8 } else { 0 }) * MIB;
        let address = base + (at << 32);
        made.segment(address, bytes);
        made.alloc_with(address, bytes, &frames(&[("train.py", line, "step")]));
        if at % 3 == 2 {
            made.free(address, bytes);
        }
    }
    made.json()
}

/// Writes eight ranks, of which number 5 differs, and a file that is no recording. Returns their paths.
fn ranks(folder: &Folder) -> Vec<String> {
    let file = |at| {
        let odd = (at == 5).then_some(7);
        folder.file(&format!("rank{at}.json"), &rank(at, odd))
    };
    let mut files: Vec<String> = (0..8).map(file).collect();
    files.insert(3, folder.file("broken.pickle", "no recording"));
    files
}

fn sweep(files: &[String], more: &[&str]) -> Ended {
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    run(&[&["sweep", "--quick"], more, &files[..]].concat())
}

/// Returns the lines of JSON that a sweep printed. Checks that the exit code is 2 if a recording has no
/// result, and otherwise 0.
fn lines(ended: &Ended) -> Vec<Value> {
    let lines = ended.stdout.lines().map(|line| line.parse().expect("each line is JSON"));
    let lines: Vec<Value> = lines.collect();
    let rows = lines.last().and_then(|last| last.get("rows")?.as_array());
    let lacks = rows.is_some_and(|rows| rows.iter().any(|row| row.get("error").is_some()));
    assert_eq!(ended.code, Some(if lacks { 2 } else { 0 }), "{}", ended.stderr);
    lines
}

fn result(files: &[String], more: &[&str]) -> Value {
    lines(&sweep(files, &[&["--json"], more].concat())).pop().expect("the results are last")
}

#[test]
fn ranks_with_equal_requests_are_one_group_and_the_odd_one_is_named() {
    let folder = Folder::new("sweep");
    let files = ranks(&folder);
    let lines = lines(&sweep(&files, &["--json", "--jobs", "3"]));
    assert_eq!(lines.len(), 9 + 2 + 1);
    let (found, rows) = (&lines[11], lines[11]["rows"].as_array().unwrap());
    let names: Vec<&str> = rows.iter().map(|row| row["recording"].as_str().unwrap()).collect();
    assert_eq!(names, files);
    assert!(rows[3]["error"].as_str().unwrap().contains("broken.pickle: "), "{}", rows[3]);
    let groups = found["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 2);
    assert_eq!(groups[0]["recordings"].as_array().unwrap().len(), 7);
    assert_eq!(groups[0]["difference"], Value::Null);
    assert_eq!(groups[1]["recordings"], serde_json::json!([files[6]]));
    assert_eq!(found["worst"], files[6].as_str());
    let [a, b] = [0, 1].map(|side| &groups[1]["difference"]["requests"][side]);
    // Each request has a segment, and every third a free: the eighth is behind 7 × 2 + 2 × 2 events.
    assert_eq!((&a["request"], &b["request"], &b["event"]), (&8.into(), &8.into(), &20.into()));
    assert_eq!((&a["bytes"], &b["bytes"]), (&(9 * MIB).into(), &(17 * MIB).into()));
    assert_eq!(b["requested_by"], "train.py:17 step");
    // The rows are those of `advise`.
    let advised = ok(&["advise", "--quick", "--json", &files[6]]).json();
    assert_eq!(rows[6]["needs_bytes"], advised["recorded"]["needs_bytes"]);
    // The lines that were printed before are those of the results.
    let of_groups: Vec<&Value> = lines.iter().filter(|line| line.get("group").is_some()).collect();
    assert_eq!(of_groups, groups.iter().collect::<Vec<_>>());
    let advice = &found["advice"];
    let conf = advice["conf"].as_str().unwrap();
    let compared = ok(&["compare", "--json", "--conf", conf, &files[6]]).json();
    assert_eq!(advice["needs_bytes"], compared["needs_bytes"]);
}

#[test]
fn the_table_the_json_and_the_page_agree() {
    let folder = Folder::new("sweep-table");
    let files = ranks(&folder);
    let page = folder.path("sweep.html");
    let ended = sweep(&files, &["--output", &page, "--conf", "max_split_size_mb:64"]);
    let found = result(&files, &["--conf", "max_split_size_mb:64"]);
    assert_eq!(ended.stdout.trim_end(), found["table"].as_str().unwrap());
    let mib = |bytes: &Value| bytes.as_f64().unwrap() / MIB as f64;
    let needs = [&found["groups"][1]["needs_bytes"], &found["advice"]["needs_bytes"]].map(mib);
    let row = ended.stdout.lines().find(|line| line.ends_with("(most)")).unwrap();
    assert!(
        row.trim_start().starts_with("1 ") && row.contains(&format!("{:.1}", needs[0])),
        "{row}"
    );
    let counted = "8 of 9 recordings (1 has no result)";
    let differs = "request 8 (event 20: 17,825,792 bytes, train.py:17 step) instead of request 8 (event 20: \
                   9,437,184 bytes, train.py:17 step)";
    let all = format!("in {:.1} MiB.", needs[1]);
    for text in [differs, counted, &all, "error: ", "broken.pickle"] {
        assert!(ended.stdout.contains(text), "{text}: {}", ended.stdout);
    }
    let html = std::fs::read_to_string(page).unwrap();
    for text in
        [differs, counted, "9 recordings in 2 groups", "1 could not be read", "broken.pickle"]
    {
        assert!(html.contains(text), "{text}: {html}");
    }
    assert!(html.len() < 50_000 && !html.contains("<script"), "{} bytes", html.len());
}

#[test]
fn names_from_files_are_text_on_the_page() {
    let folder = Folder::new("sweep-escape");
    let file = folder.file("<b>&rank.json", &rank(0, None));
    let page = folder.path("sweep.html");
    sweep(&[file], &["--output", &page]);
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("&lt;b&gt;&amp;rank.json") && !html.contains("<b>&rank"), "{html}");
}

#[test]
fn an_interrupted_sweep_goes_on_where_it_was() {
    let folder = Folder::new("sweep-state");
    let (files, state) = (ranks(&folder), folder.path("state"));
    let expected = result(&files, &[]);
    let entries = || std::fs::read_to_string(&state).unwrap().lines().count() - 1;
    // Ends as soon as a line was read, because the pipe is then closed.
    let mut command = stratalloc();
    command.args(["sweep", "--quick", "--json", "--jobs", "1", "--state", &state]).args(&files);
    let mut child = command.stdout(Stdio::piped()).spawn().expect("the program runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    child.wait().unwrap();
    assert!(entries() > 0);
    assert_eq!(result(&files, &["--state", &state]), expected);
    let whole = std::fs::read(&state).unwrap();
    let done = entries();
    // All work is done, so nothing is added.
    assert_eq!(result(&files, &["--state", &state]), expected);
    assert_eq!(entries(), done);
    for at in [whole.len() / 4, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&state, &whole[..at]).unwrap();
        let left = entries();
        assert_eq!(result(&files, &["--state", &state]), expected);
        // An incomplete last line stays in the file.
        assert!(left <= done && [done, done + 1].contains(&entries()), "{left} of {done}");
    }
    // Other options and changed files have keys of their own.
    std::fs::write(&state, &whole).unwrap();
    result(&files, &["--state", &state, "--total-memory", "1GiB"]);
    assert_eq!(entries(), 2 * done);
    std::fs::write(&state, &whole).unwrap();
    folder.file("rank0.json", &rank(0, Some(2)));
    let changed = result(&files, &["--state", &state]);
    assert_eq!(changed["groups"].as_array().unwrap().len(), 3);
    assert_eq!(changed, result(&files, &[]));
}

#[test]
fn files_that_cannot_be_used_are_refused() {
    let folder = Folder::new("sweep-refused");
    let (file, broken) = (folder.file("rank.json", &rank(0, None)), folder.file("broken", "none"));
    let foreign = folder.file("notes.txt", "some notes\n");
    fails(&["sweep", "--state", &foreign, &file], 2, "not written by `sweep`");
    assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "some notes\n");
    fails(&["sweep", "--state", &file, &file], 2, "would be written over the recording");
    fails(&["sweep", "--output", &file, &file], 2, "would be written over the recording");
    let new = folder.path("new");
    for [state, output] in [[&new, &new], [&foreign, &foreign]] {
        let args = ["sweep", "--state", state, "--output", output, &file];
        fails(&args, 2, "--state and --output name the same file");
    }
    fails(&["sweep", "--state", &new, &new], 2, "would be written over the recording");
    assert!(!Path::new(&new).exists());
    fails(&["sweep", "-"], 2, "not standard input");
    fails(&["sweep", "--output", "-", "--json", &file], 2, "to a file only");
    fails(&["sweep", "--jobs", "0", &file], 2, "");
    let all_broken = run(&["sweep", "--json", &broken, "no/such/file"]);
    assert_eq!(all_broken.code, Some(2), "{}", all_broken.stderr);
    assert!(all_broken.stdout.contains("no/such/file: "), "{}", all_broken.stdout);
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let files = [trace("llama_var.default")];
    let one = result(&files, &["--jobs", "1"]);
    for jobs in ["2", "3"] {
        assert_eq!(result(&files, &["--jobs", jobs]), one, "{jobs}");
    }
}

/// Replaces the contents of a file. Its length and its time stay the same.
fn damage(path: &str) {
    let metadata = std::fs::metadata(path).expect("the file exists");
    let length = usize::try_from(metadata.len()).expect("it is short");
    std::fs::write(path, " ".repeat(length)).expect("it can be written");
    let file = std::fs::File::options().write(true).open(path).expect("it can be written");
    let modified = metadata.modified().expect("files have times");
    file.set_modified(modified).expect("the time can be set");
}

#[test]
fn the_next_recording_of_a_group_is_analysed_if_the_first_cannot_be_read_again() {
    let folder = Folder::new("sweep-next");
    let (files, state) = (ranks(&folder), folder.path("state"));
    lines(&sweep(&files, &["--part", "files", "--state", &state]));
    damage(&files[0]);
    let ended = sweep(&files, &["--json", "--state", &state]);
    assert!(ended.stderr.contains("rank0.json cannot be read again: "), "{}", ended.stderr);
    let found = lines(&ended).pop().unwrap();
    let expected = result(&files[1..], &[]);
    for key in ["worst", "advice"] {
        assert_eq!(found[key], expected[key]);
    }
    assert_eq!(found["groups"][0]["sentence"], expected["groups"][0]["sentence"]);
    assert_eq!(found["groups"][1], expected["groups"][1]);
}

#[test]
fn without_a_comparison_the_advice_is_still_given() {
    let folder = Folder::new("sweep-uncompared");
    let (mut files, state) = (ranks(&folder), folder.path("state"));
    result(&files, &["--state", &state]);
    damage(&files[0]);
    files.push(folder.file("rank8.json", &rank(8, Some(4))));
    let ended = sweep(&files, &["--json", "--state", &state]);
    let found = lines(&ended).pop().unwrap();
    assert!(ended.stderr.contains("rank8.json is not compared: "), "{}", ended.stderr);
    let groups = found["groups"].as_array().unwrap();
    assert_eq!(groups.len(), 3);
    assert!(groups.iter().all(|group| group.get("error").is_none()), "{found}");
    assert_eq!(groups[2]["difference"], Value::Null);
    assert_ne!(groups[1]["difference"], Value::Null);
    assert_ne!(found["advice"], Value::Null);
}

#[test]
fn a_request_by_other_code_is_no_difference() {
    let folder = Folder::new("sweep-code");
    let odd = rank(2, Some(7)).replacen("train.py", "other.py", 1);
    let files = [rank(0, None), rank(1, None), odd];
    let files = [0, 1, 2].map(|at| folder.file(&format!("rank{at}.json"), &files[at]));
    let found = result(&files, &[]);
    assert_eq!(found["groups"][1]["difference"]["requests"][1]["request"], 8);
}

#[test]
fn ranks_with_other_free_bytes_at_a_failed_request_are_one_group() {
    let folder = Folder::new("sweep-failed");
    let files = [5, 6].map(|free| {
        let mut made = Made::default();
        made.segment(1 << 40, 40 * MIB);
        made.alloc(1 << 40, 40 * MIB);
        made.out_of_memory(80 * MIB, free * MIB + 512);
        folder.file(&format!("free{free}.json"), &made.json())
    });
    assert_eq!(result(&files, &[])["groups"].as_array().unwrap().len(), 1);
}
