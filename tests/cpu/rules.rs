//! One instance: which blocks are reused, which are freed to the system, and which calls fail.

use std::sync::atomic::AtomicU32;

use stratalloc::system::{Source, SystemBlock};

use super::{ANY, Counted, hand_clock, over, settings, timed};
use crate::common::prelude::*;

#[test]
fn only_the_exact_size_is_reused_and_the_last_freed_comes_first() {
    let source = Counted::new();
    let own = over(&source, "");
    let (first, second) = (own.take(1000), own.take(1000));
    let (first_at, second_at) = (first.address(), second.address());
    own.give(first);
    own.give(second);
    assert_ne!(own.take(999).address(), second_at);
    assert_eq!(own.take(1000).address(), second_at);
    assert_eq!(own.take(1000).address(), first_at);
    assert_eq!(source.held().0, 3);
    let s = own.stats();
    assert_eq!((s.hits, s.misses, s.free_blocks), (2, 3, 0));
}

#[test]
fn streams_do_not_matter() {
    let own = over(&Counted::new(), "");
    assert!(own.control().cross_stream.is_none());
    let block = own.take_on(64, StreamId(64));
    let address = block.address();
    own.give(block);
    assert_eq!(own.take_on(64, StreamId(128)).address(), address);
}

#[test]
fn blocks_start_at_the_alignment() {
    for (conf, alignment) in
        [("", 64), ("cpu_alignment:4096", 4096), ("cpu_alignment:2097152", 2 * MIB)]
    {
        let own = over(&Counted::new(), conf);
        let sizes = [1, 17, 4 * KIB, 3 * MIB];
        assert!(sizes.into_iter().all(|b| own.take(b).address().is_multiple_of(alignment)));
    }
}

#[test]
fn nothing_is_cached_once_memory_ran_out_if_the_setting_wants_it() {
    for (conf, stops) in [("", false), ("cpu_stop_caching_on_oom:True", true)] {
        let source = Counted::new();
        source.most_bytes.store(1000, Ordering::SeqCst);
        let own = over(&source, conf);
        own.free(own.take(600)).unwrap();
        assert_eq!(source.held(), (1, 600), "{conf}: it caches before");
        // The system's limit has no room for 700 bytes in addition to the 600, so the cache is released.
        own.free(own.take(700)).unwrap();
        assert_eq!(source.held(), if stops { (0, 0) } else { (1, 700) }, "{conf}");
        let more = config("cpu_cached_max_mb:1");
        own.apply(&more).unwrap();
        own.free(own.take(300)).unwrap();
        assert!(source.held().0 > 0, "{conf}: a later setting without the key caches again");
    }
}

#[test]
fn without_memory_the_cache_goes_and_the_system_is_asked_once_more() {
    let source = Counted::new();
    source.most_bytes.store(1000, Ordering::SeqCst);
    let own = over(&source, "");
    let kept = own.take(300);
    for _ in 0..2 {
        own.give(own.take(600));
    }
    assert_eq!(source.calls.load(Ordering::SeqCst), 2);
    let block = own.take(700);
    assert_eq!((source.calls.load(Ordering::SeqCst), source.held()), (4, (2, 1000)));
    let s = own.stats();
    assert_eq!((s.num_alloc_retries, s.num_ooms), (1, 0));
    own.give(block);
    own.give(kept);
}

#[test]
fn a_failed_request_has_every_number_in_its_report_and_changes_nothing() {
    let source = Counted::new();
    source.most_bytes.store(1000, Ordering::SeqCst);
    let own = over(&source, "");
    let ooms = own.count_ooms();
    let kept = own.take(900);
    let report = own.fail(101, ANY);
    assert_eq!((report.requested_bytes, report.allocated_bytes), (101, 900));
    assert_eq!(report.driver.as_ref().unwrap().code(), 12);
    assert!(report.to_string().contains("101"), "{report}");
    assert_eq!((ooms.load(Ordering::SeqCst), own.stats().num_ooms), (1, 1));
    own.give(kept);
    assert_eq!(own.take(900).size_bytes(), 900);
}

#[test]
fn a_callback_that_frees_saves_the_request() {
    let source = Counted::new();
    source.most_bytes.store(1000, Ordering::SeqCst);
    let own = Arc::new(over(&source, ""));
    let spare = parking_lot::Mutex::new(Some(own.take(800)));
    let weak = Arc::downgrade(&own);
    own.hooks().add_free_memory_callback(Arc::new(move || {
        let (own, spare) = (weak.upgrade().unwrap(), spare.lock().take());
        spare.is_some_and(|block| own.free(block).is_ok())
    }));
    // The callback has freed a block of exactly this size.
    assert_eq!(own.take(800).size_bytes(), 800);
    assert_eq!((source.calls.load(Ordering::SeqCst), own.stats().num_alloc_retries), (2, 0));
}

