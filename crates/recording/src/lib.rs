//! Reads recordings and replays them.
//!
//! `reader` parses a snapshot in any encoding into a [`Trace`], and treats the file as untrusted.
//! `evidence` finds entries that were not recorded, and decides whether the rest shows a history.
//! `workload` extracts the requests of a trace, without the decisions of its allocator. `pools` finds the
//! pool of each request; where it is not recorded (PyTorch 2.11), from the final layout. `verify` compares
//! the decisions of this library's engine with the recorded ones. `run` replays the requests on any
//! allocator and measures the time. `stacks` stores the stacks of requests, and `start` reconstructs the
//! layout before the first event. `frames` separates the program's frames from the runtime's: `paths` by
//! their files, `entries` at the start of threads. `progress` is what long work uses of its caller: a clock,
//! threads, and where it reports and is cancelled.
//!
//! The version of PyTorch that made a recording is derived from its contents ([`Trace::torch_version`]). In
//! a replay, the configuration `compat:pytorch` means that version.

mod addresses;
mod blocks;
mod complete;
mod describe;
mod devices;
mod entries;
mod evidence;
mod frames;
mod host;
mod lanes;
mod log;
mod ops;
mod paths;
mod pools;
mod progress;
pub mod reader;
mod run;
mod stacks;
mod start;
mod totals;
mod trace;
mod verify;
mod workload;

pub use blocks::Blocks;
pub use devices::{DeviceFigures, reserved_before_and_peak};
pub use entries::thread_entries;
pub use evidence::{Lack, MissingEntries, NoHistory};
pub use frames::{FrameKind, Runtime};
pub use host::{HostGrowth, HostHolder, HostMemory};
pub use log::Log;
pub use ops::{Op, Ops};
pub use pools::PoolRouting;
pub use progress::{Cancelled, Progress, Silent, Stage};
pub use reader::{Limits, TraceError};
pub use run::{Manner, run_as, walk};
pub use run::{ReplayError, Run, is_served, run};
pub use stacks::{Frame, StackId, Stacks};
pub use start::free_block;
pub use start::{LiveBlock, Start};
pub use totals::{CategoryTotal, Totals, TotalsSource};
pub use trace::{Annotation, BlockStack, MadeHere, Mark, Owner, Trace, TraceEvent, UnknownEntries};
pub use verify::started;
pub use verify::{Misfit, Until, Verification, verify, verify_until};
pub use workload::Workload;

use stratalloc::ids::StreamId;

/// Serializes a stream as its number.
///
/// # Errors
///
/// Those of the serializer.
pub fn stream_number<S: serde::Serializer>(stream: &StreamId, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(stream.0)
}

/// Deserializes a stream from its number.
///
/// # Errors
///
/// Those of the deserializer.
pub fn stream_of_number<'a, D: serde::Deserializer<'a>>(from: D) -> Result<StreamId, D::Error> {
    serde::Deserialize::deserialize(from).map(StreamId)
}
