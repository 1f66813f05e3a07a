//! Tests of the readers: both syntaxes, every compression, old and new formats.
//!
//! `blocks` tests the stacks of blocks and of generated code, `hostile` malformed files, `forms` and
//! `profile` files other than snapshots; `writer` creates files.

mod blocks;
mod forms;
mod hostile;
mod profile;
mod rmm;
mod stored;
mod writer;

use std::cell::Cell;
use std::io::Write;

use super::*;
use crate::UnknownEntries;
use stored::xz;
use stratalloc::history::{Action, BlockStateName};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{MIB, PoolKind};
use writer::{Node, at, block, dict, entry, int, list, segment, snapshot, text, tuple};

fn read_from(bytes: &[u8]) -> Result<Trace, TraceError> {
    read_bytes("file", bytes, &Limits::default(), None)
}

/// Reads the same content in both syntaxes and checks that the results are equal.
fn read_both(node: &Node) -> Result<Trace, String> {
    let from_pickle = read_from(&node.pickle()).map_err(|e| e.to_string());
    let from_json = read_from(&node.json()).map_err(|e| e.to_string());
    assert_eq!(from_pickle, from_json);
    from_pickle
}

fn events(entries: Vec<Node>) -> Node {
    dict([("segments", list([])), ("device_traces", list([Node::List(entries)]))])
}

#[test]
fn a_snapshot_is_read_from_both_syntaxes() {
    let trace = read_both(&snapshot()).unwrap();
    assert_eq!(trace.conf, "expandable_segments:True");
    assert_eq!(trace.device, 0);
    let actions: Vec<_> = trace.events.iter().map(|e| e.action).collect();
    assert_eq!(
        actions,
        [Action::SegmentAlloc, Action::Alloc, Action::OutOfMemory, Action::SegmentFree]
    );
    let alloc = trace.events[1];
    assert_eq!(alloc.address, 0x7f00_0000_0000);
    assert_eq!(alloc.size_bytes, 4 * MIB - 100);
    assert_eq!(alloc.stream, StreamId(0x5555_0000_1234));
    assert_eq!(alloc.named_pool(), Some(PoolId { capture: 3, user: 1 }));
    assert_eq!(trace.events[0].named_pool(), None);
    assert_eq!(trace.events[2].address, 1234, "the device's free bytes");
    assert!(trace.events[3].empty_cache);
    assert!(!alloc.empty_cache);

    assert_eq!(trace.segments.len(), 2);
    assert!(trace.segments[0].address < trace.segments[1].address);
    let segment = &trace.segments[1];
    assert_eq!(segment.kind, PoolKind::Large);
    assert_eq!(segment.pool, PoolId { capture: 0, user: 2 });
    assert!(segment.expandable);
    assert_eq!(segment.blocks[1].address, segment.address + 4 * MIB);
    assert_eq!(segment.blocks[0].requested_bytes, 4 * MIB - 100);
    assert_eq!(segment.blocks[1].state, BlockStateName::Inactive);
}

#[test]
fn events_name_their_stacks_and_equal_stacks_are_one() {
    let trace = read_both(&snapshot()).unwrap();
    assert_eq!(trace.stacks.len(), 1);
    let stack = trace.events[1].stack.unwrap();
    assert!(trace.events.iter().all(|event| event.stack == Some(stack)));
    let frames: Vec<_> = trace.stacks.frames(stack).collect();
    assert_eq!(frames.len(), 2);
    assert_eq!((frames[0].function, frames[0].line), ("forward", 70_000));
    assert_eq!(frames[1].file, "a/model/with/a/long/path/in/front/of/it.py");
}

#[test]
fn changes_of_metadata_and_ranges_of_a_profiler_are_marks() {
    let event = |(time, metadata): (i128, Node)| {
        let named = [
            ("action", text("alloc")),
            ("stream", int(0)),
            ("time_us", int(time)),
            ("user_metadata", metadata),
        ];
        dict(named.into_iter().chain(at(512 * time, 512)))
    };
    let range = |time, name: &'static str, more: Vec<(&'static str, Node)>| {
        let named = [("time_us", int(time)), ("name", text(name))];
        dict(named.into_iter().chain(more))
    };
    let metadata =
        [text("warm"), text("warm"), text(""), text("warm"), text("empty_cache"), Node::None];
    let list_of_events = (1..).zip(metadata).map(event).collect::<Vec<_>>();
    let ranges = [
        range(3, "ProfilerStep#1", vec![("stage", text("START")), ("device", int(0))]),
        range(4, "ProfilerStep#1", vec![("stage", text("END")), ("device", int(0))]),
        range(5, "elsewhere", vec![("stage", text("START")), ("device", int(1))]),
        range(99, "last", vec![]),
        int(7),
        dict([("name", text("no time"))]),
    ];
    let snapshot = dict([
        ("segments", list([])),
        ("device_traces", list([Node::List(list_of_events)])),
        ("external_annotations", list(ranges)),
    ]);
    let trace = read_both(&snapshot).unwrap();
    let marks: Vec<_> = trace.marks.iter().map(|m| (m.events_before, m.text.as_str())).collect();
    assert_eq!(marks, [(0, "warm"), (2, "ProfilerStep#1"), (3, "warm"), (6, "last")]);
}

