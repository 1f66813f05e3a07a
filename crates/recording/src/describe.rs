//! Formats allocator events and layouts for the message about the first difference between a replay and its
//! recording. Addresses and streams are hexadecimal with `0x`, sizes are decimal.

use stratalloc::history::{Action, BlockLayout, Event, SegmentLayout};
use stratalloc::ids::StreamId;

use super::trace::TraceEvent;

fn describe(action: Action, address: u64, size_bytes: u64, stream: StreamId) -> String {
    let (name, stream) = (action.name(), stream.0);
    match action {
        Action::OutOfMemory => {
            format!("{name} for {size_bytes} bytes on stream {stream:#x}, {address} bytes free")
        }
        _ => format!("{name} of {size_bytes} bytes at {address:#x} on stream {stream:#x}"),
    }
}

fn list(items: Vec<String>) -> String {
    if items.is_empty() { "nothing".to_owned() } else { format!("[{}]", items.join("; ")) }
}

/// Formats events of a replay.
pub(super) fn done(events: &[Event]) -> String {
    list(events.iter().map(|e| describe(e.action, e.address, e.size_bytes, e.stream)).collect())
}

/// Formats recorded events.
pub(super) fn recorded(events: &[TraceEvent]) -> String {
    list(events.iter().map(|e| describe(e.action, e.address, e.size_bytes, e.stream)).collect())
}

/// Formats a segment with all its blocks.
pub(super) fn layout(segment: &SegmentLayout) -> String {
    let SegmentLayout { address, size_bytes, stream, kind, pool, expandable, blocks, .. } = segment;
    let block = |b: &BlockLayout| {
        let (state, size, requested) = (b.state.name(), b.size_bytes, b.requested_bytes);
        format!("{state} of {size} bytes at {:#x}, {requested} requested", b.address)
    };
    let kind = kind.name();
    let more = if *expandable { ", expandable" } else { "" };
    let (capture, user, stream) = (pool.capture, pool.user, stream.0);
    format!(
        "{kind} segment of {size_bytes} bytes at {address:#x} on stream {stream:#x}, pool ({capture}, \
         {user}){more}: {}",
        list(blocks.iter().map(block).collect())
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::history::BlockStateName;
    use stratalloc::ids::PoolId;
    use stratalloc::size::PoolKind;

    #[test]
    fn sizes_are_numbers_and_addresses_look_like_such() {
        let (stream, pool) = (StreamId(0x40), PoolId::DEFAULT);
        let event =
            |action| Event { action, address: 0x20_0000, size_bytes: 200_000, stream, pool };
        assert_eq!(
            done(&[event(Action::SegmentAlloc), event(Action::OutOfMemory)]),
            "[segment_alloc of 200000 bytes at 0x200000 on stream 0x40; \
             oom for 200000 bytes on stream 0x40, 2097152 bytes free]"
        );
        assert_eq!(recorded(&[]), "nothing");
        let block = BlockLayout {
            address: 0x20_0000,
            size_bytes: 512,
            requested_bytes: 7,
            state: BlockStateName::Inactive,
        };
        let segment = SegmentLayout {
            address: 0x20_0000,
            size_bytes: 512,
            stream,
            kind: PoolKind::Small,
            pool,
            expandable: true,
            asleep: false,
            blocks: vec![block],
        };
        assert_eq!(
            layout(&segment),
            "small segment of 512 bytes at 0x200000 on stream 0x40, pool (0, 0), expandable: \
             [inactive of 512 bytes at 0x200000, 7 requested]"
        );
    }
}
