//! Pinned host memory by the code that holds it. `words` has its sentences.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;

use super::callers::Callers;
use stratalloc_recording::{HostHolder, HostMemory};

/// Pinned host memory of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HostFigures {
    /// The bytes allocated from the system at the end of the recording.
    pub reserved_bytes: u64,
    /// The part of `reserved_bytes` that is in live blocks.
    pub live_bytes: u64,
    /// The part of `reserved_bytes` that is in no live block.
    pub idle_bytes: u64,
    /// The peak of the bytes allocated from the system.
    pub peak_reserved_bytes: u64,
    /// The peak of the bytes in live blocks.
    pub peak_live_bytes: u64,
    /// The bytes that rounding added to the blocks that live at the end; `null` if the recording has sizes
    /// after rounding only. Then up to half of `live_bytes` may be such bytes.
    pub rounding_bytes: Option<u64>,
    /// The code whose blocks live at the end, the one with the most bytes first.
    pub at_end: Vec<HostCode>,
    /// The code whose blocks lived at the peak of live bytes; empty without entries of the host.
    pub at_peak: Vec<HostCode>,
    /// The least live bytes in the second quarter of the entries, if they then grew from quarter to quarter.
    pub grew_from_bytes: Option<u64>,
    /// The least live bytes in the last quarter, likewise.
    pub grew_to_bytes: Option<u64>,
}

/// Blocks of pinned host memory that one code requested.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct HostCode {
    /// The label of the code; `null` for blocks whose stack was not recorded.
    pub asked_for_by: Option<String>,
    /// Their bytes, after rounding.
    pub bytes: u64,
    /// Number of blocks.
    pub blocks: u64,
}

impl HostFigures {
    /// Returns the figures with at most `most` rows of code for each moment.
    pub(crate) fn of(host: &HostMemory, callers: &Callers<'_>, most: usize) -> Self {
        Self {
            reserved_bytes: host.reserved_bytes,
            live_bytes: host.live_bytes,
            idle_bytes: host.reserved_bytes.saturating_sub(host.live_bytes),
            peak_reserved_bytes: host.peak_reserved_bytes,
            peak_live_bytes: host.peak_live_bytes,
            rounding_bytes: host.rounding_bytes,
            at_end: by_code(&host.at_end, callers, most),
            at_peak: by_code(&host.at_peak, callers, most),
            grew_from_bytes: host.growth.map(|growth| growth.from_bytes),
            grew_to_bytes: host.growth.map(|growth| growth.to_bytes),
        }
    }
}

fn by_code(holders: &[HostHolder], callers: &Callers<'_>, most: usize) -> Vec<HostCode> {
    let mut sums: BTreeMap<Option<u32>, (u64, u64)> = BTreeMap::new();
    for HostHolder { stack, bytes, blocks } in holders {
        let (sum, count) = sums.entry(stack.map(|stack| callers.of_stack(stack))).or_default();
        *sum = sum.saturating_add(*bytes);
        *count += blocks;
    }
    let mut rows: Vec<(Option<u32>, (u64, u64))> = sums.into_iter().collect();
    rows.sort_by_key(|(_, (bytes, _))| std::cmp::Reverse(*bytes));
    rows.truncate(most);
    let labels = callers.labels_of(rows.iter().map(|(caller, _)| *caller));
    let rows = rows.iter().zip(labels);
    let row = |(&(_, (bytes, blocks)), asked_for_by)| HostCode { asked_for_by, bytes, blocks };
    rows.map(row).collect()
}
