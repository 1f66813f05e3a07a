//! Calls that must be refused, each with its reason, and must change nothing.

use stratalloc::ids::OwnerId;
use stratalloc::size::EIB;

use super::ops::Bad;
use super::runner::{Outcome, Runner, Stale};
use crate::common::prelude::*;
use crate::common::{ensure, ensure_eq};

impl<M: Machine> Runner<'_, M> {
    pub(crate) fn misuse(&self, what: Bad, pick: u16) -> Result<Outcome, String> {
        let stream = self.stream(pick.to_le_bytes()[0]);
        match what {
            Bad::ZeroBytes => {
                let told = self.strategy.ask(0, stream);
                ensure!(matches!(told, Err(AllocError::ZeroBytes)), "{told:?}");
            }
            Bad::TooLarge => {
                let bytes = [EIB + 1, u64::MAX, u64::MAX - 511][usize::from(pick) % 3];
                let told = self.strategy.ask(bytes, stream);
                let refused = matches!(told, Err(AllocError::TooLarge { requested_bytes })
                    if requested_bytes == bytes);
                ensure!(refused, "{told:?}");
            }
            Bad::FreeTwice => {
                if let Some(stale) = self.old_handle(pick) {
                    let reason = HandleError::Stale { address: stale.address };
                    self.refuses_free(stale, self.engine().owner(), &reason)?;
                }
            }
            Bad::RecordAfterFree => {
                if let Some(stale) = self.old_handle(pick) {
                    let handle = handle(stale, self.engine().owner());
                    let told = self.cross_stream().record_stream(&handle, stream);
                    let reason = HandleError::Stale { address: stale.address };
                    ensure_eq!(told, Err(reason), "record after free");
                }
            }
            Bad::FreeForeign => {
                let like = self.some_handle(pick);
                let (owner, asked) = (self.stranger, self.engine().owner());
                self.refuses_free(like, owner, &HandleError::Foreign { owner, asked })?;
            }
            Bad::RecordForeign => {
                let (owner, asked) = (self.stranger, self.engine().owner());
                let handle = handle(self.some_handle(pick), owner);
                let told = self.cross_stream().record_stream(&handle, stream);
                ensure_eq!(told, Err(HandleError::Foreign { owner, asked }), "foreign record");
            }
            Bad::FreeMadeUpToken => {
                let mut made_up = self.some_handle(pick);
                let Token(parts) = &mut made_up.token;
                match pick % 4 {
                    0 => parts[0] = u32::MAX,
                    1 => parts[1] = u32::MAX,
                    2 => parts[2] ^= 1 << 31,
                    _ => made_up.address += 512,
                }
                let reason = HandleError::Stale { address: made_up.address };
                self.refuses_free(made_up, self.engine().owner(), &reason)?;
            }
            Bad::FreeUnknownAddress | Bad::RecordUnknownAddress => {
                let Some(raw) = self.raw() else {
                    return Ok(Outcome::Refused);
                };
                for address in self.addresses_of_nobody(pick) {
                    let told = match what {
                        Bad::FreeUnknownAddress => raw.free_raw(address).map(drop),
                        _ => raw.record_stream_raw(address, stream),
                    };
                    ensure_eq!(told, Err(HandleError::UnknownAddress { address }), "bare address");
                }
            }
            Bad::FractionOutOfRange => {
                for fraction in [-0.1, 1.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                    let limit = self.caching().limit_bytes();
                    let told = self.caching().set_memory_fraction(fraction);
                    ensure!(told.is_err(), "{fraction} is no fraction");
                    ensure_eq!(self.caching().limit_bytes(), limit, "limit");
                }
            }
        }
        Ok(Outcome::Refused)
    }

    fn refuses_free(&self, like: Stale, owner: OwnerId, reason: &HandleError) -> Checked {
        match self.strategy.free(handle(like, owner)) {
            Ok(()) => Err(format!("{like:?} was freed")),
            Err(error) => {
                ensure_eq!(error.reason, *reason, "reason");
                ensure_eq!(error.allocation, handle(like, owner), "the handle comes back");
                Ok(())
            }
        }
    }

    fn old_handle(&self, pick: u16) -> Option<Stale> {
        let count = self.stale.len();
        (count > 0).then(|| self.stale[usize::from(pick) % count])
    }

    /// A copy of a live handle, or one of nothing.
    fn some_handle(&self, pick: u16) -> Stale {
        let handles: Vec<&Allocation> =
            self.held.iter().filter_map(|block| block.allocation.as_ref()).collect();
        match handles.len() {
            0 => Stale { address: 512, bytes: 1, token: Token([0, 0, 7]) },
            count => {
                let like = handles[usize::from(pick) % count];
                Stale { address: like.address(), bytes: like.size_bytes(), token: like.token() }
            }
        }
    }

    /// Addresses at which no live block begins: inside blocks, free blocks, past every segment.
    fn addresses_of_nobody(&self, pick: u16) -> Vec<u64> {
        let layout = self.caching().layout();
        let live = |address: u64| self.held.iter().any(|block| block.address == address);
        let mut addresses = vec![0, 1, u64::MAX, u64::from(pick) * MIB];
        for segment in &layout {
            addresses.push(segment.address + segment.size_bytes);
            addresses.push(segment.address - 1);
            addresses.extend(segment.blocks.iter().flat_map(|b| [b.address, b.address + 1]));
        }
        addresses.retain(|address| !live(*address));
        addresses
    }
}

fn handle(like: Stale, owner: OwnerId) -> Allocation {
    Allocation::new(like.address, like.bytes, owner, like.token)
}
