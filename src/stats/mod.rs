//! Counters: what is held now, what ever was, and the most there ever was.
//!
//! `lanes` and `ledger` keep the counters of heaps exact without a shared lock on a hit; `report`
//! is what users read, with PyTorch's keys, `metrics` what Prometheus reads. Nothing here allocates device
//! memory or calls a driver.

mod lanes;
mod ledger;
#[cfg(feature = "metrics")]
mod metrics;
mod report;

pub(crate) use lanes::{ALL, Accumulated, HeapCounters, Lane, Lanes};
pub(crate) use ledger::{Heaps, Ledger};
#[cfg(feature = "metrics")]
pub use metrics::{Measured, metrics};
pub(crate) use report::signed;
pub use report::{Counter, OwnCounter, PerPool, Statistics, Usage};
