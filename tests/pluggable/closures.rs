//! What the library adds around a user's functions.

use stratalloc::error::AddressFault;
use stratalloc::strategies::plugin::Base;

use super::{User, build, over, sim};
use crate::common::prelude::*;

const MAIN: StreamId = StreamId(64);
const SIDE: StreamId = StreamId(128);

#[test]
fn closures_are_chosen_by_name_and_get_everything_but_sharing() {
    let user = User::with_bytes(u64::MAX / 2);
    registry::register_callbacks("closures", user.callbacks()).unwrap();
    let built = build("backend:closures").unwrap();
    assert_eq!(built.name(), "closures");
    assert!(built.control().cross_stream.is_some() && built.control().caching.is_some());
    assert!(built.control().counters.is_some() && built.control().by_address);
    assert!(built.control().hooks.is_some() && built.control().private_pools.is_some());
    assert!(built.control().sharing.is_none());
    let block = built.take_on(1000, MAIN);
    assert_eq!(block.size_bytes(), 1000);
    built.give(block);
    assert_eq!(user.take_calls(), ["alloc 1000 64", "free 1000 64"]);
}

#[test]
fn counters_peaks_layout_and_history_follow_every_block() {
    let user = User::with_bytes(u64::MAX / 2);
    let own = over(sim(), user.callbacks());
    own.history().start(&RecordOptions::at_most(100));
    let sizes = [MIB, 3 * MIB, 512, 20 * MIB, 7];
    let blocks: Vec<_> = sizes.iter().map(|bytes| own.take_on(*bytes, MAIN)).collect();
    let all: i64 = sizes.iter().map(|bytes| i64::try_from(*bytes).unwrap()).sum();
    let s = own.stats();
    assert_eq!((s.allocation.all.current, s.allocation.small.current), (5, 3));
    for family in [&s.allocated_bytes, &s.active_bytes, &s.requested_bytes, &s.reserved_bytes] {
        assert_eq!((family.all.current, family.all.peak, family.all.freed), (all, all, 0));
    }
    let layout = own.caching().layout();
    assert_eq!(layout.len(), 5);
    assert!(layout.windows(2).all(|pair| pair[0].address < pair[1].address));
    blocks.into_iter().for_each(|block| own.give(block));
    let s = own.stats();
    assert_eq!((s.reserved_bytes.all.current, s.reserved_bytes.all.peak), (0, all));
    assert_eq!((s.num_device_alloc, s.num_device_free), (5, 5));
    own.counters().reset_peaks();
    own.counters().reset_accumulated();
    assert_eq!(own.stats(), Statistics::default());
    let mut events = Vec::new();
    own.history().drain_into(&mut events);
    let count = |action| events.iter().filter(|event| event.action == action).count();
    for action in [Action::SegmentAlloc, Action::Alloc, Action::FreeCompleted, Action::SegmentFree]
    {
        assert_eq!(count(action), 5, "{action:?}");
    }
}

quickcheck::quickcheck! {
    fn peaks_are_those_of_one_plain_counter(steps: Vec<(u32, bool)>) -> bool {
        let own = over(sim(), User::with_bytes(u64::MAX / 2).callbacks());
        let (mut live, mut now, mut peak) = (Vec::new(), 0, 0);
        for (bytes, free) in steps {
            if free && let Some(block) = live.pop() {
                let block: Allocation = block;
                now -= i64::try_from(block.size_bytes()).unwrap();
                own.give(block);
            } else {
                live.insert(0, own.take_on(u64::from(bytes) + 1, MAIN));
                now += i64::from(bytes) + 1;
            }
            peak = peak.max(now);
            let s = own.stats();
            for family in [s.allocated_bytes, s.active_bytes, s.requested_bytes, s.reserved_bytes] {
                assert_eq!((family.all.current, family.all.peak), (now, peak));
            }
            assert_eq!(own.caching().layout().len(), live.len());
        }
        true
    }
}

#[test]
fn no_wrong_handle_reaches_the_users_free() {
    let user = User::with_bytes(u64::MAX / 2);
    let own = over(sim(), user.callbacks());
    let block = own.take_on(64, MAIN);
    let (address, owner, token) = (block.address(), block.owner(), block.token());
    own.give(block);
    user.take_calls();
    for owner in [owner, stratalloc::ids::OwnerId::next()] {
        assert!(own.free(Allocation::new(address, 64, owner, token)).is_err());
    }
    let inside = own.try_allocate(4096, MAIN).map(|block| block.address()).unwrap();
    assert!(own.free_raw(inside + 512).is_err(), "no block starts inside a block");
    own.free_raw(inside).unwrap();
    assert!([inside, address, 0, u64::MAX].map(|at| own.free_raw(at)).iter().all(Result::is_err));
    assert_eq!(user.take_calls(), ["alloc 4096 64", "free 4096 64"]);
}

