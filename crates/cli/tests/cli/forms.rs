//! One run in every form that PyTorch has for it: `tests/forms`. What a form shows agrees with the snapshot.

use super::*;

fn form(name: &str) -> String {
    format!("{}/tests/forms/run.{name}", shared_library::root().display())
}

fn advised(name: &str) -> Value {
    ok(&["advise", "--quick", "--json", &form(name)]).json()
}

/// Returns the labels of the largest holders whose code is recorded.
fn holders(answer: &Value) -> Vec<String> {
    let rows = answer["holders"]["by_stack"].as_array().expect("a list");
    let rows = rows.iter().filter(|row| row["lived_before"] == false);
    rows.take(5).map(|row| row["asked_for_by"].as_str().expect("a label").to_owned()).collect()
}

#[test]
fn a_profile_and_a_snapshot_of_one_run_have_the_same_peak_and_holders() {
    let (snapshot, profile) = (advised("pickle.gz"), advised("trace.json.gz"));
    // The profiler records the sizes of blocks, so rounding counts as live.
    let main = &snapshot["causes"];
    let live = main["requested_bytes"].as_u64().expect("a number");
    let rounding = main["rounding_bytes"].as_u64().expect("a number");
    assert_eq!(profile["causes"]["requested_bytes"].as_u64(), Some(live + rounding));
    let peak = profile["totals"]["peak_allocated_bytes"].as_u64();
    assert_eq!(peak, Some(live + rounding));
    assert_eq!(profile["live_peak_bytes"].as_u64(), peak);
    let named = holders(&snapshot);
    assert_eq!(named.len(), 5, "{named:?}");
    assert_eq!(holders(&profile), named);
    let before = |answer: &Value| {
        let rows = answer["holders"]["by_stack"].as_array().expect("a list").clone();
        rows.iter()
            .find(|row| row["lived_before"] == true)
            .map(|row| row["requested_bytes"].clone())
    };
    assert!(before(&snapshot).is_some());
    assert_eq!(before(&profile), before(&snapshot));
    let lacks = profile["not_shown"].to_string();
    assert!(lacks.contains("streams") && !lacks.contains("with_stack"), "{lacks}");
}

#[test]
fn the_page_of_the_viewer_has_the_answer_of_its_snapshot() {
    let (mut snapshot, mut page) = (advised("pickle.gz"), advised("html.gz"));
    for answer in [&mut snapshot, &mut page] {
        answer["trace"] = Value::Null;
    }
    assert_eq!(page, snapshot);
}

#[test]
fn counters_and_timelines_give_their_totals_and_no_need() {
    let snapshot = advised("pickle.gz");
    let main = &snapshot["causes"];
    let bytes = |name: &str| main[name].as_u64().expect("a number");
    let allocated = bytes("requested_bytes") + bytes("rounding_bytes");
    for name in ["stats.json", "timeline.json.gz", "timeline.raw.json.gz"] {
        let answer = advised(name);
        assert_eq!(answer["headline"], "no history", "{name}");
        assert_eq!(answer["no_history"]["lack"], "totals");
        for none in ["causes", "live_peak_bytes", "least_need_bytes", "choice", "failures"] {
            assert_eq!(answer[none], Value::Null, "{name} {none}");
        }
        assert!(!answer["not_shown"].as_array().expect("a list").is_empty());
        let totals = &answer["totals"];
        // A timeline lacks the blocks that live through the whole trace.
        let unseen = if name == "stats.json" { 0 } else { 192 << 20 };
        assert_eq!(totals["peak_allocated_bytes"].as_u64(), Some(allocated - unseen), "{name}");
        let text = ok(&["advise", &form(name)]).stdout;
        let begins = [
            "This file is ",
            "torch.cuda.memory._record_memory_history()",
            "allocated at the peak",
        ];
        for words in begins.into_iter().chain(["The recording does not show:", "the code"]) {
            assert!(text.contains(words), "{name} lacks {words}: {text}");
        }
        assert!(!text.contains("This snapshot") && !text.contains("blocks hold"), "{text}");
        fails(&["advise", "--quick", "--fits", "80GiB", &form(name)], 2, "This file is ");
        fails(&["compare", &form(name)], 2, "This file is ");
        let folder = Folder::new("forms");
        let page = folder.path(&format!("{name}.html"));
        ok(&["report", "--quick", &form(name), "-o", &page]);
        let page = std::fs::read_to_string(page).expect("it was written");
        assert!(page.contains("\"totals\":[[\"allocated at the peak\","), "{name}");
        assert!(page.contains("allocated at most") && !page.contains("only what lived at the end"));
    }
    let stats = advised("stats.json");
    assert_eq!(stats["totals"]["peak_reserved_bytes"].as_u64(), Some(bytes("reserved_bytes")));
    assert_eq!((&stats["totals"]["failures"], &stats["totals"]["retries"]), (&0.into(), &0.into()));
}

#[test]
fn a_failed_request_of_a_log_shows_no_limit() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               1,12:34:56.7,allocate,0x7f0000000000,1048576,0x0\n\
               1,12:34:56.8,allocate failure,0x0,99999999,0x0\n\
               1,12:34:56.9,free,0x7f0000000000,1048576,0x0\n";
    let answer = run_with(&["advise", "--quick", "--json", "-"], log);
    let answer = answer.json();
    assert_eq!(answer["limit_bytes"], Value::Null);
    assert_ne!(answer["headline"], "cannot help");
}

#[test]
fn a_file_of_another_kind_is_named_with_what_to_record() {
    let text = "|      PyTorch CUDA memory summary, device ID 0      |\n";
    let ended = run_with(&["advise", "-"], text);
    assert_eq!(ended.code, Some(2));
    assert!(
        ended.stderr.contains("it is the text of torch.cuda.memory_summary()"),
        "{}",
        ended.stderr
    );
    assert!(ended.stderr.contains("_dump_snapshot"), "{}", ended.stderr);
}
