//! Hints in an out-of-memory report: settings that might have helped.
//!
//! A hint either states that a setting would have made room, by the numbers at the time of the failure,
//! or that a setting may help. It does not consider how the setting would have changed earlier
//! allocations. The commands `replay` and `compare` test a setting on a recording.

use super::growth::{Growth, Refusal};
use super::pressure::LeastGrowth;
use crate::error::OutOfMemory;
use crate::heap::{BlockState, Heap};
use crate::ids::PoolId;
use crate::size::{
    MIB, MIN_BLOCK_BYTES, OWN_SEGMENT_MIN_BYTES, PoolKind, RoundupDivisions, SMALL_SEGMENT_BYTES,
    align_down, align_up, bytes_that_compare, human_bytes, segment_bytes,
};

/// Figures of the heaps that explain the failure.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HeapSummary {
    /// Free memory in heaps of other streams, in the request's pool.
    pub(super) streams: OutOfReach,
    /// Free memory in other pools.
    pub(super) pools: OutOfReach,
    /// True if the request's own heap has a fitting block now, when the report is made.
    pub(super) fits_now: bool,
    /// The page size for large blocks in expandable segments, if these are supported but off.
    page_bytes: Option<u64>,
    /// An estimate of the bytes that would stay reserved with expandable segments: all pages with a block
    /// in use, and all pages of pools that keep free memory.
    kept_bytes: u64,
    /// The requested bytes of the blocks in use.
    requested_bytes: u64,
    /// The size of the largest fixed segment of the request's own heap that is split.
    cut_segment_bytes: u64,
    /// The sum of the free blocks of expandable segments in the request's own heap. Counts only blocks
    /// that are large enough for a fixed segment of their own.
    own_segments_bytes: u64,
}

/// Cached memory in heaps that the request may not use.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OutOfReach {
    pub(super) cached_bytes: u64,
    /// True if one of these blocks is large enough for the request. In other pools, only blocks of the
    /// request's stream count.
    pub(super) fits: bool,
}

impl OutOfReach {
    /// Returns true if this memory would have been enough for `bytes`.
    fn is_enough(self, bytes: u64) -> bool {
        self.fits || self.cached_bytes >= bytes
    }
}

impl HeapSummary {
    /// Returns empty figures. `page_bytes` is given if the device supports expandable segments and they
    /// are off.
    pub(super) fn new(page_bytes: Option<u64>) -> Self {
        Self { page_bytes, ..Self::default() }
    }

    /// Adds the figures of one heap. Called for every heap of the device. `releases` is true if the
    /// heap's pool releases free memory before a request fails.
    pub(super) fn add_heap(&mut self, heap: &Heap, releases: bool, requested_bytes: u64) {
        self.requested_bytes += requested_bytes;
        if let Some(page_bytes) = self.page_bytes {
            let kept = kept_by_pages(heap, releases, page_bytes);
            self.kept_bytes = self.kept_bytes.saturating_add(kept);
        }
    }

    /// Adds the figures that are taken from the request's own heap only.
    pub(super) fn add_cut_segments(&mut self, heap: &Heap) {
        for head in heap.segment_heads() {
            let view = heap.view(head);
            let blocks = || heap.segment_blocks(head);
            if view.is_expandable {
                let alone = blocks().filter(|block| {
                    block.state == BlockState::Free && block.size_bytes >= OWN_SEGMENT_MIN_BYTES
                });
                self.own_segments_bytes += alone.map(|block| block.size_bytes).sum::<u64>();
            } else if view.is_split {
                let size_bytes: u64 = blocks().map(|block| block.size_bytes).sum();
                self.cut_segment_bytes = self.cut_segment_bytes.max(size_bytes);
            }
        }
    }
}

