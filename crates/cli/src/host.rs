//! What long work uses of the machine: the clock, the threads and a progress bar.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use rayon::prelude::*;

use super::show::progress;
use stratalloc_recording::{Progress, Stage};

/// The clock and the threads, without a report.
pub(crate) struct Host {
    begin: Instant,
}

impl Default for Host {
    fn default() -> Self {
        Self { begin: Instant::now() }
    }
}

impl Progress for Host {
    fn elapsed(&self) -> Duration {
        self.begin.elapsed()
    }

    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        (0..jobs).into_par_iter().for_each(job);
    }
}

/// A [`Host`] that reports on a progress bar. The bar disappears with it.
pub(crate) struct Terminal {
    host: Host,
    bar: ProgressBar,
}

impl Terminal {
    /// Shows a bar named `text` at zero of `of`; its length changes with the reports.
    pub(crate) fn new(of: u64, text: &str) -> Self {
        Self { host: Host::default(), bar: progress(of, text) }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Progress for Terminal {
    fn at(&self, _: Stage, done: u64, of: u64) {
        self.bar.set_length(of);
        self.bar.set_position(done);
    }

    fn elapsed(&self) -> Duration {
        self.host.elapsed()
    }

    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        self.host.each(jobs, job);
    }
}
