//! Trackers are callbacks that get each entry. Tests when they are called for driver memory, and which calls
//! they may make.

use std::sync::mpsc::{self, Receiver, Sender};

use super::{actions, build, build_over, history, sim};
use crate::common::prelude::*;

const CONFS: [&str; 4] =
    ["backend:native", "backend:native,expandable_segments:True", "backend:cpu", "backend:pinned"];
const PAGE_STEP: usize = 2 << 20;

fn host() -> Arc<dyn Driver> {
    Arc::new(Host::with_bytes(GIB))
}

/// A cache of registered memory, as in a network library: the pages that were allocated and not yet
/// released, according to the calls of a tracker.
#[derive(Debug, Default)]
struct Registered {
    pages: Mutex<BTreeSet<u64>>,
    wrong: Mutex<Vec<String>>,
}

impl Registered {
    fn record_calls(&self, entry: &Entry) {
        let event = entry.event;
        if !event.action.is_segment() {
            return;
        }
        let comes = matches!(event.action, Action::SegmentAlloc | Action::SegmentMap);
        let mut pages = self.pages.lock();
        for page in (event.address..event.address + event.size_bytes).step_by(PAGE_STEP) {
            let right = if comes { pages.insert(page) } else { pages.remove(&page) };
            if !right {
                self.wrong.lock().push(format!("{:?} of {page:#x}", event.action));
            }
        }
    }

    #[track_caller]
    fn check(&self, what: &str) {
        assert_eq!(self.wrong.lock().as_slice(), [""; 0], "{what}");
    }
}

fn register_in(allocator: &Switchable) -> Arc<Registered> {
    let registered = Arc::<Registered>::default();
    let own = Arc::clone(&registered);
    history(allocator).start(&RecordOptions::at_most(1));
    history(allocator).add_tracker(Arc::new(move |entry| own.record_calls(entry)));
    registered
}

/// Makes the first tracker call for a release wait. The receiver gets a message when that call begins, and a
/// message to the sender ends the wait.
fn stop_the_first(allocator: &Switchable) -> (Receiver<()>, Sender<()>) {
    let ((stopped, is_stopped), (go, may_go)) = (mpsc::channel(), mpsc::channel());
    let (first, may_go) = (AtomicBool::new(true), Mutex::new(may_go));
    history(allocator).add_tracker(Arc::new(move |entry| {
        let goes = entry.event.action.is_segment() && entry.event.action.is_release();
        if goes && first.swap(false, Ordering::SeqCst) {
            stopped.send(()).expect("the test waits");
            may_go.lock().recv().expect("the test goes on");
        }
    }));
    (is_stopped, go)
}

#[test]
fn memory_is_announced_as_gone_before_another_thread_can_get_its_address() {
    for (conf, driver) in CONFS.into_iter().flat_map(|conf| [(conf, host()), (conf, sim(GIB))]) {
        let allocator = build_over(conf, driver);
        let registered = register_in(&allocator);
        let (is_stopped, go) = stop_the_first(&allocator);
        allocator.free(allocator.take(32 * MIB)).unwrap();
        thread::scope(|scope| {
            let empties = scope.spawn(|| allocator.caching().empty_cache());
            is_stopped.recv().expect("something goes");
            // While the release is in progress, the address must not be announced a second time.
            let other = allocator.take_on(32 * MIB, StreamId(7));
            go.send(()).expect("the tracker waits");
            empties.join().expect("it ends").unwrap();
            allocator.give(other);
        });
        allocator.caching().empty_cache().unwrap();
        registered.check(conf);
        assert!(registered.pages.lock().is_empty(), "{conf}");
    }
}

#[test]
fn threads_never_announce_memory_twice_nor_release_what_was_not_announced() {
    for (conf, driver) in CONFS.into_iter().flat_map(|conf| [(conf, host()), (conf, sim(GIB))]) {
        let allocator = build_over(conf, driver);
        let registered = register_in(&allocator);
        thread::scope(|scope| {
            for stream in 0..4 {
                let allocator = &allocator;
                scope.spawn(move || {
                    for round in 0..runs(300) {
                        let bytes = (2 + 2 * ((round + stream) % 12)) * MIB;
                        allocator.free(allocator.take_on(bytes, StreamId(stream))).unwrap();
                        allocator.caching().empty_cache().unwrap();
                    }
                });
            }
        });
        registered.check(conf);
        drop(allocator);
        assert!(registered.pages.lock().is_empty(), "{conf}: what is dropped is announced, too");
        registered.check(conf);
    }
}

#[test]
fn memory_can_be_read_while_it_is_announced() {
    for conf in &CONFS[..2] {
        let driver = host();
        let allocator = build_over(conf, Arc::clone(&driver));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        history(&allocator).start(&RecordOptions::at_most(1));
        history(&allocator).add_tracker(Arc::new(move |entry| {
            if entry.event.action.is_segment() {
                let mut first = [0];
                let read = driver.copy_to_host(&mut first, entry.event.address, StreamId(0));
                log.lock().push((entry.event.action.is_release(), read.is_ok(), first[0]));
            }
        }));
        let block = allocator.take(32 * MIB);
        allocator.driver().fill(block.address(), 0xAB, 32 * MIB, StreamId(0)).unwrap();
        allocator.give(block);
        allocator.caching().empty_cache().unwrap();
        let seen = seen.lock();
        assert!(seen.iter().all(|(_, was_readable, _)| *was_readable), "{conf}: {seen:?}");
        assert_eq!(seen.last(), Some(&(true, true, 0xAB)), "{conf}");
    }
}

