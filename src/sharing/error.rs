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
        /// Actual number.
        len: usize,
        /// Expected number, or the minimum.
        expected: u64,
    },
    /// The bytes do not begin with the magic bytes of a handle.
    #[error("these bytes are not a shared handle")]
    Magic,
    /// The version of the handle is not supported.
    #[error("the shared handle has version {version}; this library supports only version {known}")]
    Version {
        /// Version of the handle.
        version: u16,
        /// The supported version.
        known: u16,
    },
    /// The kind of memory is not supported.
    #[error("the shared handle has the unknown kind {kind}")]
    Kind {
        /// Kind in the handle.
        kind: u8,
    },
    /// The handle has no pages, or too many.
    #[error("the shared handle has {pages} pages; expected 1 to {most}")]
    PageCount {
        /// Number of pages in the handle.
        pages: u64,
        /// Maximum number.
        most: u64,
    },
    /// The block does not lie inside the shared memory.
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
        /// The first such byte.
        at: usize,
    },
    /// The checksum is wrong: bytes were changed or lost.
    #[error("the shared handle's checksum does not match: its bytes were changed or lost")]
    Checksum,
}

/// Why a block was not shared or not opened. The failed call has changed nothing.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SharingError {
    /// The allocation is not a live block of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The bytes are not a usable handle.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The block's pages were not created exportable.
    #[error(
        "the page at {address:#x} cannot leave the process: set expandable_segments_ipc:True \
         before it is mapped"
    )]
    NotExportable {
        /// The first such page.
        address: u64,
    },
    /// The device cannot share this kind of memory.
    #[error("the device cannot share {what}")]
    NotSupported {
        /// The kind of memory.
        what: &'static str,
    },
    /// The block covers more pages than a handle may have.
    #[error("the block covers {pages} pages; {most} can be shared at once")]
    TooManyPages {
        /// Number of pages that it covers.
        pages: u64,
        /// Maximum number.
        most: u64,
    },
    /// The handle is of a plain allocation of this process, which already has an address here.
    #[error("the handle is of this process: use the block's own address")]
    OwnProcess,
    /// The process that shared the block, or its allocator, has ended.
    #[error("process {process}, which shared the block, has ended")]
    ExporterGone {
        /// Process id.
        process: u32,
    },
    /// No process listens on the handle's socket, though the exporter may still run. Its allocator has
    /// ended, or it is in another network namespace, such as another container.
    #[error(
        "process {process} cannot be reached: its allocator has ended, or is in another \
         network namespace"
    )]
    Unreachable {
        /// Process id.
        process: u32,
    },
    /// The secret in the handle is not the exporter's: the handle is forged, or of an allocator that has
    /// ended.
    #[error("process {process} refused: the handle's secret is not its own")]
    Refused {
        /// Process id.
        process: u32,
    },
    /// The exporter has unmapped a page of the block since it was shared.
    #[error("the owner of the shared block has released its page {page}")]
    PageGone {
        /// Index of the page in the handle.
        page: usize,
    },
    /// A process of another user listens on the exporter's socket.
    #[error("a process of user {user} listens in place of process {process}")]
    ForeignUser {
        /// Id of that user.
        user: u32,
        /// Id of the expected process.
        process: u32,
    },
    /// A descriptor is not of the page in the handle.
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
        /// Size of the exporter's pages.
        page_bytes: u64,
        /// This device's granularity.
        granularity_bytes: u64,
    },
    /// The exporter did not answer in time.
    #[error("process {process} did not answer within {seconds} seconds")]
    TimedOut {
        /// Process id.
        process: u32,
        /// The time limit.
        seconds: u64,
    },
    /// The exporter's answer is invalid.
    #[error("the answer of process {process} is invalid: {why}")]
    BadAnswer {
        /// Process id.
        process: u32,
        /// The reason.
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
