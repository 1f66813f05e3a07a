//! Private pools over a user's functions: managed by the library, or by the functions themselves.

use stratalloc::strategies::plugin::StreamFilter;

use super::{User, over, sim};
use crate::common::prelude::*;

const MAIN: StreamId = StreamId(64);
const POOL: PoolId = PoolId { capture: 0, user: 77 };

fn plenty() -> (Arc<User>, PluggableAllocator) {
    let user = User::with_bytes(u64::MAX / 2);
    let own = over(sim(), user.callbacks());
    (user, own)
}

fn pools(own: &PluggableAllocator) -> &dyn PrivatePools {
    own.private_pools()
}

#[test]
fn what_is_freed_in_a_pool_stays_for_the_pool_until_its_last_user_has_gone() {
    let (user, own) = plenty();
    let pool = MemoryPool::new(pools(&own), PoolOptions::default()).unwrap();
    let scope = pool.enter().unwrap();
    let inside = own.take_on(4096, MAIN);
    let address = inside.address();
    own.give(inside);
    assert_eq!(user.take_calls(), ["alloc 4096 64"], "it is kept");
    let elsewhere = on_new_thread(|| own.take_on(4096, MAIN));
    assert_ne!(elsewhere.address(), address, "another thread is not in the scope");
    let again = own.take_on(4000, MAIN);
    assert_eq!(again.address(), address, "about the same size");
    let small = own.take_on(2000, MAIN);
    assert_ne!(small.address(), address);
    assert_eq!(pools(&own).live_addresses(pool.id()).unwrap().len(), 2);
    let id = pool.id();
    drop(scope);
    let s = own.stats();
    assert_eq!(s.hits, 1);
    [again, elsewhere].into_iter().for_each(|block| own.give(block));
    user.take_calls();
    drop(pool);
    assert_eq!(user.take_calls(), ["free 4096 64"], "what was idle");
    assert_eq!(pools(&own).pool_users(id), Some(0), "a block of it lives");
    own.give(small);
    assert_eq!(pools(&own).pool_users(id), None);
    assert_eq!(user.take_calls(), ["free 2000 64"]);
}

#[test]
fn a_pools_own_allocator_serves_it_and_gets_its_blocks_back() {
    #[derive(Debug, Default)]
    struct Own(Mutex<Vec<(u64, u64)>>);
    impl SegmentAllocator for Own {
        fn allocate(&self, size_bytes: u64, _: StreamId) -> Option<u64> {
            let mut live = self.0.lock();
            let address = (1 << 50) + ((live.len() as u64) << 20);
            live.push((address, size_bytes));
            Some(address)
        }
        fn free(&self, address: u64, size_bytes: u64, _: StreamId) {
            self.0.lock().retain(|block| *block != (address, size_bytes));
        }
    }
    let (user, own) = plenty();
    let source = Arc::new(Own::default());
    let allocator = Some(Arc::clone(&source) as Arc<dyn SegmentAllocator>);
    let options = PoolOptions { allocator, ..PoolOptions::default() };
    let pool = MemoryPool::new(pools(&own), options).unwrap();
    let block = own.take_in(pool.id(), 700, MAIN);
    assert_eq!(*source.0.lock(), [(block.address(), 1024)]);
    drop(pool);
    own.give(block);
    assert_eq!(*source.0.lock(), []);
    assert_eq!(user.take_calls(), [""; 0]);
}

#[test]
fn a_pool_that_helps_out_serves_the_default_pool_before_it_fails() {
    let user = User::with_bytes(1000);
    let own = over(sim(), user.callbacks());
    let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
    let pool = MemoryPool::new(pools(&own), options).unwrap();
    let block = own.take_in(pool.id(), 1000, MAIN);
    let address = block.address();
    own.give(block);
    let helped = own.take_on(900, MAIN);
    assert_eq!(helped.address(), address);
    assert!(own.try_allocate(900, MAIN).is_err(), "there is only one");
    own.give(helped);
}