#[test]
fn a_tracker_gets_what_the_ring_skips() {
    let allocator = build("backend:native");
    let entries_seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&entries_seen);
    history(&allocator).start(&RecordOptions::default().without(&Action::ALL));
    history(&allocator).add_tracker(Arc::new(move |entry| log.lock().push(entry.event.action)));
    allocator.free(allocator.take(32 * MIB)).unwrap();
    allocator.caching().empty_cache().unwrap();
    let block = [Action::SegmentAlloc, Action::Alloc, Action::FreeRequested, Action::FreeCompleted];
    assert_eq!(entries_seen.lock()[..4], block);
    assert_eq!(entries_seen.lock()[4..], [Action::SegmentFree]);
    assert!(actions(&history(&allocator)).is_empty());
}

/// The tracker is not called recursively. Memory allocated inside a tracker call is announced after the call
/// has returned, and nothing is released to the driver before.
#[test]
fn a_tracker_may_do_everything_inside_a_call_for_memory() {
    for (conf, driver) in CONFS.into_iter().flat_map(|conf| [(conf, host()), (conf, sim(GIB))]) {
        let allocator = build_over(conf, driver);
        allocator.caching().set_limit_bytes(Some(GIB));
        let registered = register_in(&allocator);
        let (depth, calls) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (own, inside, count) = (allocator.clone(), Arc::clone(&depth), Arc::clone(&calls));
        let checked = Arc::clone(&registered);
        let id = history(&allocator).add_tracker(Arc::new(move |entry| {
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            if entry.event.action.is_segment() && count.fetch_add(1, Ordering::SeqCst) < 8 {
                let bytes = (24 + 8 * count.load(Ordering::SeqCst)) * MIB;
                let before = checked.pages.lock().len();
                own.free(own.take_on(bytes, StreamId(3))).expect("it is live");
                own.caching().empty_cache().expect("it does nothing");
                let _ = own.try_allocate(GIB << 4, StreamId(0)).expect_err("too much");
                let _ = own.recording().snapshot();
                assert_eq!(checked.pages.lock().len(), before);
            }
            inside.fetch_sub(1, Ordering::SeqCst);
        }));
        allocator.free(allocator.take(32 * MIB)).unwrap();
        allocator.caching().empty_cache().unwrap();
        assert!(calls.load(Ordering::SeqCst) > 2, "{conf}");
        assert_eq!(depth.load(Ordering::SeqCst), 0, "{conf}: no assertion inside failed");
        assert!(history(&allocator).remove_tracker(id));
        allocator.caching().empty_cache().unwrap();
        registered.check(conf);
        assert!(registered.pages.lock().is_empty(), "{conf}");
    }
}

/// An interceptor that ends a tracker's wait when the device has refused `left` more allocations.
#[derive(Debug)]
struct Refusals {
    left: AtomicU64,
    go: Mutex<Option<Sender<()>>>,
}

impl Interceptor for Refusals {
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let answer = act();
        if call == "allocate"
            && answer.is_err()
            && self.left.fetch_sub(1, Ordering::SeqCst) == 1
            && let Some(go) = self.go.lock().take()
        {
            go.send(()).expect("the tracker waits");
        }
        answer
    }
}

#[test]
fn a_request_waits_for_memory_that_another_thread_announces_before_it_fails() {
    // The second failure comes after the request has released all free segments.
    let refusals = Refusals { left: AtomicU64::new(2), go: Mutex::default() };
    let options = stratalloc_sim::SimOptions { total_bytes: 40 * MIB, ..Default::default() };
    let driver = Arc::new(Intercepted::with(Sim::new(options), refusals));
    let allocator = build_over("backend:native", Arc::clone(&driver) as Arc<dyn Driver>);
    history(&allocator).start(&RecordOptions::at_most(1));
    let (is_stopped, go) = stop_the_first(&allocator);
    *driver.interceptor().go.lock() = Some(go);
    allocator.free(allocator.take(32 * MIB)).unwrap();
    thread::scope(|scope| {
        let empties = scope.spawn(|| allocator.caching().empty_cache());
        is_stopped.recv().expect("something goes");
        let other = allocator.try_allocate(32 * MIB, StreamId(7));
        allocator.free(other.expect("the memory on its way serves it")).unwrap();
        empties.join().expect("it ends").unwrap();
    });
    assert_eq!(driver.interceptor().left.load(Ordering::SeqCst), 0);
}

/// A snapshot waits for frees that other threads have not recorded yet. It must not wait for a free of
/// its own thread.
#[test]
fn a_snapshot_inside_a_callback_does_not_wait_for_the_free_that_called_it() {
    let driver = Arc::new(Sim::new(Default::default()));
    let engine = Arc::new(Engine::new(driver, &EngineOptions::default()).unwrap());
    let (waits, calls) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let query = {
        let (engine, waits) = (Arc::<Engine>::downgrade(&engine), Arc::clone(&waits));
        let calls = Arc::clone(&calls);
        move || {
            let Some(engine) = engine.upgrade() else { return };
            let recording = engine.control().recording.unwrap();
            calls.fetch_add(1, Ordering::SeqCst);
            waits.fetch_add(u64::from(recording.history().any_late()), Ordering::SeqCst);
            drop(recording.snapshot());
        }
    };
    let gather = query.clone();
    let history = engine.control().recording.unwrap().history();
    history.set_stack_provider(Some(Arc::new(move || -> Option<Arc<dyn Stack>> {
        gather();
        None
    })));
    history.add_tracker(Arc::new(move |_| query()));
    history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
    let block = engine.allocate(Request::new(512, StreamId(0))).unwrap();
    engine.free(block).unwrap();
    // Two calls for stacks, two for the entries of the snapshots that these calls take, and four for the
    // entries segment_alloc, alloc, free_requested and free_completed.
    assert_eq!((calls.load(Ordering::SeqCst), waits.load(Ordering::SeqCst)), (8, 0));
}
