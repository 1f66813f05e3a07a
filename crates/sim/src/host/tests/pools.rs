//! Stream-ordered pools: which streams may reuse freed memory when, and how much a pool keeps.

use super::*;
use stratalloc::driver::DriverPoolId;

fn refused<T: std::fmt::Debug>(result: DriverResult<T>) {
    assert_eq!(result.unwrap_err().kind(), DriverErrorKind::InvalidValue);
}

fn reserved(host: &Host, pool: DriverPoolId) -> u64 {
    host.usage(pool).unwrap().reserved_bytes
}

#[test]
fn freed_memory_is_used_again_at_once_on_its_stream_and_later_on_others() {
    let host = host();
    let pool = host.default_pool().unwrap();
    let first = host.allocate_async(pool, MIB, A).unwrap();
    let gate = host.hold(A);
    host.fill(first, 1, MIB, A).unwrap();
    host.free_async(first, A).unwrap();
    refused(host.fill(first, 1, 1, A));
    let other = host.allocate_async(pool, MIB, B).unwrap();
    assert_ne!(other, first, "A has not passed the free");
    assert_eq!(host.allocate_async(pool, MIB, A).unwrap(), first, "A itself is past it in order");
    host.fill(first, 2, MIB, A).unwrap();
    host.free_async(first, A).unwrap();
    gate.open();
    let event = host.create_event().unwrap();
    host.record_event(event, A).unwrap();
    host.set_release_threshold(pool, u64::MAX).unwrap();
    host.synchronize_event(event).unwrap();
    assert_eq!(host.allocate_async(pool, MIB, B).unwrap(), first, "the free is passed");
    assert_eq!(bytes(&host, first, 4, B), [2; 4], "in A's order");
}

#[test]
fn neighbours_freed_on_one_stream_serve_a_larger_request_there() {
    let host = host();
    let pool = host.create_pool().unwrap();
    let parts: Vec<_> = (0..32).map(|_| host.allocate_async(pool, MIB, A).unwrap()).collect();
    let _gate = host.hold(A);
    host.fill(parts[0], 1, 1, A).unwrap();
    for part in &parts {
        host.free_async(*part, A).unwrap();
    }
    assert_eq!(host.allocate_async(pool, 32 * MIB, A).unwrap(), parts[0]);
    assert_eq!(reserved(&host, pool), 32 * MIB);
}

#[test]
fn idle_pages_serve_a_larger_request_elsewhere_while_old_work_still_uses_them() {
    let host = host();
    let pool = host.create_pool().unwrap();
    let parts = [(); 2].map(|()| host.allocate_async(pool, 32 * MIB, A).unwrap());
    let gate = host.hold(B);
    host.fill(parts[0], 1, 32 * MIB, B).unwrap();
    for part in parts {
        host.free_async(part, A).unwrap();
    }
    let whole = host.allocate_async(pool, 64 * MIB, A).unwrap();
    assert_eq!(reserved(&host, pool), 64 * MIB, "no memory was added");
    for at in [whole, whole + 64 * MIB - 8] {
        assert_eq!(bytes(&host, at, 8, A), [0; 8]);
    }
    refused(host.fill(parts[0], 2, 1, A));
    gate.open();
    host.synchronize_device().unwrap();
    assert_eq!(bytes(&host, whole, 8, A), [0; 8], "the old work wrote to the old addresses");
}

#[test]
fn a_pool_keeps_its_threshold_at_a_wait_and_trims_on_demand() {
    let host = host();
    let pool = host.create_pool().unwrap();
    let take = || host.allocate_async(pool, 32 * MIB, A).unwrap();
    let (a, b) = (take(), take());
    let usage = host.usage(pool).unwrap();
    assert_eq!((usage.used_bytes, usage.reserved_bytes), (64 * MIB, 64 * MIB));
    assert!(host.allocate(1).unwrap_err().is_out_of_memory(), "segments count");
    host.set_release_threshold(pool, 32 * MIB).unwrap();
    host.free_async(a, A).unwrap();
    host.free_async(b, A).unwrap();
    assert_eq!(reserved(&host, pool), 64 * MIB, "no call has waited yet");
    host.synchronize_stream(A).unwrap();
    assert_eq!(reserved(&host, pool), 32 * MIB);
    host.trim(pool, 0).unwrap();
    let usage = host.usage(pool).unwrap();
    assert_eq!((usage.reserved_bytes, usage.reserved_high_bytes), (0, 64 * MIB));
    assert_eq!((usage.used_bytes, usage.used_high_bytes), (0, 64 * MIB));
    host.reset_high_marks(pool).unwrap();
    assert_eq!(host.usage(pool).unwrap(), Default::default());
    assert_eq!(host.memory_info().unwrap().free_bytes, 64 * MIB);
}

#[test]
fn a_trim_releases_idle_memory_but_not_that_of_unfinished_work() {
    let host = host();
    let (one, two) = (host.create_pool().unwrap(), host.create_pool().unwrap());
    let idle = host.allocate_async(one, 32 * MIB, A).unwrap();
    let gate = host.hold(A);
    host.fill(idle, 1, 8, A).unwrap();
    host.free_async(idle, A).unwrap();
    host.trim(one, 0).unwrap();
    let short = host.allocate_async(two, 40 * MIB, B).unwrap_err();
    assert!(
        short.is_out_of_memory() && short.message().contains(&(32 * MIB).to_string()),
        "{short}"
    );
    let event = host.create_event().unwrap();
    host.record_event(event, A).unwrap();
    gate.open();
    // `query_event` does not synchronise, so only the trim below makes pool `one` release memory.
    while !host.query_event(event).unwrap() {
        std::thread::yield_now();
    }
    assert_eq!(reserved(&host, one), 32 * MIB);
    host.trim(one, 0).unwrap();
    host.allocate_async(two, 40 * MIB, B).unwrap();
    assert_eq!((reserved(&host, one), reserved(&host, two)), (0, 64 * MIB));
}

#[test]
fn a_stream_that_is_gone_is_refused() {
    let host = host();
    let pool = host.default_pool().unwrap();
    let stream = host.create_stream().unwrap();
    host.destroy_stream(stream).unwrap();
    let live = host.allocate_async(pool, 1000, A).unwrap();
    refused(host.allocate_async(pool, 1, stream));
    refused(host.free_async(live, stream));
    host.free_async(live, A).unwrap();
}