/// Returns the bytes that would stay reserved if the heap's segments were expandable, with the same
/// blocks.
fn kept_by_pages(heap: &Heap, releases: bool, large_page_bytes: u64) -> u64 {
    let mut kept = [0; 2];
    for head in heap.segment_heads() {
        let kind = heap.view(head).kind;
        let page_bytes = page_of(kind, large_page_bytes);
        // `paged`: the end of the last page that stays mapped. `end`: the end of the previous block.
        let (mut paged, mut end) = (0, 0u64);
        for block in heap.segment_blocks(head) {
            let start = end;
            end += block.size_bytes;
            if block.state != BlockState::Free || !releases {
                let first = align_down(start, page_bytes).max(paged);
                paged = align_up(end, page_bytes);
                kept[kind.index()] += paged - first;
            }
        }
        // The last page may extend past the end of the segment. Those bytes could serve the next segment.
        kept[kind.index()] -= paged.saturating_sub(end);
    }
    [PoolKind::Small, PoolKind::Large]
        .map(|kind| align_up(kept[kind.index()], page_of(kind, large_page_bytes)))
        .into_iter()
        .fold(0, u64::saturating_add)
}

/// Returns the page size for small or large blocks. The driver's granularity may be larger.
pub(super) fn page_of(kind: PoolKind, large_page_bytes: u64) -> u64 {
    match kind {
        PoolKind::Small => SMALL_SEGMENT_BYTES,
        PoolKind::Large => large_page_bytes,
    }
}

/// The facts about a failure.
pub(super) struct Why<'a> {
    pub(super) report: &'a OutOfMemory,
    pub(super) refusal: &'a Refusal,
    pub(super) summary: HeapSummary,
    pub(super) growth: &'a Growth,
    pub(super) least: LeastGrowth,
}

