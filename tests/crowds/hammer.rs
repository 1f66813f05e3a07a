//! The work of one thread on the allocator, and the checks while no thread runs.
//!
//! Each thread has its own sequence of random numbers, so its work is the same in each run, although the
//! schedule differs.

use std::sync::mpsc::{Receiver, Sender, channel};

use stratalloc::registry::build;

use crate::common::claims::Claims;
use crate::common::prelude::*;

/// The number of operations of each thread.
const OPERATIONS: usize = 1500;
/// The maximum number of blocks that a thread holds.
const HELD_MAX: usize = 48;

/// A block that one thread sends to another.
#[derive(Debug)]
pub(crate) struct Block {
    allocation: Allocation,
    stream: StreamId,
    others: Vec<StreamId>,
}

/// An allocator and everything that its threads share.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) machine: SimMachine,
    pub(crate) strategy: Strategy,
    pub(crate) streams: Vec<StreamId>,
    pub(crate) claims: Claims,
    /// Whether threads record uses of blocks by other streams.
    pub(crate) crosses: bool,
    /// Whether requests may run out of memory.
    pub(crate) may_fail: bool,
    /// Whether a thread resets peaks during the run.
    pub(crate) resets_peaks: bool,
}

impl Scene {
    pub(crate) fn new(total_bytes: u64, events: EventMode, streams: usize) -> Self {
        Self::with_settings(total_bytes, events, streams, Settings::default())
    }

