//! Configuration strings that are applied at run time. PyTorch's tests of its parser are in
//! `src/config/tests.rs`.

use crate::common::prelude::*;

/// Returns the size in MiB of the block that a request of `mib` gets.
fn block_mib(fixture: &Fixture, mib: u64) -> u64 {
    let before = fixture.stats().memory_allocated();
    let block = fixture.take(mib * MIB);
    let bytes = (fixture.stats().memory_allocated() - before).unsigned_abs();
    fixture.give(block);
    fixture.empty_cache();
    bytes / MIB
}

// From PyTorch's tests: settings change at run time. A string without `roundup_power2_divisions` resets
// them. A list sets the divisions for each size.
#[test]
fn strings_change_the_rounding_at_run_time_and_reset_what_they_do_not_mention() {
    let fixture = Fixture::new(8 * GIB, "");
    let mut config = Config::default();
    for (text, at_84, at_400) in [
        ("", 84, 400),
        ("roundup_power2_divisions:4", 96, 448),
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84, 400),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 88, 512),
        ("roundup_power2_divisions:1", 84, 400),
    ] {
        config = config.updated(text, &KeyTable::default()).unwrap();
        fixture.caching().apply(&config).expect("the device can");
        assert_eq!((block_mib(&fixture, 84), block_mib(&fixture, 400)), (at_84, at_400), "{text}");
    }
}
