//! Host memory directly from the system: what `backend:cpu` caches, what `backend:pinned` registers, and what
//! tags keep contents in. Also the host's name, and the process behind a socket.
//!
//! A [`SystemBlock`] owns its bytes and releases them when it is dropped. So memory is held exactly as
//! long as its block, and bookkeeping errors cannot release it twice. Safe code can access the bytes
//! only through the block.
//!
//! A [`Source`] provides blocks: [`SystemMemory`] is the system's own memory, [`FromGlobal`] any Rust
//! allocator. Large blocks are separate mappings, small ones come from the C library. Nothing is cached
//! here. Unsafe code is only in `block` (the bytes), `mapping` and `peer` (system calls).

mod block;
mod byte_access;
#[cfg(target_os = "linux")]
mod mapping;
#[cfg(target_os = "linux")]
mod peer;
mod usage;

use std::alloc::GlobalAlloc;
use std::fmt;

use crate::driver::DriverResult;
use crate::error::{DriverError, DriverErrorKind};

pub use block::{Fill, SystemBlock};
pub use byte_access::ByteAccess;
#[cfg(target_os = "linux")]
#[doc(hidden)]
pub use peer::{Peer, peer_of};
pub(crate) use usage::host_name;
pub use usage::memory_info;

/// Blocks of this size or more are separate mappings, if the system supports mappings.
pub(crate) const MAPPING_MIN_BYTES: u64 = 1 << 20;
/// Blocks of this size or more can use huge pages.
pub(crate) const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// A source of blocks.
pub trait Source: fmt::Debug + Send + Sync {
    /// Allocates exactly `size_bytes` (at least 1), aligned to `alignment_bytes` (a power of two). May
    /// wait for the system, which may have to reclaim memory first.
    ///
    /// # Errors
    ///
    /// [`DriverError`] with the system's error number as its code.
    fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock>;

    /// Releases a block. Must not call into the allocator that releases it.
    fn release(&self, block: SystemBlock) {
        drop(block);
    }

    /// Releases free memory that the source itself caches. May take milliseconds.
    fn release_cached(&self) {}
}

/// Options for memory from the system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SystemOptions {
    /// True if blocks of at least 2 MiB use transparent huge pages.
    pub huge_pages: bool,
    /// The NUMA node from which mappings are allocated while it has room. `None`: a node near the thread
    /// that touches the memory first.
    pub numa_node: Option<u32>,
}

/// The system's memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemMemory {
    options: SystemOptions,
}

impl SystemMemory {
    /// Returns a source with these options.
    ///
    /// # Errors
    ///
    /// [`DriverErrorKind::NotSupported`] when this machine has no huge pages or no such node, or does
    /// not allow this process to choose a node.
    pub fn new(options: SystemOptions) -> DriverResult<Self> {
        if options.huge_pages {
            usage::check_huge_pages()?;
        }
        if let Some(node) = options.numa_node {
            usage::check_node(node)?;
            // A system without NUMA support, or a container that forbids choosing a node, fails only
            // when a block is mapped. So map one.
            #[cfg(target_os = "linux")]
            drop(SystemBlock::map(MAPPING_MIN_BYTES, 1, options)?);
        }
        Ok(Self { options })
    }
}

impl SystemMemory {
    /// Allocates whole pages of the system that are not shared with other memory, whatever the size. Their
    /// addresses are multiples of 4 KiB.
    ///
    /// # Errors
    ///
    /// As [`Source::take`].
    pub(crate) fn map_pages(&self, size_bytes: u64) -> DriverResult<SystemBlock> {
        #[cfg(target_os = "linux")]
        return SystemBlock::map(size_bytes, 4096, self.options);
        #[cfg(not(target_os = "linux"))]
        SystemBlock::from_system(size_bytes.next_multiple_of(4096), 4096)
    }
}

impl Source for SystemMemory {
    fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock> {
        #[cfg(target_os = "linux")]
        if size_bytes >= MAPPING_MIN_BYTES {
            return SystemBlock::map(size_bytes, alignment_bytes, self.options);
        }
        SystemBlock::from_system(size_bytes, alignment_bytes)
    }

    fn release_cached(&self) {
        block::trim_c_library();
    }
}

/// A Rust allocator as a source. It must be `'static`, because blocks may outlive every other value.
pub struct FromGlobal<A: 'static>(pub &'static A);

impl<A: GlobalAlloc + Send + Sync> Source for FromGlobal<A> {
    fn take(&self, size_bytes: u64, alignment_bytes: u64) -> DriverResult<SystemBlock> {
        SystemBlock::from_global(self.0, size_bytes, alignment_bytes)
    }
}

impl<A> fmt::Debug for FromGlobal<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FromGlobal({})", std::any::type_name::<A>())
    }
}

fn not_supported(call: &'static str, message: impl Into<String>) -> DriverError {
    DriverError::new(DriverErrorKind::NotSupported, call, 0, message)
}

