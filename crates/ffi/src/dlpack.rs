//! Blocks with an owner, and tensors that other libraries read and write through DLPack.
//!
//! An owned block is freed when its number has been released and every tensor of it was deleted. So a
//! tensor may outlive both the number and the handle of the allocator. The checks of foreign tensors are
//! those of `stratalloc::handle::dlpack`.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::{mem, process};

use super::calls::stream_of;
use super::guard::{Failure, Status, status};
use super::pointers::{OutPointer, read_struct, store};
use super::{table, user_data};
use stratalloc::handle::dlpack::{
    DLDataType, DLManagedTensor, DLManagedTensorVersioned, MAX_DIMENSIONS, ManagedTensor,
    TensorElement, TensorError, TensorInfo,
};
use stratalloc::handle::{DeviceVec, Handle};

/// A tensor: its memory, the type of its elements, and its shape. It is contiguous, the last dimension
/// innermost. The numbers for types and devices are those of DLPack.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// The address of the first element.
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The kind of device: 1 is the host, 2 CUDA, 3 page-locked memory of the host.
    pub device_type: u32,
    /// The ordinal of the device.
    pub device_id: u32,
    /// The kind of number: 0 signed, 1 unsigned, 2 floating-point, 4 `bfloat16`, 5 complex, 6 boolean.
    pub type_code: u32,
    /// The bits of one number.
    pub type_bits: u32,
    /// The numbers in one element.
    pub type_lanes: u32,
    /// Nonzero if the memory must not be written.
    pub is_read_only: u32,
    /// The number of dimensions.
    pub dimensions: u32,
    /// The length of each dimension. The values after the last dimension have no meaning.
    pub shape: [i64; 64],
}

impl Tensor {
    fn of(info: &TensorInfo) -> Result<Self, Failure> {
        let mut shape = [0; MAX_DIMENSIONS as usize];
        shape[..info.shape.len()].copy_from_slice(&info.shape);
        let DLDataType { code, bits, lanes } = info.data_type;
        Ok(Self {
            address: info.address,
            size_bytes: info.size_bytes()?,
            // DLPack's numbers are not negative. A foreign tensor may still have such a number.
            device_type: info.device.device_type.cast_unsigned(),
            device_id: info.device.device_id.cast_unsigned(),
            type_code: code.into(),
            type_bits: bits.into(),
            type_lanes: lanes.into(),
            is_read_only: info.is_read_only.into(),
            dimensions: u32::try_from(info.shape.len()).unwrap_or(u32::MAX),
            shape,
        })
    }

    /// Returns the type and the shape, which are read from a caller.
    fn type_and_shape(&self) -> Result<(DLDataType, Vec<i64>), Failure> {
        let Self { type_code, type_bits, type_lanes, dimensions, .. } = *self;
        let wide = |_| {
            let text =
                format_args!("no type has code {type_code}, {type_bits} bits, {type_lanes} lanes");
            Failure::invalid(text)
        };
        let code = u8::try_from(type_code).map_err(wide)?;
        let bits = u8::try_from(type_bits).map_err(wide)?;
        let lanes = u16::try_from(type_lanes).map_err(wide)?;
        let shape = usize::try_from(dimensions).ok().and_then(|count| self.shape.get(..count));
        let many =
            || Failure::invalid(format_args!("{dimensions} dimensions; at most 64 are possible"));
        Ok((DLDataType { code, bits, lanes }, shape.ok_or_else(many)?.to_vec()))
    }
}

/// A block that is freed when it is dropped.
struct OwnedBlock {
    vec: Option<DeviceVec<u8>>,
    process: u32,
}

impl Drop for OwnedBlock {
    fn drop(&mut self) {
        if self.process != process::id() {
            // A forked child has abandoned its parent's allocators. Their locks may be held forever.
            mem::forget(self.vec.take());
        }
    }
}

impl OwnedBlock {
    fn vec(&self) -> &DeviceVec<u8> {
        self.vec.as_ref().expect("only the drop removes it")
    }
}

/// The kind of structure that a call returns or expects.
#[derive(Clone, Copy)]
enum Structure {
    Versioned,
    Unversioned,
}

/// A flag of `stratalloc_tensor_export` and `stratalloc_tensor_import`: the tensor is a `DLManagedTensor`,
/// the structure before version 1 of DLPack, and not a `DLManagedTensorVersioned`.
pub const TENSOR_UNVERSIONED: u32 = 1;
/// A flag of `stratalloc_tensor_export`: the tensor is used on another stream.
pub const TENSOR_ON_STREAM: u32 = 2;

