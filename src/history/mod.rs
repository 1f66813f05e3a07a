//! What happened, in the order in which it happened, and what the memory looks like now.
//!
//! Recording is off unless somebody asks; then it costs one predictable branch. The order is that
//! of the lock that guards the changed state, so a single thread sees its own calls in order.

mod event;
mod recorder;

pub use event::{Action, BlockLayout, BlockStateName, Event, SegmentLayout};
pub use recorder::Recorder;
