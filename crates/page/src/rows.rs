//! Chooses the moments that a page can show, and the rows of its tables.
//!
//! For a small recording every block and segment is kept, so the page can show every moment. For a
//! larger one, about two hundred moments are chosen, including the peaks and the failures. All blocks
//! and segments that live at these moments are kept. If that is still too much, adjacent small blocks
//! are merged into one row, separately for each moment.

use std::collections::HashSet;

use stratalloc_analysis::lives::{Block, FailedRequest, Lives, Segment};

/// The maximum number of rows of one recording on a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageLimits {
    /// The maximum number of rows for blocks.
    pub blocks: usize,
    /// The maximum number of rows for segments.
    pub segments: usize,
}

/// A row for the map: one block, or several adjacent small blocks with the free memory between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRow {
    /// The block. A merged row has the stream, the pool and the address of its first block, and the
    /// range of all.
    pub block: Block,
    /// The number of blocks in the row.
    pub blocks: u32,
    /// The index of the block in [`Lives::blocks`]; `None` for a merged row.
    pub at: Option<u32>,
}

impl BlockRow {
    fn of((at, block): (u32, &Block)) -> Self {
        Self { block: *block, blocks: 1, at: Some(at) }
    }
}

/// The rows for blocks, in the order of `born`.
#[derive(Debug)]
pub(crate) enum Rows<'a> {
    /// One for each block.
    All(&'a [Block]),
    /// Those that fit.
    Some(Vec<BlockRow>),
}

impl Rows<'_> {
    /// Returns the rows.
    pub(crate) fn iter(&self) -> impl Iterator<Item = BlockRow> + Clone {
        let (all, some): (&[Block], &[BlockRow]) = match self {
            Self::All(blocks) => (blocks, &[]),
            Self::Some(rows) => (&[], rows),
        };
        (0..).zip(all).map(BlockRow::of).chain(some.iter().copied())
    }
}

/// The part of a recording that is kept for the page.
#[derive(Debug)]
pub(crate) struct Kept<'a> {
    /// The moments that the page can show, in order. `None` if it can show every moment.
    pub moments: Option<Vec<u32>>,
    /// All rows.
    pub rows: Rows<'a>,
    /// All segments that are kept, in the order of `born`.
    pub segments: Vec<Segment>,
    /// The number of segments that live at one of the moments but did not fit.
    pub(crate) segments_left_out: usize,
    /// The number of segments that live at one of the moments but did not fit on the page.
    pub(crate) runs_left_out: usize,
}

/// The number of parts into which the time line is divided. For each part the page can show two moments:
/// the first, and the one with the most live bytes. The smaller number is used if blocks would have to
/// be merged with the larger one.
const PARTS: [usize; 2] = [100, 56];
/// The maximum number of failures that the page can show: half from the beginning, half from the end.
const FAILURES: usize = 20;

impl<'a> Kept<'a> {
    /// Returns true if some blocks were merged, or blocks or segments were left out.
    pub(crate) fn is_short(&self) -> bool {
        let is_joined = self.rows.iter().any(|row| row.blocks > 1);
        is_joined || self.segments_left_out + self.runs_left_out > 0
    }

    pub(crate) fn of(lives: &'a Lives, room: PageLimits) -> Self {
        if lives.blocks.len() <= room.blocks && lives.segments.len() <= room.segments {
            return Self {
                moments: None,
                rows: Rows::All(&lives.blocks),
                segments: lives.segments.clone(),
                segments_left_out: 0,
                runs_left_out: 0,
            };
        }
        let is_shown = |moments: &[u32]| {
            let shown = lives.blocks.iter().filter(|b| is_shown(moments, b.born, b.gone));
            shown.count() <= room.blocks
        };
        let mut moments = moments(lives, PARTS[0]);
        if !is_shown(&moments) {
            moments = self::moments(lives, PARTS[1]);
        }
        let (segments, segments_left_out) = segments(lives, &moments, room.segments);
        let (mut rows, runs_left_out) = rows(lives, &moments, room.blocks);
        rows.sort_by_key(|row| (row.block.born, row.block.address));
        let rows = Rows::Some(rows);
        Self { moments: Some(moments), rows, segments, segments_left_out, runs_left_out }
    }
}

/// Returns the moments that the page can show of a large recording.
fn moments(lives: &Lives, parts: usize) -> Vec<u32> {
    let mut moments = vec![0, lives.events, lives.peak_live.moment, lives.peak_reserved.moment];
    let failures = lives.failures.iter().map(|failure| failure.moment);
    moments.extend(failures.clone().take(FAILURES / 2));
    moments.extend(failures.rev().take(FAILURES / 2));
    let columns = &lives.columns.columns;
    for part in columns.chunks(columns.len().div_ceil(parts).max(1)) {
        let most = part.iter().max_by_key(|column| column.live_max_bytes);
        moments.extend(most.map(|column| column.live_peak_at));
    }
    // Moments at equal distances, for recordings whose live bytes hardly change.
    let step = |part: usize| u64::from(lives.events) * part as u64 / parts as u64;
    moments.extend((0..parts).filter_map(|part| u32::try_from(step(part)).ok()));
    moments.sort_unstable();
    moments.dedup();
    moments
}

/// Returns true if something with this lifetime lives at one of the moments.
fn is_shown(moments: &[u32], born: u32, gone: u32) -> bool {
    let at = moments.partition_point(|moment| *moment < born);
    moments.get(at).is_some_and(|moment| *moment < gone)
}

