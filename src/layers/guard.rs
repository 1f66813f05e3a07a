//! `guard`: adds guard bytes before and behind each block, to find writes past a block. Only for devices in
//! host memory.
//!
//! A block has 512 guard bytes on each side. The second guard begins directly behind the requested
//! bytes. Fresh memory is filled with 0xCB and freed memory with 0xDD, in stream order, so that reads
//! of uninitialised or freed memory are noticed. A request **waits** for the block's stream, because
//! the caller may write to host memory at once. A free waits for that stream and for all streams
//! announced with `record_stream`, then checks the guards.
//!
//! Damage is reported to a callback, and the block is freed all the same. Layers from the configuration
//! string report to the standard error stream. If the allocator below refuses the free, the block stays
//! with its caller, filled with 0xDD. Private pools and sharing are absent, see [`Shifted`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::shift::{Block, Placement, Shifted};
use crate::allocator::DeviceAllocator;
use crate::driver::{Driver, unless_captured};
use crate::error::DriverError;
use crate::ids::StreamId;

/// See the [module](self).
pub type Guarded<A> = Shifted<A, Guard>;

/// Guard bytes on each side. A multiple of 512, so blocks keep an alignment of up to 512 bytes.
pub(crate) const GUARD_BYTES: u64 = GUARD_LEN as u64;
const GUARD_LEN: usize = 512;
/// The byte that guards are filled with.
pub(crate) const GUARD: u8 = 0xA5;
/// The byte that fresh memory is filled with.
pub(crate) const FRESH: u8 = 0xCB;
/// The byte that freed memory is filled with.
pub(crate) const FREED: u8 = 0xDD;

/// A side of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Before its first byte.
    Before,
    /// Behind its last byte.
    Behind,
}

/// The damage that a free found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Guard bytes were overwritten.
    Overwritten {
        /// The block.
        block: Block,
        /// The side of the damaged guard.
        side: Side,
        /// The distance of the nearest overwritten byte from the block. 1 is the byte just before the
        /// block. Behind the block, 0 is the byte just after it.
        nearest_bytes: u64,
        /// The number of bytes that differ.
        count: u64,
        /// The address of the first overwritten byte.
        address: u64,
        /// The value of the byte at `address`.
        found: u8,
    },
    /// The guards could not be checked, because a call of the driver failed.
    Unread {
        /// The block.
        block: Block,
        /// The error.
        error: DriverError,
    },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overwritten { block, side, nearest_bytes, count, address, found } => {
                let Block { address: start, size_bytes, stream } = block;
                let side = match side {
                    Side::Before => "before it",
                    Side::Behind => "behind it",
                };
                write!(
                    f,
                    "the block of {size_bytes} bytes at {start:#x} on stream {stream} was written \
                     past: {count} guard bytes {side} differ, the nearest {nearest_bytes} bytes away, \
                     the first at {address:#x} ({found:#04x} for {GUARD:#04x})"
                )
            }
            Self::Unread { block, error } => {
                write!(f, "the guards of the block at {:#x} cannot be read: {error}", block.address)
            }
        }
    }
}

/// Called with the damage, with no lock held.
pub type DamageReporter = Box<dyn Fn(&Damage) + Send + Sync>;

/// Writes and checks guards.
pub struct Guard {
    driver: Arc<dyn Driver>,
    report: DamageReporter,
    damaged: AtomicU64,
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("damaged", &self.damaged).finish_non_exhaustive()
    }
}

/// Returns `inner` with guards, which reports damage to `report`. The blocks of `inner` must be memory
/// of `driver` that host code can copy to and from at any time.
pub fn guard_to<A: DeviceAllocator>(
    inner: A,
    driver: Arc<dyn Driver>,
    report: DamageReporter,
) -> Guarded<A> {
    let damaged = AtomicU64::new(0);
    Shifted::new(inner, Guard { driver, report, damaged })
}

/// As [`guard_to`], with damage written to the standard error stream.
pub fn guard<A: DeviceAllocator>(inner: A, driver: Arc<dyn Driver>) -> Guarded<A> {
    guard_to(inner, driver, Box::new(|damage| super::write_stderr(damage)))
}

impl<A: DeviceAllocator> Shifted<A, Guard> {
    /// Returns how often damage was reported. Never waits.
    pub fn damaged(&self) -> u64 {
        self.place().damaged.load(Ordering::Relaxed)
    }
}

impl Guard {
    fn report_damage(&self, damage: &Damage) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        (self.report)(damage);
    }

    /// Returns the damage of the guard at `start`, if any.
    fn damage_of(
        &self,
        block: &Block,
        side: Side,
        start: u64,
        on: StreamId,
    ) -> Result<Option<Damage>, DriverError> {
        let mut bytes = [0; GUARD_LEN];
        self.driver.copy_to_host(&mut bytes, start, on)?;
        let changed = (0..).zip(bytes).filter(|(_, byte)| *byte != GUARD);
        let changed: Vec<(u64, u8)> = changed.collect();
        let (Some(first), Some(last)) = (changed.first(), changed.last()) else {
            return Ok(None);
        };
        let nearest_bytes = match side {
            Side::Before => GUARD_BYTES - last.0,
            Side::Behind => first.0,
        };
        Ok(Some(Damage::Overwritten {
            block: *block,
            side,
            nearest_bytes,
            count: changed.len() as u64,
            address: start + first.0,
            found: first.1,
        }))
    }

    fn check(&self, block: &Block, below: u64, used_by: &[StreamId]) -> Result<(), DriverError> {
        let wait = |stream: &StreamId| self.driver.synchronize_stream(*stream);
        // A wait fails if its stream was destroyed before the block was freed. The stream's work may still
        // be running, so wait for the whole device.
        let own_is_destroyed = wait(&block.stream).is_err();
        if own_is_destroyed || used_by.iter().any(|stream| wait(stream).is_err()) {
            self.driver.synchronize_device()?;
        }
        let on = if own_is_destroyed { StreamId::DEFAULT } else { block.stream };
        let end = block.address + block.size_bytes;
        for (side, start) in [(Side::Before, below), (Side::Behind, end)] {
            if let Some(damage) = self.damage_of(block, side, start, on)? {
                self.report_damage(&damage);
            }
        }
        self.driver.fill(block.address, FREED, block.size_bytes, on)?;
        if own_is_destroyed { wait(&on) } else { Ok(()) }
    }
}

impl Placement for Guard {
    fn below_bytes(&self, bytes: u64) -> Option<u64> {
        bytes.checked_add(2 * GUARD_BYTES)
    }

    fn offset_bytes(&self, _: u64) -> u64 {
        GUARD_BYTES
    }

    fn placed(&self, block: &Block, below: u64) -> Result<(), DriverError> {
        let Block { address, size_bytes, stream } = *block;
        self.driver.fill(below, GUARD, GUARD_BYTES, stream)?;
        self.driver.fill(address, FRESH, size_bytes, stream)?;
        self.driver.fill(address + size_bytes, GUARD, GUARD_BYTES, stream)?;
        // During a capture no work runs now: only the graph writes to the block, when it is launched.
        unless_captured(self.driver.synchronize_stream(stream))
    }

    fn freeing(&self, block: &Block, below: u64, used_by: &[StreamId]) {
        if let Err(error) = self.check(block, below, used_by) {
            self.report_damage(&Damage::Unread { block: *block, error });
        }
    }
}
