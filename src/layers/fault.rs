//! `fault:[call:5]`: fails requests on purpose, to test how a program handles it.
//!
//! Fails the k-th request, each request with a probability, or each request above a size. The random
//! numbers depend only on a seed and on the number of the request. So the same requests of a
//! single-threaded program fail in every run. A failed request returns out of memory and never reaches
//! the allocator below.

use std::sync::atomic::{AtomicU64, Ordering};

use super::watch::{Watch, Watched, out_of_memory};
use crate::allocator::{DeviceAllocator, Request};
use crate::config::FaultSetting;
use crate::error::{AllocResult, OutOfMemory};

/// See the [module](self).
pub(crate) type Faulting<A> = Watched<A, Faults>;

/// The rule by which requests fail, and the counts so far.
#[derive(Debug)]
pub struct Faults {
    when: FaultSetting,
    /// Requests so far.
    calls: AtomicU64,
    injected: AtomicU64,
}

/// Returns `inner` with requests that fail by the rule `when`.
pub fn fault<A: DeviceAllocator>(inner: A, when: FaultSetting) -> Faulting<A> {
    let (calls, injected) = (AtomicU64::new(0), AtomicU64::new(0));
    Watched::new(inner, Faults { when, calls, injected })
}

impl Faults {
    /// Returns how many requests have failed on purpose so far. Never waits.
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }
}

/// Returns a pseudo-random number in [0, 1) for a seed and a position.
///
/// Source: the output function of SplitMix64 (Steele, Lea and Flood, 2014).
fn chance(seed: u64, position: u64) -> f64 {
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut x = seed.wrapping_add(position.wrapping_mul(STEP));
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^= x >> 31;
    #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
    let part = (x >> 11) as f64 / (1u64 << 53) as f64;
    part
}

impl Watch for Faults {
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let FaultSetting { call: chosen, probability, seed, above_bytes } = self.when;
        let why = if chosen == Some(call) {
            format!("it is request number {call}")
        } else if above_bytes.is_some_and(|above| request.bytes > above) {
            format!("it is larger than {} bytes", above_bytes.unwrap_or_default())
        } else if probability > 0.0 && chance(seed, call) < probability {
            format!("request number {call} was chosen with probability {probability}")
        } else {
            return below.allocate(request);
        };
        self.injected.fetch_add(1, Ordering::Relaxed);
        let report = OutOfMemory {
            hints: vec![format!("layers:[fault] failed the request on purpose: {why}")],
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        Err(out_of_memory(below, report))
    }
}

#[cfg(test)]
mod tests {
    use super::chance;

    #[test]
    fn chances_are_even_and_repeat() {
        let below_a_tenth = (0..100_000).filter(|n| chance(7, *n) < 0.1).count();
        assert!((9_500..10_500).contains(&below_a_tenth), "{below_a_tenth}");
        assert!((chance(7, 3) - chance(7, 3)).abs() < f64::EPSILON);
        assert!((chance(7, 3) - chance(8, 3)).abs() > f64::EPSILON);
    }
}
