//! The sources of `src/sync` and of the event queue, compiled over loom: its atomics, locks and threads take
//! the place of those of the system, and it runs each model in every order in which threads can execute it.
//!
//! These are the files of the library, not copies. Replaced are `sync/platform.rs`, which names the atomics
//! and locks, the process-wide lock of the slots, and the driver of the event queue. The barrier is the full
//! fence of systems without membarrier(2), because loom has no such call.

#![allow(dead_code, unused_imports, unreachable_pub, reason = "models use a part of each file")]
#![allow(missing_docs, reason = "only the models of this package use it")]
#![allow(
    clippy::missing_panics_doc,
    clippy::missing_errors_doc,
    reason = "models panic if they fail"
)]

pub mod driver;
#[path = "../../src/event_queue.rs"]
pub mod event_queue;
#[path = "../../src/ids.rs"]
pub mod ids;
mod structures;
pub mod sync;

pub use driver as error;
pub use structures::*;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

static EXECUTION: AtomicU64 = AtomicU64::new(0);
/// Locked while a model runs, so that no other uses what the process has once.
static RUNNING: Mutex<()> = Mutex::new(());

/// Returns the number of the execution that runs. What a process has once exists once for each.
fn execution() -> u64 {
    EXECUTION.load(Ordering::Relaxed)
}

/// Runs a model in every order of its threads in which at most three of them are interrupted.
pub(crate) fn model(run: impl Fn() + Send + Sync + 'static) {
    let _running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.max_branches = 10_000;
    model.check(move || {
        EXECUTION.fetch_add(1, Ordering::Relaxed);
        run();
    });
}
