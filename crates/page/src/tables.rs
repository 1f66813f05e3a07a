//! The tables of a page: the columns of the time line, the segments and the blocks, a list of numbers for
//! each column.

use serde::{Serialize, Serializer};

use super::rows::{BlockRow, Kept};
use super::stacks::{LIVED_BEFORE, StackTable};
use stratalloc::size::PoolKind;
use stratalloc_analysis::Layers;
use stratalloc_analysis::lives::{
    Block, Column, Heap, Lives, NEVER, Numbered, Segment, differences, fewer,
};

/// A table as named lists of numbers, one list for each column.
pub(super) struct Table(pub(super) Vec<(&'static str, Vec<i128>)>);

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, list)| (name, list)))
    }
}

/// The rows for blocks, as packed numbers.
#[derive(Serialize)]
pub(super) struct BlocksData {
    #[serde(flatten)]
    table: PackedTable,
    /// The values that many rows have in common; each row has the index of its values.
    kinds: Table,
    /// The rows that represent several blocks: index of the row and number of blocks.
    runs: Vec<(usize, u32)>,
}

/// A table as named lists of packed numbers.
struct PackedTable(Vec<(&'static str, String)>);

impl Serialize for PackedTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, list)| (name, list)))
    }
}

/// The digits of packed numbers.
const DIGITS: &[u8; 64] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";

/// Returns numbers as text, the lowest five bits of each first. A digit from 32 on is followed by another
/// digit of the same number. A number n is written as 2n, a negative one as -2n - 1.
pub(super) fn packed(numbers: impl Iterator<Item = i128>) -> String {
    let mut text = String::new();
    for number in numbers {
        let mut rest = ((number << 1) ^ (number >> 127)).cast_unsigned();
        loop {
            let digit = (rest & 31) as usize;
            rest >>= 5;
            let more = if rest > 0 { 32 } else { 0 };
            text.push(char::from(DIGITS[digit + more]));
            if rest == 0 {
                break;
            }
        }
    }
    text
}

/// Returns numbers as text, each as the difference from the previous one.
pub(super) fn differenced(numbers: impl Iterator<Item = u64>) -> String {
    let mut before = 0;
    packed(numbers.map(|number| i128::from(number) - std::mem::replace(&mut before, number.into())))
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
pub(super) fn base_and_unit(kept: &Kept<'_>) -> (u64, u64) {
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

pub(super) fn segments(
    kept: &Kept<'_>,
    base: u64,
    unit: u64,
    heaps: &mut Numbered<[u32; 2]>,
) -> Table {
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
    kept: &Kept<'_>,
    base: u64,
    unit: u64,
    heaps: &mut Numbered<[u32; 2]>,
    table: &StackTable,
    layers: &Layers,
) -> BlocksData {
    let rows = &kept.rows;
    let of = |what: &mut dyn FnMut(&Block) -> i128| packed(rows.iter().map(|row| what(&row.block)));
    let wait = |block: &Block| match block.freed {
        NEVER => 0,
        freed => span(freed, block.gone),
    };
    let unused = |block: &Block| i128::from(block.size_bytes) - i128::from(block.requested_bytes);
    let stack = |block: &Block| match block.stack {
        None if lives.lived_before(block) => LIVED_BEFORE,
        stack => table.place(stack),
    };
    let mut kinds: Numbered<[i128; 6]> = Numbered::default();
    let kind = packed(rows.iter().map(|BlockRow { block, at, .. }| {
        let layer = |of: &[u8]| {
            at.and_then(|at| of.get(at as usize)).map_or(-1, |layer| i128::from(*layer))
        };
        let Heap { stream, pool } = lives.heap(&block);
        let heap = heaps.number([stream, pool]);
        let size = block.size_bytes / unit;
        let layers = [layer(&layers.category_of), layer(&layers.line_of)];
        let [category, line] = layers;
        let kind = [size.into(), unused(&block), heap.into(), stack(&block).into(), category, line];
        kinds.number(kind).into()
    }));
    let table = PackedTable(vec![
        ("born", differenced(rows.iter().map(|row| row.block.born.into()))),
        ("life", of(&mut |block| span(block.born, block.freed))),
        ("wait", of(&mut |block| wait(block))),
        ("address", of(&mut |block| ((block.address - base) / unit).into())),
        ("kind", kind),
    ]);
    let names = ["size", "unused", "heap", "stack", "category", "line"];
    let column = |(at, name)| (name, kinds.items.iter().map(|kind| kind[at]).collect());
    let kinds = Table(names.into_iter().enumerate().map(column).collect());
    let runs = rows.iter().enumerate().filter(|(_, row)| row.blocks > 1);
    BlocksData { table, kinds, runs: runs.map(|(at, row)| (at, row.blocks)).collect() }
}
