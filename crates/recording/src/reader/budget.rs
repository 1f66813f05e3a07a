//! Limits the memory of a reader in proportion to the bytes decoded so far.
//!
//! All parts of a reader together may hold [`MEMORY_FACTOR`] times the decoded bytes. A decompressor's
//! window takes at most twice its output, and three times while the window grows, which is half of the
//! factor. The values of the file ([`Heap`](super::heap::Heap)) get the other half.

use super::MEMORY_FACTOR;

/// The bytes that a reader may hold even for the smallest file.
const FREE_BYTES: u64 = 256 * 1024;
/// The part of [`MEMORY_FACTOR`] that `Heap` may use while a decompressor exists.
const HEAP_FACTOR: u64 = MEMORY_FACTOR / 2;

/// An error: the reader would hold more memory than the decoded bytes allow.
#[derive(Debug, thiserror::Error)]
#[error("needs more than {MEMORY_FACTOR} times the decoded bytes of memory")]
pub(super) struct OverBudget;

/// Counts the bytes held and refuses to exceed the limit.
#[derive(Debug)]
pub(super) struct Budget {
    held_bytes: u64,
    allowed_bytes: u64,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self { held_bytes: 0, allowed_bytes: FREE_BYTES }
    }

    /// Updates the limit for the bytes decoded so far, while the decompressor exists.
    pub(super) fn decoded(&mut self, decoded_bytes: u64) {
        self.allowed_bytes = decoded_bytes * HEAP_FACTOR + FREE_BYTES;
    }

    /// Sets the final limit, after the decompressor was dropped.
    pub(super) fn decoded_and_dropped(&mut self, decoded_bytes: u64) {
        self.allowed_bytes = decoded_bytes * MEMORY_FACTOR + FREE_BYTES;
    }

    /// Adds `bytes` to the bytes held, or fails if that exceeds the limit.
    pub(super) fn charge(&mut self, bytes: u64) -> Result<(), OverBudget> {
        let held = self.held_bytes.saturating_add(bytes);
        if held > self.allowed_bytes {
            return Err(OverBudget);
        }
        self.held_bytes = held;
        Ok(())
    }

    /// Returns the bytes held.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Subtracts `bytes` that were freed from the bytes held.
    pub(super) fn release(&mut self, bytes: u64) {
        self.held_bytes -= bytes;
    }

    /// Returns an empty vector with capacity for exactly `len` items.
    pub(super) fn vec_of<T>(&mut self, len: usize) -> Result<Vec<T>, OverBudget> {
        self.charge((len as u64).saturating_mul(size_of::<T>() as u64))?;
        let mut vec = Vec::new();
        vec.try_reserve_exact(len).map_err(|_| OverBudget)?;
        Ok(vec)
    }

    /// Makes room for `extra` more items. If the vector must be moved, its old and its new memory are both
    /// counted until it has been moved.
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
        // Grow by half. If that exceeds the limit, grow by an eighth.
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
