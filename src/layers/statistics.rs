//! `statistics`: counts what callers hold, for an allocator that has no counters or counts other
//! figures.
//!
//! Blocks and bytes are those that callers requested. They are exact whenever no call overlaps (one
//! lock). Figures that only the allocator below has (segments, reserved bytes, splits, hits) are taken
//! from its counters, or are zero if it has none. Active is what callers hold plus what waits for other
//! streams below; its peak is at least the peak of what callers hold. Around a `front`, whose cached
//! blocks count as allocated for the strategy below, this layer counts what callers really hold.

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
    /// Allocations, their bytes and failures.
    own: Mutex<Statistics>,
}

/// Returns `inner` with counters of its own.
pub fn statistics<A: DeviceAllocator>(inner: A) -> Counted<A> {
    Watched::new(inner, Count::default())
}

/// Returns the counters of live blocks, plus freed blocks that still wait for streams in the allocator
/// below.
fn with_waiting(mut held: PerPool, active: &PerPool, allocated: &PerPool) -> PerPool {
    let add = |held: &mut Counter, active: &Counter, allocated: &Counter| {
        let waiting = (active.current - allocated.current).max(0);
        held.current += waiting;
        // Waiting blocks do not count as freed. Bytes that the allocator below rounded up were never
        // counted here.
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
