//! Per-thread caches: when blocks are cached, and when they are freed.

use std::sync::mpsc;

use stratalloc::layers::front::{FrontCounts, front};
use stratalloc::layers::limit;

use super::fixture::{DEFAULT, Two, allocated, built, native, sim};
use crate::common::prelude::*;

const KEPT_MAX: u64 = 64 << 10;
const SIDE: StreamId = StreamId(64);

#[test]
fn a_freed_block_serves_the_next_request_of_its_size_and_the_strategy_never_hears_of_it() {
    let fronted = front(native(&sim(), false), KEPT_MAX);
    let block = fronted.take(500);
    let address = block.address();
    fronted.give(block);
    assert_eq!(allocated(&fronted), 1, "for the strategy it is allocated");
    let kept = FrontCounts { hits: 0, misses: 1, frees: 1, held_blocks: 1, held_bytes: 512 };
    assert_eq!(fronted.here(), kept);
    let hits = || fronted.stats().hits;
    let before = hits();
    let again = fronted.take(300);
    assert_eq!((again.address(), again.size_bytes()), (address, 300));
    assert_eq!(hits(), before);
    let out = FrontCounts { hits: 1, misses: 1, frees: 1, held_blocks: 0, held_bytes: 0 };
    assert_eq!((fronted.here(), fronted.totals()), (out, out));
    let other = fronted.take(513);
    assert_ne!(other.address(), address);
    fronted.give(again);
    fronted.give(other);
    assert_eq!(fronted.here().held_bytes, 512 + 1024);
}

#[test]
fn a_second_handle_of_a_kept_block_is_refused_and_comes_back() {
    let fronted = front(native(&sim(), false), KEPT_MAX);
    let block = fronted.take(500);
    let (address, owner, token) = (block.address(), block.owner(), block.token());
    let spare = fronted.take(500);
    fronted.give(block);
    fronted.give(spare);
    let refused = fronted.free(Allocation::new(address, 500, owner, token)).unwrap_err();
    assert_eq!(refused.reason, HandleError::Stale { address });
    assert_eq!(refused.allocation.address(), address);
    assert_eq!((fronted.here().held_blocks, allocated(&fronted)), (2, 2));
    let (one, other) = (fronted.take(500), fronted.take(500));
    assert_ne!(one.address(), other.address());
}

#[test]
fn what_comes_back_below_is_exactly_what_was_taken_there() {
    let two = Two::new(u64::MAX);
    let fronted = front(Arc::clone(&two), KEPT_MAX);
    // `Two` refuses a free whose size differs from that of the request.
    let blocks: Vec<_> = (1..2000).map(|bytes| fronted.take(bytes * 40)).collect();
    blocks.into_iter().for_each(|block| fronted.give(block));
    let here = fronted.here();
    assert!(here.held_blocks > 300 && here.held_bytes <= 4 << 20, "{here:?}");
    assert_eq!(two.live_bytes(), here.held_bytes);
    drop(fronted);
    assert_eq!(two.live_bytes(), 0, "this thread's blocks go back before the front goes");
}

#[test]
fn empty_cache_lets_go_at_once_here_and_at_the_next_call_elsewhere() {
    let fronted = Arc::new(front(native(&sim(), false), KEPT_MAX));
    let (to_other, orders) = mpsc::channel::<()>();
    let (done, from_other) = mpsc::channel::<FrontCounts>();
    let other = {
        let fronted = Arc::clone(&fronted);
        std::thread::spawn(move || {
            fronted.free(fronted.take(512)).unwrap();
            done.send(fronted.here()).unwrap();
            orders.recv().unwrap();
            fronted.free(fronted.take(2048)).unwrap();
            done.send(fronted.here()).unwrap();
            orders.recv().unwrap();
        })
    };
    fronted.free(fronted.take(512)).unwrap();
    assert_eq!(from_other.recv().unwrap().held_bytes, 512);
    assert_eq!(allocated(&*fronted), 2);
    fronted.caching().empty_cache().unwrap();
    assert_eq!((allocated(&*fronted), fronted.here().held_blocks), (1, 0));
    to_other.send(()).unwrap();
    assert_eq!(from_other.recv().unwrap().held_bytes, 2048, "the old block went back first");
    assert_eq!(allocated(&*fronted), 1);
    assert_eq!(fronted.threads().len(), 2);
    to_other.send(()).unwrap();
    other.join().unwrap();
    assert_eq!(allocated(&*fronted), 0, "a thread that ends keeps nothing");
    let totals = fronted.totals();
    assert_eq!((totals.frees, totals.held_blocks, fronted.threads().len()), (3, 0, 1));
}

