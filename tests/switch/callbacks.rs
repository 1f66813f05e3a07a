//! A user's functions that call the switchable allocator by which they are called.

use super::{Fixture, NATIVE};
use crate::common::prelude::*;

/// Makes calls that change the allocator. The switch among them is refused, because a scope is open.
fn ask_everything(all: &Switchable) {
    let caching = all.caching();
    caching.empty_cache().expect("the device works");
    caching.set_limit_bytes(Some(GIB));
    assert_eq!(caching.limit_bytes(), Some(GIB));
    all.update("throw_on_cudamalloc_oom:True").expect("nothing that is read once");
    assert!(all.config().settings().throw_on_device_oom);
    let refused = all.switch(NATIVE).expect_err("a scope is open");
    assert!(matches!(refused, SwitchError::ScopeOpen { .. }), "{refused}");
    let (pools, another) = (all.private_pools(), PoolId::next_user());
    pools.create_pool(another, PoolOptions::default()).expect("a new id");
    pools.release_pool(another).expect("it has a user");
    assert!(all.stats().allocation.all.current >= 0);
}

/// A switch releases the old allocator's memory, and each release would call the stack provider again.
#[test]
fn a_switch_inside_a_stack_provider_is_refused() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let history = Arc::clone(fixture.recording().history());
    let (own, refused) = (fixture.allocator.clone(), Arc::new(AtomicU64::new(0)));
    let count = Arc::clone(&refused);
    let gather = move || -> Option<Arc<dyn Stack>> {
        for answer in [own.switch("backend:cudaMallocAsync"), own.update("backend:cudaMallocAsync")]
        {
            assert!(matches!(answer, Err(SwitchError::InStackProvider)));
            count.fetch_add(1, Ordering::Relaxed);
        }
        None
    };
    history.set_stack_provider(Some(Arc::new(gather)));
    history.start(&RecordOptions::default().with_stacks(StackLevel::OfFrees));
    fixture.give(fixture.take(512));
    assert_eq!(refused.load(Ordering::Relaxed), 4);
    history.set_stack_provider(None);
    fixture.allocator.switch("backend:cudaMallocAsync").expect("no provider runs");
}

#[test]
fn functions_that_begin_and_end_pools_may_call_the_allocator_and_panic() {
    let all: Arc<OnceLock<Switchable>> = Arc::default();
    let (calls, panics) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let inside = {
        let (all, calls, panics) = (Arc::clone(&all), Arc::clone(&calls), Arc::clone(&panics));
        move || {
            ask_everything(all.get().expect("it was built"));
            calls.fetch_add(1, Ordering::Relaxed);
            assert!(!panics.load(Ordering::Relaxed), "as planned");
        }
    };
    let next = AtomicU64::new(1 << 20);
    let allocate = move |bytes: u64, _, _| {
        Some(next.fetch_add(bytes.next_multiple_of(512), Ordering::Relaxed))
    };
    let (begin, end) = (inside.clone(), inside);
    let callbacks = Callbacks::new(allocate, |_, _, _, _| {}).on_pools(
        move |_, _, _| begin(),
        move |_, _| end(),
        |_, _| {},
    );
    registry::register_callbacks("asking", callbacks).expect("the name is free");
    let fixture = Fixture::new(8 * GIB, "backend:asking");
    all.set(fixture.allocator.clone()).expect("once");
    let pools = fixture.private_pools();
    let (pool, filter) = (PoolId::next_user(), ScopeFilter::this_thread());
    pools.create_pool(pool, PoolOptions::default()).expect("a new id");
    pools.open_scope(pool, filter.clone()).expect("it is closed");
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    fixture.give(fixture.take_on(512, StreamId(7)));
    pools.close_scope(pool).expect("it is open");
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    panics.store(true, Ordering::Relaxed);
    let opened = catch_unwind(AssertUnwindSafe(|| pools.open_scope(pool, filter.clone())));
    assert!(opened.is_err(), "it panics");
    panics.store(false, Ordering::Relaxed);
    pools.open_scope(pool, filter).expect("the one that panicked is closed");
    panics.store(true, Ordering::Relaxed);
    let closed = catch_unwind(AssertUnwindSafe(|| pools.close_scope(pool)));
    assert!(closed.is_err(), "it panics");
    while pools.release_pool(pool).is_ok() {}
    fixture.switch(NATIVE);
    assert_eq!(fixture.retired(), 0, "no scope is in the way");
}
