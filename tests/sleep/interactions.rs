//! The defined answers of other operations while a tag sleeps.

use super::*;
use stratalloc::allocator::{Checkpoints, WhileAsleep};
use stratalloc::strategies::native::Prediction;

/// A tag with two live blocks, asleep.
struct Asleep {
    host: Arc<Host>,
    allocator: Strategy,
    blocks: [Allocation; 2],
}

const BYTES: [u64; 2] = [3 * MIB, 15 * MIB];

impl Asleep {
    fn with(conf: &str, tag: TagOptions) -> Self {
        let awake = Self::awake(conf, tag);
        awake.pause();
        awake
    }

    fn awake(conf: &str, tag: TagOptions) -> Self {
        let host = host();
        let allocator = built(conf, host.clone());
        create(&allocator, tag);
        let blocks = BYTES.map(|bytes| allocator.take_in(TAG, bytes, HOME));
        blocks.iter().for_each(|b| write(&*host, b.address(), b.size_bytes(), 5, HOME));
        Self { host, allocator, blocks }
    }

    fn new(conf: &str) -> Self {
        Self::with(conf, TagOptions::host("weights"))
    }

    #[track_caller]
    fn pause(&self) {
        sleeping(&self.allocator).pause(TAG, &PauseOptions::default()).expect("it can");
    }

    #[track_caller]
    fn resume(&self) {
        sleeping(&self.allocator).resume(TAG).expect("it can");
        self.check_bytes();
    }

    #[track_caller]
    fn check_bytes(&self) {
        for block in &self.blocks {
            assert!(holds(&*self.host, block.address(), block.size_bytes(), 5, HOME));
        }
    }

    fn engine(&self) -> &Engine {
        self.allocator.engine().expect("it is native")
    }

    /// Frees the blocks and checks that nothing stays behind.
    #[track_caller]
    fn end(self) {
        let Self { host, allocator, blocks } = self;
        blocks.into_iter().for_each(|block| allocator.give(block));
        drop(allocator);
        assert!(host.held().is_nothing(), "{:?}", host.held());
    }
}

#[track_caller]
fn is_asleep(made: Result<Allocation, AllocError>) {
    let error = made.expect_err("the tag is asleep");
    assert_eq!(error.to_string(), format!("pool {TAG} is asleep: resume its tag first"));
}

#[test]
fn frees_are_bookkeeping_and_shrink_the_backup() {
    for conf in BOTH {
        for tag in kinds_of_backup() {
            let asleep = Asleep::awake(conf, tag);
            asleep.allocator.record(&asleep.blocks[0], SIDE);
            asleep.pause();
            let Asleep { host, allocator, blocks: [first, second] } = asleep;
            let (address, calls) = (first.address(), host.total_calls());
            allocator.give(first);
            assert_eq!(allocator.free_raw(address), Err(HandleError::UnknownAddress { address }));
            assert_eq!(host.total_calls(), calls, "no driver call, no event");
            let now = info(&allocator);
            assert_eq!((now.live_bytes, now.backed_bytes), (15 * MIB, 15 * MIB));
            assert!(sleeping(&allocator).read_backup(address, &mut [0]).is_err());
            let resumed = sleeping(&allocator).resume(TAG).unwrap();
            assert_eq!(resumed.copied_bytes, 15 * MIB);
            assert!(holds(&*host, second.address(), second.size_bytes(), 5, HOME));
            // The freed block serves again, and its old use is forgotten.
            let again = allocator.take_in(TAG, 3 * MIB, HOME);
            allocator.give(again);
            sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
            assert_eq!(allocator.free_raw(second.address()), Ok(15 * MIB));
            // Nothing is live, so the resume maps nothing.
            assert_eq!(sleeping(&allocator).resume(TAG).unwrap(), Default::default());
            assert_eq!(info(&allocator).mapped_bytes, 0);
            drop(allocator);
            assert!(host.held().is_nothing());
        }
    }
}

