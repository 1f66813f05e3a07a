//! Tensors of other libraries, through DLPack, without a copy.
//!
//! DLPack is a C interface of a few structures, which `abi` declares. A [`ManagedTensor`] owns the memory
//! of a tensor, and may come from this library or from another one. [`ManagedTensor::from_raw`] checks all
//! that can be checked of a foreign tensor once, and copies its description. So the methods after it read
//! no foreign structure. Dropping a `ManagedTensor` calls the deleter of the library that it came from.
//!
//! The structures name no stream, so two libraries agree on one outside them. The library that exports a
//! tensor makes the importing library's stream wait for its own work. [`DeviceVec::lend`] does that, and
//! makes the free of the block wait for that stream. An importing library that uses further streams must
//! order them before it calls the deleter.
//!
//! Source: <https://dmlc.github.io/dlpack/latest/c_api.html>, version 1.0.

#![expect(unsafe_code, reason = "structures that other libraries read, and foreign ones")]

mod abi;
mod error;

use std::any::Any;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::{fmt, slice};

use super::memory::BufferMemory;
use super::view::Source;
use super::{BufferError, DeviceVec, DeviceView, Handle};
use crate::allocator::{DeviceAllocator, MemoryKind};
use crate::ids::StreamId;

pub use abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    TensorElement,
};
pub use error::TensorError;

/// The most dimensions of a tensor that is imported. NumPy has the same limit.
pub const MAX_DIMENSIONS: i32 = 64;

/// What a tensor is: its memory, its type and its shape. It is contiguous, the last dimension innermost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The address of the first element.
    pub address: u64,
    /// The device of the memory.
    pub device: DLDevice,
    /// The type of the elements.
    pub data_type: DLDataType,
    /// The length of each dimension.
    pub shape: Vec<i64>,
    /// True if the memory must not be written.
    pub is_read_only: bool,
}

impl TensorInfo {
    /// Returns the size in bytes.
    ///
    /// # Errors
    ///
    /// [`TensorError::Bits`], and [`TensorError::Extent`] when a length is negative, or when the size or
    /// the end of the memory does not fit in 64 bits.
    pub fn size_bytes(&self) -> Result<u64, TensorError> {
        let DLDataType { bits, lanes, .. } = self.data_type;
        let item_bytes = self.data_type.item_bytes();
        if item_bytes == 0 {
            return Err(TensorError::Bits { lanes, bits });
        }
        let lengths: Option<Vec<u64>> = self.shape.iter().map(|&n| u64::try_from(n).ok()).collect();
        let size = lengths.and_then(|lengths| match lengths.contains(&0) {
            true => Some(0),
            false => lengths.iter().try_fold(item_bytes, |size, &n| size.checked_mul(n)),
        });
        let fits =
            |size: &u64| i64::try_from(*size).is_ok() && self.address.checked_add(*size).is_some();
        size.filter(fits).ok_or_else(|| TensorError::Extent {
            shape: self.shape.clone(),
            item_bytes,
            address: self.address,
        })
    }

    /// Returns the strides, in elements. The size must have been checked.
    fn strides(&self) -> Vec<i64> {
        let mut strides = vec![1_i64; self.shape.len()];
        for dimension in (1..self.shape.len()).rev() {
            // A tensor without elements may have lengths whose product does not fit.
            strides[dimension - 1] =
                strides[dimension].saturating_mul(self.shape[dimension].max(1));
        }
        strides
    }
}

/// A tensor with the owner of its memory. Dropping it frees the memory, or calls the deleter of the library
/// that it came from. That may be on any thread.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::handle::dlpack::ManagedTensor;
/// use stratalloc::{DeviceVec, StreamId};
/// # #[cfg(target_os = "linux")] {
/// use stratalloc_sim::Host;
///
/// let handle = stratalloc::build("backend:native", Arc::new(Host::new(Default::default())))?;
/// let vec = handle.from_slice(&[1.0f32, 2.0], StreamId::DEFAULT)?;
/// let raw = vec.into_tensor()?.into_raw(); // for a library that reads DLPack
///
/// // SAFETY: the pointer was just made by `into_raw`, and is used once.
/// let tensor = unsafe { ManagedTensor::from_raw(raw) }?;
/// let vec = DeviceVec::<f32>::from_tensor(&handle, tensor, StreamId::DEFAULT)?;
/// assert_eq!(vec.to_vec()?, [1.0, 2.0]);
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ManagedTensor {
    info: TensorInfo,
    keeps: Box<dyn Any + Send + Sync>,
}

