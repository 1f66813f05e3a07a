//! Worker threads that run the work of streams.
//!
//! The jobs of a stream run in order. A job that waits (for a mark or a gate) blocks no worker: workers
//! skip streams whose next job is not ready. If the system starts no thread, the thread that submits a job or
//! opens a gate runs all jobs that are ready.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::MutexGuard;

use super::backing::Task;
use super::work::{Mark, Work};
use super::{Kind, Shared, SimulatedDevice, State};
use stratalloc::ids::StreamId;

/// The number of worker threads of a device.
pub(super) const WORKERS: usize = 4;

/// An entry of a stream's queue.
pub(super) enum Job {
    Run(Task),
    Wait(Mark),
    Gate(Arc<AtomicBool>),
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Job")
    }
}

impl Shared {
    /// Adds a job to a stream. The first one starts the workers. If the system starts none, runs the jobs
    /// that are ready, and the next job tries again.
    pub(super) fn push(self: &Arc<Self>, state: &mut State, stream: usize, job: Job) {
        let work = &mut state.work;
        work.push(stream, job);
        if work.workers.is_empty() {
            let start = |_| {
                let shared = Arc::clone(self);
                std::thread::Builder::new().spawn(move || shared.serve()).ok()
            };
            work.workers = (0..work.workers_max).filter_map(start).collect();
            work.run_without_workers();
        }
        self.changed.notify_all();
    }

    /// Runs jobs until the device is dropped and no job is ready. Each worker thread runs this.
    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            match state.work.next_job() {
                Some((stream, job)) => {
                    if let Job::Run(task) = job {
                        MutexGuard::unlocked(&mut state, task);
                    }
                    state.work.end_job(stream);
                    self.changed.notify_all();
                }
                None if state.work.is_ending => return,
                None => self.changed.wait(&mut state),
            }
        }
    }
}

impl Work {
    /// Runs all jobs that are ready, if there are no workers.
    fn run_without_workers(&mut self) {
        while self.workers.is_empty()
            && let Some((stream, job)) = self.next_job()
        {
            if let Job::Run(task) = job {
                task();
            }
            self.end_job(stream);
        }
    }
}

impl<K: Kind> SimulatedDevice<K> {
    /// Puts a gate at the current end of a stream. The device must have worker threads.
    pub(crate) fn gate(&self, stream: StreamId) -> Gate {
        let open = Arc::new(AtomicBool::new(false));
        let state = &mut *self.shared.state.lock();
        let index = state.work.any_stream(stream);
        self.shared.push(state, index, Job::Gate(Arc::clone(&open)));
        Gate { open, device: Arc::downgrade(&self.shared) }
    }
}

impl<K: Kind> Drop for SimulatedDevice<K> {
    fn drop(&mut self) {
        let workers = {
            let work = &mut self.shared.state.lock().work;
            work.is_ending = true;
            work.run_without_workers();
            std::mem::take(&mut work.workers)
        };
        self.shared.changed.notify_all();
        for worker in workers {
            // Workers run only copies and fills, which do not panic.
            let _ = worker.join();
        }
    }
}

/// Holds back work that is submitted to its stream after it, until the gate is opened or dropped.
#[derive(Debug)]
pub struct Gate {
    open: Arc<AtomicBool>,
    device: Weak<Shared>,
}

impl Gate {
    /// Lets the stream run, by dropping the gate.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            let mut state = device.state.lock();
            self.open.store(true, Ordering::Release);
            state.work.run_without_workers();
            device.changed.notify_all();
        }
    }
}
