//! What holds for every input, however hostile: one function for each kind of input.
//!
//! `fuzz/` hands in what libFuzzer thinks of, `tests/fuzz_corpus.rs` the inputs that are kept. A check
//! panics when a promise is broken; what it accepts or refuses is the library's own business.

#![allow(dead_code, unused_imports, reason = "each fuzz target uses one check")]

mod config;

/// A check of one input.
pub(crate) type Check = fn(&[u8]);

pub(crate) use config::check as config;

/// Every check, with the folder of its inputs under `tests/fuzz_corpus/`.
pub(crate) const CHECKS: &[(&str, Check)] = &[("config", config)];
