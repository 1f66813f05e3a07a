//! The recording of allocator events, and snapshots of the memory layout.
//!
//! Recording is off by default; then it costs one predictable branch.
//!
//! **Order.** `record` keeps the newest entries in 64 shards, each with its own lock. The entries of one
//! heap go to one shard under the heap's lock. So the order within a heap is exact, and threads on
//! different heaps do not contend. Readers merge the shards by timestamp (`clock`). Timestamps increase
//! on each thread, and an event that happens after an event of another thread has no earlier timestamp.
//! The entries of one request that takes memory from the driver share a timestamp, although other threads
//! may have worked on other heaps in between. So a file reads as if the allocator had one lock, and a
//! verifying replay reproduces it. There is one exception: a request releases memory in two passes, and
//! between them another thread frees a block that the second pass releases.
//!
//! **Contexts.** `context` holds the call stack and the names that a request or free belongs to. It is
//! gathered before an operation takes its first lock, because stack providers are user code. A reference
//! that may be the last one goes to a list, which is emptied when no lock is held. Live blocks and
//! segments keep their contexts in maps beside the entries, but only while stacks are gathered.
//!
//! **Checks.** A request checks for a history as part of its check of `Attention`, which the history
//! raises. A free checks under its heap's lock, and releases that lock to gather a stack.
//!
//! **Output.** `snapshot` combines the entries and contexts with the segments; `write` stores it as
//! pickle or JSON.

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
#[doc(hidden)]
pub use context::NameKind;
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
