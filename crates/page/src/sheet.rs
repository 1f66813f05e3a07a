//! The data of one recording in the format of the page. `docs/report.md` describes every field. The
//! page's bytes are divided among the tables. If the resulting text is too long, it is built again with
//! less detail.

use std::collections::HashMap;

use serde::Serialize;

use super::Drawn;
use super::growth::{GrowthData, StepsData, temporary};
use super::layers::LayersData;
use super::rows::{Kept, PageLimits, listed_failures};
use super::stacks::{LIVED_BEFORE, StackData, StackTable};
use super::tables::{BlocksData, Table, base_and_unit, blocks, columns_data, segments};
use stratalloc::ids::PoolId;
use stratalloc_analysis::lives::{COLUMNS, FailedRequest, Lives, Numbered, Peak};
use stratalloc_analysis::{
    Answer, Callers, CategoryBytes, Causes, CausesColumn, Choice, Compared, Curve, Holder, Layers,
    MomentCauses, MomentFigures, NotShown, Sentences, Setting, StreamNumbers, Temporary, Timeline,
    counted_as, points, totals_rows,
};
use stratalloc_recording::{Annotation, DeviceFigures, NoHistory, Owner, StackId};

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
    /// The names and the bytes of the totals, if the file has only these.
    totals: Vec<(String, u64)>,
    limit: Option<LimitData>,
    peak_reserved: Option<Peak>,
    peak_live: Option<Peak>,
    columns: Table,
    failures: FailuresData,
    /// The moment, the text and the bytes of the block, for each annotation.
    annotations: Vec<(u32, String, u64)>,
    /// The owners of the used memory at the end.
    account: Vec<Owner>,
    /// All devices of the file, if it has several, and a sentence that compares them.
    devices: &'a [DeviceFigures],
    devices_sentence: Option<&'a str>,
    moments: Option<Vec<u32>>,
    base: String,
    unit: u64,
    /// The handles of the streams, and the numbers that name them.
    streams: Vec<String>,
    stream_numbers: Vec<String>,
    pools: Vec<PoolData>,
    /// Pairs of a stream and a pool, as indices.
    heaps: Vec<[u32; 2]>,
    /// Whether some moment's map lacks blocks or segments, or has merged ones.
    is_short: bool,
    segments: Table,
    blocks: BlocksData,
    layers: LayersData,
    stacks: StackData,
    holders: Vec<HoldersData>,
    headline: HeadlineData<'a>,
    advice: AdviceData<'a>,
    growth: Option<GrowthData<'a>>,
    steps: Option<StepsData<'a>>,
    temporary: Option<Temporary>,
    needs: NeedsData<'a>,
}

/// The limit, in bytes, or both ends of the interval that contains it.
#[derive(Serialize)]
struct LimitData {
    bytes: u64,
    below_bytes: Option<u64>,
}

#[derive(Serialize)]
struct HeadlineData<'a> {
    memory: &'a Sentences,
    code: &'a Sentences,
}

/// The setting to make, and the causes of reserved memory.
#[derive(Serialize)]
struct AdviceData<'a> {
    sentence: &'a Sentences,
    is_searched: bool,
    /// The number of requests that failed, or would fail with the memory that is set.
    failures: Option<u64>,
    set: &'a [Choice],
    limit: Option<&'a str>,
    searched: Option<String>,
    unknown: &'a [NotShown],
    pictures: Vec<CausesData<'a>>,
}

/// The reserved bytes at one moment, by cause.
#[derive(Serialize)]
struct CausesData<'a> {
    name: &'static str,
    sentence: &'a Sentences,
    causes: [&'static str; 6],
    /// The bytes of each cause.
    all: [u64; 6],
    /// For each stream of each pool: its name, the bytes of each cause, and the largest free block.
    heaps: Vec<(String, [u64; 6], u64)>,
}

/// The need of the recording under each setting.
#[derive(Serialize)]
struct NeedsData<'a> {
    /// The reason why there are no needs, if there are none.
    missing: Option<String>,
    points: usize,
    rows: Vec<NeedData<'a>>,
}

