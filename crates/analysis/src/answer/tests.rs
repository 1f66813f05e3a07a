//! No answer claims what its recording does not show. The tests compare answers with the recordings' own
//! entries, by code of their own.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::*;
use crate::recording::{Memory, Recording};
use crate::words::{grouped, near};
use crate::{Callers, FoundBy, Silent};
use stratalloc::config::KeyTable;
use stratalloc::history::{Action, BlockStateName};
use stratalloc::size::MIB;
use stratalloc_recording::{Limits, Trace, reader};

/// The recordings of the package, and those in the folders that the variable `STRATALLOC_RECORDINGS` lists.
fn recordings() -> Vec<PathBuf> {
    let own = ["../../tests/traces", "../../tests/cases"]
        .map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder));
    let more = std::env::var_os("STRATALLOC_RECORDINGS").unwrap_or_default();
    let folders = own.into_iter().chain(std::env::split_paths(&more));
    let entries = folders.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let paths = entries.map(|entry| entry.expect("the folder can be read").path());
    let is_recording = |path: &PathBuf| path.to_string_lossy().contains(".pickle");
    let mut paths: Vec<_> = paths.filter(is_recording).collect();
    paths.sort_unstable();
    paths
}

/// Returns a recording, and it without each of its first halves, as a ring keeps the last entries.
fn with_rings(path: &Path) -> Vec<Trace> {
    let whole = reader::read(path, &Limits::default()).expect("the recording can be read");
    let part = |cut: usize| {
        let mut part = whole.clone();
        part.events.drain(..whole.events.len() * cut / 8);
        part
    };
    let parts = [4, 7].map(part);
    [whole].into_iter().chain(parts).collect()
}

fn recording_of(trace: Trace) -> Recording {
    let config = Config::parse(&trace.conf, &KeyTable::default()).ok();
    // Bisections of limits take many replays.
    match trace.events.len() > 6000 {
        true => Recording::unverified(trace, config, Memory::default()),
        false => Recording::new(trace, config, Memory::default()),
    }
}

/// A live block, as the entries show it.
#[derive(Clone, Copy)]
struct Shown {
    bytes: u64,
    stack: Option<StackId>,
    found_by: fn(u64) -> FoundBy,
}

fn by_request(request_bytes: u64) -> FoundBy {
    FoundBy { request_bytes, ..FoundBy::default() }
}

fn by_layout(layout_bytes: u64) -> FoundBy {
    FoundBy { layout_bytes, ..FoundBy::default() }
}

fn by_free(free_bytes: u64) -> FoundBy {
    FoundBy { free_bytes, ..FoundBy::default() }
}

/// Returns the blocks that live after the first `events` entries.
fn live_after(trace: &Trace, events: usize) -> HashMap<u64, Shown> {
    let mut live = HashMap::new();
    let mut seen = HashSet::new();
    for event in &trace.events {
        let is_about_block =
            matches!(event.action, Action::Alloc | Action::FreeRequested | Action::FreeCompleted);
        if is_about_block && seen.insert(event.address) && event.action == Action::FreeRequested {
            let bytes = event.size_bytes.max(1);
            live.insert(event.address, Shown { bytes, stack: None, found_by: by_free });
        }
    }
    let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
    for block in blocks.filter(|block| block.state == BlockStateName::ActiveAllocated) {
        if !seen.contains(&block.address) {
            let (bytes, stack) = (block.requested_bytes.max(1), trace.stack_at_end(block.address));
            live.insert(block.address, Shown { bytes, stack, found_by: by_layout });
        }
    }
    for event in &trace.events[..events] {
        match event.action {
            Action::Alloc => {
                let (bytes, stack) = (event.size_bytes, event.stack);
                live.insert(event.address, Shown { bytes, stack, found_by: by_request });
            }
            Action::FreeRequested => _ = live.remove(&event.address),
            _ => {}
        }
    }
    live
}

/// The bytes, blocks and sources of a row, by caller and whether the blocks lived before the recording.
type Rows = HashMap<(Option<u32>, bool), (u64, u64, FoundBy)>;

fn add(rows: &mut Rows, key: (Option<u32>, bool), bytes: u64, blocks: u64, found_by: FoundBy) {
    let (all_bytes, all_blocks, found) = rows.entry(key).or_default();
    *all_bytes += bytes;
    *all_blocks += blocks;
    found.request_bytes += found_by.request_bytes;
    found.layout_bytes += found_by.layout_bytes;
    found.free_bytes += found_by.free_bytes;
}

