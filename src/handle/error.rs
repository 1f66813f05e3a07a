//! What can go wrong with a buffer.

use thiserror::Error;

use crate::error::{AllocError, DriverError, HandleError};
use crate::ids::DeviceId;

/// Why a call about a buffer failed.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum BufferError {
    /// So many values have more bytes than an address can count.
    #[error("{len} values of {item_bytes} bytes are more than memory can hold")]
    TooLong {
        /// How many values.
        len: usize,
        /// Bytes of each.
        item_bytes: usize,
    },
    /// A range that does not lie in the buffer.
    #[error("values {start}..{end} do not lie in a buffer of {len}")]
    OutOfRange {
        /// The first value.
        start: usize,
        /// One past the last.
        end: usize,
        /// How many there are.
        len: usize,
    },
    /// Source and target of a copy differ in length.
    #[error("a copy of {from} values into {to}")]
    Length {
        /// Values of the source.
        from: usize,
        /// Values of the target.
        to: usize,
    },
    /// The allocator knows no streams, so use by another one cannot be announced.
    #[error("backend:{backend} does not follow streams")]
    NoStreams {
        /// The allocator's name.
        backend: String,
    },
    /// The stream is one of another device, or of a context that is not the device's primary one.
    #[error(
        "the stream belongs to another context than the primary one of {driver} device {device}"
    )]
    OtherDevice {
        /// The device of the buffer's handle.
        device: DeviceId,
        /// What drives it.
        driver: &'static str,
    },
    /// There is no memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The block is not the allocator's any more.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The device failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
