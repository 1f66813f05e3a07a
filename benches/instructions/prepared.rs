//! Prepares the allocators and requests of each case.

use std::path::Path;
use std::sync::Arc;

use stratalloc::allocator::{Allocation, DeviceAllocator, PoolOptions, Request, ScopeFilter};
use stratalloc::config::{Config, KeyTable};
use stratalloc::handle::Handle;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::registry::{BuildOptions, build};
use stratalloc::size::{KIB, MIB};
use stratalloc::strategies::Strategy;
use stratalloc_recording::{Limits, Trace, Workload, reader, run};
use stratalloc_sim::{EventMode, Sim, SimOptions};

use super::{Case, Rounds, STEPS};

/// The memory of the device on which the recordings were made.
const TOTAL_BYTES: u64 = 150_109_880_320;

impl Case {
    /// Runs everything that precedes the first round.
    #[must_use]
    pub fn prepare(self, rounds: Rounds) -> Prepared {
        let steps = rounds.count() * STEPS;
        match self {
            Self::Replay { name, operations } => {
                let replay = Replay::new(name);
                Prepared::new(move || {
                    let work_gate = Some(Arc::clone(&replay.device) as _);
                    let passes = rounds.count();
                    let run = run(
                        &replay.workload,
                        &replay.strategy,
                        work_gate,
                        passes,
                        &stratalloc_recording::Silent,
                    );
                    let run = run.expect(FITS);
                    assert_eq!(run.allocations + run.frees + run.ooms, operations, "{name}");
                })
            }
            Self::Pair => {
                let strategy = strategy("backend:native", false).0;
                Prepared::new(move || (0..steps).for_each(|_| pair(&strategy, StreamId::DEFAULT)))
            }
            Self::PairRaw => {
                let strategy = strategy("backend:native", true).0;
                Prepared::new(move || {
                    let raw = &strategy;
                    for _ in 0..steps {
                        let request = Request::new(512, StreamId::DEFAULT);
                        let address = strategy.allocate(request).expect(FITS).address();
                        raw.free_raw(address).expect(LIVE);
                    }
                })
            }
            Self::PairSwitchable => {
                let (strategy, device) = strategy("backend:native", false);
                let handle = Handle::new(strategy, device);
                Prepared::new(move || (0..steps).for_each(|_| pair(&handle, StreamId::DEFAULT)))
            }
            Self::PairLayered { conf, .. } => {
                let strategy = strategy(conf, false).0;
                Prepared::new(move || (0..steps).for_each(|_| pair(&strategy, StreamId::DEFAULT)))
            }
            Self::Mix => {
                let strategy = strategy("backend:native", false).0;
                let mut mix = Mix::new();
                (0..200_000).for_each(|_| mix.step(&strategy));
                Prepared::new(move || (0..steps).for_each(|_| mix.step(&strategy)))
            }
            Self::RecordStream => {
                let (strategy, device) = strategy("backend:native", false);
                let other = StreamId(0x10);
                Prepared::new(move || {
                    let cross =
                        strategy.control().cross_stream.expect("the engine supports streams");
                    for _ in 0..steps {
                        let request = Request::new(64 * KIB, StreamId::DEFAULT);
                        let block = strategy.allocate(request).expect(FITS);
                        cross.record_stream(&block, other).expect(LIVE);
                        strategy.free(block).expect(LIVE);
                        device.complete_all();
                    }
                })
            }
            Self::Streams(streams) => {
                let strategy = strategy("backend:native", false).0;
                Prepared::new(move || {
                    for step in 0..steps {
                        pair(&strategy, nth_stream(step % streams));
                    }
                })
            }
            Self::Usage(streams) => {
                let strategy = strategy("backend:native", false).0;
                (0..2 * streams).for_each(|n| pair(&strategy, nth_stream(n % streams)));
                Prepared::new(move || {
                    for step in 0..steps {
                        pair(&strategy, nth_stream(step % streams));
                        assert_eq!(strategy.usage().live_blocks, 0);
                    }
                })
            }
            Self::Scopes(scopes) => {
                let strategy = strategy("backend:native", false).0;
                let pools = strategy.control().private_pools.expect(POOLS);
                for n in 0..scopes {
                    let filter = ScopeFilter::Stream(nth_stream(n));
                    pools.open_scope(PoolId::next_user(), filter).expect(POOLS);
                }
                Prepared::new(move || (0..steps).for_each(|_| pair(&strategy, StreamId::DEFAULT)))
            }
            Self::Pools(count) => {
                let (strategy, device) = strategy("backend:native", false);
                let handle = Handle::new(strategy, device);
                let create = |handle: &Handle| {
                    let pools = handle.control().private_pools.expect(POOLS);
                    let pool = PoolId::next_user();
                    pools.create_pool(pool, PoolOptions::default()).expect(POOLS);
                    pool
                };
                (0..count).for_each(|_| _ = create(&handle));
                Prepared::new(move || {
                    for _ in 0..steps {
                        let pool = create(&handle);
                        let pools = handle.control().private_pools.expect(POOLS);
                        pools.release_pool(pool).expect(POOLS);
                        pools.empty_pool(pool).expect(POOLS);
                    }
                })
            }
            Self::Uses => {
                let (strategy, device) = strategy("backend:native", false);
                Prepared::new(move || {
                    let cross =
                        strategy.control().cross_stream.expect("the engine supports streams");
                    for _ in 0..rounds.count() {
                        let request = Request::new(512, StreamId::DEFAULT);
                        let block = strategy.allocate(request).expect(FITS);
                        for n in 0..STEPS {
                            cross.record_stream(&block, nth_stream(n)).expect(LIVE);
                        }
                        strategy.free(block).expect(LIVE);
                        device.complete_all();
                        cross.process_events().expect("the device works");
                    }
                })
            }
        }
    }
}

