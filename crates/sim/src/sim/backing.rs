//! Memory behind the addresses of a device.
//!
//! The device checks each call on its books first: addresses are those of a range, sizes fit, pieces exist.
//! So unless documented otherwise, a call fails only if the operating system fails.

use std::fmt;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::refusal::Done;
use stratalloc::driver::{Exportable, PhysicalId};

/// A copy or fill, ready to run on any thread. It keeps its memory alive.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Provides memory, at addresses that it chooses.
pub(crate) trait Backing: fmt::Debug + Send + Sync {
    /// Returns a new range of addresses: zeroed memory if `open`, otherwise space to map pieces in.
    fn take(&self, size_bytes: u64, open: bool) -> Done<u64>;
    /// Frees a range, or whole pages of an open one.
    fn give(&self, address: u64, size_bytes: u64);

    fn create(&self, id: PhysicalId, size_bytes: u64, exportable: Exportable) -> Done<()>;
    /// Drops a piece that is neither referenced nor mapped.
    fn drop_piece(&self, id: PhysicalId);
    fn map(&self, address: u64, id: PhysicalId) -> Done<()>;
    /// Allows access to whole mapped pieces.
    fn set_access(&self, address: u64, size_bytes: u64) -> Done<()>;
    /// Unmaps whole pieces, all or none. Returns an error while a task uses one of them.
    fn unmap(&self, address: u64, size_bytes: u64) -> Done<()>;
    fn export(&self, id: PhysicalId) -> Done<OwnedFd>;
    /// Imports a piece. Returns an error if it is not safe to map.
    fn import(&self, id: PhysicalId, descriptor: OwnedFd, size_bytes: u64) -> Done<()>;

    fn copy(&self, to: u64, from: u64, size_bytes: u64) -> Task;
    fn fill(&self, to: u64, byte: u8, size_bytes: u64) -> Task;
    /// Copies a range of program memory to the device.
    fn write(&self, to: u64, from: Arc<Mutex<Vec<u8>>>, range: Range<usize>) -> Task;
    /// Copies from the device to a range of program memory.
    fn read(&self, from: u64, into: Arc<Mutex<Vec<u8>>>, range: Range<usize>) -> Task;

    /// Returns the bytes of memory that pieces use, and the length of the file that they share.
    #[cfg(test)]
    fn stored_bytes(&self) -> (u64, u64);
}
