//! Checkpoints of a pool, restoring them, and blocks at exact addresses.

use stratalloc::allocator::PoolCheckpoint;
use stratalloc::history::BlockStateName::{ActiveAllocated, Inactive};

use crate::common::prelude::*;

struct Tree {
    fixture: Fixture,
    pool: PoolId,
}

impl Tree {
    fn new(conf: &str) -> Self {
        let fixture = Fixture::new(ROOMY, conf);
        let pool = PoolId::next_capture();
        fixture.private_pools().create_pool(pool, Default::default()).expect("the id is new");
        Self { fixture, pool }
    }

    fn take(&self, bytes: u64) -> Allocation {
        self.fixture.take_in(self.pool, bytes, HOME)
    }

    fn give(&self, block: Allocation) {
        self.fixture.give(block);
    }

    fn checkpoint(&self) -> PoolCheckpoint {
        self.fixture.checkpoints().checkpoint(self.pool).expect("nothing waits")
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Vec<Allocation> {
        let restored = self.fixture.checkpoints().restore(checkpoint).expect("it fits");
        self.fixture.check();
        restored.live
    }

    fn live(&self) -> Vec<u64> {
        self.fixture.private_pools().live_addresses(self.pool).expect("it exists")
    }

    fn same_as(&self, checkpoint: &PoolCheckpoint) {
        let shape = |segments: &[stratalloc::history::SegmentLayout]| {
            let blocks = segments.iter().flat_map(|segment| &segment.blocks);
            blocks.map(|b| (b.address, b.size_bytes, b.state)).collect::<Vec<_>>()
        };
        assert_eq!(shape(&self.fixture.layout_of(self.pool)), shape(&checkpoint.segments));
    }
}

#[test]
fn going_back_reproduces_every_block() {
    for conf in BOTH {
        let tree = Tree::new(conf);
        let held: Vec<_> = [512, 2 * MIB, 100 * KIB, 15 * MIB, MIB].map(|b| tree.take(b)).into();
        let checkpoint = tree.checkpoint();
        let before = tree.live();
        held.into_iter().for_each(|block| tree.give(block));
        let other: Vec<_> = [3 * MIB, 512, 512].map(|b| tree.take(b)).into();
        let stale = other[0].address();
        let live = tree.restore(&checkpoint);
        assert_eq!(tree.live(), before);
        tree.same_as(&checkpoint);
        assert_eq!(live.len(), 5);
        assert!(
            live.iter().zip([512, MIB]).all(|(block, least)| block.size_bytes() >= least.min(512))
        );
        let refused = other.into_iter().map(|b| tree.fixture.free(b));
        assert!(refused.into_iter().all(|r| r.is_err()), "old handles are stale: {stale:#x}");
        live.into_iter().for_each(|block| tree.give(block));
        assert_eq!(tree.live(), [0; 0]);
    }
}

// Eleven blocks of 512 bytes, of which some are live in the checkpoint: one in the middle, two apart, two
// side by side.
#[test]
fn survivors_in_the_middle_of_a_segment_come_back() {
    for conf in BOTH {
        for survivors in [vec![5], vec![5, 8], vec![5, 6]] {
            let tree = Tree::new(conf);
            let mut blocks: Vec<_> = (0..11).map(|_| Some(tree.take(512))).collect();
            let kept: Vec<_> = survivors.iter().map(|&n| blocks[n].take().unwrap()).collect();
            blocks.into_iter().flatten().for_each(|block| tree.give(block));
            let checkpoint = tree.checkpoint();
            let addresses: Vec<_> = kept.iter().map(Allocation::address).collect();
            kept.into_iter().for_each(|block| tree.give(block));
            let _later: Vec<_> = (0..20).map(|_| tree.take(512)).collect();
            let live = tree.restore(&checkpoint);
            assert_eq!(live.iter().map(Allocation::address).collect::<Vec<_>>(), addresses);
            tree.same_as(&checkpoint);
        }
    }
}

#[test]
fn what_was_allocated_later_is_undone() {
    for conf in BOTH {
        let tree = Tree::new(conf);
        let first = tree.take(MIB);
        let checkpoint = tree.checkpoint();
        let later: Vec<_> = [512, 30 * MIB, 100].map(|bytes| tree.take(bytes).address()).into();
        let freed = tree.fixture.checkpoints().restore(&checkpoint).unwrap();
        assert!(later.iter().all(|address| freed.freed.iter().any(|f| f.address == *address)));
        assert_eq!(tree.live(), [first.address()]);
        assert_eq!(freed.live.len(), 1);
        tree.fixture.check();
    }
}

#[test]
fn blocks_may_die_after_going_back() {
    let tree = Tree::new("");
    let _blocks = [tree.take(512), tree.take(3 * MIB)];
    let checkpoint = tree.checkpoint();
    let mut live = tree.restore(&checkpoint);
    assert_eq!(tree.live().len(), 2);
    tree.give(live.pop().unwrap());
    assert_eq!(tree.live().len(), 1);
    let address = live.pop().unwrap().address();
    tree.fixture.free_raw(address).unwrap();
    assert_eq!(tree.live(), [0; 0]);
    tree.fixture.check();
}

#[test]
fn live_blocks_are_compared_as_a_set() {
    let tree = Tree::new("");
    let blocks = [512, MIB, 3 * MIB].map(|bytes| tree.take(bytes));
    let mut addresses = blocks.each_ref().map(Allocation::address).to_vec();
    let exactly =
        |set: &[u64]| holds_exactly(tree.fixture.private_pools(), tree.pool, set).unwrap();
    addresses.reverse();
    assert!(exactly(&addresses));
    assert!(!exactly(&addresses[1..]));
    addresses.push(512);
    assert!(!exactly(&addresses));
    blocks.into_iter().for_each(|block| tree.give(block));
    assert!(exactly(&[]));
    let pool = PoolId { capture: 1 << 40, user: 0 };
    assert_eq!(
        holds_exactly(tree.fixture.private_pools(), pool, &[]),
        Err(PoolError::Unknown { pool })
    );
}

// An expandable segment that grew after the checkpoint: first 2 MiB of 20 mapped ones are live, then 32 of
// 40, then 2 of 40 again.
#[test]
fn an_expandable_segment_that_grew_keeps_its_pages() {
    let tree = Tree::new("expandable_segments:True");
    let _small = tree.take(2 * MIB);
    let checkpoint = tree.checkpoint();
    let blocks = || tree.fixture.blocks_of(tree.pool);
    assert_eq!(blocks(), [(2 * MIB, ActiveAllocated), (18 * MIB, Inactive)]);
    let live = tree.restore(&checkpoint);
    live.into_iter().for_each(|block| tree.give(block));
    let _large = tree.take(32 * MIB);
    assert_eq!(blocks(), [(32 * MIB, ActiveAllocated), (8 * MIB, Inactive)]);
    tree.restore(&checkpoint);
    assert_eq!(blocks(), [(2 * MIB, ActiveAllocated), (38 * MIB, Inactive)]);
}

#[test]
fn segments_that_came_later_stay_idle() {
    let tree = Tree::new("");
    let kept = tree.take(512);
    let checkpoint = tree.checkpoint();
    let more = [tree.take(30 * MIB), tree.take(15 * MIB)];
    tree.restore(&checkpoint);
    assert_eq!(tree.fixture.layout_of(tree.pool).len(), 3);
    assert_eq!(tree.live(), [kept.address()]);
    drop(more);
}

#[test]
fn a_realistic_history_round_trips() {
    for conf in BOTH {
        let tree = Tree::new(conf);
        let mut held = Vec::new();
        for step in 0..400_u64 {
            let bytes = 512 << (step * 7919 % 16);
            held.push(tree.take(bytes + step));
            if step % 3 == 0 {
                let at = usize::try_from(step * 31).unwrap() % held.len();
                tree.give(held.swap_remove(at));
            }
        }
        let checkpoint = tree.checkpoint();
        let mut before: Vec<_> = held.iter().map(|b| (b.address(), b.size_bytes())).collect();
        held.drain(..).for_each(|block| tree.give(block));
        held.extend((0..50_u64).map(|n| tree.take(n * 100 * KIB + 1)));
        let live = tree.restore(&checkpoint);
        let mut after: Vec<_> = live.iter().map(|b| (b.address(), b.size_bytes())).collect();
        before.sort_unstable();
        after.sort_unstable();
        assert_eq!(after, before, "with the requested sizes");
        tree.same_as(&checkpoint);
    }
}

#[test]
fn what_cannot_be_gone_back_to_is_refused_and_changes_nothing() {
    let tree = Tree::new("");
    let blocks = [tree.take(MIB), tree.take(512), tree.take(30 * MIB)];
    let good = tree.checkpoint();
    let refused = |bad: &PoolCheckpoint| {
        let before = tree.fixture.engine().layout();
        let error = tree.fixture.checkpoints().restore(bad).unwrap_err();
        assert_eq!(tree.fixture.engine().layout(), before, "{error}");
        error
    };
    let mut hostile = Vec::new();
    for change in 0..10 {
        let mut bad = good.clone();
        let segment = &mut bad.segments[0];
        match change {
            0 => segment.address += 512,
            1 => segment.size_bytes *= 2,
            2 => segment.stream = StreamId(99),
            3 => segment.kind = stratalloc::size::PoolKind::Large,
            4 => segment.blocks[0].size_bytes = u64::MAX,
            5 => segment.blocks[0].requested_bytes = 0,
            6 => segment.blocks[0].address = u64::MAX - 511,
            7 => drop(segment.blocks.remove(0)),
            8 => segment.blocks.clear(),
            _ => {
                let twice = bad.segments[0].clone();
                bad.segments.insert(0, twice);
            }
        }
        hostile.push(bad);
    }
    for bad in &hostile {
        let error = refused(bad);
        assert!(matches!(error, PoolError::NotInPool { .. }), "{error}");
    }
    let pool = PoolId::next_user();
    let stranger = PoolCheckpoint { pool, ..good.clone() };
    assert_eq!(refused(&stranger), PoolError::Unknown { pool });
    let default = PoolCheckpoint { pool: PoolId::DEFAULT, ..good.clone() };
    assert_eq!(refused(&default), PoolError::IsDefault);

    let side = tree.fixture.stream();
    let [waiting, ..] = blocks;
    let address = waiting.address();
    tree.fixture.record(&waiting, side);
    let pool = tree.pool;
    assert_eq!(refused(&good), PoolError::UsedElsewhere { pool, address });
    tree.give(waiting);
    assert_eq!(refused(&good), PoolError::Draining { pool, address });
    assert_eq!(
        tree.fixture.checkpoints().checkpoint(pool),
        Err(PoolError::Draining { pool, address })
    );
    tree.fixture.private_pools().release_pool(pool).unwrap();
    assert_eq!(tree.fixture.checkpoints().checkpoint(pool), Err(PoolError::Released { pool }));
}

#[test]
fn a_block_can_be_had_at_an_exact_address() {
    for fixture in fixtures(ROOMY) {
        let whole = fixture.take(20 * MIB);
        let base = whole.address();
        fixture.give(whole);
        let middle = fixture.allocate(Request::new(3 * MIB, HOME).at(base + 5 * MIB)).unwrap();
        assert_eq!(middle.address(), base + 5 * MIB);
        fixture.check();
        let refused = |address: u64, bytes: u64| {
            let error = fixture.allocate(Request::new(bytes, HOME).at(address)).unwrap_err();
            assert!(matches!(error, AllocError::NoBlockAt { .. }), "{error}");
        };
        refused(base + 5 * MIB, 2 * MIB);
        refused(base + 4 * MIB, 2 * MIB);
        refused(base + 8 * MIB + 1, 2 * MIB);
        refused(base + 8 * MIB, 13 * MIB);
        refused(u64::MAX - 511, 2 * MIB);
        refused(0, 2 * MIB);
        assert!(fixture.allocate(Request::new(2 * MIB, StreamId(9)).at(base)).is_err());
        let front = fixture.allocate(Request::new(5 * MIB, HOME).at(base)).unwrap();
        let rest = fixture.allocate(Request::new(12 * MIB, HOME).at(base + 8 * MIB)).unwrap();
        [front, middle, rest].into_iter().for_each(|block| fixture.give(block));
        fixture.check();
        assert!(fixture.reserved_bytes() < GIB);
    }
}

/// The bytes before a block at an exact address are split off temporarily. That must not raise a peak.
#[test]
fn peaks_know_nothing_of_what_lies_before_a_block_that_is_placed() {
    for conf in BOTH {
        let fixture = Fixture::new(ROOMY, conf);
        let whole = fixture.take(3 * GIB);
        let base = whole.address();
        fixture.give(whole);
        let counters = fixture.engine() as &dyn Counters;
        counters.reset_peaks();
        counters.reset_accumulated();
        let placed = fixture.allocate(Request::new(2 * MIB, HOME).at(base + GIB)).unwrap();
        let seen = fixture.stats();
        assert_eq!(seen.allocated_bytes.all.peak, 2 << 20, "{conf}");
        assert_eq!(seen.active_bytes.all.peak, 2 << 20, "{conf}");
        assert_eq!((seen.allocation.all.peak, seen.allocation.all.allocated), (1, 1), "{conf}");
        assert_eq!(seen.allocation.all.freed, 0, "{conf}");
        assert!(seen.inactive_split.all.peak <= 2, "{conf}");
        fixture.check();
        fixture.give(placed);
        fixture.check();
    }
}

/// A restore allocates only the live blocks. With `compat:pytorch` it also allocates the free ones
/// temporarily.
#[test]
fn going_back_raises_no_peak_above_what_lives() {
    for conf in BOTH {
        let tree = Tree::new(conf);
        let held: Vec<_> = [40, 2, 30, 2, 30].map(|mib| tree.take(mib * MIB)).into();
        let mut kept = Vec::new();
        for (at, block) in held.into_iter().enumerate() {
            if at % 2 == 1 { kept.push(block) } else { tree.give(block) }
        }
        let checkpoint = tree.checkpoint();
        kept.into_iter().for_each(|block| tree.give(block));
        (tree.fixture.engine() as &dyn Counters).reset_peaks();
        let live = tree.restore(&checkpoint);
        let seen = tree.fixture.stats();
        assert_eq!(seen.allocated_bytes.all.peak, 4 << 20, "{conf}");
        assert_eq!(seen.allocation.all.peak, 2, "{conf}");
        assert_eq!(seen.inactive_split_bytes.all.peak, seen.inactive_split_bytes.all.current);
        live.into_iter().for_each(|block| tree.give(block));
        tree.fixture.check();
    }
}

/// Returns a pool on a full device, one of its own blocks, and a block that it has lent to a request of the
/// default pool.
fn with_lent_block(conf: &str) -> (Tree, [Allocation; 2]) {
    let tree = Tree { fixture: Fixture::new(24 * MIB, conf), pool: PoolId::next_user() };
    let helps = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    tree.fixture.private_pools().create_pool(tree.pool, helps).expect("it can");
    let [free, own] = [(); 2].map(|()| tree.take(4 * MIB));
    let address = free.address();
    tree.give(free);
    // The block of another size in between stays free.
    let lent = tree.fixture.take(3 * MIB);
    assert_eq!(lent.address(), address, "the device is full");
    (tree, [own, lent])
}

fn addresses(blocks: &[Allocation]) -> Vec<u64> {
    blocks.iter().map(Allocation::address).collect()
}

#[test]
fn a_lent_block_that_its_owner_has_freed_stays_free() {
    for conf in BOTH {
        let (tree, [own, lent]) = with_lent_block(conf);
        let (mine, theirs) = (own.address(), lent.address());
        let checkpoint = tree.checkpoint();
        tree.give(lent);
        let later = tree.take(4 * MIB);
        assert_eq!(later.address(), theirs, "{conf}");
        let restored = tree.restore(&checkpoint);
        assert_eq!(addresses(&restored), [mine], "{conf}");
        restored.into_iter().for_each(|block| tree.give(block));
        assert_eq!(tree.live(), [0; 0], "{conf}");
        tree.fixture.private_pools().release_pool(tree.pool).unwrap();
        tree.fixture.empty_cache();
        assert_eq!(tree.fixture.reserved_bytes(), 0, "{conf}");
        tree.fixture.check();
    }
}

#[test]
fn a_lent_block_that_is_live_keeps_its_place_and_its_owner() {
    for conf in BOTH {
        let (tree, [own, lent]) = with_lent_block(conf);
        let (mine, theirs) = (own.address(), lent.address());
        tree.fixture.record(&lent, SIDE);
        let checkpoint = tree.checkpoint();
        tree.give(own);
        let later = tree.take(MIB + 512);
        let restored = tree.fixture.checkpoints().restore(&checkpoint).unwrap();
        assert_eq!(restored.freed.iter().map(|f| f.address).collect::<Vec<_>>(), [later.address()]);
        assert_eq!(addresses(&restored.live), [mine], "{conf}");
        assert_eq!(tree.live().into_iter().collect::<BTreeSet<_>>(), [mine, theirs].into());
        tree.fixture.check();
        let again = tree.fixture.checkpoints().restore(&checkpoint).unwrap();
        assert_eq!(addresses(&again.live), [mine], "{conf}");
        // Its owner's handle is still valid. The restored block of the pool has a new one.
        tree.give(lent);
        again.live.into_iter().for_each(|block| tree.give(block));
        tree.fixture.device.complete_all();
        tree.fixture.process_events();
        assert_eq!(tree.live(), [0; 0], "{conf}");
        tree.fixture.check();
    }
}

// PyTorch lists every live block of the pool's segments.
#[test]
fn a_lent_block_is_part_of_a_checkpoint_under_compat_pytorch() {
    let (tree, [own, lent]) = with_lent_block("compat:pytorch");
    let both = [lent.address(), own.address()];
    let checkpoint = tree.checkpoint();
    tree.give(lent);
    assert_eq!(addresses(&tree.restore(&checkpoint)), both);
}
