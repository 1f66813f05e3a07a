//! Calls that must be refused for the right reason and must change nothing.

use stratalloc::size::EIB;

use super::runner::{Outcome, Runner, Stale};
use crate::common::prelude::*;

impl<M: Machine> Runner<'_, M> {
    /// Makes calls of every kind that must be refused. `pick` selects the handle from which forged ones are
    /// made.
    pub(crate) fn misuse(&self, pick: u16) -> Result<Outcome, String> {
        let stream = self.stream(pick.to_le_bytes()[0]);
        for bytes in [0, EIB + 1, 1 << 63, u64::MAX - 511, u64::MAX] {
            let result = self.strategy.try_allocate(bytes, stream);
            let refused = match &result {
                Err(AllocError::ZeroBytes) => bytes == 0,
                Err(AllocError::TooLarge { requested_bytes }) => *requested_bytes == bytes,
                _ => false,
            };
            ensure!(refused, "{bytes} bytes: {result:?}");
        }
        let owner_id = self.engine().owner();
        for &stale in &self.stale {
            self.refuses(stale, owner_id)?;
        }
        let real = self.some_handle(pick);
        self.refuses(real, self.stranger)?;
        let Token([slot, generation, heap]) = real.token;
        for token in [
            [slot, generation, heap.wrapping_add(1)],
            [slot, generation, u32::MAX],
            [u32::MAX, u32::MAX, u32::MAX - 1],
            [slot.wrapping_add(1), generation, heap],
            [u32::MAX, generation, heap],
            [u32::MAX - 1, generation, heap],
            [1 << 20, generation, heap],
            [slot, generation.wrapping_add(1), heap],
            [slot, generation.wrapping_sub(1), heap],
            [slot, generation ^ 1 << 31, heap],
        ] {
            self.refuses(Stale { token: Token(token), ..real }, owner_id)?;
        }
        for address in [0, real.address + 512, real.address - 512, u64::MAX] {
            self.refuses(Stale { address, ..real }, owner_id)?;
        }
        for address in self.unknown_addresses(pick) {
            let unknown = || HandleError::UnknownAddress { address };
            let recorded = self.strategy.record_stream_raw(address, stream);
            ensure_eq!(self.strategy.free_raw(address), Err(unknown()), "bare address");
            ensure_eq!(recorded, Err(unknown()), "bare address");
        }
        let limit = self.caching().limit_bytes();
        for fraction in [-0.1, 1.000_000_1, 2.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let result = self.caching().set_memory_fraction(fraction);
            let is_named = result == Err(FractionError { fraction });
            ensure!(is_named || result.is_err() && fraction.is_nan(), "{fraction}: {result:?}");
        }
        ensure_eq!(self.caching().limit_bytes(), limit, "limit");
        Ok(Outcome::Refused)
    }

    /// Checks that recording a use and a free are refused for the same reason, and that the handle is
    /// returned unchanged.
    fn refuses(&self, like: Stale, owner: OwnerId) -> Checked {
        let handle = || Allocation::new(like.address, like.bytes, owner, like.token);
        let owner_id = self.engine().owner();
        let reason = match owner == owner_id {
            true => HandleError::Stale { address: like.address },
            false => HandleError::Foreign { owner, called: owner_id },
        };
        let recorded = self.cross_stream().record_stream(&handle(), StreamId(7));
        ensure_eq!(recorded, Err(reason.clone()), "a use of {like:?}");
        let Err(refused) = self.strategy.free(handle()) else {
            return Err(format!("{like:?} was freed"));
        };
        ensure_eq!(refused.reason, reason, "a free of {like:?}");
        ensure_eq!(refused.allocation, handle(), "the handle comes back");
        Ok(())
    }

    /// Returns a copy of a live handle, or a made-up one if no handle is live.
    fn some_handle(&self, pick: u16) -> Stale {
        let handles: Vec<&Allocation> =
            self.held.iter().filter_map(|block| block.allocation.as_ref()).collect();
        match handles.len() {
            0 => Stale { address: 512, bytes: 1, token: Token([0, 7, 0]) },
            count => {
                let like = handles[usize::from(pick) % count];
                Stale { address: like.address(), bytes: like.size_bytes(), token: like.token() }
            }
        }
    }

    /// Returns addresses at which no live block begins: inside blocks, in free blocks, beyond every
    /// segment. Includes addresses of live blocks if the allocator does not support frees by address.
    fn unknown_addresses(&self, pick: u16) -> Vec<u64> {
        let layout = self.caching().layout();
        let live = |address: u64| self.held.iter().any(|block| block.address == address);
        let mut addresses = vec![0, 1, u64::MAX - 511, u64::MAX, u64::from(pick) * MIB];
        for segment in &layout {
            addresses.push(segment.address + segment.size_bytes);
            addresses.push(segment.address - 1);
            addresses.extend(segment.blocks.iter().flat_map(|b| [b.address, b.address + 1]));
        }
        addresses.retain(|address| !live(*address) || self.raw().is_none());
        addresses
    }
}
