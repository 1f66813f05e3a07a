//! Random histories on three threads. No two live blocks may overlap, bytes must stay intact, and the
//! statistics must equal a recount.
//!
//! A thread may free a block that another thread allocated. On the simulated device each thread captures
//! graphs on its own stream, with scopes of all kinds, some of them opened after the capture began. Other
//! threads may free a graph's blocks at any moment. A graph is destroyed when its capture ends, so its
//! addresses may be reused while the old blocks are still held.
//!
//! A GPU runs short histories without captures, on a part of its memory.

#[cfg(target_os = "linux")]
use stratalloc_conformance::part::Share;
#[cfg(target_os = "linux")]
use stratalloc_sim::Host;

#[cfg(target_os = "linux")]
use crate::common::gpu;
#[cfg(target_os = "linux")]
use crate::common::machine::{HostMachine, RealMachine};
use crate::common::prelude::*;

const THREADS: usize = 3;

/// The size of the part of a device that a history uses, in bytes.
#[cfg(target_os = "linux")]
const PART_BYTES: u64 = 512 * MIB;

#[derive(Clone, Debug)]
enum Op {
    Take {
        bytes: u64,
        stream: usize,
        private: bool,
    },
    Give(usize),
    Record(usize, usize),
    /// Begins or ends a capture. `filter` selects the filter of its scope; `scope_first` is true if the
    /// scope opens before the capture begins.
    Capture {
        filter: usize,
        scope_first: bool,
    },
    Empty,
    Events,
    Inspect,
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let small = |g: &mut Gen| usize::from(u8::arbitrary(g));
        match small(g) % 16 {
            0..6 => Self::Take {
                bytes: 1 + u64::from(u32::arbitrary(g)) % (2 * MIB),
                stream: small(g),
                private: bool::arbitrary(g),
            },
            6..11 => Self::Give(small(g)),
            11 => Self::Record(small(g), small(g)),
            12 | 13 => Self::Capture { filter: small(g), scope_first: bool::arbitrary(g) },
            14 if bool::arbitrary(g) => Self::Empty,
            14 => Self::Events,
            _ => Self::Inspect,
        }
    }
}

struct HeldBlock {
    block: Allocation,
    stream: StreamId,
    /// Seed of the pattern in the block. `None` for a block allocated while its thread captured, because the
    /// thread must not wait for a write then.
    seed: Option<u64>,
    /// Whether the memory belongs to a graph. It is freed when the capture ends, even while the block is
    /// held.
    of_graph: bool,
}

struct Run<M: Machine> {
    // Declared before `machine`, so that it is dropped first.
    fixture: MallocAsyncAllocator,
    machine: M,
    streams: Vec<StreamId>,
    pool: PoolId,
    bag: Mutex<Vec<HeldBlock>>,
    /// The end of each live block, by its start, without blocks of graphs.
    shadow: Mutex<BTreeMap<u64, u64>>,
}

/// The state of one thread.
struct Hand {
    stream: StreamId,
    scope: Option<PoolId>,
    taken: u64,
}

impl<M: Machine + Sync> Run<M> {
    fn new(machine: M) -> Self {
        let fixture = MallocAsyncAllocator::new(machine.driver(), &Settings::default());
        let (fixture, pool) = (fixture.expect("the machine has pools"), PoolId::next_user());
        let streams = machine.streams(3);
        fixture.create_pool(pool, PoolOptions::default()).expect("it works");
        let (bag, shadow) = (Mutex::default(), Mutex::default());
        Self { fixture, machine, streams, pool, bag, shadow }
    }

