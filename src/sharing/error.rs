//! Why a block cannot be shared or opened, as data.

use thiserror::Error;

use crate::error::{DriverError, HandleError};

/// Bytes that are no handle this library can use.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum FormatError {
    /// Too few or too many bytes for what they say they are.
    #[error("a shared handle of {len} bytes should have {expected}")]
    Length {
        /// How many there are.
        len: usize,
        /// How many there should be, or at least should be.
        expected: u64,
    },
    /// They do not begin as a handle does.
    #[error("these bytes are not a shared handle")]
    Magic,
    /// A version that this library does not know.
    #[error("the shared handle has version {version}; this library knows version {known} only")]
    Version {
        /// Theirs.
        version: u16,
        /// Ours.
        known: u16,
    },
    /// A kind of memory that this library does not know.
    #[error("the shared handle is of kind {kind}, which is unknown")]
    Kind {
        /// What it says.
        kind: u8,
    },
    /// More pages than a handle may name, or none.
    #[error("the shared handle names {pages} pages; 1 to {most} are legal")]
    PageCount {
        /// How many it names.
        pages: u64,
        /// How many it may name.
        most: u64,
    },
    /// The block does not lie in what is shared.
    #[error(
        "{size_bytes} bytes at offset {offset_bytes} do not fit the {shared_bytes} bytes that are \
         shared"
    )]
    Extent {
        /// Where the block begins in what is shared.
        offset_bytes: u64,
        /// The block's size.
        size_bytes: u64,
        /// What is shared.
        shared_bytes: u64,
    },
    /// A part that must be zero is not.
    #[error("byte {at} of the shared handle is reserved and not zero")]
    Reserved {
        /// The first such byte.
        at: usize,
    },
    /// Bytes were changed or lost on the way.
    #[error("the shared handle's checksum does not match: bytes were changed or lost on the way")]
    Checksum,
}

/// Why a block was not shared or not opened. Nothing has changed when one of these is returned.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SharingError {
    /// The allocation is not a live block of this allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The bytes are no usable handle.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The block's pages were not made to leave the process.
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
        /// What it cannot share.
        what: &'static str,
    },
    /// The block covers more pages than a handle may name.
    #[error("the block covers {pages} pages; {most} can be shared at once")]
    TooManyPages {
        /// How many it covers.
        pages: u64,
        /// How many may be shared.
        most: u64,
    },
    /// The handle is of a plain allocation of this very process, which has an address here already.
    #[error("the handle is of this very process: use the block's own address")]
    OwnProcess,
    /// The process that shared the block, or its allocator, has ended.
    #[error("process {process}, which shared the block, is gone")]
    ExporterGone {
        /// Its number.
        process: u32,
    },
    /// Nobody answers where the handle says, though its process may run: the allocator that shared the block
    /// has ended, or is in another network namespace, as in another container.
    #[error(
        "process {process} cannot be asked for the block: its allocator has ended, or is in another \
         network namespace"
    )]
    Unreachable {
        /// Its number.
        process: u32,
    },
    /// The other process does not know the handle's secret: the handle is forged, or meant for an
    /// allocator that has ended.
    #[error("process {process} refused: the handle's secret is not its own")]
    Refused {
        /// Its number.
        process: u32,
    },
    /// The other process has unmapped a page of the block since it was shared.
    #[error("page {page} of the shared block is gone: its owner has released it")]
    PageGone {
        /// Which page of the handle, from 0.
        page: usize,
    },
    /// Somebody else answers where the exporter should.
    #[error("user {user} answers in place of process {process}")]
    ForeignUser {
        /// Whose process it is.
        user: u32,
        /// The process that was expected.
        process: u32,
    },
    /// A descriptor is not of the page that the handle names.
    #[error("the descriptor of page {page} is not of the page that was shared")]
    WrongDescriptor {
        /// Which page of the handle, from 0.
        page: usize,
    },
    /// The device cannot map pages of this size.
    #[error(
        "pages of {page_bytes} bytes do not fit this device, which maps multiples of \
         {granularity_bytes}"
    )]
    PageSize {
        /// The other process's pages.
        page_bytes: u64,
        /// This device's granularity.
        granularity_bytes: u64,
    },
    /// The other process did not answer in time.
    #[error("process {process} did not answer within {seconds} seconds")]
    TimedOut {
        /// Its number.
        process: u32,
        /// How long it had.
        seconds: u64,
    },
    /// The other process's answer makes no sense.
    #[error("the answer of process {process} makes no sense: {why}")]
    BadAnswer {
        /// Its number.
        process: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The system refused a step.
    #[error("{step}: {message}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's words.
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
