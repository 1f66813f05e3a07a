//! Adds the configuration and the largest *holders* (live blocks grouped by call stack) to the report of
//! a failed request.

use super::record::History;
use crate::error::OutOfMemory;

/// The maximum number of stack frames listed for each group of live blocks with the same call stack.
const FRAMES_MAX: usize = 4;

impl History {
    /// Adds the current configuration, and the largest holders if stacks are recorded. Holds no lock
    /// while it looks up frames.
    #[cold]
    pub(crate) fn explain(&self, report: &mut OutOfMemory) {
        let text = self.about().config.to_text();
        report.configuration = Some(text).filter(|text| !text.is_empty());
        (report.live, _) = self.holders(FRAMES_MAX, |holder| holder.context.is_some());
        report.live.truncate(OutOfMemory::LIVE_MAX);
    }
}
