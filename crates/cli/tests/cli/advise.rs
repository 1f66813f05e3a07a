//! `advise`: the setting to use, the reason, and the stacks that hold the memory, as JSON and as text.

use super::made::{MIB, Made};
use super::*;

fn advised(args: &[&str]) -> Value {
    ok(&[&["advise", "--quick", "--json"][..], args].concat()).json()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no size"))
}

#[test]
fn the_setting_that_needs_least_is_named_and_runs_there() {
    let path = &trace("serve.default");
    let value = advised(&[path]);
    let (recorded, best) = (number(&value["recorded"]["needs_bytes"]), &value["best"]);
    let needs = number(&best["needs_bytes"]);
    assert!(recorded.abs_diff(2100 * MIB) < 32 * MIB && needs < 1520 * MIB, "{recorded} {needs}");
    let tried = value["tried"].as_array().unwrap();
    assert!(tried.iter().all(|tried| number(&tried["needs_bytes"]) >= needs));

    // The best setting was replayed, and replaying it again gives the same result.
    let conf = best["conf"].as_str().unwrap();
    let total = format!("{needs}B");
    let row = run(&["replay", path, "--conf", conf, "--total-memory", &total, "--json"]).json();
    assert_eq!((row["ooms"].as_u64(), &row["retries"]), (Some(0), &best["retries"]));
}

#[test]
fn causes_add_up_to_what_was_recorded() {
    let path = &trace("multistream.default");
    let json = advised(&[path]);
    let causes = &json["causes"];
    let peak_reserved = &causes["peak_reserved"];
    let kinds = [
        "requested_bytes",
        "rounding_bytes",
        "waiting_bytes",
        "split_rest_bytes",
        "idle_segment_bytes",
        "driver_bytes",
    ];
    let sum = |causes: &Value| kinds.iter().map(|kind| number(&causes[kind])).sum();
    let reserved: u64 = sum(peak_reserved);
    assert_eq!(
        (reserved, number(&peak_reserved["reserved_bytes"])),
        (2_187_329_536, 2_187_329_536)
    );
    let heaps = peak_reserved["heaps"].as_array().unwrap();
    assert_eq!(heaps.iter().map(sum).sum::<u64>(), reserved);
    assert_eq!(heaps.len(), 4);
    assert_eq!(json["holders"]["requested_bytes"], causes["requested_bytes"]);
    assert_eq!(causes["requested_bytes"], causes["live_peak_bytes"]);
    assert_eq!(causes["moment"], "peak of live bytes");
}

/// Returns a recording in which two call stacks keep blocks. One function name contains terminal escape
/// sequences.
fn recording_with_stacks() -> String {
    let frames = |function: &str, line: u32| {
        format!(
            r#""frames":[{{"filename":"lib/python3.12/site-packages/torch/nn.py","line":7,"name":"forward"}},
            {{"filename":"train.py","line":{line},"name":"{function}"}}]"#
        )
    };
    let mut made = Made::default();
    for (at, (function, line)) in
        (1_u64..).zip([("keep\\u001b[2J", 10), ("grow", 20), ("grow", 20)])
    {
        made.segment(at << 30, at * 30 * MIB);
        made.alloc_with(at << 30, at * 30 * MIB, &format!(",{}", frames(function, line)));
    }
    made.json()
}

#[test]
fn holders_are_named_by_the_users_own_frame_without_control_characters() {
    let folder = Folder::new("holders");
    let file = folder.file("job.json", &recording_with_stacks());
    let json = advised(&[&file]);
    let holders = json["holders"]["by_stack"].as_array().unwrap();
    let rows: Vec<_> =
        holders.iter().map(|h| (number(&h["requested_bytes"]), number(&h["blocks"]))).collect();
    assert_eq!(rows, [(150 * MIB, 2), (30 * MIB, 1)]);
    assert_eq!(holders[0]["asked_for_by"], "train.py:20 grow, in torch/nn.py:7 forward");
    assert_eq!(holders[0]["frames"].as_array().unwrap().len(), 2);

    let stdout = ok(&["advise", "--quick", &file]).stdout;
    assert!(stdout.contains("train.py:20 grow, in torch/nn.py:7 forward"), "{stdout}");
    assert!(stdout.contains("train.py:10 keep"), "{stdout}");
    assert!(!stdout.contains('\u{1b}'), "{stdout:?}");
}

