//! `statistics`: counts what callers hold, for an allocator that counts nothing or counts otherwise.
//!
//! Blocks and bytes are those that callers asked for, exact at every moment at which no call overlaps
//! (one lock). What only the allocator below can know (segments, reserved bytes, splits, hits) is
//! taken from its counters where it has any and is zero otherwise. Active is what callers hold and what
//! waits for other streams below; its peak is at least that of what callers hold. Over a `front`, whose
//! idle blocks are allocated for the strategy below, this tells what callers really hold.

use parking_lot::Mutex;

use super::layered::{Layer, Layered, checkpoints_of, raw_of};
use crate::allocator::{Allocation, Counters, DeviceAllocator, PoolCheckpoint, Request, Restored};
use crate::error::{AllocError, FreeError, HandleError, PoolError};
use crate::size::PoolKind;
use crate::stats::{Counter, PerPool, Statistics, Usage};

/// See the [module](self).
pub type Counted<A> = Layered<Count<A>>;

/// An allocator, and the counters of this layer.
#[derive(Debug)]
pub struct Count<A> {
    inner: A,
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
    Layered::new(Count { inner, own: Mutex::default() })
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

impl<A: DeviceAllocator> Count<A> {
    fn taken(&self, size_bytes: u64) {
        let (kind, bytes) = (PoolKind::of(size_bytes), signed(size_bytes));
        let mut own = self.own.lock();
        own.blocks.increase(kind, 1);
        own.bytes.increase(kind, bytes);
    }

    fn freed(&self, size_bytes: u64) {
        let (kind, bytes) = (PoolKind::of(size_bytes), signed(size_bytes));
        let mut own = self.own.lock();
        own.blocks.decrease(kind, 1);
        own.bytes.decrease(kind, bytes);
    }
}

impl<A: DeviceAllocator> Layer for Count<A> {
    type Inner = A;

    #[inline]
    fn inner(&self) -> &A {
        &self.inner
    }

    #[inline]
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        let answer = self.inner.allocate(request);
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
    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        let size_bytes = allocation.size_bytes();
        let answer = self.inner.free(allocation);
        if answer.is_ok() {
            self.freed(size_bytes);
        }
        answer
    }

    #[inline]
    fn free_raw(&self, address: u64) -> Result<u64, HandleError> {
        raw_of(&self.inner).free_raw(address).inspect(|size_bytes| self.freed(*size_bytes))
    }

    fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored, PoolError> {
        let restored = checkpoints_of(&self.inner).restore(checkpoint)?;
        restored.freed.iter().for_each(|freed| self.freed(freed.size_bytes));
        restored.live.iter().for_each(|live| self.taken(live.size_bytes()));
        Ok(restored)
    }

    fn counts(&self) -> bool {
        true
    }

    fn statistics(&self) -> Statistics {
        let below = self.inner.counters().map(Counters::statistics);
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

    fn usage(&self) -> Usage {
        let below = self.inner.counters().map(Counters::usage).unwrap_or_default();
        let (blocks, bytes) = {
            let own = self.own.lock();
            (own.blocks.all, own.bytes.all)
        };
        Usage {
            live_blocks: blocks.current,
            allocated_bytes: bytes.current,
            allocated_peak_bytes: bytes.peak,
            ..below
        }
    }

    fn reset_peaks(&self) {
        self.own.lock().families().into_iter().for_each(PerPool::reset_peaks);
        if let Some(counters) = self.inner.counters() {
            counters.reset_peaks();
        }
    }

    fn reset_accumulated(&self) {
        let mut own = self.own.lock();
        own.families().into_iter().for_each(PerPool::reset_accumulated);
        own.ooms = 0;
        drop(own);
        if let Some(counters) = self.inner.counters() {
            counters.reset_accumulated();
        }
    }
}
