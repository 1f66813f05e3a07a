//! Recordings in, decisions out.
//!
//! `reader` turns a snapshot in any encoding into a [`Trace`]; it treats every byte as hostile.

mod trace;

pub use trace::{Trace, TraceEvent};
