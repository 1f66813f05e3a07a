//! Floors: times of basic operations of the machine, which no allocator can undercut. They are timed in
//! the same run as the cases.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::cases::{Tail, Together, median, median_ns, together};

/// A value that shares its cache lines with no other.
#[repr(align(128))]
struct Apart<T>(T);

/// Times one atomic read-modify-write.
pub(crate) fn atomic_rmw() -> f64 {
    let counter = AtomicU64::new(0);
    let ns = median_ns(7, 300_000, |_| {
        counter.fetch_add(1, Ordering::AcqRel);
    });
    black_box(counter.into_inner());
    ns
}

/// Times locking and unlocking an uncontended lock of parking_lot, on each of several threads concurrently.
pub(crate) fn lock_pair(threads: usize) -> Together {
    let locks: Vec<_> = (0..threads).map(|_| Apart(Mutex::new(0u64))).collect();
    let run = |_| {
        together(threads, 300_000, |thread| {
            let lock = &locks[thread].0;
            move |steps| (0..steps).for_each(|_| *black_box(lock).lock() += 1)
        })
    };
    median((0..7).map(run).collect())
}

/// Times an allocation and a free of 512 bytes by the system allocator.
pub(crate) fn malloc_pair() -> f64 {
    median_ns(7, 300_000, |_| {
        black_box(Vec::<u8>::with_capacity(black_box(512)));
    })
}

/// Times single steps of about 55 ns of arithmetic, which shows the overhead of the timing loop.
pub(crate) fn tail() -> Tail {
    let mut x = 1u64;
    let rounds = arithmetic_rounds();
    let tail = Tail::of(|_| {
        for _ in 0..rounds {
            x = black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ x >> 31);
        }
    });
    black_box(x);
    tail
}

/// Returns how many rounds of arithmetic take about 55 ns here.
fn arithmetic_rounds() -> i32 {
    let mut x = 1u64;
    let ns = median_ns(5, 300_000, |_| {
        x = black_box(x.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ x >> 31);
    });
    black_box(x);
    (1..1000).find(|&rounds| f64::from(rounds) * ns >= 55.0).unwrap_or(1000)
}