impl Why<'_> {
    /// Returns the hints that apply, the most certain first.
    pub(super) fn hints(&self) -> Vec<String> {
        let reasons = [
            self.forbidden(),
            self.too_little_space(),
            self.limit(),
            self.pages(),
            self.large_segment(),
            self.pieces(),
            self.other_streams(),
            self.other_pools(),
            self.rounding(),
            self.inflated(),
        ];
        reasons.into_iter().flatten().collect()
    }

    /// Returns the bytes that could still be allocated from the device under the limit, if the device
    /// reports its free memory.
    fn room(&self) -> Option<u64> {
        let report = self.report;
        let below = |limit: u64| limit.saturating_sub(report.reserved_bytes);
        Some(report.device_free_bytes?.min(report.limit_bytes.map_or(u64::MAX, below)))
    }

    fn forbidden(&self) -> Option<String> {
        matches!(self.refusal, Refusal::Forbidden).then(|| {
            "throw_on_cudamalloc_oom:True refused the request before the driver was called: raise \
             per_process_memory_fraction."
                .to_owned()
        })
    }

    fn too_little_space(&self) -> Option<String> {
        let Refusal::Reserve { reserve_bytes, class } = self.refusal else {
            return None;
        };
        if self.report.device_total_bytes.is_some_and(|total| self.report.rounded_bytes > total) {
            return None;
        }
        let (of, key) = match class {
            Some(class) => (
                format!("of this stream's class '{class}' "),
                "expandable_segments_reserve_by_class",
            ),
            None => (String::new(), "expandable_segments_reserve"),
        };
        Some(format!(
            "an expandable segment {of}reserves {}, and a request cannot span two: raise {key}.",
            bytes_that_compare(self.report.rounded_bytes, *reserve_bytes)(*reserve_bytes)
        ))
    }

    fn limit(&self) -> Option<String> {
        let (limit, free) = (self.report.limit_bytes?, self.report.device_free_bytes?);
        let (segment, h) = (self.report.segment_bytes, self.report.bytes_in_reason());
        (free >= segment && self.report.reserved_bytes + segment > limit).then(|| {
            format!(
                "the limit of {} refused the request, the device still has {} free: raise the \
                 memory fraction.",
                h(limit),
                h(free)
            )
        })
    }

    /// Explains that whole pages do not fit, if there is room for the request itself.
    fn pages(&self) -> Option<String> {
        let (room, report) = (self.room()?, self.report);
        let LeastGrowth { bytes, page_bytes: Some(page_bytes) } = self.least else { return None };
        if !(report.rounded_bytes..bytes).contains(&room) {
            return None;
        }
        let fixed = segment_bytes(report.rounded_bytes, self.growth.settings.large_segment_bytes);
        let remedy = if fixed <= room { "expandable_segments:False, or " } else { "" };
        let (count, h) = (bytes / page_bytes, bytes_that_compare(bytes, room));
        let pages = if count == 1 { "page" } else { "pages" };
        Some(format!(
            "the request needs {}: {count} {pages} of {}, and {} are left: {remedy}a larger memory \
             fraction or device.",
            h(bytes),
            human_bytes(page_bytes),
            h(room)
        ))
    }

    /// Suggests a smaller size for shared segments, if there is room for the request but not for a
    /// segment of the current size.
    fn large_segment(&self) -> Option<String> {
        let (room, report) = (self.room()?, self.report);
        let h = bytes_that_compare(room, report.segment_bytes);
        let mib = room / MIB;
        let fits = report.rounded_bytes <= mib * MIB && mib * MIB < report.segment_bytes;
        let is_shared = PoolKind::of(report.rounded_bytes) == PoolKind::Large
            && report.rounded_bytes < OWN_SEGMENT_MIN_BYTES
            && !self.growth.settings.expandable_segments;
        (fits && is_shared && mib * MIB > OWN_SEGMENT_MIN_BYTES).then(|| {
            format!(
                "{} are free, enough for the request, but a segment that requests share has {}: \
                 large_segment_size_mb:{mib} is smaller and may be enough.",
                h(room),
                h(report.segment_bytes)
            )
        })
    }

    /// Explains why cached memory did not serve the request: a block became free too late, or the memory
    /// is in pieces that are too small.
    fn pieces(&self) -> Option<String> {
        if self.summary.fits_now {
            let why = if self.growth.is_exact() {
                "a block that fits became free while other streams were waited for, and compat:pytorch \
                 does not search again"
            } else {
                "a block that fits became free in the meantime"
            };
            return Some(format!("{why}: the same request would succeed now."));
        }
        let (report, elsewhere) = (self.report, [self.summary.streams, self.summary.pools]);
        let all = report.cached_small_bytes + report.cached_large_bytes;
        let cached = all - elsewhere.iter().map(|there| there.cached_bytes).sum::<u64>();
        if cached >= report.rounded_bytes {
            let remedy = self.remedy();
            let cached = human_bytes(cached);
            return Some(format!(
                "{cached} are cached but cut into pieces that are too small: {remedy}."
            ));
        }
        let (cached, room) = self.may_be_joined()?;
        (room < report.rounded_bytes).then(|| {
            format!(
                "{} are cached in parts of segments, and {} are free: expandable_segments:True may \
                 join them.",
                human_bytes(cached),
                human_bytes(room)
            )
        })
    }

    /// Returns advice against fragmentation, which means free blocks between live blocks.
    fn remedy(&self) -> String {
        let (summary, rounded) = (self.summary, self.report.rounded_bytes);
        if self.may_be_joined().is_some() {
            return "expandable_segments:True may join them".to_owned();
        }
        let least = self.growth.settings.large_segment_bytes;
        let keeps_all = self.growth.settings.max_split_bytes.is_none();
        if keeps_all && summary.cut_segment_bytes > least && summary.cut_segment_bytes >= rounded {
            let (mib, cut) = (least.div_ceil(MIB), human_bytes(summary.cut_segment_bytes));
            return format!(
                "max_split_size_mb:{mib} may help, it keeps segments whole such as one of {cut}"
            );
        }
        if summary.own_segments_bytes >= rounded {
            let own = human_bytes(summary.own_segments_bytes);
            return format!(
                "expandable_segments:False may help, {own} of them could be segments of their own \
                 then and be released"
            );
        }
        "blocks in use separate them, so allocate long-lived blocks first".to_owned()
    }

    /// Returns the cached bytes of the default pool and the bytes that could still be allocated from the
    /// device, if expandable segments might have served the request. They might if there is room for both
    /// the pages that would stay mapped and the pages of the request. This is an estimate, because blocks
    /// would have been placed elsewhere.
    fn may_be_joined(&self) -> Option<(u64, u64)> {
        let (report, summary) = (self.report, self.summary);
        let page_bytes = summary.page_bytes?;
        if matches!(self.refusal, Refusal::Forbidden) {
            return None;
        }
        let room = self.room()?;
        let cached = report.cached_small_bytes + report.cached_large_bytes;
        let cached = cached.saturating_sub(report.cached_private_bytes);
        let page_bytes = page_of(PoolKind::of(report.rounded_bytes), page_bytes);
        let request = align_up(report.rounded_bytes, page_bytes);
        let has_room = summary.kept_bytes.saturating_add(request)
            <= report.reserved_bytes.saturating_add(room);
        (cached > 0 && has_room).then_some((cached, room))
    }

    fn other_streams(&self) -> Option<String> {
        let there = self.summary.streams;
        there.is_enough(self.report.rounded_bytes).then(|| {
            format!(
                "{} are cached for other streams, which this request cannot use: allocate on fewer \
                 streams.",
                human_bytes(there.cached_bytes)
            )
        })
    }

    fn other_pools(&self) -> Option<String> {
        let there = self.summary.pools;
        there.is_enough(self.report.rounded_bytes).then(|| {
            let (cached, pool) = (human_bytes(there.cached_bytes), self.report.pool);
            if pool == PoolId::DEFAULT {
                let remedy = if there.fits { "create them with use_on_oom, or " } else { "" };
                return format!("{cached} are cached in private pools: {remedy}release them.");
            }
            format!("{cached} are cached in other pools, which requests of pool {pool} cannot use.")
        })
    }

    /// Returns true if the request would have found a block or a segment without rounding.
    fn would_fit(&self, requested_bytes: u64) -> bool {
        let report = self.report;
        let bytes = align_up(requested_bytes, MIN_BLOCK_BYTES);
        let has_block = report.free.first().is_some_and(|largest| {
            let same = (largest.stream, largest.pool) == (report.stream, report.pool);
            same && largest.largest_bytes >= bytes
        });
        let segment = segment_bytes(bytes, self.growth.settings.large_segment_bytes);
        has_block || self.room().is_some_and(|room| room >= segment)
    }

    fn is_rounding(&self) -> bool {
        self.growth.policy_of(self.report.pool).roundup != RoundupDivisions::OFF
    }

    fn rounding(&self) -> Option<String> {
        let (requested, rounded) = (self.report.requested_bytes, self.report.rounded_bytes);
        let is_much = self.is_rounding() && rounded > requested.saturating_mul(5) / 4;
        (is_much && self.would_fit(requested)).then(|| {
            format!(
                "roundup_power2_divisions rounded {} up to {}: use more divisions or none.",
                human_bytes(requested),
                human_bytes(rounded)
            )
        })
    }

    /// Suggests how to make blocks smaller, if the blocks in use exceed their requested sizes by at least
    /// the missing bytes.
    fn inflated(&self) -> Option<String> {
        let report = self.report;
        let in_use = report.allocated_bytes.saturating_add(report.draining_bytes);
        let more = in_use.saturating_sub(self.summary.requested_bytes);
        let room = self.room()?;
        let missing = report.rounded_bytes.saturating_sub(room);
        if missing == 0 || more < missing {
            return None;
        }
        let keys = match (self.is_rounding(), self.growth.settings.max_split_bytes.is_some()) {
            (true, _) => "roundup_power2_divisions rounds them up: use more divisions or none",
            (false, true) => {
                "max_split_size_mb allocates large ones whole: try a lower max_non_split_rounding_mb \
                 or none of both"
            }
            (false, false) => return None,
        };
        let more = human_bytes(more);
        Some(format!("blocks in use have {more} more than was requested: {keys}."))
    }
}
