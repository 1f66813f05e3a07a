//! Reads recordings and repeats them.
//!
//! `reader` parses a snapshot in any encoding into a [`Trace`]; every byte is treated as hostile.
//! `workload` extracts the requests of a trace and drops the decisions of its allocator. `pools` finds
//! the pool of each request: recordings of PyTorch 2.11 do not name it, so it comes from the final
//! layout. `verify` compares the engine's decisions with the recorded ones. `run` repeats the requests
//! on any allocator and measures the time. `stacks` stores the stacks of requests, `frames` separates
//! the program's frames from the runtime's, and `start` reconstructs the layout before the first event.
//!
//! The version of PyTorch that made a recording follows from its contents ([`Trace::torch_version`]);
//! `compat:pytorch` means that version.

mod addresses;
mod describe;
mod frames;
mod pools;
pub mod reader;
mod run;
mod stacks;
mod start;
mod trace;
mod verify;
mod workload;

pub use frames::{FrameKind, Runtime};
pub(crate) use pools::PoolRouting;
pub use reader::{Limits, TraceError};
pub(crate) use run::{Manner, run_as, walk};
pub use run::{ReplayError, Run, is_served, run};
pub use stacks::{Frame, StackId, Stacks};
pub(crate) use start::free_block;
pub use start::{LiveBlock, Start};
pub use trace::{Annotation, HostMemory, MadeHere, Trace, TraceEvent, UnknownEntries};
pub use verify::{Misfit, Verification, verify, verify_recording};
pub(crate) use verify::{Until, started, verify_until};
pub use workload::{Op, Workload};