impl ManagedTensor {
    /// Creates a tensor over memory that stays valid while `keeps` is alive. The address is not checked.
    /// The caller is responsible for it.
    ///
    /// # Errors
    ///
    /// Those of [`TensorInfo::size_bytes`], and [`TensorError::Dimensions`]. `keeps` is dropped then.
    pub fn new(info: TensorInfo, keeps: Box<dyn Any + Send + Sync>) -> Result<Self, TensorError> {
        dimensions(i32::try_from(info.shape.len()).unwrap_or(i32::MAX))?;
        info.size_bytes()?;
        Ok(Self { info, keeps })
    }

    /// Takes ownership of a tensor of another library. If the call fails, it has called the deleter. Waits
    /// only if the deleter waits.
    ///
    /// # Safety
    ///
    /// `raw` is null, or points to a tensor as DLPack describes it, which belongs to the caller. Its memory
    /// stays valid until the deleter is called. The deleter may be called on any thread.
    ///
    /// # Errors
    ///
    /// [`TensorError`] when the tensor is null, has another major version, is not contiguous, or has values
    /// that contradict each other.
    pub unsafe fn from_raw(raw: *mut DLManagedTensorVersioned) -> Result<Self, TensorError> {
        let foreign = NonNull::new(raw).map(Foreign::Versioned).ok_or(TensorError::Null)?;
        // SAFETY: required of the caller. This field is at the same place in all versions.
        let DLPackVersion { major, minor } = unsafe { (*raw).version };
        if major != VERSION.major {
            return Err(TensorError::Version { major, minor });
        }
        // SAFETY: required of the caller. The major version is the one of this structure.
        let flags = unsafe { (*raw).flags };
        // SAFETY: as above.
        let tensor = unsafe { (*raw).dl_tensor };
        // SAFETY: required of the caller.
        unsafe { Self::import(tensor, flags & DLManagedTensorVersioned::READ_ONLY != 0, foreign) }
    }

    /// Takes ownership of a tensor in the structure without a version.
    ///
    /// # Safety
    ///
    /// The same as for [`from_raw`](Self::from_raw).
    ///
    /// # Errors
    ///
    /// The same as for [`from_raw`](Self::from_raw).
    pub unsafe fn from_unversioned(raw: *mut DLManagedTensor) -> Result<Self, TensorError> {
        let foreign = NonNull::new(raw).map(Foreign::Unversioned).ok_or(TensorError::Null)?;
        // SAFETY: required of the caller.
        let tensor = unsafe { (*raw).dl_tensor };
        // SAFETY: required of the caller.
        unsafe { Self::import(tensor, false, foreign) }
    }

    /// Checks a tensor and copies its description.
    ///
    /// # Safety
    ///
    /// `shape` and `strides` are null or have `ndim` lengths.
    unsafe fn import(
        tensor: DLTensor,
        is_read_only: bool,
        foreign: Foreign,
    ) -> Result<Self, TensorError> {
        let ndim = tensor.ndim;
        let lengths = dimensions(ndim)?;
        if lengths > 0 && tensor.shape.is_null() {
            return Err(TensorError::NoShape { ndim });
        }
        let copied = |from: *mut i64| match from.is_null() || lengths == 0 {
            true => Vec::new(),
            // SAFETY: not null, and required of the caller (`# Safety`).
            false => unsafe { slice::from_raw_parts(from, lengths) }.to_vec(),
        };
        let data = tensor.data.addr() as u64;
        let mut info = TensorInfo {
            address: data,
            device: tensor.device,
            data_type: tensor.dtype,
            shape: copied(tensor.shape),
            is_read_only,
        };
        let too_far = TensorError::Extent {
            shape: info.shape.clone(),
            item_bytes: info.data_type.item_bytes(),
            address: data,
        };
        info.address = data.checked_add(tensor.byte_offset).ok_or(too_far)?;
        let size_bytes = info.size_bytes()?;
        if size_bytes > 0 {
            if tensor.data.is_null() {
                return Err(TensorError::NoData { size_bytes });
            }
            let strides = copied(tensor.strides);
            for (dimension, (&stride, expected)) in strides.iter().zip(info.strides()).enumerate() {
                // With one element, the stride is never used.
                if stride != expected && info.shape[dimension] > 1 {
                    return Err(TensorError::NotContiguous { dimension, stride, expected });
                }
            }
        }
        Ok(Self { info, keeps: Box::new(foreign) })
    }

    /// Returns the description of the tensor.
    #[must_use]
    pub fn info(&self) -> &TensorInfo {
        &self.info
    }

