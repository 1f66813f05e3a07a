//! Snapshots in memory: segments, blocks and entries, shown to functions of the caller's.

#![expect(unsafe_code, reason = "exported names, callers' pointers and functions")]

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null;

use super::calls::{pointer_to, stream_to};
use super::guard::{Status, status};
use super::history::stack_of;
use super::lent;
use super::pointers::{read_struct, store};
use super::pools::Pool;
use super::table;
use crate::history::{self, Action, BlockStateName, Context, Entries, SegmentState};
use crate::ids::PoolId;
use crate::size::PoolKind;

/// Segments, blocks and entries as of one moment. Never looked into by its address.
#[derive(Debug)]
pub struct Snapshot(());

/// An entry of the history. Its pointers are valid during the call that shows it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// What happened, by the numbers of PyTorch's `TraceEntry::Action`: 0 a block was handed out, 1 a free
    /// was asked for, 2 it is done, 3 a segment came, 4 one went, 5 pages were mapped, 6 unmapped, 7 a
    /// snapshot was taken (its size is the active bytes), 8 a request failed, 9 a live block was annotated
    /// (not in a history: PyTorch's class adds those).
    pub action: u32,
    /// Where; free bytes of the device for a request that failed.
    pub address: u64,
    /// How many bytes.
    pub size_bytes: u64,
    /// The stream of the block.
    pub stream: *mut c_void,
    /// The pool of the block.
    pub pool: Pool,
    /// When, in microseconds since 1970.
    pub time_us: i64,
    /// The compiled region that it belongs to, in UTF-8, or null.
    pub compile_context: *const c_char,
    /// What `stratalloc_history_set_metadata` said, in UTF-8, or null.
    pub user_metadata: *const c_char,
    /// The stack as its source gathered it, or null.
    pub stack: *mut c_void,
}

/// A segment. Its stack is valid as long as the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub total_bytes: u64,
    /// What callers asked for, of the blocks in use.
    pub requested_bytes: u64,
    /// In callers' hands.
    pub allocated_bytes: u64,
    /// The same and what waits for other streams.
    pub active_bytes: u64,
    /// The stream whose requests it serves.
    pub stream: *mut c_void,
    /// Its pool.
    pub pool: Pool,
    /// Whether it is one of large blocks.
    pub is_large: c_int,
    /// Whether it is made of mapped pages.
    pub is_expandable: c_int,
    /// Rises in the order in which the segments were taken from the driver; an expandable segment has one
    /// number for all its pages. The order of addresses, where the allocator keeps no numbers.
    pub number: u64,
    /// The stack of who asked for its memory, as its source gathered it, or null.
    pub stack: *mut c_void,
}

/// A block of a segment. Its stack is valid as long as the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Where it starts.
    pub address: u64,
    /// Its size.
    pub size_bytes: u64,
    /// What its last holder asked for.
    pub requested_bytes: u64,
    /// 0 in a caller's hands, 1 freed and waiting for other streams, 2 free.
    pub state: u32,
    /// The stack of its holder, as its source gathered it, or null.
    pub stack: *mut c_void,
}

/// Whom a snapshot is shown to. The functions may be null, may allocate and free, and must not unwind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SnapshotVisitor {
    /// Shown every segment, in address order.
    pub segment: Option<unsafe extern "C" fn(user: *mut c_void, segment: *const Segment)>,
    /// Shown every block behind its segment, in address order.
    pub block: Option<unsafe extern "C" fn(user: *mut c_void, block: *const Block)>,
    /// Shown every entry behind the segments, the oldest first.
    pub entry: Option<unsafe extern "C" fn(user: *mut c_void, entry: *const Entry)>,
    /// Handed to each.
    pub user: *mut c_void,
}

/// What is kept of a snapshot.
struct Taken {
    snapshot: history::Snapshot,
    pool: Option<PoolId>,
}

impl From<PoolId> for Pool {
    fn from(pool: PoolId) -> Self {
        Self { capture: pool.capture, user: pool.user }
    }
}

// Actions and states have their numbers in the order in which they are declared.
const _: () = assert!(Action::SegmentAlloc as u32 == 3 && Action::OutOfMemory as u32 == 8);
const _: () = assert!(BlockStateName::Inactive as u32 == 2);

