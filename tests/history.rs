//! What is recorded, who asked, and the files that viewers read.
//!
//! `entries` has what every strategy records and which entries are kept, `contexts` who asked, `crowd` eight
//! threads at once, `files` snapshots and their way back, `reports` who holds the memory when
//! it is short, `on_oom` the snapshots and the advice of that moment, `trackers` callbacks.

mod contexts;
mod crowd;
mod entries;
#[cfg(feature = "replay")]
mod files;
#[cfg(feature = "analysis")]
mod on_oom;
mod reports;
mod trackers;

use crate::common::prelude::*;

/// A simulated device.
fn sim(total_bytes: u64) -> Arc<dyn Driver> {
    Arc::new(Sim::with_bytes(total_bytes))
}

/// What a configuration string builds, on a device of its own.
fn build(conf: &str) -> Switchable {
    build_over(conf, sim(8 * GIB))
}

fn build_over(conf: &str, driver: Arc<dyn Driver>) -> Switchable {
    let config = config(conf);
    Switchable::build(&config, driver, BuildOptions::default()).expect("the device can do it")
}

/// The same with its history.
fn unrecorded(conf: &str) -> (Switchable, Arc<History>) {
    let allocator = build(conf);
    let history = history(&allocator);
    (allocator, history)
}

/// The same with a history that records everything.
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
