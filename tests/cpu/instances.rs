//! Several instances: one address map, threads, guards, and blocks that outlive their instance.

use std::sync::mpsc::channel;

use stratalloc::strategies::{CpuBuffer, CpuCachingGuard, current, with_cpu_caching_allocator};
use stratalloc::system::{Fill, Source, SystemBlock};

use super::{ANY, Counted, hand_clock, over};
use crate::common::prelude::*;

fn take_raw(own: &CpuAllocator, bytes: u64) -> u64 {
    own.try_allocate(bytes, ANY).map(|b| b.address()).expect("there is enough")
}

#[test]
fn any_instance_takes_any_address_back_for_the_one_that_made_it() {
    let (maker, other) = (over(&Counted::new(), ""), over(&Counted::new(), ""));
    let address = take_raw(&maker, 1000);
    maker.record_stream_raw(address, ANY).unwrap();
    other.free_raw(address).unwrap();
    assert_eq!((maker.stats().free_blocks, other.stats().free_blocks), (1, 0));
    assert_eq!(take_raw(&maker, 1000), address);
    other.free_raw(address).unwrap();
    let unknown = HandleError::UnknownAddress { address };
    assert_eq!(other.free_raw(address).unwrap_err(), unknown);
    assert_eq!(maker.free_raw(address).unwrap_err(), unknown);
    assert_eq!(maker.record_stream_raw(address, ANY).unwrap_err(), unknown);
    assert_eq!(maker.free_raw(12).unwrap_err(), HandleError::UnknownAddress { address: 12 });
}

#[test]
fn a_dropped_instance_gives_its_cache_back_and_its_live_blocks_when_they_are_freed() {
    let source = Counted::new();
    let (own, other) = (over(&source, ""), over(&Counted::new(), ""));
    own.give(own.take(100));
    let (by_address, by_handle, buffer) = (take_raw(&own, 200), own.take(300), own.buffer(400));
    let stranger = other.take(1);
    drop(own);
    assert_eq!(source.held(), (3, 900));
    other.free_raw(by_address).unwrap();
    assert_eq!(source.held(), (2, 700));
    CpuAllocator::free_shared(by_handle).unwrap();
    assert_eq!(source.held(), (1, 400));
    drop(buffer);
    assert_eq!(source.held(), (0, 0));
    assert_eq!(Arc::strong_count(&source), 1, "nothing of the instance is left");
    assert!(other.free_raw(by_address).is_err());
    CpuAllocator::free_shared(stranger).unwrap();
    assert_eq!(other.stats().free_blocks, 1);
}

#[test]
fn what_others_freed_is_forgotten_and_its_memory_comes_along() {
    let source = Counted::new();
    let (own, other) = (over(&source, ""), over(&Counted::new(), ""));
    let address = take_raw(&own, 4096);
    let memory = other.record_free(address).unwrap();
    assert_eq!((memory.address(), memory.size_bytes()), (address, 4096));
    assert!(own.free_raw(address).is_err() && own.record_free(address).is_err());
    let s = own.stats();
    assert_eq!((s.allocation.all.current, s.reserved_bytes.all.current), (0, 0));
    drop(memory);
    let idle = take_raw(&own, 64);
    own.free_raw(idle).unwrap();
    assert!(own.record_free(idle).is_err(), "it is not live");
}

#[test]
fn unknown_addresses_are_freed_by_their_owner() {
    let own = over(&Counted::new(), "");
    let address = take_raw(&own, 100);
    let mut foreign = Vec::new();
    own.free_or(0x1234_0000, |address| foreign.push(address)).unwrap();
    own.free_or(address, |address| foreign.push(address)).unwrap();
    // The address is known and its block is free, so this is a second free of the block, not a free of
    // foreign memory.
    assert!(own.free_or(address, |address| foreign.push(address)).is_err());
    assert_eq!(foreign, [0x1234_0000]);
}

