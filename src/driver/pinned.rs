//! A driver's optional interfaces for pinned memory of the program: memory that the device copies from and to
//! by itself. [`PinnedMemory`] hides the memory behind numbers. [`HostMemory`] returns its addresses.

use super::DriverResult;
use crate::ids::StreamId;

/// A slab of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinnedId(pub u64);

/// A range inside a slab of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedRange {
    /// The slab.
    pub pinned: PinnedId,
    /// Offset of the range in the slab.
    pub offset_bytes: u64,
    /// Size of the range.
    pub size_bytes: u64,
}

/// Pinned memory of the program, in slabs, and copies between it and the device.
///
/// The copies run in stream order, and the calling thread does not wait for them. Until a copy has
/// finished, both its ranges must stay valid, and nothing else may access the bytes that it writes.
pub trait PinnedMemory: Send + Sync {
    /// Pins `size_bytes` (at least 1) of host memory. The bytes are undefined. Takes time in
    /// proportion to the size.
    fn pin(&self, size_bytes: u64) -> DriverResult<PinnedId>;
    /// Releases a slab. No copy from or to it may be running.
    fn unpin(&self, pinned: PinnedId) -> DriverResult<()>;
    /// Submits a copy from the device to pinned memory.
    fn copy_out(&self, to: PinnedRange, from: u64, stream: StreamId) -> DriverResult<()>;
    /// Submits a copy from pinned memory to the device.
    fn copy_in(&self, to: u64, from: PinnedRange, stream: StreamId) -> DriverResult<()>;
    /// Reads bytes of a slab. The caller has waited for the copies to these bytes.
    fn read_pinned(&self, from: PinnedId, offset_bytes: u64, into: &mut [u8]) -> DriverResult<()>;
    /// Writes bytes of a slab. The caller has waited for the copies from and to these bytes.
    fn write_pinned(&self, to: PinnedId, offset_bytes: u64, from: &[u8]) -> DriverResult<()>;
}

/// Page-locked host memory that the program and the device access by the same address.
///
/// The caller frees a range only after the device's work with it has finished.
pub trait HostMemory: Send + Sync {
    /// Allocates `size_bytes` (at least 1) of page-locked memory and returns its address, aligned to at
    /// least 512 bytes. The bytes are undefined. Takes time in proportion to the size. May wait for
    /// running work.
    fn allocate_host(&self, size_bytes: u64) -> DriverResult<u64>;
    /// Frees memory that [`allocate_host`](Self::allocate_host) returned. `size_bytes` is the size passed
    /// to that call. May wait for running work.
    fn free_host(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Page-locks memory of the program, which consists of whole pages. The memory must stay mapped until
    /// it is unregistered. May wait for running work.
    fn register_host(&self, address: u64, size_bytes: u64) -> DriverResult<()>;
    /// Ends the page lock of the memory that was registered at `address`. May wait for running work.
    fn unregister_host(&self, address: u64) -> DriverResult<()>;
    /// Returns the NUMA node of the host that is nearest to the device, or `None` if it is unknown.
    fn host_node(&self) -> DriverResult<Option<u32>>;
}
