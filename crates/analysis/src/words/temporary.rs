//! The sentence about temporary blocks.

use super::{counted_as, grouped, near};
use crate::temporary::Temporary;

impl Temporary {
    /// Returns the result as a sentence.
    pub(crate) fn text(&self) -> String {
        let share = format!("{} of {} blocks", grouped(self.blocks), grouped(self.blocks_of));
        let found = match (self.steps, self.within_events) {
            (Some(steps), _) => {
                let steps = counted_as(steps, "step", "steps");
                format!("In {steps}, {share} were freed by the step that allocated them")
            }
            (None, within) => {
                let within = counted_as(within.unwrap_or(0).into(), "event", "events");
                format!("{share} were freed within {within} of their request")
            }
        };
        let (all, live) = (near(self.requested_bytes), near(self.most_live_bytes));
        format!("{found}: {all} MiB in all, at most {live} MiB of them live at once.")
    }
}
