//! Pools whose segments do not come from the driver.

use std::sync::Weak;

use crate::common::prelude::*;

/// A segment allocator with made-up addresses, far from the device's.
#[derive(Debug, Default)]
struct Own {
    taken: Mutex<Vec<(u64, u64)>>,
    given_back: Mutex<Vec<(u64, u64)>>,
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
        self.given_back.lock().push((address, size_bytes));
    }
}

fn options(own: &Arc<Own>) -> PoolOptions {
    PoolOptions { allocator: Some(Arc::clone(own) as _), ..PoolOptions::default() }
}

// Two requests of 1 MiB share a segment and a third gets another. Nothing is freed to the segment
// allocator before the pool is dropped. Such pools are never expandable.
#[test]
fn segments_come_from_the_pools_own_allocator_and_go_back_to_it() {
    for bed in beds(ROOMY) {
        let own = Arc::new(Own::default());
        let pool = MemoryPool::new(bed.private_pools(), options(&own)).unwrap();
        let scope = pool.enter().unwrap();
        let mut held = vec![bed.take(MIB), bed.take(MIB)];
        assert_eq!(bed.layout_of(pool.id()).len(), 1);
        held.push(bed.take(MIB));
        drop(scope);
        let layout = bed.layout_of(pool.id());
        assert_eq!(layout.len(), 2);
        assert!(layout.iter().all(|segment| !segment.expandable && segment.address >= 1 << 50));
        bed.engine().check().unwrap();
        held.into_iter().for_each(|block| bed.give(block));
        bed.empty_cache();
        assert_eq!(own.given_back.lock().len(), 0, "the pool is in use");
        drop(pool);
        assert_eq!(*own.given_back.lock(), *own.taken.lock());
        assert_eq!(bed.reserved_bytes(), 0);
        bed.check();
    }
}

#[test]
fn a_default_pool_beside_it_stays_expandable() {
    let bed = Bed::new(ROOMY, "expandable_segments:True");
    let own = Arc::new(Own::default());
    let with_own = MemoryPool::new(bed.private_pools(), options(&own)).unwrap();
    let plain = bed.pool();
    let held = [&with_own, &plain].map(|pool| {
        let _scope = pool.enter().unwrap();
        bed.take(MIB)
    });
    let expandable = [&with_own, &plain].map(|pool| bed.layout_of(pool.id())[0].expandable);
    assert_eq!(expandable, [false, true]);
    held.into_iter().for_each(|block| bed.give(block));
}

// The segment allocator outlives the pool while a block of its memory is live.
#[test]
fn the_allocator_lives_as_long_as_its_memory() {
    let bed = Bed::new(ROOMY, "");
    let own = Arc::new(Own::default());
    let pool = MemoryPool::new(bed.private_pools(), options(&own)).unwrap();
    let scope = pool.enter().unwrap();
    let kept = bed.take(MIB);
    drop(scope);
    drop(pool);
    assert_eq!(Arc::strong_count(&own), 2);
    assert_eq!(own.given_back.lock().len(), 0);
    bed.give(kept);
    bed.empty_cache();
    assert_eq!(own.given_back.lock().len(), 1);
    assert_eq!(Arc::strong_count(&own), 1);
}

#[test]
fn memory_goes_back_to_its_maker_also_when_the_allocator_goes_first() {
    let own = Arc::new(Own::default());
    {
        let bed = Bed::new(ROOMY, "");
        let pool = MemoryPool::new(bed.private_pools(), options(&own)).unwrap();
        let scope = pool.enter().unwrap();
        let _leaked = bed.take(MIB);
        drop(scope);
        drop(pool);
    }
    assert_eq!(*own.given_back.lock(), *own.taken.lock());
}

#[test]
fn an_allocator_without_memory_is_out_of_memory_and_a_crooked_one_an_error() {
    let bed = Bed::new(ROOMY, "");
    let dry = Arc::new(Own { empty: true, ..Own::default() });
    let pool = MemoryPool::new(bed.private_pools(), options(&dry)).unwrap();
    let scope = pool.enter().unwrap();
    let report = bed.fail(MIB, HOME);
    assert_eq!(report.pool, pool.id());
    assert!(report.to_string().contains("the pool's own allocator has no"), "{report}");
    drop(scope);

    let crooked = Arc::new(Own { crooked: true, ..Own::default() });
    let pool = MemoryPool::new(bed.private_pools(), options(&crooked)).unwrap();
    let scope = pool.enter().unwrap();
    let refused = bed.ask(MIB, HOME).unwrap_err();
    assert!(matches!(refused, AllocError::Driver(_)), "{refused}");
    assert_eq!(*crooked.given_back.lock(), *crooked.taken.lock());
    drop(scope);
    assert_eq!(bed.reserved_bytes(), 0);
    bed.check();
}

/// A segment allocator that calls the allocator that calls it.
#[derive(Debug)]
struct Curious {
    inner: Arc<Own>,
    bed: Weak<Bed>,
}

impl Curious {
    fn look(&self) -> Arc<Bed> {
        let bed = self.bed.upgrade().expect("it lives");
        let _ = (bed.stats(), bed.layout());
        bed
    }
}

impl SegmentAllocator for Curious {
    fn allocate(&self, size_bytes: u64, stream: StreamId) -> Option<u64> {
        self.look().empty_cache();
        self.inner.allocate(size_bytes, stream)
    }

    fn free(&self, address: u64, size_bytes: u64, stream: StreamId) {
        self.look();
        self.inner.free(address, size_bytes, stream);
    }
}

impl Drop for Curious {
    fn drop(&mut self) {
        self.look();
    }
}

/// If a lock were held during a call or a drop, this test would deadlock.
#[test]
fn an_own_allocator_may_call_back_in_each_call_and_when_it_is_dropped() {
    let (bed, inner) = (Arc::new(Bed::new(ROOMY, "")), Arc::<Own>::default());
    let own = Curious { inner: Arc::clone(&inner), bed: Arc::downgrade(&bed) };
    let options = PoolOptions { allocator: Some(Arc::new(own)), ..PoolOptions::default() };
    let pool = MemoryPool::new(bed.private_pools(), options).unwrap();
    bed.give(bed.take_in(pool.id(), MIB, HOME));
    drop(pool);
    assert_eq!((inner.given_back.lock().len(), Arc::strong_count(&inner)), (1, 1));
    assert_eq!(bed.engine().private_pool_count(), 0);
}

#[test]
fn memory_that_the_driver_does_not_know_cannot_be_shared() {
    let bed = Bed::new(ROOMY, "");
    let own = Arc::new(Own::default());
    let pool = MemoryPool::new(bed.private_pools(), options(&own)).unwrap();
    let scope = pool.enter().unwrap();
    let block = bed.take(MIB);
    drop(scope);
    let refused = bed.sharing().share(&block).unwrap_err();
    assert!(refused.to_string().contains("a pool's own allocator"), "{refused}");
    bed.give(block);
}
