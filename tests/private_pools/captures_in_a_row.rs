//! Captures that follow each other over one pool, with no request between them.

use crate::common::prelude::*;

/// Returns the reserved MiB after each of three captures with no request between them. In each, ten blocks of
/// 10 MiB are used by a side stream and freed.
fn reserved_by_captures_in_a_row(conf: &str) -> [u64; 3] {
    let fixture = Fixture::new(ROOMY, conf);
    let (stream, side, pool) = (fixture.stream(), fixture.stream(), PoolId::next_capture());
    fixture.private_pools().create_pool(pool, PoolOptions::default()).expect("it can");
    [(); 3].map(|()| {
        // The scope opens before the capture begins, as in PyTorch.
        fixture.private_pools().open_scope(pool, ScopeFilter::Stream(stream)).expect("it can");
        Capture::begin(&*fixture.device, stream).expect("it can");
        fixture.join(stream, side);
        for _ in 0..10 {
            let block = fixture.take_on(10 * MIB, stream);
            fixture.work(&block, side);
            fixture.give(block);
        }
        fixture.join(side, stream);
        fixture.end_capture(stream);
        fixture.private_pools().close_scope(pool).expect("it can");
        fixture.device.complete_all();
        fixture.check();
        fixture.reserved_bytes() / MIB
    })
}

#[test]
fn captures_in_a_row_reuse_the_memory_of_the_first() {
    for conf in BOTH {
        assert_eq!(reserved_by_captures_in_a_row(conf), [100; 3], "{conf}");
    }
    for version in ["pytorch-2.11", "pytorch-2.15"] {
        let conf = format!("compat:{version}");
        assert_eq!(reserved_by_captures_in_a_row(&conf), [100, 200, 300], "{conf}");
    }
}

// Queries of events are not allowed on a thread that captures.
#[test]
fn a_scope_that_opens_inside_a_capture_queries_no_event() {
    let fixture = Fixture::new(ROOMY, "");
    let (stream, side) = (fixture.stream(), fixture.stream());
    let block = fixture.take_on(MIB, stream);
    fixture.record(&block, side);
    fixture.give(block);
    let outer = fixture.capture(stream, PoolId::next_capture());
    fixture.give(fixture.take_on(MIB, stream));
    let before = fixture.device.calls("query_event");
    let pool = fixture.pool();
    drop(pool.enter().unwrap());
    assert_eq!(fixture.device.calls("query_event"), before);
    fixture.end_capture(stream);
    drop(outer);
    drop(pool.enter().unwrap());
    assert!(fixture.device.calls("query_event") > before, "the capture is over");
}
