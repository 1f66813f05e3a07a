//! Recordings that the tests write.

use stratalloc_recording::{Limits, Trace, TraceEvent, reader};

use super::super::made::Made;
use super::super::trace;
use crate::common::prelude::*;

pub(super) const HOSTILE: &str = "</script><img src=x onerror=alert(1)>";

fn snapshot(segments: &[String], traces: &[Vec<String>]) -> String {
    let traces: Vec<String> = traces.iter().map(|list| format!("[{}]", list.join(","))).collect();
    format!(
        r#"{{"segments":[{}],"device_traces":[{}],"allocator_settings":{{"PYTORCH_CUDA_ALLOC_CONF":""}}}}"#,
        segments.join(","),
        traces.join(",")
    )
}

fn event(action: &str, address: u64, size: u64) -> String {
    format!(r#"{{"action":"{action}","addr":{address},"size":{size},"stream":0}}"#)
}

/// Returns a recording whose stacks contain HTML markup.
pub(super) fn hostile() -> String {
    let text = serde_json::to_string(HOSTILE).expect("text is JSON");
    let frames = format!(
        r#","frames":[{{"filename":{text},"name":{text},"line":7}},{{"filename":"\u2028<!--","name":"&amp;<b>","line":1}}]"#
    );
    let (base, mut made) = (1 << 40, Made::default());
    made.segment(base, 20 * MIB);
    (0..6).for_each(|at| made.alloc_with(base + at * 3 * MIB, 3 * MIB, &frames));
    [1, 3].into_iter().for_each(|at| made.free(base + at * 3 * MIB, 3 * MIB));
    made.json().replacen('{', &format!("{{{},", account(&text)), 1)
}

/// Returns the key of an account of two devices. `owner` is a JSON text.
fn account(owner: &str) -> String {
    let row = |device: u32, owner: &str, bytes: i64| {
        format!(
            r#"{{"device":{device},"owner":{owner},"kind":"k","bytes":{bytes},"found_by":"f"}}"#
        )
    };
    let rows = [row(0, owner, 60 << 20), row(1, owner, 1), row(0, r#""unknown""#, -(20 << 20))];
    let rows = serde_json::to_string(&format!("[{}]", rows.join(","))).expect("text is JSON");
    format!(r#""account":{rows}"#)
}

/// Returns a recording with live blocks and without events.
pub(in super::super) fn without_history() -> String {
    let mut made = Made::default();
    made.segment(1 << 40, 20 * MIB);
    made.alloc(1 << 40, 3 * MIB);
    made.alloc((1 << 40) + 8 * MIB, 12 * MIB);
    made.forget_entries();
    made.json()
}

pub(super) fn two_devices() -> String {
    let base = 1 << 40;
    let list = |blocks: u64| {
        let mut events = vec![event("segment_alloc", base, 20 * MIB)];
        events.extend((0..blocks).map(|at| event("alloc", base + at * 2 * MIB, 2 * MIB)));
        events
    };
    snapshot(&[], &[list(3), list(6)])
}

fn segment(layout: &SegmentLayout) -> String {
    let blocks = layout.blocks.iter().map(|block| {
        let (size, requested, state) =
            (block.size_bytes, block.requested_bytes, block.state.name());
        format!(r#"{{"size":{size},"requested_size":{requested},"state":"{state}"}}"#)
    });
    format!(
        r#"{{"address":{},"total_size":{},"stream":{},"segment_type":"{}","segment_pool_id":[{},{}],"is_expandable":{},"blocks":[{}]}}"#,
        layout.address,
        layout.size_bytes,
        layout.stream.0,
        layout.kind.name(),
        layout.pool.capture,
        layout.pool.user,
        layout.expandable,
        blocks.collect::<Vec<_>>().join(",")
    )
}

/// Returns a recording with the second half of the events of a shipped one.
pub(super) fn cut(name: &str) -> String {
    let whole = reader::read(trace(name).as_ref(), &Limits::default())
        .expect("shipped recordings are sound");
    from(&whole, whole.events.len() / 2)
}

/// Returns the recording at a path without its first requests, and without what precedes the next one.
pub(in super::super) fn without_first(path: &str, requests: usize) -> String {
    let whole = reader::read(path.as_ref(), &Limits::default()).expect("the recording is sound");
    let mut all = whole.events.iter().enumerate().filter(|(_, event)| event.is_request());
    let (mut at, _) = all.nth(requests).expect("there are more requests");
    let is_segment = |event: &TraceEvent| event.reserved_change() != 0;
    while is_segment(&whole.events[at - 1]) {
        at -= 1;
    }
    from(&whole, at)
}

/// Returns a recording with the events from this one on.
fn from(whole: &Trace, at: usize) -> String {
    let events = whole.events[at..].iter().map(|event: &TraceEvent| {
        let (action, stream, time) = (event.action.name(), event.stream.0, event.time_us);
        let (address, size) = (event.address, event.size_bytes);
        let place = if event.action == Action::OutOfMemory { "device_free" } else { "addr" };
        format!(r#"{{"action":"{action}","{place}":{address},"size":{size},"stream":{stream},"time_us":{time}}}"#)
    });
    snapshot(&whole.segments.iter().map(segment).collect::<Vec<_>>(), &[events.collect()])
}

/// Returns a log of requests in RMM's format.
pub(super) fn log() -> String {
    let mut log = String::from("Thread,Time,Action,Pointer,Size,Stream\n");
    for at in 0..40_u64 {
        log += &format!(
            "1,00:00:{:02}.000000,allocate,{:#x},{},0\n",
            at % 60,
            (at + 1) << 24,
            3 * MIB
        );
        if at % 3 == 2 {
            log += &format!("1,00:00:{:02}.500000,free,{:#x},{},0\n", at % 60, at << 24, 3 * MIB);
        }
    }
    log
}