#[test]
fn requests_fail_by_pool_by_scope_and_by_address() {
    for conf in BOTH {
        let asleep = Asleep::new(conf);
        let Asleep { allocator, blocks, .. } = &asleep;
        let [small, large] = [512, 64 * MIB].map(|bytes| Request::new(bytes, HOME));
        for request in [small, large] {
            is_asleep(allocator.allocate(request.in_pool(TAG)));
            assert_eq!(asleep.engine().predict(TAG, request), Prediction::Refuse);
        }
        is_asleep(allocator.allocate(Request::new(512, FAR).in_pool(TAG)));
        let scope = PoolScope::open(allocator.private_pools(), TAG, ScopeFilter::this_thread());
        let scope = scope.unwrap();
        is_asleep(allocator.try_allocate(512, HOME));
        let free = blocks[1].address() + 15 * MIB;
        let at = allocator.allocate(Request::new(512, HOME).at(free));
        assert!(matches!(at, Err(AllocError::NoBlockAt { .. })), "{at:?}");
        assert!(asleep.engine().replace(TAG, HOME, free, 512).is_none());
        drop(scope);
        allocator.give(allocator.take(512));
        asleep.resume();
        allocator.give(allocator.take_in(TAG, 512, HOME));
        asleep.end();
    }
}

#[test]
fn requests_that_wait_are_served_after_the_resume_or_fail_with_the_last_user() {
    let tag = TagOptions { requests: WhileAsleep::Wait, ..TagOptions::host("weights") };
    let asleep = Asleep::with("", tag);
    let allocator = &asleep.allocator;
    let request = Request::new(MIB, HOME).in_pool(TAG);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| allocator.allocate(request));
        thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        asleep.resume();
        allocator.give(waiting.join().unwrap().unwrap());
        asleep.pause();
        let waiting = scope.spawn(|| allocator.allocate(request));
        thread::sleep(Duration::from_millis(20));
        allocator.private_pools().release_pool(TAG).unwrap();
        is_asleep(waiting.join().unwrap());
    });
    asleep.end();
}

#[test]
fn layouts_and_snapshots_show_what_sleeps() {
    for conf in BOTH {
        let asleep = Asleep::new(conf);
        let block = asleep.allocator.take(MIB);
        let pools = asleep.allocator.private_pools();
        let layout = pools.pool_layout(TAG).unwrap();
        assert!(layout.iter().all(|segment| segment.asleep && segment.expandable));
        let snapshot = asleep.allocator.recording().snapshot();
        let states = snapshot.segments.iter().map(|of| (of.layout.pool, of.layout.asleep));
        let states: BTreeSet<_> = states.collect();
        assert_eq!(states, BTreeSet::from([(PoolId::DEFAULT, false), (TAG, true)]));
        assert!(
            asleep
                .allocator
                .expandable()
                .expandable_segments()
                .iter()
                .all(|segment| { (segment.pool != TAG) || segment.mapped_bytes == 0 })
        );
        asleep.resume();
        assert!(pools.pool_layout(TAG).unwrap().iter().all(|segment| !segment.asleep));
        asleep.allocator.give(block);
        asleep.end();
    }
}

#[test]
fn a_second_pause_or_resume_does_nothing() {
    let asleep = Asleep::new("");
    let tags = sleeping(&asleep.allocator);
    assert_eq!(tags.pause(TAG, &PauseOptions::default()), Ok(Default::default()));
    asleep.resume();
    assert_eq!(tags.resume(TAG), Ok(Default::default()));
    asleep.end();
}

#[test]
fn checkpoints_are_refused_and_older_ones_restore_after_the_resume() {
    for conf in BOTH {
        let asleep = Asleep::awake(conf, TagOptions::host("weights"));
        let checkpoints: &dyn Checkpoints = asleep.allocator.checkpoints();
        let checkpoint = checkpoints.checkpoint(TAG).unwrap();
        asleep.pause();
        let refused = Err(PoolError::Asleep { pool: TAG });
        assert_eq!(checkpoints.checkpoint(TAG), refused);
        assert_eq!(
            checkpoints.restore(&checkpoint).map(|_| ()),
            Err(PoolError::Asleep { pool: TAG })
        );
        asleep.resume();
        assert_eq!(asleep.host.calls("synchronize_device"), 1, "checkpoints hide streams");
        let Asleep { host, allocator, blocks } = asleep;
        let addresses = blocks.map(|block| {
            let address = block.address();
            allocator.give(block);
            address
        });
        let restored = allocator.checkpoints().restore(&checkpoint).unwrap();
        let live: Vec<_> = restored.live.iter().map(Allocation::address).collect();
        assert!(addresses.iter().all(|address| live.contains(address)));
        restored.live.into_iter().for_each(|block| allocator.give(block));
        drop(allocator);
        assert!(host.held().is_nothing());
    }
}

