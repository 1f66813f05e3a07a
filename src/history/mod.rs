//! The recording of allocator events, and snapshots of the memory layout.
//!
//! Recording is off by default. While it is off, it costs each operation one predictable branch.
//!
//! **Order.** `record` keeps the newest entries in 64 shards, each with its own lock. The entries of one
//! heap of `native` (the blocks of one stream of one pool) go to one shard, under the heap's lock. So
//! the order within a heap is exact, and threads on different heaps rarely contend. Readers merge the
//! shards by timestamp (`clock`). Timestamps increase on each thread. Of two events on different
//! threads, the one that happens later never has an earlier timestamp. The entries of one request that
//! takes memory from the driver share a time, although other threads may have worked on other heaps in
//! between. So the entries are in an order that is possible with one lock for the whole allocator, and a
//! replay of them makes the same decisions. There is one exception: a request releases memory in two
//! passes, and between the passes another thread frees a block whose memory the second pass releases.
//!
//! **Contexts.** A context (`context`) holds the call stack and the names that belong to a request or
//! free. It is gathered before an operation acquires its first lock, because stack providers are user
//! code. For the same reason a context is never dropped under a lock. A reference that may be the last
//! one goes to a list, which is emptied when no lock is held. Contexts of live blocks and segments are
//! kept in maps beside the entries, but only while stacks are gathered.
//!
//! **Checks.** The strategy `native` keeps whether recording is on as a bit of `Attention`, a word that
//! each request checks once. So a request needs no separate check for the history. A free checks the
//! history under its heap's lock, and releases that lock before it gathers a stack.
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
