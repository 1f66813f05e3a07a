//! Recordings of newer versions of PyTorch, and error messages that contain the recording's file name.

use super::made::{MIB, Made};
use super::*;

#[test]
fn entries_with_unknown_actions_are_counted_and_ignored() {
    let mut made = Made::default();
    made.segment(1 << 40, 20 * MIB);
    made.alloc(1 << 40, 3 * MIB);
    made.entry("teleport", 7, 7);
    made.alloc((1 << 40) + 3 * MIB, 3 * MIB);
    made.entry("fold\\u001b[2J", 7, 7);
    let folder = Folder::new("newer");
    let file = folder.file("newer.json", &made.json());
    let page = folder.path("page.html");
    for (command, prints) in [
        (&["advise", "--quick", "--json", &file][..], true),
        (&["replay", "--json", &file], true),
        (&["replay", "--verify", "--json", &file], true),
        (&["compare", "--conf", "backend:native", "--json", &file], true),
        (&["report", "--quick", &file, "-o", &page], false),
    ] {
        let output = run(command);
        let stderr = &output.stderr;
        assert_eq!(output.code, Some(0), "{command:?}: {stderr}");
        let note = "note: newer: 2 entries are ignored: unknown actions, the first \"teleport\"\n";
        assert_eq!(stderr, note, "{command:?}");
        if prints {
            let value = output.json();
            assert_eq!(value["unknown_entries"], 2, "{command:?}");
        }
    }
}

#[test]
fn errors_of_a_recording_name_its_file() {
    let mut zero = Made::default();
    zero.segment(1 << 40, 20 * MIB);
    zero.alloc(1 << 40, 0);
    let mut streams = Made::default();
    for at in 0..9000 {
        streams.on_stream(at);
        streams.alloc((1 << 40) + at * MIB, MIB);
    }
    let folder = Folder::new("named");
    for (name, made) in [("zero.json", zero), ("streams.json", streams)] {
        let file = folder.file(name, &made.json());
        let page = folder.path("page.html");
        for command in [
            &["advise", "--quick", &file][..],
            &["replay", &file],
            &["replay", "--verify", &file],
            &["compare", "--conf", "backend:native", &file],
            &["report", "--quick", &file, "-o", &page],
        ] {
            let output = run(command);
            let stderr = &output.stderr;
            assert_eq!(output.code, Some(2), "{command:?}");
            let error = stderr.lines().find(|line| line.starts_with("stratalloc: ")).unwrap();
            assert!(error.starts_with(&format!("stratalloc: {file}: ")), "{command:?}: {error}");
        }
    }
}

#[test]
fn annotations_are_marks_and_host_memory_is_a_line() {
    let mut made = Made::default();
    made.segment(1 << 40, 20 * MIB);
    made.alloc(1 << 40, 20 * MIB);
    made.annotate(1 << 40, 20 * MIB, "the weights");
    let host = r#","host_segments":[{"device":-1,"address":64,"total_size":4194304,"stream":0,
        "blocks":[{"address":64,"size":4194304,"state":"active_allocated"}]}],"host_traces":[]"#;
    let content = made.json();
    let content = format!("{}{host}}}", &content[..content.len() - 1]);
    let folder = Folder::new("annotated");
    let file = folder.file("annotated.json", &content);
    let sentence = "Pinned host memory: 4 MiB at most; 4 MiB at the end, 4 MiB of them live.";
    let output = run(&["advise", "--quick", &file]);
    assert_eq!(output.stderr, "");
    assert!(output.stdout.contains(sentence));
    let page = folder.path("page.html");
    ok(&["report", "--quick", &file, "-o", &page]);
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.contains(r#""annotations":[[2,"the weights",20971520]]"#));
    assert!(page.contains(sentence));
}
