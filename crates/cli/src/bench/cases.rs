//! The benchmark cases, for any allocator.
//!
//! Each case is a closed loop over precomputed sizes, so every allocator does the same work. Typed cases
//! free a block by its handle; raw cases free it by its address only.

#![allow(clippy::missing_panics_doc, reason = "a case that cannot run ends the benchmark")]

use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::time::Instant;

use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, LogNormal};

use crate::outcome::write_note;
use stratalloc::allocator::{Allocation, DeviceAllocator, Request};
use stratalloc::driver::{Driver, DriverPoolId, MemoryPools};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::StreamId;
use stratalloc::size::{KIB, MIB};
use stratalloc::strategies::Strategy;

/// Allocates and frees blocks.
pub trait Client: Sync {
    /// The caller's reference to a block: a handle or an address.
    type ClientBlock: Send;
    /// Allocates a block.
    fn take(&self, bytes: u64, stream: StreamId) -> Self::ClientBlock;
    /// Frees a block.
    fn give(&self, block: Self::ClientBlock);
}

/// Allocates and frees by handle.
pub struct Typed<'a, A>(pub &'a A);

impl<A: DeviceAllocator> Client for Typed<'_, A> {
    type ClientBlock = Allocation;

    #[inline]
    fn take(&self, bytes: u64, stream: StreamId) -> Allocation {
        self.0.allocate(Request::new(bytes, stream)).expect("cases fit the device")
    }

    #[inline]
    fn give(&self, block: Allocation) {
        self.0.free(block).expect("cases free what they took");
    }
}

/// Allocates and frees by address.
pub struct Raw<'a>(&'a Strategy);

impl<'a> Raw<'a> {
    /// Returns `None` if the allocator does not find blocks by address.
    pub fn of(allocator: &'a Strategy) -> Option<Self> {
        allocator.control().by_address.then_some(Self(allocator))
    }
}

impl Client for Raw<'_> {
    type ClientBlock = u64;

    #[inline]
    fn take(&self, bytes: u64, stream: StreamId) -> u64 {
        let request = Request::new(bytes, stream);
        self.0.allocate(request).expect("cases fit the device").address()
    }

    #[inline]
    fn give(&self, block: u64) {
        self.0.free_raw(block).expect("cases free what they took");
    }
}

/// The default stream-ordered pool of a device, used directly, without an allocator of this library. It
/// keeps freed memory, as `backend:cudaMallocAsync` makes it do.
pub struct Pool {
    driver: Arc<dyn Driver>,
    pool: DriverPoolId,
    threshold_bytes: u64,
}

impl Pool {
    /// Opens the pool of this device.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the device has no such pool.
    pub fn of(driver: Arc<dyn Driver>) -> Result<Self, DriverError> {
        let pools = driver.memory_pools().ok_or_else(|| {
            let message = "the device has no stream-ordered memory pools";
            DriverError::new(DriverErrorKind::NotSupported, "memory_pools", 0, message)
        })?;
        let pool = pools.default_pool()?;
        let threshold_bytes = pools.release_threshold(pool)?;
        pools.set_release_threshold(pool, u64::MAX)?;
        Ok(Self { driver, pool, threshold_bytes })
    }

    /// Returns the device.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    fn pools(&self) -> &dyn MemoryPools {
        self.driver.memory_pools().expect("checked at the start")
    }
}

impl Drop for Pool {
    /// Empties the pool and restores its threshold, so that the next case starts with an empty pool.
    fn drop(&mut self) {
        let pools = self.pools();
        let emptied = self.driver.synchronize_device().and_then(|()| pools.trim(self.pool, 0));
        let restored = pools.set_release_threshold(self.pool, self.threshold_bytes);
        if let Err(error) = emptied.and(restored) {
            write_note(format_args!("the device's pool keeps what it has: {error}"));
        }
    }
}

impl Client for Pool {
    type ClientBlock = (u64, StreamId);

    #[inline]
    fn take(&self, bytes: u64, stream: StreamId) -> Self::ClientBlock {
        let taken = self.pools().allocate_async(self.pool, bytes, stream);
        (taken.expect("cases fit the device"), stream)
    }

    #[inline]
    fn give(&self, (address, stream): Self::ClientBlock) {
        self.pools().free_async(address, stream).expect("cases free what they took");
    }
}

const DEFAULT: StreamId = StreamId::DEFAULT;

