//! The structures of DLPack, and the types of their elements.

use std::ffi::c_void;

use bytemuck::Pod;

/// The version of the structures.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLPackVersion {
    /// Structures of different major versions are incompatible.
    pub major: u32,
    /// A higher minor version only adds flags and constants.
    pub minor: u32,
}

/// A device. On the host, `device_id` is 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// One of DLPack's constants for a kind of device, such as [`CUDA`](Self::CUDA).
    pub device_type: i32,
    /// The ordinal among the devices of this kind.
    pub device_id: i32,
}

impl DLDevice {
    /// Memory of the host.
    pub const CPU: i32 = 1;
    /// Memory of a CUDA device.
    pub const CUDA: i32 = 2;
    /// Page-locked memory of the host, from CUDA.
    pub const CUDA_HOST: i32 = 3;
}

/// The type of the elements of a tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// One of DLPack's constants for a kind of number, such as [`FLOAT`](Self::FLOAT).
    pub code: u8,
    /// The bits of one number.
    pub bits: u8,
    /// The numbers in one element: 1, unless elements are vectors.
    pub lanes: u16,
}

impl DLDataType {
    /// Signed integers.
    pub const INT: u8 = 0;
    /// Unsigned integers.
    pub const UINT: u8 = 1;
    /// IEEE floating-point numbers.
    pub const FLOAT: u8 = 2;
    /// The 16-bit format `bfloat16`.
    pub const BFLOAT: u8 = 4;

    /// A type with one number per element.
    #[must_use]
    pub const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Returns the size of one element. 0 if it is empty or not a whole number of bytes.
    #[must_use]
    pub const fn item_bytes(self) -> u64 {
        let bits = self.bits as u64 * self.lanes as u64;
        if bits.is_multiple_of(8) { bits / 8 } else { 0 }
    }
}

/// A tensor without an owner.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// The start of the memory.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of the elements.
    pub dtype: DLDataType,
    /// The length of each dimension.
    pub shape: *mut i64,
    /// The distance between neighbours in each dimension, in elements. Null if the tensor is contiguous.
    pub strides: *mut i64,
    /// The distance of the first element from `data`.
    pub byte_offset: u64,
}

/// A tensor with an owner.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensorVersioned {
    /// The version of this structure. It and the next two fields are the same in all versions.
    pub version: DLPackVersion,
    /// For the deleter.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor, with this structure. Called once, on any thread.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    /// [`READ_ONLY`](Self::READ_ONLY) and other flags.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

impl DLManagedTensorVersioned {
    /// A flag: the memory must not be written.
    pub const READ_ONLY: u64 = 1;
}

/// A tensor with an owner, as before version 1 of DLPack: without version and flags.
#[repr(C)]
#[derive(Debug)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// For the deleter.
    pub manager_ctx: *mut c_void,
    /// Frees the tensor, with this structure. Called once, on any thread.
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// A number that DLPack can describe.
///
/// A program implements it for a type of its own, such as a wrapper of `u16` for `bfloat16`. Import and
/// export do not compile if `DATA_TYPE` has another size than the type.
pub trait TensorElement: Pod + Send + Sync {
    /// The type in DLPack.
    const DATA_TYPE: DLDataType;
}

macro_rules! elements {
    ($($code:ident: $($type:ty)+;)+) => {$($(
        impl TensorElement for $type {
            const DATA_TYPE: DLDataType = DLDataType::new(DLDataType::$code, <$type>::BITS_IN_DLPACK);
        }
    )+)+};
}

/// The size of a number in bits, as DLPack stores it.
trait Bits: Sized {
    #[expect(clippy::cast_possible_truncation, reason = "these numbers have at most 64 bits")]
    const BITS_IN_DLPACK: u8 = 8 * size_of::<Self>() as u8;
}

impl<T: Pod> Bits for T {}

elements! {
    INT: i8 i16 i32 i64;
    UINT: u8 u16 u32 u64;
    FLOAT: f32 f64;
}