#[derive(Serialize)]
struct NeedData<'a> {
    #[serde(flatten)]
    setting: &'a Setting,
    recorded: bool,
    asked: bool,
    at_need: &'a [i128],
    unlimited: &'a [i128],
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
struct HoldersData {
    name: &'static str,
    /// The number of events before it; `None` in a replay that the page does not draw.
    moment: Option<u32>,
    bytes: u64,
    blocks: u64,
    by_stack: bool,
    /// The holders: index of the stack (or -1, -2, -3), index of the stream, bytes of each block or 0 for
    /// several sizes, number of blocks, their bytes, and how many requests ago the newest and the oldest was
    /// requested, or -1 if that is not recorded.
    list: Table,
    /// The bytes of the holders that are not in the list.
    rest_bytes: u64,
    rest_blocks: u64,
    /// The live bytes by category, if stacks are recorded.
    categories: Vec<CategoryBytes>,
    /// A sentence about those whose category is not known.
    categories_sentence: String,
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
    /// The numbers for layers, for a recording whose blocks do not all fit.
    layers: usize,
}

impl Detail {
    /// Divides `bytes` among the tables. A row for a block takes about 14 bytes.
    fn of(bytes: usize) -> Self {
        Self {
            columns: (bytes / 400).clamp(32, COLUMNS),
            room: PageLimits { blocks: bytes * 6 / 10 / 14, segments: bytes / 10 / 36 },
            stack_bytes: bytes / 6,
            holders: (bytes / 4000).clamp(4, 300),
            failures: (bytes / 2000).clamp(4, 500),
            texts: (bytes / 100).clamp(200, 4000),
            layers: bytes / 20,
        }
    }

    /// Returns the number of columns if each has the bytes of every layer.
    fn columns_of(&self, layers: &Layers) -> usize {
        let names: usize = layers.names.iter().map(Vec::len).sum();
        (self.layers / names.max(1)).clamp(32, self.columns)
    }
}

/// The maximum number of owners in the account.
const OWNERS: usize = 64;