    pub(crate) fn with_settings(
        total_bytes: u64,
        events: EventMode,
        streams: usize,
        settings: Settings,
    ) -> Self {
        let machine = SimMachine::with_events(total_bytes, events);
        let options = BuildOptions { raw_addresses: streams > 1 };
        let strategy = build(&Config::from_settings(settings), machine.driver(), options);
        Self {
            streams: machine.streams(streams),
            strategy: strategy.expect("the device can do it"),
            machine,
            claims: Claims::default(),
            crosses: false,
            may_fail: false,
            resets_peaks: false,
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.machine.used_bytes()
    }

    /// Checks the invariants. No thread may be using the allocator.
    pub(crate) fn check(&self) {
        let engine = self.strategy.engine().expect("the native strategy has an engine");
        invariants::check_all(engine, self.used_bytes()).expect("the invariants hold at rest");
    }

    fn allocate(&self, bytes: u64, stream: StreamId) -> Option<Block> {
        self.claims.at_most.add(1);
        match self.strategy.try_allocate(bytes, stream) {
            Ok(allocation) => {
                self.claims.at_least.add(1);
                self.claims.claim(allocation.address(), bytes);
                Some(Block { allocation, stream, others: Vec::new() })
            }
            Err(AllocError::OutOfMemory(_)) if self.may_fail => {
                self.claims.at_most.add(-1);
                None
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Frees a block. Does so by its address if the allocator supports that and bit 9 of the address is
    /// 0.
    fn free(&self, block: Block) {
        let moment = self.machine.0.submitted();
        let waits = block.others.into_iter().map(|stream| (stream, moment)).collect();
        let address = block.allocation.address();
        self.claims.at_least.add(-1);
        if self.may_fail {
            // Under memory pressure, requests wait for the work of other streams. The claims do not record
            // that, so this claim ends without waiting for that work.
            self.claims.give_up(address, Vec::new());
        } else {
            self.claims.give_up(address, waits);
        }
        let by_address = self.strategy.control().by_address;
        match Some(&self.strategy).filter(|_| by_address && address & 512 == 0) {
            Some(raw) => drop(raw.free_raw(address).expect("it is live")),
            None => self.strategy.free(block.allocation).expect("it is live"),
        }
        self.claims.at_most.add(-1);
    }

    fn announce(&self, block: &mut Block, stream: StreamId) {
        let cross = self.strategy.cross_stream();
        cross.record_stream(&block.allocation, stream).expect("it is live");
        if stream != block.stream && !block.others.contains(&stream) {
            block.others.push(stream);
        }
    }

    /// Checks, after all threads have ended, that the counters equal their recount. Then frees
    /// everything and checks that nothing leaks.
    pub(crate) fn rest(&self, left: Vec<Block>) {
        self.check();
        let stats = self.strategy.stats();
        let (least, most) = (&self.claims.at_least, &self.claims.at_most);
        assert_eq!((least.now(), most.now()), (stats.allocation.all.current, least.now()));
        let peak = stats.allocation.all.peak;
        let truth = if self.resets_peaks { least.now() } else { least.peak() };
        assert!(peak >= truth, "a peak of {peak} is below the truth, {truth}");
        assert!(peak <= 2 * most.peak(), "a peak of {peak} is far above {}", most.peak());
        for block in left {
            self.free(block);
        }
        self.machine.0.complete_all();
        let caching = self.strategy.caching();
        caching.empty_cache().expect("the driver works");
        self.check();
        assert_eq!(self.used_bytes(), 0, "nothing is lost");
    }
}

/// Runs one thread for each entry of `streams`, on the streams of that entry, and at the same time runs
/// `beside` on a thread of its own. The flag passed to `beside` is set when the other threads have ended.
/// Returns the blocks that are still live.
pub(crate) fn hammer_on(
    scene: &Scene,
    streams: &[Vec<StreamId>],
    beside: impl Fn(&AtomicBool) + Sync,
) -> Vec<Block> {
    let (senders, receivers): (Vec<_>, Vec<_>) = streams.iter().map(|_| channel()).unzip();
    let over = AtomicBool::new(false);
    let mut left = Vec::new();
    thread::scope(|scope| {
        let beside = scope.spawn(|| beside(&over));
        let threads: Vec<_> = receivers
            .into_iter()
            .zip(streams)
            .enumerate()
            .map(|(me, (inbox, own))| {
                let outboxes = senders.clone();
                scope.spawn(move || hammer(scene, me, own, inbox, &outboxes))
            })
            .collect();
        drop(senders);
        let done: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        over.store(true, SeqCst);
        beside.join().expect("nothing is wrong beside the threads");
        for held in done {
            let (held, inbox) = held.expect("nothing is wrong on a thread");
            left.extend(held);
            left.extend(inbox.try_iter());
        }
    });
    left
}

fn hammer(
    scene: &Scene,
    me: usize,
    streams: &[StreamId],
    inbox: Receiver<Block>,
    outboxes: &[Sender<Block>],
) -> (Vec<Block>, Receiver<Block>) {
    let mut rng = Rng::new(me as u64 + 1);
    let mut held: Vec<Block> = Vec::new();
    for _ in 0..OPERATIONS {
        let what = rng.below(9);
        if held.len() < HELD_MAX && what < 4 {
            let stream = streams[rng.below(streams.len())];
            match scene.allocate(any_bytes(&mut rng), stream) {
                Some(block) => held.push(block),
                None => held.drain(..held.len() / 2).for_each(|block| scene.free(block)),
            }
            continue;
        }
        held.extend(inbox.try_iter().take(2));
        if held.is_empty() {
            continue;
        }
        let at = rng.below(held.len());
        match what {
            4 if scene.crosses => {
                let stream = scene.streams[rng.below(scene.streams.len())];
                scene.announce(&mut held[at], stream);
            }
            5 => {
                let to = &outboxes[rng.below(outboxes.len())];
                if let Err(back) = to.send(held.swap_remove(at)) {
                    held.push(back.0);
                }
            }
            _ => scene.free(held.swap_remove(at)),
        }
    }
    (held, inbox)
}

fn any_bytes(rng: &mut Rng) -> u64 {
    let bytes = match rng.below(8) {
        0 => 1,
        1..5 => 512 * (1 + rng.below(400) as u64) - 1,
        5 => MIB + 1 + rng.below(4 << 20) as u64,
        6 => 11 * MIB,
        _ => 2 * MIB,
    };
    bytes.max(1)
}
