//! Segments that one recording reserves and another does not, with the blocks that keep them.

use std::collections::HashMap;

use super::super::recording::Recording;
use super::peak::at_peak;
use stratalloc::config::Config;
use stratalloc::history::BlockStateName;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::PoolKind;
use stratalloc_recording::ReplayError;

/// A segment with at least one live block, at the peak of reserved bytes.
#[derive(Clone, Debug)]
pub(super) struct HeldSegment {
    pub(super) kind: PoolKind,
    pub(super) size_bytes: u64,
    pub(super) free_bytes: u64,
    pub(super) stream: StreamId,
    pub(super) pool: PoolId,
    /// The blocks that keep the segment, largest first. Freed blocks that wait for other streams are
    /// included.
    pub(super) blocks: Vec<KeepingBlock>,
}

/// A block that keeps its segment from being released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeepingBlock {
    /// The block's number in the workload; `None` if the block was freed and waits for other streams.
    pub(super) id: Option<u32>,
    pub(super) size_bytes: u64,
}

/// Returns the segments with live blocks at the peak of reserved bytes in a replay. Expandable segments are
/// left out: their free pages can be released one by one.
///
/// # Errors
///
/// The same as [`at_peak`].
pub(super) fn held_segments(
    recording: &Recording,
    config: &Config,
) -> Result<Vec<HeldSegment>, ReplayError> {
    let (layout, id_of) = at_peak(recording, config)?;
    let mut found = Vec::new();
    for segment in layout.iter().filter(|segment| !segment.expandable) {
        let kept = segment.blocks.iter().filter(|block| block.state != BlockStateName::Inactive);
        let block = |size_bytes, address: &u64| KeepingBlock {
            id: id_of.get(address).copied(),
            size_bytes,
        };
        let mut blocks: Vec<_> = kept.map(|kept| block(kept.size_bytes, &kept.address)).collect();
        if blocks.is_empty() {
            continue;
        }
        blocks.sort_by_key(|block| std::cmp::Reverse(block.size_bytes));
        found.push(HeldSegment {
            kind: segment.kind,
            size_bytes: segment.size_bytes,
            free_bytes: segment.bytes_in(&[BlockStateName::Inactive]),
            stream: segment.stream,
            pool: segment.pool,
            blocks,
        });
    }
    Ok(found)
}

/// Returns the segments of `b` that `a` has no counterpart for, those with most free bytes first. A
/// counterpart has the same size and kind, and its stream the same number; private pools are not
/// distinguished from each other. Of the segments of `b` with the same values, those with most free bytes
/// are returned.
pub(super) fn only_in_b<'a>(
    a: &[HeldSegment],
    b: &'a [HeldSegment],
    mut stream_number: impl FnMut(usize, StreamId) -> u32,
) -> Vec<&'a HeldSegment> {
    let mut class = |side, segment: &HeldSegment| {
        let is_private = segment.pool != PoolId::DEFAULT;
        (segment.size_bytes, segment.kind, is_private, stream_number(side, segment.stream))
    };
    let mut counts: HashMap<_, usize> = HashMap::new();
    a.iter().for_each(|segment| *counts.entry(class(0, segment)).or_default() += 1);
    let mut by_free: Vec<&HeldSegment> = b.iter().collect();
    by_free.sort_by_key(|segment| segment.free_bytes);
    let is_extra = |segment: &&HeldSegment| match counts.get_mut(&class(1, segment)) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    };
    let mut extra: Vec<&HeldSegment> = by_free.into_iter().filter(is_extra).collect();
    extra.sort_by_key(|segment| std::cmp::Reverse((segment.free_bytes, segment.size_bytes)));
    extra
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::size::MIB;

    #[test]
    fn of_equal_segments_those_with_most_free_bytes_have_no_counterpart() {
        let segment = |size: u64, free: u64, stream: u64| HeldSegment {
            kind: PoolKind::Large,
            size_bytes: size * MIB,
            free_bytes: free * MIB,
            stream: StreamId(stream),
            pool: PoolId::DEFAULT,
            blocks: Vec::new(),
        };
        let a = [segment(20, 1, 7), segment(20, 2, 7), segment(2, 0, 7)];
        let b = [segment(20, 19, 9), segment(20, 3, 9), segment(20, 4, 9), segment(6, 0, 9)];
        let extra = only_in_b(&a, &b, |_, _| 0);
        let found: Vec<_> =
            extra.iter().map(|s| (s.size_bytes / MIB, s.free_bytes / MIB)).collect();
        assert_eq!(found, [(20, 19), (6, 0)]);
        let other_stream = only_in_b(&a, &b, |side, _| u32::try_from(side).unwrap());
        assert_eq!(other_stream.len(), 4);
    }
}
