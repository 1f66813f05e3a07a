//! Functions for a subclass of PyTorch's `CUDAAllocator`.
//!
//! Every call returns a status. Users of pools are counted as in PyTorch. A free finds the block's
//! device by itself, because PyTorch's deleters are plain functions that get only a pointer.
//!
//! Source: PyTorch's `CUDACachingAllocator`.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use super::not_ours;
use crate::calls::{block, pointer_to, stream_of, stream_to};
use crate::devices::{find, open_device, open_devices, share_pages};
use crate::fork::is_child;
use crate::guard::{Failure, Status, status};
use crate::instance::Instance;
use crate::pointers::{store, store_any};
use crate::pools::{Pool, StreamFilter};
use crate::snapshots::{Entry, stack_in};
use crate::table;
use stratalloc::config::TorchVersion;
use stratalloc::history::{BlockLayout, BlockStateName, History, SegmentLayout};

/// Allocates a block from PyTorch's allocator on a device, and stores its address. Creates the
/// allocator if there is none yet. For zero bytes, stores null and succeeds.
///
/// # Safety
///
/// `pointer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_allocate(
    device: c_int,
    bytes: u64,
    stream: *mut c_void,
    pointer: *mut *mut c_void,
) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pointer, "pointer", || block(open_device(device)?, bytes, stream)) }
}

/// Allocates a block at exactly `address`, from free memory in the cache of the pool that the request is
/// routed to. Fails with `STRATALLOC_STATUS_INVALID_ARGUMENT` if no free block of the stream contains
/// `bytes` bytes from `address` on. The bytes of that block before `address` stay free.
///
/// # Safety
///
/// `pointer` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_allocate_at(
    device: c_int,
    bytes: u64,
    stream: *mut c_void,
    address: *mut c_void,
    pointer: *mut *mut c_void,
) -> Status {
    let work = || {
        let address = address.addr() as u64;
        pointer_to(open_device(device)?.allocate_at(bytes, stream_of(stream), address)?)
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pointer, "pointer", work) }
}

/// Stores a history entry for the live block that starts at `pointer`: address, requested bytes,
/// stream, pool and the current time. The entry has the action 9, PyTorch's `ANNOTATE`, and is not
/// recorded. Fails with `STRATALLOC_STATUS_UNKNOWN_ADDRESS` if there is no such block. Walks over all
/// segments.
///
/// # Safety
///
/// `entry` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_describe_block(
    handle: u64,
    pointer: *mut c_void,
    entry: *mut Entry,
) -> Status {
    let work = || {
        let address = pointer.addr() as u64;
        let segments = table::find(handle)?.caching()?.layout();
        annotation(&segments, address).ok_or_else(|| not_ours(address))
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(entry, "entry", work) }
}

fn annotation(segments: &[SegmentLayout], address: u64) -> Option<Entry> {
    let is_it = |block: &&BlockLayout| {
        block.address == address && block.state == BlockStateName::ActiveAllocated
    };
    let found = segments.iter().find_map(|segment| {
        segment.blocks.iter().find(is_it).map(|block| (segment, block.requested_bytes))
    });
    let (segment, size_bytes) = found?;
    Some(Entry {
        action: 9,
        address,
        size_bytes,
        stream: stream_to(segment.stream),
        pool: segment.pool.into(),
        time_us: i64::try_from(History::now_us()).unwrap_or(i64::MAX),
        compile_context: null(),
        user_metadata: null(),
        stack: null_mut(),
    })
}

/// Called with a stack: the pointer that its source returned.
pub type StackVisitor = Option<unsafe extern "C" fn(user: *mut c_void, stack: *mut c_void)>;

