//! Logs in RMM's format: they are parsed as requests, and errors contain the line.

use std::io::Write;

use super::super::{Failure, Limits, read_bytes};
use crate::{Op, Trace, TraceError, Workload};
use stratalloc::history::Action;
use stratalloc::ids::StreamId;

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn read(text: &str) -> Result<Trace, TraceError> {
    read_bytes("log.csv", text.as_bytes(), &Limits::default(), None)
}

fn row(action: &str, rest: &str) -> String {
    format!("1,12:34:56.789012,{action},{rest}\n")
}

#[test]
fn a_log_becomes_the_requests_that_were_made() {
    let text = [
        HEADER.to_owned(),
        row("allocate", "0x7f0000000000,1000,0x0"),
        "22,01:02:03:000001,allocate,0x7f0000000400,5,0x55d0c0de\r\n".to_owned(),
        row("allocate failure", "(nil),99999999,0x55d0c0de"),
        row("free", "0x7f0000000000,1000,0x0"),
        row("free", "512,7,0"),
        row("allocate", "0x7f0000000000,8,2"),
    ]
    .concat();
    let trace = read(&text).unwrap();
    assert!(trace.requests_only);
    let actions: Vec<Action> = trace.each_event().map(|event| event.action).collect();
    assert_eq!((actions.len(), trace.event_count()), (8, 8));
    assert_eq!(actions[2], Action::OutOfMemory);
    let workload = Workload::of(&trace, 1 << 40);
    assert_eq!((workload.blocks, workload.seeded), (5, 1));
    assert_eq!(workload.streams(), [StreamId(0), StreamId(2), StreamId(0x55d0_c0de)]);
    let failed = Op::AllocateFailing { id: 3, bytes: 99_999_999, stream: StreamId(0x55d0_c0de) };
    assert!(workload.ops.iter().any(|op| op == failed), "{:?}", workload.ops);
    let frees: Vec<Op> = workload.ops.range(4..6).collect();
    assert_eq!(frees, [Op::Free { id: 1 }, Op::Free { id: 0 }]);

    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(text.as_bytes()).unwrap();
    let packed = packed.finish().unwrap();
    let again = read_bytes("log.csv.gz", &packed[..], &Limits::default(), None).unwrap();
    assert_eq!(again, trace);
}

#[test]
fn errors_have_their_line_number() {
    let long = row("free", &format!("{},1,0", "1".repeat(300)));
    let row = |rest: &str| format!("1,12:34:56.7,{rest}\n");
    for (rows, line, expected) in [
        (row("allocate,0x10,5"), 2, "six fields"),
        (row("allocate,0x10,5,0,0"), 2, "six fields"),
        (row("realloc,0x10,5,0"), 2, "allocate, allocate failure or free"),
        (row("allocate,0x,5,0"), 2, "a pointer"),
        (row("allocate,+5,5,0"), 2, "a pointer"),
        (row("allocate,0x1ffffffffffffffff,5,0"), 2, "a pointer"),
        (row("allocate,0x0,5,0"), 2, "a pointer that is not null"),
        (row("allocate,0x10,0,0"), 2, "a size"),
        (row("allocate,0x10,18446744073709551615,0"), 2, "a size"),
        (row("free,0x10,-1,0"), 2, "a size"),
        (row("free,0x10,1,stream"), 2, "a stream's handle"),
        (row("allocate,0x10,1,0") + &row("allocate,16,1,0"), 3, "the pointer of a new block"),
        (long, 2, "a line of at most 256 bytes"),
        ("1,0:00:00.0,free,1,1,0\n".to_owned(), 2, "a row of at least 23 bytes"),
    ] {
        let error = read(&format!("{HEADER}{rows}")).unwrap_err().to_string();
        let begins = format!("log.csv: line {line}: expected {expected}");
        assert!(error.starts_with(&begins), "{rows:?}: {error}");
    }
    let bytes = [HEADER.as_bytes(), b"1,\xff\xfe\n"].concat();
    let error = read_bytes("log.csv", &bytes[..], &Limits::default(), None).unwrap_err();
    assert!(error.to_string().contains("line 2: expected text in UTF-8"), "{error}");
    let error = read("Thread;Time\n").unwrap_err().to_string();
    assert!(error.starts_with("log.csv: line 1: expected Thread,Time,Action"), "{error}");
    let small = Limits { decoded_bytes: 10, ..Limits::default() };
    assert!(matches!(
        read_bytes("log.csv", HEADER.as_bytes(), &small, None),
        Err(TraceError { failure: Failure::TooLarge { .. }, .. })
    ));
}

#[test]
fn errors_repeat_nothing_that_a_terminal_would_obey() {
    for rows in
        ["1,12:34:56.7,free,\u{1b}[2J,1,0\n", "1,12:34:56.7,\u{1b}[31mfree,1,1,0\n", "\u{7}\n"]
    {
        for text in [format!("{HEADER}{rows}"), format!("Thread{rows}")] {
            let error = read(&text).unwrap_err().to_string();
            assert!(!error.contains(char::is_control), "{error:?}");
        }
    }
}

#[test]
fn a_block_that_was_freed_with_no_size_is_asked_for_all_the_same() {
    let trace = read(&format!("{HEADER}{}", row("free", "512,0,0"))).unwrap();
    let workload = Workload::of(&trace, 1 << 40);
    assert!(
        matches!(workload.ops.get(0), Some(Op::Allocate { bytes: 1, .. })),
        "{:?}",
        workload.ops
    );
}

#[test]
fn a_log_without_rows_asks_for_nothing() {
    assert_eq!(read(HEADER).unwrap().event_count(), 0);
    assert_eq!(read(HEADER.trim_end()).unwrap().event_count(), 0);
}
