//! Limits the memory of a reader in proportion to the bytes decoded so far.
//!
//! Together, all parts of a reader may hold [`MEMORY_FACTOR`] times the decoded bytes. A decompressor's
//! window takes at most twice the output, three times while it grows; the heap of values gets the other
//! half.

use super::MEMORY_FACTOR;

/// Bytes that may be held even for the smallest file.
const FREE_BYTES: u64 = 256 * 1024;
/// The share of the heap while a decompressor is in use.
const HEAP_FACTOR: u64 = MEMORY_FACTOR / 2;

/// The reader would hold more than the decoded bytes allow.
#[derive(Debug, thiserror::Error)]
#[error("needs more than {MEMORY_FACTOR} times the decoded bytes of memory")]
pub(super) struct OverBudget;

/// Counts the bytes held and refuses more than allowed.
#[derive(Debug)]
pub(super) struct Budget {
    held_bytes: u64,
    allowed_bytes: u64,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self { held_bytes: 0, allowed_bytes: FREE_BYTES }
    }

    /// Sets the limit while a decompressor is in use.
    pub(super) fn decoded(&mut self, decoded_bytes: u64) {
        self.allowed_bytes = decoded_bytes * HEAP_FACTOR + FREE_BYTES;
    }

    /// Sets the limit after the decompressor has been dropped.
    pub(super) fn decoded_and_dropped(&mut self, decoded_bytes: u64) {
        self.allowed_bytes = decoded_bytes * MEMORY_FACTOR + FREE_BYTES;
    }

    /// Adds `bytes` to the bytes held.
    pub(super) fn charge(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let held = self.held_bytes.saturating_add(bytes);
        if held > self.allowed_bytes {
            return Err(OverBudget);
        }
        self.held_bytes = held;
        Ok(())
    }

    /// Returns an empty vector with capacity for exactly `len` items.
    pub(super) fn vec_of<T>(&mut self, len: usize) -> Result<Vec<T>, OverBudget> {
        self.charge((len as u64).saturating_mul(size_of::<T>() as u64))?;
        let mut vec = Vec::new();
        vec.try_reserve_exact(len).map_err(|_| OverBudget)?;
        Ok(vec)
    }

    /// Makes room for `extra` more items. Both the old and the new memory count while a vector is moved.
    #[inline]
    pub(super) fn reserve<T>(&mut self, vec: &mut Vec<T>, extra: usize) -> Result<(), OverBudget> {
        if vec.capacity() - vec.len() >= extra {
            return Ok(());
        }
        self.grow(vec, extra)
    }

    #[cold]
    fn grow<T>(&mut self, vec: &mut Vec<T>, extra: usize) -> Result<(), OverBudget> {
        let size = size_of::<T>() as u64;
        let old = vec.capacity();
        let needed = vec.len().saturating_add(extra).max(64);
        // Grow by half, or by an eighth near the limit.
        let mut new = needed.max(old + old / 2);
        if self.charge((new as u64).saturating_mul(size)).is_err() {
            new = needed.max(old + old / 8);
            self.charge((new as u64).saturating_mul(size))?;
        }
        vec.try_reserve_exact(new - vec.len()).map_err(|_| OverBudget)?;
        self.held_bytes -= old as u64 * size;
        Ok(())
    }
}