    /// Returns the tensor as other libraries read it. It is not freed until its deleter is called.
    #[must_use = "the memory is leaked unless the deleter is called"]
    pub fn into_raw(self) -> *mut DLManagedTensorVersioned {
        let flags = match self.info.is_read_only {
            true => DLManagedTensorVersioned::READ_ONLY,
            false => 0,
        };
        self.export(|dl_tensor| DLManagedTensorVersioned {
            version: VERSION,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<DLManagedTensorVersioned>),
            flags,
            dl_tensor,
        })
    }

    /// Returns the tensor in the structure without a version, for libraries that read no other.
    ///
    /// # Errors
    ///
    /// [`TensorError::ReadOnly`], because that structure has no flag for it. The tensor is dropped then.
    pub fn into_unversioned(self) -> Result<*mut DLManagedTensor, TensorError> {
        if self.info.is_read_only {
            return Err(TensorError::ReadOnly);
        }
        Ok(self.export(|dl_tensor| DLManagedTensor {
            dl_tensor,
            manager_ctx: ptr::null_mut(),
            deleter: Some(delete::<DLManagedTensor>),
        }))
    }

    fn export<M>(self, managed: impl FnOnce(DLTensor) -> M) -> *mut M {
        let Self { info, keeps } = self;
        let (mut strides, mut shape) = (info.strides(), info.shape);
        let tensor = DLTensor {
            data: ptr::without_provenance_mut(usize::try_from(info.address).unwrap_or(usize::MAX)),
            device: info.device,
            ndim: i32::try_from(shape.len()).unwrap_or(i32::MAX),
            dtype: info.data_type,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let managed = managed(tensor);
        Box::into_raw(Box::new(Exported {
            managed,
            _shape: shape,
            _strides: strides,
            _keeps: keeps,
        }))
        .cast()
    }

    /// Makes the free of a buffer of this library wait for the work of `stream` until then. Returns false for
    /// the memory of another library.
    pub(super) fn waits_for(&self, stream: StreamId) -> Result<bool, BufferError> {
        let own = self.keeps.downcast_ref::<BufferMemory>();
        own.map_or(Ok(false), |memory| memory.waits_for(stream))
    }

    /// Returns a view of all elements in the order of their addresses, for reading on a stream of `handle`'s
    /// device. The tensor may be dropped while that work runs if it is a buffer of this library. Any other
    /// tensor's deleter must wait for the work of `stream`. Does not wait.
    ///
    /// # Errors
    ///
    /// [`TensorError`] when the tensor is on another device than `handle`'s memory, has another type, or is
    /// not aligned.
    pub fn view<'a, T: TensorElement>(
        &'a self,
        handle: &'a Handle,
        stream: StreamId,
    ) -> Result<DeviceView<'a, T>, TensorError> {
        let len = self.len_on::<T>(handle)?;
        self.waits_for(stream)?;
        let (source, address) = (Source::Tensor(self), self.info.address);
        Ok(DeviceView { handle, source, address, len, stream, of: PhantomData })
    }

    /// Checks device, type and alignment. Returns the number of elements.
    fn len_on<T: TensorElement>(&self, handle: &Handle) -> Result<usize, TensorError> {
        const { assert!(T::DATA_TYPE.item_bytes() == size_of::<T>() as u64) };
        let TensorInfo { address, device: found, data_type, .. } = self.info;
        let expected = device_of(handle, handle.control().memory)?;
        if found != expected {
            return Err(TensorError::Device { found, expected });
        }
        if data_type != T::DATA_TYPE {
            return Err(TensorError::Type { found: data_type, expected: T::DATA_TYPE });
        }
        let align_bytes = align_of::<T>();
        if !address.is_multiple_of(align_bytes as u64) {
            return Err(TensorError::Alignment { address, align_bytes });
        }
        let len = self.info.size_bytes()? / size_of::<T>() as u64;
        let too_long = BufferError::TooLong { len: usize::MAX, item_bytes: size_of::<T>() };
        Ok(usize::try_from(len).map_err(|_| too_long)?)
    }
}

impl<T: TensorElement> DeviceVec<T> {
    /// Converts the buffer to a tensor of one dimension that owns it. Its memory is freed on the buffer's
    /// stream.
    ///
    /// Another library uses the tensor on a stream of its own: call [`lend`](Self::lend) with that stream
    /// before. Memory of the host is used without streams: if the device is the host, this call waits for
    /// the buffer's stream. On CUDA it does not wait.
    ///
    /// # Errors
    ///
    /// [`TensorError::NoMemory`] on a simulated device, or [`TensorError::Driver`]. The buffer is dropped
    /// then.
    pub fn into_tensor(self) -> Result<ManagedTensor, TensorError> {
        const { assert!(T::DATA_TYPE.item_bytes() == size_of::<T>() as u64) };
        let info =
            self.tensor_info(T::DATA_TYPE, vec![i64::try_from(self.len()).unwrap_or(i64::MAX)])?;
        ManagedTensor::new(info, Box::new(self.into_memory()))
    }

