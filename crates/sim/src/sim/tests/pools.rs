//! Stream-ordered pools.

use super::*;
use stratalloc::driver::{DriverPoolId, DriverPoolUsage, MemoryPools};

const A: StreamId = StreamId(7);
const B: StreamId = StreamId(8);

fn default_pool(sim: &Sim) -> DriverPoolId {
    MemoryPools::default_pool(sim).unwrap()
}

#[test]
fn freed_memory_is_reused_at_once_on_its_own_stream_only() {
    let sim = sim(EventMode::Manual);
    let pool = default_pool(&sim);
    let first = sim.allocate_async(pool, MIB, A).unwrap();
    sim.free_async(first, A).unwrap();
    let other = sim.allocate_async(pool, MIB, B).unwrap();
    assert_ne!(other, first, "the free was not reached on B");
    assert_eq!(sim.allocate_async(pool, MIB, A), Ok(first));
    sim.free_async(first, A).unwrap();
    sim.complete_stream(A);
    assert_eq!(sim.allocate_async(pool, MIB, B), Ok(first));
}

#[test]
fn usage_counts_what_is_held_and_its_high_marks() {
    let sim = sim(EventMode::Manual);
    let pool = default_pool(&sim);
    sim.set_release_threshold(pool, u64::MAX).unwrap();
    let a = sim.allocate_async(pool, 1000, A).unwrap();
    let b = sim.allocate_async(pool, MIB, A).unwrap();
    sim.free_async(b, A).unwrap();
    let usage = DriverPoolUsage {
        used_bytes: 1024,
        used_high_bytes: 1024 + MIB,
        reserved_bytes: 32 * MIB,
        reserved_high_bytes: 32 * MIB,
    };
    assert_eq!(sim.usage(pool), Ok(usage));
    sim.reset_high_marks(pool).unwrap();
    sim.free_async(a, A).unwrap();
    let usage = sim.usage(pool).unwrap();
    assert_eq!((usage.used_bytes, usage.used_high_bytes), (0, 1024));
}

#[test]
fn idle_memory_is_released_when_a_call_synchronises() {
    let sim = sim(EventMode::Manual);
    let pool = default_pool(&sim);
    let [a, b] = [(); 2].map(|()| sim.allocate_async(pool, 32 * MIB, A).unwrap());
    sim.free_async(a, A).unwrap();
    sim.free_async(b, A).unwrap();
    sim.set_release_threshold(pool, 32 * MIB).unwrap();
    sim.synchronize_device().unwrap();
    assert_eq!(sim.usage(pool).unwrap().reserved_bytes, 32 * MIB);
    sim.trim(pool, 0).unwrap();
    assert_eq!(sim.memory_info().unwrap().free_bytes, 64 * MIB);
}

#[test]
fn a_trim_keeps_what_is_held_or_not_yet_free() {
    let sim = sim(EventMode::Manual);
    let pool = default_pool(&sim);
    let a = sim.allocate_async(pool, 32 * MIB, A).unwrap();
    sim.trim(pool, 0).unwrap();
    sim.free_async(a, A).unwrap();
    sim.trim(pool, 0).unwrap();
    assert_eq!(sim.usage(pool).unwrap().reserved_bytes, 32 * MIB);
    sim.complete_all();
    sim.trim(pool, 0).unwrap();
    assert_eq!(sim.usage(pool).unwrap().reserved_bytes, 0);
}

#[test]
fn a_full_device_is_out_of_memory_and_changes_nothing() {
    let sim = sim(EventMode::Immediate);
    let pool = default_pool(&sim);
    // Only 4 MiB are left, so the pool takes less than its usual step of 32 MiB.
    sim.allocate(60 * MIB).unwrap();
    let a = sim.allocate_async(pool, 4 * MIB, A).unwrap();
    sim.fill(a, 0, 4 * MIB, A).unwrap();
    assert!(sim.allocate_async(pool, MIB, A).unwrap_err().is_out_of_memory());
}

quickcheck::quickcheck! {
    fn pool_ranges_never_overlap_and_used_bytes_are_their_sum(
        ops: Vec<(bool, u32, bool)>
    ) -> bool {
        let sim = sim(EventMode::Manual);
        let pool = default_pool(&sim);
        let mut live: Vec<(u64, u64)> = Vec::new();
        for (index, (allocate, pick, other)) in ops.into_iter().enumerate() {
            let on = if other { A } else { B };
            if allocate || live.is_empty() {
                let bytes = (u64::from(pick) % 8192 + 1) * 512;
                if let Ok(address) = sim.allocate_async(pool, bytes, on) {
                    live.push((address, bytes));
                }
            } else {
                let (address, _) = live.swap_remove(pick as usize % live.len());
                sim.free_async(address, on).unwrap();
            }
            if index % 16 == 0 {
                sim.synchronize_stream(on).unwrap();
            }
            live.sort_unstable();
            assert!(live.is_sorted_by(|a, b| a.0 + a.1 <= b.0));
            let used_bytes: u64 = live.iter().map(|range| range.1).sum();
            let usage = sim.usage(pool).unwrap();
            assert_eq!(usage.used_bytes, used_bytes);
            let free_bytes = sim.memory_info().unwrap().free_bytes;
            assert_eq!(usage.reserved_bytes, 64 * MIB - free_bytes);
        }
        true
    }
}