#[test]
fn sharing_is_refused_and_shared_pages_prevent_a_pause() {
    let conf = "expandable_segments:True,expandable_segments_ipc:True";
    let asleep = Asleep::new(conf);
    let sharing = asleep.allocator.sharing();
    let address = asleep.blocks[0].address();
    for refused in [sharing.share(&asleep.blocks[0]), sharing.share_raw(address)] {
        assert_eq!(refused.map(drop), Err(SharingError::Asleep { address }));
    }
    asleep.resume();
    sharing.share(&asleep.blocks[0]).unwrap();
    let refused = sleeping(&asleep.allocator).pause(TAG, &PauseOptions::default());
    assert!(matches!(refused, Err(SleepError::Shared { .. })), "{refused:?}");
    assert_eq!(info(&asleep.allocator).state, TagState::Awake);
    asleep.check_bytes();
    asleep.end();
}

#[test]
fn the_cache_is_emptied_and_configured_around_a_tag_that_sleeps() {
    for conf in BOTH {
        let asleep = Asleep::new(conf);
        let caching = asleep.allocator.caching();
        asleep.allocator.give(asleep.allocator.take(5 * MIB));
        caching.empty_cache().unwrap();
        assert_eq!(asleep.host.held().pinned_bytes, 0);
        assert_eq!(asleep.host.held().mapped_bytes(), 0);
        caching.apply(&config("max_split_size_mb:64")).unwrap();
        is_asleep(asleep.allocator.allocate(Request::new(512, HOME).in_pool(TAG)));
        assert_eq!(caching.cache_info().unwrap().free_block_bytes, 0);
        caching.set_limit_bytes(Some(19 * MIB));
        let Err(SleepError::OutOfMemory(report)) = sleeping(&asleep.allocator).resume(TAG) else {
            panic!("the limit is below the tag")
        };
        assert_eq!((report.needed_bytes, report.missing_bytes), (20 * MIB, MIB));
        assert_eq!(report.limit_bytes, Some(19 * MIB));
        assert!(report.to_string().contains("tag \"weights\" stays asleep"), "{report}");
        caching.set_limit_bytes(None);
        asleep.resume();
        asleep.allocator.give(asleep.allocator.take_in(TAG, 512, HOME));
        asleep.end();
    }
}

#[test]
fn a_resume_trims_other_caches_by_what_is_missing() {
    for conf in BOTH {
        let host = Arc::new(Host::with_bytes(64 * MIB));
        let allocator = built(conf, host.clone());
        create(&allocator, TagOptions::host("weights"));
        let block = allocator.take_in(TAG, 20 * MIB, HOME);
        write(&*host, block.address(), 20 * MIB, 2, HOME);
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        let others = [20 * MIB; 3].map(|bytes| allocator.take(bytes));
        let [first, second, third] = others;
        let Err(SleepError::OutOfMemory(report)) = sleeping(&allocator).resume(TAG) else {
            panic!("60 of 64 MiB are in use")
        };
        assert_eq!((report.needed_bytes, report.missing_bytes), (20 * MIB, 16 * MIB));
        assert_eq!(report.device_free_bytes, Some(4 * MIB));
        assert_eq!(report.pools, [(PoolId::DEFAULT, 60 * MIB)]);
        assert_eq!(info(&allocator).state, TagState::Asleep);
        allocator.give(second);
        allocator.give(third);
        sleeping(&allocator).resume(TAG).unwrap();
        assert!(holds(&*host, block.address(), 20 * MIB, 2, HOME));
        let reserved = allocator.stats().memory_reserved().unsigned_abs();
        assert_eq!(reserved, 60 * MIB, "one segment, or one page, was released");
        allocator.give(first);
        allocator.give(block);
    }
}