/// Returns the area of a row in the time line, which is its lifetime times its bytes.
fn area(lives: &Lives, born: u32, gone: u32, bytes: u64) -> u128 {
    u128::from(gone.min(lives.events + 1) - born.min(lives.events)) * u128::from(bytes)
}

fn segments(lives: &Lives, moments: &[u32], most: usize) -> (Vec<Segment>, usize) {
    let shown = lives.segments.iter().filter(|s| is_shown(moments, s.born, s.gone));
    let mut shown: Vec<Segment> = shown.copied().collect();
    let left_out = shown.len().saturating_sub(most);
    if left_out > 0 {
        shown.sort_by_key(|s| std::cmp::Reverse(area(lives, s.born, s.gone, s.size_bytes)));
        shown.truncate(most);
        shown.sort_by_key(|segment| segment.born);
    }
    (shown, left_out)
}

fn rows(lives: &Lives, moments: &[u32], most: usize) -> (Vec<BlockRow>, usize) {
    let one = |at: usize| BlockRow::of((u32::try_from(at).unwrap_or(0), &lives.blocks[at]));
    let mut shown: Vec<usize> = Vec::new();
    let mut others: Vec<usize> = Vec::new();
    for (at, block) in lives.blocks.iter().enumerate() {
        match is_shown(moments, block.born, block.gone) {
            true => shown.push(at),
            false => others.push(at),
        }
    }
    let areas = |all: &mut Vec<usize>, most: usize| {
        all.sort_by_cached_key(|&at| {
            let Block { born, freed, size_bytes, .. } = lives.blocks[at];
            std::cmp::Reverse(area(lives, born, freed, size_bytes))
        });
        all.truncate(most);
    };
    if shown.len() <= most {
        // The remaining rows are used for the largest blocks that live at none of the moments. The time
        // line draws them.
        areas(&mut others, most - shown.len());
        return (shown.into_iter().chain(others).map(one).collect(), 0);
    }
    areas(&mut others, most / 20);
    let alone = most / 2;
    shown.sort_by_cached_key(|&at| std::cmp::Reverse(lives.blocks[at].size_bytes));
    let (kept, small) = shown.split_at(alone);
    let mut rows: Vec<BlockRow> = kept.iter().chain(&others).map(|&at| one(at)).collect();
    let mut runs = runs(lives, moments, kept, small);
    let room = most.saturating_sub(rows.len());
    let left_out = runs.len().saturating_sub(room);
    if left_out > 0 {
        runs.sort_by_key(|run| std::cmp::Reverse(run.block.size_bytes));
        runs.truncate(room);
    }
    rows.extend(runs);
    (rows, left_out)
}

/// Merges adjacent small blocks at each moment. Blocks in `kept` stay separate.
fn runs(lives: &Lives, moments: &[u32], kept: &[usize], small: &[usize]) -> Vec<BlockRow> {
    let kept: HashSet<usize> = kept.iter().copied().collect();
    let mut by_address: Vec<(Block, bool)> = kept
        .iter()
        .map(|&at| (lives.blocks[at], true))
        .chain(small.iter().map(|&at| (lives.blocks[at], false)))
        .collect();
    by_address.sort_unstable_by_key(|(block, _)| block.address);
    let mut ends: Vec<(u64, u64)> = Vec::new();
    let mut runs = Vec::new();
    for &moment in moments {
        ends.clear();
        let there = lives.segments.iter().filter(|s| s.born <= moment && moment < s.gone);
        ends.extend(there.map(|s| (s.address, s.address.saturating_add(s.size_bytes))));
        ends.sort_unstable();
        let mut segments = ends.iter().peekable();
        let mut run: Option<(BlockRow, u64)> = None;
        for (block, is_kept) in &by_address {
            if block.born > moment || moment >= block.gone {
                continue;
            }
            while segments.peek().is_some_and(|(_, end)| *end <= block.address) {
                segments.next();
            }
            let end = segments.peek().map_or(u64::MAX, |(_, end)| *end);
            if *is_kept {
                runs.extend(run.take().map(|(row, _)| row));
                continue;
            }
            let joined = match &mut run {
                Some((row, of)) if *of == end && row.block.freed == freed_at(block, moment) => {
                    let to = block.address.saturating_add(block.size_bytes);
                    row.block.size_bytes = to.saturating_sub(row.block.address);
                    row.block.requested_bytes =
                        row.block.requested_bytes.saturating_add(block.requested_bytes);
                    row.blocks += 1;
                    true
                }
                _ => false,
            };
            if !joined {
                runs.extend(run.take().map(|(row, _)| row));
                let freed = freed_at(block, moment);
                let block = Block { born: moment, freed, gone: moment + 1, stack: None, ..*block };
                run = Some((BlockRow { block, blocks: 1, at: None }, end));
            }
        }
        runs.extend(run.take().map(|(row, _)| row));
    }
    runs
}

/// Returns the value of `freed` for a row that lives at one moment only, so that the row is live or
/// waiting as the block is.
fn freed_at(block: &Block, moment: u32) -> u32 {
    if moment < block.freed { moment + 1 } else { moment }
}

/// Returns the failures that the page lists: half of them are the first ones, half the last ones.
pub(crate) fn listed_failures(lives: &Lives, most: usize) -> impl Iterator<Item = &FailedRequest> {
    let ends = lives.failures.len().saturating_sub(most / 2);
    let is_listed = move |at: usize| at < most - most / 2 || at >= ends;
    let all = lives.failures.iter().enumerate();
    all.filter(move |(at, _)| is_listed(*at)).map(|(_, failure)| failure)
}
