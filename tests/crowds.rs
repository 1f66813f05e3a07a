//! Many threads use one allocator, on shared streams and on their own, and free each other's blocks.
//!
//! `crowds/hammer.rs` contains the work of each thread. Every block is claimed while it is live, so a
//! byte that is allocated twice is detected at once. While no thread runs, the invariants of
//! `common::invariants` hold and every counter equals its recount. `crowds/hooks.rs` tests callbacks and
//! observers.

mod hammer;
mod hooks;

use std::sync::Mutex;

use stratalloc::registry::build;

use crate::common::meeting::Meeting;
use crate::common::prelude::*;
use hammer::{Scene, hammer_on};

/// Threads on separate streams share no blocks, except where they free each other's.
#[test]
fn threads_on_their_own_streams_share_no_byte() {
    for threads in [2, 4] {
        let scene = Scene::new(64 << 30, EventMode::Immediate, threads);
        let streams: Vec<_> = scene.streams.iter().map(|&stream| vec![stream]).collect();
        let done = hammer_on(&scene, &streams, |_| {});
        scene.rest(done);
    }
}

#[test]
fn threads_on_one_stream_share_no_byte() {
    for threads in [2, 4] {
        let scene = Scene::new(64 << 30, EventMode::Immediate, 1);
        let done = hammer_on(&scene, &vec![scene.streams.clone(); threads], |_| {});
        scene.rest(done);
    }
}

#[test]
fn blocks_used_by_other_streams_come_back_only_when_a_background_thread_has_finished_their_work() {
    for threads in [2, 4] {
        let mut scene = Scene::new(64 << 30, EventMode::Manual, 3);
        scene.crosses = true;
        let done = hammer_on(&scene, &vec![scene.streams.clone(); threads], |over| {
            let mut rng = Rng::new(99);
            while !over.load(SeqCst) {
                let stream = scene.streams[rng.below(scene.streams.len())];
                let moment = scene.machine.0.submitted();
                scene.claims.pass(stream, moment);
                scene.machine.0.complete_until(stream, moment);
                thread::yield_now();
            }
        });
        scene.rest(done);
    }
}

/// Runs all operations concurrently on a device that is too small, so that requests may fail.
fn under_pressure(threads: usize, settings: Settings) {
    let mut scene = Scene::with_settings(160 * MIB, EventMode::Manual, 3, settings.clone());
    scene.crosses = true;
    scene.may_fail = true;
    scene.resets_peaks = settings.expandable_segments;
    let done = hammer_on(&scene, &vec![scene.streams.clone(); threads], |over| {
        let mut rng = Rng::new(7);
        let caching = scene.strategy.caching();
        let counters = scene.strategy.counters();
        let engine = scene.strategy.engine().expect("the native strategy has an engine");
        while !over.load(SeqCst) {
            match rng.below(11) {
                0 => caching.empty_cache().expect("the driver works"),
                1 => caching.set_limit_bytes(Some([40, 90, 150][rng.below(3)] * MIB)),
                2 => caching.set_limit_bytes(None),
                3 => caching.set_memory_fraction(0.7).expect("it is a fraction"),
                4 => {
                    let max_split_bytes = [None, Some(24 * MIB)][rng.below(2)];
                    let expandable_segments = rng.below(2) == 0;
                    let other =
                        Settings { max_split_bytes, expandable_segments, ..settings.clone() };
                    caching.apply(&Config::from_settings(other)).expect("the device can do it");
                }
                5 => engine.check().expect("every heap keeps its invariants at any moment"),
                6 => crate::common::invariants::check_layout(&caching.layout())
                    .expect("layouts always tile"),
                7 => drop(caching.cache_info().expect("the driver works")),
                8 => counters.reset_accumulated(),
                9 if scene.resets_peaks => counters.reset_peaks(),
                _ => {
                    // The counters of each heap (the blocks of one stream in one pool) are read at a
                    // different moment, so only bounds of single values can be checked.
                    let stats = counters.statistics();
                    assert!(stats.reserved_bytes.all.current <= 160 << 20);
                    assert!(stats.num_ooms >= 0 && stats.allocation.all.peak >= 0);
                }
            }
            scene.machine.0.complete_stream(scene.streams[rng.below(3)]);
            thread::yield_now();
        }
        caching.set_limit_bytes(None);
        caching.apply(&Config::from_settings(settings.clone())).expect("the device can do it");
    });
    scene.rest(done);
}

#[test]
fn threads_under_pressure_share_no_byte_while_limits_settings_and_caches_change() {
    let plain = Settings::default();
    let collector = Settings { garbage_collection_threshold: Some(0.5), ..plain.clone() };
    let unlocked = Settings { release_lock_on_device_allocate: true, ..collector.clone() };
    let pytorch = Settings { compat: Compat::PyTorch, ..unlocked.clone() };
    let expandable = Settings { expandable_segments: true, ..plain.clone() };
    for settings in [plain, collector, unlocked, pytorch, expandable] {
        for threads in [2, 4] {
            under_pressure(threads, settings.clone());
        }
    }
}

