//! The behaviour of PyTorch's caching allocator, as its own tests state it, told again on a
//! simulated device through the public trait.
//!
//! Each test names a behaviour; its comment says which behaviour of the reference it pins, or where
//! we differ on purpose (`docs/differences.md` lists those). Decisions on recorded programs are compared
//! elsewhere, event by event. What a simulated device cannot show (bytes) is shown by ranges.

mod bed;
mod collector;
mod config;
mod counters;
mod handles;
mod hints;
mod holders;
mod limits;
mod oom_report;
mod pressure;
mod streams;