    /// Returns the description of a tensor in the buffer's memory. Waits for the buffer's stream if the
    /// memory is the host's. Does not check that the tensor fits.
    ///
    /// # Errors
    ///
    /// [`TensorError::NoMemory`], [`TensorError::Driver`].
    pub fn tensor_info(
        &self,
        data_type: DLDataType,
        shape: Vec<i64>,
    ) -> Result<TensorInfo, TensorError> {
        let device = match self.memory().tensor() {
            Some(tensor) => tensor.info.device,
            None => device_of(self.handle(), self.memory().memory_kind())?,
        };
        if device.device_type != DLDevice::CUDA {
            self.handle().driver().synchronize_stream(self.stream())?;
        }
        Ok(TensorInfo { address: self.address(), device, data_type, shape, is_read_only: false })
    }

    /// Creates a buffer over all elements of a tensor, in the order of their addresses. It is used on
    /// `stream`, which must have been ordered after the other library's work. Dropping the buffer makes
    /// `stream` wait for the streams that the buffer was lent to, and then drops the tensor. It does not wait
    /// for `stream`: that is up to the other library's deleter. If the tensor is a buffer of this library,
    /// its free waits for `stream`. Does not wait.
    ///
    /// # Errors
    ///
    /// [`TensorError`] when the tensor is read-only, is on another device than `handle`'s memory, has another
    /// type, or is not aligned. The tensor is dropped then.
    pub fn from_tensor(
        handle: &Handle,
        tensor: ManagedTensor,
        stream: StreamId,
    ) -> Result<Self, TensorError> {
        if tensor.info.is_read_only {
            return Err(TensorError::ReadOnly);
        }
        let len = tensor.len_on::<T>(handle)?;
        tensor.waits_for(stream)?;
        Ok(Self::adopt(handle, tensor.info.address, len, stream, Box::new(tensor))?)
    }
}

/// Returns the device on which other libraries find memory of this kind.
fn device_of(handle: &Handle, memory: MemoryKind) -> Result<DLDevice, TensorError> {
    let info = handle.driver().info();
    match (memory, info.driver) {
        (MemoryKind::Host, _) | (_, "host") => {
            Ok(DLDevice { device_type: DLDevice::CPU, device_id: 0 })
        }
        (MemoryKind::PinnedHost, "cuda") => {
            Ok(DLDevice { device_type: DLDevice::CUDA_HOST, device_id: 0 })
        }
        (_, "cuda") => {
            let device_id = i32::try_from(info.device.0).unwrap_or(i32::MAX);
            Ok(DLDevice { device_type: DLDevice::CUDA, device_id })
        }
        (_, driver) => Err(TensorError::NoMemory { driver }),
    }
}

/// Checks the number of dimensions.
fn dimensions(ndim: i32) -> Result<usize, TensorError> {
    let out_of_range = TensorError::Dimensions { ndim };
    usize::try_from(ndim).ok().filter(|_| ndim <= MAX_DIMENSIONS).ok_or(out_of_range)
}

const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 0 };

/// A tensor of this library in another library's hands. The structure is the first field, so it has the
/// address of the whole.
#[repr(C)]
struct Exported<M> {
    managed: M,
    _shape: Vec<i64>,
    _strides: Vec<i64>,
    _keeps: Box<dyn Any + Send + Sync>,
}

/// The deleter of tensors of this library.
///
/// # Safety
///
/// `managed` is null or was returned by `export`, and this is the only call with it.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    if !managed.is_null() {
        // SAFETY: `export` made the pointer from a box of this type, and the caller uses it once.
        drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
    }
}

/// A tensor of another library. Dropping it calls the deleter.
enum Foreign {
    Versioned(NonNull<DLManagedTensorVersioned>),
    Unversioned(NonNull<DLManagedTensor>),
}

// SAFETY: only the deleter uses the pointer, and `from_raw` requires that it may be called on any thread.
unsafe impl Send for Foreign {}
// SAFETY: nothing can be done with a shared reference.
unsafe impl Sync for Foreign {}

impl Drop for Foreign {
    fn drop(&mut self) {
        match *self {
            Self::Versioned(raw) => {
                // SAFETY: `from_raw` requires that the structure stays valid until this call.
                if let Some(deleter) = unsafe { (*raw.as_ptr()).deleter } {
                    // SAFETY: the other library's function with its own tensor, once.
                    unsafe { deleter(raw.as_ptr()) };
                }
            }
            Self::Unversioned(raw) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*raw.as_ptr()).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(raw.as_ptr()) };
                }
            }
        }
    }
}

impl fmt::Debug for ManagedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ManagedTensor").field("info", &self.info).finish_non_exhaustive()
    }
}