/// Calls `show` with the stack of the live block that starts at `pointer`, as its source returned it.
/// Does not call `show` if there is no such block, or if stacks are not gathered. The stack is valid
/// during the call.
///
/// # Safety
///
/// `show` may be called with `user` during this call, and does not unwind.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_visit_stack(
    handle: u64,
    pointer: *mut c_void,
    show: StackVisitor,
    user: *mut c_void,
) -> Status {
    status(|| {
        let show = show.ok_or_else(|| Failure::null("show"))?;
        let instance = table::find(handle)?;
        let context = instance.history().context_of_block(pointer.addr() as u64);
        let stack = stack_in(context.as_ref());
        if !stack.is_null() {
            // SAFETY: the caller's function, with the caller's pointer; `context` holds the stack.
            unsafe { show(user, stack) };
        }
        Ok(())
    })
}

/// Frees a block of any device. Searches the device `likely` first. Stores the block's device, and the
/// bytes that were requested for it. Ignores null and, in the child of a fork, a block of the parent.
/// In both cases stores -1 and 0.
///
/// # Safety
///
/// `device` and `bytes` may be written, each unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_delete(
    pointer: *mut c_void,
    likely: c_int,
    device: *mut c_int,
    bytes: *mut u64,
) -> Status {
    status(|| {
        let address = pointer.addr() as u64;
        let from_likely = || find(likely)?.take_back(address);
        let (of, requested_bytes) = match pointer.is_null() {
            true => (-1, 0),
            false => match from_likely() {
                Some(taken) => (likely, taken?),
                None => take_back(address, likely)?,
            },
        };
        // SAFETY: required of the caller (`# Safety`).
        unsafe { store_any(device, of) };
        // SAFETY: required of the caller (`# Safety`).
        unsafe { store_any(bytes, requested_bytes) };
        Ok(())
    })
}

/// Frees a block of any device except `likely`. Returns the device and the bytes that were requested for
/// the block. Returns -1 and 0 for an unknown block in the child of a fork.
#[cold]
fn take_back(address: u64, likely: c_int) -> Result<(c_int, u64), Failure> {
    let mut others = open_devices().filter(|(device, _)| *device != likely);
    let free_there = |(device, open): (c_int, &Instance)| Some((device, open.take_back(address)?));
    match others.find_map(free_there) {
        Some((device, taken)) => Ok((device, taken?)),
        None if is_child() => Ok((-1, 0)),
        None => Err(not_ours(address)),
    }
}

/// Routes the requests that a filter accepts to a pool. The new scope takes precedence over all scopes
/// that are already open. Adds a user to the pool, and creates the pool if it is unknown. The user stays
/// until it is released.
///
/// # Safety
///
/// `filter` may be read and meets the requirements of `stratalloc_stream_filter`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_scope_open(
    handle: u64,
    pool: Pool,
    filter: *const StreamFilter,
) -> Status {
    // SAFETY: required of the caller (`# Safety`).
    unsafe {
        StreamFilter::lend(filter, |filter| {
            Ok(table::find(handle)?.pools()?.open_scope(pool.into(), filter)?)
        })
    }
}

/// Closes the scope of a pool. May be called on any thread. The user that the scope added stays.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_scope_close(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.close_scope(pool.into())?))
}

/// Removes a user from a pool. If the pool has no users left, its free memory is released by
/// `stratalloc_pool_empty`, or the next time the allocator releases memory.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_pool_release(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.release_pool(pool.into())?))
}

/// Sets the default of `expandable_segments_ipc` for PyTorch's allocators that are created later. The
/// key decides whether other processes can map their pages. 0 turns it off. A value in the environment
/// takes precedence.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_share_pages(on: c_int) -> Status {
    share_pages(on != 0);
    Status::Ok
}

/// Sets the version of PyTorch that runs in this process. Every configuration that is read later uses
/// it as the version of `compat:pytorch`. An unknown version counts as the nearest known one.
///
/// Call this before any call that reads a configuration. Fails if `major` is 0.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_version(major: u32, minor: u32) -> Status {
    status(|| {
        if major == 0 {
            let text = format!("{major}.{minor} is no version of PyTorch");
            return Err(Failure::invalid(text));
        }
        TorchVersion::nearest(major, minor).set_running();
        Ok(())
    })
}
