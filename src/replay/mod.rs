//! Recordings in, decisions out.
//!
//! `reader` turns a snapshot in any encoding into a [`Trace`]; it treats every byte as hostile.
//! `workload` is what a trace asked for (`pools` finds out of which pool), `verify` compares decision by
//! decision, `run` repeats the requests on any allocator and times them; `stacks` keeps the stacks of
//! requests, `frames` decides which of their frames show the program, `start` is what was there before.

#![cfg_attr(
    not(feature = "cli"),
    allow(
        dead_code,
        unused_imports,
        reason = "some parts are for the analysis and the command line only"
    )
)]

mod answers;
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
