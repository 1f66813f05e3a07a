//! What happens, for those who look for memory.

use std::sync::Arc;

use crate::history::{History, Snapshot};

/// A record of what happens, and of who holds what.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use std::sync::Arc;
/// use stratalloc::allocator::{DeviceAllocator, Request};
/// use stratalloc::config::Config;
/// use stratalloc::driver::Sim;
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
    /// Where it is recorded. Off at first.
    fn history(&self) -> &Arc<History>;

    /// All segments with their blocks, and the history, as of one moment: other threads' requests wait while
    /// they are gathered. Waits for no work of the device.
    fn snapshot(&self) -> Snapshot;
}
