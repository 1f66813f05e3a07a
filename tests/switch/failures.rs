//! Switches that fail must change nothing.

use super::{ASYNC, Fixture, NATIVE};
use crate::common::prelude::*;

#[test]
fn a_bad_string_changes_nothing_and_is_reported_with_its_position() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let block = fixture.take(MIB);
    let (owner, used) = (block.owner(), fixture.used_bytes());
    for bad in
        ["backend:", "max_split_size_mb:1", "expandable_segments:Maybe", "{", "backend:native,,"]
    {
        let error = fixture.allocator.switch(bad).expect_err(bad);
        assert!(
            matches!(&error, SwitchError::Configuration { text, .. } if text == bad),
            "{error}"
        );
    }
    let unknown =
        fixture.allocator.switch("backend:not_registered_by_anybody").expect_err("unknown");
    assert!(matches!(unknown, SwitchError::Build(BuildError::UnknownBackend { .. })), "{unknown}");
    assert_eq!((fixture.used_bytes(), fixture.retired()), (used, 0));
    fixture.give(block);
    assert_eq!(fixture.take(MIB).owner(), owner, "the same allocator serves");
}

#[test]
fn a_constructor_that_fails_changes_nothing() {
    let refuse = |_: Arc<dyn Driver>, _: &_| -> registry::Constructed { Err("not today".into()) };
    registry::register("refusing", refuse).expect("the name is free");
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let block = fixture.take(MIB);
    let error = fixture.allocator.switch("backend:refusing").expect_err("it refuses");
    assert!(error.to_string().contains("not today"), "{error}");
    assert_eq!(fixture.retired(), 0);
    fixture.give(block);
}

#[test]
fn a_device_that_cannot_do_it_changes_nothing() {
    let driver: Arc<dyn Driver> = plain(Arc::new(Sim::new(SimOptions::default())));
    let config = config(NATIVE);
    let switchable = Switchable::build(&config, driver, BuildOptions::default()).expect("it can");
    let block = switchable.take(MIB);
    for lacking in ["backend:cudaMallocAsync", "backend:native,expandable_segments:True"] {
        let error = switchable.switch(lacking).expect_err("no such part");
        assert!(matches!(error, SwitchError::Build(BuildError::Driver(_))), "{error}");
    }
    assert_eq!((switchable.retired(), switchable.name()), (0, "native"));
    switchable.give(block);
}

#[test]
fn a_close_that_fails_is_in_no_switchs_way() {
    let fixture = Fixture::new(8 * GIB, ASYNC);
    let (pools, pool) = (fixture.private_pools(), PoolId { capture: 0, user: 9 });
    pools.create_pool(pool, PoolOptions::default()).expect("a new id");
    pools.open_scope(pool, ScopeFilter::Stream(StreamId(7))).expect("none is open");
    while pools.release_pool(pool).is_ok() {}
    pools.close_scope(pool).expect("it is open, although the pool has no users");
    assert!(pools.close_scope(pool).is_err());
    fixture.switch(NATIVE);
    assert_eq!(fixture.retired(), 0);
}
