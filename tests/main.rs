//! Most tests, in one program: one file or folder for each topic.
//!
//! One program is linked once and shares its helpers. Tests that need their own process are separate
//! programs: `hot_path` and `reader_memory` replace the global allocator by one that counts, `descriptors`
//! counts the open files of its process, `cuda_held` delays work of a device, `log_lines` sets the logger of
//! its process.
//!
//! `cargo test --test main switch::` runs the tests of one folder. `STRATALLOC_RUNS=full` runs more and
//! longer random histories (`common/runs.rs`).

mod common;

mod buffers;
mod conformance;
mod cpu;
mod crowds;
#[cfg(target_os = "linux")]
mod cuda;
mod devices;
mod exactness;
mod expandable;
mod faults;
mod fractions;
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
mod fuzz_corpus;
mod growth;
mod history;
#[cfg(target_os = "linux")]
mod host;
mod keys;
mod layers;
mod malloc_async;
mod per_thread;
mod pinned;
mod pluggable;
mod pool_histories;
mod private_pools;
mod reference;
mod shadow;
mod sharing;
#[cfg(target_os = "linux")]
mod sleep;
mod switch;
mod tidy;
#[cfg(all(feature = "tracepoints", target_os = "linux", target_pointer_width = "64"))]
mod tracepoints;
