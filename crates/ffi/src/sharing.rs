//! Blocks shared with other processes, peer access by other devices, and expandable segments.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_int, c_void};

use super::calls::{pointer_to, stream_of, stream_to};
use super::guard::{Failure, Status, status};
use super::pointers::{OutPointer, read_any, store_any, write_all};
use super::{table, user_data};
use stratalloc::allocator::Imported;
use stratalloc::ids::DeviceId;
use stratalloc::sharing::SharedHandle;
use stratalloc::size::PoolKind;

/// Called with an expandable segment: its stream, whether it is for small blocks, and its mapped bytes.
pub type ExpandableVisitor = Option<
    unsafe extern "C" fn(
        user: *mut c_void,
        stream: *mut c_void,
        is_small: c_int,
        mapped_bytes: u64,
    ),
>;

/// Writes the bytes with which another process can open the block that starts at `pointer`. They need no
/// special channel, but should be sent only to that process, because they may contain a secret. They have
/// no terminating zero. `needed`, unless null, is set to their number. `offset`, unless null, is set to the
/// distance of `pointer` from the address that opening the block returns. It is always 0, because a block
/// is opened at its start.
///
/// If `size` is 0, writes no bytes. Sharing a block twice returns equal bytes. Does not wait for work.
///
/// # Safety
///
/// `size` bytes from `buffer`, `needed` and `offset` may be written, each unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_share(
    handle: u64,
    pointer: *mut c_void,
    buffer: *mut c_void,
    size: usize,
    needed: *mut usize,
    offset: *mut u64,
) -> Status {
    let bytes = || {
        let shared = table::find(handle)?.sharing()?.share_raw(pointer.addr() as u64)?;
        Ok(shared.as_bytes().to_vec())
    };
    // SAFETY: required of the caller (`# Safety`).
    let written = unsafe { write_all(buffer.cast(), size, needed, bytes) };
    if written == Status::Ok {
        // SAFETY: required of the caller (`# Safety`).
        unsafe { store_any(offset, 0) };
    }
    written
}

/// Maps a block of another process into this one, from the bytes that `stratalloc_share` wrote there.
/// Stores a number that identifies the block, its address in this process and its size. May wait for the
/// driver, and for some seconds for the other process.
///
/// # Safety
///
/// `size` bytes from `bytes` may be read; `shared`, `address` and `size_bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_open_shared(
    handle: u64,
    bytes: *const c_void,
    size: usize,
    shared: *mut u64,
    address: *mut *mut c_void,
    size_bytes: *mut u64,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let shared = unsafe { OutPointer::new(shared, "shared") }?;
        // SAFETY: required of the caller (`# Safety`).
        let address = unsafe { OutPointer::new(address, "address") }?;
        // SAFETY: required of the caller (`# Safety`).
        let out = unsafe { OutPointer::new(size_bytes, "size_bytes") }?;
        if bytes.is_null() {
            return Err(Failure::null("bytes"));
        }
        if isize::try_from(size).is_err() {
            return Err(Failure::invalid("size is more than there can be"));
        }
        // SAFETY: not null, and not larger than a slice can be. The rest is required of the caller
        // (`# Safety`).
        let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), size) };
        let instance = table::find(handle)?;
        let sharing = instance.sharing()?;
        let from =
            SharedHandle::from_bytes(bytes).map_err(stratalloc::sharing::SharingError::from)?;
        let imported = sharing.open(&from)?;
        address.put(pointer_to(imported.address())?);
        out.put(imported.size_bytes());
        shared.put(user_data::add(imported));
        Ok(())
    })
}

/// Closes a shared block. Its pages are unmapped when no other open block of this process uses them.
/// Unmapping waits for the device.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_close_shared(shared: u64) -> Status {
    status(|| user_data::release::<Imported>("shared block", shared))
}

/// Gives `device` access to the allocator's memory, present and future. For the other direction, call
/// this for the allocator of `device`. A repeated call is no error. Never waits for work.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_enable_peer(handle: u64, device: c_int) -> Status {
    status(|| {
        let instance = table::find(handle)?;
        let negative = |_| Failure::invalid(format_args!("there is no device {device}"));
        let device = DeviceId(u32::try_from(device).map_err(negative)?);
        Ok(instance.peers()?.enable_peer_access(device)?)
    })
}

/// Calls `visit` with every expandable segment, in address order. `visit` may allocate and free, and
/// must not unwind.
///
/// # Safety
///
/// `visit` may be called with `user` during this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_expandable_segments(
    handle: u64,
    visit: ExpandableVisitor,
    user: *mut c_void,
) -> Status {
    status(|| {
        let visit = visit.ok_or_else(|| Failure::null("visit"))?;
        for segment in table::find(handle)?.expandable()?.expandable_segments() {
            let is_small = c_int::from(segment.kind == PoolKind::Small);
            // SAFETY: the caller's function, with the caller's pointer.
            unsafe { visit(user, stream_to(segment.stream), is_small, segment.mapped_bytes) };
        }
        Ok(())
    })
}

/// Assigns a stream to a class that the setting `expandable_segments_reserve_by_class` defines. A null
/// `class_name` removes the stream from its class. Applies to segments that are reserved later.
///
/// # Safety
///
/// `class_name` ends with a zero byte if it is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_set_reserve_class(
    handle: u64,
    stream: *mut c_void,
    class_name: *const c_char,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let class = unsafe { read_any(class_name, "class_name") }?;
        table::find(handle)?.expandable()?.set_reserve_class(stream_of(stream), class);
        Ok(())
    })
}