#[test]
fn answers_that_cannot_be_handed_out_are_errors_with_the_address() {
    let returned = Arc::new(AtomicU64::new(0));
    for (answer, expected, is_freed) in [
        (4096 + 8, AddressFault::Misaligned { alignment_bytes: 16 }, true),
        (u64::MAX - 15, AddressFault::PastTheEnd, true),
        (4096, AddressFault::Live, false),
    ] {
        let seen = Arc::clone(&returned);
        let free = move |address, _, _, _| seen.store(address, Ordering::Relaxed);
        let next = AtomicBool::new(false);
        let allocate = move |_, _: DeviceId, _: StreamId| {
            Some(if next.swap(true, Ordering::Relaxed) { answer } else { 4096 })
        };
        let own = over(sim(), Callbacks::new(allocate, free));
        let first = own.take_on(100, MAIN);
        returned.store(0, Ordering::Relaxed);
        match own.try_allocate(100, MAIN).unwrap_err() {
            AllocError::BadAddress { address, requested_bytes: 100, fault } => {
                assert_eq!((address, fault), (answer, expected));
            }
            other => panic!("{other}"),
        }
        let expected = if is_freed { answer } else { 0 };
        assert_eq!(returned.load(Ordering::Relaxed), expected, "a live block is not freed");
        assert_eq!(own.stats().allocation.all.current, 1);
        own.give(first);
    }
}

#[test]
fn null_is_an_out_of_memory_error_with_every_number() {
    let user = User::with_bytes(100 * MIB);
    let own = over(sim(), user.callbacks());
    let seen = Arc::new(AtomicU64::new(0));
    let observed = Arc::clone(&seen);
    let observer = move |report: &stratalloc::error::OutOfMemory| {
        observed.store(report.requested_bytes, Ordering::Relaxed);
    };
    own.hooks().add_oom_observer(Arc::new(observer));
    let held = own.take_on(60 * MIB, MAIN);
    let report = own.fail(50 * MIB, SIDE);
    assert_eq!((report.requested_bytes, report.stream), (50 * MIB, SIDE));
    assert_eq!((report.allocated_bytes, report.reserved_bytes), (60 * MIB, 60 * MIB));
    assert!(report.device_free_bytes.is_some() && report.limit_bytes.is_none());
    assert!(report.hints[0].contains("backend:mine returned null"), "{report}");
    assert_eq!(seen.load(Ordering::Relaxed), 50 * MIB);
    let s = own.stats();
    assert_eq!((s.num_ooms, s.num_alloc_retries), (1, 1));
    own.give(held);
    assert!(matches!(own.try_allocate(0, MAIN), Err(AllocError::ZeroBytes)));
    let huge = own.try_allocate(u64::MAX, MAIN);
    assert!(matches!(huge, Err(AllocError::TooLarge { .. })));
}

#[test]
fn callbacks_free_blocks_and_the_request_succeeds() {
    let user = User::with_bytes(100 * MIB);
    let own = Arc::new(over(sim(), user.callbacks()));
    let kept = Arc::new(parking_lot::Mutex::new(vec![own.take_on(60 * MIB, MAIN)]));
    let (allocator, cache) = (Arc::clone(&own), Arc::clone(&kept));
    let free_some = move || match cache.lock().pop() {
        Some(block) => allocator.free(block).is_ok(),
        None => false,
    };
    own.hooks().add_free_memory_callback(Arc::new(free_some));
    let block = own.take_on(80 * MIB, MAIN);
    assert_eq!(own.stats().num_ooms, 0);
    own.give(block);
}

#[test]
fn our_own_limit_refuses_before_the_user_is_called() {
    let user = User::with_bytes(u64::MAX / 2);
    let own = over(sim(), user.callbacks());
    let caching = own.caching();
    caching.set_limit_bytes(Some(10 * MIB));
    let block = own.take_on(10 * MIB, MAIN);
    user.take_calls();
    let report = own.fail(1, MAIN);
    assert!(report.hints[0].contains("the limit of"), "{report}");
    assert_eq!(user.take_calls(), [""; 0]);
    own.give(block);
    assert!(
        caching.set_memory_fraction(1.5).is_err() && caching.set_memory_fraction(f64::NAN).is_err()
    );
    assert_eq!(caching.limit_bytes(), Some(10 * MIB));
    caching.set_memory_fraction(1.0).unwrap();
    assert_eq!(caching.limit_bytes(), None);
}

