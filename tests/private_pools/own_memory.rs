//! Pools whose segments come from a segment allocator instead of the driver.

use std::sync::Weak;

use crate::common::prelude::*;

/// A segment allocator with made-up addresses, far from those of the device.
#[derive(Debug, Default)]
struct Own {
    taken: Mutex<Vec<(u64, u64)>>,
    freed: Mutex<Vec<(u64, u64)>>,
    crooked: bool,
    empty: bool,
}

impl SegmentAllocator for Own {
    fn allocate(&self, size_bytes: u64, _: StreamId) -> Option<u64> {
        if self.empty {
            return None;
        }
        let mut taken = self.taken.lock();
        let address = (1 << 50) + (taken.len() as u64) * (1 << 32) + u64::from(self.crooked);
        taken.push((address, size_bytes));
        Some(address)
    }

    fn free(&self, address: u64, size_bytes: u64, _: StreamId) {
        self.freed.lock().push((address, size_bytes));
    }
}

fn options(own: &Arc<Own>) -> PoolOptions {
    PoolOptions { allocator: Some(Arc::clone(own) as _), ..PoolOptions::default() }
}

// Two requests of 1 MiB share a segment and a third gets another one. No segment is returned before the
// pool is dropped. Segments of such pools are never expandable.
#[test]
fn segments_come_from_the_pools_own_allocator_and_go_back_to_it() {
    for fixture in fixtures(ROOMY) {
        let own = Arc::new(Own::default());
        let pool = MemoryPool::new(fixture.private_pools(), options(&own)).unwrap();
        let scope = pool.enter().unwrap();
        let mut held = vec![fixture.take(MIB), fixture.take(MIB)];
        assert_eq!(fixture.layout_of(pool.id()).len(), 1);
        held.push(fixture.take(MIB));
        drop(scope);
        let layout = fixture.layout_of(pool.id());
        assert_eq!(layout.len(), 2);
        assert!(layout.iter().all(|segment| !segment.expandable && segment.address >= 1 << 50));
        fixture.engine().check().unwrap();
        held.into_iter().for_each(|block| fixture.give(block));
        fixture.empty_cache();
        assert_eq!(own.freed.lock().len(), 0, "the pool is in use");
        drop(pool);
        assert_eq!(*own.freed.lock(), *own.taken.lock());
        assert_eq!(fixture.reserved_bytes(), 0);
        fixture.check();
    }
}

#[test]
fn a_default_pool_beside_it_stays_expandable() {
    let fixture = Fixture::new(ROOMY, "expandable_segments:True");
    let own = Arc::new(Own::default());
    let with_own = MemoryPool::new(fixture.private_pools(), options(&own)).unwrap();
    let plain = fixture.pool();
    let held = [&with_own, &plain].map(|pool| {
        let _scope = pool.enter().unwrap();
        fixture.take(MIB)
    });
    let expandable = [&with_own, &plain].map(|pool| fixture.layout_of(pool.id())[0].expandable);
    assert_eq!(expandable, [false, true]);
    held.into_iter().for_each(|block| fixture.give(block));
}

// The segment allocator must outlive the pool while a block in its memory is live.
#[test]
fn the_allocator_lives_as_long_as_its_memory() {
    let fixture = Fixture::new(ROOMY, "");
    let own = Arc::new(Own::default());
    let pool = MemoryPool::new(fixture.private_pools(), options(&own)).unwrap();
    let scope = pool.enter().unwrap();
    let kept = fixture.take(MIB);
    drop(scope);
    drop(pool);
    assert_eq!(Arc::strong_count(&own), 2);
    assert_eq!(own.freed.lock().len(), 0);
    fixture.give(kept);
    fixture.empty_cache();
    assert_eq!(own.freed.lock().len(), 1);
    assert_eq!(Arc::strong_count(&own), 1);
}

#[test]
fn memory_goes_back_to_its_maker_also_when_the_allocator_goes_first() {
    let own = Arc::new(Own::default());
    {
        let fixture = Fixture::new(ROOMY, "");
        let pool = MemoryPool::new(fixture.private_pools(), options(&own)).unwrap();
        let scope = pool.enter().unwrap();
        let _leaked = fixture.take(MIB);
        drop(scope);
        drop(pool);
    }
    assert_eq!(*own.freed.lock(), *own.taken.lock());
}

#[test]
fn an_allocator_without_memory_is_out_of_memory_and_a_crooked_one_an_error() {
    let fixture = Fixture::new(ROOMY, "");
    let dry = Arc::new(Own { empty: true, ..Own::default() });
    let pool = MemoryPool::new(fixture.private_pools(), options(&dry)).unwrap();
    let scope = pool.enter().unwrap();
    let report = fixture.fail(MIB, HOME);
    assert_eq!(report.pool, pool.id());
    assert!(report.to_string().contains("the pool's own allocator has no"), "{report}");
    drop(scope);

    let crooked = Arc::new(Own { crooked: true, ..Own::default() });
    let pool = MemoryPool::new(fixture.private_pools(), options(&crooked)).unwrap();
    let scope = pool.enter().unwrap();
    let refused = fixture.try_allocate(MIB, HOME).unwrap_err();
    assert!(matches!(refused, AllocError::Driver(_)), "{refused}");
    assert_eq!(*crooked.freed.lock(), *crooked.taken.lock());
    drop(scope);
    assert_eq!(fixture.reserved_bytes(), 0);
    fixture.check();
}