#[test]
fn a_limit_counts_what_is_cached_and_gives_it_up() {
    let source = Counted::new();
    let own = over(&source, "");
    own.set_limit_bytes(Some(1000));
    own.give(own.take(600));
    let block = own.take(700);
    assert_eq!(source.held(), (1, 700));
    let report = own.fail(301, ANY);
    assert_eq!((report.limit_bytes, report.driver), (Some(1000), None));
    assert!(own.set_memory_fraction(1.5).is_err() && own.set_memory_fraction(f64::NAN).is_err());
    assert_eq!(own.limit_bytes(), Some(1000));
    own.set_memory_fraction(1.0).unwrap();
    assert_eq!(own.limit_bytes(), None);
    own.give(block);
}

#[test]
fn over_the_watermark_the_longest_idle_go_back() {
    let source = Counted::new();
    let own = over(&source, "cpu_cached_max_mb:3");
    let blocks: Vec<_> = (1..=3).map(|n| own.take(n * MIB)).collect();
    let addresses: Vec<_> = blocks.iter().map(Allocation::address).collect();
    blocks.into_iter().for_each(|block| own.give(block));
    // Blocks of 1 and 2 MiB are cached, then one of 3 MiB is freed, which releases the first two.
    assert_eq!(source.held(), (1, 3 << 20));
    assert_eq!(own.take(3 * MIB).address(), addresses[2]);
    own.give(own.take(4 * MIB));
    assert_eq!(source.held(), (1, 3 << 20));
}

#[test]
fn a_block_larger_than_the_watermark_goes_alone() {
    let source = Counted::new();
    let own = over(&source, "cpu_cached_max_mb:3");
    let (small, large) = (own.take(MIB), own.take(4 * MIB));
    own.give(small);
    own.give(large);
    assert_eq!(source.held(), (1, 1 << 20));
}

#[test]
fn what_was_freed_before_there_was_an_age_is_dated_when_there_is_one() {
    let source = Counted::new();
    let (seconds, clock) = hand_clock();
    let own = timed(&source, "", clock);
    seconds.store(100, Ordering::SeqCst);
    own.give(own.take(8));
    own.apply(&config("cpu_trim_age_s:30")).unwrap();
    assert_eq!(own.trim(), 0);
    seconds.store(130, Ordering::SeqCst);
    assert_eq!(own.trim(), 8);
}

#[test]
fn a_source_that_panics_or_answers_with_another_size_leaves_nothing_behind() {
    #[derive(Debug)]
    struct Odd(AtomicU32, Arc<Counted>);
    impl Source for Odd {
        fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock> {
            match self.0.fetch_add(1, Ordering::SeqCst) {
                0 => panic!("a source that panics"),
                1 => self.1.take(size_bytes + 1, alignment_bytes),
                _ => self.1.take(size_bytes, alignment_bytes),
            }
        }
        fn release(&self, block: SystemBlock) {
            self.1.release(block);
        }
    }
    let source = Counted::new();
    let odd = Arc::new(Odd(AtomicU32::new(0), Arc::clone(&source)));
    let own =
        CpuAllocator::with_source(DeviceId(0), &Settings::default(), odd, hand_clock().1).unwrap();
    own.set_limit_bytes(Some(100));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| own.take(80)));
    assert!(panicked.is_err());
    let error = own.try_allocate(80, ANY).unwrap_err();
    assert!(matches!(&error, AllocError::Driver(e) if e.message().contains("81 bytes")), "{error}");
    assert_eq!(source.held(), (0, 0));
    assert_eq!(own.take(80).size_bytes(), 80);
}

#[test]
fn what_the_machine_cannot_fill_is_refused_before_it_is_touched() {
    let own = CpuAllocator::new(DeviceId(0), &settings("cpu_junk_fill:True")).unwrap();
    let report = own.fail(1 << 45, ANY);
    assert_eq!(
        report.driver.as_ref().map(|error| (error.call(), error.code())),
        Some(("fill", 12))
    );
}

#[test]
fn what_is_idle_for_too_long_goes_back() {
    let source = Counted::new();
    let (seconds, clock) = hand_clock();
    let own = timed(&source, "cpu_trim_age_s:10", clock);
    let blocks: Vec<_> = (1..=6).map(|n| own.take(n)).collect();
    for block in blocks {
        seconds.fetch_add(1, Ordering::SeqCst);
        own.give(block);
    }
    seconds.store(12, Ordering::SeqCst);
    assert_eq!(own.trim(), 1 + 2);
    assert_eq!(own.trim(), 0);
    seconds.store(14, Ordering::SeqCst);
    // A miss trims old blocks too.
    let seven = own.take(7);
    assert_eq!(source.held(), (3, 5 + 6 + 7));
    seconds.store(16, Ordering::SeqCst);
    own.give(seven);
    assert_eq!(source.held(), (1, 7));
}