/// Returns the median of `repetitions` timings of `steps` calls each, in nanoseconds per call.
pub fn median_ns(repetitions: usize, steps: usize, mut step: impl FnMut(usize)) -> f64 {
    let mut times: Vec<f64> = (0..repetitions)
        .map(|_| {
            let start = Instant::now();
            (0..steps).for_each(&mut step);
            start.elapsed().as_secs_f64() * 1e9 / steps as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The time to spend on a case of one thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effort {
    time_ns: f64,
}

impl Effort {
    /// 50 ms, for a case that is timed in several rounds.
    pub const ROUND: Self = Self { time_ns: 5e7 };
    /// 20 ms, for a program that times a case often.
    pub const BRIEF: Self = Self { time_ns: 2e7 };
}

/// Returns nanoseconds per call. Makes as many calls as the effort allows: from `most / 50` to `most`.
fn timed(effort: Effort, most: usize, mut step: impl FnMut(usize)) -> f64 {
    let fewest = most / 50;
    let ns = median_ns(1, fewest, &mut step);
    median_ns(1, as_many_as(effort.time_ns, ns, fewest, most), step)
}

/// Returns how many steps of `ns` each fit into the time, from `fewest` to `most`.
fn as_many_as(time_ns: f64, ns: f64, fewest: usize, most: usize) -> usize {
    #[expect(clippy::cast_possible_truncation, reason = "a positive float; the cast saturates")]
    let steps = (time_ns / ns) as usize;
    steps.clamp(fewest, most)
}

/// What a case of one thread does in each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// Allocate and free this many bytes.
    Pair(u64),
    /// Allocate and free 512 bytes, on each of this many streams in turn.
    Streams(usize),
    /// Allocate and free twenty blocks, on each of this many streams in turn.
    Serve(usize),
    /// Replace one of 4,096 live blocks.
    Mix,
    /// Allocate and free 1 KiB, with this many free blocks of that size between live ones.
    Holes(usize),
}

impl Steps {
    /// Returns how many streams the steps use in addition to the default one.
    pub(super) fn streams(self) -> usize {
        match self {
            Self::Streams(n) | Self::Serve(n) => n,
            Self::Pair(_) | Self::Mix | Self::Holes(_) => 0,
        }
    }

    /// Returns nanoseconds per step on these streams.
    pub fn time<C: Client>(self, client: &C, streams: &[StreamId], effort: Effort) -> f64 {
        match self {
            Self::Pair(bytes) => pair(client, bytes, effort),
            Self::Streams(_) => self::streams(client, streams, effort),
            Self::Serve(_) => serve(client, streams, effort),
            Self::Mix => mix(client, effort),
            Self::Holes(holes) => self::holes(client, holes, effort),
        }
    }
}

/// Allocates a block and frees it at once. Each loop is a separate function, so that the code of one
/// case does not change how another is compiled.
#[inline(never)]
pub fn pair<C: Client>(client: &C, bytes: u64, effort: Effort) -> f64 {
    let step = |_| {
        let block = client.take(black_box(bytes), DEFAULT);
        client.give(black_box(block));
    };
    (0..1000).for_each(step);
    timed(effort, 300_000, step)
}

/// Allocates 512 bytes on each stream in turn and frees them at once.
#[inline(never)]
pub fn streams<C: Client>(client: &C, streams: &[StreamId], effort: Effort) -> f64 {
    let mut turn = streams.iter().cycle();
    let mut step = |_| {
        let stream = *turn.next().expect("there are streams");
        let block = client.take(black_box(512), stream);
        client.give(black_box(block));
    };
    (0..1000.max(4 * streams.len())).for_each(&mut step);
    timed(effort, 300_000, step)
}

/// The number of blocks that each request to the simulated service allocates.
const SERVED_BLOCKS: usize = 20;
/// The largest block of a request. Small enough that the caches of 128 streams fit on a small device.
const SERVED_MAX_BYTES: u64 = 4 * MIB;

/// Serves requests on each stream in turn. Each request allocates blocks of mixed sizes and frees them.
/// All requests are equal, like inferences of one model. Returns nanoseconds per block.
#[inline(never)]
pub fn serve<C: Client>(client: &C, streams: &[StreamId], effort: Effort) -> f64 {
    let Mix { mut sizes, .. } = Mix::new(1, SERVED_MAX_BYTES);
    sizes.truncate(SERVED_BLOCKS);
    let mut blocks = Vec::with_capacity(SERVED_BLOCKS);
    let mut turn = streams.iter().cycle();
    let mut step = |_| {
        let stream = *turn.next().expect("there are streams");
        blocks.extend(sizes.iter().map(|&bytes| client.take(black_box(bytes), stream)));
        blocks.drain(..).for_each(|block| client.give(block));
    };
    (0..100.max(4 * streams.len())).for_each(&mut step);
    timed(effort, 300_000 / SERVED_BLOCKS, step) / SERVED_BLOCKS as f64
}

/// Block sizes distributed like those of real programs: many small ones, few large ones.
pub struct Mix {
    sizes: Vec<u64>,
    picks: Vec<usize>,
}

const MIX_LEN: usize = 65_536;

impl Mix {
    /// Creates sizes for `live` blocks of at most `largest_bytes` each.
    pub fn new(live: usize, largest_bytes: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(1);
        #[expect(clippy::cast_possible_truncation, reason = "a positive float; the cast saturates")]
        let bytes = |size: f64| (size as u64).clamp(1, largest_bytes);
        let sizes = LogNormal::new(11.0, 2.5).expect("a legal distribution");
        Self {
            sizes: (0..MIX_LEN).map(|_| bytes(sizes.sample(&mut random))).collect(),
            picks: (0..MIX_LEN).map(|_| random.random_range(0..live)).collect(),
        }
    }

    fn step<C: Client>(&self, client: &C, blocks: &mut [Option<C::ClientBlock>], step: usize) {
        let place = &mut blocks[self.picks[step % MIX_LEN]];
        if let Some(block) = place.take() {
            client.give(block);
        }
        *place = Some(client.take(self.sizes[step * 7 % MIX_LEN], DEFAULT));
    }
}

fn give_all<C: Client>(client: &C, blocks: Vec<Option<C::ClientBlock>>) {
    blocks.into_iter().flatten().for_each(|block| client.give(block));
}

/// Replaces one of 4,096 live blocks in each step.
#[inline(never)]
pub fn mix<C: Client>(client: &C, effort: Effort) -> f64 {
    let mix = Mix::new(4096, 64 * MIB);
    let mut blocks: Vec<Option<C::ClientBlock>> = (0..4096).map(|_| None).collect();
    // Each timing continues where the previous one ended, so that a slow allocator, which makes few
    // steps, does not always repeat the same ones.
    let mut at = 0;
    let mut step = |_| {
        mix.step(client, &mut blocks, at);
        at += 1;
    };
    (0..200_000).for_each(&mut step);
    let ns = timed(effort, 300_000, step);
    give_all(client, blocks);
    ns
}

/// Allocates and frees 1 KiB, with `holes` free blocks of that size between live ones.
#[inline(never)]
pub fn holes<C: Client>(client: &C, holes: usize, effort: Effort) -> f64 {
    let mut blocks: Vec<_> = (0..2 * holes).map(|_| Some(client.take(KIB, DEFAULT))).collect();
    let mut order: Vec<usize> = (0..holes).collect();
    order.shuffle(&mut SmallRng::seed_from_u64(3));
    for hole in order {
        client.give(blocks[2 * hole].take().expect("each hole is made once"));
    }
    let step = |_| client.give(client.take(black_box(KIB), DEFAULT));
    (0..200).for_each(step);
    let ns = timed(effort, 200_000, step);
    give_all(client, blocks);
    ns
}

/// Latencies of single steps, sorted.
pub struct Tail {
    sorted_ns: Vec<f64>,
}

impl Tail {
    /// Times each of 200,000 steps, after as many steps without timing.
    pub fn of(mut step: impl FnMut(usize)) -> Self {
        const STEPS: usize = 200_000;
        (0..STEPS).for_each(&mut step);
        let mut sorted_ns: Vec<f64> = (STEPS..2 * STEPS)
            .map(|n| {
                let start = Instant::now();
                step(n);
                start.elapsed().as_secs_f64() * 1e9
            })
            .collect();
        sorted_ns.sort_by(f64::total_cmp);
        Self { sorted_ns }
    }

    /// Returns a quantile of the latencies; `thousandths` is its rank in thousandths.
    pub fn quantile(&self, thousandths: usize) -> f64 {
        self.sorted_ns[self.sorted_ns.len() * thousandths / 1000]
    }
}

/// Replaces one of 2,048 live blocks in each step.
pub fn tail<C: Client>(client: &C) -> Tail {
    let mix = Mix::new(2048, 32 * MIB);
    let mut blocks: Vec<Option<C::ClientBlock>> = (0..2048).map(|_| None).collect();
    let tail = Tail::of(|step| mix.step(client, &mut blocks, step));
    give_all(client, blocks);
    tail
}

/// The result of a case with several threads.
#[derive(Clone, Copy)]
pub struct Together {
    /// Nanoseconds per step of the slowest thread.
    pub ns: f64,
    /// Millions of steps per second of all threads together.
    pub mops: f64,
}

/// Runs `work(thread, steps)` on all threads concurrently. Before that, runs a quarter of the steps
/// without timing.
pub fn together<W: FnMut(usize)>(
    threads: usize,
    steps: usize,
    work: impl Fn(usize) -> W + Sync,
) -> Together {
    let barrier = Barrier::new(threads);
    let slowest = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    let mut work = work(thread);
                    work(steps / 4);
                    barrier.wait();
                    let start = Instant::now();
                    work(steps);
                    start.elapsed().as_secs_f64()
                })
            })
            .collect();
        let times = handles.into_iter().map(|h| h.join().expect("a bench thread ends well"));
        times.fold(0.0, f64::max)
    });
    Together { ns: slowest * 1e9 / steps as f64, mops: (threads * steps) as f64 / slowest / 1e6 }
}

