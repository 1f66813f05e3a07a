//! Errors of imports and exports of tensors.

use thiserror::Error;

use super::{DLDataType, DLDevice, MAX_DIMENSIONS};
use crate::error::DriverError;
use crate::handle::BufferError;

/// The error of an import or export of a tensor.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum TensorError {
    /// There is no tensor.
    #[error("the tensor is null")]
    Null,
    /// The structure has a layout that this version of the library cannot read.
    #[error("the tensor has version {major}.{minor} of DLPack; expected version 1")]
    Version {
        /// The tensor's major version.
        major: u32,
        /// The tensor's minor version.
        minor: u32,
    },
    /// The number of dimensions is out of range.
    #[error("the tensor has {ndim} dimensions; expected 0 to {MAX_DIMENSIONS}")]
    Dimensions {
        /// The number of dimensions.
        ndim: i32,
    },
    /// The tensor has dimensions without lengths.
    #[error("the tensor has {ndim} dimensions, and its shape is null")]
    NoShape {
        /// The number of dimensions.
        ndim: i32,
    },
    /// A length is negative, or the size or the end of the memory does not fit in 64 bits.
    #[error(
        "a tensor of shape {shape:?} at {address:#x} with {item_bytes} bytes per element is not possible"
    )]
    Extent {
        /// The lengths of the dimensions.
        shape: Vec<i64>,
        /// The size of one element in bytes.
        item_bytes: u64,
        /// The address of the data, without the offset.
        address: u64,
    },
    /// Elements are not next to each other in the order of the last dimension first.
    #[error(
        "the stride of dimension {dimension} is {stride} elements; only {expected} is supported"
    )]
    NotContiguous {
        /// The index of the dimension.
        dimension: usize,
        /// Its stride, in elements.
        stride: i64,
        /// The stride of a contiguous tensor, in elements.
        expected: i64,
    },
    /// The tensor has elements without memory.
    #[error("the tensor has {size_bytes} bytes, and its data is null")]
    NoData {
        /// The size of the tensor.
        size_bytes: u64,
    },
    /// Elements are not a whole number of bytes.
    #[error("elements of {lanes} x {bits} bits are not supported")]
    Bits {
        /// The numbers in one element.
        lanes: u16,
        /// The bits of one number.
        bits: u8,
    },
    /// The address is not aligned for the elements.
    #[error("the address {address:#x} is not a multiple of {align_bytes}")]
    Alignment {
        /// The address of the first element.
        address: u64,
        /// The alignment of the element type.
        align_bytes: usize,
    },
    /// The tensor has elements of another type.
    #[error("the tensor has elements of the type {found:?}; expected {expected:?}")]
    Type {
        /// The tensor's type.
        found: DLDataType,
        /// The type that the call needs.
        expected: DLDataType,
    },
    /// The tensor is on another device.
    #[error("the tensor is on {found:?}; expected {expected:?}")]
    Device {
        /// The tensor's device.
        found: DLDevice,
        /// The device that the call needs.
        expected: DLDevice,
    },
    /// The tensor must not be written.
    #[error("the tensor is read-only")]
    ReadOnly,
    /// The device has no memory that another library could use.
    #[error("the device {driver} has no memory for other libraries")]
    NoMemory {
        /// The name of the driver.
        driver: &'static str,
    },
    /// The buffer could not be created.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
