//! Mappings of the system's memory, with options: huge pages, a NUMA node.
#![expect(unsafe_code, reason = "mapping memory")]

use std::alloc::Layout;
use std::ffi::{c_long, c_ulong, c_void};
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::block::failed;
use super::{HUGE_PAGE_BYTES, SystemOptions, not_supported};
use crate::driver::DriverResult;

/// `MPOL_PREFERRED`: the kernel uses the given nodes if they have room.
const PREFERRED: c_long = 1;
/// The number of nodes in a node mask.
pub(super) const NODES_MAX: u32 = 1024;

/// Returns the size of a page. rustix would read it from the auxiliary vector of the process by itself, which
/// crashes under valgrind.
fn page_bytes() -> usize {
    // SAFETY: the call reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).expect("every system has pages")
}

/// Returns the size of this layout, rounded up to whole pages.
fn pages(layout: Layout) -> Option<usize> {
    layout.size().checked_next_multiple_of(page_bytes())
}

/// Maps fresh, zeroed memory. Pages that are not touched use no memory.
pub(super) fn map(layout: Layout, options: SystemOptions) -> DriverResult<NonNull<u8>> {
    let too_large = || failed("mmap", layout, Errno::NOMEM);
    let size = pages(layout).ok_or_else(too_large)?;
    let huge = options.huge_pages && layout.size() as u64 >= HUGE_PAGE_BYTES;
    let wanted = if huge { layout.align().max(2 << 20) } else { layout.align() };
    let spare = if wanted > page_bytes() { wanted } else { 0 };
    let whole = size.checked_add(spare).ok_or_else(too_large)?;
    let (access, kind) =
        (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: an anonymous mapping at an address the system chooses replaces nothing.
    let mapped = unsafe { mmap_anonymous(ptr::null_mut(), whole, access, kind) }
        .map_err(|error| failed("mmap", layout, error))?;
    let mapped = mapped.cast::<u8>();
    let head = if spare > 0 { mapped.align_offset(wanted) } else { 0 };
    let start = mapped.wrapping_add(head);
    cut(mapped, head);
    cut(start.wrapping_add(size), spare - head);
    let start = NonNull::new(start).ok_or_else(too_large)?;
    let wished = wish(start, size, huge, options.numa_node);
    if let Err((call, error)) = wished {
        unmap(start, layout);
        let error = failed(call, layout, error);
        return Err(not_supported(call, error.message()));
    }
    Ok(start)
}

/// Unmaps the `size_bytes` before or behind a block. If that fails, address space without memory leaks.
fn cut(start: *mut u8, size_bytes: usize) {
    if size_bytes > 0 {
        // SAFETY: this part of our own mapping belongs to no block.
        let _ = unsafe { munmap(start.cast(), size_bytes) };
    }
}

type Failed = (&'static str, Errno);

fn wish(start: NonNull<u8>, size: usize, huge: bool, node: Option<u32>) -> Result<(), Failed> {
    let start = start.as_ptr().cast::<c_void>();
    if huge {
        // SAFETY: this advice changes no byte of our own mapping.
        unsafe { madvise(start, size, Advice::LinuxHugepage) }.map_err(|e| ("madvise", e))?;
    }
    let Some(node) = node else { return Ok(()) };
    let mut mask = [0 as c_ulong; NODES_MAX as usize / c_ulong::BITS as usize];
    mask[(node / c_ulong::BITS) as usize] |= 1 << (node % c_ulong::BITS);
    // The kernel reads one bit less than this argument.
    let bits = c_ulong::from(NODES_MAX) + 1;
    // SAFETY: the kernel reads one bit less than `bits`, which is the length of the mask. The call
    // changes no byte of the mapping.
    let done =
        unsafe { libc::syscall(libc::SYS_mbind, start, size, PREFERRED, mask.as_ptr(), bits, 0) };
    if done == 0 { Ok(()) } else { Err(("mbind", last_error())) }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// Releases the memory of the whole pages inside a range. They read as zeros afterwards. A failure keeps the
/// memory, with unchanged bytes.
pub(super) fn discard(range: &mut [u8]) {
    let page = page_bytes();
    let head = range.as_ptr().align_offset(page).min(range.len());
    let whole = (range.len() - head) / page * page;
    if whole > 0 {
        let start = range[head..].as_mut_ptr().cast::<c_void>();
        // SAFETY: the caller borrows these bytes of an anonymous private mapping exclusively. The call
        // replaces them with zeros, so they stay initialized.
        let _ = unsafe { madvise(start, whole, Advice::LinuxDontNeed) };
    }
}

/// Unmaps memory returned by [`map`]. That fails only if the system has no memory for its own tables.
/// Then the pages are released, and the address space leaks.
pub(super) fn unmap(start: NonNull<u8>, layout: Layout) {
    let size = pages(layout).unwrap_or(0);
    let start = start.as_ptr().cast::<c_void>();
    // SAFETY: the mapping belongs to the block, which is being dropped.
    if unsafe { munmap(start, size) }.is_err() {
        // SAFETY: the mapping belongs to the block that is being dropped, and its bytes are not read any
        // more.
        let _ = unsafe { madvise(start, size, Advice::LinuxDontNeed) };
    }
}
