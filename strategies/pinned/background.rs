//! The thread of `pinned_use_background_threads`: it queries the events of freed blocks, and releases blocks
//! that have been free too long.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::Core;
use crate::error::{DriverError, DriverErrorKind};

/// The time between two queries while blocks wait.
///
/// Source: PyTorch's `CachingHostAllocator`.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The time between two searches for blocks that have been free too long.
const TRIM_INTERVAL: Duration = Duration::from_millis(100);

/// The running thread. Dropping it ends the thread and waits for that.
#[derive(Debug)]
pub(super) struct Background {
    core: Arc<Core>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    pub(super) fn start(core: &Arc<Core>) -> Result<Self, DriverError> {
        let own = Arc::clone(core);
        let thread = std::thread::Builder::new().name("stratalloc pinned".to_owned());
        let thread = thread.spawn(move || own.run()).map_err(|error| {
            DriverError::new(DriverErrorKind::Other, "spawn", 0, error.to_string())
        })?;
        Ok(Self { core: Arc::clone(core), thread: Some(thread) })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        *self.core.waiting.is_over.lock() = true;
        self.core.waiting.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Core {
    fn run(&self) {
        let mut is_over = self.waiting.is_over.lock();
        while !*is_over {
            if self.waiting.any() {
                self.waiting.changed.wait_for(&mut is_over, POLL_INTERVAL);
            } else if self.settings.read().trim_age.is_some() {
                self.waiting.changed.wait_for(&mut is_over, TRIM_INTERVAL);
            } else {
                self.waiting.changed.wait(&mut is_over);
            }
            drop(is_over);
            // Failures are reported by `process_events` and `empty_cache`.
            let _ = self.poll();
            let _ = self.trim();
            is_over = self.waiting.is_over.lock();
        }
    }
}
