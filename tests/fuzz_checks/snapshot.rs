//! Snapshots as pickle and JSON, plain and compressed: reads them and replays their requests on an
//! allocator.
//!
//! A snapshot that was read must be equal after it is written as JSON and read again.

use std::fmt::Write as _;

use stratalloc::history::{Action, SegmentLayout};
use stratalloc::ids::PoolId;
use stratalloc::size::PoolKind;
use stratalloc_recording::reader::{Limits, read_bytes};
use stratalloc_recording::{MissingEntries, Trace, TraceEvent};

use super::recording;

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let Some(trace) = recording::read(bytes) else { return };
    if !trace.requests_only && trace.totals.is_none() {
        let text = json(&trace);
        let again = read_bytes("again", text.as_bytes(), &Limits::default(), None);
        let again = again.unwrap_or_else(|error| panic!("{error}: {text}"));
        assert_eq!(sorted(again), sorted(trace.clone()), "{text}");
    }
    recording::repeat(&trace);
}

/// Returns the recording in a form for comparison. Sorts the segments by the text of their fields, because
/// their order has no meaning, and clears what `json` does not write: the figures of other devices, marks,
/// the numbers of all entries, and which entries were missing and are events now.
fn sorted(mut trace: Trace) -> Trace {
    (trace.devices, trace.marks) = (Vec::new(), Vec::new());
    (trace.entries, trace.entries_elsewhere) = (0, 0);
    trace.missing = MissingEntries::default();
    trace.segments.sort_by_key(|segment| format!("{:x?}", (segment.address, segment)));
    trace
}

fn json(trace: &Trace) -> String {
    let mut text = String::from("{\"segments\":[");
    list(&mut text, &trace.segments, |text, s| segment(text, s, trace.device));
    text.push_str("],\"device_traces\":[");
    if !trace.events.is_empty() {
        text.push_str(&"[],".repeat(trace.device as usize));
        text.push('[');
        list(&mut text, &trace.events, event);
        text.push(']');
    }
    let conf = serde_json::to_string(&trace.conf).expect("text is text");
    let _ = write!(text, "],\"allocator_settings\":{{\"PYTORCH_CUDA_ALLOC_CONF\":{conf}}}}}");
    text
}

fn list<T>(text: &mut String, items: &[T], mut item: impl FnMut(&mut String, &T)) {
    for (at, one) in items.iter().enumerate() {
        if at > 0 {
            text.push(',');
        }
        item(text, one);
    }
}

fn segment(text: &mut String, segment: &SegmentLayout, device: u32) {
    let kind = match segment.kind {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    };
    let PoolId { capture, user } = segment.pool;
    let _ = write!(
        text,
        "{{\"device\":{device},\"address\":{},\"total_size\":{},\"stream\":{},\
         \"segment_type\":\"{kind}\",\"segment_pool_id\":[{capture},{user}],\
         \"is_expandable\":{},\"blocks\":[",
        segment.address, segment.size_bytes, segment.stream.0, segment.expandable
    );
    list(text, &segment.blocks, |text, block| {
        let _ = write!(
            text,
            "{{\"address\":{},\"size\":{},\"requested_size\":{},\"state\":\"{}\"}}",
            block.address,
            block.size_bytes,
            block.requested_bytes,
            block.state.name()
        );
    });
    text.push_str("]}");
}

fn event(text: &mut String, event: &TraceEvent) {
    let place = if event.action == Action::OutOfMemory { "device_free" } else { "addr" };
    let _ = write!(
        text,
        "{{\"action\":\"{}\",\"{place}\":{},\"size\":{},\"stream\":{}",
        event.action.name(),
        event.address,
        event.size_bytes,
        event.stream.0
    );
    if let Some(PoolId { capture, user }) = event.named_pool() {
        let _ = write!(text, ",\"pool_id\":[{capture},{user}]");
    }
    if event.empty_cache {
        text.push_str(",\"user_metadata\":\"empty_cache\"");
    }
    text.push('}');
}