#[track_caller]
fn check_holders(name: &str, trace: &Trace, callers: &Callers<'_>, moment: &MomentFigures) {
    let MomentFigures { causes, holders, .. } = moment;
    let mut expected = Rows::default();
    for shown in live_after(trace, causes.events as usize).values() {
        let caller = shown.stack.map(|stack| callers.of_stack(stack));
        let found_by = (shown.found_by)(shown.bytes);
        let is_before = caller.is_none() && found_by.request_bytes == 0;
        add(&mut expected, (caller, is_before), shown.bytes, 1, found_by);
    }
    let mut rows = Rows::default();
    for row in &holders.by_stack {
        let caller = row.stack().map(|stack| callers.of_stack(stack));
        let Holder { requested_bytes, blocks, found_by, newest_requests, oldest_requests, .. } =
            row.holder;
        add(&mut rows, (caller, row.lived_before), requested_bytes, blocks, found_by);
        let is_of_requests = found_by.request_bytes == requested_bytes;
        assert_eq!(oldest_requests.is_some(), is_of_requests, "{name}: age of {row:?}");
        let has_request = found_by.request_bytes > 0;
        assert_eq!(newest_requests.is_some(), has_request, "{name}: age of {row:?}");
    }
    assert_eq!(rows, expected, "{name}: {}", causes.moment);
    let known: u64 = expected.values().map(|(_, _, found)| found.request_bytes).sum();
    let aged = holders.by_age.iter().filter(|class| !class.lived_before);
    assert_eq!(aged.map(|class| class.requested_bytes).sum::<u64>(), known, "{name}");
}

#[track_caller]
fn check_dump(name: &str, trace: &Trace, callers: &Callers<'_>, answer: &Answer) {
    let figures = [answer.live_peak_bytes, answer.failures, answer.least_need_bytes];
    assert_eq!(figures, [None; 3], "{name}");
    assert!(answer.tried.is_empty() && answer.choice.is_none(), "{name}");
    assert!(answer.recorded.needs_bytes.is_none() && answer.not_shown.is_empty(), "{name}");
    let [moment] = answer.moments.as_slice() else { panic!("{name}: {:?}", answer.moments) };
    assert!(moment.holders.by_age.is_empty(), "{name}");
    let mut expected: HashMap<Option<u32>, u64> = HashMap::new();
    let blocks = trace.segments.iter().flat_map(|segment| &segment.blocks);
    for block in blocks.filter(|block| block.state == BlockStateName::ActiveAllocated) {
        let caller = trace.stack_at_end(block.address).map(|stack| callers.of_stack(stack));
        *expected.entry(caller).or_default() += block.requested_bytes;
    }
    let rows = &moment.holders.by_stack;
    assert!(rows.iter().all(|row| row.holder.newest_requests.is_none() && !row.lived_before));
    let bytes = |row: &CodeFigures| {
        (row.stack().map(|stack| callers.of_stack(stack)), row.holder.requested_bytes)
    };
    let rows: HashMap<_, _> = rows.iter().map(bytes).collect();
    assert!(rows.is_empty() == trace.block_stacks.is_empty(), "{name}");
    assert!(rows.is_empty() || rows == expected, "{name}: {rows:?}");
    for word in ["peak of", "needs", "ago", "before the recording"] {
        assert!(!format!("{} {}", answer.memory, answer.code).contains(word), "{name}: {word}");
    }
    let others = answer.evidence.iter().filter(|basis| basis.of != "sentence");
    let others: Vec<_> = others.filter(|basis| basis.kind != BasisKind::Layout).collect();
    assert!(others.is_empty(), "{name}: {others:?}");
}

#[track_caller]
fn check_limit(name: &str, trace: &Trace, limit: &LimitFigures) {
    let decisions =
        [limit.limit_failures, limit.limit_retries, limit.limit_releases, limit.limit_collections];
    let sum: u64 = decisions.into_iter().flatten().sum();
    let is_derived = matches!(limit.limit_certainty, Some("inferred" | "probable" | "possible"));
    assert_eq!(is_derived, decisions[0].is_some(), "{name}: {limit:?}");
    assert!(!is_derived || sum > 0, "{name}: {limit:?}");
    let is_ours = limit.limit_certainty == Some("recorded") && trace.made_here.is_some();
    assert!(is_derived || is_ours || limit.limit_bytes.is_none(), "{name}: {limit:?}");
    let failed = trace.events.iter().filter(|event| event.action == Action::OutOfMemory).count();
    assert!(decisions[0].unwrap_or(0) <= failed as u64, "{name}: {limit:?}");
    // Each retry and each collection released a segment.
    let released = trace.events.iter().filter(|event| event.reserved_change() < 0).count() as u64;
    assert!(decisions[1..].iter().flatten().all(|count| *count <= released), "{name}: {limit:?}");
}

