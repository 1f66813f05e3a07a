//! The recording of an allocator: its history and snapshots.

use std::sync::Arc;

use crate::history::{History, Snapshot};

/// The history of an allocator, and snapshots of its memory.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// use stratalloc::allocator::{DeviceAllocator, Request};
/// use stratalloc::config::Config;
/// use stratalloc_sim::Sim;
/// use stratalloc::history::{Action, RecordOptions};
/// use stratalloc::ids::StreamId;
/// use stratalloc::registry;
///
/// # let config = Config::parse("backend:native", &registry::key_table())?;
/// let sim = Arc::new(Sim::new(Default::default()));
/// let allocator = registry::build(&config, sim, registry::BuildOptions::default())?;
/// let recording = allocator.control().recording.ok_or("records nothing")?;
/// recording.history().start(&RecordOptions::at_most(1_000_000));
/// let block = allocator.allocate(Request::new(4096, StreamId::DEFAULT))?;
/// let actions = recording.history().entries();
/// let actions: Vec<_> = actions.iter().map(|entry| entry.event.action).collect();
/// assert_eq!(actions, [Action::SegmentAlloc, Action::Alloc]);
/// # allocator.free(block)?;
/// # Ok(())
/// # }
/// ```
pub trait Recording: Send + Sync {
    /// Returns the history. Recording is initially off.
    fn history(&self) -> &Arc<History>;

    /// Returns all segments with their blocks, and the history, at one moment. Requests of other
    /// threads wait while the data is collected. Does not wait for work of the device.
    fn snapshot(&self) -> Snapshot;
}
