//! The clock of the search for settings that `advise_on_oom` begins.

use std::time::{Duration, Instant};

use stratalloc_analysis::Progress;

/// A clock that starts when it is created. Replays run on the thread whose request failed.
pub(super) struct Clock(Instant);

impl Default for Clock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Progress for Clock {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}