/// Returns the median of the runs by nanoseconds per step. `runs` must not be empty.
pub fn median(mut runs: Vec<Together>) -> Together {
    runs.sort_by(|a, b| a.ns.total_cmp(&b.ns));
    runs[runs.len() / 2]
}

/// The state of one thread in the case `threads`: eight blocks, which it replaces in turn.
struct Turns<'a, C: Client> {
    client: &'a C,
    stream: StreamId,
    sizes: [u64; 64],
    blocks: [Option<C::ClientBlock>; 8],
}

impl<'a, C: Client> Turns<'a, C> {
    fn new(client: &'a C, stream: StreamId, seed: u64) -> Self {
        let mut random = SmallRng::seed_from_u64(seed);
        let sizes = std::array::from_fn(|_| 512 * random.random_range(1..=512));
        Self { client, stream, sizes, blocks: Default::default() }
    }

    fn run(&mut self, steps: usize) {
        for step in 0..steps {
            let place = &mut self.blocks[step % 8];
            if let Some(block) = place.take() {
                self.client.give(block);
            }
            *place = Some(self.client.take(self.sizes[step % 64], self.stream));
        }
    }
}

impl<C: Client> Drop for Turns<'_, C> {
    fn drop(&mut self) {
        self.blocks.iter_mut().filter_map(Option::take).for_each(|b| self.client.give(b));
    }
}

