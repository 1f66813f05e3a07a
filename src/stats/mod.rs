//! Counters: what is held now, what ever was, and the most there ever was.
//!
//! `lanes` and `ledger` keep the counters of heaps exact without a shared lock on a hit; `report`
//! is what users read, with PyTorch's keys. Nothing here allocates device memory or calls a driver.

mod lanes;
mod ledger;
mod report;

pub(crate) use lanes::{ALL, Accumulated, HeapCounters, Lane, Lanes};
pub(crate) use ledger::{Heaps, Ledger};
pub use report::{Counter, OwnCounter, PerPool, Statistics, Usage};
