//! The data of one recording in the format of the page. `docs/report.md` describes every field. The
//! page's bytes are divided among the tables. If the resulting text is too long, it is built again with
//! less detail.

use std::collections::HashMap;

use serde::{Serialize, Serializer};

use super::headline::Headline;
use super::holders::{Holder, Holders};
use super::rows::{Kept, PageLimits};
use super::stacks::{LIVED_BEFORE, StackTable, Stacks};
use super::words::{AdviceData, NeedsData};
use stratalloc::ids::PoolId;
use stratalloc::size::PoolKind;
use stratalloc_analysis::lives::Numbered;
use stratalloc_analysis::lives::{Block, Lives, NEVER, Peak, Segment, differences};
use stratalloc_analysis::lives::{Column, fewer};
use stratalloc_analysis::{Callers, Category, Compared, Limit, Moment, counted_as};
use stratalloc_recording::{Annotation, NoHistory, Owner, StackId, Trace};

/// The inputs of a sheet.
pub(crate) struct Parts<'a> {
    pub name: &'a str,
    pub notes: &'a [String],
    pub trace: &'a Trace,
    pub lives: &'a Lives,
    pub no_history: Option<NoHistory>,
    pub limit: Option<Limit>,
    pub advice: &'a AdviceData,
    pub needs: &'a NeedsData,
}

#[derive(Serialize)]
struct Sheet<'a> {
    name: &'a str,
    device: u32,
    conf: &'a str,
    notes: Vec<String>,
    events: u32,
    requests: u64,
    has_times: bool,
    duration_us: u64,
    no_history: Option<NoHistory>,
    limit: Option<Limit>,
    peak_reserved: Option<Peak>,
    peak_live: Option<Peak>,
    columns: Table,
    failures: FailuresData,
    /// The moment, the text and the bytes of the block, for each annotation.
    annotations: Vec<(u32, String, u64)>,
    /// The owners of the used memory at the end.
    account: Vec<Owner>,
    moments: Option<Vec<u32>>,
    base: String,
    unit: u64,
    streams: Vec<String>,
    pools: Vec<PoolData>,
    /// Pairs of a stream and a pool, as indices.
    heaps: Vec<[u32; 2]>,
    /// Whether some moment's map lacks blocks or segments, or has merged ones.
    is_short: bool,
    segments: Table,
    blocks: BlocksData,
    stacks: Stacks,
    holders: Vec<HoldersData>,
    headline: &'a Headline,
    advice: &'a AdviceData,
    needs: &'a NeedsData,
}

/// A table as named lists of numbers, one list for each column.
struct Table(Vec<(&'static str, Vec<i128>)>);

impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, list)| (name, list)))
    }
}

#[derive(Serialize)]
struct FailuresData {
    total: usize,
    /// For each failure: moment, bytes, index of the stream, index of the stack or -1, free bytes of the
    /// device.
    list: Vec<(u32, u64, u32, i64, u64)>,
}

#[derive(Serialize)]
struct PoolData {
    name: String,
    private: bool,
}

#[derive(Serialize)]
struct BlocksData {
    #[serde(flatten)]
    table: Table,
    /// The rows that represent several blocks: index of the row and number of blocks.
    runs: Vec<(usize, u32)>,
}

