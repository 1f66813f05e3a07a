//! Steps of several threads in one order, and driver calls that fail at one moment.

use super::*;
use std::sync::atomic::AtomicU64;

use crate::common::racing::Before;

/// A second tag.
const OTHER: PoolId = PoolId { user: 78, ..TAG };

type Device = Intercepted<Arc<Host>, Before>;

fn create_other(allocator: &Strategy) {
    let options = tagged(TagOptions::host("other"));
    allocator.private_pools().create_pool(OTHER, options).expect("its id is new");
}

/// The free waits for the growth lock behind the resume, which must not lose the pages of the block.
#[test]
fn a_free_that_waits_for_a_resume_keeps_the_contents_consistent() {
    for tag in kinds_of_backup() {
        let host = host();
        let device = Arc::new(Device::with(host.clone(), Before::default()));
        let allocator = Arc::new(built("", device.clone()));
        create(&allocator, tag);
        create_other(&allocator);
        let other = allocator.take_in(OTHER, 30 * MIB, HOME);
        let [freed, kept] = [30 * MIB; 2].map(|bytes| allocator.take_in(TAG, bytes, HOME));
        write(&*host, kept.address(), 30 * MIB, 8, HOME);
        let tags = sleeping(&allocator);
        tags.pause(TAG, &PauseOptions::default()).unwrap();
        tags.pause(OTHER, &PauseOptions::default()).unwrap();
        let (resumed, results) = std::sync::mpsc::channel();
        let threads = {
            let (allocator, address) = (Arc::clone(&allocator), freed.address());
            move || {
                let shared = Arc::clone(&allocator);
                thread::spawn(move || resumed.send(sleeping(&shared).resume(TAG)));
                thread::sleep(Duration::from_millis(50));
                thread::spawn(move || allocator.free_raw(address).expect("it is live"));
                thread::sleep(Duration::from_millis(50));
            }
        };
        // Under the growth lock.
        device.interceptor().next("create", threads);
        tags.resume(OTHER).unwrap();
        results.recv().unwrap().unwrap();
        assert!(holds(&*host, kept.address(), 30 * MIB, 8, HOME));
        while info(&allocator).live_bytes != 30 * MIB {
            thread::yield_now();
        }
        assert_eq!(info(&allocator).backed_bytes, 0);
        allocator.give(kept);
        allocator.give(other);
    }
}

#[test]
fn a_resume_goes_on_if_some_cached_memory_cannot_be_released() {
    for (conf, call) in [("", "free"), ("expandable_segments:True", "unmap")] {
        let device = Arc::new(Faulty::new(Arc::new(Host::with_bytes(64 * MIB))));
        let allocator = built(conf, device.clone());
        create(&allocator, TagOptions::host("weights"));
        let block = allocator.take_in(TAG, 20 * MIB, HOME);
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        // Two streams, so that the two blocks are in two segments under both settings.
        let others = [HOME, SIDE, FAR].map(|stream| allocator.take_on(20 * MIB, stream));
        let [kept, first, second] = others;
        allocator.give(first);
        allocator.give(second);
        let kind = DriverErrorKind::Other;
        device.arm(FaultPlan { at: 0, kind, repeat: false, only: Some(call) });
        sleeping(&allocator).resume(TAG).unwrap();
        assert_eq!(device.failed_calls(), 1);
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        let back = allocator.take_on(20 * MIB, FAR);
        let again = allocator.take_on(20 * MIB, SIDE);
        allocator.give(back);
        allocator.give(again);
        // If all candidates fail for another reason than memory, the caller gets that reason.
        device.arm(FaultPlan { at: 0, kind, repeat: true, only: Some(call) });
        let refused = sleeping(&allocator).resume(TAG);
        assert!(matches!(refused, Err(SleepError::Driver(_))), "{refused:?}");
        device.disarm();
        sleeping(&allocator).resume(TAG).unwrap();
        allocator.give(block);
        allocator.give(kept);
    }
}

