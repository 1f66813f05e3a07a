//! Blocks of a user's functions during a graph capture.

use super::{User, over, sim};
use crate::common::prelude::*;
use crate::common::racing::{Racing, capture_before_next_event, end_capture, racing};

const MAIN: StreamId = StreamId::DEFAULT;

fn others(own: &PluggableAllocator) -> &dyn CrossStream {
    own.cross_stream()
}

/// Frees a block that `side` has used.
fn free_after(own: &PluggableAllocator, side: StreamId) {
    let block = own.take_on(4096, MAIN);
    others(own).record_stream(&block, side).expect("it is live");
    own.give(block);
}

/// Completes all work and returns the number of blocks that are live or still waiting.
fn active_in_the_end(own: &PluggableAllocator, sim: &Sim) -> i64 {
    others(own).process_events().expect("no event is a graph's");
    sim.complete_all();
    others(own).process_events().expect("no event is a graph's");
    own.stats().active.all.current
}

/// The capture begins while a free records an event. An event that is recorded inside a capture never
/// completes.
#[test]
fn a_capture_that_begins_while_a_block_is_freed_keeps_it_until_its_end() {
    let device = racing(1 << 30);
    let own = over(Arc::<Racing>::clone(&device), User::with_bytes(1 << 30).callbacks());
    let side = device.inner().create_stream().unwrap();
    capture_before_next_event(&device, side);
    free_after(&own, side);
    end_capture(&device, side);
    assert_eq!(active_in_the_end(&own, device.inner()), 0);
}

#[test]
fn a_driver_that_cannot_report_captures_may_hide_one() {
    let device = Arc::new(Faulty::new(sim()));
    let own = over(Arc::<Faulty<_>>::clone(&device), User::with_bytes(1 << 30).callbacks());
    let sim = &**device.inner();
    let side = sim.create_stream().unwrap();
    std::thread::scope(|s| s.spawn(|| Capture::begin(sim, side).unwrap()).join()).unwrap();
    device.fail_call(0, Some("capture_status"));
    free_after(&own, side);
    device.disarm();
    std::thread::scope(|s| s.spawn(|| Capture::end(sim, side).unwrap()).join()).unwrap();
    assert_eq!(active_in_the_end(&own, sim), 0);
}

/// Waiting for a destroyed stream means synchronizing the device, which would invalidate the capture.
#[test]
fn a_block_whose_user_is_gone_waits_for_the_end_of_a_capture() {
    let device = sim();
    let own = over(Arc::<Sim>::clone(&device), User::with_bytes(1 << 30).callbacks());
    let (gone, captured) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let block = own.take_on(4096, MAIN);
    others(&own).record_stream(&block, gone).unwrap();
    device.destroy_stream(gone).unwrap();
    let filter = ScopeFilter::Capture(Capture::begin(&*device, captured).unwrap());
    let pools = own.private_pools();
    let scope = PoolScope::open(pools, PoolId::next_capture(), filter).unwrap();
    own.give(block);
    Capture::end(&*device, captured).expect("the capture is intact");
    drop(scope);
    assert_eq!(active_in_the_end(&own, &device), 0);
}

/// The events for the blocks of a capture are recorded when the next scope opens. So the memory of two
/// captures suffices.
#[test]
fn captures_in_a_row_reuse_the_blocks_of_earlier_ones() {
    let device = sim();
    let own = over(Arc::<Sim>::clone(&device), User::with_bytes(1 << 30).callbacks());
    let (stream, side) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    let join = |first, then| {
        let event = device.create_event().unwrap();
        device.record_event(event, first).unwrap();
        device.wait_event(then, event).unwrap();
    };
    let (pools, pool) = (own.private_pools(), PoolId::next_capture());
    pools.create_pool(pool, PoolOptions::default()).unwrap();
    let reserved = [(); 4].map(|()| {
        pools.open_scope(pool, ScopeFilter::Stream(stream)).unwrap();
        Capture::begin(&*device, stream).unwrap();
        join(stream, side);
        for _ in 0..4 {
            let block = own.take_on(4096, stream);
            others(&own).record_stream(&block, side).unwrap();
            own.give(block);
        }
        join(side, stream);
        Capture::end(&*device, stream).unwrap();
        pools.close_scope(pool).unwrap();
        device.complete_all();
        own.stats().memory_reserved()
    });
    assert_eq!(reserved.map(|bytes| bytes / 4096), [4, 8, 8, 8]);
}

/// The thread captures one stream and allocates on another stream.
#[test]
fn nothing_is_waited_for_or_reset_while_this_thread_captures() {
    let device = sim();
    let resets = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&resets);
    let reset = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    let own = over(Arc::<Sim>::clone(&device), User::with_bytes(4096).callbacks().on_reset(reset));
    let (side, captured) = (device.create_stream().unwrap(), device.create_stream().unwrap());
    free_after(&own, side);
    let filter = ScopeFilter::Capture(Capture::begin(&*device, captured).unwrap());
    let pools = own.private_pools();
    let scope = PoolScope::open(pools, PoolId::next_capture(), filter).unwrap();
    let refused = own.try_allocate(4096, MAIN);
    assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
    own.caching().empty_cache().unwrap();
    assert_eq!(resets.load(Ordering::Relaxed), 0);
    Capture::end(&*device, captured).expect("the capture is intact");
    drop(scope);
    own.free(own.take_on(4096, MAIN)).unwrap();
    own.caching().empty_cache().unwrap();
    assert_eq!(resets.load(Ordering::Relaxed), 2);
}

/// A request reaches the pool by a scope with a filter for its stream, for its thread or by a function,
/// or by the pool's id.
#[test]
fn a_graphs_blocks_stay_whatever_led_its_requests_to_the_pool() {
    for way in 0..4 {
        let device = sim();
        let user = User::with_bytes(8192);
        let own = over(Arc::<Sim>::clone(&device), user.callbacks());
        let (pools, pool) = (own.private_pools(), PoolId::next_user());
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        pools.create_pool(pool, options).unwrap();
        let side = device.create_stream().unwrap();
        let filter = match way {
            0 => Some(ScopeFilter::Stream(side)),
            1 => Some(ScopeFilter::this_thread()),
            2 => Some(ScopeFilter::Where(Arc::new(move |stream| stream == side))),
            _ => None,
        };
        let scope = || filter.clone().map(|filter| PoolScope::open(pools, pool, filter).unwrap());
        let take = |bytes| match way {
            3 => own.allocate(Request::new(bytes, side).in_pool(pool)),
            _ => own.try_allocate(bytes, side),
        };
        let open = scope();
        Capture::begin(&*device, side).unwrap();
        let block = take(8192).unwrap();
        let address = block.address();
        own.give(block);
        Capture::end(&*device, side).unwrap();
        drop(open);
        user.take_calls();
        let outside = own.try_allocate(8192, side);
        assert!(matches!(outside, Err(AllocError::OutOfMemory(_))), "{way}: {outside:?}");
        let open = scope();
        let larger = take(9000);
        assert!(matches!(larger, Err(AllocError::OutOfMemory(_))), "{way}: {larger:?}");
        assert_eq!(user.take_calls(), [""; 0], "{way}: the graph writes to it");
        let again = take(8192).unwrap();
        assert_eq!(again.address(), address, "{way}");
        own.give(again);
        drop(open);
        pools.release_pool(pool).unwrap();
        own.caching().empty_cache().unwrap();
        assert_eq!(user.take_calls(), [format!("free 8192 {side}")], "{way}");
    }
}
