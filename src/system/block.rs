//! Host memory owned by a Rust value.
#![expect(unsafe_code, reason = "memory from the system's own functions, seen as bytes")]

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;

use super::{ByteAccess, not_supported, refused};
use crate::driver::DriverResult;
use crate::error::DriverError;

#[cfg(target_os = "linux")]
use super::{SystemOptions, mapping};

/// The bytes to fill a block with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Zeros.
    Zero,
    /// The pattern 0x7fedbeef, which is neither a plausible number nor a valid address.
    ///
    /// Source of the pattern: PyTorch's `alloc_cpu`.
    Junk,
}

/// The allocator that the memory is released to.
enum Origin {
    /// The C library.
    #[cfg(unix)]
    System,
    #[cfg(target_os = "linux")]
    Mapping,
    Global(&'static (dyn GlobalAlloc + Sync)),
}

/// Host memory. Dropping the value releases the memory to the allocator that it came from. After
/// `std::mem::forget`, the code that has the address must release it.
pub struct SystemBlock {
    start: NonNull<u8>,
    layout: Layout,
    origin: Origin,
    content: Content,
}

/// What is known about the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    /// Fresh pages, never written.
    Zeros,
    /// Each byte was written.
    Written,
    Unknown,
}

// SAFETY: the memory belongs to this value alone, and may be released on any thread.
unsafe impl Send for SystemBlock {}
// SAFETY: through a shared reference nothing can be read or written.
unsafe impl Sync for SystemBlock {}

fn layout_of(size_bytes: u64, alignment_bytes: u64) -> DriverResult<Layout> {
    let as_usize = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let layout = Layout::from_size_align(as_usize(size_bytes), as_usize(alignment_bytes));
    layout.ok().filter(|layout| layout.size() > 0).ok_or_else(|| {
        let message = format!("no memory has {size_bytes} bytes aligned to {alignment_bytes}");
        not_supported("take", message)
    })
}

impl SystemBlock {
    /// Allocates from the C library.
    #[cfg(unix)]
    pub(super) fn from_system(size_bytes: u64, alignment_bytes: u64) -> DriverResult<Self> {
        let layout = layout_of(size_bytes, alignment_bytes)?;
        // `posix_memalign` requires at least the alignment of a pointer.
        let alignment = layout.align().max(size_of::<usize>());
        let mut start = std::ptr::null_mut();
        // SAFETY: `start` may be written to; the alignment is a power of two and a multiple of a
        // pointer's size.
        let number = unsafe { libc::posix_memalign(&raw mut start, alignment, layout.size()) };
        match NonNull::new(start.cast()) {
            Some(start) if number == 0 => {
                Ok(Self { start, layout, origin: Origin::System, content: Content::Unknown })
            }
            _ => Err(refused("posix_memalign", size_bytes, alignment_bytes, number)),
        }
    }

    /// Allocates from Rust's system allocator.
    #[cfg(not(unix))]
    pub(super) fn from_system(size_bytes: u64, alignment_bytes: u64) -> DriverResult<Self> {
        Self::from_global(&std::alloc::System, size_bytes, alignment_bytes)
    }

    /// Allocates from a Rust allocator.
    pub(super) fn from_global<A: GlobalAlloc + Sync>(
        global: &'static A,
        size_bytes: u64,
        alignment_bytes: u64,
    ) -> DriverResult<Self> {
        let layout = layout_of(size_bytes, alignment_bytes)?;
        // SAFETY: the size of the layout is not zero.
        let start = unsafe { global.alloc(layout) };
        let start = NonNull::new(start)
            .ok_or_else(|| refused("alloc", size_bytes, alignment_bytes, OUT_OF_MEMORY))?;
        Ok(Self { start, layout, origin: Origin::Global(global), content: Content::Unknown })
    }

    /// Allocates from the system as a separate mapping.
    #[cfg(target_os = "linux")]
    pub(super) fn map(
        size_bytes: u64,
        alignment_bytes: u64,
        options: SystemOptions,
    ) -> DriverResult<Self> {
        let layout = layout_of(size_bytes, alignment_bytes)?;
        let start = mapping::map(layout, options)?;
        Ok(Self { start, layout, origin: Origin::Mapping, content: Content::Zeros })
    }