/// Returns all whole numbers of a value, and for each list of objects the sums of equal fields, in all
/// objects and in those of one stream.
fn numbers(value: &Value, into: &mut HashSet<u64>) {
    match value {
        Value::Number(number) => into.extend(number.as_u64()),
        Value::Object(fields) => fields.values().for_each(|value| numbers(value, into)),
        Value::Array(items) => {
            let mut sums: HashMap<(Option<&Value>, &String), u64> = HashMap::new();
            for item in items.iter().filter_map(Value::as_object) {
                for (name, value) in item {
                    let bytes = value.as_u64().unwrap_or(0);
                    *sums.entry((None, name)).or_default() += bytes;
                    *sums.entry((item.get("stream"), name)).or_default() += bytes;
                }
            }
            into.extend(sums.into_values());
            items.iter().for_each(|value| numbers(value, into));
        }
        _ => {}
    }
}

/// Returns the numbers before "MiB" in a sentence.
fn sizes(sentence: &str) -> Vec<&str> {
    let before = sentence.split(" MiB");
    let mut all: Vec<&str> = before.filter_map(|text| text.split([' ', '(']).next_back()).collect();
    all.pop();
    all
}

#[track_caller]
fn check_sentences(name: &str, answer: &Answer) {
    let value = serde_json::to_value(answer).expect("an answer is JSON");
    let mut known = HashSet::new();
    numbers(&value, &mut known);
    let mut of_verdict = HashSet::new();
    for field in ["verdict", "limit_bytes", "limit_below_bytes"] {
        numbers(&value[field], &mut of_verdict);
    }
    for a in &of_verdict {
        known.extend(of_verdict.iter().filter_map(|b| a.checked_sub(*b)));
    }
    let mib = MIB as f64;
    let shown: HashSet<String> = known
        .iter()
        .flat_map(|bytes| {
            let tenths = format!("{:.1}", *bytes as f64 / mib);
            [near(*bytes), grouped(bytes.div_ceil(MIB)), tenths]
        })
        .collect();
    let why = answer.moments.iter().map(|moment| &moment.causes.why);
    let sentences = [&answer.memory, &answer.code, &answer.sentence];
    let growth = answer.growth.iter().map(|growth| &growth.sentence);
    let limit = answer.limit.limit_sentence.iter().filter(|_| answer.limit.limit_bytes.is_some());
    let texts = why.chain(sentences).chain(growth).map(ToString::to_string);
    for sentence in texts.chain(limit.cloned()) {
        // A bound on attention's bytes, and the free bytes at a failure, are no fields.
        let sentence = sentence.split(" These are attention weights").next().unwrap_or_default();
        let sentence = sentence.split("the device reported").next().unwrap_or_default();
        for size in sizes(sentence) {
            assert!(shown.contains(size), "{name}: {size} MiB in {sentence:?} is in no field");
        }
    }
}

#[track_caller]
fn check_evidence(name: &str, trace: &Trace, answer: &Answer) {
    let has = |of: &str| answer.evidence.iter().any(|basis| basis.of == of && basis.count > 0);
    let blocks = trace.segments.iter().map(|segment| segment.blocks.len()).sum::<usize>();
    let has_data = answer.no_history.is_none() || blocks > 0;
    let statements = [
        ("sentence", answer.headline != "not searched"),
        ("memory", !answer.memory.is_empty() && has_data),
        ("code", !answer.code.is_empty()),
        ("causes", answer.causes.is_some() && has_data),
        ("holders", answer.holders.is_some() && has_data),
        ("failures", answer.failures.is_some()),
        ("limit_bytes", answer.limit.limit_bytes.is_some()),
    ];
    for (of, is_stated) in statements {
        assert_eq!(has(of), is_stated, "{name}: {of} of {:?}", answer.evidence);
    }
    for basis in &answer.evidence {
        let most = match basis.kind {
            BasisKind::Events if basis.of == "devices_sentence" => {
                answer.devices.iter().map(|device| device.events).sum()
            }
            BasisKind::Events => trace.events.len() as u64,
            BasisKind::Layout => blocks as u64,
            BasisKind::Replays => answer.tried.len().max(1) as u64,
            BasisKind::Settings => 0,
        };
        assert!(basis.count <= most, "{name}: {basis:?}");
    }
    let is_unknown = |row: &&CodeFigures| row.lived_before;
    let rows = answer.moments.iter().flat_map(|moment| &moment.holders.by_stack);
    let is_before = rows.filter(is_unknown).count() > 0;
    let says = |text: &str| answer.not_shown.iter().any(|what| what.what.contains(text));
    assert!(!is_before || says("before its first event"), "{name}: {:?}", answer.not_shown);
}

