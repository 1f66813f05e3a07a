//! A limit on the time of a search.
//!
//! A [`Budget`] is a [`Progress`] that cancels when its time is over, so that a search ends before its next
//! replay. [`Budget::within`] returns `None` for that end and an error for a cancellation by the caller.
//! Without a clock it never ends anything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use stratalloc_recording::{Progress, ReplayError, Stage};

/// A limit on the time of work that takes a [`Progress`].
pub struct Budget<'a> {
    progress: &'a dyn Progress,
    /// When most of the time is used, and when all of it is, on the clock of `progress`.
    mostly: Duration,
    ends: Duration,
    /// True once the end of the time cancelled work.
    has_ended: AtomicBool,
}

impl<'a> Budget<'a> {
    /// Creates a budget that ends `time` from now.
    #[must_use]
    pub fn new(progress: &'a dyn Progress, time: Duration) -> Self {
        let now = progress.elapsed();
        let [mostly, ends] = [time / 3 * 2, time].map(|time| now.saturating_add(time));
        Self { progress, mostly, ends, has_ended: AtomicBool::new(false) }
    }

    /// Returns true after two thirds of the time.
    pub(crate) fn is_mostly_used(&self) -> bool {
        self.progress.elapsed() > self.mostly
    }

    /// Returns the time that is left.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.ends.saturating_sub(self.progress.elapsed())
    }

    /// Returns `None` for work that was cancelled because the time is over.
    ///
    /// # Errors
    ///
    /// Any other error of the work.
    pub(crate) fn within<T>(&self, done: Result<T, ReplayError>) -> Result<Option<T>, ReplayError> {
        match done {
            Err(ReplayError::Cancelled(_)) if self.has_ended.load(Ordering::Relaxed) => Ok(None),
            done => done.map(Some),
        }
    }
}

impl Progress for Budget<'_> {
    fn at(&self, stage: Stage, done: u64, of: u64) {
        self.progress.at(stage, done, of);
    }

    fn is_cancelled(&self) -> bool {
        if self.progress.is_cancelled() {
            return true;
        }
        let is_over = self.progress.elapsed() > self.ends;
        self.has_ended.fetch_or(is_over, Ordering::Relaxed);
        is_over
    }

    fn elapsed(&self) -> Duration {
        self.progress.elapsed()
    }

    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        self.progress.each(jobs, job);
    }
}
