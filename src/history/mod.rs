//! What happened, in the order in which it happened, and what the memory looks like now.
//!
//! Recording is off unless somebody asks; then it costs one predictable branch. The order is that of the lock
//! that guards the changed state, so a single thread sees its own calls in order. `record` keeps the newest
//! entries, `context` says who asked, `snapshot` is both together with the segments.

mod annotations;
mod clock;
mod context;
mod entries;
mod event;
mod explain;
mod late;
mod live;
mod options;
mod record;
#[cfg(feature = "stacks")]
mod rust_stacks;
mod snapshot;
mod trackers;
mod write;

pub(crate) use clock::Moment;
#[cfg(feature = "ffi")]
pub(crate) use context::NameKind;
pub(crate) use record::Listener;

pub use annotations::{Annotation, AnnotationScope};
pub use context::{Context, ContextScope, Frame, Stack, StackProvider, ThreadMetadata};
pub use entries::Entries;
pub use event::{Action, BlockLayout, BlockStateName, Entry, Event, SegmentLayout};
pub use live::{LeakReporter, LiveReport};
pub use options::{RecordOptions, StackLevel};
pub use record::History;
#[cfg(feature = "stacks")]
pub use rust_stacks::RustStacks;
pub use snapshot::{About, SegmentState, Snapshot};
pub use trackers::{Tracker, TrackerId};
pub use write::Format;
