//! Which events are recorded, and which entries are kept.

use stratalloc::history::Snapshot;

use super::{actions, events, recorded, unrecorded};
use crate::common::prelude::*;

/// An allocator with only the two required methods.
#[derive(Debug)]
struct Least {
    owner: OwnerId,
    next: AtomicU64,
}

impl DeviceAllocator for Least {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        request.plain()?;
        let address = self.next.fetch_add(1 << 20, Ordering::Relaxed);
        Ok(Allocation::new(address, request.bytes, self.owner, Token::default()))
    }

    fn free(&self, _: Allocation) -> Result<(), FreeError> {
        Ok(())
    }
}

const STRATEGIES: [&str; 7] = [
    "backend:native",
    "backend:native,expandable_segments:True",
    "backend:cudaMallocAsync",
    "backend:cpu",
    "backend:pinned",
    "backend:history_least",
    "backend:native,layers:[statistics,limit:1GiB]",
];

#[test]
fn every_strategy_records_requests_and_frees_and_shows_what_lives() {
    let least = || Least { owner: OwnerId::next(), next: AtomicU64::new(1 << 30) };
    registry::register("history_least", move |_, _| Ok(Box::new(least()))).unwrap();
    for conf in STRATEGIES {
        let (allocator, history) = unrecorded(conf);
        let before = allocator.take(700);
        assert!(history.entries().is_empty(), "{conf}: it is off at first");
        history.start(&RecordOptions::default());
        let [a, b] = [1000, 2000].map(|bytes| allocator.take_on(bytes, StreamId(5)));
        let (at_a, at_b) = (a.address(), b.address());
        allocator.give(a);
        let seen = events(&history);
        let of = |action, address| {
            let found = seen.iter().find(|e| (e.action, e.address) == (action, address));
            found.map(|event| (event.size_bytes, event.stream.0))
        };
        assert_eq!(of(Action::Alloc, at_a), Some((1000, 5)), "{conf}");
        assert_eq!(of(Action::Alloc, at_b), Some((2000, 5)), "{conf}");
        assert_eq!(of(Action::FreeRequested, at_a), Some((1000, 5)), "{conf}");
        assert_eq!(of(Action::FreeCompleted, at_a), Some((1000, 5)), "{conf}");
        assert_eq!(of(Action::FreeRequested, at_b), None, "{conf}");
        let snapshot = allocator.recording().snapshot();
        let blocks = snapshot.segments.iter().flat_map(|segment| &segment.layout.blocks);
        let live = blocks.filter(|block| block.state == BlockStateName::ActiveAllocated);
        let live: Vec<_> = live.map(|block| (block.address, block.requested_bytes)).collect();
        assert!(live.contains(&(at_b, 2000)), "{conf}: {live:?}");
        assert!(!live.contains(&(at_a, 1000)), "{conf}: {live:?}");
        assert_eq!(snapshot.entries.len(), seen.len(), "{conf}: reading takes nothing away");
        history.stop();
        assert!(history.entries().is_empty(), "{conf}: stopping forgets");
        [before, b].into_iter().for_each(|block| allocator.give(block));
        assert!(history.entries().is_empty(), "{conf}: nothing is recorded any more");
    }
}

/// Allocates and frees blocks of 512 bytes on many streams, most of them on stream 0.
fn work(allocator: &dyn DeviceAllocator) {
    let mut rng = 1_u64;
    for _ in 0..20_000 {
        rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let stream = if rng >> 60 == 0 { 1 + (rng >> 32) % 100 } else { 0 };
        allocator.free(allocator.take_on(512, StreamId(stream))).expect("it is live");
    }
}

#[test]
fn the_newest_entries_are_kept_and_the_others_counted() {
    let everything = {
        let (allocator, history) = recorded("backend:native");
        work(&allocator);
        events(&history)
    };
    for most in [1, 7, 256, 1000, 30_000] {
        let (allocator, history) = unrecorded("backend:native");
        history.start(&RecordOptions::at_most(most));
        work(&allocator);
        let entries = history.entries();
        assert_eq!(entries.len(), most);
        assert_eq!(entries.dropped(), (everything.len() - most) as u64);
        let kept: Vec<_> = entries.iter().map(|e| (e.event.action, e.event.stream)).collect();
        let newest = everything[everything.len() - most..].iter().map(|e| (e.action, e.stream));
        assert!(newest.eq(kept), "{most}");
        assert!(entries.iter().is_sorted_by_key(|entry| entry.time_us()));
    }
}