#[test]
fn a_lent_block_is_no_part_of_a_checkpoint() {
    for is_freed in [false, true] {
        let user = User::with_bytes(1500);
        let own = over(sim(), user.callbacks());
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        let pool = MemoryPool::new(pools(&own), options).unwrap();
        let [free, kept] = [1000, 500].map(|bytes| own.take_in(pool.id(), bytes, MAIN));
        let mine = kept.address();
        own.give(free);
        let lent = own.take_on(1000, MAIN);
        let checkpoint = own.checkpoints().checkpoint(pool.id()).unwrap();
        let mut lent = Some(lent);
        if is_freed {
            own.give(lent.take().unwrap());
        }
        let restored = own.checkpoints().restore(&checkpoint).unwrap();
        let live: Vec<u64> = restored.live.iter().map(Allocation::address).collect();
        assert_eq!(live, [mine], "freed before: {is_freed}");
        restored.live.into_iter().for_each(|block| own.give(block));
        // Its owner's handle is still valid.
        lent.into_iter().for_each(|block| own.give(block));
        assert_eq!(pools(&own).live_addresses(pool.id()).unwrap(), [0; 0]);
    }
}

#[test]
fn a_checkpoint_is_gone_back_to() {
    let (_, own) = plenty();
    let pools = pools(&own);
    pools.create_pool(POOL, PoolOptions::default()).unwrap();
    let in_pool = |bytes| own.take_in(POOL, bytes, MAIN);
    let [stays, goes] = [in_pool(1000), in_pool(2000)];
    let (kept, lost) = (stays.address(), goes.address());
    let checkpoint = own.checkpoints().checkpoint(POOL).unwrap();
    own.give(goes);
    let later = in_pool(500);
    let restored = own.checkpoints().restore(&checkpoint).unwrap();
    let mut freed = [kept, later.address()];
    freed.sort_unstable();
    assert_eq!(restored.freed.iter().map(|f| f.address).collect::<Vec<_>>(), freed);
    let live: Vec<u64> = restored.live.iter().map(Allocation::address).collect();
    assert_eq!(live, [kept, lost]);
    assert!(own.free(stays).is_err() && own.free(later).is_err(), "old handles are stale");
    assert!(holds_exactly(pools, POOL, &[kept, lost]).unwrap());
    restored.live.into_iter().for_each(|block| own.give(block));
    pools.release_pool(POOL).unwrap();
    pools.empty_pool(POOL).unwrap();
    assert!(own.checkpoints().restore(&checkpoint).is_err());
    assert_eq!(own.stats().reserved_bytes.all.current, 0);
}

#[test]
fn a_captures_requests_go_to_its_pool_from_all_threads() {
    let device = sim();
    let own = over(device.clone(), User::with_bytes(u64::MAX / 2).callbacks());
    let stream = device.create_stream().unwrap();
    let capture = device.capture().unwrap().begin(stream).unwrap();
    let scope = PoolScope::open(pools(&own), POOL, ScopeFilter::Capture(capture)).unwrap();
    let request = Request::new(64, stream);
    let inside = on_new_thread(|| own.allocate(request)).unwrap();
    let outside = own.take_on(64, MAIN);
    device.capture().unwrap().end(stream).unwrap();
    let hold = scope.finish();
    assert_eq!(pools(&own).live_addresses(POOL).unwrap(), [inside.address()]);
    [inside, outside].into_iter().for_each(|block| own.give(block));
    drop(hold);
}