#[derive(Serialize)]
struct HoldersData {
    name: &'static str,
    moment: u32,
    bytes: u64,
    blocks: u64,
    by_stack: bool,
    /// For each holder: index of the stack (or -1, -2, -3), index of the stream, bytes of each block or
    /// 0, number of blocks, their bytes, and how many events ago the newest and the oldest block was
    /// requested.
    list: Vec<(i64, u32, u64, u64, u64, u32, u32)>,
    /// The bytes of the holders that are not in the list.
    rest_bytes: u64,
    rest_blocks: u64,
    /// Category, bytes and number of blocks, if stacks are recorded. The last row has the blocks from
    /// before the recording.
    categories: Vec<(&'static str, u64, u64)>,
}

/// How much detail the data of a recording has.
#[derive(Clone, Copy)]
struct Detail {
    columns: usize,
    room: PageLimits,
    stack_bytes: usize,
    holders: usize,
    failures: usize,
    texts: usize,
}

impl Detail {
    /// Divides `bytes` among the tables. A row for a block takes about 40 bytes.
    fn of(bytes: usize) -> Self {
        Self {
            columns: (bytes / 400).clamp(32, COLUMNS),
            room: PageLimits { blocks: bytes * 6 / 10 / 42, segments: bytes / 10 / 36 },
            stack_bytes: bytes / 6,
            holders: (bytes / 4000).clamp(4, 300),
            failures: (bytes / 2000).clamp(4, 500),
            texts: (bytes / 100).clamp(200, 4000),
        }
    }
}

/// The maximum number of columns of a time line.
pub(crate) const COLUMNS: usize = 8192;

/// The maximum number of owners in the account.
const OWNERS: usize = 64;

/// Returns the data as text for a script element, at most `most` bytes long. `None` if it does not fit
/// even with the least detail.
pub(crate) fn sheet(parts: &Parts<'_>, most: usize) -> Option<String> {
    let callers = Callers::of(&parts.trace.stacks, Compared::Code);
    let headline = headline(parts, &callers);
    let mut bytes = most;
    let mut found: Option<String> = None;
    while bytes >= 1024 {
        let (text, is_short) = as_text(parts, &callers, &headline, &Detail::of(bytes));
        let fitting = scaled(bytes, most / 20 * 19, text.len());
        if text.len() > most {
            // The estimate can be too low, because escaping makes hostile texts up to six times longer.
            if found.is_some() {
                return found;
            }
            bytes = fitting.min(bytes / 10 * 9);
            continue;
        }
        let has_grown = found.is_some();
        found = Some(text);
        // If the rows took less space than estimated, build the text once more with more rows.
        if has_grown || !is_short || fitting < bytes / 5 * 6 {
            break;
        }
        bytes = fitting;
    }
    found
}

/// Returns `bytes` times `most` divided by `taken`, at most four times `bytes`.
fn scaled(bytes: usize, most: usize, taken: usize) -> usize {
    let product = bytes as u128 * most as u128 / (taken as u128 + 1);
    usize::try_from(product).unwrap_or(bytes).min(4 * bytes)
}

/// Escapes JSON so that it cannot end the script element. The result is equivalent JSON.
pub(crate) fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len() + json.len() / 64);
    for sign in json.chars() {
        match sign {
            '<' => text.push_str("\\u003c"),
            '>' => text.push_str("\\u003e"),
            '&' => text.push_str("\\u0026"),
            '\u{2028}' => text.push_str("\\u2028"),
            '\u{2029}' => text.push_str("\\u2029"),
            _ => text.push(sign),
        }
    }
    text
}

fn cut(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let kept: String = text.chars().take(most / 4).collect();
    format!("{kept} ...")
}

/// Returns the text, and true if rows were merged or left out.
fn as_text(
    parts: &Parts<'_>,
    callers: &Callers<'_>,
    headline: &Headline,
    detail: &Detail,
) -> (String, bool) {
    let Parts { name, notes, trace, lives, no_history, limit, advice, needs } = parts;
    let peak = |peak: Peak| no_history.is_none().then_some(peak);
    let kept = Kept::of(lives, detail.room);
    let table = stack_table(parts, callers, &kept, detail);
    let mut notes = notes.to_vec();
    notes.extend(left_out(&kept));
    let (base, unit) = base_and_unit(&kept);
    let mut heaps = Numbered::default();
    let segments = segments(&kept, base, unit, &mut heaps);
    let blocks = blocks(lives, &kept, base, unit, &mut heaps, &table);
    let columns = &lives.columns;
    let (name, conf) = (cut(name, detail.texts), cut(&trace.conf, detail.texts));
    let sheet = Sheet {
        name: &name,
        device: trace.device,
        conf: &conf,
        notes: notes.iter().map(|note| cut(note, detail.texts)).collect(),
        events: lives.events,
        requests: lives.served + lives.failures.len() as u64,
        has_times: lives.has_times(),
        duration_us: columns.end_us - columns.begin_us,
        no_history: *no_history,
        limit: *limit,
        peak_reserved: peak(lives.peak_reserved),
        peak_live: peak(lives.peak_live),
        columns: columns_data(lives, detail.columns),
        failures: failures(lives, &table, detail.failures),
        annotations: annotations(&trace.annotations, detail),
        account: account(&trace.account, detail),
        moments: kept.moments.clone(),
        base: format!("{base:#x}"),
        unit,
        streams: lives.streams.items.iter().map(|stream| format!("{:#x}", stream.0)).collect(),
        pools: lives.pools.items.iter().map(pool_data).collect(),
        heaps: heaps.items,
        is_short: kept.segments_left_out + kept.runs_left_out > 0,
        segments,
        blocks,
        holders: holders(parts, callers, &table, detail.holders),
        stacks: table.data,
        headline,
        advice,
        needs,
    };
    (escaped(&serde_json::to_string(&sheet).unwrap_or_default()), kept.is_short())
}

