//! The optional capabilities of an allocator.

use super::{
    Caching, Checkpoints, Counters, CrossStream, Expandable, Hooks, HostBytes, PeerAccess,
    PrivatePools, Recording, Sharing, Sleeping,
};

/// The kind of memory that an allocator's blocks are in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of the driver, which is memory of its device.
    #[default]
    Device,
    /// Memory of the host from the system. The driver of the device does not know it.
    Host,
    /// Page-locked memory of the host from the driver.
    PinnedHost,
}

/// The capabilities of an allocator. `None` for those that it lacks.
///
/// An allocator returns the capabilities that it has. A wrapper replaces those that it changes, and
/// forwards the others:
///
/// ```
/// use stratalloc::allocator::{Control, Counters, DeviceAllocator};
///
/// fn with_own_counters<'a>(below: &'a dyn DeviceAllocator, own: &'a dyn Counters) -> Control<'a> {
///     let mut control = below.control();
///     control.counters = Some(own);
///     control
/// }
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Default)]
#[expect(missing_debug_implementations, reason = "the capabilities have none")]
pub struct Control<'a> {
    /// Use of a block on streams other than its own.
    pub cross_stream: Option<&'a dyn CrossStream>,
    /// Control over cached memory.
    pub caching: Option<&'a dyn Caching>,
    /// Counters.
    pub counters: Option<&'a dyn Counters>,
    /// Whether the allocator can find its blocks by address, for
    /// [`free_raw`](super::DeviceAllocator::free_raw) and
    /// [`record_stream_raw`](super::DeviceAllocator::record_stream_raw).
    pub by_address: bool,
    /// The kind of memory that new blocks are in.
    pub memory: MemoryKind,
    /// Whether a caller may take blocks from the driver instead of from the allocator, as PyTorch does
    /// with `PYTORCH_NO_CUDA_MEMORY_CACHING`.
    pub may_be_bypassed: bool,
    /// User callbacks that are called under memory pressure.
    pub hooks: Option<&'a Hooks>,
    /// Private memory pools.
    pub private_pools: Option<&'a dyn PrivatePools>,
    /// Private pools whose live blocks can be saved and restored.
    pub checkpoints: Option<&'a dyn Checkpoints>,
    /// Segments that grow by pages.
    pub expandable: Option<&'a dyn Expandable>,
    /// Access of other devices to the allocator's memory.
    pub peer_access: Option<&'a dyn PeerAccess>,
    /// Sharing of blocks with other processes.
    pub sharing: Option<&'a dyn Sharing>,
    /// Private pools that can be paused and resumed.
    pub sleeping: Option<&'a dyn Sleeping>,
    /// Access to the bytes of blocks in host memory that the device does not know.
    pub host_bytes: Option<&'a dyn HostBytes>,
    /// The history and snapshots. If a registered allocator lacks this capability, a wrapper records
    /// it.
    pub recording: Option<&'a dyn Recording>,
}

macro_rules! combine {
    ($($capability:ident)*) => {
        impl Control<'_> {
            /// Removes the capabilities that `other` lacks. The kind of memory becomes that of `other`.
            pub(crate) fn also_in(self, other: &Control<'_>) -> Self {
                Self {
                    by_address: self.by_address && other.by_address,
                    memory: other.memory,
                    may_be_bypassed: self.may_be_bypassed && other.may_be_bypassed,
                    $($capability: self.$capability.filter(|_| other.$capability.is_some()),)*
                }
            }

            /// Adds the capabilities of `other` that are missing here, except those that concern new
            /// blocks.
            pub(crate) fn or(self, other: Self) -> Self {
                Self {
                    by_address: self.by_address || other.by_address,
                    memory: self.memory,
                    may_be_bypassed: self.may_be_bypassed,
                    $($capability: self.$capability.or(other.$capability),)*
                }
            }
        }
    };
}
combine! {
    cross_stream caching counters hooks private_pools checkpoints expandable peer_access sharing sleeping
    host_bytes recording
}
