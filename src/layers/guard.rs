//! `guard`: bytes before and behind each block that nobody may write; on memory of the host only.
//!
//! A block has 512 guard bytes on each side, the second beginning at the very byte behind what was asked
//! for. Fresh memory is filled with 0xCB and freed memory with 0xDD, in stream order, so that bytes that were
//! never written, or are read after the free, are seen. A request **waits** for the block's stream, because
//! who has memory of the host may write to it at once. A free waits for that stream and
//! for all streams whose use was announced, then looks at the guards. Damage is told to a callback (from
//! the string: the standard error stream) and the block is freed all the same. If the allocator below refuses
//! the free, the block comes back to its holder with the bytes of freed memory in it. For private pools and
//! sharing see [`Shifted`]: they are absent.

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

/// Guard bytes on each side: a multiple of what allocators align to.
pub(crate) const GUARD_BYTES: u64 = GUARD_LEN as u64;
const GUARD_LEN: usize = 512;
/// What guards are filled with.
pub(crate) const GUARD: u8 = 0xA5;
/// What fresh memory is filled with.
pub(crate) const FRESH: u8 = 0xCB;
/// What freed memory is filled with.
pub(crate) const FREED: u8 = 0xDD;

/// On which side of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Before its first byte.
    Before,
    /// Behind its last.
    Behind,
}

/// What was found at a free.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// Guard bytes were overwritten.
    Overwritten {
        /// The block.
        block: Block,
        /// Which of its guards.
        side: Side,
        /// Where the first overwritten byte lies: so far before the block's start, or behind its end (0 is
        /// the very next byte).
        nearest_bytes: u64,
        /// How many bytes differ.
        count: u64,
        /// The first overwritten byte's address.
        address: u64,
        /// What stands there now.
        found: u8,
    },
    /// The device did not let the guards be read.
    Unread {
        /// The block.
        block: Block,
        /// Why.
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

/// Told of damage, with no lock held.
pub type DamageReporter = Box<dyn Fn(&Damage) + Send + Sync>;

/// Writes and reads guards.
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

/// `inner`, whose blocks are memory of `driver` that host bytes can be copied to and from at any time, with
/// guards; damage is told to `report`.
pub fn guard_to<A: DeviceAllocator>(
    inner: A,
    driver: Arc<dyn Driver>,
    report: DamageReporter,
) -> Guarded<A> {
    let damaged = AtomicU64::new(0);
    Shifted::new(inner, Guard { driver, report, damaged })
}

/// The same with damage written to the standard error stream.
pub fn guard<A: DeviceAllocator>(inner: A, driver: Arc<dyn Driver>) -> Guarded<A> {
    guard_to(inner, driver, Box::new(|damage| super::say(damage)))
}

impl<A: DeviceAllocator> Shifted<A, Guard> {
    /// How often damage was told. Never waits.
    pub fn damaged(&self) -> u64 {
        self.place().damaged.load(Ordering::Relaxed)
    }
}

impl Guard {
    fn tell(&self, damage: &Damage) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        (self.report)(damage);
    }

    /// What is wrong with the guard at `start`.
    fn look(
        &self,
        block: &Block,
        side: Side,
        start: u64,
        on: StreamId,
    ) -> Result<Option<Damage>, DriverError> {
        let mut bytes = [0; GUARD_LEN];
        self.driver.copy_to_host(&mut bytes, start, on)?;
        let places = (0..).zip(bytes).filter(|(_, byte)| *byte != GUARD);
        let places: Vec<(u64, u8)> = places.collect();
        let (Some(first), Some(last)) = (places.first(), places.last()) else {
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
            count: places.len() as u64,
            address: start + first.0,
            found: first.1,
        }))
    }

    fn check(&self, block: &Block, below: u64, used_by: &[StreamId]) -> Result<(), DriverError> {
        let wait = |stream: &StreamId| self.driver.synchronize_stream(*stream);
        // Streams may be destroyed before the block is freed. Their work may not be done then.
        let own_is_gone = wait(&block.stream).is_err();
        if own_is_gone || used_by.iter().any(|stream| wait(stream).is_err()) {
            self.driver.synchronize_device()?;
        }
        let on = if own_is_gone { StreamId::DEFAULT } else { block.stream };
        let end = block.address + block.size_bytes;
        for (side, start) in [(Side::Before, below), (Side::Behind, end)] {
            if let Some(damage) = self.look(block, side, start, on)? {
                self.tell(&damage);
            }
        }
        self.driver.fill(block.address, FREED, block.size_bytes, on)?;
        if own_is_gone { wait(&on) } else { Ok(()) }
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
        // Inside a capture only the graph writes.
        unless_captured(self.driver.synchronize_stream(stream))
    }

    fn leaving(&self, block: &Block, below: u64, used_by: &[StreamId]) {
        if let Err(error) = self.check(block, below, used_by) {
            self.tell(&Damage::Unread { block: *block, error });
        }
    }
}