/// Returns the first annotations, at most as many as failures are listed.
fn annotations(all: &[Annotation], detail: &Detail) -> Vec<(u32, String, u64)> {
    let first = all.iter().take(detail.failures);
    let of =
        |note: &Annotation| (note.events_before, cut(&note.text, detail.texts), note.size_bytes);
    first.map(of).collect()
}

/// Returns the rows of the account. If there are too many, the last one has the sum of the others.
fn account(all: &[Owner], detail: &Detail) -> Vec<Owner> {
    let short = |text: &str| cut(text, detail.texts);
    let of = |row: &Owner| Owner {
        owner: short(&row.owner),
        kind: short(&row.kind),
        found_by: short(&row.found_by),
        bytes: row.bytes,
    };
    let (listed, rest) = all.split_at(all.len().min(OWNERS));
    let mut rows: Vec<_> = listed.iter().map(of).collect();
    if !rest.is_empty() {
        let (owner, kind) = (counted_as(rest.len() as u64, "further owner", "further owners"), "");
        let bytes = rest.iter().fold(0_i64, |sum, row| sum.saturating_add(row.bytes));
        rows.push(Owner { owner, kind: kind.to_owned(), bytes, found_by: String::new() });
    }
    rows
}

fn left_out(kept: &Kept) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(moments) = &kept.moments {
        notes.push(format!(
            "The recording is large: {} of its moments can be shown, the peaks and the failures among them.",
            moments.len()
        ));
    }
    if kept.segments_left_out > 0 {
        let count = counted_as(kept.segments_left_out as u64, "small segment", "small segments");
        notes.push(format!("{count} found no room in the maps."));
    }
    if kept.runs_left_out > 0 {
        let count = counted_as(kept.runs_left_out as u64, "run", "runs");
        notes.push(format!("{count} of small blocks found no room in the maps."));
    }
    notes
}

fn pool_data(pool: &PoolId) -> PoolData {
    match *pool {
        PoolId::DEFAULT => PoolData { name: "default pool".to_owned(), private: false },
        PoolId { capture, user } => {
            PoolData { name: format!("private pool {capture}.{user}"), private: true }
        }
    }
}

