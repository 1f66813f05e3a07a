//! What a history adds to the report of a request that failed: the configuration, and who holds the memory.

use super::record::History;
use crate::error::OutOfMemory;

/// Frames of a holder that are told.
const FRAMES_MAX: usize = 4;

impl History {
    /// Adds the configuration in force, and the largest holders of live bytes if stacks are recorded. Holds
    /// no lock while frames are looked up.
    #[cold]
    pub(crate) fn explain(&self, report: &mut OutOfMemory) {
        let text = self.about().config.to_text();
        report.configuration = Some(text).filter(|text| !text.is_empty());
        (report.live, _) = self.holders(FRAMES_MAX, |holder| holder.context.is_some());
        report.live.truncate(OutOfMemory::LIVE_MAX);
    }
}
