//! The cost of a hit, which is a request served from the cache: no heap allocation and no driver call. Also
//! tests the size of the bookkeeping, at the start and after millions of operations.
//!
//! The global allocator of this program counts the heap allocations and the heap bytes of each thread. Block
//! sizes are drawn from a lognormal distribution, clamped to 1 byte .. 64 MiB, and 4,096 blocks are live.
//! All random numbers are drawn before counting begins.

#![expect(unsafe_code, reason = "a global allocator that counts can only be written with it")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stratalloc::allocator::{Allocation, DeviceAllocator, Request};
use stratalloc::config::{Config, Settings};
use stratalloc::driver::Driver;
use stratalloc::ids::{DeviceId, StreamId};
use stratalloc::layers::front::front;
use stratalloc::registry::{BuildOptions, build};
use stratalloc::size::{GIB, MIB, TIB};
use stratalloc::strategies::plugin::Callbacks;
use stratalloc::strategies::{PluggableAllocator, Strategy};
use stratalloc_sim::{CallCosts, EventMode, Sim, SimOptions};

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
    static HELD_BYTES: Cell<i64> = const { Cell::new(0) };
}

/// The system's allocator, with counters for each thread.
struct Counting;

fn count(layout: Layout, sign: i64) {
    // While a thread ends, its counters may be gone. They are no longer needed then.
    let _ = HELD_BYTES.try_with(|held| {
        held.set(held.get() + sign * i64::try_from(layout.size()).unwrap_or(0));
    });
    if sign > 0 {
        let _ = TAKEN.try_with(|taken| taken.set(taken.get() + 1));
    }
}

// SAFETY: every call goes to `System` with its arguments unchanged, and counting neither allocates nor
// unwinds, so this keeps `System`'s contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`, which is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(layout, -1);
        // SAFETY: `place` came from `alloc` above with this layout, so from `System`.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the heap allocations of this thread so far, and its heap bytes.
fn heap() -> (u64, i64) {
    (TAKEN.get(), HELD_BYTES.get())
}

const LIVE: usize = 4096;
const DRAWS: usize = 65_536;
const WARM_STEPS: usize = if cfg!(debug_assertions) { 100_000 } else { 200_000 };
const STEPS: usize = if cfg!(debug_assertions) { 100_000 } else { 300_000 };
/// The number of steps, each of one free and one request. Builds with debug assertions are ten times slower,
/// so they make a tenth of the steps.
const LONG_STEPS: usize = if cfg!(debug_assertions) { 1_000_000 } else { 10_000_000 };
const SIDE: StreamId = StreamId(0x40);

/// One step: the live block to free, and the size of the next one.
#[derive(Clone, Copy)]
struct Draw {
    place: usize,
    bytes: u64,
}

struct Rng(u64);

impl Rng {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number in (0, 1].
    #[expect(clippy::cast_precision_loss, reason = "53 bits are what a double holds")]
    fn unit(&mut self) -> f64 {
        ((self.roll() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Returns a lognormal number, exp(mu + sigma * normal), clamped to the allowed sizes.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "clamped to 1 byte .. 64 MiB first"
    )]
    fn lognormal_bytes(&mut self, mu: f64, sigma: f64) -> u64 {
        let (radius, angle) = (self.unit(), self.unit());
        let normal = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos();
        (mu + sigma * normal).exp().clamp(1.0, (64 * MIB) as f64) as u64
    }
}

/// Returns the draws. Half of the sizes are below 60 KB, one in forty is above 8 MB.
fn mix() -> Vec<Draw> {
    let mut rng = Rng(0x5EED_51DE);
    let mut draw = |_| Draw {
        place: usize::try_from(rng.roll() % LIVE as u64).unwrap_or(0),
        bytes: rng.lognormal_bytes(11.0, 2.5),
    };
    (0..DRAWS).map(&mut draw).collect()
}

fn native(total_bytes: u64, raw_addresses: bool, event_mode: EventMode) -> (Arc<Sim>, Strategy) {
    let costs = CallCosts::default();
    let options = SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() };
    let sim = Arc::new(Sim::new(options));
    let driver: Arc<dyn Driver> = Arc::<Sim>::clone(&sim);
    let built = build(&Config::default(), driver, BuildOptions { raw_addresses });
    (sim, built.expect("native can be built on any driver"))
}

fn take(strategy: &Strategy, bytes: u64) -> Allocation {
    let request = Request::new(bytes, StreamId::DEFAULT);
    strategy.allocate(request).expect("the device is large enough")
}

fn give(strategy: &Strategy, block: Allocation) {
    strategy.free(block).expect("a live handle is taken back");
}

/// Replaces live blocks according to the draws.
fn replace(strategy: &Strategy, live: &mut [Option<Allocation>], draws: &[Draw], steps: usize) {
    for draw in draws.iter().cycle().take(steps) {
        if let Some(block) = live[draw.place].take() {
            give(strategy, block);
        }
        live[draw.place] = Some(take(strategy, draw.bytes));
    }
}