/// Checks the flags of a call.
fn structure(flags: u32, known: u32) -> Result<Structure, Failure> {
    if flags & !known != 0 {
        return Err(Failure::invalid(format_args!("unknown flags {:#x}", flags & !known)));
    }
    Ok(if flags & TENSOR_UNVERSIONED == 0 { Structure::Versioned } else { Structure::Unversioned })
}

/// Allocates a block of at least `bytes` for tensors, and stores its number in `block`. The block is freed
/// on `stream` when the number has been released and all tensors of it were deleted. Until then it also
/// keeps its allocator, if that is destroyed. It must not be freed by address. Comes from the cache,
/// even if the cache is off.
///
/// Stores the block in `tensor` as a tensor of bytes with one dimension. The call fails with
/// `NOT_SUPPORTED` on the device `sim`, which has no memory. May wait as `stratalloc_allocate` does, and on
/// `host` waits for `stream`.
///
/// # Safety
///
/// `block` and `tensor` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_owned_allocate(
    handle: u64,
    bytes: u64,
    stream: *mut c_void,
    block: *mut u64,
    tensor: *mut Tensor,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let block = unsafe { OutPointer::new(block, "block") }?;
        // SAFETY: required of the caller (`# Safety`).
        let tensor = unsafe { OutPointer::new(tensor, "tensor") }?;
        let len = usize::try_from(bytes).ok().filter(|len| isize::try_from(*len).is_ok());
        let len = len.ok_or_else(|| {
            Failure::new(
                Status::OutOfMemory,
                format_args!("{bytes} bytes are more than memory can hold"),
            )
        })?;
        let handle = Handle::of(table::find(handle)?.allocator.clone());
        let vec = handle.uninit::<u8>(len, stream_of(stream))?;
        let shape = vec![i64::try_from(len).unwrap_or(i64::MAX)];
        tensor.put(Tensor::of(&vec.tensor_info(u8::DATA_TYPE, shape)?)?);
        block.put(user_data::add(OwnedBlock { vec: Some(vec), process: process::id() }));
        Ok(())
    })
}

/// Releases the number of an owned block. The block is freed now, or when the last tensor of it is deleted.
/// Waits only as `stratalloc_free` does.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_owned_release(block: u64) -> Status {
    status(|| user_data::release::<OwnedBlock>("owned block", block))
}

/// Creates a tensor in an owned block, for another library, and stores a pointer to a DLPack structure in
/// `managed`. Its deleter may be called on any thread. Type and shape are those of `tensor`, whose other
/// fields are ignored. The tensor starts where the block starts, and must fit.
///
/// With the flag `STRATALLOC_TENSOR_ON_STREAM`, work submitted to `stream` from now on may use the tensor:
/// that stream waits for the block's stream, and the free of the block waits for it. Without the flag,
/// `stream` is ignored, and the caller orders the streams. Does not wait. But on `host` memory is used
/// without streams, so there the call waits for the block's stream.
///
/// # Safety
///
/// `tensor` may be read; `managed` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tensor_export(
    block: u64,
    tensor: *const Tensor,
    flags: u32,
    stream: *mut c_void,
    managed: *mut *mut c_void,
) -> Status {
    let work = || {
        let structure = structure(flags, TENSOR_UNVERSIONED | TENSOR_ON_STREAM)?;
        // SAFETY: required of the caller (`# Safety`).
        let (data_type, shape) = unsafe { read_struct(tensor, "tensor") }?.type_and_shape()?;
        let owned = user_data::find::<OwnedBlock>("owned block", block)?;
        let vec = owned.vec();
        let info = vec.tensor_info(data_type, shape)?;
        let needed = info.size_bytes()?;
        if needed > vec.size_bytes() {
            let text =
                format_args!("the tensor has {needed} bytes, the block {}", vec.size_bytes());
            return Err(Failure::invalid(text));
        }
        if flags & TENSOR_ON_STREAM != 0 {
            let stream = stream_of(stream);
            vec.record_stream(stream)?;
            vec.handle().order(vec.stream(), stream)?;
        }
        let tensor = ManagedTensor::new(info, Box::new(owned))?;
        Ok(match structure {
            Structure::Versioned => tensor.into_raw().cast::<c_void>(),
            Structure::Unversioned => tensor.into_unversioned()?.cast(),
        })
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(managed, "managed", work) }
}

