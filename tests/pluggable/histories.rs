//! Random histories with functions that check their calls: nothing may be freed twice, and everything
//! must be freed at the end. After every step the functions' own list of live blocks must agree with the
//! allocator's counters. Memory that a graph allocated in a pool must stay there while the pool has
//! users.

use super::{over, sim};
use crate::common::prelude::*;

const STREAMS: usize = 3;
const POOLS: u64 = 3;
/// The limit of the user's functions, so low that requests fail.
const MOST_BYTES: u64 = 20_000;

/// Few sizes, some of them similar, so that idle blocks fit later requests.
const SIZES: [u16; 5] = [500, 512, 2000, 2100, 6000];

#[derive(Clone, Copy, Debug)]
enum Op {
    Take {
        bytes: u16,
        stream: u8,
        pool: u8,
    },
    /// A request for which the open scopes choose the pool.
    TakeRouted {
        bytes: u16,
        stream: u8,
    },
    Open {
        pool: u8,
        stream: Option<u8>,
    },
    Close {
        pool: u8,
    },
    /// Begins a capture on another thread, without a scope.
    Begin {
        stream: u8,
    },
    End {
        stream: u8,
    },
    Free {
        which: u8,
    },
    Use {
        which: u8,
        stream: u8,
    },
    Finish {
        stream: u8,
    },
    EmptyCache,
    Create {
        pool: u8,
        helps: bool,
    },
    Release {
        pool: u8,
    },
    GoBack {
        pool: u8,
    },
}

impl Arbitrary for Op {
    fn arbitrary(g: &mut Gen) -> Self {
        let (which, stream, pool) = (u8::arbitrary(g), u8::arbitrary(g), u8::arbitrary(g));
        let bytes = *g.choose(&SIZES).expect("some");
        match u8::arbitrary(g) % 24 {
            0..=5 => Self::Take { bytes, stream, pool },
            16 | 17 => Self::TakeRouted { bytes, stream },
            18 => Self::Open { pool, stream: Some(stream).filter(|_| bool::arbitrary(g)) },
            19 => Self::Close { pool },
            20 | 21 => Self::Begin { stream },
            22 | 23 => Self::End { stream },
            6..=9 => Self::Free { which },
            10 => Self::Use { which, stream },
            11 => Self::Finish { stream },
            12 => Self::EmptyCache,
            13 => Self::Create { pool, helps: bool::arbitrary(g) },
            14 => Self::Release { pool },
            _ => Self::GoBack { pool },
        }
    }
}

/// The size and stream of each live block of the user's functions, by address.
type Account = Arc<Mutex<HashMap<u64, (u64, StreamId)>>>;

fn strict(account: &Account) -> Callbacks {
    let (give, back) = (Arc::clone(account), Arc::clone(account));
    let allocate = move |bytes: u64, _, stream| {
        let mut live = give.lock();
        if live.values().map(|(bytes, _)| bytes).sum::<u64>() + bytes > MOST_BYTES {
            return None;
        }
        // Uses the lowest free address, so that addresses are reused soon.
        let address = (1..).map(|n| n << 16).find(|address| !live.contains_key(address))?;
        live.insert(address, (bytes, stream));
        Some(address)
    };
    let free = move |address, bytes, _, stream| {
        assert_eq!(back.lock().remove(&address), Some((bytes, stream)), "freed as it was taken");
    };
    Callbacks::new(allocate, free)
}

struct Fixture {
    own: PluggableAllocator,
    device: Arc<Sim>,
    account: Account,
    streams: Vec<StreamId>,
    live: Vec<Allocation>,
    /// The open scopes, the newest last: the pool, and the stream, or `None` for a scope of this thread.
    scopes: Vec<(PoolId, Option<StreamId>)>,
    captured: BTreeSet<StreamId>,
    /// Blocks allocated inside captures. Graphs use them while their pool has users.
    graphs: Vec<(PoolId, u64)>,
}