#[test]
fn blocks_start_as_they_shall_also_the_second_time() {
    for (conf, expected) in
        [("cpu_zero_fill:True", [0; 4]), ("cpu_junk_fill:True", 0x7fed_beef_u32.to_le_bytes())]
    {
        let own = over(&Counted::new(), conf);
        for size in [10, 3 * MIB] {
            for _ in 0..2 {
                let block = own.take(size);
                let mut memory = own.record_free(block.address()).unwrap();
                let len = memory.bytes().len();
                assert_eq!(len as u64, size);
                drop(memory);
                let mut buffer = own.buffer(size).unwrap();
                let address = buffer.address();
                buffer.bytes().fill(std::mem::MaybeUninit::new(7));
                drop(buffer);
                let mut again = own.buffer(size).unwrap();
                assert_eq!(again.address(), address);
                let written = again.initialized().expect("a filled block has no unwritten byte");
                assert!(written.iter().enumerate().all(|(at, byte)| *byte == expected[at % 4]));
            }
        }
    }
    let plain = over(&Counted::new(), "");
    assert!(plain.buffer(8).unwrap().initialized().is_none());
}

#[test]
fn both_fills_are_an_error_at_the_second_and_nothing_is_built() {
    let text = "cpu_zero_fill:True,cpu_junk_fill:True";
    let error = Config::parse(text, &KeyTable::default()).unwrap_err();
    assert!(error.to_string().contains("cpu_junk_fill"), "{error}");
    assert!(error.to_string().contains("other fill"), "{error}");
    let mut both = Settings::default();
    (both.cpu.zero_fill, both.cpu.junk_fill) = (true, true);
    let error = CpuAllocator::new(DeviceId(0), &both).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue);
    both.cpu.junk_fill = false;
    both.cpu.alignment_bytes = 48;
    assert!(CpuAllocator::new(DeviceId(0), &both).unwrap_err().message().contains("48"));
}

#[test]
fn values_out_of_range_are_refused_by_key() {
    for (key, values) in [
        ("cpu_alignment", "8 100 4194304"),
        ("cpu_trim_age_s", "-1 inf"),
        ("cpu_numa_node", "-1 4294967296"),
        ("cpu_cached_max_mb", "1.5"),
        ("cpu_huge_pages", "yes"),
    ] {
        for value in values.split(' ') {
            let refused = Config::parse(&format!("{key}:{value}"), &KeyTable::default());
            assert_eq!(refused.unwrap_err().key, key);
        }
    }
    let far = settings("backend:cpu,cpu_numa_node:900");
    assert!(CpuAllocator::new(DeviceId(0), &far).unwrap_err().message().contains("node 900"));
}

#[test]
fn what_can_change_changes_and_the_rest_is_refused_as_a_whole() {
    let own = over(&Counted::new(), "");
    let parse = |text| config(text);
    let error = own.apply(&parse("cpu_alignment:128,cpu_cached_max_mb:0")).unwrap_err();
    assert!(error.message().contains("cpu_alignment"), "{error}");
    own.give(own.take(5));
    assert_eq!(own.stats().free_blocks, 1);
    own.apply(&parse("cpu_cached_max_mb:0")).unwrap();
    own.give(own.take(5));
    assert_eq!(own.stats().free_blocks, 0);
}

#[test]
fn layout_history_and_base_show_every_block() {
    let own = over(&Counted::new(), "");
    own.history().start(&RecordOptions::at_most(100));
    let (small, large) = (own.take(512), own.take(5 * MIB));
    let base = own.base_allocation(&large).unwrap();
    assert_eq!((base.address, base.size_bytes), (large.address(), 5 * MIB));
    own.give(small);
    let mut states: Vec<_> =
        own.layout().iter().map(|s| (s.size_bytes, s.blocks[0].state)).collect();
    states.sort_by_key(|(bytes, _)| *bytes);
    let live = BlockStateName::ActiveAllocated;
    assert_eq!(states, [(512, BlockStateName::Inactive), (5 * MIB, live)]);
    let info = own.cache_info().unwrap();
    assert_eq!((info.free_blocks, info.largest_cached_bytes), (1, 512));
    own.empty_cache().unwrap();
    own.give(large);
    let mut events = Vec::new();
    own.history().drain_into(&mut events);
    let actions: Vec<_> = events.iter().map(|event| event.action).collect();
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc, SegmentFree};
    let one = [SegmentAlloc, Alloc];
    let free = [FreeRequested, FreeCompleted];
    assert_eq!(actions, [&one[..], &one, &free, &[SegmentFree], &free].concat());
}

#[test]
fn the_string_chooses_it() {
    let config = config("backend:cpu");
    let sim = Arc::new(Sim::new(SimOptions::default()));
    let built = registry::build(&config, sim, BuildOptions::default()).unwrap();
    assert!(matches!(built, Strategy::Cpu(_)));
    assert_eq!(built.name(), "cpu");
    let block = built.take(100);
    assert!(block.address().is_multiple_of(64));
    built.give(block);
}