#[test]
fn functions_that_keep_pools_get_every_call() {
    let user = User::with_bytes(u64::MAX / 2);
    let [b, e, r] = [(); 3].map(|()| Arc::clone(&user));
    let filters: Arc<Mutex<Vec<StreamFilter>>> = Arc::default();
    let keep = Arc::clone(&filters);
    let begin = move |_, pool: PoolId, filter| {
        keep.lock().push(filter);
        b.record_call(format!("begin {pool}"));
    };
    let end = move |_, pool: PoolId| e.record_call(format!("end {pool}"));
    let release = move |_, pool: PoolId| r.record_call(format!("release {pool}"));
    let own = over(sim(), user.callbacks().on_pools(begin, end, release));
    let pool = pools(&own);
    pool.open_scope(POOL, ScopeFilter::Stream(MAIN)).unwrap();
    assert!(filters.lock()[0](MAIN) && !filters.lock()[0](StreamId(65)));
    own.give(own.take_on(64, MAIN));
    pool.close_scope(POOL).unwrap();
    assert_eq!(
        user.take_calls(),
        ["begin (0, 77)", "alloc 64 64", "free 64 64", "end (0, 77)"],
        "nothing is kept here"
    );
    let outside = own.take_in(POOL, 32, StreamId(1));
    assert_eq!(user.take_calls(), ["begin (0, 77)", "alloc 32 1", "end (0, 77)"]);
    pool.release_pool(POOL).unwrap();
    assert_eq!(user.take_calls(), ["release (0, 77)", "release (0, 77)"], "as often as it began");
    own.give(outside);
    assert_eq!(pool.pool_users(POOL), None);
}

#[test]
fn many_threads_ask_functions_that_keep_pools_for_one_pool() {
    let open: Arc<Mutex<u32>> = Arc::default();
    let user = User::with_bytes(u64::MAX / 2);
    let (b, e) = (Arc::clone(&open), Arc::clone(&open));
    let begin = move |_, _, _| {
        let mut open = b.lock();
        assert_eq!(*open, 0, "a pool has one scope at a time");
        *open = 1;
    };
    // Lets other threads run before the scope has ended.
    let end = move |_, _| {
        (0..10).for_each(|_| std::thread::yield_now());
        *e.lock() -= 1;
    };
    let own = over(sim(), user.callbacks().on_pools(begin, end, |_, _| {}));
    pools(&own).create_pool(POOL, PoolOptions::default()).unwrap();
    std::thread::scope(|scope| {
        for n in 0..4 {
            let own = &own;
            scope.spawn(move || {
                for _ in 0..200 {
                    let request = Request::new(64, StreamId(n));
                    own.give(own.allocate(request.in_pool(POOL)).unwrap());
                }
            });
        }
    });
    pools(&own).release_pool(POOL).unwrap();
    assert_eq!(pools(&own).pool_users(POOL), None);
}

#[test]
fn a_begin_that_panics_leaves_no_scope() {
    let user = User::with_bytes(u64::MAX / 2);
    let callbacks = user.callbacks().on_pools(|_, _, _| panic!("no"), |_, _| {}, |_, _| {});
    let own = over(sim(), callbacks);
    let open = || pools(&own).open_scope(POOL, ScopeFilter::this_thread());
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(open)).is_err());
    assert_eq!(pools(&own).pool_users(POOL), None);
    own.give(own.take_on(64, MAIN));
}

/// The fields of a checkpoint are public, so a program can modify a checkpoint.
#[test]
fn a_checkpoint_that_was_tampered_with_is_refused() {
    let (_, own) = plenty();
    let pools = pools(&own);
    pools.create_pool(POOL, PoolOptions::default()).unwrap();
    let block = own.take_in(POOL, 512, MAIN);
    let taken = own.checkpoints().checkpoint(POOL).unwrap();
    type Change = fn(&mut SegmentLayout);
    let changes: [Change; 6] = [
        |segment| segment.blocks.clear(),
        |segment| segment.blocks.push(segment.blocks[0]),
        |segment| segment.blocks[0].requested_bytes = u64::MAX,
        |segment| segment.blocks[0].requested_bytes = 0,
        |segment| segment.blocks[0].address += 512,
        |segment| segment.stream = StreamId(65),
    ];
    for (at, change) in changes.into_iter().enumerate() {
        let mut hostile = taken.clone();
        change(&mut hostile.segments[0]);
        let answer = own.checkpoints().restore(&hostile);
        assert!(matches!(answer, Err(PoolError::NotInPool { .. })), "{at}: {answer:?}");
    }
    let mut twice = taken.clone();
    twice.segments.push(taken.segments[0].clone());
    assert!(matches!(own.checkpoints().restore(&twice), Err(PoolError::NotInPool { .. })));
    own.give(block);
    assert_eq!(own.checkpoints().restore(&taken).unwrap().live.len(), 1);
}