impl Fixture {
    fn new() -> Self {
        let (device, account) = (sim(), Account::default());
        let streams = (0..STREAMS).map(|_| device.create_stream().expect("there are many"));
        let streams = streams.collect();
        let own = over(Arc::<Sim>::clone(&device), strict(&account));
        let (live, scopes, graphs) = (Vec::new(), Vec::new(), Vec::new());
        Self { own, device, account, streams, live, scopes, captured: BTreeSet::new(), graphs }
    }

    fn took(&mut self, made: Result<Allocation, AllocError>, stream: StreamId, pool: PoolId) {
        match made {
            Ok(block) => {
                let address = block.address();
                let graphs = |(of, at): &(PoolId, u64)| *at == address && *of != pool;
                assert!(!self.graphs.iter().any(graphs), "{address:#x} is another pool's graph's");
                if pool != PoolId::DEFAULT && self.captured.contains(&stream) {
                    self.graphs.push((pool, address));
                }
                self.live.push(block);
            }
            Err(AllocError::OutOfMemory(_) | AllocError::Pool(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Runs `work`, which begins or ends a capture, on a new thread.
    fn on_another_thread(&self, work: impl FnOnce(&Sim) + Send) {
        on_new_thread(|| work(&self.device));
    }

    fn end(&mut self, stream: StreamId) {
        if self.captured.remove(&stream) {
            self.on_another_thread(|sim| Capture::end(sim, stream).expect("the capture is intact"));
        }
    }

    fn pools(&self) -> &dyn PrivatePools {
        self.own.private_pools()
    }

    fn stream(&self, which: u8) -> StreamId {
        self.streams[usize::from(which) % STREAMS]
    }

    /// Returns the default pool for even numbers and a third of the odd ones.
    fn pool(which: u8) -> PoolId {
        PoolId { capture: 0, user: u64::from(which) % (2 * POOLS) / 2 * u64::from(which % 2) }
    }

    fn step(&mut self, op: Op) {
        let place = |which: u8, live: &[Allocation]| usize::from(which) % live.len();
        match op {
            Op::Take { bytes, stream, pool } => {
                let request = Request::new(u64::from(bytes), self.stream(stream));
                let made = self.own.allocate(request.in_pool(Self::pool(pool)));
                self.took(made, request.stream, Self::pool(pool));
            }
            Op::TakeRouted { bytes, stream } => {
                let request = Request::new(u64::from(bytes), self.stream(stream));
                let accepts = |(_, of): &&(PoolId, Option<StreamId>)| {
                    of.is_none_or(|own| own == request.stream)
                };
                let routed = self.scopes.iter().rev().find(accepts);
                let pool = routed.map_or(PoolId::DEFAULT, |(pool, _)| *pool);
                let made = self.own.allocate(request);
                self.took(made, request.stream, pool);
            }
            Op::Open { pool, stream } => {
                let (pool, stream) = (Self::pool(pool), stream.map(|which| self.stream(which)));
                let filter = stream.map_or_else(ScopeFilter::this_thread, ScopeFilter::Stream);
                if self.pools().open_scope(pool, filter).is_ok() {
                    self.scopes.push((pool, stream));
                }
            }
            Op::Close { pool } => {
                let pool = Self::pool(pool);
                if self.pools().close_scope(pool).is_ok() {
                    self.scopes.retain(|(of, _)| *of != pool);
                    let _ = self.pools().release_pool(pool);
                }
            }
            Op::Begin { stream } => {
                let stream = self.stream(stream);
                if self.captured.insert(stream) {
                    self.on_another_thread(|sim| {
                        Capture::begin(sim, stream).expect("it is not captured");
                    });
                }
            }
            Op::End { stream } => self.end(self.stream(stream)),
            Op::Free { which } if !self.live.is_empty() => {
                let block = self.live.swap_remove(place(which, &self.live));
                self.own.give(block);
            }
            Op::Use { which, stream } if !self.live.is_empty() => {
                let block = &self.live[place(which, &self.live)];
                let cross = self.own.cross_stream();
                cross.record_stream(block, self.stream(stream)).expect("it is live");
            }
            Op::Finish { stream } => self.device.complete_stream(self.stream(stream)),
            Op::EmptyCache => {
                self.own.caching().empty_cache().expect("the driver works");
            }
            // The calls of the next three steps may be illegal at this point. They then fail and must change
            // nothing, which `check` verifies after the step.
            Op::Create { pool, helps } => {
                let options = PoolOptions { use_on_oom: helps, ..PoolOptions::default() };
                let _ = self.pools().create_pool(Self::pool(pool), options);
            }
            Op::Release { pool } => drop(self.pools().release_pool(Self::pool(pool))),
            Op::GoBack { pool } => self.go_back(Self::pool(pool)),
            Op::Free { .. } | Op::Use { .. } => {}
        }
    }

    /// Takes a checkpoint, frees a block that it holds as live if there is one, and restores the checkpoint.
    /// A block that the pool has lent is live too, but belongs to its request, so no checkpoint holds it.
    fn go_back(&mut self, pool: PoolId) {
        let Ok(checkpoint) = self.own.checkpoints().checkpoint(pool) else {
            return;
        };
        let addresses = self.pools().live_addresses(pool).expect("it is known");
        let blocks = checkpoint.segments.iter().flat_map(|segment| &segment.blocks);
        let live = blocks.filter(|block| block.state == BlockStateName::ActiveAllocated);
        let held: Vec<u64> = live.map(|block| block.address).collect();
        if let Some(at) = self.live.iter().position(|block| held.contains(&block.address())) {
            let block = self.live.swap_remove(at);
            self.own.give(block);
        }
        let Ok(restored) = self.own.checkpoints().restore(&checkpoint) else {
            return;
        };
        self.live.retain(|block| !held.contains(&block.address()));
        self.live.extend(restored.live);
        assert!(holds_exactly(self.pools(), pool, &addresses).expect("it is known"));
    }

    fn check(&mut self) {
        let users = |pool| self.own.private_pools().pool_users(pool);
        self.graphs.retain(|(pool, _)| users(*pool).is_some_and(|users| users > 0));
        let layout = self.own.caching().layout();
        let account = self.account.lock();
        for (_, address) in &self.graphs {
            assert!(account.contains_key(address), "{address:#x} is a graph's, and was freed");
        }
        assert_eq!(layout.len(), account.len());
        for segment in &layout {
            let expected = Some(&(segment.size_bytes, segment.stream));
            assert_eq!(account.get(&segment.address), expected);
        }
        let in_state = |state| {
            let blocks = layout.iter().filter(|segment| segment.blocks[0].state == state);
            let bytes: u64 = blocks.clone().map(|segment| segment.size_bytes).sum();
            (i64::try_from(blocks.count()).unwrap_or(0), i64::try_from(bytes).unwrap_or(0))
        };
        let live = in_state(BlockStateName::ActiveAllocated);
        let draining = in_state(BlockStateName::ActivePendingFree);
        let idle = in_state(BlockStateName::Inactive);
        let s = self.own.stats();
        assert_eq!(usize::try_from(live.0).ok(), Some(self.live.len()));
        assert_eq!((s.allocation.all.current, s.allocated_bytes.all.current), live);
        let active = (live.0 + draining.0, live.1 + draining.1);
        assert_eq!((s.active.all.current, s.active_bytes.all.current), active);
        let held = (active.0 + idle.0, active.1 + idle.1);
        assert_eq!((s.segment.all.current, s.reserved_bytes.all.current), held);
        for family in [s.allocation, s.active, s.reserved_bytes, s.requested_bytes] {
            assert_eq!(family.all.current, family.small.current + family.large.current);
            assert_eq!(family.all.current, family.all.allocated - family.all.freed);
            assert!(family.all.peak >= family.all.current);
        }
    }
}

#[test]
fn our_account_and_the_users_agree_after_every_step() {
    histories(runs(100), 100, |ops: &[Op]| {
        let mut fixture = Fixture::new();
        for op in ops {
            fixture.step(*op);
            fixture.check();
        }
        for stream in fixture.streams.clone() {
            fixture.end(stream);
        }
        let Fixture { own, device, account, live, .. } = fixture;
        drop((own, live));
        assert!(account.lock().is_empty(), "everything was freed");
        assert_eq!(device.held().events, 0);
        Ok(())
    });
}