    fn step(&self, hand: &mut Hand, op: &Op) {
        let allocator = &self.fixture;
        match *op {
            Op::Take { bytes, stream, private } => self.take(hand, bytes, stream, private),
            Op::Give(at) => {
                if let Some(held) = self.pick(at) {
                    self.give(held, hand.scope.is_none());
                }
            }
            Op::Record(at, stream) => {
                if let Some(held) = self.pick(at) {
                    let stream = self.streams[stream % self.streams.len()];
                    let recorded = allocator.record_stream(&held.block, stream);
                    assert!(recorded.is_ok() || held.of_graph, "{recorded:?}");
                    self.bag.lock().push(held);
                }
            }
            Op::Capture { filter, scope_first } => self.begin_or_end(hand, filter, scope_first),
            Op::Empty => allocator.empty_cache().expect("it works"),
            Op::Events => allocator.process_events().expect("it works"),
            Op::Inspect => {
                let s = allocator.statistics();
                assert!(s.allocated_bytes.all.current <= s.allocated_bytes.all.peak);
                assert!(s.active_bytes.all.current <= s.active_bytes.all.peak);
                allocator.layout();
            }
        }
    }

    fn take(&self, hand: &mut Hand, bytes: u64, stream: usize, private: bool) {
        let of_graph = hand.scope.is_some() && stream.is_multiple_of(2);
        let stream = if of_graph { hand.stream } else { self.streams[stream % self.streams.len()] };
        let request = Request::new(bytes, stream);
        let block = match private && !of_graph {
            true => self.fixture.allocate(request.in_pool(self.pool)),
            false => self.fixture.allocate(request),
        };
        let block = block.expect("there is room");
        let (start, end) = (block.address(), block.address() + bytes);
        if !of_graph {
            let mut shadow = self.shadow.lock();
            let before = shadow.range(..end).next_back();
            assert!(before.is_none_or(|(_, e)| *e <= start), "{start:#x} is in two hands");
            shadow.insert(start, end);
        }
        hand.taken += 1;
        let seed = hand.scope.is_none().then_some(start ^ hand.taken);
        if let Some(seed) = seed {
            self.machine.write(start, bytes, seed, stream).expect("it works");
        }
        self.bag.lock().push(HeldBlock { block, stream, seed, of_graph });
    }

    fn pick(&self, at: usize) -> Option<HeldBlock> {
        let mut bag = self.bag.lock();
        let count = bag.len();
        (count > 0).then(|| bag.swap_remove(at % count))
    }

    fn give(&self, held: HeldBlock, may_wait: bool) {
        let HeldBlock { block, stream, seed, of_graph } = held;
        if let Some(seed) = seed.filter(|_| may_wait) {
            let verified = self.machine.verify(block.address(), block.size_bytes(), seed, stream);
            verified.expect("it works");
        }
        if !of_graph {
            self.shadow.lock().remove(&block.address()).expect("it was taken");
        }
        if let Err(refused) = self.fixture.free(block) {
            let again = matches!(refused.reason, HandleError::Stale { .. });
            assert!(of_graph && again, "{refused:?}");
        }
    }

    fn begin_or_end(&self, hand: &mut Hand, filter: usize, scope_first: bool) {
        let driver = self.machine.driver();
        let Some(graphs) = driver.capture() else { return };
        match hand.scope.take() {
            None => {
                let (stream, pool) = (hand.stream, PoolId::next_capture());
                let open = |filter| self.fixture.open_scope(pool, filter).expect("it works");
                let begin = || graphs.begin(stream).expect("it works");
                let filter = match filter % 4 {
                    0 => Some(ScopeFilter::Stream(stream)),
                    1 => Some(ScopeFilter::this_thread()),
                    2 => Some(ScopeFilter::Where(Arc::new(move |other| other == stream))),
                    _ => None,
                };
                match filter {
                    Some(filter) if scope_first => {
                        open(filter);
                        begin();
                    }
                    filter => {
                        let capture = begin();
                        open(filter.unwrap_or(ScopeFilter::Capture(capture)));
                    }
                }
                hand.scope = Some(pool);
            }
            Some(pool) => {
                graphs.end(hand.stream).expect("it works");
                self.fixture.close_scope(pool).expect("it works");
                self.fixture.release_pool(pool).expect("it works");
            }
        }
    }

