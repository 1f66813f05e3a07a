//! Random histories against a model of all blocks: their states, which of them may serve a request, and the
//! counters.

use stratalloc_conformance::Checked;

use super::*;

const STREAMS: [StreamId; 3] = [HOME, SIDE, FAR];
/// Few sizes, some of them similar, so that free blocks fit later requests.
const SIZES: [u64; 6] = [500, 512, 70_000, 72_000, 3 * MIB, 3 * MIB + 4096];
/// So little that requests run out of memory.
const HOST_BYTES: u64 = 24 * MIB;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take { size: u8, stream: u8 },
    Give(u8),
    Record(u8, u8),
    Finish(u8),
    Events,
    Empty,
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let mut any = || u8::arbitrary(g);
        match any() % 16 {
            0..6 => Self::Take { size: any(), stream: any() },
            6..10 => Self::Give(any()),
            10..12 => Self::Record(any(), any()),
            12..14 => Self::Finish(any()),
            14 => Self::Events,
            _ => Self::Empty,
        }
    }
}

/// A block of the model. A block is live while it has an allocation.
#[derive(Debug)]
struct Known {
    address: u64,
    bytes: u64,
    allocation: Option<Allocation>,
    /// The streams that use the block and have not finished.
    uses: BTreeSet<StreamId>,
    /// Whether the allocator has noticed that the block is free.
    idle: bool,
}

#[derive(Debug)]
struct Run {
    own: PinnedAllocator,
    sim: Arc<Sim>,
    known: Vec<Known>,
}

impl Run {
    fn pick(&mut self, at: u8) -> Option<&mut Known> {
        let mut live: Vec<_> = self.known.iter_mut().filter(|k| k.allocation.is_some()).collect();
        let count = live.len();
        (count > 0).then(|| live.swap_remove(usize::from(at) % count))
    }

    /// Does what each request and `process_events` do: blocks whose streams have finished become free.
    fn notice(&mut self) {
        let freed = self.known.iter_mut().filter(|k| k.allocation.is_none());
        freed.for_each(|k| k.idle = k.uses.is_empty());
    }

    fn step(&mut self, op: Op) -> Checked {
        match op {
            Op::Take { size, stream } => {
                let bytes = SIZES[usize::from(size) % SIZES.len()];
                self.take(bytes, STREAMS[usize::from(stream) % STREAMS.len()])?;
            }
            Op::Give(at) => {
                let Some(known) = self.pick(at) else { return Ok(()) };
                let allocation = known.allocation.take().expect("it is live");
                known.idle = known.uses.is_empty();
                self.own.give(allocation);
            }
            Op::Record(at, stream) => {
                let stream = STREAMS[usize::from(stream) % STREAMS.len()];
                let Some(known) = self.pick(at) else { return Ok(()) };
                known.uses.insert(stream);
                let address = known.address;
                self.own.record_stream_raw(address, stream).map_err(|e| e.to_string())?;
            }
            Op::Finish(stream) => {
                let stream = STREAMS[usize::from(stream) % STREAMS.len()];
                self.sim.complete_stream(stream);
                // The uses of a live block count from its free on, so they stay.
                let freed = self.known.iter_mut().filter(|k| k.allocation.is_none());
                freed.for_each(|known| _ = known.uses.remove(&stream));
            }
            Op::Events => {
                self.own.cross_stream().process_events().map_err(|e| e.to_string())?;
                self.notice();
            }
            Op::Empty => {
                self.own.caching().empty_cache().map_err(|e| e.to_string())?;
                self.known.retain(|known| known.allocation.is_some());
            }
        }
        self.check()
    }

    fn take(&mut self, bytes: u64, stream: StreamId) -> Checked {
        let alignment_bytes = if bytes < MIB { 512 } else { 4096 };
        let rounded = bytes.next_multiple_of(alignment_bytes);
        self.notice();
        let fits =
            |known: &&Known| known.idle && (rounded..=rounded + rounded / 8).contains(&known.bytes);
        let best = self.known.iter().filter(fits).map(|known| known.bytes).min();
        let in_use: u64 =
            self.known.iter().filter(|k| k.allocation.is_some()).map(|k| k.bytes).sum();
        let held: u64 = self.known.iter().map(|k| k.bytes).sum();
        let allocation = match self.own.try_allocate(bytes, stream) {
            Ok(allocation) => allocation,
            Err(AllocError::OutOfMemory(_)) if in_use + rounded > HOST_BYTES => {
                self.known.retain(|known| known.allocation.is_some());
                return Ok(());
            }
            Err(error) => return Err(error.to_string()),
        };
        let address = allocation.address();
        match best {
            Some(best) => {
                let found = self.known.iter_mut().find(|known| known.address == address);
                let found = found.ok_or("a free block fits, and a new one was allocated")?;
                if !found.idle || found.bytes != best {
                    return Err(format!("{found:?} for {rounded}, the best has {best}"));
                }
                (found.idle, found.allocation) = (false, Some(allocation));
            }
            None => {
                if held + rounded > HOST_BYTES {
                    // The cache was released first.
                    self.known.retain(|known| known.allocation.is_some());
                }
                if self.known.iter().any(|known| known.address == address) {
                    return Err(format!("{address:#x} is in use"));
                }
                let allocation = Some(allocation);
                let uses = BTreeSet::new();
                self.known.push(Known { address, bytes: rounded, allocation, uses, idle: false });
            }
        }
        Ok(())
    }

    /// Compares the counters, the layout and the device with the model.
    fn check(&self) -> Checked {
        let (mut live, mut active, mut held, mut free) = (0, 0, 0, 0);
        for known in &self.known {
            held += known.bytes;
            live += if known.allocation.is_some() { known.bytes } else { 0 };
            active += if known.idle { 0 } else { known.bytes };
            free += u64::from(known.idle);
        }
        let s = self.own.stats();
        let counted = [s.allocated_bytes, s.active_bytes, s.reserved_bytes]
            .map(|family| family.all.current.unsigned_abs());
        let device = self.sim.held().pinned_bytes;
        if (counted, s.free_blocks, device) != ([live, active, held], free, held) {
            let expected = [live, active, held];
            return Err(format!("{counted:?}, not {expected:?}; {device} on the device"));
        }
        let layout = self.own.caching().layout();
        let bytes = |states: &[BlockStateName]| -> u64 {
            layout.iter().map(|segment| segment.bytes_in(states)).sum()
        };
        let laid = [bytes(&[BlockStateName::ActiveAllocated]), bytes(&BlockStateName::ACTIVE)];
        let whole: u64 = layout.iter().map(|segment| segment.size_bytes).sum();
        if (laid, whole, layout.len()) != ([live, active], held, self.known.len()) {
            return Err(format!("the layout has {laid:?} of {whole}, not {live}, {active}"));
        }
        Ok(())
    }
}

#[test]
fn random_histories_follow_the_model() {
    histories(runs(200), 120, |ops: &[Op]| {
        let sim = device(HOST_BYTES);
        let own = pinned_over(Arc::clone(&sim) as _, "");
        let mut run = Run { own, sim, known: Vec::new() };
        ops.iter().try_for_each(|op| run.step(*op))?;
        let Run { own, sim, .. } = run;
        drop(own);
        match sim.held() {
            held if held == HeldResources::default() => Ok(()),
            held => Err(format!("still held: {held:?}")),
        }
    });
}
