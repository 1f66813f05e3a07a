//! Checks that a page shows exactly the recorded data.

mod views;

use super::rows::{Kept, PageLimits};
use super::sheet::escaped;
use super::*;
use stratalloc::config::Config;
use stratalloc::history::{Action, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{MIB, PoolKind};
use stratalloc_analysis::lives::{COLUMNS, Lives, NEVER};
use stratalloc_analysis::{Figures, Memory, Question, Recording, described, lives_of};
use stratalloc_recording::{Limits, Trace, TraceEvent, reader};

fn shipped(name: &str) -> Trace {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
    reader::read(&folder.join(format!("{name}.pickle.xz")), &Limits::default()).unwrap()
}

fn lives(trace: &Trace) -> Lives {
    let config = Config::parse(&trace.conf, &stratalloc::registry::key_table()).unwrap_or_default();
    lives_of(trace, Some(&config), &Memory::default(), COLUMNS)
}

/// Returns the layout without the requested sizes of free blocks, which are not compared.
fn plain(layout: &[SegmentLayout]) -> Vec<SegmentLayout> {
    let mut layout = layout.to_vec();
    for block in layout.iter_mut().flat_map(|segment| &mut segment.blocks) {
        if block.state == BlockStateName::Inactive {
            block.requested_bytes = 0;
        }
    }
    layout
}

#[test]
fn the_last_map_is_the_layout_that_was_recorded() {
    let names = "serve.default unet.expandable unet.frac045 multistream.default \
                 multistream.expandable llama_var.default llama_var.expandable cudagraph.default \
                 fuzz.pools.1 fuzz.exppools.1 fuzz.expsplitgc.1.frac02 fuzz.splitgc.1.frac02 \
                 fuzz.streams.1.frac025 resnet50.default";
    for name in names.split(' ') {
        let trace = shipped(name);
        let lives = lives(&trace);
        assert_eq!(plain(&lives.layout(lives.events)), plain(&trace.segments), "{name}");
        let figures = Figures::of(&trace);
        assert_eq!(lives.peak_reserved.bytes, figures.peak_reserved_bytes, "{name}");
        assert_eq!(lives.failures.len() as u64, figures.ooms, "{name}");
    }
}

/// Replays the events up to a request, and compares the allocator's layout with the map of that moment.
#[test]
fn the_map_of_each_moment_is_the_layout_of_a_replay_that_ends_there() {
    let names = "serve.default unet.expandable unet.frac045 multistream.expandable cudagraph.default \
                 fuzz.exppools.1 fuzz.expsplitgc.1.frac02 fuzz.streams.1.frac025";
    for name in names.split(' ') {
        let trace = shipped(name);
        let config = Config::parse(&trace.conf, &stratalloc::registry::key_table()).unwrap();
        let whole = Recording::new(trace.clone(), Some(config.clone()), Memory::default());
        let (total_bytes, lives) = (whole.total_bytes(), lives(&trace));
        let config = trace.as_recorded(config);
        for part in 1..10 {
            let from = trace.events.len() * part / 10;
            let is_request = |event: &TraceEvent| event.action == Action::Alloc;
            let moment = from + 1 + trace.events[from..].iter().position(is_request).unwrap();
            let mut begin = Trace { torch: Some(trace.torch_version()), ..trace.clone() };
            begin.events.truncate(moment);
            let shown = lives.layout(u32::try_from(moment).unwrap());
            // Entries before PyTorch 2.12 contain no pool: the replay reads it from the segments.
            begin.segments = shown.clone();
            let fraction = whole.fraction_of(total_bytes);
            let replayed =
                stratalloc_recording::verify(&begin, &config, total_bytes, fraction).unwrap();
            let mismatches = replayed.address_mismatches + replayed.segment_mismatches;
            assert_eq!(mismatches, 0, "{name} at {moment}");
            assert_eq!(plain(&shown), plain(&replayed.layout), "{name} at {moment}");
        }
    }
}

/// Tests a recording of the last events only, in which the memory before them must be reconstructed.
#[test]
fn a_cut_recording_shows_what_was_there_before() {
    for name in ["serve.default", "llama_var.default", "multistream.expandable"] {
        let whole = shipped(name);
        let cut_at = whole.events.len() / 2;
        let mut cut = whole.clone();
        cut.events.drain(..cut_at);
        let (whole, cut) = (lives(&whole), lives(&cut));
        let moment = u32::try_from(cut_at).unwrap();
        assert_eq!(plain(&cut.layout(cut.events)), plain(&whole.layout(whole.events)), "{name}");
        let reserved = |lives: &Lives, at| -> u64 {
            lives.layout(at).iter().map(|segment| segment.size_bytes).sum()
        };
        assert_eq!(reserved(&cut, 0), reserved(&whole, moment), "{name}");
    }
}

/// Returns a recording with `count` adjacent live blocks. One of them is large and lives for two events
/// only.
fn many(count: u64) -> Trace {
    let event = |action, address, size| TraceEvent::new(action, address, size, StreamId(1));
    let mut events = Vec::new();
    for at in 0..count {
        if at % 4096 == 0 {
            events.push(event(Action::SegmentAlloc, (1 << 40) + at * 512, 2 * MIB));
        }
        events.push(event(Action::Alloc, (1 << 40) + at * 512, 512));
        if at == count / 3 {
            events.push(event(Action::SegmentAlloc, 1 << 50, 64 * MIB));
            events.push(event(Action::Alloc, 1 << 50, 64 * MIB));
            events.push(event(Action::FreeRequested, 1 << 50, 64 * MIB));
            events.push(event(Action::FreeCompleted, 1 << 50, 64 * MIB));
            events.push(event(Action::SegmentFree, 1 << 50, 64 * MIB));
            events.push(event(Action::OutOfMemory, 7, 99 * MIB));
        }
    }
    Trace { events, ..Trace::default() }
}

#[test]
fn a_large_recording_keeps_peaks_and_failures_and_a_hundred_moments() {
    let trace = many(300_000);
    let lives = lives(&trace);
    let kept = Kept::of(&lives, PageLimits { blocks: 20_000, segments: 2_000 });
    let moments = kept.moments.clone().unwrap();
    assert!(moments.len() >= 100, "{}", moments.len());
    assert!(moments.contains(&lives.peak_reserved.moment));
    assert!(
        moments.contains(&lives.peak_live.moment) && moments.contains(&lives.failures[0].moment)
    );
    assert!(kept.rows.iter().count() <= 20_000 && kept.segments.len() <= 2_000);
    assert_eq!((kept.runs_left_out, kept.segments_left_out), (0, 0));
    // The live bytes of each moment must be complete, whichever rows were merged.
    for &moment in &moments {
        let of = |born: u32, freed: u32| born <= moment && moment < freed;
        let all = lives.blocks.iter().filter(|block| of(block.born, block.freed));
        let shown = kept.rows.iter().filter(|row| of(row.block.born, row.block.freed));
        let all: (u64, u64) = all.fold((0, 0), |sum, b| (sum.0 + b.requested_bytes, sum.1 + 1));
        let shown = shown.fold((0, 0), |sum, row| {
            (sum.0 + row.block.requested_bytes, sum.1 + u64::from(row.blocks))
        });
        assert_eq!(shown, all, "{moment}");
    }
}

fn recording_of(trace: &Trace) -> Recording {
    let config = Config::parse(&trace.conf, &stratalloc::registry::key_table()).ok();
    Recording::unverified(trace.clone(), config, Memory::default())
}

fn sheet_of(trace: &Trace, most: usize) -> Option<(String, serde_json::Value)> {
    let recording = recording_of(trace);
    let question = Question { holders: HOLDERS, ..Question::default() };
    let answer = &described("</script><img src=x>", &recording, &question).unwrap();
    let timeline = &Timeline::recorded(&recording, COLUMNS).unwrap();
    let text = sheet::sheet(&Drawn { answer, timeline, curves: &[], notes: &[] }, most)?;
    let value = serde_json::from_str(&text).unwrap();
    Some((text, value))
}

#[test]
fn whatever_the_room_the_data_fits_and_its_peak_is_the_recordings() {
    let traces = [many(100_000), shipped("llama_var.default"), Trace::default()];
    for trace in &traces {
        for most in [9_000_000, 300_000, 60_000, 30_000] {
            let (text, value) = sheet_of(trace, most).unwrap();
            assert!(text.len() <= most, "{} of {most}", text.len());
            let list = value["columns"]["reserved_max"].as_array().unwrap();
            let mut sum = 0;
            let numbers = list.iter().map(|difference| {
                sum += difference.as_i64().unwrap();
                sum
            });
            assert_eq!(numbers.max(), value["peak_reserved"]["bytes"].as_i64());
        }
        assert!(sheet_of(trace, 100).is_none());
    }
}

#[test]
fn text_of_a_recording_ends_no_script() {
    let (text, value) = sheet_of(&many(10), 50_000).unwrap();
    assert!(!text.contains('<') && !text.contains('>') && !text.contains('&'), "{text}");
    assert_eq!(value["name"], "</script><img src=x>");
    assert_eq!(escaped("a\u{2028}<!--\u{2029}&"), "a\\u2028\\u003c!--\\u2029\\u0026");
}

#[test]
fn a_block_that_waits_for_other_streams_is_freed_before_it_is_gone() {
    let event = |action, address, size| TraceEvent::new(action, address, size, StreamId(0));
    let events = vec![
        event(Action::SegmentAlloc, 0x10_0000, 20 * MIB),
        event(Action::Alloc, 0x10_0000, 3 * MIB + 5),
        event(Action::Alloc, 0x10_0000 + 3 * MIB + 512, 17 * MIB - 100_000),
        event(Action::FreeRequested, 0x10_0000, 3 * MIB + 5),
        event(Action::FreeCompleted, 0x10_0000, 3 * MIB + 5),
    ];
    let lives = lives(&Trace { events, ..Trace::default() });
    let [first, second] = lives.blocks[..] else { panic!("{:?}", lives.blocks) };
    assert_eq!((first.born, first.freed, first.gone, first.size_bytes), (2, 4, 5, 3 * MIB + 512));
    // Less than 1 MiB remains behind the block, so nothing is split off.
    assert_eq!((second.gone, second.size_bytes), (NEVER, 17 * MIB - 512));
    // Of the moments with the most reserved bytes, the one with the most live bytes is chosen.
    assert_eq!((lives.peak_reserved.moment, lives.peak_live.moment), (3, 3));
    assert_eq!(lives.pools.items, [PoolId::DEFAULT]);
}

#[test]
fn a_pause_lowers_reserved_and_live_bytes_until_the_resume() {
    let event = |action, address, size| TraceEvent::new(action, address, size, StreamId(0));
    let (first, second) = (0x20_0000, 0x20_0000 + 20 * MIB);
    let events = vec![
        event(Action::SegmentMap, first, 40 * MIB),
        event(Action::Alloc, first, 15 * MIB),
        event(Action::Alloc, second, 20 * MIB),
        event(Action::TagPause, first, 40 * MIB),
        event(Action::FreeRequested, second, 20 * MIB),
        event(Action::FreeCompleted, second, 20 * MIB),
        event(Action::SegmentUnmap, second, 20 * MIB),
        event(Action::TagResume, first, 20 * MIB),
        event(Action::FreeRequested, first, 15 * MIB),
    ];
    let last = events[0].in_segment(PoolKind::Large, PoolId::DEFAULT, true);
    let segments = vec![SegmentLayout { size_bytes: 20 * MIB, ..last }];
    let lives = lives(&Trace { events, segments, ..Trace::default() });
    let columns = lives.columns.columns.iter();
    let mib = columns
        .map(|c| [c.live_last_bytes, c.reserved_last_bytes, c.paused_last_bytes].map(|n| n / MIB));
    let expected = [
        [0, 0, 0],
        [0, 40, 0],
        [15, 40, 0],
        [35, 40, 0],
        [0, 0, 40],
        [0, 0, 40],
        [0, 0, 40],
        [0, 0, 20],
        [15, 20, 0],
        [0, 20, 0],
    ];
    assert_eq!(mib.collect::<Vec<_>>(), expected);
    assert_eq!(lives.columns.columns[4].total_max_bytes, 40 * MIB);
    assert!(lives.layout(5).is_empty());
    assert_eq!(lives.layout(8)[0].blocks[0].requested_bytes, 15 * MIB);
}

/// Returns events with numbers that no device has, in an order that no allocator produces.
fn contradicting(count: usize) -> Trace {
    let sizes = [0, 1, 511, 20 * MIB, u64::MAX / 2, u64::MAX];
    let addresses = [0, 512, 1 << 40, (1 << 40) + 7, u64::MAX - 5, u64::MAX];
    let actions = [
        Action::SegmentMap,
        Action::Alloc,
        Action::SegmentAlloc,
        Action::FreeRequested,
        Action::OutOfMemory,
        Action::SegmentUnmap,
        Action::FreeCompleted,
        Action::SegmentFree,
        Action::TagPause,
        Action::TagResume,
    ];
    let mut trace = Trace::default();
    let mut random = 88_172_645_463_325_252_u64;
    for _ in 0..count {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let pick = |of: usize, shift: u32| usize::try_from(random >> shift).unwrap() % of;
        let (action, stream) = (actions[pick(10, 9)], StreamId(random >> 62));
        let (address, size) = (addresses[pick(6, 17)], sizes[pick(6, 29)]);
        let time_us = random % 1000;
        // Readers refuse ranges beyond the last address.
        if action != Action::OutOfMemory && address.checked_add(size).is_none() {
            continue;
        }
        trace.events.push(TraceEvent { time_us, ..TraceEvent::new(action, address, size, stream) });
    }
    trace
}

#[test]
fn numbers_that_contradict_each_other_make_a_page_all_the_same() {
    let trace = contradicting(20_000);
    let lives = lives(&trace);
    let answer = described("x", &recording_of(&trace), &Question::default()).unwrap();
    assert_eq!(answer.moments.len(), 3 + usize::from(!lives.failures.is_empty()));
    for most in [2_000_000, 80_000] {
        let (text, _) = sheet_of(&trace, most).unwrap();
        assert!(text.len() <= most);
    }
}

/// Runs a script under node on the scripts of the page and the data of a recording. Returns what it prints;
/// `None` without node.
fn under_node(
    name: &str,
    script: &str,
    scripts: String,
    trace: &Trace,
    most: usize,
) -> Option<serde_json::Value> {
    let folder = std::env::temp_dir().join(format!("stratalloc_{name}_{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let [all, check, sheet] =
        ["scripts.js", "check.js", "sheet.json"].map(|file| folder.join(file));
    std::fs::write(&all, scripts).unwrap();
    std::fs::write(&check, script).unwrap();
    std::fs::write(&sheet, sheet_of(trace, most)?.0).unwrap();
    let output = std::process::Command::new("node").arg(&check).arg(&all).arg(&sheet).output();
    std::fs::remove_dir_all(&folder).unwrap();
    let Ok(output) = output else {
        eprintln!("skipped: no node");
        return None;
    };
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {errors}");
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Draws a recording under node and compares sums over the drawing with sums over its rows. Returns the
/// ways in which it was divided, and whether the page has every block; `None` without node.
fn drawn(name: &str, trace: &Trace, most: usize) -> Option<(Vec<String>, bool)> {
    let (script, scripts) = (include_str!("tests/drawn.js"), page::drawing_scripts());
    let found = under_node(&format!("drawn_{name}"), script, scripts, trace, most)?;
    assert_eq!(found["problems"], serde_json::json!([]), "{name}");
    let ways = found["ways"].as_array().unwrap().iter();
    let ways = ways.map(|way| way.as_str().unwrap().to_owned()).collect();
    Some((ways, found["whole"].as_bool().unwrap()))
}

#[test]
fn sums_over_the_drawing_are_sums_over_the_rows_at_every_zoom_level() {
    let truth = |name: &str| {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth");
        reader::read(&folder.join(format!("{name}.pickle.xz")), &Limits::default()).unwrap()
    };
    for (name, trace, expected) in [
        ("variable_lengths", truth("variable_lengths"), "category line step block"),
        ("ring_turned", truth("ring_turned"), "category line"),
        ("serve", shipped("serve.default"), "stream block"),
        ("gcfrac", shipped("2.15.0.gcfrac"), "block"),
        ("many", many(3000), "block"),
        ("none", Trace::default(), "block"),
        ("contradicting", contradicting(5000), "stream block"),
    ] {
        let Some((ways, is_whole)) = drawn(name, &trace, 4_000_000) else { return };
        assert!(is_whole, "{name}");
        let has = |way: &str| ways.iter().any(|one| one == way);
        assert!(expected.split(' ').all(has), "{name}: {ways:?}");
    }
}

#[test]
fn layers_at_the_peaks_of_columns_are_drawn_where_the_blocks_do_not_fit() {
    let traces = [("serve_short", shipped("serve.default")), ("many_short", many(30_000))];
    for (name, trace) in traces {
        let Some((_, is_whole)) = drawn(name, &trace, 60_000) else { return };
        assert!(!is_whole, "{name}");
    }
}
