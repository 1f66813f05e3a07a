//! Counts the bytes of the device that are in use.
//!
//! Everything that uses memory keeps a [`Hold`], which returns its bytes when it is dropped. So bytes
//! count exactly as long as the mapping or the physical piece lives, including its use by queued work.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::errors::short;
use crate::refusal::Done;

/// The bytes of one device.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) total_bytes: u64,
    taken_bytes: AtomicU64,
}

/// Bytes that count as used until this is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(total_bytes: u64) -> Arc<Self> {
        Arc::new(Self { total_bytes, taken_bytes: AtomicU64::new(0) })
    }

    pub(super) fn taken_bytes(&self) -> u64 {
        self.taken_bytes.load(Ordering::Relaxed)
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.total_bytes - self.taken_bytes()
    }

    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Done<Hold> {
        let more = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= self.total_bytes);
        match self.taken_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Hold { budget: Arc::clone(self), bytes }),
            Err(taken) => Err(short(bytes, self.total_bytes - taken)),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.budget.taken_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
