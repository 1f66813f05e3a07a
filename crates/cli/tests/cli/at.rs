//! `replay --at`: replays that begin with the layout in the middle of a recording.

use super::made::{MIB, Made};
use super::*;

#[test]
fn the_recorded_settings_go_on_as_recorded() {
    for (name, event) in [
        ("unet.expandable", 9_000),
        ("serve.default", 7_000),
        ("multistream.expandable", 3_000),
        ("llama_var.default", 20_000),
    ] {
        let (path, at) = (&trace(name), event.to_string());
        let row = ok(&["replay", path, "--at", &at, "--verify", "--json"]).json();
        assert_eq!(row["first_mismatch"], Value::Null, "{name}");
        let whole = ok(&["replay", path, "--json"]).json();
        let count = |row: &Value| row["allocations"].as_u64().unwrap();
        assert!(count(&row) > 0 && count(&row) < count(&whole), "{name}");
        assert_eq!(row["peak_reserved_bytes"], whole["peak_reserved_bytes"], "{name}");
    }
}

/// Right after its fifth event the recorded program has one segment of 40 MiB with a live block of 2 MiB.
#[test]
fn other_settings_go_on_with_the_layout_at_the_event() {
    let mut made = Made::default();
    let first = 1_u64 << 32;
    made.segment(first, 40 * MIB);
    made.alloc(first, 40 * MIB);
    made.free(first, 40 * MIB);
    made.alloc(first, 2 * MIB);
    made.alloc(first + 2 * MIB, 30 * MIB);
    made.segment(2 << 32, 60 * MIB);
    made.alloc(2 << 32, 60 * MIB);
    let folder = Folder::new("at");
    let file = folder.file("run.json", &made.json());
    let reserved = |args: &[&str]| {
        let row = ok(&[&["replay", &file, "--json"], args].concat()).json();
        row["peak_reserved_bytes"].as_u64().unwrap() / MIB
    };
    let rounded = ["--conf", "roundup_power2_divisions:8"];
    // Without the layout, the first block would have a segment of 20 MiB.
    let pages = ["--conf", "expandable_segments:True"];
    assert_eq!(reserved(&["--at", "5"]), 100);
    assert_eq!(reserved(&[&["--at", "5"][..], &rounded].concat()), 100);
    assert_eq!(reserved(&[&["--at", "5"][..], &pages].concat()), 100);
    let ended = ok(&["replay", &file, "--at", "5"]);
    let note = "note: run: at the event 1 block of 2.0 MiB lived and 40.0 MiB were reserved; replays start from \
                that layout";
    assert!(ended.stderr.starts_with(note), "{}", ended.stderr);
}

#[test]
fn an_event_that_is_none_is_refused() {
    let mut made = Made::default();
    made.segment(1 << 32, 20 * MIB);
    made.alloc(1 << 32, 2 * MIB);
    let folder = Folder::new("at-refused");
    let file = folder.file("run.json", &made.json());
    let log = "Thread,Time,Action,Pointer,Size,Stream\n0,0.1,allocate,0x1000,512,0\n";
    let log = folder.file("log.csv", log);
    fails(&["replay", &file, "--at", "2"], 2, "it has 2 events");
    fails(&["replay", &log, "--at", "0"], 2, "a log of requests shows no layout");
    fails(&["replay", &file, &file, "--at", "1"], 2, "of one trace");
    fails(&["replay", &file, "--at", "1", "--device", "host"], 2, "--at needs --device sim");
    ok(&["replay", &file, "--at", "1"]);
}
