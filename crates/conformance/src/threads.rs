//! Concurrent threads on one allocator. Their blocks, some of which other threads free, must never
//! overlap.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use quickcheck::{Arbitrary, Gen};

use super::report::{Device, Outcome};
use super::search::{self, Broken};
use super::suite::Case;
use super::{Checked, leaks};
use stratalloc::allocator::{Allocation, DeviceAllocator, Request};
use stratalloc::error::AllocError;
use stratalloc::ids::StreamId;

/// The number of threads.
const THREADS: usize = 4;
/// The number of operations of each thread.
const OPERATIONS: usize = 300;
/// The maximum number of blocks that a thread holds.
const HELD_MAX: usize = 12;
/// Only a few sizes, so that threads compete for the same blocks.
const SIZES: [u64; 4] = [512, 4096, 100_000, 1 << 20];

/// A block and its requested bytes.
type Owned = (Allocation, u64);

/// The live blocks of all threads.
#[derive(Default)]
struct Claims {
    live: Mutex<BTreeMap<u64, u64>>,
    /// Blocks that any thread may free.
    shared: Mutex<Vec<Owned>>,
}

impl Claims {
    fn claim(&self, start: u64, bytes: u64) -> Checked {
        let mut live = self.live.lock();
        let end = start.saturating_add(bytes);
        let below = live.range(..end).next_back();
        if let Some((other, size)) = below.filter(|(other, size)| *other + *size > start) {
            return Err(format!(
                "{bytes} bytes at {start:#x} were allocated while another thread holds {size} bytes \
                 at {other:#x}"
            ));
        }
        live.insert(start, bytes);
        Ok(())
    }
}

/// One thread and its blocks.
struct Worker<'a> {
    allocator: &'a dyn DeviceAllocator,
    claims: &'a Claims,
    streams: &'a [StreamId],
    random: Gen,
    held: Vec<Owned>,
}

impl Worker<'_> {
    fn work(mut self) -> Checked {
        for _ in 0..OPERATIONS {
            match self.below(8) {
                0..4 if self.held.len() < HELD_MAX => self.take()?,
                4 => self.give(),
                5 => self.announce()?,
                _ => self.free_one()?,
            }
        }
        while !self.held.is_empty() {
            self.give();
        }
        Ok(())
    }

    /// Returns a random number below `n`.
    fn below(&mut self, n: usize) -> usize {
        usize::arbitrary(&mut self.random) % n
    }

    fn take(&mut self) -> Checked {
        let bytes = SIZES[self.below(SIZES.len())];
        let stream = self.streams[self.below(self.streams.len())];
        match self.allocator.allocate(Request::new(bytes, stream)) {
            Ok(block) => {
                self.claims.claim(block.address(), bytes)?;
                self.held.push((block, bytes));
                Ok(())
            }
            Err(AllocError::OutOfMemory(_)) => Ok(()),
            Err(error) => Err(format!("a plain request was refused: {error}")),
        }
    }

    /// Moves a block to those that any thread may free.
    fn give(&mut self) {
        if !self.held.is_empty() {
            let at = self.below(self.held.len());
            self.claims.shared.lock().push(self.held.swap_remove(at));
        }
    }

    fn announce(&mut self) -> Checked {
        let stream = self.streams[self.below(self.streams.len())];
        let (Some(cross), Some((block, _))) =
            (self.allocator.control().cross_stream, self.held.last())
        else {
            return Ok(());
        };
        cross.record_stream(block, stream).map_err(|error| error.to_string())
    }

    fn free_one(&mut self) -> Checked {
        let shared = self.claims.shared.lock().pop();
        match shared.or_else(|| self.held.pop()) {
            Some(owned) => free(self.allocator, self.claims, owned),
            None => Ok(()),
        }
    }
}

fn free(allocator: &dyn DeviceAllocator, claims: &Claims, (block, _): Owned) -> Checked {
    claims.live.lock().remove(&block.address());
    allocator.free(block).map_err(|refused| format!("a live block: {refused}"))
}

impl Case<'_> {
    pub(super) fn threads(&self) -> Result<Outcome, Broken> {
        let rounds = self.options.scripts.div_ceil(8);
        for round in 0..rounds {
            let seed = self.options.seed.wrapping_add(round);
            let found = search::guarded(|| self.round(seed));
            found.map_err(|what| {
                let lines = vec![format!("{THREADS} threads, {OPERATIONS} operations each")];
                Broken { what, lines, seed: Some(seed) }
            })?;
        }
        Ok(Outcome::Passed { runs: rounds })
    }

    fn round(&self, seed: u64) -> Checked {
        let machine = match self.device {
            Device::Sim => Box::new(self.sim_at_once()),
            Device::Host | Device::Cuda => self.machine()?,
        };
        let before = machine.held();
        let made = (self.build)(machine.driver());
        let allocator = made.map_err(|error| format!("{}{error}", search::NOT_BUILT))?;
        let streams = machine.streams(3);
        let claims = Claims::default();
        let worker = |n: usize| Worker {
            allocator: &*allocator,
            claims: &claims,
            streams: &streams,
            random: Gen::from_size_and_seed(1, seed.wrapping_mul(1000).wrapping_add(n as u64)),
            held: Vec::new(),
        };
        std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..THREADS).map(worker).map(|worker| scope.spawn(|| worker.work())).collect();
            let ended: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
            ended
                .into_iter()
                .try_for_each(|end| end.unwrap_or_else(|panic| Err(search::panic_message(&*panic))))
        })?;
        let shared = std::mem::take(&mut *claims.shared.lock());
        counts_are(&*allocator, shared.len())?;
        shared.into_iter().try_for_each(|owned| free(&*allocator, &claims, owned))?;
        streams.iter().for_each(|stream| machine.finish_stream(*stream));
        counts_are(&*allocator, 0)?;
        drop(allocator);
        leaks::all_came_back(&before, &machine.held())
    }
}

/// Checks the counter of live blocks.
fn counts_are(allocator: &dyn DeviceAllocator, live: usize) -> Checked {
    let Some(counters) = allocator.control().counters else { return Ok(()) };
    let counted = counters.statistics().allocation.all.current;
    if usize::try_from(counted) == Ok(live) {
        return Ok(());
    }
    Err(format!("all threads rest, {live} blocks are live, {counted} are counted"))
}