    /// Returns the block's address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Returns the block's size in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.layout.size() as u64
    }

    /// Returns the bytes, which may be uninitialized.
    pub fn bytes(&mut self) -> &mut [MaybeUninit<u8>] {
        self.content = Content::Unknown;
        // SAFETY: the memory is this value's own, has the length of the layout, and is borrowed as long
        // as the value is; `MaybeUninit` bytes need no initial value.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.layout.size()) }
    }

    /// Returns the bytes if all of them are known to be initialized: after a fill, or if they are fresh
    /// zeroed pages of the system.
    pub fn initialized(&mut self) -> Option<&mut [u8]> {
        if self.content == Content::Unknown {
            return None;
        }
        self.content = Content::Written;
        // SAFETY: the memory belongs to this value, has the length of the layout, and is borrowed as
        // long as the value is. Each byte is initialized, here or by the system that made the pages. No
        // caller has got the bytes as `MaybeUninit` since then.
        Some(unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) })
    }

    /// Releases the memory of the whole pages inside `range` (offsets in bytes) to the system, if the block
    /// is a separate mapping. The bytes of the range are undefined afterwards, but initialized if they were.
    pub fn discard(&mut self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if matches!(self.origin, Origin::Mapping)
            && let Some(bytes) = self.initialized().and_then(|bytes| bytes.get_mut(range))
        {
            mapping::discard(bytes);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// Accesses bytes from `offset` on. Returns `None`, without an access, if they are not all inside the
    /// block.
    pub(crate) fn access(&mut self, offset: usize, access: &mut ByteAccess<'_>) -> Option<()> {
        let len = usize::try_from(access.size_bytes()).ok()?;
        let bytes = self.bytes().get_mut(offset..offset.checked_add(len)?)?;
        match access {
            ByteAccess::Read(into) => {
                let (to, from) = (into.as_mut_ptr(), bytes.as_ptr());
                // SAFETY: both ranges have `len` bytes, and they do not overlap, because each is borrowed
                // exclusively. Bytes that were never written are copied with the values that the system
                // left in them: the call is one of another language, where they have values.
                unsafe { copy_bytes(to.cast(), from.cast(), len) };
            }
            ByteAccess::Write(from) => drop(bytes.write_copy_of_slice(from)),
            ByteAccess::Fill { byte, .. } => bytes.fill(MaybeUninit::new(*byte)),
        }
        Some(())
    }

    /// Marks the contents as unknown, because a caller that has the address may have written to them.
    pub(crate) fn mark_touched(&mut self) {
        self.content = Content::Unknown;
    }

    /// Writes to each page of 4 KiB, so that the system provides its memory now. Several `threads` share the
    /// pages.
    pub(crate) fn touch_pages(&mut self, threads: usize) {
        const PAGE_BYTES: usize = 4096;
        let bytes = self.bytes();
        let touch = |part: &mut [MaybeUninit<u8>]| {
            part.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = MaybeUninit::new(0));
        };
        let share = bytes.len().div_ceil(threads.max(1)).next_multiple_of(PAGE_BYTES);
        if bytes.len() <= share {
            return touch(bytes);
        }
        std::thread::scope(|scope| {
            for part in bytes.chunks_mut(share) {
                // Without a thread, the pages are touched at their first use.
                let _ = std::thread::Builder::new().spawn_scoped(scope, move || touch(part));
            }
        });
    }

    /// Fills all bytes. A zero fill of fresh pages touches nothing, because the system has zeroed them.
    pub fn fill(&mut self, fill: Fill) {
        let fresh = self.content == Content::Zeros;
        match fill {
            Fill::Zero if fresh => return,
            Fill::Zero => self.bytes().fill(MaybeUninit::new(0)),
            Fill::Junk => {
                let pattern = 0x7fed_beef_u32.to_le_bytes().map(MaybeUninit::new);
                let mut chunks = self.bytes().chunks_exact_mut(pattern.len());
                chunks.by_ref().for_each(|chunk| chunk.copy_from_slice(&pattern));
                let rest = chunks.into_remainder();
                let len = rest.len();
                rest.copy_from_slice(&pattern[..len]);
            }
        }
        self.content = Content::Written;
    }
}

unsafe extern "C" {
    /// The C library's copy of bytes, which every target has.
    #[link_name = "memcpy"]
    fn copy_bytes(to: *mut c_void, from: *const c_void, len: usize) -> *mut c_void;
}

/// Makes the C library release its free pages, if it supports that.
pub(super) fn trim_c_library() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call touches only free memory of the C library, under that library's locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The system's error number for "out of memory" (`ENOMEM`).
const OUT_OF_MEMORY: i32 = 12;

impl Drop for SystemBlock {
    fn drop(&mut self) {
        let start = self.start.as_ptr();
        match self.origin {
            #[cfg(unix)]
            // SAFETY: the memory came from `posix_memalign`, and only this value frees it.
            Origin::System => unsafe { libc::free(start.cast()) },
            #[cfg(target_os = "linux")]
            Origin::Mapping => mapping::unmap(self.start, self.layout),
            // SAFETY: the memory came from this allocator, with this layout.
            Origin::Global(global) => unsafe { global.dealloc(start, self.layout) },
        }
    }
}

impl fmt::Debug for SystemBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SystemBlock({:p}, {} bytes)", self.start, self.layout.size())
    }
}

/// Returns the error for a failed system call.
#[cfg(target_os = "linux")]
pub(super) fn failed(
    call: &'static str,
    layout: Layout,
    error: impl Into<std::io::Error>,
) -> DriverError {
    let number = error.into().raw_os_error().unwrap_or(0);
    refused(call, layout.size() as u64, layout.align() as u64, number)
}