/// The pause begins while a tracker sees the first release. Its wait for an event ends after the resume.
#[test]
fn a_resume_does_not_trim_a_tag_that_another_thread_pauses() {
    let host = Arc::new(Host::with_bytes(64 * MIB));
    let device = Arc::new(Device::with(host, Before::default()));
    let allocator = Arc::new(built("", device.clone()));
    create(&allocator, TagOptions::host("weights"));
    create_other(&allocator);
    let block = allocator.take_in(TAG, 50 * MIB, HOME);
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    let other = allocator.take_in(OTHER, 20 * MIB, FAR);
    allocator.give(allocator.take_in(OTHER, 20 * MIB, SIDE));
    allocator.give(allocator.take(4 * MIB));
    let (go_on, held) = std::sync::mpsc::channel();
    device.interceptor().next("synchronize_event", move || held.recv().expect("it is sent"));
    let history = allocator.recording().history();
    history.start(&RecordOptions::at_most(1000));
    let (paused, results) = std::sync::mpsc::channel();
    let shared = Arc::clone(&allocator);
    let id = history.add_tracker(Arc::new(move |entry: &Entry| {
        let state = |allocator: &Strategy| sleeping(allocator).tag_info(OTHER).unwrap().state;
        if entry.event.action == Action::SegmentFree && state(&shared) == TagState::Awake {
            let (allocator, paused) = (Arc::clone(&shared), paused.clone());
            thread::spawn(move || {
                paused.send(sleeping(&allocator).pause(OTHER, &PauseOptions::default()))
            });
            while state(&shared) != TagState::Pausing {
                thread::yield_now();
            }
        }
    }));
    let refused = sleeping(&allocator).resume(TAG);
    assert!(matches!(refused, Err(SleepError::OutOfMemory(_))), "{refused:?}");
    let now = sleeping(&allocator).tag_info(OTHER).unwrap();
    assert_eq!((now.state, now.mapped_bytes), (TagState::Pausing, 40 * MIB));
    go_on.send(()).unwrap();
    results.recv().unwrap().unwrap();
    history.remove_tracker(id);
    sleeping(&allocator).resume(TAG).unwrap();
    allocator.give(block);
    allocator.give(other);
}

/// The copies of a kept backup begin before all pages are mapped.
#[test]
fn copies_of_a_resume_run_beside_the_calls_that_map_pages() {
    let device = Arc::new(Device::with(host(), Before::default()));
    let allocator = built("", device.clone());
    create(&allocator, TagOptions { keep_backup: true, ..TagOptions::host("weights") });
    let blocks = [30 * MIB; 4].map(|bytes| allocator.take_in(TAG, bytes, HOME));
    blocks.iter().for_each(|b| write(&*device, b.address(), b.size_bytes(), 3, HOME));
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    let (seen, host) = (Arc::new(AtomicU64::new(0)), Arc::clone(device.inner()));
    let (at_copy, before) = (Arc::clone(&seen), host.calls("map"));
    device.interceptor().next("copy_in", move || at_copy.store(host.calls("map") - before, SeqCst));
    sleeping(&allocator).resume(TAG).unwrap();
    assert_eq!(seen.load(SeqCst), 1, "one of four ranges is mapped at the first copy");
    for block in blocks {
        assert!(holds(&*device, block.address(), block.size_bytes(), 3, HOME));
        allocator.give(block);
    }
}

