//! Creating an [`Allocation`] that its next copy need not wait for.
//!
//! Programs copy an allocation in two halves of 16 bytes, mostly right after it was returned. A processor
//! serves such a load from a pending store only if this one store wrote all 16 bytes. Otherwise the load
//! waits until the stores have reached the cache: 10 of 72 ns for a pair of 512 B on AMD Zen 1, 8 of 59 on
//! an Intel Xeon. So this module builds each half as a vector, which the compiler writes with one store. On
//! other architectures than x86-64 it only calls [`Allocation::new`].

use super::{Allocation, Token};
use crate::ids::OwnerId;

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Allocation, address) == 0 && offset_of!(Allocation, size_bytes) == 8);
    assert!(offset_of!(Allocation, token) == 16 && offset_of!(Allocation, owner) == 28);
};

impl Allocation {
    /// As [`new`](Self::new), with one store for each half.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    #[expect(unsafe_code, reason = "two halves become an allocation")]
    pub(crate) fn in_halves(address: u64, size_bytes: u64, owner: OwnerId, token: Token) -> Self {
        use std::arch::x86_64::{__m128i, _mm_set_epi64x};
        let half = |low: u64, high: u64| {
            // SAFETY: every processor of this architecture has SSE2.
            unsafe { _mm_set_epi64x(high.cast_signed(), low.cast_signed()) }
        };
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let Token([first, second, third]) = token;
        let place = half(address, size_bytes);
        let id = half(pair(first, second), pair(third, owner.number()));
        // SAFETY: both types have 32 bytes without padding, and every value of these bytes is valid. The
        // assertion above fixes where the fields lie, and the lower number of a half lies first.
        unsafe { std::mem::transmute::<[__m128i; 2], Self>([place, id]) }
    }

    /// As [`new`](Self::new).
    #[cfg(not(target_arch = "x86_64"))]
    #[inline(always)]
    pub(crate) fn in_halves(address: u64, size_bytes: u64, owner: OwnerId, token: Token) -> Self {
        Self::new(address, size_bytes, owner, token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_made_of_halves_equals_one_made_of_fields() {
        let owner = OwnerId::next();
        for (address, size_bytes) in [(0x7f00_1234_5600, 1), (u64::MAX, u64::MAX - 1), (1, 1 << 63)]
        {
            let token = Token([1, u32::MAX, 0x8000_0002]);
            let made = Allocation::in_halves(address, size_bytes, owner, token);
            assert_eq!(made, Allocation::new(address, size_bytes, owner, token));
            assert_eq!((made.address(), made.size_bytes()), (address, size_bytes));
            assert_eq!((made.token(), made.owner()), (token, owner));
        }
    }
}
