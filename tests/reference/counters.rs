//! Counters: what one request changes, and the law that ties them to the layout.

use stratalloc::size::RoundupDivisions;

use super::{H200_BYTES, signed};
use crate::common::dice::Dice;
use crate::common::prelude::*;

// The reference: one byte raises the allocated bytes, deleting it restores the very old value.
#[test]
fn one_byte_raises_allocated_bytes_and_its_free_restores_them_exactly() {
    let bed = Bed::new(H200_BYTES, "");
    let held = bed.take(3 * MIB);
    let before = bed.stats().memory_allocated();
    let byte = bed.take(1);
    assert_eq!(bed.stats().memory_allocated(), before + 512);
    bed.give(byte);
    assert_eq!(bed.stats().memory_allocated(), before);
    bed.give(held);
    bed.check();
}

// The reference: 256 floats raise the active bytes by 1,024; after the free `freed` says 1,024, the
// current value is back, and reset peaks equal the current values.
#[test]
fn a_kilobyte_moves_the_active_bytes_by_a_kilobyte_there_and_back() {
    let bed = Bed::new(H200_BYTES, "");
    let before = bed.stats().active_bytes.all;
    let floats = bed.take(256 * 4);
    let during = bed.stats().active_bytes.all;
    assert_eq!(during.current - before.current, 1024);
    assert_eq!(during.allocated - before.allocated, 1024);
    assert_eq!(during.peak, 1024);
    bed.give(floats);
    let after = bed.stats().active_bytes.all;
    assert_eq!((after.current, after.freed, after.peak), (0, 1024, 1024));

    bed.counters().reset_accumulated();
    let reset = bed.stats();
    assert_eq!((reset.active_bytes.all.allocated, reset.active_bytes.all.freed), (0, 0));
    assert_eq!((reset.num_device_alloc, reset.hits, reset.misses), (0, 0, 0));
    bed.counters().reset_peaks();
    let reset = bed.stats();
    assert_eq!(reset.active_bytes.all.peak, 0);
    assert_eq!(reset.reserved_bytes.all.peak, signed(2 * MIB), "the segment is still held");
}

/// Sizes of tensors in the reference's walk, in bytes: from one float to 480 MB.
const WALK_BYTES: [u64; 6] = [4, 4 * 10, 4 * 10 * 20, 4 * 200 * 300, 4 * 5_000_000, 480_000_000];

/// One walk over an allocator: grows, shrinks in both orders, and empties the cache now and then.
struct Walk {
    bed: Bed,
    live: Vec<Allocation>,
    step: usize,
}

impl Walk {
    const STEPS: usize = 108;

    fn new() -> Self {
        Self { bed: Bed::new(H200_BYTES, ""), live: Vec::new(), step: 0 }
    }

    /// Takes one step and checks all books. False when the walk is over.
    fn advance(&mut self) -> bool {
        let turn = self.step % 18;
        match turn {
            0..6 => self.live.push(self.bed.take(WALK_BYTES[turn])),
            6..9 => self.bed.give(self.live.remove(0)),
            9 | 16.. => self.empty_cache(),
            10..12 => self.live.push(self.bed.take_on(WALK_BYTES[turn - 8], SIDE)),
            _ => {
                let last = self.live.pop().expect("more was taken than given back so far");
                self.bed.give(last);
            }
        }
        self.step += 1;
        self.bed.check_sums();
        let live_bytes: u64 = self.live.iter().map(Allocation::size_bytes).sum();
        assert_eq!(self.bed.stats().requested_bytes.all.current, signed(live_bytes));
        self.step < Self::STEPS
    }

    fn empty_cache(&self) {
        let before = self.bed.stats();
        self.bed.empty_cache();
        let after = self.bed.stats();
        assert_eq!(after.num_sync_all_streams, before.num_sync_all_streams + 1);
        assert!(after.memory_reserved() <= before.memory_reserved());
        assert_eq!(after.memory_allocated(), before.memory_allocated());
    }
}