fn replace_raw(strategy: &Strategy, live: &mut [u64], draws: &[Draw], steps: usize) {
    let raw = &strategy;
    for draw in draws.iter().cycle().take(steps) {
        if live[draw.place] != 0 {
            raw.free_raw(live[draw.place]).expect("a live address is taken back");
        }
        let request = Request::new(draw.bytes, StreamId::DEFAULT);
        live[draw.place] =
            strategy.allocate(request).map(|b| b.address()).expect("the device is large enough");
    }
}

fn fill(strategy: &Strategy, draws: &[Draw]) -> Vec<Option<Allocation>> {
    draws[..LIVE].iter().map(|draw| Some(take(strategy, draw.bytes))).collect()
}

/// Checks that `steps`, which makes `STEPS` requests, causes only hits, without heap allocations or driver
/// calls.
#[track_caller]
fn costs_nothing(sim: &Sim, strategy: &Strategy, steps: impl FnOnce()) {
    let counters = strategy.control().counters.expect("native counts");
    let before = counters.statistics();
    let (calls, (taken, _)) = (sim.total_calls(), heap());
    steps();
    let (calls, taken) = (sim.total_calls() - calls, heap().0 - taken);
    let after = counters.statistics();
    let hits = after.hits - before.hits;
    assert_eq!(hits, STEPS as u64, "every request was a hit");
    assert_eq!((calls, taken), (0, 0), "driver calls and heap allocations in {hits} hits");
}

/// Reserves so much memory that all later requests are hits, even if the free blocks are fragmented.
fn reserve_room(strategy: &Strategy) {
    let large: Vec<_> = (0..64).map(|_| take(strategy, 4 * GIB)).collect();
    let small: Vec<_> = (0..2048).map(|_| take(strategy, MIB)).collect();
    large.into_iter().chain(small).for_each(|block| give(strategy, block));
}

#[test]
fn a_hit_takes_nothing_from_the_heap_and_asks_no_driver() {
    let draws = mix();
    let (sim, strategy) = native(4 * TIB, false, EventMode::Immediate);
    reserve_room(&strategy);
    let mut live = fill(&strategy, &draws);
    replace(&strategy, &mut live, &draws, WARM_STEPS);
    costs_nothing(&sim, &strategy, || replace(&strategy, &mut live, &draws, STEPS));
}

#[test]
fn a_hit_by_bare_address_takes_nothing_from_the_heap_and_asks_no_driver() {
    let draws = mix();
    let (sim, strategy) = native(4 * TIB, true, EventMode::Immediate);
    reserve_room(&strategy);
    let mut live = vec![0; LIVE];
    replace_raw(&strategy, &mut live, &draws, WARM_STEPS + DRAWS);
    costs_nothing(&sim, &strategy, || replace_raw(&strategy, &mut live, &draws, STEPS));
}

#[test]
fn a_hit_of_the_front_reaches_neither_the_heap_nor_the_strategy() {
    let (sim, strategy) = native(4 * TIB, false, EventMode::Immediate);
    let fronted = Strategy::from(front(Box::new(strategy) as Box<dyn DeviceAllocator>, MIB));
    let sizes = [1, 500, 512, 513, 4096, 100_000, MIB];
    let step = |bytes: u64| give(&fronted, take(&fronted, bytes));
    sizes.into_iter().for_each(step);
    let requests = || fronted.control().counters.expect("native counts").statistics().hits;
    let (before, calls, (taken, _)) = (requests(), sim.total_calls(), heap());
    (0..10_000).for_each(|n| step(sizes[n % sizes.len()]));
    let taken = heap().0 - taken;
    assert_eq!((requests() - before, sim.total_calls() - calls, taken), (0, 0, 0));
}

#[test]
fn the_counters_of_this_program_see_an_allocation() {
    let (taken, held) = heap();
    let thing = std::hint::black_box(Box::new([0u8; 100]));
    assert_eq!(heap(), (taken + 1, held + 100));
    drop(thing);
    assert_eq!(heap(), (taken + 1, held));
}

/// Returns the bytes of bookkeeping for each block, as counted by the engine.
fn bytes_per_block(strategy: &Strategy) -> f64 {
    let (bytes, blocks) = strategy.engine().expect("native has an engine").metadata();
    assert!(blocks >= LIVE, "{blocks} blocks are too few to compare");
    #[expect(clippy::cast_precision_loss, reason = "both are far below 2^53")]
    let each = bytes as f64 / blocks as f64;
    each
}

#[test]
fn a_block_costs_at_most_128_bytes_of_bookkeeping_with_its_share_of_the_indexes() {
    let draws = mix();
    for raw_addresses in [false, true] {
        let (_sim, strategy) = native(4 * TIB, raw_addresses, EventMode::Immediate);
        let mut live = fill(&strategy, &draws);
        replace(&strategy, &mut live, &draws, DRAWS);
        let each = bytes_per_block(&strategy);
        assert!(each <= 128.0, "{each:.1} bytes a block, raw addresses: {raw_addresses}");
    }
}