#[test]
fn an_allocator_can_end_while_a_tag_sleeps() {
    for conf in BOTH {
        for tag in kinds_of_backup() {
            let Asleep { host, allocator, blocks } = Asleep::with(conf, tag);
            drop(blocks);
            drop(allocator);
            assert!(host.held().is_nothing(), "{:?}", host.held());
        }
    }
}

#[test]
fn a_tag_without_users_goes_with_its_last_block() {
    for conf in BOTH {
        for tag in kinds_of_backup() {
            let Asleep { host, allocator, blocks } = Asleep::with(conf, tag);
            let pools = allocator.private_pools();
            pools.release_pool(TAG).unwrap();
            let released = Err(SleepError::Pool(PoolError::Released { pool: TAG }));
            assert_eq!(sleeping(&allocator).resume(TAG), released);
            pools.empty_pool(TAG).unwrap();
            blocks.into_iter().for_each(|block| allocator.give(block));
            pools.empty_pool(TAG).unwrap();
            assert_eq!(pools.pool_users(TAG), None);
            allocator.caching().empty_cache().unwrap();
            assert!(host.held().is_nothing(), "{:?}", host.held());
            // The heap serves another pool.
            create(&allocator, TagOptions::host("weights"));
            allocator.give(allocator.take_in(TAG, MIB, HOME));
        }
    }
}

#[test]
fn captures_and_forbidden_waits_are_refused() {
    let asleep = Asleep::awake("", TagOptions::host("weights"));
    let Asleep { host, allocator, .. } = &asleep;
    let tags = sleeping(allocator);
    let capture = Capture::begin(&**host, SIDE).unwrap();
    let pools = allocator.private_pools();
    let scope = PoolScope::open(pools, TAG, ScopeFilter::Capture(capture)).unwrap();
    allocator.give(allocator.take_on(512, SIDE));
    let refused = tags.pause(TAG, &PauseOptions::default());
    assert_eq!(refused, Err(SleepError::Capturing { pool: TAG }));
    Capture::end(&**host, SIDE).unwrap();
    let hold = scope.finish();
    // A graph was captured in the tag, so any stream may run it.
    let other = PoolScope::open(pools, PoolId::next_user(), ScopeFilter::this_thread()).unwrap();
    let refused = tags.pause(TAG, &PauseOptions::default());
    assert_eq!(refused, Err(SleepError::NeedsSynchronization { pool: TAG }));
    let options = PauseOptions { synchronized: true, ..PauseOptions::default() };
    tags.pause(TAG, &options).unwrap();
    tags.resume(TAG).unwrap();
    drop(other);
    tags.pause(TAG, &PauseOptions::default()).unwrap();
    asleep.resume();
    drop(hold);
    asleep.end();
}

/// A graph of a pinned tag may read blocks that were freed.
#[test]
fn freed_blocks_of_a_pinned_tag_keep_their_contents() {
    for conf in BOTH {
        for tag in kinds_of_backup() {
            let asleep = Asleep::awake(conf, tag);
            let Asleep { host, allocator, .. } = &asleep;
            let freed = allocator.take_in(TAG, 7 * MIB, HOME);
            let late = allocator.take_in(TAG, 7 * MIB, HOME);
            let addresses = [freed.address(), late.address()];
            addresses.iter().for_each(|&address| write(&**host, address, 7 * MIB, 9, HOME));
            drop(allocator.checkpoints().checkpoint(TAG).unwrap());
            allocator.give(freed);
            asleep.pause();
            allocator.give(late);
            asleep.resume();
            for address in addresses {
                assert!(holds(&**host, address, 7 * MIB, 9, HOME), "{address:#x}");
            }
            asleep.end();
        }
    }
}

/// Freeing a block whose contents were dropped needs no events, and a capture does not defer it.
#[test]
fn frees_of_dropped_blocks_are_bookkeeping() {
    for conf in BOTH {
        let asleep = Asleep::awake(conf, TagOptions::dropped("cache"));
        asleep.allocator.record(&asleep.blocks[0], SIDE);
        asleep.pause();
        let Asleep { host, allocator, blocks: [first, second] } = asleep;
        let calls = host.total_calls();
        allocator.give(first);
        assert_eq!(host.total_calls(), calls, "no driver call, no event");
        assert_eq!(info(&allocator).live_bytes, 15 * MIB);
        allocator.give(second);
    }
}