/// Takes ownership of a tensor of another library, and stores a number that identifies it and its
/// description. The tensor must be contiguous. Its deleter is called by `stratalloc_tensor_release`. If the
/// call fails, it has called the deleter, except when `imported` or `tensor` is null or a flag is unknown.
///
/// # Safety
///
/// `managed` is null, or a tensor in DLPack's structure that `flags` names and that belongs to the caller.
/// Its deleter may be called on any thread; `imported` and `tensor` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tensor_import(
    managed: *mut c_void,
    flags: u32,
    imported: *mut u64,
    tensor: *mut Tensor,
) -> Status {
    status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let imported = unsafe { OutPointer::new(imported, "imported") }?;
        // SAFETY: required of the caller (`# Safety`).
        let out = unsafe { OutPointer::new(tensor, "tensor") }?;
        // SAFETY: required of the caller (`# Safety`).
        let tensor = unsafe { owned_tensor(managed, structure(flags, TENSOR_UNVERSIONED)?) }?;
        out.put(Tensor::of(tensor.info())?);
        imported.put(user_data::add(tensor));
        Ok(())
    })
}

/// Calls the deleter of an imported tensor. Waits only if the deleter waits.
#[unsafe(no_mangle)]
pub extern "C" fn stratalloc_tensor_release(imported: u64) -> Status {
    status(|| user_data::release::<ManagedTensor>("imported tensor", imported))
}

/// # Safety
///
/// The same as for [`ManagedTensor::from_raw`], with the structure that `structure` names.
unsafe fn owned_tensor(
    managed: *mut c_void,
    structure: Structure,
) -> Result<ManagedTensor, TensorError> {
    match structure {
        // SAFETY: required of the caller (`# Safety`).
        Structure::Versioned => unsafe {
            ManagedTensor::from_raw(managed.cast::<DLManagedTensorVersioned>())
        },
        // SAFETY: required of the caller (`# Safety`).
        Structure::Unversioned => unsafe {
            ManagedTensor::from_unversioned(managed.cast::<DLManagedTensor>())
        },
    }
}

/// Python's function `PyCapsule_IsValid`.
pub type CapsuleIsValid =
    Option<unsafe extern "C" fn(capsule: *mut c_void, name: *const c_char) -> c_int>;
/// Python's function `PyCapsule_GetPointer`.
pub type CapsulePointer =
    Option<unsafe extern "C" fn(capsule: *mut c_void, name: *const c_char) -> *mut c_void>;

/// Python's functions, from the first call of `stratalloc_tensor_capsule_destructor`.
static PYTHON: OnceLock<(CapsuleIsValid, CapsulePointer)> = OnceLock::new();

/// Stores a destructor for Python's capsules with a tensor. If the capsule's name is still `dltensor` or
/// `dltensor_versioned` at its end, no library has taken the tensor, and the destructor calls the deleter.
/// It is a function of this library, so it also works while the interpreter exits. The library does not
/// link to Python: the caller passes Python's functions, the same ones at every call.
///
/// # Safety
///
/// The functions are those of Python's interface; `destructor` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tensor_capsule_destructor(
    is_valid: CapsuleIsValid,
    pointer: CapsulePointer,
    destructor: *mut *mut c_void,
) -> Status {
    let work = || {
        if is_valid.is_none() || pointer.is_none() {
            return Err(Failure::null("a function of Python"));
        }
        PYTHON.get_or_init(|| (is_valid, pointer));
        Ok(end_capsule as *mut c_void)
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(destructor, "destructor", work) }
}

/// The destructor of a capsule.
///
/// # Safety
///
/// `capsule` is a capsule of Python, and the calling thread holds the interpreter.
unsafe extern "C" fn end_capsule(capsule: *mut c_void) {
    // A panic must not leave this function. The status and the message have no reader.
    let _ = status(|| {
        let Some((Some(is_valid), Some(pointer))) = PYTHON.get() else { return Ok(()) };
        for (name, structure) in
            [(c"dltensor_versioned", Structure::Versioned), (c"dltensor", Structure::Unversioned)]
        {
            let name: &CStr = name;
            // SAFETY: Python's function, with a capsule and a name.
            if unsafe { is_valid(capsule, name.as_ptr()) } != 0 {
                // SAFETY: as above.
                let managed = unsafe { pointer(capsule, name.as_ptr()) };
                // SAFETY: a capsule with this name owns a tensor of this structure.
                drop(unsafe { owned_tensor(managed, structure) });
            }
        }
        Ok(())
    });
}
