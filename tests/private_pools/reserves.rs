//! The address space that expandable segments reserve: by default, and for streams with a reserve class,
//! which is a name that the configuration maps to a size. Also the list of these segments.

use crate::common::prelude::*;

const DEVICE_BYTES: u64 = 100 * GIB;
const ON: &str = "expandable_segments:True";

/// Returns the address space that the first large segment of a stream reserves.
fn reserved(fixture: &Fixture, stream: StreamId) -> u64 {
    let block = fixture.take_on(30 * MIB, stream);
    let segments = fixture.expandable().expandable_segments();
    let own = segments.iter().find(|s| s.stream == stream && s.kind == PoolKind::Large);
    let bytes = own.expect("it has one").reserved_bytes;
    fixture.give(block);
    bytes
}

fn rounded(bytes: u64) -> u64 {
    bytes.next_multiple_of(20 * MIB)
}

#[test]
fn reserves_are_as_configured() {
    let most = DEVICE_BYTES / 8 * 9;
    for (reserve, expected) in [
        ("", most),
        (",expandable_segments_reserve:0.5", 50 * GIB),
        (",expandable_segments_reserve:40G", 40 * GIB),
        (",expandable_segments_reserve:7", most),
    ] {
        let fixture = Fixture::new(DEVICE_BYTES, &format!("{ON}{reserve}"));
        assert_eq!(reserved(&fixture, StreamId(0)), rounded(expected), "{reserve}");
    }
}

#[test]
fn a_stream_has_the_reserve_of_its_class() {
    let conf = format!(
        "{ON},expandable_segments_reserve:40G,\
         expandable_segments_reserve_by_class:[side:0.25,tiny:8G]"
    );
    let fixture = Fixture::new(DEVICE_BYTES, &conf);
    for (stream, class, expected) in [
        (1, Some("side"), 25 * GIB),
        (2, Some("tiny"), 8 * GIB),
        (3, Some("unknown"), 40 * GIB),
        (4, Some(""), 40 * GIB),
        (5, None, 40 * GIB),
    ] {
        let stream = StreamId(stream);
        fixture.expandable().set_reserve_class(stream, class);
        assert_eq!(reserved(&fixture, stream), rounded(expected), "{class:?}");
    }
    fixture.expandable().set_reserve_class(StreamId(6), Some("tiny"));
    fixture.expandable().set_reserve_class(StreamId(6), None);
    assert_eq!(reserved(&fixture, StreamId(6)), rounded(40 * GIB), "the class was taken away");
    fixture.check();
}

// The request is a fifth of the device's size, but a segment reserves only a twentieth of it.
#[test]
fn a_request_beyond_the_reserve_names_the_key_and_the_class() {
    let conf = format!(
        "{ON},expandable_segments_reserve:0.05,expandable_segments_reserve_by_class:[side:0.04]"
    );
    let fixture = Fixture::new(DEVICE_BYTES, &conf);
    let ooms = fixture.count_ooms();
    let report = fixture.fail(20 * GIB, StreamId(0)).hints.concat();
    assert!(report.contains("expandable_segments_reserve."), "{report}");
    assert!(!report.contains("class"), "{report}");
    fixture.expandable().set_reserve_class(StreamId(9), Some("side"));
    let report = fixture.fail(20 * GIB, StreamId(9)).to_string();
    assert!(report.contains("expandable_segments_reserve_by_class."), "{report}");
    assert!(report.contains("class 'side'"), "{report}");
    let report = fixture.fail(100 * DEVICE_BYTES, StreamId(0)).hints.concat();
    assert!(!report.contains("reserve"), "no reserve could help: {report}");
    assert_eq!(ooms.load(Ordering::SeqCst), 3);
}

#[test]
fn segments_of_all_streams_and_pools_are_listed() {
    let fixture = Fixture::new(DEVICE_BYTES, ON);
    let pool = fixture.pool();
    let scope = pool.enter().unwrap();
    let mut held = vec![fixture.take_on(MIB, StreamId(7))];
    drop(scope);
    held.extend([fixture.take(MIB), fixture.take(45 * MIB)]);
    let mut listed: Vec<_> = fixture
        .expandable()
        .expandable_segments()
        .iter()
        .map(|s| (s.stream.0, s.pool == pool.id(), s.kind, s.page_bytes, s.mapped_bytes))
        .collect();
    listed.sort_by_key(|of| (of.0, of.3));
    assert_eq!(
        listed,
        [
            (0, false, PoolKind::Small, 2 * MIB, 2 * MIB),
            (0, false, PoolKind::Large, 20 * MIB, 60 * MIB),
            (7, true, PoolKind::Small, 2 * MIB, 2 * MIB),
        ]
    );
    held.into_iter().for_each(|block| fixture.give(block));
    let off = config("");
    fixture.caching().apply(&off).unwrap();
    fixture.empty_cache();
    assert_eq!(fixture.expandable().expandable_segments().len(), 1, "the pool is in use");
    fixture.check();
}
