//! Checkpoints of private pools, which can be restored later.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::collections::HashMap;
use std::ffi::c_void;

use super::calls::{pointer_to, stream_to};
use super::guard::{Failure, Status, status};
use super::pointers::store;
use super::pools::Pool;
use super::{table, user_data};
use stratalloc::allocator::PoolCheckpoint;

/// The blocks of a pool at one moment. An opaque handle, which is never dereferenced.
#[derive(Debug)]
pub struct Checkpoint(());

/// Called with each block that a restore made live.
pub type BlockAllocated = Option<
    unsafe extern "C" fn(user: *mut c_void, address: *mut c_void, size: u64, stream: *mut c_void),
>;
/// Called with each block that a restore freed.
pub type BlockFreed =
    Option<unsafe extern "C" fn(user: *mut c_void, address: *mut c_void, size: u64)>;

struct Taken {
    handle: u64,
    checkpoint: PoolCheckpoint,
}

/// Takes a checkpoint of a pool's current blocks. After that, free memory of the pool is not released
/// while the pool has users.
///
/// # Safety
///
/// `checkpoint` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_checkpoint_take(
    handle: u64,
    pool: Pool,
    checkpoint: *mut *mut Checkpoint,
) -> Status {
    let work = || {
        let taken = table::find(handle)?.checkpoints()?.checkpoint(pool.into())?;
        Ok(pointer_to(user_data::add(Taken { handle, checkpoint: taken }))?.cast())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(checkpoint, "checkpoint", work) }
}

/// Restores a pool to a checkpoint: frees all live blocks, then makes the checkpoint's blocks live at
/// their addresses. Memory that the pool has acquired since the checkpoint stays in the pool, free. Then
/// calls `freed` with each block that was freed, and `allocated` with each block that was made live.
/// Either function may be null. They may allocate and free, and must not unwind.
///
/// # Safety
///
/// `allocated` and `freed` may be called with `user` during this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_checkpoint_restore(
    handle: u64,
    checkpoint: *mut Checkpoint,
    allocated: BlockAllocated,
    freed: BlockFreed,
    user: *mut c_void,
) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        let taken = user_data::find::<Taken>("checkpoint", checkpoint.addr() as u64)?;
        if taken.handle != handle {
            let text = "the checkpoint is another allocator's";
            return Err(Failure::invalid(text));
        }
        let restored = instance.checkpoints()?.restore(&taken.checkpoint)?;
        if let Some(freed) = freed {
            for block in &restored.freed {
                // SAFETY: the caller's function, with the caller's pointer.
                unsafe { freed(user, pointer_to(block.address)?, block.size_bytes) };
            }
        }
        if let Some(allocated) = allocated {
            let segments = &taken.checkpoint.segments;
            let of = |segment: &stratalloc::history::SegmentLayout| {
                let stream = segment.stream;
                segment.blocks.iter().map(move |block| (block.address, stream)).collect::<Vec<_>>()
            };
            let streams: HashMap<_, _> = segments.iter().flat_map(of).collect();
            for block in &restored.live {
                let stream = streams.get(&block.address()).copied().unwrap_or_default();
                let address = pointer_to(block.address())?;
                // SAFETY: the caller's function, with the caller's pointer.
                unsafe { allocated(user, address, block.size_bytes(), stream_to(stream)) };
            }
        }
        Ok(())
    })
}

/// Drops a checkpoint. The pool stays as it is.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_checkpoint_drop(checkpoint: *mut Checkpoint) -> Status {
    status(|| user_data::release::<Taken>("checkpoint", checkpoint.addr() as u64))
}
