//! A thousand switches under the load of four threads, with a record of which thread holds each byte.

use super::{ASYNC, EXPANDABLE, FRONT, NATIVE};
use crate::common::claims::Claims;
use crate::common::prelude::*;

const SWITCHES: usize = 1000;
const THREADS: u64 = 4;
const HELD_MAX: usize = 24;
/// The most steps of all threads per switch. A thread that wants a lock while others take it all the time
/// would wait for milliseconds.
const STEPS_MAX: u64 = 200;

struct Scene {
    switchable: Switchable,
    claims: Claims,
    stop: AtomicBool,
    steps: AtomicU64,
    /// The number of steps at which the threads wait for the next switch.
    pause_at: AtomicU64,
}

impl Scene {
    fn take(&self, rng: &mut Rng, stream: StreamId) -> Allocation {
        let most = if rng.below(4) == 0 { 3 * MIB } else { 40_000 };
        let bytes = rng.among(1..most + 1);
        self.claims.at_most.add(1);
        let block = self.switchable.take_on(bytes, stream);
        self.claims.at_least.add(1);
        self.claims.claim(block.address(), block.size_bytes());
        block
    }

    fn give(&self, block: Allocation) {
        self.claims.give_up(block.address(), Vec::new());
        self.claims.at_least.add(-1);
        self.switchable.give(block);
        self.claims.at_most.add(-1);
    }

    /// Allocates, frees and holds blocks until `stop` is set. Returns the blocks still held.
    fn work(&self, seed: u64, stream: StreamId) -> Vec<Allocation> {
        let mut rng = Rng::new(seed + 1);
        let mut held: Vec<Allocation> = Vec::new();
        while !self.stop.load(SeqCst) {
            if held.len() == HELD_MAX || (!held.is_empty() && rng.below(2) == 0) {
                self.give(held.swap_remove(rng.below(held.len())));
            } else {
                held.push(self.take(&mut rng, stream));
            }
            self.steps.fetch_add(1, SeqCst);
            while self.steps.load(SeqCst) > self.pause_at.load(SeqCst) && !self.stop.load(SeqCst) {
                thread::sleep(Duration::from_micros(50));
            }
        }
        held
    }
}

fn thousand_switches<B: Base>(confs: &[&str], invariants: bool) {
    let device = Arc::new(B::with_bytes(4 * GIB));
    let before = device.held();
    let driver: Arc<dyn Driver> = Arc::clone(&device) as _;
    let config = config(confs[0]);
    let streams: Vec<_> = (0..THREADS).map(|_| driver.create_stream().expect("streams")).collect();
    let switchable = Switchable::build(&config, driver, BuildOptions::default());
    let switchable = switchable.expect("the device can do it");
    let scene = Arc::new(Scene {
        switchable,
        claims: Claims::default(),
        stop: AtomicBool::new(false),
        steps: AtomicU64::new(0),
        pause_at: AtomicU64::new(STEPS_MAX),
    });
    let threads: Vec<_> = streams
        .iter()
        .zip(1..)
        .map(|(stream, seed)| {
            let (scene, stream) = (Arc::clone(&scene), *stream);
            thread::spawn(move || scene.work(seed, stream))
        })
        .collect();
    for round in 1..=SWITCHES {
        scene.switchable.switch(confs[round % confs.len()]).expect("a good string");
        // Lets some work run under each allocator before the next switch.
        let steps = scene.steps.load(SeqCst);
        scene.pause_at.store(steps + STEPS_MAX, SeqCst);
        while scene.steps.load(SeqCst) < steps + (round % 7) as u64 {
            thread::yield_now();
        }
    }
    scene.stop.store(true, SeqCst);
    let held: Vec<_> =
        threads.into_iter().flat_map(|thread| thread.join().expect("no thread panics")).collect();
    at_rest(&scene, held.len(), invariants);
    held.into_iter().for_each(|block| scene.give(block));
    scene.switchable.caching().empty_cache().expect("the device works");
    at_rest(&scene, 0, invariants);
    assert_eq!(scene.switchable.retired(), 0, "everything has drained");
    drop(scene);
    let driver: &dyn Driver = &*device;
    streams.into_iter().for_each(|stream| driver.destroy_stream(stream).expect("ours"));
    device.finish_all();
    assert_eq!(device.held(), before, "nothing is lost");
}

/// Checks the number of live blocks that the threads counted, while no thread works. With `invariants`, also
/// compares the allocator's counters with a recount of the layout.
fn at_rest(scene: &Scene, held: usize, invariants: bool) {
    let held = i64::try_from(held).expect("few");
    scene.switchable.cross_stream().process_events().expect("it works");
    let stats = scene.switchable.stats();
    let (least, most) = (&scene.claims.at_least, &scene.claims.at_most);
    assert_eq!((least.now(), most.now()), (held, held));
    if !invariants {
        return;
    }
    assert_eq!(stats.allocation.all.current, held);
    assert_eq!(stats.allocation.all.allocated - stats.allocation.all.freed, held);
    assert!(stats.allocation.all.peak >= held, "a peak below the truth");
    let layout = scene.switchable.caching().layout();
    invariants::check_layout(&layout).expect("segments tile");
    invariants::check_statistics(&stats, &layout).expect("counters equal a recount");
}

#[test]
fn a_thousand_switches_on_the_simulated_device_lose_nothing() {
    thousand_switches::<stratalloc_sim::Sim>(&[NATIVE, EXPANDABLE], true);
}

#[cfg(target_os = "linux")]
#[test]
fn a_thousand_switches_on_real_memory_lose_nothing() {
    thousand_switches::<stratalloc_sim::Host>(&[NATIVE, EXPANDABLE], true);
}

/// Counters are not compared with a recount: blocks cached by a `front` layer count as allocated in the
/// strategy below, and the layout of the driver's own pools is unknown.
#[test]
fn a_thousand_switches_between_all_kinds_lose_nothing() {
    thousand_switches::<stratalloc_sim::Sim>(&[NATIVE, ASYNC, FRONT, EXPANDABLE], false);
}
