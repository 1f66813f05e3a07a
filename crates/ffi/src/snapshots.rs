//! Snapshots in memory. Their segments, blocks and entries are passed to callers' functions.

#![expect(unsafe_code, reason = "exported names, callers' pointers and functions")]

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_void};
use std::ptr::null;

use super::calls::{pointer_to, stream_to};
use super::guard::{Status, status};
use super::history::stack_of;
use super::pointers::{read_struct, store};
use super::pools::Pool;
use super::{table, user_data};
use stratalloc::allocator::Recording;
use stratalloc::history::{self, Action, BlockStateName, Context, Entries, SegmentState};
use stratalloc::ids::PoolId;
use stratalloc::size::PoolKind;

/// Segments, blocks and entries as of one moment. An opaque handle, which is never dereferenced.
#[derive(Debug)]
pub struct Snapshot(());

/// An entry of the history. Its pointers are valid during the call that receives it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The action, with the numbers of PyTorch's `TraceEntry::Action`: 0 block allocated, 1 free
    /// requested, 2 free completed, 3 segment allocated, 4 segment freed, 5 pages mapped, 6 pages
    /// unmapped, 7 snapshot taken (the size is the active bytes), 8 request failed, 9 live block
    /// annotated (never recorded, only in the result of `stratalloc_torch_describe_block`). PyTorch has
    /// no tags: 16 memory released by a pause, 17 memory mapped by a resume.
    pub action: u32,
    /// The address. For a failed request, the free bytes of the device.
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The stream of the block.
    pub stream: *mut c_void,
    /// The pool of the block.
    pub pool: Pool,
    /// The time, in microseconds since 1970.
    pub time_us: i64,
    /// The compiled region, in UTF-8, or null.
    pub compile_context: *const c_char,
    /// The metadata, in UTF-8, or null. See `stratalloc_history_set_metadata` and
    /// `stratalloc_history_set_thread_metadata`.
    pub user_metadata: *const c_char,
    /// The stack, as its source returned it, or null.
    pub stack: *mut c_void,
}

/// A segment. Its stack is valid as long as the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// The start address.
    pub address: u64,
    /// The size in bytes.
    pub total_bytes: u64,
    /// The bytes that callers requested for the blocks of `active_bytes`.
    pub requested_bytes: u64,
    /// The bytes of live blocks.
    pub allocated_bytes: u64,
    /// The bytes of live blocks, and of freed blocks that wait for other streams.
    pub active_bytes: u64,
    /// The stream whose requests the segment serves.
    pub stream: *mut c_void,
    /// The pool of the segment.
    pub pool: Pool,
    /// 1 if the segment is for large blocks.
    pub is_large: c_int,
    /// 1 if the segment is expandable.
    pub is_expandable: c_int,
    /// Segments are numbered in the order in which they were allocated from the driver. An expandable
    /// segment has one number for all its pages. If the allocator assigns no numbers, the order is that
    /// of the addresses.
    pub number: u64,
    /// The stack of the request that allocated the segment, as its source returned it, or null.
    pub stack: *mut c_void,
}

/// A block of a segment. Its stack is valid as long as the snapshot.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The start address.
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The bytes that the block's last request asked for.
    pub requested_bytes: u64,
    /// 0 live, 1 freed but still used by other streams, 2 free.
    pub state: u32,
    /// The stack of the block's request, as its source returned it, or null.
    pub stack: *mut c_void,
}

/// Functions that receive the contents of a snapshot. Each may be null, may allocate and free, and must
/// not unwind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SnapshotVisitor {
    /// Called with every segment, in address order.
    pub segment: Option<unsafe extern "C" fn(user: *mut c_void, segment: *const Segment)>,
    /// Called with every block of a segment, after the segment and in address order.
    pub block: Option<unsafe extern "C" fn(user: *mut c_void, block: *const Block)>,
    /// Called with every entry of the snapshot's pools, after the segments and oldest first.
    pub entry: Option<unsafe extern "C" fn(user: *mut c_void, entry: *const Entry)>,
    /// Passed to each function.
    pub user: *mut c_void,
}

/// The object behind a snapshot's handle.
struct Taken {
    snapshot: history::Snapshot,
    pool: Option<PoolId>,
}

impl From<PoolId> for Pool {
    fn from(pool: PoolId) -> Self {
        Self { capture: pool.capture, user: pool.user }
    }
}

// `Entry::action` and `Block::state` document numbers, which follow from the order of the variants.
const _: () = assert!(Action::SegmentAlloc as u32 == 3 && Action::OutOfMemory as u32 == 8);
const _: () = assert!(BlockStateName::Inactive as u32 == 2);

/// Returns the number of an action in the C interface. PyTorch's numbers are below 16.
fn number_of(action: Action) -> u32 {
    match action {
        Action::TagPause => 16,
        Action::TagResume => 17,
        other => other as u32,
    }
}

/// Converts an entry to the C structure and passes it to `show`.
pub(super) fn with_entry(entry: &history::Entry, show: impl FnOnce(&Entry)) {
    let text = |of: fn(&Context) -> Option<&str>| {
        let text = entry.context.as_ref().and_then(of)?;
        // A C string ends at the first zero, so the text is cut there.
        CString::new(text.split('\0').next().unwrap_or_default()).ok()
    };
    let [compile_context, user_metadata] =
        [text(Context::compile_context), text(Context::metadata)];
    let event = entry.event;
    show(&Entry {
        action: number_of(event.action),
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
        let in_use = layout.blocks.iter().filter(|block| block.state != BlockStateName::Inactive);
        Self {
            address: layout.address,
            total_bytes: layout.size_bytes,
            requested_bytes: in_use.map(|block| block.requested_bytes).sum(),
            allocated_bytes: layout.bytes_in(&[BlockStateName::ActiveAllocated]),
            active_bytes: layout.bytes_in(&BlockStateName::ACTIVE),
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

/// Takes a snapshot of the segments and blocks of one pool, or of all pools if `pool` is null, as of
/// one moment. Includes the history unless `with_entries` is 0. Does not wait for work of the device.
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
        // SAFETY: required of the caller (`# Safety`).
        let pool = unsafe { read_struct(pool, "pool") }.ok().map(PoolId::from);
        let mut snapshot = table::find(handle)?.allocator.snapshot();
        if with_entries == 0 {
            snapshot.entries = Entries::default();
        }
        Ok(pointer_to(user_data::add(Taken { snapshot, pool }))?.cast())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(snapshot, "snapshot", work) }
}

/// Passes a snapshot's contents to the functions of `visitor`.
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
        // SAFETY: required of the caller (`# Safety`).
        let visitor = unsafe { read_struct(visitor, "visitor") }?;
        let SnapshotVisitor { segment, block, entry, user } = visitor;
        let taken = user_data::find::<Taken>("snapshot", snapshot.addr() as u64)?;
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

/// Drops a snapshot. Releases the stacks that nothing else refers to.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_snapshot_drop(snapshot: *mut Snapshot) -> Status {
    status(|| user_data::release::<Taken>("snapshot", snapshot.addr() as u64))
}
