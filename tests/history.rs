//! The history: its entries, their contexts (stacks, scopes and metadata), and the files for viewers.
//!
//! `entries` tests which entries each strategy records and which are kept. `contexts` tests the contexts,
//! `crowd` eight threads at once, and `files` snapshots and their readers. `reports` tests the holders in an
//! out-of-memory report, `on_oom` the snapshot and the advice after a failed request, and `trackers`
//! callbacks that get each entry.

mod contexts;
mod crowd;
mod entries;
mod files;
mod on_oom;
mod reports;
mod trackers;

use crate::common::prelude::*;

/// Returns a simulated device.
fn sim(total_bytes: u64) -> Arc<dyn Driver> {
    Arc::new(Sim::with_bytes(total_bytes))
}

/// Builds an allocator from a configuration string, on a new device.
fn build(conf: &str) -> Switchable {
    build_over(conf, sim(8 * GIB))
}

fn build_over(conf: &str, driver: Arc<dyn Driver>) -> Switchable {
    let config = config(conf);
    Switchable::build(&config, driver, BuildOptions::default()).expect("the device can do it")
}

/// Builds an allocator and returns it with its history, which records nothing yet.
fn unrecorded(conf: &str) -> (Switchable, Arc<History>) {
    let allocator = build(conf);
    let history = history(&allocator);
    (allocator, history)
}

/// Builds an allocator and returns it with its history, which records everything.
fn recorded(conf: &str) -> (Switchable, Arc<History>) {
    let (allocator, history) = unrecorded(conf);
    history.start(&RecordOptions::default());
    (allocator, history)
}

fn history(allocator: &dyn DeviceAllocator) -> Arc<History> {
    Arc::clone(allocator.recording().history())
}

fn events(history: &History) -> Vec<Event> {
    history.entries().iter().map(|entry| entry.event).collect()
}

fn actions(history: &History) -> Vec<Action> {
    history.entries().iter().map(|entry| entry.event.action).collect()
}