// The program's heap must grow by the bytes that the engine counts, plus tables of fixed size. The engine
// keeps its block records in an array that grows in one step to room for 64 * `LIVE` of them. It counts
// only the used part of the array, and the global allocator counts all of it. So the test allocates
// almost that many blocks.
#[test]
fn the_bookkeeping_that_the_engine_counts_is_what_the_heap_of_the_program_holds() {
    let blocks = 64 * LIVE - 16;
    let (_sim, strategy) = native(4 * TIB, true, EventMode::Immediate);
    give(&strategy, take(&strategy, 1));
    let engine = strategy.engine().expect("native has an engine");
    let (counted, (_, held)) = (engine.metadata().0, heap());
    let mut live = Vec::with_capacity(blocks);
    let own = heap().1 - held;
    live.extend((0..blocks).map(|_| take(&strategy, 512)));
    let counted = i64::try_from(engine.metadata().0 - counted).unwrap();
    let grown = heap().1 - held - own;
    let per_block = |bytes: i64| bytes / i64::try_from(blocks).unwrap();
    assert!(per_block(grown) <= 128, "{grown} bytes for {blocks} blocks");
    let apart = grown - counted;
    assert!(
        (0..=i64::try_from(MIB / 4).unwrap()).contains(&apart),
        "{grown} held, {counted} counted"
    );
    drop(live);
}

/// How much the heap may grow in a long run: by one chunk of block records and one table row. A leak exceeds
/// that.
const SLACK_BYTES: i64 = 64 * 1024;

#[test]
fn memory_stays_flat_over_millions_of_random_operations() {
    let draws = mix();
    let (_sim, strategy) = native(4 * TIB, true, EventMode::Immediate);
    let mut live = fill(&strategy, &draws);
    replace(&strategy, &mut live, &draws, LONG_STEPS / 10);
    let warm = heap().1;
    let mut rng = Rng(0x5EED_1046);
    let mut index = |len: usize| usize::try_from(rng.roll() % len as u64).unwrap();
    for tenth in 1..10 {
        for _ in 0..LONG_STEPS / 10 {
            let draw = Draw { place: index(LIVE), bytes: draws[index(DRAWS)].bytes };
            replace(&strategy, &mut live, &[draw], 1);
        }
        let grown = heap().1 - warm;
        assert!(grown <= SLACK_BYTES, "{grown} bytes more after {tenth} tenths");
    }
}

#[test]
fn blocks_that_other_streams_use_leave_nothing_behind() {
    let (sim, strategy) = native(TIB, true, EventMode::Manual);
    let cross = strategy.control().cross_stream.expect("native supports other streams");
    let mut live: Vec<Option<Allocation>> = (0..64).map(|_| None).collect();
    let mut round = || {
        for place in &mut live {
            let block = take(&strategy, 3 * MIB);
            for stream in [SIDE, StreamId(0x80)] {
                cross.record_stream(&block, stream).expect("a live handle");
            }
            *place = Some(block);
        }
        for block in live.iter_mut().filter_map(Option::take) {
            give(&strategy, block);
        }
        sim.complete_all();
        cross.process_events().expect("the simulated device answers");
    };
    (0..20).for_each(|_| round());
    let (warm, events) = (heap().1, sim.calls("create_event"));
    (0..2000).for_each(|_| round());
    assert_eq!(sim.calls("create_event"), events, "events are reused");
    assert_eq!(heap().1, warm, "bytes held after 2,000 rounds");
    let now = strategy.control().counters.expect("native counts").statistics();
    assert_eq!(now.active.all.current, 0);
}

#[test]
fn a_users_own_functions_cost_nothing_from_the_heap_and_no_driver_call() {
    let next = AtomicU64::new(1 << 40);
    // Returns the same 64 addresses again and again.
    let allocate = move |_, _: DeviceId, _: StreamId| {
        Some(next.fetch_add(1 << 30, Ordering::Relaxed) % (64 << 30) + (1 << 40))
    };
    let callbacks = Callbacks::new(allocate, |_, _, _, _| {});
    let sim = Arc::new(Sim::new(SimOptions::default()));
    let driver: Arc<dyn Driver> = Arc::<Sim>::clone(&sim);
    let settings = Settings::default();
    let own = PluggableAllocator::new("mine", driver, callbacks, &settings, 1);
    let pairs = |count: usize| {
        for _ in 0..count {
            let block = own.allocate(Request::new(4096, StreamId::DEFAULT)).expect("it has some");
            own.free(block).expect("it is live");
        }
    };
    pairs(1000);
    let (calls, before) = (sim.total_calls(), heap());
    pairs(1000);
    assert_eq!(heap(), before);
    assert_eq!(sim.total_calls(), calls);
}
