//! Pools as they were at one moment, to go back to.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::collections::HashMap;
use std::ffi::c_void;

use super::calls::{pointer_to, stream_to};
use super::guard::{Failure, Status, status};
use super::lent;
use super::pointers::store;
use super::pools::Pool;
use super::table;
use crate::allocator::PoolCheckpoint;

/// A pool's blocks at one moment. Never looked into by its address.
#[derive(Debug)]
pub struct Checkpoint(());

/// Told of a block that is live again.
pub type BlockAllocated = Option<
    unsafe extern "C" fn(user: *mut c_void, address: *mut c_void, size: u64, stream: *mut c_void),
>;
/// Told of a block that was freed without its holder.
pub type BlockFreed =
    Option<unsafe extern "C" fn(user: *mut c_void, address: *mut c_void, size: u64)>;

struct Taken {
    handle: u64,
    checkpoint: PoolCheckpoint,
}

/// Stores a checkpoint of a pool: its blocks now. From here on its idle memory stays while it has users.
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
        Ok(pointer_to(lent::add(Taken { handle, checkpoint: taken }))?.cast())
    };
    // SAFETY: our caller's promise.
    unsafe { store(checkpoint, "checkpoint", work) }
}

/// Makes the pool's blocks what they were at the checkpoint: all live blocks are freed, and the checkpoint's
/// are live again, at their addresses. Memory that the pool took since stays, free. Then `freed` is told of
/// each block that was freed, and `allocated` of each that is live; null for nobody. They may allocate and
/// free, and must not unwind.
///
/// # Safety
///
/// Both may be called with `user` during this call.
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
        let taken = lent::find::<Taken>("checkpoint", checkpoint.addr() as u64)?;
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
            let of = |segment: &crate::history::SegmentLayout| {
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

/// Ends a checkpoint. The pool stays as it is.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_checkpoint_drop(checkpoint: *mut Checkpoint) -> Status {
    status(|| lent::remove::<Taken>("checkpoint", checkpoint.addr() as u64).map(drop))
}