#[test]
fn kept_blocks_go_back_before_a_request_fails() {
    let two = Two::new(4096);
    let fronted = front(Arc::clone(&two), KEPT_MAX);
    let blocks: Vec<_> = (0..8).map(|_| fronted.take(512)).collect();
    blocks.into_iter().for_each(|block| fronted.give(block));
    assert_eq!(two.live_bytes(), 4096);
    let whole = fronted.take(4096);
    let failed = fronted.try_allocate(1, DEFAULT);
    assert!(matches!(failed, Err(AllocError::OutOfMemory(_))));
    fronted.give(whole);
}

#[test]
fn blocks_of_one_stream_are_kept_at_a_time() {
    let fronted = front(native(&sim(), false), KEPT_MAX);
    let (ours, theirs) = (fronted.take(512), fronted.take_on(512, SIDE));
    fronted.give(ours);
    assert_eq!(fronted.here().held_blocks, 1);
    fronted.give(theirs);
    assert_eq!((fronted.here().held_blocks, allocated(&fronted)), (1, 1), "the other's went back");
    let default = fronted.take(512);
    assert_eq!((fronted.here().held_blocks, allocated(&fronted)), (0, 1));
    fronted.give(default);
}

#[test]
fn a_block_that_another_stream_uses_is_not_kept() {
    let sim = sim();
    let fronted = front(native(&sim, false), KEPT_MAX);
    let (used, plain) = (fronted.take(512), fronted.take(512));
    fronted.record(&used, SIDE);
    fronted.give(used);
    let stats = fronted.stats();
    assert_eq!((stats.allocation.all.current, stats.active.all.current), (1, 2), "it drains below");
    fronted.give(plain);
    assert_eq!(fronted.here().held_blocks, 1, "the mark was that block's alone");
    let foreign = Two::new(10).take_on(1, DEFAULT);
    let refused = fronted.cross_stream().record_stream(&foreign, SIDE).unwrap_err();
    assert!(matches!(refused, HandleError::Foreign { .. }));
}

#[test]
fn nothing_is_kept_while_a_scope_is_open_and_pools_keep_to_themselves() {
    let fronted = front(native(&sim(), false), KEPT_MAX);
    fronted.free(fronted.take(512)).unwrap();
    let pool = fronted.pool();
    let scope = pool.enter().unwrap();
    let inside = fronted.take(512);
    let live = fronted.private_pools().live_addresses(pool.id()).unwrap();
    assert_eq!(live, [inside.address()], "the kept block did not serve it");
    drop(scope);
    let before = fronted.here();
    fronted.give(inside);
    assert!(fronted.private_pools().live_addresses(pool.id()).unwrap().is_empty());
    assert_eq!(fronted.here().frees, before.frees, "a pool's block is not kept");
    fronted.free(fronted.take(512)).unwrap();
    assert_eq!(fronted.here().held_blocks, 1, "it goes on when the scope is closed");
    let refused = fronted.private_pools().close_scope(pool.id());
    assert!(refused.is_err());
}