#[test]
fn peaks_are_exact_when_threads_take_turns() {
    for threads in [2, 4] {
        let scene = Scene::new(64 << 30, EventMode::Immediate, 3);
        // The expected values and their peaks: blocks, bytes of blocks, requested bytes.
        let turn = Mutex::new(([0_i64; 3], [0_i64; 3]));
        thread::scope(|scope| {
            for me in 0..threads {
                let (scene, turn) = (&scene, &turn);
                scope.spawn(move || {
                    let mut rng = Rng::new(me as u64 + 1);
                    let mut held = Vec::new();
                    for _ in 0..800 {
                        let bytes = 1 + rng.below(200 * 1024) as u64;
                        let signed = |n: u64| i64::try_from(n).expect("it is small");
                        let change = [1, signed(bytes.div_ceil(512) * 512), signed(bytes)];
                        let stream = scene.streams[rng.below(3)];
                        let frees = rng.below(2) == 0 && !held.is_empty();
                        let (now, peak) = &mut *turn.lock().expect("no thread has panicked");
                        let (change, sign) = if frees {
                            let (block, change) = held.swap_remove(rng.below(held.len()));
                            scene.strategy.give(block);
                            (change, -1)
                        } else {
                            let block = scene.strategy.try_allocate(bytes, stream);
                            held.push((block.expect("there is room"), change));
                            (change, 1)
                        };
                        for (lane, change) in change.into_iter().enumerate() {
                            now[lane] += sign * change;
                            peak[lane] = peak[lane].max(now[lane]);
                        }
                    }
                });
            }
        });
        let stats = scene.strategy.stats();
        let (now, peak) = turn.into_inner().expect("no thread has panicked");
        let families = [stats.allocation, stats.allocated_bytes, stats.requested_bytes];
        assert_eq!(families.map(|family| family.all.current), now);
        assert_eq!(families.map(|family| family.all.peak), peak);
        assert_eq!(families.map(|family| family.small.peak), peak);
    }
}

#[test]
fn overlapping_growth_never_passes_the_limit() {
    for unlocked in [false, true] {
        let settings =
            Settings { release_lock_on_device_allocate: unlocked, ..Settings::default() };
        let scene = Scene::with_settings(1 << 30, EventMode::Immediate, 4, settings);
        let caching = scene.strategy.caching();
        caching.set_limit_bytes(Some(90 * MIB));
        let (over, failures) = (AtomicBool::new(false), AtomicUsize::new(0));
        thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !over.load(SeqCst) {
                    assert!(scene.used_bytes() <= 90 * MIB, "the limit is passed");
                    thread::yield_now();
                }
            });
            let workers: Vec<_> = (0..4)
                .map(|me| {
                    let (scene, failures) = (&scene, &failures);
                    scope.spawn(move || {
                        for round in 0..100 {
                            let bytes = [11 * MIB, 20 * MIB, 30 * MIB, 700 * KIB][round % 4];
                            let request = Request::new(bytes, scene.streams[me]);
                            match scene.strategy.allocate(request) {
                                Ok(block) => scene.strategy.give(block),
                                Err(_) => drop(failures.fetch_add(1, SeqCst)),
                            }
                        }
                    })
                })
                .collect();
            let done: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            over.store(true, SeqCst);
            done.into_iter().for_each(|done| done.expect("no worker panics"));
            watch.join().expect("the limit held");
        });
        let stats = scene.strategy.stats();
        assert!(stats.reserved_bytes.all.peak <= 90 << 20, "not even for a moment");
        assert_eq!(stats.num_ooms, i64::try_from(failures.into_inner()).expect("few"));
        scene.check();
    }
}

/// Makes two threads allocate a segment each at the same time. Returns how many of them were in the
/// driver at once, how many succeeded, and the bytes allocated on the device.
fn two_grow_at_once(unlocked: bool, limit_bytes: Option<u64>) -> (usize, usize, u64) {
    let machine = SimMachine::with_events(1 << 30, EventMode::Immediate);
    let meeting = match (unlocked, limit_bytes) {
        (true, None) => Meeting::of_two(),
        // In the other cases the second miss must not reach the driver while the first is there. So the
        // first waits only for a while.
        _ => Meeting::of_one(20_000),
    };
    let driver = Arc::new(Intercepted::with(Arc::clone(&machine.0), meeting));
    let settings = Settings { release_lock_on_device_allocate: unlocked, ..Settings::default() };
    let strategy = build(
        &Config::from_settings(settings),
        Arc::clone(&driver) as Arc<dyn Driver>,
        BuildOptions::default(),
    )
    .expect("the device can do it");
    strategy.caching().set_limit_bytes(limit_bytes);
    let begin = Barrier::new(2);
    let served = thread::scope(|scope| {
        let threads = [3, 7].map(|stream| {
            let (strategy, begin) = (&strategy, &begin);
            scope.spawn(move || {
                begin.wait();
                strategy.try_allocate(20 * MIB, StreamId(stream)).is_ok()
            })
        });
        threads.map(|thread| thread.join().expect("no thread panics"))
    });
    let engine = strategy.engine().expect("the native strategy has an engine");
    crate::common::invariants::check_all(engine, machine.used_bytes())
        .expect("the invariants hold at rest");
    let served = served.into_iter().filter(|served| *served).count();
    (driver.interceptor().most_inside(), served, machine.used_bytes())
}

#[test]
fn misses_meet_in_the_driver_only_when_the_lock_is_released_for_it() {
    assert_eq!(two_grow_at_once(false, None), (1, 2, 40 * MIB));
    assert_eq!(two_grow_at_once(true, None), (2, 2, 40 * MIB));
}

#[test]
fn what_others_are_asking_the_driver_for_counts_against_the_limit() {
    for unlocked in [false, true] {
        let (_, served, used_bytes) = two_grow_at_once(unlocked, Some(30 * MIB));
        assert_eq!((served, used_bytes), (1, 20 * MIB), "unlocked: {unlocked}");
    }
}
