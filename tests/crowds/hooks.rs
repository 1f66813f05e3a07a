//! Callbacks and observers run with no lock held: they may allocate, free and panic.

use std::sync::{Mutex, Weak};

use super::hammer::Scene;
use crate::common::prelude::*;

const DEVICE_BYTES: u64 = 100 * MIB;

/// Returns a scene, and a weak reference to the scene for its hooks.
fn scene() -> (Arc<Scene>, Arc<OnceLock<Weak<Scene>>>) {
    let scene = Arc::new(Scene::new(DEVICE_BYTES, EventMode::Immediate, 3));
    let reach = Arc::new(OnceLock::new());
    reach.set(Arc::downgrade(&scene)).expect("it is set once");
    (scene, reach)
}

fn within(reach: &OnceLock<Weak<Scene>>) -> Arc<Scene> {
    reach.get().and_then(Weak::upgrade).expect("hooks run while the scene lives")
}

fn hooks(scene: &Scene) -> &Hooks {
    scene.strategy.hooks()
}

fn allocate(scene: &Scene, bytes: u64, stream: usize) -> Result<Allocation, AllocError> {
    scene.strategy.try_allocate(bytes, scene.streams[stream])
}

/// Adds a callback that frees all blocks in `stash`. Returns how often it was called.
fn free_the_stash(
    scene: &Scene,
    reach: &Arc<OnceLock<Weak<Scene>>>,
    stash: &Arc<Mutex<Vec<Allocation>>>,
) -> Arc<AtomicUsize> {
    let (reach, stash, calls) = (Arc::clone(reach), Arc::clone(stash), Arc::default());
    let counted: Arc<AtomicUsize> = Arc::clone(&calls);
    hooks(scene).add_free_memory_callback(Arc::new(move || {
        counted.fetch_add(1, SeqCst);
        let scene = within(&reach);
        let blocks = std::mem::take(&mut *stash.lock().expect("no thread has panicked"));
        let any = !blocks.is_empty();
        blocks.into_iter().for_each(|block| scene.strategy.give(block));
        any
    }));
    calls
}

#[test]
fn a_callback_that_frees_blocks_makes_room_for_the_request() {
    let (scene, reach) = scene();
    let stash = Arc::new(Mutex::new(Vec::new()));
    let calls = free_the_stash(&scene, &reach, &stash);
    for round in 0..40 {
        let block = allocate(&scene, [30 * MIB, 40 * MIB][round % 2], round % 3);
        stash.lock().unwrap().push(block.expect("the callback makes room"));
        scene.check();
    }
    assert!(calls.load(SeqCst) > 0);
    assert_eq!(scene.strategy.stats().num_ooms, 0);
}

#[test]
fn callbacks_free_blocks_from_inside_while_other_threads_allocate() {
    for threads in [2, 4] {
        let (scene, reach) = scene();
        let stash = Arc::new(Mutex::new(Vec::new()));
        let calls = free_the_stash(&scene, &reach, &stash);
        thread::scope(|scope| {
            for me in 0..threads {
                let (scene, stash) = (&scene, &stash);
                scope.spawn(move || {
                    let mut rng = Rng::new(me as u64 + 1);
                    for _ in 0..300 {
                        let bytes = [MIB / 2, 12 * MIB, 20 * MIB][rng.below(3)];
                        let Ok(block) = allocate(scene, bytes, rng.below(3)) else {
                            continue;
                        };
                        // Panics if another thread holds a byte of the block.
                        scene.claims.claim(block.address(), bytes);
                        thread::yield_now();
                        scene.claims.give_up(block.address(), Vec::new());
                        stash.lock().expect("no thread has panicked").push(block);
                    }
                });
            }
        });
        scene.check();
        // The blocks of all rounds do not fit on the device at once, so a callback must have freed some.
        assert!(calls.load(SeqCst) > 0);
        for block in std::mem::take(&mut *stash.lock().unwrap()) {
            scene.strategy.give(block);
        }
        scene.check();
    }
}

