//! The tables of a page: the columns of the time line, the segments and the blocks, a list of numbers for
//! each column.

use serde::{Serialize, Serializer};

use super::rows::Kept;
use super::stacks::{LIVED_BEFORE, StackTable};
use stratalloc::size::PoolKind;
use stratalloc_analysis::lives::{
    Block, Column, Lives, NEVER, Numbered, Segment, differences, fewer,
};

/// A table as named lists of numbers, one list for each column.
pub(super) struct Table(pub(super) Vec<(&'static str, Vec<i128>)>);

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, list)| (name, list)))
    }
}

#[derive(Serialize)]
pub(super) struct BlocksData {
    #[serde(flatten)]
    table: Table,
    /// The rows that represent several blocks: index of the row and number of blocks.
    runs: Vec<(usize, u32)>,
}

pub(super) fn columns_data(lives: &Lives, most: usize) -> Table {
    let all = &lives.columns;
    let columns = fewer(&all.columns, most);
    let of = |what: &dyn Fn(&Column) -> u64| differences(columns.iter().map(what));
    Table(vec![
        ("start", of(&|column| column.first.into())),
        ("time_us", of(&|column| column.time_us.saturating_sub(all.begin_us))),
        ("live_min", of(&|column| column.live_min_bytes)),
        ("live_max", of(&|column| column.live_max_bytes)),
        ("live_last", of(&|column| column.live_last_bytes)),
        ("live_peak", of(&|column| column.live_peak_at.into())),
        ("reserved_min", of(&|column| column.reserved_min_bytes)),
        ("reserved_max", of(&|column| column.reserved_max_bytes)),
        ("reserved_last", of(&|column| column.reserved_last_bytes)),
        ("total_max", of(&|column| column.total_max_bytes)),
        ("paused_last", of(&|column| column.paused_last_bytes)),
    ])
}

/// Returns the lowest address, and a common divisor of all relative addresses and sizes, by which they
/// are shortened.
pub(super) fn base_and_unit(kept: &Kept) -> (u64, u64) {
    let blocks = kept.rows.iter().map(|row| (row.block.address, row.block.size_bytes));
    let segments = kept.segments.iter().map(|segment| (segment.address, segment.size_bytes));
    let all = || blocks.clone().chain(segments.clone());
    let base = all().map(|(address, _)| address).min().unwrap_or(0);
    let is_aligned = all()
        .all(|(address, size)| (address - base).is_multiple_of(512) && size.is_multiple_of(512));
    (base, if is_aligned { 512 } else { 1 })
}

/// Returns the length of a lifetime, or -1 if it lasts to the end of the recording.
fn span(from: u32, to: u32) -> i128 {
    if to == NEVER { -1 } else { i128::from(to) - i128::from(from) }
}

pub(super) fn segments(kept: &Kept, base: u64, unit: u64, heaps: &mut Numbered<[u32; 2]>) -> Table {
    let all = &kept.segments;
    let of = |what: &mut dyn FnMut(&Segment) -> i128| all.iter().map(what).collect();
    Table(vec![
        ("born", differences(all.iter().map(|segment| segment.born.into()))),
        ("life", of(&mut |segment| span(segment.born, segment.gone))),
        ("address", of(&mut |segment| ((segment.address - base) / unit).into())),
        ("size", of(&mut |segment| (segment.size_bytes / unit).into())),
        ("heap", of(&mut |segment| heaps.number([segment.stream, segment.pool]).into())),
        ("large", of(&mut |segment| (segment.kind == PoolKind::Large).into())),
        ("expandable", of(&mut |segment| segment.expandable.into())),
    ])
}

pub(super) fn blocks(
    lives: &Lives,
    kept: &Kept,
    base: u64,
    unit: u64,
    heaps: &mut Numbered<[u32; 2]>,
    table: &StackTable,
) -> BlocksData {
    let rows = &kept.rows;
    let of =
        |what: &mut dyn FnMut(&Block) -> i128| rows.iter().map(|row| what(&row.block)).collect();
    let wait = |block: &Block| match block.freed {
        NEVER => 0,
        freed => span(freed, block.gone),
    };
    let unused = |block: &Block| i128::from(block.size_bytes) - i128::from(block.requested_bytes);
    let stack = |block: &Block| match block.stack {
        None if lives.lived_before(block) => LIVED_BEFORE,
        stack => table.place(stack),
    };
    let table = Table(vec![
        ("born", differences(rows.iter().map(|row| row.block.born.into()))),
        ("life", of(&mut |block| span(block.born, block.freed))),
        ("wait", of(&mut |block| wait(block))),
        ("address", of(&mut |block| ((block.address - base) / unit).into())),
        ("size", of(&mut |block| (block.size_bytes / unit).into())),
        ("unused", of(&mut |block| unused(block))),
        ("heap", of(&mut |block| heaps.number([block.stream, block.pool]).into())),
        ("stack", of(&mut |block| stack(block).into())),
    ]);
    let runs = rows.iter().enumerate().filter(|(_, row)| row.blocks > 1);
    BlocksData { table, runs: runs.map(|(at, row)| (at, row.blocks)).collect() }
}
