//! Logs of requests in RMM's CSV format. If an input begins neither like a log nor like a compressed
//! file, the check adds the header, so that short inputs need none.
//!
//! The operations of a log must be equal after it is written and read again.

use std::fmt::Write as _;

use stratalloc_recording::reader::{Limits, read_bytes};
use stratalloc_recording::{Op, Trace, Workload};

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
        assert_eq!(Workload::of(&again, 0), Workload::of(&trace, 0), "{text}");
        assert!(trace.segments.is_empty() && trace.conf.is_empty());
    }
    recording::repeat(&trace);
}

fn log(trace: &Trace) -> String {
    let mut text = HEADER.to_owned();
    let Workload { ops, seeded, blocks, .. } = Workload::of(trace, 0);
    let mut requested = vec![(0, 0); blocks as usize];
    for (at, op) in ops.iter().enumerate() {
        let action = match op {
            Op::Allocate { id, bytes, stream, .. } => {
                requested[id as usize] = (bytes, stream.0);
                "allocate"
            }
            Op::AllocateFailing { id, bytes, stream } => {
                requested[id as usize] = (bytes, stream.0);
                "allocate failure"
            }
            Op::Free { .. } => "free",
            other => panic!("no log contains {other:?}"),
        };
        let id = op.block().expect("all of these operations have a block");
        // The log frees the blocks from before it, and does not allocate them.
        if at >= seeded as usize {
            let (size, stream) = requested[id as usize];
            let address = (u64::from(id) + 1) << 12;
            let _ = writeln!(text, "7,01:02:03.4,{action},{address:#x},{size},{stream:#x}");
        }
    }
    text
}