fn check(name: &str, recording: &Recording, answer: &Answer) {
    let trace = &recording.trace;
    let callers = Callers::of(&trace.stacks, Compared::Code);
    check_limit(name, trace, &answer.limit);
    check_sentences(name, answer);
    check_evidence(name, trace, answer);
    match recording.no_history {
        Some(_) => check_dump(name, trace, &callers, answer),
        None => {
            let recorded = answer.moments.iter().filter(|moment| !moment.causes.is_replay);
            recorded.for_each(|moment| check_holders(name, trace, &callers, moment));
        }
    }
}

#[test]
fn every_claim_is_shown_by_entries_blocks_or_settings() {
    let question = Question { holders: usize::MAX, frames: false, ..Question::default() };
    let (mut with_history, mut without, mut late) = (0, 0, 0);
    for path in recordings() {
        for (cut, trace) in with_rings(&path).into_iter().enumerate() {
            let name = format!("{} without {cut} parts", path.display());
            let recording = recording_of(trace);
            let answer = described(&name, &recording, &question).expect("it can be replayed");
            check(&name, &recording, &answer);
            *if recording.no_history.is_some() { &mut without } else { &mut with_history } += 1;
            late += usize::from(recording.start.is_some());
        }
    }
    assert!(with_history > 60 && without > 12 && late > 40, "{with_history}, {without}, {late}");
}

#[test]
fn sentences_about_settings_contain_figures_of_replays() {
    let advice = AdviceOptions { quick: true, ..AdviceOptions::default() };
    let question = Question { advice, holders: usize::MAX, frames: false, ..Question::default() };
    let is_small = |path: &PathBuf| path.metadata().is_ok_and(|file| file.len() < 3000);
    for path in recordings().into_iter().filter(is_small) {
        let trace = reader::read(&path, &Limits::default()).expect("the recording can be read");
        let (name, recording) = (path.display().to_string(), recording_of(trace));
        let found = answer(&name, &recording, &question, &mut Silent).expect("it can be replayed");
        check(&name, &recording, &found);
    }
}

#[test]
fn a_dump_with_stacks_has_the_categories_of_their_functions() {
    let block = |file: &str, name: &str| {
        let frame =
            format!(r#"{{"filename":"/v/site-packages/torch/{file}","line":1,"name":"{name}"}}"#);
        format!(r#"{{"size":1048576,"state":"active_allocated","frames":[{frame}]}}"#)
    };
    let blocks = [
        block("nn/modules/module.py", "_call_impl"),
        block("nn/modules/module.py", "_apply"),
        block("nn/modules/module.py", "_call_impl"),
    ];
    let segment =
        r#""device":0,"address":0,"total_size":3145728,"stream":0,"segment_type":"large""#;
    let json = format!(
        r#"{{"segments":[{{{segment},"blocks":[{}]}}],"device_traces":[[]]}}"#,
        blocks.join(",")
    );
    let trace = reader::read_bytes("made", json.as_bytes(), &Limits::default(), None).unwrap();
    let answer = described("made", &recording_of(trace), &Question::default()).unwrap();
    let categories = answer.moments[0].categories.iter().map(|one| (one.category, one.blocks));
    let expected = [("parameters and buffers", 1), ("activations", 2)];
    assert_eq!(categories.collect::<Vec<_>>(), expected);
    let rows = answer.holders.as_ref().unwrap().by_stack.iter().map(|row| row.category);
    assert_eq!(rows.collect::<Vec<_>>(), [Some("activations"), Some("parameters and buffers")]);
}