/// During a capture, the free of a block that another stream uses is deferred until the scope closes. In
/// this test the driver fails then.
#[test]
fn a_scope_closes_although_the_driver_fails() {
    let device = Arc::new(Faulty::new(Sim::new(SimOptions::default())));
    let config = config("backend:cudaMallocAsync");
    let below = registry::build(&config, device.clone(), BuildOptions::default()).unwrap();
    let fronted = front(below, KEPT_MAX);
    let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let pools = fronted.private_pools();
    let pool = MemoryPool::new(pools, PoolOptions::default()).unwrap();
    let block = fronted.take_in(pool.id(), 4096, own);
    fronted.record(&block, side);
    let capture = Capture::begin(&*device, own).unwrap();
    pools.open_scope(pool.id(), ScopeFilter::Capture(capture)).unwrap();
    fronted.give(block);
    Capture::end(&*device, own).unwrap();
    device.fail_call(0, Some("record_event"));
    let closed = pools.close_scope(pool.id());
    assert!(matches!(closed, Err(PoolError::Driver(_))), "{closed:?}");
    fronted.free(fronted.take_on(512, own)).unwrap();
    assert_eq!(fronted.here().held_blocks, 1, "no scope is open");
}

#[test]
fn callers_that_know_addresses_only_cannot_use_it() {
    let fronted = front(native(&sim(), true), KEPT_MAX);
    assert!(!fronted.control().by_address);
}

#[test]
fn foreign_handles_and_odd_requests_pass_unkept() {
    let (fronted, other) = (front(native(&sim(), false), KEPT_MAX), Two::new(u64::MAX));
    fronted.free(fronted.take(512)).unwrap();
    let refused = fronted.free(other.take(512)).unwrap_err();
    assert!(matches!(refused.reason, HandleError::Foreign { .. }));
    other.free(refused.allocation).unwrap();
    assert!(matches!(fronted.try_allocate(0, DEFAULT), Err(AllocError::ZeroBytes)));
    let huge = fronted.try_allocate(u64::MAX, DEFAULT);
    assert!(matches!(huge, Err(AllocError::TooLarge { .. })));
    fronted.give(fronted.take(KEPT_MAX + 1));
    assert_eq!(fronted.here().held_blocks, 1);
    // Two per-thread caches on one thread: first one inside the other. Then a new one, which gets the index
    // of a dropped one but must not get its blocks.
    let twice = front(front(Two::new(u64::MAX), KEPT_MAX), KEPT_MAX);
    twice.free(twice.take(100)).unwrap();
    assert_eq!(twice.take(100).size_bytes(), 100);
    drop(twice);
    let next = front(Two::new(u64::MAX), KEPT_MAX);
    assert_eq!(next.here(), FrontCounts::default());
    next.free(next.take(100)).unwrap();
    assert_eq!(next.here().held_blocks, 1);
}

#[test]
fn blocks_that_are_refused_below_are_offered_again() {
    let two = Two::new(u64::MAX);
    let fronted = front(limit::limit(Arc::clone(&two), 4096), KEPT_MAX);
    fronted.free(fronted.take(512)).unwrap();
    two.state.lock().stubborn = true;
    fronted.free(fronted.take_on(512, SIDE)).unwrap();
    assert_eq!(two.live_bytes(), 1024, "the first was offered and refused");
    two.state.lock().stubborn = false;
    let whole = fronted.take_on(4096, SIDE);
    assert_eq!(two.live_bytes(), 4096, "both went back when memory was short");
    fronted.give(whole);
}

#[test]
fn blocks_may_be_freed_by_another_thread_than_the_one_that_took_them() {
    let strategy = built("backend:native,layers:[front]", sim(), false);
    let (send, receive) = mpsc::sync_channel(64);
    std::thread::scope(|scope| {
        let strategy = &strategy;
        let taking = scope.spawn(move || {
            for step in 0..5000u64 {
                send.send(strategy.take_on(1 + step % 3000, StreamId(step / 1000 % 2))).unwrap();
            }
        });
        let freeing = scope.spawn(move || {
            let mut held = std::collections::VecDeque::new();
            for block in receive {
                held.push_back(block);
                if held.len() > 20 {
                    strategy.free(held.pop_front().unwrap()).unwrap();
                }
            }
            held.into_iter().for_each(|block| strategy.give(block));
        });
        // A thread that was joined has run its destructors, which free the blocks that `front` cached
        // for it.
        taking.join().unwrap();
        freeing.join().unwrap();
    });
    assert_eq!(allocated(&strategy), 0);
}
