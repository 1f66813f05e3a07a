//! Random operations on an allocator, checked against a simple model after each one.
//!
//! Each device runs the operations with fixed segments, with expandable ones, and switching between the
//! two. `shadow/ops.rs` generates and shortens the operations, `runner.rs` performs and checks them, and
//! `misuse.rs` makes calls that must be refused. `mirror.rs` is the model, `pages.rs` its part for
//! expandable segments. `STRATALLOC_RUNS=100 cargo test --test main shadow` runs a hundred times as many
//! histories.

mod mirror;
mod misuse;
mod ops;
mod pages;
mod runner;

#[cfg(target_os = "linux")]
use std::sync::Arc;

#[cfg(target_os = "linux")]
use stratalloc_conformance::part::Share;
#[cfg(target_os = "linux")]
use stratalloc_sim::Host;

#[cfg(target_os = "linux")]
use crate::common::machine::{HostMachine, RealMachine};
use crate::common::prelude::*;
use ops::Op;

/// Runs on a small device, on which limits apply and requests often run out of memory.
fn on_a_small_device(ops: &[Op], segments: Segments) -> Checked {
    runner::run(&SimMachine::new(96 * MIB), ops, segments)
}

/// Runs on a device that never runs out of memory.
fn on_a_large_device(ops: &[Op], segments: Segments) -> Checked {
    runner::run(&SimMachine::new(64 << 30), ops, segments)
}

/// Runs in real memory, where bytes must stay intact.
#[cfg(target_os = "linux")]
fn in_real_memory(ops: &[Op], segments: Segments) -> Checked {
    runner::run(&HostMachine::new(96 * MIB), ops, segments)
}

/// Runs on a part of the host device's memory, as `on_a_gpu` does on a GPU.
#[cfg(target_os = "linux")]
fn on_a_part_of_a_device(ops: &[Op], segments: Segments) -> Checked {
    let host = Host::with_bytes(1 << 30);
    runner::run(&RealMachine::of(Share::of(Arc::new(host), 96 * MIB)), ops, segments)
}

/// Runs on a part of a GPU, where bytes must stay intact.
#[cfg(target_os = "linux")]
fn on_a_gpu(ops: &[Op], segments: Segments) -> Checked {
    let cuda = crate::common::gpu::shared().ok_or("it was there before")?;
    runner::run(&RealMachine::of(Share::of(cuda, 96 * MIB)), ops, segments)
}

/// Declares the tests for one kind of segments.
macro_rules! shadow_tests {
    ($room:ident, $segments:ident) => {
        mod $room {
            use super::*;

            const SEGMENTS: Segments = Segments::$segments;

            #[test]
            fn short_scripts_on_a_small_device_keep_every_law() {
                histories(runs(200), 30, |ops| on_a_small_device(ops, SEGMENTS));
            }

            #[test]
            fn long_scripts_on_a_small_device_keep_every_law() {
                histories(runs(23), 300, |ops| on_a_small_device(ops, SEGMENTS));
            }

            #[test]
            fn long_scripts_on_a_large_device_keep_every_law() {
                histories(runs(13), 300, |ops| on_a_large_device(ops, SEGMENTS));
            }

            #[cfg(target_os = "linux")]
            #[test]
            fn scripts_in_real_memory_keep_every_law_and_every_byte() {
                histories(runs(40), 100, |ops| in_real_memory(ops, SEGMENTS));
            }

            #[cfg(target_os = "linux")]
            #[test]
            fn scripts_on_a_part_of_a_device_keep_every_law_and_every_byte() {
                histories(runs(13), 100, |ops| on_a_part_of_a_device(ops, SEGMENTS));
            }

            #[cfg(target_os = "linux")]
            #[test]
            fn scripts_on_a_gpu_keep_every_law_and_every_byte() {
                if let Some(_turn) = crate::common::gpu::turn() {
                    histories(runs(26), 100, |ops| on_a_gpu(ops, SEGMENTS));
                }
            }
        }
    };
}

shadow_tests!(fixed, Fixed);
shadow_tests!(expandable, Expandable);
shadow_tests!(switching, Switching);