/// Returns the error for a request of `size_bytes` that the system refused with this error number.
fn refused(call: &'static str, size_bytes: u64, alignment_bytes: u64, number: i32) -> DriverError {
    let words = std::io::Error::from_raw_os_error(number);
    let message = format!("{words} for {size_bytes} bytes aligned to {alignment_bytes}");
    DriverError::new(DriverErrorKind::OutOfMemory, call, i64::from(number), message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::{GIB, KIB, MIB};

    #[test]
    fn blocks_are_aligned_and_hold_what_is_written() {
        let memory = SystemMemory::default();
        for alignment in [1, 64, 4096, 2 * MIB] {
            for size in [1, 63, 64 * KIB, MIB - 1, MIB, 3 * MIB + 1] {
                let mut block = memory.take(size, alignment).unwrap();
                assert!(block.address().is_multiple_of(alignment), "{size} at {alignment}");
                assert_eq!(block.size_bytes(), size);
                block.fill(Fill::Zero);
                let bytes = block.initialized().unwrap();
                assert_eq!(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>(), 0);
                bytes[usize::try_from(size - 1).unwrap()] = 7;
                memory.release(block);
            }
        }
    }

    #[test]
    fn bytes_are_called_written_only_while_they_are() {
        let mut block = SystemMemory::default().take(100, 64).unwrap();
        assert!(block.initialized().is_none());
        block.fill(Fill::Zero);
        block.initialized().unwrap()[3] = 1;
        block.fill(Fill::Zero);
        assert_eq!(block.initialized().unwrap()[3], 0);
        let _ = block.bytes();
        assert!(block.initialized().is_none());
        let mut fresh = SystemMemory::default().take(MIB, 64).unwrap();
        if let Some(zeros) = fresh.initialized() {
            assert!(zeros.iter().all(|byte| *byte == 0));
            zeros[5] = 9;
            fresh.fill(Fill::Zero);
            assert_eq!(fresh.initialized().unwrap()[5], 0);
        }
        fresh.mark_touched();
        assert!(fresh.initialized().is_none());
    }

    #[test]
    fn discarded_pages_are_zeros_and_their_neighbours_stay() {
        let mut block = SystemMemory::default().take(MIB, 4096).unwrap();
        let Some(bytes) = block.initialized() else { return };
        bytes.fill(7);
        block.discard(100..20_000);
        let bytes = block.initialized().unwrap();
        assert!(bytes[..100].iter().chain(&bytes[20_000..]).all(|byte| *byte == 7));
        assert!(bytes[8192..12_288].iter().all(|byte| *byte == 0));
        block.discard(50..60);
        block.discard(0..usize::MAX);
        assert_eq!(block.initialized().unwrap()[55], 7);
    }

    #[test]
    fn junk_is_the_pattern_again_and_again() {
        for size in [1, 4, 10, MIB + 2] {
            let mut block = SystemMemory::default().take(size, 64).unwrap();
            block.fill(Fill::Junk);
            let bytes = block.initialized().unwrap();
            let pattern = 0x7fed_beef_u32.to_le_bytes();
            assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == pattern[at % 4]), "{size}");
        }
    }

    #[test]
    fn what_the_system_has_not_is_an_error_with_its_number() {
        let error = SystemMemory::default().take(1 << 59, 64).unwrap_err();
        assert!(error.is_out_of_memory());
        assert_eq!(error.code(), 12, "{error}");
        assert!(error.to_string().contains(&(1u64 << 59).to_string()), "{error}");
        let error = SystemBlock::from_system(1 << 60, 64).unwrap_err();
        assert_eq!((error.call(), error.code()), ("posix_memalign", 12));
    }

    #[test]
    fn a_size_that_no_layout_has_is_an_error() {
        for (size, alignment) in [(u64::MAX, 64), (1 << 63, 64), (8, 3)] {
            assert!(SystemMemory::default().take(size, alignment).is_err(), "{size} {alignment}");
            assert!(FromGlobal(&std::alloc::System).take(size, alignment).is_err());
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_refused_by_number() {
        let options = SystemOptions { numa_node: Some(1000), ..SystemOptions::default() };
        let error = SystemMemory::new(options).unwrap_err();
        assert!(error.message().contains("1000"), "{error}");
    }

    #[test]
    fn the_first_node_can_be_preferred() {
        let options = SystemOptions { numa_node: Some(0), ..SystemOptions::default() };
        match SystemMemory::new(options).and_then(|memory| memory.take(4 * MIB, 64)) {
            Ok(mut block) => assert_eq!(block.bytes().len() as u64, 4 * MIB),
            // Some containers forbid choosing a node.
            Err(error) => eprintln!("skipped: {error}"),
        }
    }

    #[test]
    fn huge_pages_start_where_huge_pages_start() {
        let options = SystemOptions { huge_pages: true, ..SystemOptions::default() };
        match SystemMemory::new(options) {
            Ok(memory) => {
                let block = memory.take(5 * MIB, 64).unwrap();
                assert!(block.address().is_multiple_of(HUGE_PAGE_BYTES));
            }
            Err(error) => eprintln!("skipped: {error}"),
        }
    }

    #[test]
    fn the_machine_has_memory() {
        let info = memory_info().unwrap();
        assert!(info.total_bytes > GIB / 4 && info.free_bytes <= info.total_bytes, "{info:?}");
    }
}
