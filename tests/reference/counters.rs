//! Counters: how one request changes them, and the invariants that relate them to the layout.

use super::{H200_BYTES, signed};
use crate::common::prelude::*;

// From PyTorch's tests: 256 floats raise the active bytes by 1,024. After the free, `freed` is 1,024 and
// the current value is the initial one. After a reset, peaks equal current values.
#[test]
fn a_kilobyte_moves_the_active_bytes_by_a_kilobyte_there_and_back() {
    let fixture = Fixture::new(H200_BYTES, "");
    let before = fixture.stats().active_bytes.all;
    let floats = fixture.take(256 * 4);
    let during = fixture.stats().active_bytes.all;
    assert_eq!(during.current - before.current, 1024);
    assert_eq!(during.allocated - before.allocated, 1024);
    assert_eq!(during.peak, 1024);
    fixture.give(floats);
    let after = fixture.stats().active_bytes.all;
    assert_eq!((after.current, after.freed, after.peak), (0, 1024, 1024));

    fixture.counters().reset_accumulated();
    let reset = fixture.stats();
    assert_eq!((reset.active_bytes.all.allocated, reset.active_bytes.all.freed), (0, 0));
    assert_eq!((reset.num_device_alloc, reset.hits, reset.misses), (0, 0, 0));
    fixture.counters().reset_peaks();
    let reset = fixture.stats();
    assert_eq!(reset.active_bytes.all.peak, 0);
    assert_eq!(reset.reserved_bytes.all.peak, signed(2 * MIB), "the segment is still held");
}

// From PyTorch's tests: random steps with tensors from one float to hundreds of MB on two devices. After
// each step the counters equal sums over the layout, and emptying the cache waits exactly once.
#[test]
fn two_devices_keep_separate_books_that_are_sums_over_their_layouts() {
    let fixtures = [(); 2].map(|()| Fixture::new(H200_BYTES, ""));
    let (mut rng, mut live) = (Rng::new(7), [Vec::new(), Vec::new()]);
    for step in 0..200 {
        let at = rng.below(2);
        let (fixture, live, other) = (&fixtures[at], &mut live[at], &fixtures[1 - at]);
        let untouched = other.state();
        let bytes = 4 << rng.below(27);
        match step % 18 {
            0..9 => live.push(fixture.take_on(bytes, [HOME, SIDE][rng.below(2)])),
            9 => {
                let before = fixture.stats();
                fixture.empty_cache();
                let after = fixture.stats();
                assert_eq!(after.num_sync_all_streams, before.num_sync_all_streams + 1);
                assert_eq!(after.memory_allocated(), before.memory_allocated());
            }
            _ if live.is_empty() => {}
            _ => fixture.give(live.swap_remove(rng.below(live.len()))),
        }
        fixture.check_sums();
        let requested: u64 = live.iter().map(Allocation::size_bytes).sum();
        assert_eq!(fixture.stats().requested_bytes.all.current, signed(requested));
        assert_eq!(other.state(), untouched, "a step on one device changed the other");
    }
}