const FITS: &str = "cases fit the device";
const LIVE: &str = "the block is live";
const POOLS: &str = "the engine has private pools";

/// Returns one of many streams. None is the default stream.
fn nth_stream(n: u32) -> StreamId {
    StreamId(0x1000 + u64::from(n) * 0x100)
}

/// A case after its preparation.
pub struct Prepared(Box<dyn FnMut()>);

impl Prepared {
    fn new(rounds: impl FnMut() + 'static) -> Self {
        Self(Box::new(rounds))
    }

    /// Runs all rounds.
    pub fn run(&mut self) {
        (self.0)();
    }
}

struct Replay {
    workload: Workload,
    strategy: Strategy,
    device: Arc<Sim>,
}

impl Replay {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
        let path = folder.join(format!("{name}.pickle.xz"));
        let trace: Trace = reader::read(&path, &Limits::default()).expect("it is shipped");
        let conf = if name.ends_with("expandable") { "expandable_segments:True" } else { "" };
        let (strategy, device) = strategy(conf, false);
        Self { workload: Workload::of(&trace, TOTAL_BYTES), strategy, device }
    }
}

fn strategy(conf: &str, raw_addresses: bool) -> (Strategy, Arc<Sim>) {
    let config = Config::parse(conf, &KeyTable::default()).expect("a legal string");
    let options = SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() };
    let device = Arc::new(Sim::new(options));
    let options = BuildOptions { raw_addresses };
    let strategy = build(&config, Arc::clone(&device) as _, options).expect("it can be built");
    (strategy, device)
}

fn pair<A: DeviceAllocator>(allocator: &A, stream: StreamId) {
    let block = allocator.allocate(Request::new(512, stream)).expect(FITS);
    allocator.free(block).expect(LIVE);
}

/// 4,096 live blocks, of which each step replaces one. Sizes and places come from a fixed pseudo-random
/// sequence. Three of four blocks are at most 64 KiB, the others up to 64 MiB.
struct Mix {
    blocks: Vec<Option<Allocation>>,
    state: u64,
}

impl Mix {
    fn new() -> Self {
        Self { blocks: (0..4096).map(|_| None).collect(), state: 1 }
    }

    fn next(&mut self) -> u64 {
        // Marsaglia's xorshift generator.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    fn step(&mut self, strategy: &Strategy) {
        let random = self.next();
        let most = if random & 3 == 0 { (64 * MIB) >> ((random >> 2) & 7) } else { 64 * KIB };
        let bytes = 1 + (random >> 20) % most;
        let place = &mut self.blocks[(random >> 5) as usize % 4096];
        if let Some(block) = place.take() {
            strategy.free(block).expect(LIVE);
        }
        let request = Request::new(bytes, StreamId::DEFAULT);
        *place = Some(strategy.allocate(request).expect(FITS));
    }
}
