//! Pinned host memory: its code, rounding, idle memory and growth.

use super::made::{MIB, Made};
use super::*;

/// Adds pinned host memory to a recording of one request: its entries, and the blocks that are left, each
/// with its size, its requested bytes and its state.
fn with_host(entries: &[(&str, u64, u64)], blocks: &[(u64, u64, &str)]) -> String {
    let mut made = Made::default();
    made.segment(1 << 40, 20 * MIB);
    made.alloc(1 << 40, 20 * MIB);
    made.free(1 << 40, 20 * MIB);
    let mut recording: Value = made.json().parse().expect("it is JSON");
    let entry = |(action, address, mib): &(&str, u64, u64)| {
        let frames = serde_json::json!([{"filename": "loader.py", "line": 7, "name": "pin"}]);
        serde_json::json!({
            "action": action, "addr": address << 32, "size": mib * MIB, "stream": 0, "frames": frames
        })
    };
    let block = |(at, (mib, requested, state)): (u64, &(u64, u64, &str))| {
        let bytes = mib * MIB;
        let block =
            serde_json::json!({"size": bytes, "requested_size": requested * MIB, "state": state});
        serde_json::json!({
            "device": -1, "address": at << 32, "total_size": bytes, "stream": 0, "blocks": [block]
        })
    };
    recording["host_traces"] = entries.iter().map(entry).collect();
    recording["host_segments"] = (1..).zip(blocks).map(block).collect();
    recording.to_string()
}

fn host(file: &str) -> Value {
    ok(&["advise", "--quick", "--json", file]).json()["host"].take()
}

#[test]
fn code_idle_bytes_and_growth_of_pinned_memory_are_named() {
    let file = &case("torch215_pinned");
    let host = host(file);
    assert_eq!(host["reserved_bytes"], 960 * MIB);
    assert_eq!(host["live_bytes"], 704 * MIB);
    assert_eq!(host["idle_bytes"], 256 * MIB);
    assert_eq!(host["rounding_bytes"], Value::Null);
    let rows = host["at_end"].as_array().unwrap();
    let rows = rows.iter().map(|row| (row["bytes"].as_u64().unwrap() / MIB, &row["blocks"]));
    assert_eq!(rows.collect::<Vec<_>>(), [(320, &20.into()), (256, &1.into()), (128, &2.into())]);
    let text = ok(&["advise", "--quick", file]).stdout;
    for part in [
        "Pinned host memory: 960 MiB at most; 960 MiB at the end, 704 MiB of them live, 256 MiB idle.",
        "only the rounded sizes are recorded: up to half of the live bytes may be lost to rounding",
        " step, 320 MiB in 20 blocks;",
        " offload, 256 MiB in 1 block;",
        "The live bytes grew throughout: at least ",
        "At the peak of its live bytes (832 MiB): ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let folder = Folder::new("pinned-page");
    let page = folder.path("page.html");
    ok(&["report", "--quick", "-o", &page, file]);
    let page = std::fs::read_to_string(&page).unwrap();
    let notes = report::recordings(&page)[0]["notes"].to_string();
    assert!(notes.contains("step, 320 MiB in 20 blocks"), "{notes}");
}

#[test]
fn rounding_is_in_bytes_where_requests_are_recorded_and_a_cache_that_fills_does_not_grow() {
    let folder = Folder::new("pinned");
    let mut entries = Vec::new();
    for at in 1..9 {
        entries.push(("segment_alloc", at, 16));
        entries.push(("alloc", at, 16));
    }
    for _ in 0..30 {
        entries.extend(["free_requested", "free_completed", "alloc"].map(|action| (action, 8, 16)));
    }
    let blocks = [(16, 11, "active_allocated"); 8];
    let file = folder.file("steady.json", &with_host(&entries, &blocks));
    let steady = host(&file);
    assert_eq!(steady["rounding_bytes"], 40 * MIB);
    assert_eq!(steady["grew_to_bytes"], Value::Null);
    assert_eq!(steady["at_end"][0]["blocks"], 8);
    assert_eq!(steady["at_end"], steady["at_peak"]);
    let text = ok(&["advise", "--quick", &file]).stdout;
    assert!(text.contains("40.0 MiB of the live bytes were added by rounding."), "{text}");
    assert!(text.contains("loader.py:7 pin, 128 MiB in 8 blocks."), "{text}");
    assert!(!text.contains("grew") && !text.contains("may be lost"), "{text}");
    // Without entries, the code is unknown, and how to record it is stated.
    let bare = folder.file("bare.json", &with_host(&[], &blocks));
    assert_eq!(host(&bare)["at_end"][0]["asked_for_by"], Value::Null);
    let text = ok(&["advise", "--quick", &bare]).stdout;
    assert!(text.contains("_record_memory_history(record_pinned_host_memory=True)"), "{text}");
    // Blocks whose entries are lost have stacks of their own.
    let frames = r#""frames":[{"filename":"old.py","line":3,"name":"cache"}],"requested_size":"#;
    let own = with_host(&[], &blocks).replace(r#""requested_size":"#, frames);
    let own = ok(&["advise", "--quick", &folder.file("own.json", &own)]).stdout;
    assert!(own.contains("Live at the end: old.py:3 cache, 128 MiB in 8 blocks."), "{own}");
    // A block that lived before the entries began is part of the peak.
    let late = [("free_requested", 9, 64), ("free_completed", 9, 64), ("alloc", 8, 16)];
    let late = host(&folder.file("late.json", &with_host(&late, &blocks)));
    assert_eq!(late["peak_live_bytes"], (64 + 7 * 16) * MIB);
    assert_eq!(late["live_bytes"], 128 * MIB);
}
