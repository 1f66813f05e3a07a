//! Address ranges, and the bytes of the device that are in use.
//!
//! `AddressSpace` assigns ranges in a fixed order, so that equal calls return equal addresses. If the device
//! has memory, that memory's addresses are used instead. `Budget` counts the bytes in use exactly.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::backing::Backing;
use super::{AddressOrder, Done, GRANULARITY_BYTES, ensure, invalid, out_of_memory};
use crate::free_ranges::FreeRanges;
use stratalloc::size::align_up;

/// Bytes of the device that are in use, and its total.
#[derive(Debug)]
pub(super) struct Budget {
    pub(super) used_bytes: u64,
    pub(super) peak_used_bytes: u64,
    pub(super) total_bytes: u64,
}

impl Budget {
    pub(super) fn free_bytes(&self) -> u64 {
        self.total_bytes - self.used_bytes
    }

    /// Checks that so many bytes are free.
    pub(super) fn check(&self, size_bytes: u64) -> Done<()> {
        let (free, total) = (self.free_bytes(), self.total_bytes);
        let fits = size_bytes <= free;
        ensure!(fits, out_of_memory: "{size_bytes} bytes requested, {free} of {total} bytes free");
        Ok(())
    }

    /// Counts bytes as used that a [`check`](Self::check) found free.
    pub(super) fn take(&mut self, size_bytes: u64) {
        debug_assert!(size_bytes <= self.free_bytes());
        self.used_bytes += size_bytes;
        self.peak_used_bytes = self.peak_used_bytes.max(self.used_bytes);
    }

    pub(super) fn give(&mut self, size_bytes: u64) {
        self.used_bytes =
            self.used_bytes.checked_sub(size_bytes).expect("only taken bytes are returned");
    }
}

/// Assigns address ranges in multiples of 2 MiB: first fit, or each address once only.
#[derive(Debug)]
pub(super) struct AddressSpace {
    order: AddressOrder,
    /// Addresses from `next` to `end` were never assigned, or are free again.
    next: u64,
    end: u64,
    /// Free ranges below `next`.
    holes: FreeRanges,
    /// Start and size of assigned ranges. The size is the requested one, not rounded.
    live: BTreeMap<u64, u64>,
    /// Chooses the addresses instead, if the device has memory.
    backing: Option<Arc<dyn Backing>>,
    /// Whether assigned ranges are memory at once, or addresses to map pieces at.
    open: bool,
}

impl AddressSpace {
    pub(super) fn new(
        bounds: Range<u64>,
        order: AddressOrder,
        backing: Option<Arc<dyn Backing>>,
        open: bool,
    ) -> Self {
        let Range { start: next, end } = bounds;
        debug_assert!(next.is_multiple_of(GRANULARITY_BYTES) && next < end);
        let (holes, live) = (FreeRanges::default(), BTreeMap::new());
        Self { order, next, end, holes, live, backing, open }
    }

    /// Assigns a range and returns its address. With `AddressOrder::Lowest`, that is the lowest free range
    /// that fits. With `Rising` or `Falling`, it is above or below all earlier ones. If there is a
    /// backing, it chooses the address instead.
    pub(super) fn take(&mut self, size_bytes: u64) -> Done<u64> {
        ensure!(size_bytes > 0, "0 bytes requested");
        if let Some(backing) = &self.backing {
            let address = backing.take(size_bytes, self.open)?;
            self.live.insert(address, size_bytes);
            return Ok(address);
        }
        let short = |left: u64| {
            let message = format!("{size_bytes} bytes requested, {left} bytes of addresses left");
            out_of_memory(message)
        };
        let left = self.end - self.next;
        if size_bytes > self.end {
            return Err(short(left));
        }
        let span = align_up(size_bytes, GRANULARITY_BYTES);
        let address = match self.holes.take(span) {
            Some(start) => start,
            None if span <= left && self.order == AddressOrder::Falling => {
                self.end -= span;
                self.end
            }
            None if span <= left => {
                self.next += span;
                self.next - span
            }
            None => return Err(short(left)),
        };
        self.live.insert(address, size_bytes);
        Ok(address)
    }

    /// Frees a range, which must be assigned at exactly this address and size.
    pub(super) fn give(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        self.check_exact(address, size_bytes)?;
        self.live.remove(&address);
        if let Some(backing) = &self.backing {
            backing.give(address, size_bytes);
            return Ok(());
        }
        if self.order != AddressOrder::Lowest {
            return Ok(());
        }
        let (start, end) = self.holes.give(address, align_up(size_bytes, GRANULARITY_BYTES));
        if end == self.next {
            self.holes.remove(start);
            self.next = start;
        }
        Ok(())
    }

    /// Frees a part of a range: a multiple of 2 MiB, of a range whose size is a multiple of 2 MiB. The
    /// parts before and after it stay assigned.
    pub(super) fn give_part(&mut self, address: u64, size_bytes: u64) {
        let below = self.live.range(..=address).next_back();
        let (&start, &held_bytes) = below.expect("a part of a taken range");
        let (part_end, end) = (address + size_bytes, start + held_bytes);
        debug_assert!(part_end <= end && size_bytes.is_multiple_of(GRANULARITY_BYTES));
        self.live.remove(&start);
        for (from, to) in [(start, address), (address, part_end), (part_end, end)] {
            if from < to {
                self.live.insert(from, to - from);
            }
        }
        self.give(address, size_bytes).expect("it was just taken");
    }

    /// Checks that a range is assigned at exactly this address and size.
    pub(super) fn check_exact(&self, address: u64, size_bytes: u64) -> Done<()> {
        match self.live.get(&address) {
            Some(&held) if held == size_bytes => Ok(()),
            Some(held) => {
                Err(invalid(format!("{address:#x} holds {held} bytes, not {size_bytes}")))
            }
            None => Err(invalid(format!("nothing starts at {address:#x}"))),
        }
    }

    /// Returns whether one assigned range contains all of these bytes.
    pub(super) fn holds(&self, address: u64, size_bytes: u64) -> bool {
        let below = self.live.range(..=address).next_back();
        below.is_some_and(|(start, len)| {
            let end = address.checked_add(size_bytes);
            end.is_some_and(|end| end <= start + len)
        })
    }

    /// Returns start and size of all assigned ranges, by address.
    pub(super) fn live(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.live.iter().map(|(start, len)| (*start, *len))
    }
}
