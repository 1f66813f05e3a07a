//! Eight threads record at once, each on its own stream. Every entry is either kept or counted as dropped,
//! and the order of each stream's entries is exact.

use super::{build_over, events, history, sim, unrecorded};
use crate::common::prelude::*;

const THREADS: u64 = 8;

/// Allocates and frees on one stream and returns these operations in order. Then frees the remaining blocks.
fn work(allocator: &dyn DeviceAllocator, stream: u64, steps: u64) -> Vec<(Action, u64)> {
    let (mut done, mut live) = (Vec::new(), Vec::new());
    let mut rng = stream + 1;
    for _ in 0..steps {
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if rng >> 63 == 0 || live.is_empty() {
            let bytes = 1 + (rng >> 40) % 100_000;
            let Ok(block) = allocator.try_allocate(bytes, StreamId(stream)) else {
                continue;
            };
            done.push((Action::Alloc, block.address()));
            live.push(block);
        } else {
            let index = usize::try_from(rng >> 33).unwrap_or(0) % live.len();
            let block = live.swap_remove(index);
            let address = block.address();
            allocator.give(block);
            done.extend([Action::FreeRequested, Action::FreeCompleted].map(|a| (a, address)));
        }
    }
    live.into_iter().for_each(|block| allocator.give(block));
    done
}

#[test]
fn nothing_is_lost_and_the_order_within_a_heap_is_exact() {
    for conf in ["backend:native", "backend:native,expandable_segments:True"] {
        let (allocator, history) = unrecorded(conf);
        let (provider, alive) = Counted::provider("step");
        history.set_stack_provider(Some(provider));
        history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
        let steps = runs(4000);
        let done: Vec<_> = thread::scope(|scope| {
            let all = |stream| {
                let (allocator, history) = (&allocator, &history);
                scope.spawn(move || {
                    let done = work(allocator, stream, steps);
                    // Reading does not remove entries, so at least those of this thread are there.
                    assert!(history.entries().len() >= done.len());
                    done
                })
            };
            let threads: Vec<_> = (0..THREADS).map(all).collect();
            threads.into_iter().map(|thread| thread.join().expect("it ends")).collect()
        });
        let seen = events(&history);
        assert_eq!(history.entries().dropped(), 0);
        for (stream, done) in (0..).zip(&done) {
            let own =
                seen.iter().filter(|e| e.stream == StreamId(stream) && !e.action.is_segment());
            let own: Vec<_> = own.map(|event| (event.action, event.address)).collect();
            assert_eq!(own[..done.len()], done[..], "{conf}: stream {stream}");
        }
        history.stop();
        assert_eq!(alive.load(Ordering::Relaxed), 0, "{conf}: each stack is released once");
    }
}

/// The ring is much too small. The numbers of kept and dropped entries must add up to all.
#[test]
fn what_is_dropped_is_counted() {
    let (allocator, history) = unrecorded("backend:native");
    let entries_seen = Arc::new(AtomicUsize::new(0));
    let sink = Arc::clone(&entries_seen);
    history.add_tracker(Arc::new(move |_: &Entry| {
        sink.fetch_add(1, Ordering::Relaxed);
    }));
    history.start(&RecordOptions::at_most(1000));
    thread::scope(|scope| {
        for stream in 0..THREADS {
            let allocator = &allocator;
            scope.spawn(move || work(allocator, stream, runs(20_000)));
        }
    });
    let entries = history.entries();
    assert_eq!(entries.len(), 1000);
    assert_eq!(
        entries.len() as u64 + entries.dropped(),
        entries_seen.load(Ordering::Relaxed) as u64
    );
}

#[test]
fn starting_clearing_reading_switching_and_failing_at_once() {
    // Some requests fail: in one strategy because of the fault layer, in all because the device is
    // small.
    let fails = "backend:native,layers:[fault:[probability:0.05]]";
    let allocator = build_over(fails, sim(40 * MIB));
    let history = history(&allocator);
    let (provider, alive) = Counted::provider("step");
    history.set_stack_provider(Some(provider));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|stream| {
                scope.spawn({
                    let allocator = &allocator;
                    move || work(allocator, stream, runs(3000))
                })
            })
            .collect();
        scope.spawn(|| {
            let backends =
                ["backend:cudaMallocAsync", "backend:native,expandable_segments:True", fails];
            for conf in backends.iter().cycle().take_while(|_| !ended.load(Ordering::Relaxed)) {
                allocator.switch(conf).expect("a good string");
                thread::yield_now();
            }
        });
        scope.spawn(|| {
            let levels = [StackLevel::OfFrees, StackLevel::OfLiveBlocks, StackLevel::OfAllocations];
            for level in levels.iter().cycle().take_while(|_| !ended.load(Ordering::Relaxed)) {
                history.start(&RecordOptions::at_most(1000).with_stacks(*level));
                let entries = history.entries();
                assert!(entries.len() <= 1000);
                assert_eq!(entries.iter().count(), entries.len());
                drop(allocator.recording().snapshot());
                if *level == StackLevel::OfAllocations {
                    history.clear();
                    history.stop();
                }
            }
        });
        workers.into_iter().for_each(|worker| drop(worker.join().expect("it ends")));
        ended.store(true, Ordering::Relaxed);
    });
    history.stop();
    drop(allocator.take(512));
    assert_eq!(alive.load(Ordering::Relaxed), 0, "each stack is released once");
    assert!(Arc::strong_count(&alive) >= 1);
}
