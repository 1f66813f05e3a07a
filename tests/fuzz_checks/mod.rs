//! Properties that must hold for every input, even a hostile one: one function for each kind of input.
//!
//! `fuzz/` passes the inputs of libFuzzer, and `tests/fuzz_corpus.rs` the stored inputs. A check panics
//! if a property is violated. The library alone decides which inputs are valid.

#![allow(dead_code, unused_imports, reason = "each fuzz target uses one check")]

mod config;
mod ipc_handle;
mod library;
mod memory;
mod recording;
mod rmm_csv;
mod sharer;
mod snapshot;
mod socket_request;

pub(crate) use config::check as config;
pub(crate) use ipc_handle::check as ipc_handle;
pub(crate) use library::check as library;
pub(crate) use rmm_csv::check as rmm_csv;
pub(crate) use snapshot::check as snapshot;
pub(crate) use socket_request::check as socket_request;

/// A check of one input.
pub(crate) type Check = fn(&[u8]);

/// Every check, with the folder of its inputs under `tests/fuzz_corpus/`.
pub(crate) const CHECKS: &[(&str, Check)] = &[
    ("config", config),
    ("ipc_handle", ipc_handle),
    ("library", library),
    ("rmm_csv", rmm_csv),
    ("snapshot", snapshot),
    ("socket_request", socket_request),
];
