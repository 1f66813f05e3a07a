//! All promises in one program: a file or a folder for each, named after what it holds to.
//!
//! One program links once and shares its helpers. Apart stay those that need a process of their own:
//! `hot_path` and `reader_memory` count allocations of the whole process, `descriptors` its open files,
//! `cuda_held` what a device holds, `log_lines` has the logger of its process; `ffi`, `header` and `python`
//! are about the library for other languages.
//!
//! `cargo test --test main switch::` runs one room. `STRATALLOC_RUNS=full` makes the random histories
//! longer and more (`common/runs.rs`).

mod common;

mod buffers;
#[cfg(feature = "cli")]
mod cli;
mod conformance;
mod cpu;
mod crowds;
#[cfg(all(feature = "cuda", target_os = "linux"))]
mod cuda;
mod devices;
#[cfg(feature = "replay")]
mod exactness;
mod expandable;
mod faults;
#[cfg(all(
    feature = "replay",
    feature = "pluggable",
    target_os = "linux",
    target_pointer_width = "64"
))]
mod fuzz_corpus;
mod history;
#[cfg(all(feature = "replay", target_os = "linux"))]
mod host;
mod keys;
mod layers;
mod malloc_async;
mod per_thread;
mod pluggable;
mod pool_histories;
mod private_pools;
mod reference;
mod shadow;
mod sharing;
mod switch;
mod tidy;
#[cfg(all(feature = "tracepoints", target_os = "linux", target_pointer_width = "64"))]
mod tracepoints;