fn columns_data(lives: &Lives, most: usize) -> Table {
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

fn failures(lives: &Lives, table: &StackTable, most: usize) -> FailuresData {
    let all = &lives.failures;
    // Half of the listed failures are the first ones, half the last ones.
    let ends = all.len().saturating_sub(most / 2);
    let listed = all.iter().enumerate().filter(|(at, _)| *at < most - most / 2 || *at >= ends);
    let row = |failure: &stratalloc_analysis::lives::Failure| {
        let stack = table.place(failure.stack);
        (failure.moment, failure.requested_bytes, failure.stream, stack, failure.device_free_bytes)
    };
    FailuresData { total: all.len(), list: listed.map(|(_, failure)| row(failure)).collect() }
}

/// Returns the lowest address, and a common divisor of all relative addresses and sizes, by which they
/// are shortened.
fn base_and_unit(kept: &Kept) -> (u64, u64) {
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

fn segments(kept: &Kept, base: u64, unit: u64, heaps: &mut Numbered<[u32; 2]>) -> Table {
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

fn blocks(
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
    let stack = |block: &Block| match lives.lived_before(block) {
        true => LIVED_BEFORE,
        false => table.place(block.stack),
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

/// Returns the moments at which holders are listed, the most important one first.
fn listed_moments(parts: &Parts<'_>) -> Vec<(&'static str, u32)> {
    let lives = parts.lives;
    if parts.no_history.is_some() {
        return vec![(Moment::Dump.name(), lives.events)];
    }
    let failure = lives.failures.first().map(|failure| ("first failure", failure.moment));
    let others = [
        ("peak of live bytes", lives.peak_live.moment),
        ("peak of reserved bytes", lives.peak_reserved.moment),
        ("end", lives.events),
    ];
    failure.into_iter().chain(others).collect()
}

fn headline(parts: &Parts<'_>, callers: &Callers<'_>) -> Headline {
    let lives = parts.lives;
    let first = listed_moments(parts).first().map_or(0, |(_, moment)| *moment);
    let holders = &Holders::of(lives, callers, first);
    match parts.no_history {
        Some(no_history) => Headline::of_dump(&no_history, holders),
        None => Headline::of(lives, callers, holders, !lives.failures.is_empty()),
    }
}

/// Returns the live bytes by category. The last row has the blocks from before the recording.
fn categories(all: &Holders, callers: &Callers<'_>) -> Vec<(&'static str, u64, u64)> {
    if !all.has_stacks {
        return Vec::new();
    }
    let row = |name, is_of_it: &dyn Fn(&Holder) -> bool| {
        let holders =
            all.holders.iter().chain(&all.without_stack).filter(|holder| is_of_it(holder));
        let add = |(bytes, blocks): (u64, u64), holder: &Holder| {
            (holder.requested_bytes.saturating_add(bytes), holder.blocks + blocks)
        };
        let (bytes, blocks) = holders.fold((0, 0), add);
        (name, bytes, blocks)
    };
    let of = |holder: &Holder| {
        holder.stack.map_or(Category::Unknown, |stack| callers.category(callers.of_stack(stack)))
    };
    let known = Category::ALL.iter().map(|&category| {
        row(category.name(), &|holder| !holder.lived_before && of(holder) == category)
    });
    let before = row("unknown: lived before the recording began", &|holder| holder.lived_before);
    known.chain([before]).filter(|(_, _, blocks)| *blocks > 0).collect()
}

fn holders(
    parts: &Parts<'_>,
    callers: &Callers<'_>,
    table: &StackTable,
    most: usize,
) -> Vec<HoldersData> {
    let lives = parts.lives;
    let of = |(name, moment): (&'static str, u32)| {
        let all = Holders::of(lives, callers, moment);
        let (listed, rest) = all.holders.split_at(all.holders.len().min(most));
        let list = listed.iter().chain(&all.without_stack).map(|holder| {
            let stack = match all.has_stacks && holder.lived_before {
                true => LIVED_BEFORE,
                false => table.place(holder.stack),
            };
            let (blocks, bytes) = (holder.blocks, holder.requested_bytes);
            let ages = (holder.newest_events, holder.oldest_events);
            (stack, holder.stream, holder.each_bytes, blocks, bytes, ages.0, ages.1)
        });
        HoldersData {
            name,
            moment,
            bytes: all.requested_bytes,
            blocks: all.blocks,
            by_stack: all.has_stacks,
            list: list.collect(),
            rest_bytes: rest
                .iter()
                .fold(0, |sum, holder| holder.requested_bytes.saturating_add(sum)),
            rest_blocks: rest.iter().map(|holder| holder.blocks).sum(),
            categories: categories(&all, callers),
        }
    };
    listed_moments(parts).into_iter().map(of).collect()
}

/// Collects the stacks in the order of importance: first those of the largest holders, then those of the
/// blocks with the largest areas in the time line.
fn stack_table(
    parts: &Parts<'_>,
    callers: &Callers<'_>,
    kept: &Kept,
    detail: &Detail,
) -> StackTable {
    let lives = parts.lives;
    let mut weight: HashMap<StackId, u128> = HashMap::new();
    let mut add = |stack: Option<StackId>, area: u128| {
        if let Some(stack) = stack {
            let all = weight.entry(stack).or_default();
            *all = all.saturating_add(area);
        }
    };
    for row in &kept.rows {
        let span = row.block.freed.min(lives.events + 1).saturating_sub(row.block.born);
        add(row.block.stack, u128::from(row.block.requested_bytes) * u128::from(span));
    }
    for (_, moment) in listed_moments(parts) {
        for holder in Holders::of(lives, callers, moment).holders.iter().take(detail.holders) {
            add(holder.stack, u128::from(holder.requested_bytes) * u128::from(lives.events + 1));
        }
    }
    for failure in lives.failures.iter().take(detail.failures) {
        add(failure.stack, u128::MAX / 1_000_000);
    }
    let mut stacks: Vec<_> = weight.into_iter().collect();
    stacks.sort_unstable_by_key(|(stack, weight)| (std::cmp::Reverse(*weight), *stack));
    let stacks = stacks.into_iter().map(|(stack, _)| stack);
    StackTable::of(&parts.trace.stacks, callers, stacks, detail.stack_bytes)
}