#[test]
fn the_history_records_addresses_that_are_released_during_sleep() {
    for conf in BOTH {
        let Asleep { allocator, blocks, .. } = Asleep::new(conf);
        let history = allocator.recording().history();
        history.start(&RecordOptions::at_most(1000));
        blocks.into_iter().for_each(|block| allocator.give(block));
        sleeping(&allocator).resume(TAG).unwrap();
        let entries = allocator.recording().snapshot().entries;
        let unmaps = entries.iter().filter(|entry| entry.event.action == Action::SegmentUnmap);
        assert_eq!(unmaps.map(|entry| entry.event.size_bytes).sum::<u64>(), 20 * MIB);
    }
}

#[test]
fn other_pools_and_unknown_ones_are_no_tags() {
    let asleep = Asleep::new("");
    let pool = asleep.allocator.pool();
    let tags = sleeping(&asleep.allocator);
    let no_tag = Err(SleepError::NotATag { pool: pool.id() });
    assert_eq!(tags.pause(pool.id(), &PauseOptions::default()).map(drop), no_tag);
    assert_eq!(tags.resume(PoolId::DEFAULT), Err(PoolError::IsDefault.into()));
    let unknown = PoolId { user: 999, ..TAG };
    assert_eq!(tags.tag_info(unknown), Err(PoolError::Unknown { pool: unknown }.into()));
    drop(pool);
    asleep.end();
}

#[test]
fn tags_are_refused_where_they_cannot_work() {
    let sim = || Arc::new(Sim::with_bytes(GIB));
    let tag = || tagged(TagOptions::host("weights"));
    let refused = |allocator: &Strategy, options: PoolOptions| {
        let refused = allocator.private_pools().create_pool(TAG, options);
        assert!(matches!(refused, Err(PoolError::NotSupported { .. })), "{refused:?}");
        refused.unwrap_err().to_string()
    };
    let hidden = built("", plain(sim()));
    assert!(refused(&hidden, tag()).contains("without virtual memory"));
    let pools = built("backend:cudaMallocAsync", sim());
    assert!(refused(&pools, tag()).contains("backend:native has them"));
    assert!(pools.control().sleeping.is_none());
    pools.private_pools().create_pool(TAG, PoolOptions::default()).unwrap();
    pools.private_pools().set_pool_options(TAG, &tag()).unwrap_err();
    let native = built("", sim());
    refused(&native, PoolOptions { use_on_oom: true, ..tag() });
    create(&native, TagOptions::host("weights"));
    let other = PoolId { user: 78, ..TAG };
    let same = native.private_pools().create_pool(other, tag());
    assert!(same.unwrap_err().to_string().contains("two tags of one name"));
    let aligned =
        registry::build(&config("layers:[align:4KiB]"), sim(), BuildOptions::default()).unwrap();
    assert!(aligned.control().sleeping.is_none());
}

