//! `statistics`: counts the blocks and bytes that callers hold, for an allocator that has no counters or
//! counts something else.
//!
//! Bytes are those that callers requested. One lock makes the counters exact whenever no call overlaps.
//! Counters that only the allocator below can keep (segments, reserved bytes, splits, hits) are taken
//! from there, or are zero if it has none. The counter *active* is the bytes that callers hold, plus
//! the freed bytes that wait for other streams in the allocator below. Its peak is at least the peak of
//! the bytes that callers hold. Around a `front`, whose cached blocks count as allocated in the
//! strategy below, this layer counts only blocks that callers hold.

use parking_lot::Mutex;

use super::watch::{Watch, Watched};
use crate::allocator::{Control, Counters, DeviceAllocator, Request};
use crate::error::{AllocError, AllocResult};
use crate::size::PoolKind;
use crate::stats::{Counter, PerPool, Statistics, Usage, signed};

/// See the [module](self).
pub(crate) type Counted<A> = Watched<A, Count>;

/// The counters of this layer.
#[derive(Debug, Default)]
pub struct Count {
    /// Allocations, and their bytes and failures.
    own: Mutex<Statistics>,
}

/// Returns `inner` with counters of its own.
pub fn statistics<A: DeviceAllocator>(inner: A) -> Counted<A> {
    Watched::new(inner, Count::default())
}

/// Returns the counters of the blocks that callers hold (`held`), increased by freed blocks that still
/// wait for streams in the allocator below. Their number is the difference of its counters `active` and
/// `allocated`.
fn with_waiting(mut held: PerPool, active: &PerPool, allocated: &PerPool) -> PerPool {
    let add = |held: &mut Counter, active: &Counter, allocated: &Counter| {
        let waiting = (active.current - allocated.current).max(0);
        held.current += waiting;
        // Blocks that wait do not count as freed, so they are subtracted from `freed`. `waiting` is in
        // rounded bytes and `freed` in requested bytes, so `waiting` may be larger. The excess is added
        // to `allocated`.
        let freed = held.freed.cast_unsigned().min(waiting.cast_unsigned()).cast_signed();
        held.allocated = held.allocated.wrapping_add(waiting - freed);
        held.freed = held.freed.wrapping_sub(freed);
        held.peak = held.peak.max(held.current);
    };
    add(&mut held.all, &active.all, &allocated.all);
    add(&mut held.small, &active.small, &allocated.small);
    add(&mut held.large, &active.large, &allocated.large);
    held
}

impl Count {
    fn taken(&self, size_bytes: u64) {
        self.own.lock().count_alloc(PoolKind::of(size_bytes), signed(size_bytes));
    }
}

impl Watch for Count {
    #[inline]
    fn allocate<A: DeviceAllocator>(&self, request: Request, below: &A) -> AllocResult {
        let answer = below.allocate(request);
        match &answer {
            Ok(_) => self.taken(request.bytes),
            Err(AllocError::OutOfMemory(_) | AllocError::TooLarge { .. }) => {
                self.own.lock().num_ooms += 1;
            }
            Err(_) => {}
        }
        answer
    }

    #[inline]
    fn freed(&self, size_bytes: u64) {
        self.own.lock().count_free(PoolKind::of(size_bytes), signed(size_bytes));
    }

    fn revived(&self, size_bytes: u64) {
        self.taken(size_bytes);
    }

    fn usage(&self, below: Usage) -> Usage {
        let own = self.own.lock();
        Usage {
            reserved_bytes: below.reserved_bytes,
            reserved_peak_bytes: below.reserved_peak_bytes,
            ..Usage::of(&own)
        }
    }

    fn control<A: DeviceAllocator>(watched: &Watched<A, Self>) -> Control<'_> {
        Control { counters: Some(watched), ..watched.below().control() }
    }
}

impl<A: DeviceAllocator> Counters for Watched<A, Count> {
    fn statistics(&self) -> Statistics {
        let below = self.below().control().counters.map(Counters::statistics);
        let Statistics { allocation, allocated_bytes, num_ooms, .. } = self.own.lock().clone();
        let num_ooms = below.as_ref().map_or(num_ooms, |below| below.num_ooms);
        let below = below.unwrap_or_default();
        Statistics {
            allocation,
            active: with_waiting(allocation, &below.active, &below.allocation),
            allocated_bytes,
            active_bytes: with_waiting(
                allocated_bytes,
                &below.active_bytes,
                &below.allocated_bytes,
            ),
            requested_bytes: allocated_bytes,
            num_ooms,
            ..below
        }
    }

    fn reset_peaks(&self) {
        self.own.lock().reset_peaks();
        if let Some(counters) = self.below().control().counters {
            counters.reset_peaks();
        }
    }

    fn reset_accumulated(&self) {
        self.own.lock().reset_accumulated();
        if let Some(counters) = self.below().control().counters {
            counters.reset_accumulated();
        }
    }
}