#[test]
fn a_smaller_ring_forgets_what_is_too_old_at_once() {
    let (allocator, history) = recorded("backend:native");
    work(&allocator);
    let all = history.entries().len() as u64;
    history.start(&RecordOptions::at_most(10));
    let entries = history.entries();
    assert_eq!((entries.len(), entries.dropped()), (10, all - 10));
    history.start(&RecordOptions::at_most(10).clearing());
    assert_eq!((history.entries().len(), history.entries().dropped()), (0, 0));
}

#[test]
fn actions_can_be_left_out() {
    let (allocator, history) = unrecorded("backend:native");
    let skip = [Action::SegmentAlloc, Action::FreeRequested];
    history.start(&RecordOptions::default().without(&skip));
    allocator.free(allocator.take(512)).unwrap();
    assert_eq!(actions(&history), [Action::Alloc, Action::FreeCompleted]);
}

#[test]
fn a_snapshot_adds_an_entry_that_the_next_snapshot_lists() {
    for conf in STRATEGIES.into_iter().filter(|conf| !conf.contains("least")) {
        let (allocator, history) = unrecorded(conf);
        allocator.recording().snapshot();
        history.start(&RecordOptions::default());
        let live = [700, 3 << 20].map(|bytes| allocator.take_on(bytes, StreamId(5)));
        let first = allocator.recording().snapshot();
        let seen = |snapshot: &Snapshot| -> Vec<_> {
            let of =
                |entry: &Entry| (entry.event.action == Action::Snapshot).then_some(entry.event);
            snapshot.entries.iter().filter_map(of).collect()
        };
        assert_eq!(seen(&first), [], "{conf}: entries are copied first");
        let in_use = [BlockStateName::ActiveAllocated, BlockStateName::ActivePendingFree];
        let active = first.segments.iter().map(|segment| segment.layout.bytes_in(&in_use)).sum();
        let noted = Event {
            action: Action::Snapshot,
            address: 0,
            size_bytes: active,
            stream: StreamId::DEFAULT,
            pool: PoolId::DEFAULT,
        };
        assert_eq!(seen(&allocator.recording().snapshot()), [noted], "{conf}");
        history.start(&RecordOptions::default().without(&[Action::Snapshot]).clearing());
        allocator.recording().snapshot();
        assert_eq!(actions(&history), [], "{conf}: it can be left out");
        live.into_iter().for_each(|block| allocator.give(block));
    }
}

#[test]
fn trackers_are_called_when_a_snapshot_was_taken() {
    let (allocator, history) = recorded("backend:native");
    let calls = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&calls);
    history.add_tracker(Arc::new(move |entry| {
        let is_snapshot = entry.event.action == Action::Snapshot;
        counter.fetch_add(u64::from(is_snapshot), Ordering::Relaxed);
    }));
    allocator.recording().snapshot();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn the_history_lives_through_a_switch() {
    let (allocator, history) = recorded("backend:native");
    let old = allocator.take(4096);
    allocator.switch("backend:cudaMallocAsync").unwrap();
    let new = allocator.take(512);
    assert!(Arc::ptr_eq(&history, allocator.recording().history()));
    let live = allocator.recording().snapshot().segments.len();
    assert_eq!(live, 2, "the replaced allocator's segment and the new one's block");
    [old, new].into_iter().for_each(|block| allocator.give(block));
    let [freed, completed] = [Action::FreeRequested, Action::FreeCompleted];
    let expected = [Action::SegmentAlloc, Action::Alloc, Action::Alloc];
    let seen = actions(&history);
    assert_eq!(seen[..3], expected);
    assert_eq!(seen[3], Action::Snapshot, "one for both allocators");
    assert_eq!(seen[4..8], [freed, completed, Action::SegmentFree, freed], "{seen:?}");
    let text = allocator.recording().snapshot().about.config.to_text();
    assert_eq!(text, "backend:cudaMallocAsync");
}

#[test]
fn a_request_that_fails_is_recorded_with_what_was_free() {
    let (allocator, history) = recorded("backend:native");
    allocator.try_allocate(1 << 40, StreamId(3)).unwrap_err();
    let last = *events(&history).last().expect("it is recorded");
    assert_eq!(
        (last.action, last.address, last.size_bytes),
        (Action::OutOfMemory, 8 << 30, 1 << 40)
    );
}

#[test]
fn histories_can_be_sent_anywhere() {
    fn anywhere<T: Send + Sync>() {}
    anywhere::<History>();
    anywhere::<stratalloc::history::Snapshot>();
}
