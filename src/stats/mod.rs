//! Counters of an allocator: current values, peaks and sums.
//!
//! Each heap counts under its own lock. `heap_counters` holds the counters of one heap, and `ledger`
//! the peaks over all heaps, without a shared lock on a hit. `report` contains what users read, with
//! PyTorch's keys; `metrics` what Prometheus reads. This module allocates no device memory and calls no
//! driver.
//!
//! Peaks are exact for a program whose calls do not overlap. `tests/shadow.rs` compares them with one
//! plain counter over random histories: with fixed and expandable segments, and with switches between the
//! two.

mod heap_counters;
mod ledger;
#[cfg(feature = "metrics")]
mod metrics;
mod report;

pub(crate) use heap_counters::{
    ALL, Accumulated, CounterIndex, CounterValues, HeapCounters, LiveBlocks,
};
pub(crate) use ledger::{Heaps, Ledger};
#[cfg(feature = "metrics")]
pub use metrics::{Measured, metrics};
pub(crate) use report::signed;
pub use report::{Counter, OwnCounter, PerPool, Statistics, Usage};