#[test]
fn an_observer_may_allocate_and_free_and_even_run_out_of_memory_itself() {
    let (scene, reach) = scene();
    let seen = Arc::new(Mutex::new(Vec::<(StreamId, u64)>::new()));
    let (observed, busy) = (Arc::clone(&seen), Arc::new(AtomicUsize::new(0)));
    let inside = Arc::clone(&busy);
    hooks(&scene).add_oom_observer(Arc::new(move |report: &OutOfMemory| {
        let scene = within(&reach);
        inside.fetch_add(1, SeqCst);
        observed
            .lock()
            .expect("no thread has panicked")
            .push((report.stream, report.requested_bytes));
        // On a full device these small requests may fail too. Such failures must not call the observer
        // recursively.
        let own: Vec<_> = (0..3).filter_map(|n| allocate(&scene, 512 << n, n).ok()).collect();
        for _ in 0..3 {
            assert!(allocate(&scene, DEVICE_BYTES, 0).is_err());
        }
        own.into_iter().for_each(|block| scene.strategy.give(block));
    }));
    let failed = AtomicUsize::new(0);
    thread::scope(|scope| {
        for me in 0..2 {
            let (scene, failed) = (&scene, &failed);
            scope.spawn(move || {
                for round in 0..60 {
                    let bytes = [60 * MIB, 45 * MIB, 5 * MIB][round % 3];
                    let blocks = [allocate(scene, bytes, me), allocate(scene, 50 * MIB, me)];
                    for block in blocks {
                        match block {
                            Ok(block) => scene.strategy.give(block),
                            Err(_) => drop(failed.fetch_add(1, SeqCst)),
                        }
                    }
                }
            });
        }
    });
    let failed = failed.into_inner();
    // 60 MiB and 50 MiB never fit at once, whichever thread is first.
    assert!(failed > 0);
    assert_eq!(busy.load(SeqCst), failed, "once for each failed request, never from inside");
    assert_eq!(seen.lock().unwrap().len(), failed);
    scene.check();
    assert_eq!(scene.strategy.stats().allocation.all.current, 0);
}

#[test]
fn an_allocator_survives_a_panic_of_a_callback() {
    let (scene, _) = scene();
    let (angry, calls) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let (mood, counted) = (Arc::clone(&angry), Arc::clone(&calls));
    hooks(&scene).add_free_memory_callback(Arc::new(move || {
        counted.fetch_add(1, SeqCst);
        assert!(!mood.load(SeqCst), "the callback is angry");
        false
    }));
    for round in 1..=3 {
        let died = catch_unwind(AssertUnwindSafe(|| allocate(&scene, 5 * MIB, 0)));
        assert!(died.is_err(), "the panic reaches the caller");
        assert_eq!(calls.load(SeqCst), round, "it is called again after a panic");
        scene.check();
    }
    // The panic must leave no lock held, neither for other threads nor for this one.
    angry.store(false, SeqCst);
    for stream in 0..3 {
        let block = thread::scope(|scope| {
            scope.spawn(|| allocate(&scene, 5 * MIB, stream)).join().expect("no panic now")
        });
        scene.strategy.free(block.expect("there is room")).expect("it is live");
        scene.strategy.give(allocate(&scene, 7 * MIB, stream).expect("there is room"));
    }
    scene.check();
}

#[test]
fn an_allocator_survives_a_panic_of_an_observer() {
    let (scene, _) = scene();
    let held = allocate(&scene, 30 * MIB, 0).expect("there is room");
    hooks(&scene).add_oom_observer(Arc::new(|_| panic!("the observer is angry")));
    for _ in 0..2 {
        let died = catch_unwind(AssertUnwindSafe(|| allocate(&scene, 90 * MIB, 1)));
        assert!(died.is_err(), "the panic reaches the caller");
        scene.check();
    }
    assert_eq!(scene.strategy.stats().num_ooms, 2);
    let other = allocate(&scene, 60 * MIB, 1).expect("there is room");
    for block in [held, other] {
        scene.strategy.give(block);
    }
    scene.strategy.caching().empty_cache().expect("the driver works");
    assert_eq!(scene.used_bytes(), 0);
}