#[test]
fn what_is_no_stack_is_passed_over() {
    let frame = |function| dict([("name", function), ("colno", Node::Float(0.5))]);
    let odd = [
        Node::None,
        Node::Bool(true),
        int(-3),
        Node::Float(1.5),
        text("forward"),
        dict([("name", text("forward"))]),
        list([]),
        list([Node::None, list([int(1)]), text("size"), Node::Float(0.5)]),
    ];
    let event = |frames| {
        let named = [("action", text("alloc")), ("stream", int(0)), ("frames", frames)];
        dict(named.into_iter().chain(at(512, 512)))
    };
    let trace = read_both(&events(odd.map(event).into())).unwrap();
    assert_eq!(trace.events.len(), 8);
    assert!(trace.events.iter().all(|event| event.stack.is_none()));
    assert!(trace.stacks.is_empty());

    // A function may have the same name as a word of the format, or no name. Its frame must be kept. Items
    // of the list that are not frames are skipped.
    let named = [list([int(1), frame(text("size"))]), list([frame(int(7))])];
    let trace = read_both(&events(named.map(event).into())).unwrap();
    let functions = trace.events.iter().map(|event| {
        let mut frames = trace.stacks.frames(event.stack.unwrap());
        (frames.next().unwrap().function, frames.count())
    });
    assert!(functions.eq([("size", 0), ("", 0)]));
}

#[test]
fn every_compression_is_recognised_by_its_content_and_no_cut_is_read() {
    let plain = snapshot().pickle();
    let expected = read_from(&plain).unwrap();
    let gzip = |bytes: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    };
    let zstd = |bytes: &[u8]| {
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        ruzstd::encoding::compress_to_vec(bytes, level)
    };
    let skippable = b"\x5a\x2a\x4d\x18\x03\x00\x00\x00abc".to_vec();
    let (a, b) = plain.split_at(plain.len() / 2);
    for packed in [
        gzip(&plain),
        xz(&plain),
        zstd(&plain),
        [gzip(a), gzip(b)].concat(),
        [xz(a), vec![0; 8], xz(b)].concat(),
        [skippable.clone(), zstd(a), skippable, zstd(b)].concat(),
        xz(&snapshot().json()),
        plain.clone(),
        snapshot().json(),
    ] {
        assert_eq!(read_from(&packed).unwrap(), expected);
        for cut in 0..packed.len() {
            // A cut between two members leaves valid compressed data, but then the pickle is cut off.
            assert!(read_from(&packed[..cut]).is_err(), "cut at {cut}");
        }
    }
}

#[test]
fn white_space_and_a_byte_order_mark_may_precede_json() {
    let json = snapshot().json();
    let marked = [b"\xef\xbb\xbf\n ".as_slice(), &json, b"\n"].concat();
    assert_eq!(read_from(&marked).unwrap(), read_from(&json).unwrap());
}

#[test]
fn progress_counts_the_bytes_taken() {
    let bytes = snapshot().pickle();
    let last = Cell::new(0);
    let progress = |taken| last.set(taken);
    read_bytes("file", &*bytes, &Limits::default(), Some(&progress)).unwrap();
    assert_eq!(last.get(), bytes.len() as u64);
}

#[test]
fn a_bare_list_is_segments_only() {
    let size = 2 * i128::from(MIB);
    let block = |size, state| dict([("size", int(size)), ("state", text(state))]);
    let old = list([dict([
        ("address", int(4096)),
        ("total_size", int(size)),
        ("stream", Node::None),
        ("blocks", list([block(512, "active_allocated"), block(size - 512, "inactive")])),
    ])]);
    let trace = read_both(&old).unwrap();
    assert!(trace.events.is_empty());
    let segment = &trace.segments[0];
    assert_eq!(segment.kind, PoolKind::Small);
    assert_eq!(segment.pool, PoolId::DEFAULT);
    assert_eq!(segment.stream, StreamId::DEFAULT);
    assert_eq!(segment.blocks[1].address, 4096 + 512);
    assert_eq!(segment.blocks[0].requested_bytes, 512);
}