/// A segment allocator that calls the allocator for which it works.
#[derive(Debug)]
struct Curious {
    inner: Arc<Own>,
    fixture: Weak<Fixture>,
}

impl Curious {
    fn fixture_of(&self) -> Arc<Fixture> {
        let fixture = self.fixture.upgrade().expect("it lives");
        let _ = (fixture.stats(), fixture.layout());
        fixture
    }
}

impl SegmentAllocator for Curious {
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64> {
        self.fixture_of().empty_cache();
        self.inner.allocate(size_bytes, stream)
    }

    fn free(&self, address: u64, size_bytes: u64, stream: StreamId) {
        self.fixture_of();
        self.inner.free(address, size_bytes, stream);
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        self.fixture_of();
    }
}

/// The pool's own allocator calls the engine whenever the engine calls or drops it. If the engine then held
/// a lock that it takes in such a call, this test would deadlock.
#[test]
fn an_own_allocator_may_call_back_in_each_call_and_when_it_is_dropped() {
    let (fixture, inner) = (Arc::new(Fixture::new(ROOMY, "")), Arc::<Own>::default());
    let own = Curious { inner: Arc::clone(&inner), fixture: Arc::downgrade(&fixture) };
    let options = PoolOptions { allocator: Some(Arc::new(own)), ..PoolOptions::default() };
    let pool = MemoryPool::new(fixture.private_pools(), options).unwrap();
    fixture.give(fixture.take_in(pool.id(), MIB, HOME));
    drop(pool);
    assert_eq!((inner.freed.lock().len(), Arc::strong_count(&inner)), (1, 1));
    assert_eq!(fixture.engine().private_pool_count(), 0);
}

#[test]
fn memory_that_the_driver_does_not_know_cannot_be_shared() {
    let fixture = Fixture::new(ROOMY, "");
    let own = Arc::new(Own::default());
    let pool = MemoryPool::new(fixture.private_pools(), options(&own)).unwrap();
    let scope = pool.enter().unwrap();
    let block = fixture.take(MIB);
    drop(scope);
    let refused = fixture.sharing().share(&block).unwrap_err();
    assert!(refused.to_string().contains("a pool's own allocator"), "{refused}");
    fixture.give(block);
}

/// An allocator of segments whose addresses rise, or fall. Those of NCCL's symmetric memory rise on some
/// ranks and fall on others.
#[derive(Debug)]
struct InOrder {
    falls: bool,
    count: AtomicU64,
}

impl SegmentAllocator for InOrder {
    fn allocate(&self, _: u64, _: StreamId) -> Option<u64> {
        let steps = self.count.fetch_add(1, Ordering::Relaxed) << 32;
        Some(if self.falls { (1 << 50) - steps } else { (1 << 50) + steps })
    }

    fn free(&self, _: u64, _: u64, _: StreamId) {}
}

/// Returns which of three freed segments a request reuses, for rising and for falling addresses.
fn reused(conf: &str, own: bool) -> [usize; 2] {
    [false, true].map(|falls| {
        let fixture = Fixture::new(ROOMY, conf);
        let allocator = Arc::new(InOrder { falls, count: AtomicU64::new(1) });
        let allocator = own.then_some(allocator as Arc<dyn SegmentAllocator>);
        let options = PoolOptions { allocator, ..PoolOptions::default() };
        let pool = MemoryPool::new(fixture.private_pools(), options).expect("it can");
        let blocks = [(); 3].map(|()| fixture.take_in(pool.id(), 30 * MIB, HOME));
        let addresses = blocks.each_ref().map(Allocation::address);
        blocks.into_iter().for_each(|block| fixture.give(block));
        let again = fixture.take_in(pool.id(), 30 * MIB, HOME);
        let at = addresses.iter().position(|address| *address == again.address());
        fixture.give(again);
        at.expect("one of them is reused") + 1
    })
}

#[test]
fn the_order_of_reuse_of_own_memory_does_not_depend_on_addresses() {
    assert_eq!(reused("", true), [1, 1]);
    for version in ["13", "14", "15"] {
        assert_eq!(reused(&format!("compat:pytorch-2.{version}"), true), [1, 1], "2.{version}");
    }
    // The rule of these versions is the lowest address.
    for version in ["10", "11"] {
        assert_eq!(reused(&format!("compat:pytorch-2.{version}"), true), [1, 3], "2.{version}");
    }
    assert_eq!(reused("", false), [1, 1], "the simulated device gives rising addresses");
}