    fn thread<'o>(&self, ops: impl Iterator<Item = &'o Op>) -> (u64, StreamId) {
        let stream = self.machine.driver().create_stream().expect("it works");
        let mut hand = Hand { stream, scope: None, taken: 0 };
        ops.for_each(|op| self.step(&mut hand, op));
        if hand.scope.is_some() {
            self.begin_or_end(&mut hand, 0, false);
        }
        (hand.taken, hand.stream)
    }

    /// Checks, after all threads have ended, that the statistics equal a recount of the held blocks.
    fn finish(self, taken: u64, made: &[StreamId]) {
        let (of_graphs, rest): (Vec<_>, Vec<_>) =
            self.bag.lock().drain(..).partition(|held| held.of_graph);
        of_graphs.into_iter().for_each(|held| self.give(held, true));
        self.fixture.process_events().expect("it works");
        let s = self.fixture.statistics();
        let bytes: u64 = rest.iter().map(|held| held.block.size_bytes()).sum();
        assert_eq!(s.allocation.all.current.unsigned_abs(), rest.len() as u64);
        assert_eq!(s.allocated_bytes.all.current.unsigned_abs(), bytes);
        assert_eq!(s.active_bytes.all.current.unsigned_abs(), bytes, "nothing waits");
        rest.into_iter().for_each(|held| self.give(held, true));
        let s = self.fixture.statistics().allocation.all;
        assert_eq!((s.current, s.allocated, s.freed), (0, s.freed, s.allocated));
        assert_eq!(s.allocated.unsigned_abs(), taken);
        // Fits under this limit only if the charge of every block against the limit was refunded.
        self.fixture.set_limit_bytes(Some(MIB));
        self.fixture.give(self.fixture.take(MIB));
        let Self { fixture, machine, streams, .. } = self;
        drop(fixture);
        let ours = streams.iter().filter(|stream| **stream != StreamId::DEFAULT);
        ours.chain(made)
            .for_each(|stream| machine.driver().destroy_stream(*stream).expect("it works"));
        assert!(machine.held().is_nothing(), "{:?}", machine.held());
        assert_eq!(machine.used_bytes(), 0);
    }
}

fn history<M: Machine + Sync>(machine: M, captures: bool, ops: &[(usize, Op)]) -> Checked {
    let run = Run::new(machine);
    let is_run = |op: &Op| captures || !matches!(op, Op::Capture { .. });
    let ends: Vec<_> = std::thread::scope(|threads| {
        let all: Vec<_> = (0..THREADS)
            .map(|own| {
                let ours = move |(thread, op): &&(usize, Op)| thread % THREADS == own && is_run(op);
                let ops = ops.iter().filter(ours);
                threads.spawn(|| run.thread(ops.map(|(_, op)| op)))
            })
            .collect();
        all.into_iter().map(|thread| thread.join().expect("no check failed")).collect()
    });
    let made: Vec<_> = ends.iter().map(|(_, stream)| *stream).collect();
    run.finish(ends.iter().map(|(taken, _)| taken).sum(), &made);
    Ok(())
}

fn check<M: Machine + Sync>(tests: u64, captures: bool, machine: impl Fn() -> M) {
    histories(runs(tests), 120 * THREADS, |ops| history(machine(), captures, ops));
}

#[test]
fn histories_of_three_threads_keep_the_account_on_the_simulated_device() {
    check(60, true, || SimMachine::new(2048 * MIB));
}

#[cfg(target_os = "linux")]
#[test]
fn histories_of_three_threads_keep_the_bytes_on_the_host() {
    check(30, true, || HostMachine::new(1024 * MIB));
}

/// Runs the histories for a GPU on a part of the host device.
#[cfg(target_os = "linux")]
#[test]
fn histories_of_three_threads_keep_the_bytes_on_a_part_of_a_device() {
    check(10, false, || {
        RealMachine::of(Share::of(Arc::new(Host::with_bytes(2048 * MIB)), PART_BYTES))
    });
}

#[cfg(target_os = "linux")]
#[test]
fn histories_of_three_threads_keep_the_bytes_on_a_gpu() {
    if let Some(_turn) = gpu::turn() {
        let cuda = gpu::shared().expect("it was there before");
        check(20, true, || RealMachine::of(Share::of(cuda.clone(), PART_BYTES)));
    }
}