#[test]
fn guards_nest_and_belong_to_their_thread() {
    let (outer, inner) = (Arc::new(over(&Counted::new(), "")), Arc::new(over(&Counted::new(), "")));
    assert!(current().is_none());
    with_cpu_caching_allocator(&outer, || {
        drop(CpuBuffer::new(100).unwrap());
        with_cpu_caching_allocator(&inner, || {
            drop(CpuBuffer::zeroed(100).unwrap());
            assert!(Arc::ptr_eq(&current().unwrap(), &inner));
            std::thread::scope(|scope| {
                scope.spawn(|| assert!(current().is_none())).join().unwrap();
            });
        });
        assert!(Arc::ptr_eq(&current().unwrap(), &outer));
    });
    assert!(current().is_none());
    assert_eq!((outer.stats().misses, inner.stats().misses), (1, 1));
    let mut plain = CpuBuffer::zeroed(100).unwrap();
    assert_eq!(plain.initialized().unwrap(), [0; 100]);
    assert!(CpuBuffer::new(0).is_err() && CpuBuffer::new(u64::MAX).is_err());
}

#[test]
fn a_panic_ends_the_guards_and_an_outer_one_takes_inner_ones_along() {
    let own = Arc::new(over(&Counted::new(), ""));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        with_cpu_caching_allocator(&own, || panic!("inside"));
    }));
    assert!(panicked.is_err() && current().is_none());
    let outer = CpuCachingGuard::new(Arc::clone(&own));
    let inner = CpuCachingGuard::new(Arc::clone(&own));
    drop(outer);
    assert!(current().is_none());
    drop(inner);
    assert_eq!(Arc::strong_count(&own), 1);
}

#[test]
fn a_guard_that_was_taken_along_takes_no_later_one() {
    let own = || Arc::new(over(&Counted::new(), ""));
    let (outer, inner) = (CpuCachingGuard::new(own()), CpuCachingGuard::new(own()));
    drop(outer);
    let last = own();
    let (_third, _fourth) = (CpuCachingGuard::new(own()), CpuCachingGuard::new(Arc::clone(&last)));
    drop(inner);
    assert!(Arc::ptr_eq(&current().unwrap(), &last));
}

/// System memory whose release takes long.
#[derive(Debug)]
struct Slow(Arc<Counted>, Arc<Barrier>);

impl Source for Slow {
    fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock> {
        self.0.take(size_bytes, alignment_bytes)
    }

    fn release(&self, block: SystemBlock) {
        // Makes it likely that the other thread's request fails just before this thread releases memory.
        self.1.wait();
        std::thread::yield_now();
        self.0.release(block);
    }
}

#[test]
fn memory_that_another_thread_is_freeing_causes_no_failure() {
    for _ in 0..200 {
        let source = Counted::new();
        source.most_bytes.store(1000, Ordering::SeqCst);
        let both = Arc::new(Barrier::new(2));
        let slow = Arc::new(Slow(Arc::clone(&source), Arc::clone(&both)));
        let settings = Settings::default();
        let own = CpuAllocator::with_source(DeviceId(0), &settings, slow, hand_clock().1).unwrap();
        own.give(own.take(800));
        std::thread::scope(|scope| {
            scope.spawn(|| own.empty_cache().unwrap());
            both.wait();
            let _taken = own.take(400);
        });
    }
}

#[test]
fn second_frees_by_address_never_reach_a_buffer() {
    let own = over(&Counted::new(), "");
    std::thread::scope(|scope| {
        // The thread below ends when `running` is dropped, after the loop or by a panic.
        let running = Arc::new(());
        let watched = Arc::downgrade(&running);
        scope.spawn(|| {
            let (address, watched) = (take_raw(&own, 64), watched);
            own.free_raw(address).unwrap();
            while watched.strong_count() > 0 {
                let _ = own.free_raw(address);
            }
        });
        for _ in 0..20_000 {
            let mut buffer = own.buffer(64).unwrap();
            buffer.fill(Fill::Zero);
            assert_eq!(buffer.initialized().unwrap(), [0; 64]);
        }
        drop(running);
    });
}

#[test]
fn a_block_goes_home_from_another_thread() {
    let source = Counted::new();
    let own = Arc::new(over(&source, ""));
    let (send, receive) = channel();
    std::thread::scope(|scope| {
        let maker = Arc::clone(&own);
        scope.spawn(move || {
            for size in 1..=500 {
                send.send((maker.take(size), maker.buffer(size).unwrap())).unwrap();
            }
        });
        scope.spawn(|| {
            for (block, buffer) in receive {
                own.give(block);
                drop(buffer);
            }
        });
    });
    let s = own.stats();
    assert_eq!((s.allocation.all.current, s.allocation.all.allocated), (0, 1000));
    drop(own);
    assert_eq!(source.held(), (0, 0));
}