/// Shows an entry as C has it.
pub(super) fn with_entry(entry: &history::Entry, show: impl FnOnce(&Entry)) {
    let text = |of: fn(&Context) -> Option<&str>| {
        let text = entry.context.as_ref().and_then(of)?;
        // A zero ends a text in C.
        CString::new(text.split('\0').next().unwrap_or_default()).ok()
    };
    let [compile_context, user_metadata] =
        [text(Context::compile_context), text(Context::metadata)];
    let event = entry.event;
    show(&Entry {
        action: event.action as u32,
        address: event.address,
        size_bytes: event.size_bytes,
        stream: stream_to(event.stream),
        pool: event.pool.into(),
        time_us: i64::try_from(entry.time_us()).unwrap_or(i64::MAX),
        compile_context: compile_context.as_deref().map_or(null(), |text| text.as_ptr()),
        user_metadata: user_metadata.as_deref().map_or(null(), |text| text.as_ptr()),
        stack: stack_in(entry.context.as_ref()),
    });
}

pub(super) fn stack_in(context: Option<&Context>) -> *mut c_void {
    stack_of(context.and_then(Context::stack).map(|stack| stack as &dyn Any))
}

impl Segment {
    fn of(state: &SegmentState) -> Self {
        let layout = &state.layout;
        let active = [BlockStateName::ActiveAllocated, BlockStateName::ActivePendingFree];
        let in_use = layout.blocks.iter().filter(|block| active.contains(&block.state));
        Self {
            address: layout.address,
            total_bytes: layout.size_bytes,
            requested_bytes: in_use.map(|block| block.requested_bytes).sum(),
            allocated_bytes: layout.bytes_in(&active[..1]),
            active_bytes: layout.bytes_in(&active),
            stream: stream_to(layout.stream),
            pool: layout.pool.into(),
            is_large: c_int::from(layout.kind == PoolKind::Large),
            is_expandable: c_int::from(layout.expandable),
            number: state.number,
            stack: stack_in(state.context.as_ref()),
        }
    }
}

impl Block {
    fn of(block: &history::BlockLayout, holder: Option<&Context>) -> Self {
        Self {
            address: block.address,
            size_bytes: block.size_bytes,
            requested_bytes: block.requested_bytes,
            state: block.state as u32,
            stack: stack_in(holder),
        }
    }
}

/// Takes a snapshot: all segments and blocks as of one moment, of one pool or, if `pool` is null, of all,
/// and, unless `with_entries` is 0, the history. Waits for no work of the device.
///
/// # Safety
///
/// `pool` may be read if it is not null; `snapshot` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_snapshot_take(
    handle: u64,
    pool: *const Pool,
    with_entries: c_int,
    snapshot: *mut *mut Snapshot,
) -> Status {
    let work = || {
        // SAFETY: our caller's promise.
        let pool = unsafe { read_struct(pool, "pool") }.ok().map(PoolId::from);
        let mut snapshot = table::find(handle)?.recording().snapshot();
        if with_entries == 0 {
            snapshot.entries = Entries::default();
        }
        Ok(pointer_to(lent::add(Taken { snapshot, pool }))?.cast())
    };
    // SAFETY: our caller's promise.
    unsafe { store(snapshot, "snapshot", work) }
}

/// Shows what a snapshot has.
///
/// # Safety
///
/// `visitor` may be read, and its functions called with its `user` during this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_snapshot_visit(
    snapshot: *mut Snapshot,
    visitor: *const SnapshotVisitor,
) -> Status {
    status(|| {
        // SAFETY: our caller's promise.
        let visitor = unsafe { read_struct(visitor, "visitor") }?;
        let SnapshotVisitor { segment, block, entry, user } = visitor;
        let taken = lent::find::<Taken>("snapshot", snapshot.addr() as u64)?;
        let wanted = |pool: PoolId| taken.pool.is_none_or(|only| only == pool);
        for state in taken.snapshot.segments.iter().filter(|state| wanted(state.layout.pool)) {
            if let Some(show) = segment {
                let segment = Segment::of(state);
                // SAFETY: the caller's function, with the caller's pointer.
                unsafe { show(user, &raw const segment) };
            }
            let Some(show) = block else { continue };
            for (layout, holder) in state.layout.blocks.iter().zip(&state.holders) {
                let block = Block::of(layout, holder.as_ref());
                // SAFETY: as above.
                unsafe { show(user, &raw const block) };
            }
        }
        if let Some(show) = entry {
            for entry in taken.snapshot.entries.iter().filter(|entry| wanted(entry.event.pool)) {
                // SAFETY: as above.
                with_entry(entry, |entry| unsafe { show(user, entry) });
            }
        }
        Ok(())
    })
}

/// Ends a snapshot, and releases the stacks that only it held.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_snapshot_drop(snapshot: *mut Snapshot) -> Status {
    status(|| lent::remove::<Taken>("snapshot", snapshot.addr() as u64).map(drop))
}