/// Returns the data as text for a script element, at most `most` bytes long. `None` if it does not fit
/// even with the least detail.
pub(crate) fn sheet(drawn: &Drawn<'_>, most: usize) -> Option<String> {
    let callers = Callers::of(&drawn.timeline.trace.stacks, Compared::Code);
    let layers = Layers::of(drawn.timeline, &callers, drawn.answer.growth.as_ref());
    let mut bytes = most;
    let mut found: Option<String> = None;
    while bytes >= 1024 {
        let (text, is_short) = as_text(drawn, &callers, &layers, &Detail::of(bytes));
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
    drawn: &Drawn<'_>,
    callers: &Callers<'_>,
    layers: &Layers,
    detail: &Detail,
) -> (String, bool) {
    let Drawn { answer, timeline: Timeline { trace, lives, .. }, .. } = *drawn;
    let no_history = answer.no_history;
    let peak = |peak: Peak| no_history.is_none().then_some(peak);
    let kept = Kept::of(lives, detail.room);
    let table = stack_table(drawn, callers, &kept, detail);
    let mut notes = drawn.notes();
    notes.extend(left_out(&kept));
    let (base, unit) = base_and_unit(&kept);
    let mut heaps = Numbered::default();
    let segments = segments(&kept, base, unit, &mut heaps);
    let blocks = blocks(lives, &kept, base, unit, &mut heaps, &table, layers);
    // Without every block, each column has the bytes of every layer.
    let is_short = kept.moments.is_some();
    let most_columns = if is_short { detail.columns_of(layers) } else { detail.columns };
    let columns = &lives.columns;
    let (name, conf) = (cut(&answer.trace, detail.texts), cut(&trace.conf, detail.texts));
    let sheet = Sheet {
        name: &name,
        device: trace.device,
        conf: &conf,
        notes: notes.iter().map(|note| cut(note, detail.texts)).collect(),
        events: lives.events,
        requests: lives.served + lives.failures.len() as u64,
        has_times: lives.has_times(),
        duration_us: columns.end_us - columns.begin_us,
        no_history,
        totals: answer.totals_alone().map(totals_rows).unwrap_or_default(),
        limit: limit_data(answer),
        peak_reserved: peak(lives.peak_reserved),
        peak_live: peak(lives.peak_live),
        columns: columns_data(lives, most_columns),
        failures: failures(lives, &table, detail.failures),
        annotations: annotations(&trace.annotations, detail),
        account: account(&trace.account, detail),
        devices: &answer.devices,
        devices_sentence: answer.devices_sentence.as_deref(),
        moments: kept.moments.clone(),
        base: format!("{base:#x}"),
        unit,
        streams: lives.streams.items.iter().map(|stream| format!("{:#x}", stream.0)).collect(),
        stream_numbers: lives
            .streams
            .items
            .iter()
            .map(|one| answer.stream_numbers.label(*one))
            .collect(),
        pools: lives.pools.items.iter().map(pool_data).collect(),
        heaps: heaps.items,
        is_short: kept.segments_left_out + kept.runs_left_out > 0,
        segments,
        blocks,
        layers: LayersData::of(layers, lives, is_short.then_some(most_columns)),
        holders: answer
            .moments
            .iter()
            .map(|moment| holders(moment, lives, &table, detail.holders))
            .collect(),
        stacks: table.data,
        headline: HeadlineData { memory: &answer.memory, code: &answer.code },
        advice: advice(answer),
        growth: GrowthData::of(answer),
        steps: StepsData::of(drawn),
        temporary: temporary(answer, detail.holders, |text| cut(text, detail.texts)),
        needs: needs(drawn),
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

fn left_out(kept: &Kept<'_>) -> Vec<String> {
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

fn failures(lives: &Lives, table: &StackTable, most: usize) -> FailuresData {
    let (all, listed) = (&lives.failures, listed_failures(lives, most));
    let row = |failure: &FailedRequest| {
        let stack = table.place(failure.stack);
        (failure.moment, failure.requested_bytes, failure.stream, stack, failure.device_free_bytes)
    };
    FailuresData { total: all.len(), list: listed.map(row).collect() }
}

/// Returns the limit, unless it is only possible.
fn limit_data(answer: &Answer) -> Option<LimitData> {
    let bytes = answer.limit.known_bytes()?;
    Some(LimitData { bytes, below_bytes: answer.limit.limit_below_bytes })
}

/// The maximum number of streams and pools listed.
const HEAPS: usize = 64;

fn advice(answer: &Answer) -> AdviceData<'_> {
    let is_searched = answer.recorded.replayed.is_some();
    AdviceData {
        sentence: &answer.sentence,
        is_searched,
        failures: answer.failures,
        set: &answer.choices,
        limit: answer.limit.limit_sentence.as_deref(),
        searched: is_searched.then(|| format!("{}.", answer.searched())),
        unknown: &answer.not_shown,
        pictures: answer.explained().map(|moment| causes(moment, &answer.stream_numbers)).collect(),
    }
}

fn causes<'a>(moment: &'a MomentCauses, streams: &StreamNumbers) -> CausesData<'a> {
    let bytes = |causes: &Causes| causes.rows().map(|(_, bytes)| bytes);
    let heap =
        |column: CausesColumn| (column.name, bytes(&column.causes), column.largest_free_bytes);
    CausesData {
        name: moment.moment,
        sentence: &moment.why,
        causes: moment.causes.rows().map(|(name, _)| name),
        all: bytes(&moment.causes),
        heaps: moment.columns(streams).into_iter().take(HEAPS).map(heap).collect(),
    }
}

fn needs<'a>(drawn: &Drawn<'a>) -> NeedsData<'a> {
    let no_history = drawn.answer.no_history.map(|none| format!("No needs: {}", none.sentence()));
    let is_searched = drawn.answer.recorded.replayed.is_some();
    let unsearched = (!is_searched).then(|| drawn.answer.sentence.to_string());
    let row = |curve: &'a Curve| NeedData {
        setting: &curve.setting,
        recorded: curve.is_recorded,
        asked: curve.is_asked,
        at_need: &curve.at_need,
        unlimited: &curve.unlimited,
    };
    NeedsData {
        missing: no_history.or(unsearched),
        points: points(&drawn.timeline.lives),
        rows: drawn.curves.iter().map(row).collect(),
    }
}