#[test]
fn remarks_are_no_events_when_a_device_is_chosen() {
    let event = || entry("alloc", at(512, 1));
    let remark = || entry("annotate", at(0, 0));
    let traces = [list([remark(), remark(), event()]), list([event(), event()]), list([event()])];
    let with = |traces| dict([("segments", list([])), ("device_traces", Node::List(traces))]);
    let trace = read_both(&with(traces.to_vec())).unwrap();
    assert_eq!((trace.device, trace.events.len()), (1, 2));
    // If two devices have equally many events, the first is chosen, even if its list is shorter.
    let equal = [list([event()]), list([remark(), event()])];
    assert_eq!(read_both(&with(equal.to_vec())).unwrap().device, 0);
    let none = [list([remark()]), list([])];
    assert_eq!(read_both(&with(none.to_vec())).unwrap().events, []);
}

#[test]
fn of_devices_without_failures_the_one_with_more_reserved_bytes_is_read_unless_one_is_asked_for() {
    let event = || entry("alloc", at(512, 1));
    let segment = |device, address| segment(device, address, 0, vec![]);
    let node = dict([
        ("segments", list([segment(1, 9), segment(0, 8), segment(1, 7)])),
        ("device_traces", list([list([event()]), list([event(), event()]), list([])])),
    ]);
    let trace = read_both(&node).unwrap();
    assert_eq!((trace.device, trace.events.len()), (1, 2));
    let addresses: Vec<_> = trace.segments.iter().map(|s| s.address).collect();
    assert_eq!(addresses, [7, 9]);

    for bytes in [node.pickle(), node.json()] {
        let of = |device| {
            let limits = Limits { device: Some(device), ..Limits::default() };
            read_bytes("file", bytes.as_slice(), &limits, None)
        };
        let trace = of(0).unwrap();
        assert_eq!((trace.device, trace.events.len()), (0, 1));
        assert_eq!(trace.segments.len(), 1);
        assert_eq!(of(2).unwrap().events.len(), 0);
        let error = of(3).unwrap_err().to_string();
        assert!(error.contains("3 devices and no device 3"), "{error}");
    }
}

#[test]
fn remarks_are_skipped_and_settings_may_be_absent() {
    let node = events(vec![
        entry("snapshot", at(0, 0)),
        entry("annotate", at(0, 0)),
        dict([("action", text("user_defined"))]),
        entry("free_completed", at(1, 2)),
    ]);
    let trace = read_both(&node).unwrap();
    assert_eq!(trace.events.len(), 1);
    assert_eq!(trace.conf, "");

    let settings = dict([("PYTORCH_CUDA_ALLOC_CONF", Node::None)]);
    let node = dict([("segments", list([])), ("allocator_settings", settings)]);
    assert_eq!(read_both(&node).unwrap().conf, "");
}

#[test]
fn the_account_of_the_device_is_read() {
    let with = |account| dict([("segments", list([])), ("account", text(account))]);
    let rows = r#"[{"device":0,"owner":"a","kind":"","bytes":-7,"found_by":"b"},
        {"device":1,"owner":"a","kind":"","bytes":8,"found_by":"b"}]"#;
    let trace = read_both(&with(rows)).unwrap();
    let bytes: Vec<_> = trace.account.iter().map(|row| row.bytes).collect();
    assert_eq!((trace.device, bytes), (0, vec![-7]));
    for bad in ["", "{}", r#"[{"device":0}]"#] {
        let error = read_both(&with(bad)).unwrap_err();
        assert!(error.contains("account: expected the rows of an account"), "{error}");
    }
}

#[test]
fn pools_may_be_lists_or_tuples() {
    for pair in [list, tuple] {
        let pool = pair([int(1), int(2)]);
        let node = events(vec![entry(
            "alloc",
            [("addr", int(1)), ("size", int(2)), ("segment_pool_id", pool)],
        )]);
        let expected = PoolId { capture: 1, user: 2 };
        assert_eq!(read_both(&node).unwrap().events[0].named_pool(), Some(expected));
    }
}

#[test]
fn numbers_keep_all_64_bits() {
    for number in [0, 255, 256, 65_536, 1 << 31, 1 << 61, u64::MAX - 2] {
        let node = events(vec![entry("alloc", at(number.into(), 2))]);
        assert_eq!(read_both(&node).unwrap().events[0].address, number);
    }
}

#[test]
fn shared_and_late_filled_containers_are_read_as_python_would() {
    // The list of events is stored in the memo, inserted in its place, and filled in two parts
    // afterwards. Its one dictionary is changed after it was appended.
    let mut bytes =
        b"\x80\x02}q\x00(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces".to_vec();
    bytes.extend(b"]q\x01]q\x02auh\x02}q\x03(X\x06\x00\x00\x00actionX\x05\x00\x00\x00alloc");
    bytes.extend(b"X\x06\x00\x00\x00streamK\x00X\x04\x00\x00\x00addrK\x07ua(h\x03h\x03e0");
    bytes.extend(b"h\x03X\x04\x00\x00\x00sizeK\x01sX\x04\x00\x00\x00sizeK\x09s0.");
    let trace = read_from(&bytes).unwrap();
    assert_eq!(trace.events.len(), 3);
    assert!(trace.events.iter().all(|e| e.size_bytes == 9 && e.address == 7));
}