/// Returns a recording with C++ stacks that begins with two live blocks of 40 MiB. Then each of 24
/// layers allocates a block and keeps it. Stacks of the same code differ in frames of the interpreter.
pub(super) fn recording_that_begins_late() -> String {
    let frame = |file: &str, line: u32, name: &str| {
        format!(r#"{{"filename":"{file}","line":{line},"name":"{name}"}}"#)
    };
    let eval = || frame("??", 0, "_PyEval_EvalFrameDefault");
    let stack = |odd: bool, own: &[(&str, u32, &str)], library: &[(&str, u32, &str)]| {
        let mut frames = vec![
            frame("??", 0, "torch::unwind::unwind()"),
            frame(
                "memory_snapshot.cpp",
                0,
                "torch::cuda::(anonymous namespace)::gather_with_cpp()",
            ),
            frame("CUDACachingAllocator.cpp", 0, "c10::cuda::CUDACachingAllocator::malloc(void**)"),
            frame("??", 0, "at::_ops::mul_Tensor::call(at::Tensor const&)"),
        ];
        let path = |part: &str, file: &str| format!("/home/me/project/{part}/{file}");
        for (file, line, name) in library {
            frames.push(frame(&path("lib/python3.12/site-packages", file), *line, name));
        }
        for (file, line, name) in own {
            frames.push(frame(&path("code", file), *line, name));
            frames.extend(odd.then(eval));
            frames.push(frame(
                &path("lib/python3.12/site-packages", "torch/nn/modules/module.py"),
                1790,
                "_call_impl",
            ));
        }
        frames.push(frame("??", 0, "_start"));
        format!(r#","frames":[{}]"#, frames.join(","))
    };
    let attention =
        [("nn.py", 6, "softmax"), ("model.py", 432, "attention"), ("train.py", 9, "main")];
    let linear =
        [("model.py", 39, "forward"), ("model.py", 399, "forward"), ("train.py", 9, "main")];
    let output =
        [("model.py", 39, "forward"), ("model.py", 257, "forward"), ("train.py", 9, "main")];
    let einsum = [("einops/einops.py", 939, "einsum")];
    let base = 1_u64 << 40;
    let mut made = Made::default();
    for at in 0..2 {
        made.segment(base + (at << 30), 40 * MIB);
        made.alloc(base + (at << 30), 40 * MIB);
    }
    made.forget_entries();
    for layer in 0..24 {
        let code = match layer % 4 {
            0 | 1 => stack(layer % 2 == 0, &attention, &[]),
            2 => stack(layer % 8 == 2, &linear, &einsum),
            _ => stack(false, &output, &einsum),
        };
        let (place, bytes) = (base + ((layer + 2) << 30), if layer % 4 == 3 { 4 } else { 6 });
        made.segment(place, 20 * MIB);
        made.alloc_with(place, bytes * MIB, &code);
    }
    made.json()
}

#[test]
fn the_code_of_the_program_is_named_at_the_peak_of_live_bytes_and_what_lived_before_comes_last() {
    let folder = Folder::new("late");
    let file = folder.file("job.json", &recording_that_begins_late());
    let json = advised(&[&file]);
    let rows = json["holders"]["by_stack"].as_array().unwrap();
    let list: Vec<(&str, u64, u64)> = rows
        .iter()
        .map(|row| {
            let (bytes, blocks) = (number(&row["requested_bytes"]), number(&row["blocks"]));
            (row["asked_for_by"].as_str().unwrap(), bytes / MIB, blocks)
        })
        .collect();
    let expected = [
        ("nn.py:6 softmax < model.py:432 attention", 72, 12),
        ("model.py:39 forward < model.py:399 forward, in einops/einops.py:939 einsum", 36, 6),
        ("model.py:39 forward < model.py:257 forward, in einops/einops.py:939 einsum", 24, 6),
        ("(lived before the recording began)", 80, 2),
    ];
    assert_eq!(list, expected);
    assert_eq!(rows[3]["lived_before"], true);
    let causes = &json["causes"];
    assert_eq!(
        (&causes["requested_bytes"], &causes["live_peak_bytes"]),
        (&(212 * MIB).into(), &(212 * MIB).into())
    );
    let machinery = ["unwind", "CachingAllocator", "_PyEval", "_ops::", "_call_impl", "_start"];
    // The function that shows a category is named where the category has its source.
    let printed = json.to_string().replace(r#" _call_impl","life""#, "");
    assert!(machinery.iter().all(|part| !printed.contains(part)), "{printed}");

    let plain = run(&["advise", "--quick", &file]).stdout;
    assert!(machinery.iter().all(|part| !plain.contains(part)), "{plain}");
    assert!(plain.contains("At the peak of live bytes, "), "{plain}");
    let all = run(&["advise", "--quick", "--all-frames", &file]).stdout;
    assert!(machinery.iter().all(|part| all.contains(part)), "{all}");
}

#[test]
fn a_device_that_is_too_small_shows_the_first_failure() {
    let folder = Folder::new("failure");
    let file = folder.file("job.json", &recording_with_stacks());
    let json = advised(&[&file, "--total-memory", "100MiB"]);
    assert_eq!(json["limit_bytes"], 100 * MIB);
    let failure = &json["causes"];
    assert_eq!(failure["moment"], "first failure");
    assert_eq!(
        (&failure["failed_bytes"], &failure["requested_bytes"]),
        (&(90 * MIB).into(), &(90 * MIB).into())
    );
    assert_eq!(json["holders"]["requested_bytes"], 90 * MIB);
    assert_eq!(json["best"]["needs_bytes"], 180 * MIB);
    let sentence = json["sentence"].as_str().unwrap();
    let begin = "No setting can help: the live bytes alone (180 MiB) exceed the limit";
    assert!(sentence.starts_with(begin), "{sentence}");
    let holder = "Largest holder: train.py:20 grow, in torch/nn.py:7 forward, 60.0 MiB in 1 block.";
    assert!(sentence.ends_with(holder), "{sentence}");
}

#[test]
fn a_bad_file_does_not_stop_the_others() {
    let folder = Folder::new("bad");
    let good = folder.file("good.json", &recording_with_stacks());
    let bad = folder.file("bad.json", "{");
    let output = fails(&["advise", "--quick", &bad, &good, "--format", "json"], 2, "bad.json");
    let value = output.json();
    assert_eq!(value["trace"], "good");
}

#[test]
fn a_bad_file_stops_no_other_of_a_comparison_or_a_replay() {
    let folder = Folder::new("others");
    let good = folder.file("good.json", &recording_with_stacks());
    let missing = folder.path("missing.pickle");
    for command in [&["replay"][..], &["compare", "--conf", "backend:native"]] {
        let output = fails(&[command, &["--json", &missing, &good]].concat(), 2, "missing.pickle");
        let row = output.json();
        assert_eq!(row["trace"], "good");
    }
}

#[test]
fn a_recording_comes_through_standard_input() {
    let output = run_with(&["replay", "-", "--json"], &recording_with_stacks());
    let row = output.json();
    assert_eq!((output.code, row["allocations"].as_u64()), (Some(0), Some(3)));
}
