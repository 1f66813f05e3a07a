//! `align:4KiB`: every block starts at a multiple of a power of two.
//!
//! Requests to the allocator below are increased so that the caller's aligned block fits into the block
//! below. The increase is the alignment minus the alignment that the allocator below guarantees. If that
//! guarantee suffices, a configuration string adds no layer for `align`. Some capabilities are absent: see
//! [`Shifted`].

use super::shift::{Block, Placement, Shifted};
use crate::allocator::DeviceAllocator;
use crate::error::{DriverError, DriverErrorKind};

/// See the [module](self).
pub(crate) type Aligned<A> = Shifted<A, Align>;

/// The alignment.
#[derive(Clone, Copy, Debug)]
pub struct Align {
    align_bytes: u64,
    /// The bytes added to each request.
    slack_bytes: u64,
}

/// Returns `inner` with blocks that start at multiples of `align_bytes`. The blocks of `inner` itself
/// start at multiples of `known_bytes` (1 if unknown). Both are rounded up to powers of two, at most
/// 2^62.
pub fn align<A: DeviceAllocator>(inner: A, align_bytes: u64, known_bytes: u64) -> Aligned<A> {
    let power = |bytes: u64| bytes.clamp(1, 1 << 62).next_power_of_two();
    let align_bytes = power(align_bytes);
    let slack_bytes = align_bytes.saturating_sub(power(known_bytes));
    Shifted::new(inner, Align { align_bytes, slack_bytes })
}

impl Placement for Align {
    fn below_bytes(&self, bytes: u64) -> Option<u64> {
        bytes.checked_add(self.slack_bytes)
    }

    fn offset_bytes(&self, below_address: u64) -> u64 {
        below_address.wrapping_neg() & (self.align_bytes - 1)
    }

    /// Refuses a block of `inner` if the caller's bytes would end outside it. Only a block that is not
    /// aligned to `known_bytes` (see [`align`]) can be refused.
    fn placed(&self, block: &Block, below_address: u64) -> Result<(), DriverError> {
        if block.address - below_address <= self.slack_bytes {
            return Ok(());
        }
        let known = self.align_bytes - self.slack_bytes;
        let message = format!("the block at {below_address:#x} is not at a multiple of {known}");
        Err(DriverError::new(DriverErrorKind::InvalidValue, "align", 0, message))
    }
}