/// Runs one thread for each of these streams. Returns the median of seven runs of 200,000 steps, or of
/// as many steps as fit into a tenth of a second. Each thread first makes the device current.
pub fn threads<C: Client>(
    client: &C,
    device: &dyn Driver,
    threads: usize,
    streams: &[StreamId],
) -> Together {
    const FEWEST: usize = 2000;
    let run = |steps| {
        together(threads, steps, |thread| {
            device.make_current().expect("the device is there");
            let stream = streams[thread % streams.len()];
            let mut turns = Turns::new(client, stream, thread as u64);
            move |steps| turns.run(steps)
        })
    };
    let steps = as_many_as(1e8, run(FEWEST).ns, FEWEST, 200_000);
    median((0..7).map(|_| run(steps)).collect())
}

/// Allocates 64 KiB, records a use by another stream, and frees. Returns `None` if the allocator does
/// not support streams.
pub fn record_stream<A: DeviceAllocator>(
    allocator: &A,
    other: StreamId,
    effort: Effort,
) -> Option<f64> {
    let cross = allocator.control().cross_stream?;
    let step = |_| {
        let block = Typed(allocator).take(64 * KIB, DEFAULT);
        cross.record_stream(&block, other).expect("the block is live");
        Typed(allocator).give(block);
    };
    (0..1000).for_each(step);
    let ns = timed(effort, 20_000, step);
    cross.process_events().expect("events can be queried");
    Some(ns)
}
