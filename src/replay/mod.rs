//! Recordings in, decisions out.
//!
//! `reader` turns a snapshot in any encoding into a [`Trace`]; it treats every byte as hostile.

pub mod reader;
mod trace;

pub use reader::{Limits, TraceError};
pub use trace::{Trace, TraceEvent};