#[test]
fn content_that_is_no_snapshot_is_named_with_its_place() {
    let good = || [("action", text("alloc")), ("stream", int(0))].into_iter().chain(at(1, 2));
    let with = |key, value: Node| {
        let others = good().filter(|(other, _)| *other != key);
        events(vec![dict(good()), dict(others.chain([(key, value)]))])
    };
    for (node, place) in [
        (with("action", int(7)), "device_traces[0][1].action: "),
        (with("size", int(-1)), "device_traces[0][1].size: "),
        (with("size", int(1 << 64)), "device_traces[0][1].size: "),
        (with("size", text("big")), "device_traces[0][1].size: "),
        (with("stream", int(-7)), "device_traces[0][1].stream: "),
        (with("pool_id", list([])), "device_traces[0][1].pool_id: "),
        (with("addr", int(u64::MAX.into())), "device_traces[0][1]: "),
        (events(vec![dict([])]), "device_traces[0][0]: "),
        (dict([]), "the snapshot: "),
    ] {
        let pickle = read_from(&node.pickle()).unwrap_err().to_string();
        assert!(pickle.contains(place), "{pickle}");
        let json = read_from(&node.json()).unwrap_err().to_string();
        assert!(json.contains(place), "{json}");
        assert!(pickle.starts_with("file: "), "{pickle}");
    }
    let error = read_both(&with("size", text("big"))).unwrap_err();
    assert!(error.contains("\"big\""), "{error}");
}

#[test]
fn entries_with_unknown_actions_are_counted_for_the_device_that_is_read() {
    let entry = |action: &'static str| {
        let numbers = ["addr", "size", "stream"].map(|key| (key, int(512)));
        dict([("action", text(action))].into_iter().chain(numbers))
    };
    let devices = [
        vec![entry("alloc"), entry("fold")],
        vec![entry("teleport"), entry("alloc"), entry("fold"), entry("alloc")],
        vec![entry("alloc"), dict([("action", text("beam"))])],
    ];
    let devices = list(devices.map(Node::List));
    let trace = read_both(&dict([("segments", list([])), ("device_traces", devices)])).unwrap();
    assert_eq!((trace.device, trace.events.len()), (1, 2));
    let expected = UnknownEntries { entries: 2, first_action: "teleport".to_owned() };
    assert_eq!(trace.unknown, expected);
}

#[test]
fn blocks_that_do_not_tile_their_segment_are_refused_with_the_numbers() {
    let segment = |size: i128, second: i128| {
        let blocks = [(1000, 100), (second, 200)].map(|(at, size)| block(at, size, "inactive"));
        list([writer::segment(0, 1000, size, blocks.into())])
    };
    assert!(read_both(&segment(300, 1100)).is_ok());
    let error = read_both(&segment(301, 1100)).unwrap_err();
    assert!(error.contains("301") && error.contains("300"), "{error}");
    let error = read_both(&segment(300, 1101)).unwrap_err();
    assert!(error.contains("1101") && error.contains("1100"), "{error}");
}

#[test]
fn annotations_and_host_memory_are_kept() {
    let numbers = |at| [("addr", int(at)), ("size", int(512)), ("stream", int(0))];
    let entry = |action, at| dict([("action", text(action))].into_iter().chain(numbers(at)));
    let annotate = dict(
        [("action", text("annotate")), ("user_metadata", text("weights"))]
            .into_iter()
            .chain(numbers(512)),
    );
    let blocks = vec![block(1000, 100, "active_allocated"), block(1100, 200, "inactive")];
    let segment = segment(-1, 1000, 300, blocks);
    let host = ["segment_alloc", "segment_alloc", "alloc", "segment_free", "segment_free"];
    let node = dict([
        ("segments", list([])),
        ("device_traces", list([list([entry("alloc", 512), annotate, entry("alloc", 1024)])])),
        ("host_segments", list([segment])),
        ("host_traces", list(host.map(|action| entry(action, 4096)))),
    ]);
    let trace = read_both(&node).unwrap();
    assert_eq!((trace.events.len(), trace.segments.len()), (2, 0));
    let [annotation] = trace.annotations.as_slice() else { panic!("{:?}", trace.annotations) };
    assert_eq!((annotation.events_before, annotation.address), (1, 512));
    assert_eq!((annotation.text.as_str(), annotation.size_bytes), ("weights", 512));
    let host = trace.host.unwrap();
    let bytes = (host.reserved_bytes, host.live_bytes, host.peak_reserved_bytes);
    assert_eq!(bytes, (300, 100, 300 + 1024));
}
