//! Reports, the clock, threads and cancellation of long work. The caller supplies all of them.
//!
//! This package and `analysis` print nothing, start no thread and read no clock. They use a [`Progress`]
//! instead, so they also run where there is one thread and no clock. Results do not depend on it, except that
//! a search ends earlier when its time is over.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;

/// What is done at the moment, and the unit of its numbers.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// A recording is replayed several times. Counts passes.
    Replay,
    /// Settings are searched. Counts settings; their number grows during the search.
    Settings,
    /// The figures of a recording are computed for a comparison. Counts steps.
    Figures,
}

/// The caller cancelled the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Error)]
#[error("cancelled")]
pub struct Cancelled;

/// What long work uses of its caller. Every method has a default, with which nothing is shown, no time
/// passes, all runs on one thread and nothing is cancelled ([`Silent`]).
pub trait Progress: Sync {
    /// Receives that `done` of `of` are done. Called on the thread that called the work.
    fn at(&self, stage: Stage, done: u64, of: u64) {
        let _ = (stage, done, of);
    }

    /// Returns true if the work should end with [`Cancelled`]. Called before each replay of a search, on the
    /// threads of [`each`](Self::each).
    fn is_cancelled(&self) -> bool {
        false
    }

    /// Returns the time since some fixed moment. Without a clock no time passes: durations are zero, and a
    /// search is not cut short.
    fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    /// Calls `job` once with each number below `jobs`, in any order or at the same time. Returns when all
    /// calls have returned.
    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        (0..jobs).for_each(job);
    }
}

/// Shows nothing, has no clock and runs jobs one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Progress for Silent {}

impl dyn Progress + '_ {
    /// Returns an error if the caller cancelled the work.
    ///
    /// # Errors
    ///
    /// [`Cancelled`].
    pub fn check(&self) -> Result<(), Cancelled> {
        if self.is_cancelled() { Err(Cancelled) } else { Ok(()) }
    }

    /// Runs `jobs` jobs by [`Progress::each`] and returns their results in the order of their numbers. After
    /// an error or a cancellation, no further job begins.
    ///
    /// # Errors
    ///
    /// The error of a job, of several that of the lowest number, or [`Cancelled`].
    pub fn collect<T: Send, E: From<Cancelled> + Send>(
        &self,
        jobs: usize,
        job: impl Fn(usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        let has_failed = AtomicBool::new(false);
        let done = Mutex::new(Vec::with_capacity(jobs));
        self.each(jobs, &|at| {
            if has_failed.load(Ordering::Relaxed) {
                return;
            }
            let result = self.check().map_err(E::from).and_then(|()| job(at));
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((at, result));
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(at, _)| *at);
        let results: Vec<T> =
            done.into_iter().map(|(_, result)| result).collect::<Result<_, E>>()?;
        // An implementation that leaves out jobs has cancelled them.
        if results.len() == jobs { Ok(results) } else { Err(Cancelled.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs jobs in another order, and only the first `kept` of them.
    struct Backwards {
        kept: usize,
    }

    impl Progress for Backwards {
        fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
            (0..jobs).rev().take(self.kept).for_each(job);
        }
    }

    fn double(at: usize) -> Result<usize, Cancelled> {
        Ok(2 * at)
    }

    #[test]
    fn results_are_in_the_order_of_the_jobs() {
        for progress in [&Silent as &dyn Progress, &Backwards { kept: 9 }] {
            assert_eq!(progress.collect(4, double), Ok(vec![0, 2, 4, 6]));
        }
    }

    #[test]
    fn jobs_that_are_left_out_are_cancelled() {
        assert_eq!((&Backwards { kept: 3 } as &dyn Progress).collect(4, double), Err(Cancelled));
    }

    #[test]
    fn no_job_begins_after_an_error() {
        let begun = Mutex::new(Vec::new());
        let job = |at| {
            begun.lock().unwrap().push(at);
            if at == 1 { Err(Cancelled) } else { Ok(()) }
        };
        assert_eq!((&Silent as &dyn Progress).collect(4, job), Err(Cancelled));
        assert_eq!(begun.into_inner().unwrap(), [0, 1]);
    }
}
