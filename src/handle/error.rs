//! Errors of typed buffers.

use thiserror::Error;

use crate::error::{AllocError, DriverError, HandleError};
use crate::ids::DeviceId;

/// The error of an operation on a typed buffer.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum BufferError {
    /// The size of this number of values does not fit into 64 bits.
    #[error("{len} values of {item_bytes} bytes are more than memory can hold")]
    TooLong {
        /// The number of values.
        len: usize,
        /// The size of each value in bytes.
        item_bytes: usize,
    },
    /// The range does not lie within the buffer.
    #[error("values {start}..{end} do not lie in a buffer of {len}")]
    OutOfRange {
        /// The first index.
        start: usize,
        /// The index after the last one.
        end: usize,
        /// The number of values in the buffer.
        len: usize,
    },
    /// The source and the target of a copy have different lengths.
    #[error("a copy of {from} values into {to}")]
    Length {
        /// The number of values in the source.
        from: usize,
        /// The number of values in the target.
        to: usize,
    },
    /// The allocator does not support use of a block on several streams, so the other stream cannot be
    /// announced to it.
    #[error("backend:{backend} does not support other streams")]
    NoStreams {
        /// The allocator's name.
        backend: String,
    },
    /// The stream belongs to another device, or to a context other than the device's primary one.
    #[error("the stream does not belong to the primary context of {driver} device {device}")]
    OtherDevice {
        /// The device of the buffer's handle.
        device: DeviceId,
        /// The name of the driver.
        driver: &'static str,
    },
    /// The allocation failed.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The block is no longer live in the allocator.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