#[test]
fn pinned_memory_stays_while_copies_may_run() {
    for tag in kinds_of_backup() {
        let device = Arc::new(Faulty::new(host()));
        let allocator = built("", device.clone());
        create(&allocator, tag.clone());
        let block = allocator.take_in(TAG, 30 * MIB, HOME);
        let options = PauseOptions { synchronized: true, ..PauseOptions::default() };
        let tags = sleeping(&allocator);
        // Neither the pause nor its cleanup can wait for the copies. The copies through the ring fail
        // for another reason.
        let kind = DriverErrorKind::Other;
        let (at, only) = match tag.keep_backup {
            true => (0, Some("synchronize_stream")),
            false => (1, None),
        };
        if !tag.keep_backup {
            // This creates the buffers, so that the first calls of the next pause are copies.
            tags.pause(TAG, &options).unwrap();
            tags.resume(TAG).unwrap();
        }
        device.arm(FaultPlan { at, kind, repeat: true, only });
        tags.pause(TAG, &options).unwrap_err();
        assert_eq!(info(&allocator).state, TagState::Awake);
        assert_eq!(device.inner().calls("unpin"), 0);
        let pinned_bytes = device.inner().held().pinned_bytes;
        assert!(pinned_bytes > 0);
        device.disarm();
        // A wait precedes the release.
        allocator.caching().empty_cache().unwrap();
        assert_eq!(device.inner().held().pinned_bytes, 0);
        assert_eq!(device.inner().calls("synchronize_device"), 1);
        allocator.give(block);
        drop(allocator);
        assert!(device.inner().held().is_nothing(), "{:?}", device.inner().held());
    }
}

/// Several threads may ask for a tag with the same new name at once. It is created once, and all get it.
#[test]
fn threads_that_ask_for_one_name_get_one_tag() {
    let handle = stratalloc::build("backend:native", host()).unwrap();
    for at in 0..runs(200) {
        let barrier = Barrier::new(4);
        thread::scope(|scope| {
            let ask = || {
                let tag = handle.tag(TagOptions::host(format!("tag {at}")));
                barrier.wait();
                barrier.wait();
                tag.expect("one of them creates it").pool()
            };
            let asked: Vec<_> = (0..3).map(|_| scope.spawn(ask)).collect();
            barrier.wait();
            assert_eq!(handle.tags().len(), 1);
            barrier.wait();
            let pools = asked.into_iter().map(|ask| ask.join().unwrap());
            assert_eq!(pools.collect::<BTreeSet<_>>().len(), 1);
        });
    }
}

/// An allocator of segments that panics when it gets one back.
#[derive(Debug)]
struct Panics(Arc<Host>);

impl SegmentAllocator for Panics {
    fn allocate(&self, size_bytes: u64, _: StreamId) -> Option<u64> {
        self.0.allocate(size_bytes).ok()
    }

    fn free(&self, address: u64, size_bytes: u64, _: StreamId) {
        self.0.free(address, size_bytes).expect("it is allocated");
        panic!("the allocator of a pool panics");
    }
}

#[test]
fn a_panic_during_a_resume_leaves_the_tag_asleep() {
    let host = Arc::new(Host::with_bytes(64 * MIB));
    let allocator = built("", host.clone());
    create(&allocator, TagOptions::host("weights"));
    let blocks = [30 * MIB, 20 * MIB].map(|bytes| allocator.take_in(TAG, bytes, HOME));
    write(&*host, blocks[0].address(), 30 * MIB, 3, HOME);
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    let own: Arc<dyn SegmentAllocator> = Arc::new(Panics(host.clone()));
    let options = PoolOptions { allocator: Some(own), ..PoolOptions::default() };
    let pools = allocator.private_pools();
    pools.create_pool(OTHER, options).unwrap();
    allocator.give(allocator.take_in(OTHER, 30 * MIB, HOME));
    pools.release_pool(OTHER).unwrap();
    let resume = || sleeping(&allocator).resume(TAG);
    catch_unwind(AssertUnwindSafe(resume)).expect_err("the allocator panics");
    assert_eq!(info(&allocator).state, TagState::Asleep);
    assert_eq!(host.held().mapped_bytes(), 0);
    assert_eq!(allocator.stats().memory_reserved(), 0);
    resume().unwrap();
    assert!(holds(&*host, blocks[0].address(), 30 * MIB, 3, HOME));
    blocks.into_iter().for_each(|block| allocator.give(block));
    drop(allocator);
    assert!(host.held().is_nothing(), "{:?}", host.held());
}