// The reference: about a hundred steps with tensors from one float to 480 MB; after each the counters
// are sums over the layout, and emptying the cache waits for all streams exactly once.
#[test]
fn every_counter_is_a_sum_over_the_layout_after_every_step_of_a_walk() {
    let mut walk = Walk::new();
    while walk.advance() {}
}

// The reference: the same on two devices, in turns and in random order.
#[test]
fn two_devices_keep_separate_books_in_any_order_of_steps() {
    let (mut here, mut there) = (Walk::new(), Walk::new());
    let mut dice = Dice::new(7);
    let (mut more_here, mut more_there) = (true, true);
    while more_here || more_there {
        let untouched = if dice.below(2) == 0 && more_here {
            let before = there.bed.stats();
            more_here = here.advance();
            before == there.bed.stats()
        } else if more_there {
            let before = here.bed.stats();
            more_there = there.advance();
            before == here.bed.stats()
        } else {
            true
        };
        assert!(untouched, "a step on one device moved a counter of the other");
    }
    assert_eq!(here.bed.stats(), there.bed.stats(), "same steps, same counters");
}

// The reference: with caching on, a raw request of 1 MiB raises the requested bytes by exactly that.
// Caching cannot be turned off here, so the other half has no equal.
#[test]
fn a_raw_mebibyte_raises_the_requested_bytes_by_exactly_one_mebibyte() {
    let bed = Bed::new(H200_BYTES, "");
    let held = bed.take(700 * KIB);
    let before = bed.stats().requested_bytes.all.current;
    let raw = &bed;
    let address = bed.ask(MIB, SIDE).map(|b| b.address()).unwrap();
    assert_eq!(bed.stats().requested_bytes.all.current, before + signed(MIB));
    bed.check();
    raw.free_raw(address).unwrap();
    assert_eq!(bed.stats().requested_bytes.all.current, before);
    bed.give(held);
}

/// Allocated and requested bytes that a request adds.
fn cost(bed: &Bed, bytes: u64) -> (u64, u64) {
    let before = bed.stats();
    let block = bed.take(bytes);
    let after = bed.stats();
    bed.give(block);
    bed.empty_cache();
    let grown = |after: i64, before: i64| (after - before).unsigned_abs();
    (
        grown(after.allocated_bytes.all.current, before.allocated_bytes.all.current),
        grown(after.requested_bytes.all.current, before.requested_bytes.all.current),
    )
}

// The reference: 84 MiB stay 84 MiB; four steps per power of two make them 96; a list has steps per
// size. What was requested is counted unrounded.
#[test]
fn rounding_to_steps_changes_the_block_and_never_what_was_requested() {
    let bed = Bed::new(H200_BYTES, "");
    assert_eq!(cost(&bed, 84 * MIB), (84 * MIB, 84 * MIB));
    let divided = |divisions| Settings {
        roundup: RoundupDivisions::new(divisions).unwrap(),
        ..Settings::default()
    };
    bed.apply(divided([4; 16]));
    assert_eq!(cost(&bed, 84 * MIB), (96 * MIB, 84 * MIB));
    bed.apply(Settings {
        garbage_collection_threshold: Some(0.5),
        max_split_bytes: Some(40 * MIB),
        ..Settings::default()
    });
    assert_eq!(cost(&bed, 84 * MIB), (84 * MIB, 84 * MIB), "a new string begins without steps");
    let mut listed = [8; 16];
    listed[7..10].fill(2);
    listed[10..].fill(1);
    bed.apply(divided(listed));
    assert_eq!(cost(&bed, 84 * MIB), (88 * MIB, 84 * MIB));
    assert_eq!(cost(&bed, 400 * MIB), (512 * MIB, 400 * MIB));
    assert_eq!(cost(&bed, 3 * GIB + 1), (3 * GIB + 512, 3 * GIB + 1));
}
