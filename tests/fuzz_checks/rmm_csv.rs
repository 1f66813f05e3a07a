//! Logs of requests in RMM's CSV format. If an input begins neither like a log nor like a compressed
//! file, the check adds the header, so that short inputs need none.
//!
//! A log that was read must be equal after it is written and read again.

use std::fmt::Write as _;

use stratalloc::history::Action;
use stratalloc_recording::Trace;
use stratalloc_recording::reader::{Limits, read_bytes};

use super::recording;

const HEADER: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let whole = match bytes {
        [b'T' | 0x1f | 0x28 | 0x50..=0x5f | 0xfd, ..] => bytes.to_vec(),
        _ => [HEADER.as_bytes(), bytes].concat(),
    };
    let Some(trace) = recording::read(&whole) else { return };
    if trace.requests_only && trace.totals.is_none() {
        let text = log(&trace);
        let again = read_bytes("again", text.as_bytes(), &Limits::default(), None);
        let again = again.unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!(again, trace, "{text}");
        assert!(trace.segments.is_empty() && trace.conf.is_empty());
    }
    recording::repeat(&trace);
}

fn log(trace: &Trace) -> String {
    let mut text = HEADER.to_owned();
    for event in &trace.events {
        let action = match event.action {
            Action::Alloc => "allocate",
            Action::OutOfMemory => "allocate failure",
            Action::FreeRequested => "free",
            // The row of the free already implies that the free completes.
            Action::FreeCompleted => continue,
            other => panic!("no log contains {other:?}"),
        };
        let (address, size, stream) = (event.address, event.size_bytes, event.stream.0);
        let _ = writeln!(text, "7,01:02:03.4,{action},{address:#x},{size},{stream:#x}");
    }
    text
}