#[test]
fn optional_functions_are_called_and_a_fraction_of_the_string_counts() {
    let user = User::with_bytes(u64::MAX / 2);
    let [i, r, f] = [(); 3].map(|()| Arc::clone(&user));
    let callbacks = user
        .callbacks()
        .on_init(move |devices| i.record_call(format!("init {devices}")))
        .on_reset(move || r.record_call("reset".to_owned()))
        .on_memory_fraction(move |part, device| f.record_call(format!("fraction {part} {device}")))
        .on_base_address(|address| Base { address: address - 512, size_bytes: Some(8192) });
    let settings = Settings { per_process_memory_fraction: 0.5, ..Settings::default() };
    let own = PluggableAllocator::new("mine", sim(), callbacks, &settings, 4);
    assert_eq!(user.take_calls(), ["init 4", "fraction 0.5 0"]);
    assert!(own.caching().limit_bytes().is_some());
    own.caching().empty_cache().unwrap();
    assert_eq!(user.take_calls(), ["reset"]);
    let block = own.take_on(64, MAIN);
    let base = own.caching().base_allocation(&block).unwrap();
    assert_eq!((base.address, base.size_bytes), (block.address() - 512, 8192));
    own.give(block);
}

#[test]
fn a_block_that_another_stream_uses_is_held_back_until_that_stream_is_done() {
    let (device, user) = (sim(), User::with_bytes(u64::MAX / 2));
    let own = over(device.clone(), user.callbacks());
    let [main, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let block = own.take_on(64, main);
    let cross = own.cross_stream();
    cross.record_stream(&block, side).unwrap();
    cross.record_stream(&block, main).unwrap();
    user.take_calls();
    own.give(block);
    cross.process_events().unwrap();
    assert_eq!(user.take_calls(), [""; 0], "the side stream is not done");
    let s = own.stats();
    assert_eq!((s.allocation.all.current, s.active.all.current), (0, 1));
    device.complete_stream(side);
    let next = own.take_on(32, main);
    assert_eq!(user.take_calls()[0], format!("free 64 {main}"));
    own.give(next);
}

#[test]
fn under_pressure_other_streams_are_waited_for() {
    let (device, user) = (sim(), User::with_bytes(100 * MIB));
    let own = over(device.clone(), user.callbacks());
    let [main, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let block = own.take_on(80 * MIB, main);
    own.record(&block, side);
    own.give(block);
    let next = own.take_on(80 * MIB, main);
    assert_eq!(own.stats().num_sync_all_streams, 1);
    own.give(next);
    drop(own);
    assert_eq!(device.held().events, 0);
}

#[test]
fn a_user_that_waits_itself_gets_the_call_and_the_block_at_once() {
    let (device, user) = (sim(), User::with_bytes(u64::MAX / 2));
    let observed = Arc::clone(&user);
    let callbacks = user.callbacks();
    let callbacks =
        callbacks.on_record_stream(move |_, stream| observed.record_call(format!("uses {stream}")));
    let own = over(device, callbacks);
    let block = own.take_on(64, MAIN);
    own.record(&block, SIDE);
    own.give(block);
    assert_eq!(user.take_calls(), ["alloc 64 64", "uses 128", "free 64 64"]);
}

#[test]
fn a_use_inside_a_capture_is_waited_for_after_the_capture() {
    let (device, user) = (sim(), User::with_bytes(u64::MAX / 2));
    let own = over(device.clone(), user.callbacks());
    let [main, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let block = own.take_on(64, main);
    own.record(&block, side);
    let capture = device.capture().unwrap();
    capture.begin(side).unwrap();
    own.give(block);
    user.take_calls();
    own.cross_stream().process_events().unwrap();
    assert_eq!(user.take_calls(), [""; 0]);
    capture.end(side).unwrap();
    own.cross_stream().process_events().unwrap();
    device.complete_all();
    own.cross_stream().process_events().unwrap();
    assert_eq!(user.take_calls(), [format!("free 64 {main}")]);
}

#[test]
fn a_panic_in_a_function_reaches_the_caller_and_breaks_nothing() {
    let broken = Arc::new(AtomicBool::new(false));
    let user = User::with_bytes(u64::MAX / 2);
    let (inner, a, f) = (user.callbacks(), Arc::clone(&broken), Arc::clone(&broken));
    let over_inner = over(sim(), inner);
    let inner = Arc::new(over_inner);
    let (give, back) = (Arc::clone(&inner), Arc::clone(&inner));
    let allocate = move |bytes, _: DeviceId, stream| {
        assert!(!a.load(Ordering::Relaxed), "broken");
        give.try_allocate(bytes, stream).map(|b| b.address()).ok()
    };
    let free = move |address, _, _, _| {
        assert!(!f.load(Ordering::Relaxed), "broken");
        back.free_raw(address).unwrap();
    };
    let own = over(sim(), Callbacks::new(allocate, free));
    let caching = own.caching();
    caching.set_limit_bytes(Some(1000));
    let [first, second] = [own.take_on(400, MAIN), own.take_on(400, MAIN)];
    broken.store(true, Ordering::Relaxed);
    let panicked = |work: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(work)).is_err();
    assert!(panicked(&mut || drop(own.try_allocate(200, MAIN))));
    assert_eq!(own.stats().allocation.all.current, 2, "the request has changed nothing");
    let mut first = Some(first);
    assert!(panicked(&mut || own.free(first.take().unwrap()).unwrap()));
    broken.store(false, Ordering::Relaxed);
    assert_eq!(own.stats().allocation.all.current, 1, "its block is gone");
    let third = own.take_on(600, MAIN);
    [second, third].into_iter().for_each(|block| own.give(block));
    broken.store(true, Ordering::Relaxed);
    let _live = take_unbroken(&own, &broken);
    drop(own);
}

/// Returns a live block and sets `broken`, so that the user's functions panic when the allocator is dropped.
fn take_unbroken(own: &PluggableAllocator, broken: &AtomicBool) -> Allocation {
    broken.store(false, Ordering::Relaxed);
    let block = own.take_on(8, MAIN);
    broken.store(true, Ordering::Relaxed);
    block
}

#[test]
fn dropping_the_allocator_gives_everything_back() {
    let (device, user) = (sim(), User::with_bytes(u64::MAX / 2));
    let own = over(device.clone(), user.callbacks());
    let side = device.create_stream().unwrap();
    let _live = own.take_on(64, MAIN);
    let draining = own.take_on(128, MAIN);
    own.record(&draining, side);
    own.give(draining);
    drop(own);
    assert_eq!(user.live_bytes.load(Ordering::Relaxed), 0);
    assert_eq!(device.held().events, 0);
}

#[test]
fn what_was_built_cannot_be_exchanged_at_run_time() {
    let own = over(sim(), User::with_bytes(0).callbacks());
    let apply = |text| {
        let config = config(text);
        own.caching().apply(&config)
    };
    apply("max_split_size_mb:64").unwrap();
    let error = apply("library:other.so").unwrap_err();
    assert!(error.to_string().contains("library is read when an allocator is built"), "{error}");
}

/// Runs many threads and streams on real memory. Each block must keep the bytes that its thread wrote.
#[cfg(target_os = "linux")]
#[test]
fn threads_and_streams_keep_their_bytes_on_the_host_device() {
    use stratalloc_sim::{Host, HostOptions};
    let host = Arc::new(Host::new(HostOptions::default()));
    let (give, back) = (Arc::clone(&host), Arc::clone(&host));
    let allocate = move |bytes, _, _| give.allocate(bytes).ok();
    let free = move |address, bytes, _, _| back.free(address, bytes).expect("it is live");
    let own = over(host.clone(), Callbacks::new(allocate, free));
    let streams: Vec<_> = (0..4).map(|_| host.create_stream().unwrap()).collect();
    std::thread::scope(|scope| {
        for (n, stream) in streams.iter().copied().enumerate() {
            let (own, host, side) = (&own, &host, streams[(n + 1) % 4]);
            scope.spawn(move || {
                for round in 0..60u64 {
                    let bytes = 512 * (1 + (round * 7 + n as u64) % 9);
                    let block = own.take_on(bytes, stream);
                    let byte = u8::try_from(1 + n as u64 * 60 + round).unwrap();
                    host.fill(block.address(), byte, bytes, stream).unwrap();
                    host.synchronize_stream(stream).unwrap();
                    let mut seen = vec![0; usize::try_from(bytes).unwrap()];
                    host.copy_to_host(&mut seen, block.address(), side).unwrap();
                    assert!(seen.iter().all(|other| *other == byte), "another thread wrote here");
                    own.record(&block, side);
                    own.give(block);
                }
            });
        }
    });
    own.caching().empty_cache().unwrap();
    let s = own.stats();
    assert_eq!((s.active.all.current, s.num_device_alloc, s.num_device_free), (0, 240, 240));
    drop(own);
    assert_eq!(host.held().segments, []);
}