/// Returns the holders at a moment. Holders beyond `most` are only counted.
fn holders(moment: &MomentFigures, lives: &Lives, table: &StackTable, most: usize) -> HoldersData {
    let all = &moment.holders;
    let (mut rest_bytes, mut rest_blocks) = (all.others_bytes, all.others_blocks);
    let mut rows: Vec<[i128; 7]> = Vec::new();
    let mut add = |is_first: bool, row: [i128; 7], bytes: u64, blocks: u64| match is_first {
        true => rows.push(row),
        false => {
            rest_bytes = rest_bytes.saturating_add(bytes);
            rest_blocks += blocks;
        }
    };
    let age = |requests: Option<u32>| requests.map_or(-1, i128::from);
    if all.has_stacks {
        for (at, row) in all.by_stack.iter().enumerate() {
            let stack = match row.lived_before {
                true => LIVED_BEFORE,
                false => table.place(row.stack()),
            };
            let Holder { blocks, requested_bytes: bytes, newest_requests, oldest_requests, .. } =
                row.holder;
            let ages = [newest_requests, oldest_requests].map(age);
            let row_data = [stack.into(), 0, 0, blocks.into(), bytes.into(), ages[0], ages[1]];
            add(at < most || row.stack().is_none(), row_data, bytes, blocks);
        }
    } else {
        for (at, class) in all.by_size.iter().enumerate() {
            let stream = lives.streams.items.iter().position(|stream| *stream == class.stream);
            let stream = stream.unwrap_or(0) as i128;
            let (blocks, bytes) = (class.blocks, class.requested_bytes);
            let row = [-1, stream, class.each_bytes.into(), blocks.into(), bytes.into(), -1, -1];
            add(at < most, row, bytes, blocks);
        }
    }
    let names = ["stack", "stream", "each", "blocks", "bytes", "newest", "oldest"];
    let column = |(at, name)| (name, rows.iter().map(|row| row[at]).collect());
    HoldersData {
        name: moment.causes.moment,
        moment: (!moment.causes.is_replay).then_some(moment.causes.events),
        bytes: all.requested_bytes,
        blocks: all.blocks,
        by_stack: all.has_stacks,
        list: Table(names.into_iter().enumerate().map(column).collect()),
        rest_bytes,
        rest_blocks,
        categories: moment.categories.clone(),
        categories_sentence: moment.categories_sentence.clone(),
    }
}

/// Collects the stacks in the order of importance: first those of the largest holders, then those of the
/// blocks with the largest areas in the time line.
fn stack_table(
    drawn: &Drawn<'_>,
    callers: &Callers<'_>,
    kept: &Kept<'_>,
    detail: &Detail,
) -> StackTable {
    let Drawn { answer, timeline: Timeline { trace, lives, .. }, .. } = *drawn;
    let mut weight: HashMap<StackId, u128> = HashMap::new();
    let mut add = |stack: Option<StackId>, area: u128| {
        if let Some(stack) = stack {
            let all = weight.entry(stack).or_default();
            *all = all.saturating_add(area);
        }
    };
    for row in kept.rows.iter() {
        let span = row.block.freed.min(lives.events + 1).saturating_sub(row.block.born);
        add(row.block.stack, u128::from(row.block.requested_bytes) * u128::from(span));
    }
    for moment in &answer.moments {
        for row in moment.holders.by_stack.iter().take(detail.holders) {
            let bytes = u128::from(row.holder.requested_bytes);
            add(row.stack(), bytes * u128::from(lives.events + 1));
        }
    }
    for failure in listed_failures(lives, detail.failures) {
        add(failure.stack, u128::MAX / 1_000_000);
    }
    let mut stacks: Vec<_> = weight.into_iter().collect();
    stacks.sort_unstable_by_key(|(stack, weight)| (std::cmp::Reverse(*weight), *stack));
    let stacks = stacks.into_iter().map(|(stack, _)| stack);
    StackTable::of(&trace.stacks, callers, stacks, detail.stack_bytes)
}
