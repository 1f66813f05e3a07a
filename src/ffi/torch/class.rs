//! What a subclass of PyTorch's `CUDAAllocator` calls: every call has a status, and users of pools count as
//! PyTorch counts them.
//!
//! Source: PyTorch's `CUDACachingAllocator`.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_int, c_void};

use super::devices::{OpenDevice, find, name_in_force, open_device, open_devices, share_pages};
use super::not_ours;
use crate::ffi::calls::{pointer_to, stream_of};
use crate::ffi::fork::is_child;
use crate::ffi::guard::{Failure, Status, status};
use crate::ffi::pools::{Pool, StreamFilter};
use crate::ffi::table;
use crate::ffi::text::{Place, write};
use crate::registry::key_table;

/// Hands out a block of the allocator that PyTorch has on a device, which is made if there is none yet, and
/// stores its address. Zero bytes store null and are no error.
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
    status(|| {
        // SAFETY: our caller's promise.
        let place = unsafe { Place::new(pointer, "pointer") }?;
        let instance = &open_device(device)?.instance;
        let address = if bytes == 0 { 0 } else { instance.allocate(bytes, stream_of(stream))? };
        place.put(pointer_to(address)?);
        Ok(())
    })
}

/// Takes a block back from whichever device it is of, `likely` being asked first, and stores the device and
/// how many bytes were asked for. Null is ignored, and so is, in the child of a fork, a block of the
/// parent's: -1 and 0 are stored then.
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
        let from_likely = || find(likely)?.instance.take_back(address);
        let (of, asked) = match pointer.is_null() {
            true => (-1, 0),
            false => match from_likely() {
                Some(taken) => (likely, taken?),
                None => take_back(address, likely)?,
            },
        };
        if !device.is_null() {
            // SAFETY: our caller's promise.
            unsafe { Place::new(device, "device") }?.put(of);
        }
        if !bytes.is_null() {
            // SAFETY: our caller's promise.
            unsafe { Place::new(bytes, "bytes") }?.put(asked);
        }
        Ok(())
    })
}

/// Asks all devices but the likely one: which has taken the block back, and how many bytes were asked for.
#[cold]
fn take_back(address: u64, likely: c_int) -> Result<(c_int, u64), Failure> {
    let mut others = open_devices().filter(|(device, _)| *device != likely);
    let ask =
        |(device, open): (c_int, &OpenDevice)| Some((device, open.instance.take_back(address)?));
    match others.find_map(ask) {
        Some((device, taken)) => Ok((device, taken?)),
        None if is_child() => Ok((-1, 0)),
        None => Err(not_ours(address)),
    }
}

/// Routes the requests that a filter accepts to a pool, before all scopes that are open already, and adds a
/// user, which stays until it is released. A pool that is unknown is made.
///
/// # Safety
///
/// `filter` may be read, and does what `stratalloc_stream_filter` asks of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_scope_open(
    handle: u64,
    pool: Pool,
    filter: *const StreamFilter,
) -> Status {
    // SAFETY: our caller's promise.
    unsafe {
        StreamFilter::lend(filter, |filter| {
            Ok(table::find(handle)?.pools()?.open_scope(pool.into(), filter)?)
        })
    }
}

/// Ends the routing to a pool, from any thread. The user that it added stays.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_scope_close(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.close_scope(pool.into())?))
}

/// Removes a user from a pool. Without users its idle memory goes back when memory is released, or by
/// `stratalloc_pool_empty`.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_pool_release(handle: u64, pool: Pool) -> Status {
    status(|| Ok(table::find(handle)?.pools()?.release_pool(pool.into())?))
}

/// Writes the name of the strategy that PyTorch has on a device, in the manner of
/// `stratalloc_statistics_json`. Opens no device: for one that nobody has used it is what the environment
/// says.
///
/// # Safety
///
/// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_name(
    device: c_int,
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    // SAFETY: our caller's promise.
    unsafe { write(buffer, size, needed, || name_in_force(device)) }
}

/// Writes the names of all keys that a configuration string can say now, between commas, in the manner of
/// `stratalloc_statistics_json`.
///
/// # Safety
///
/// `size` bytes from `buffer` and `needed` may be written, each unless it is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_torch_conf_keys(
    buffer: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    let text = || Ok(key_table().names().collect::<Vec<_>>().join(","));
    // SAFETY: our caller's promise.
    unsafe { write(buffer, size, needed, text) }
}

/// Lets pages that PyTorch's allocators map leave the process, unless the environment says
/// `expandable_segments_ipc`: as the default of allocators that are made from now on, or no more if `on` is
/// 0.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_torch_share_pages(on: c_int) -> Status {
    share_pages(on != 0);
    Status::Ok
}