#[test]
fn an_unused_pool_can_become_a_tag() {
    let host = host();
    let allocator = built("", host.clone());
    let pools = allocator.private_pools();
    pools.create_pool(TAG, PoolOptions::default()).unwrap();
    pools.set_pool_options(TAG, &tagged(TagOptions::host("weights"))).unwrap();
    pools.set_pool_options(TAG, &PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let block = allocator.take_in(TAG, MIB, HOME);
    write(&*host, block.address(), MIB, 4, HOME);
    sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
    sleeping(&allocator).resume(TAG).unwrap();
    assert!(holds(&*host, block.address(), MIB, 4, HOME));
    pools.set_pool_options(TAG, &tagged(TagOptions::host("renamed"))).unwrap_err();
    let used = pools_with_a_block(&allocator);
    pools.set_pool_options(used, &tagged(TagOptions::host("late"))).unwrap_err();
    allocator.give(block);
}

fn pools_with_a_block(allocator: &Strategy) -> PoolId {
    let pool = PoolId { user: 79, ..TAG };
    allocator.private_pools().create_pool(pool, PoolOptions::default()).expect("its id is new");
    allocator.give(allocator.take_in(pool, MIB, HOME));
    pool
}

#[test]
fn scopes_of_a_tag_nest_and_open_on_several_threads() {
    let asleep = Asleep::awake("", TagOptions::host("weights"));
    let allocator = &asleep.allocator;
    let pools = allocator.private_pools();
    let open = || PoolScope::open(pools, TAG, ScopeFilter::this_thread()).unwrap();
    let live = || pools.live_addresses(TAG).unwrap().len();
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _other = open();
            barrier.wait();
            let block = allocator.take(512);
            barrier.wait();
            barrier.wait();
            allocator.give(block);
        });
        barrier.wait();
        let outer = open();
        let inner = open();
        drop(inner);
        let block = allocator.take(512);
        barrier.wait();
        assert_eq!(live(), 4);
        drop(outer);
        let outside = allocator.take(512);
        assert_eq!(live(), 4);
        barrier.wait();
        allocator.give(outside);
        allocator.give(block);
    });
    assert_eq!(live(), 2);
    asleep.end();
}

#[test]
fn peers_reach_the_tag_again_after_a_resume() {
    for conf in BOTH {
        let options =
            SimOptions { total_bytes: GIB, reachable_devices: 3, ..SimOptions::default() };
        let sim = Arc::new(Sim::new(options));
        let allocator = built(conf, sim.clone());
        create(&allocator, TagOptions::host("weights"));
        let block = allocator.take_in(TAG, 15 * MIB, HOME);
        allocator.peer_access().enable_peer_access(DeviceId(1)).unwrap();
        sleeping(&allocator).pause(TAG, &PauseOptions::default()).unwrap();
        allocator.peer_access().enable_peer_access(DeviceId(2)).unwrap();
        sleeping(&allocator).resume(TAG).unwrap();
        for peer in [DeviceId(1), DeviceId(2)] {
            assert_eq!(sim.mapped_bytes_open_to(peer), sim.held().mapped_bytes());
        }
        allocator.give(block);
    }
}

#[test]
fn the_history_and_trackers_see_pauses_and_resumes() {
    let asleep = Asleep::awake("", TagOptions::host("weights"));
    let history = asleep.allocator.recording().history();
    history.start(&RecordOptions::at_most(1000));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&seen);
    let id = history.add_tracker(Arc::new(move |entry: &Entry| {
        own.lock().push((entry.event.action, entry.event.size_bytes));
    }));
    asleep.pause();
    asleep.resume();
    history.remove_tracker(id);
    let bytes = 20 * MIB;
    let expected = [
        (Action::SegmentUnmap, bytes),
        (Action::TagPause, bytes),
        (Action::SegmentMap, bytes),
        (Action::TagResume, bytes),
    ];
    assert_eq!(*seen.lock(), expected);
    let entries = asleep.allocator.recording().snapshot().entries;
    let recorded: Vec<_> = entries.iter().map(|entry| entry.event.action).collect();
    assert_eq!(recorded, [Action::TagPause, Action::TagResume]);
    asleep.end();
}

#[test]
fn a_switchable_allocator_forwards_tags_and_refuses_to_switch() {
    let host = host();
    let allocator =
        Switchable::build(&config(""), host.clone(), BuildOptions::default()).expect("it can");
    let pools = allocator.private_pools();
    pools.create_pool(TAG, tagged(TagOptions::host("weights"))).unwrap();
    let block = allocator.take_in(TAG, MIB, HOME);
    write(&*host, block.address(), MIB, 6, HOME);
    let tags = allocator.control().sleeping.expect("native has tags");
    tags.pause(TAG, &PauseOptions::default()).unwrap();
    let refused = allocator.switch("backend:cudaMallocAsync");
    assert!(matches!(refused, Err(SwitchError::PoolInUse { pool: TAG })), "{refused:?}");
    tags.resume(TAG).unwrap();
    assert!(holds(&*host, block.address(), MIB, 6, HOME));
    allocator.give(block);
}
