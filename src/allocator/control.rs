//! What an allocator can do besides allocating and freeing.

use super::{
    Caching, Checkpoints, Counters, CrossStream, Expandable, Hooks, PeerAccess, PrivatePools,
    Recording, Sharing,
};

/// The capabilities of an allocator; `None` is one that it lacks.
///
/// An allocator returns those it has. A wrapper replaces those it changes and passes the others on:
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
    /// Use of a block by other streams than its own.
    pub cross_stream: Option<&'a dyn CrossStream>,
    /// Control over cached memory.
    pub caching: Option<&'a dyn Caching>,
    /// Counters.
    pub counters: Option<&'a dyn Counters>,
    /// Whether [`free_raw`](super::DeviceAllocator::free_raw) and
    /// [`record_stream_raw`](super::DeviceAllocator::record_stream_raw) find its blocks.
    pub by_address: bool,
    /// Users' functions that are called under memory pressure.
    pub hooks: Option<&'a Hooks>,
    /// Memory that only those requests get that ask for it.
    pub private_pools: Option<&'a dyn PrivatePools>,
    /// Private pools that can go back to an earlier state.
    pub checkpoints: Option<&'a dyn Checkpoints>,
    /// Segments that grow by pages.
    pub expandable: Option<&'a dyn Expandable>,
    /// Use of its memory by other devices.
    pub peer_access: Option<&'a dyn PeerAccess>,
    /// Blocks in other processes.
    pub sharing: Option<&'a dyn Sharing>,
    /// What happens, and which stack holds what. A registered allocator without it is recorded from outside.
    pub recording: Option<&'a dyn Recording>,
}

macro_rules! combine {
    ($($capability:ident)*) => {
        impl Control<'_> {
            /// Of these, the ones that `other` has too.
            pub(crate) fn also_in(self, other: &Control<'_>) -> Self {
                Self {
                    by_address: self.by_address && other.by_address,
                    $($capability: self.$capability.filter(|_| other.$capability.is_some()),)*
                }
            }

            /// These, and those of `other` that are missing here.
            pub(crate) fn or(self, other: Self) -> Self {
                Self {
                    by_address: self.by_address || other.by_address,
                    $($capability: self.$capability.or(other.$capability),)*
                }
            }
        }
    };
}
combine! {
    cross_stream caching counters hooks private_pools checkpoints expandable peer_access sharing recording
}
