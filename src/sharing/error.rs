//! Errors of sharing a block and of opening a shared one.

use thiserror::Error;

use crate::error::{DriverError, HandleError};

/// The bytes are not a usable handle.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The number of bytes does not match their contents.
    #[error("a shared handle of {len} bytes should have {expected}")]
    Length {
        /// The actual number of bytes.
        len: usize,
        /// The expected number of bytes, or their minimum if the number varies.
        expected: u64,
    },
    /// The bytes do not begin with the magic bytes of a handle.
    #[error("these bytes are not a shared handle")]
    Magic,
    /// This library does not support the version of the handle.
    #[error("the shared handle has version {version}; this library supports only version {known}")]
    Version {
        /// The version of the handle.
        version: u16,
        /// The version that this library supports.
        known: u16,
    },
    /// This library does not support the kind of memory.
    #[error("the shared handle has the unknown kind {kind}")]
    Kind {
        /// The kind in the handle.
        kind: u8,
    },
    /// The handle has no pages, or too many.
    #[error("the shared handle has {pages} pages; expected 1 to {most}")]
    PageCount {
        /// The number of pages in the handle.
        pages: u64,
        /// The maximum number of pages.
        most: u64,
    },
    /// The block does not lie inside the shared memory of the handle.
    #[error(
        "{size_bytes} bytes at offset {offset_bytes} do not fit the {shared_bytes} bytes that are \
         shared"
    )]
    Extent {
        /// Offset of the block in the shared memory.
        offset_bytes: u64,
        /// Size of the block.
        size_bytes: u64,
        /// Size of the shared memory.
        shared_bytes: u64,
    },
    /// A reserved byte is not zero.
    #[error("byte {at} of the shared handle is reserved and not zero")]
    Reserved {
        /// The offset of the first such byte.
        at: usize,
    },
    /// The checksum is wrong, because bytes were changed or lost.
    #[error("the shared handle's checksum does not match: its bytes were changed or lost")]
    Checksum,
}

/// The reason why a block was not shared or not opened. The failed call has changed nothing.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SharingError {
    /// The allocation is not a live block of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The bytes are not a usable handle.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The block belongs to a tag that is not awake.
    #[error("the block at {address:#x} is asleep: resume its tag first")]
    Asleep {
        /// The address of the block.
        address: u64,
    },
    /// A page of the block was not created exportable.
    #[error(
        "the page at {address:#x} cannot leave the process: set expandable_segments_ipc:True \
         before it is mapped"
    )]
    NotExportable {
        /// The address of the first such page.
        address: u64,
    },
    /// The device or the system cannot share this kind of memory.
    #[error("the device cannot share {what}")]
    NotSupported {
        /// The kind of memory.
        what: &'static str,
    },
    /// The block covers more pages than a handle may have.
    #[error("the block covers {pages} pages; {most} can be shared at once")]
    TooManyPages {
        /// The number of pages that the block covers.
        pages: u64,
        /// The maximum number of pages.
        most: u64,
    },
    /// The handle is for a plain allocation of this process, where the block already has an address.
    #[error("the handle is of this process: use the block's own address")]
    OwnProcess,
    /// The process that shared the block has ended, or is in another pid namespace and its allocator has
    /// ended.
    #[error(
        "process {process}, which shared the block, cannot be reached: it has ended, or it is in another \
         container"
    )]
    ExporterGone {
        /// The id of that process, in its own pid namespace.
        process: u32,
    },
    /// The handle's socket cannot be reached, though the process that shared the block may still run. Its
    /// allocator has ended, or it is in another network namespace, such as that of another container.
    #[error(
        "process {process} cannot be reached: its allocator has ended, or is in another \
         network namespace"
    )]
    Unreachable {
        /// The id of the process that shared the block.
        process: u32,
    },
    /// The secret in the handle is not the exporter's secret. The handle is forged, or the allocator
    /// that made it has ended.
    #[error("process {process} refused: the handle's secret is not its own")]
    Refused {
        /// The id of the exporter.
        process: u32,
    },
    /// The exporter has unmapped a page of the block after sharing it.
    #[error("the owner of the shared block has released its page {page}")]
    PageGone {
        /// Index of the page in the handle.
        page: usize,
    },
    /// A process of another user listens on the exporter's socket.
    #[error("a process of user {user} listens in place of process {process}")]
    ForeignUser {
        /// The id of that user.
        user: u32,
        /// The id of the process that should listen.
        process: u32,
    },
    /// A received descriptor refers to another file than the handle names for this page.
    #[error("the descriptor of page {page} is not of the page that was shared")]
    WrongDescriptor {
        /// Index of the page in the handle.
        page: usize,
    },
    /// The device cannot map pages of this size.
    #[error(
        "pages of {page_bytes} bytes do not fit this device, which maps multiples of \
         {granularity_bytes}"
    )]
    PageSize {
        /// The size of the exporter's pages.
        page_bytes: u64,
        /// The granularity of this device.
        granularity_bytes: u64,
    },
    /// The exporter did not reply in time.
    #[error("process {process} did not answer within {seconds} seconds")]
    TimedOut {
        /// The id of the exporter.
        process: u32,
        /// The time limit in seconds.
        seconds: u64,
    },
    /// The exporter's reply is invalid.
    #[error("the answer of process {process} is invalid: {why}")]
    BadAnswer {
        /// The id of the exporter.
        process: u32,
        /// The reason why it is invalid.
        why: &'static str,
    },
    /// A system call failed.
    #[error("{step}: {message}")]
    System {
        /// The operation that failed.
        step: &'static str,
        /// The system's error message.
        message: String,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl SharingError {
    pub(super) fn system(step: &'static str, error: impl Into<std::io::Error>) -> Self {
        Self::System { step, message: error.into().to_string() }
    }
}
