//! `statistics`: counts what callers hold, for an allocator that counts nothing or counts otherwise.
//!
//! Blocks and bytes are those that callers asked for, exact at every moment at which no call overlaps
//! (one lock). What only the allocator below can know (segments, reserved bytes, splits, hits) is
//! taken from its counters where it has any and is zero otherwise. Active is what callers hold and what
//! waits for other streams below; its peak is at least that of what callers hold. Over a `front`, whose
//! idle blocks are allocated for the strategy below, this tells what callers really hold.

use parking_lot::Mutex;

use super::watch::{Watch, Watched};
use crate::allocator::{Allocation, Control, Counters, DeviceAllocator, Request};
use crate::error::AllocError;
use crate::size::PoolKind;
use crate::stats::{Counter, PerPool, Statistics, Usage};

/// See the [module](self).
pub type Counted<A> = Watched<A, Count>;

/// The counters of this layer.
#[derive(Debug, Default)]
pub struct Count {
    own: Mutex<Own>,
}

#[derive(Clone, Debug, Default)]
struct Own {
    blocks: PerPool,
    bytes: PerPool,
    ooms: i64,
}

/// `inner` with counters of its own.
pub fn statistics<A: DeviceAllocator>(inner: A) -> Counted<A> {
    Watched::new(inner, Count::default())
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// What callers hold and, of what is given back, what the allocator below still waits for.
fn with_waiting(mut held: PerPool, active: &PerPool, allocated: &PerPool) -> PerPool {
    let waiting =
        |active: &Counter, allocated: &Counter| (active.current - allocated.current).max(0);
    let add = |held: &mut Counter, waiting: i64| {
        held.current += waiting;
        // They are not freed yet; what the allocator below rounds up to was never counted here.
        let freed = held.freed.cast_unsigned().min(waiting.cast_unsigned()).cast_signed();
        held.allocated = held.allocated.wrapping_add(waiting - freed);
        held.freed = held.freed.wrapping_sub(freed);
        held.peak = held.peak.max(held.current);
    };
    add(&mut held.all, waiting(&active.all, &allocated.all));
    add(&mut held.small, waiting(&active.small, &allocated.small));
    add(&mut held.large, waiting(&active.large, &allocated.large));
    held
}

impl Own {
    fn families(&mut self) -> [&mut PerPool; 2] {
        [&mut self.blocks, &mut self.bytes]
    }
}

impl Count {
    fn taken(&self, size_bytes: u64) {
        let (kind, bytes) = (PoolKind::of(size_bytes), signed(size_bytes));
        let mut own = self.own.lock();
        own.blocks.increase(kind, 1);
        own.bytes.increase(kind, bytes);
    }
}

impl Watch for Count {
    #[inline]
    fn allocate<A: DeviceAllocator>(
        &self,
        request: Request,
        below: &A,
    ) -> Result<Allocation, AllocError> {
        let answer = below.allocate(request);
        match &answer {
            Ok(_) => self.taken(request.bytes),
            Err(AllocError::OutOfMemory(_) | AllocError::TooLarge { .. }) => {
                self.own.lock().ooms += 1;
            }
            Err(_) => {}
        }
        answer
    }

    #[inline]
    fn freed(&self, size_bytes: u64) {
        let (kind, bytes) = (PoolKind::of(size_bytes), signed(size_bytes));
        let mut own = self.own.lock();
        own.blocks.decrease(kind, 1);
        own.bytes.decrease(kind, bytes);
    }

    fn revived(&self, size_bytes: u64) {
        self.taken(size_bytes);
    }

    fn usage(&self, below: Usage) -> Usage {
        let own = self.own.lock();
        Usage {
            live_blocks: own.blocks.all.current,
            allocated_bytes: own.bytes.all.current,
            allocated_peak_bytes: own.bytes.all.peak,
            ..below
        }
    }

    fn control<A: DeviceAllocator>(watched: &Watched<A, Self>) -> Control<'_> {
        Control { counters: Some(watched), ..watched.below().control() }
    }
}

impl<A: DeviceAllocator> Counters for Watched<A, Count> {
    fn statistics(&self) -> Statistics {
        let below = self.below().control().counters.map(Counters::statistics);
        let own = self.own.lock().clone();
        let num_ooms = below.as_ref().map_or(own.ooms, |below| below.num_ooms);
        let below = below.unwrap_or_default();
        Statistics {
            allocation: own.blocks,
            active: with_waiting(own.blocks, &below.active, &below.allocation),
            allocated_bytes: own.bytes,
            active_bytes: with_waiting(own.bytes, &below.active_bytes, &below.allocated_bytes),
            requested_bytes: own.bytes,
            num_ooms,
            ..below
        }
    }

    fn reset_peaks(&self) {
        self.own.lock().families().into_iter().for_each(PerPool::reset_peaks);
        if let Some(counters) = self.below().control().counters {
            counters.reset_peaks();
        }
    }

    fn reset_accumulated(&self) {
        let mut own = self.own.lock();
        own.families().into_iter().for_each(PerPool::reset_accumulated);
        own.ooms = 0;
        drop(own);
        if let Some(counters) = self.below().control().counters {
            counters.reset_accumulated();
        }
    }
}
