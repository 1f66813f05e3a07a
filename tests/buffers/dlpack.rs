//! Tensors that leave and enter through DLPack: what they describe, when they are freed, and the foreign
//! tensors that are refused.

#![expect(unsafe_code, reason = "tensors are passed as pointers")]

use std::ffi::c_void;
use std::ptr::null_mut;

use stratalloc::handle::DeviceVec;
use stratalloc::handle::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    ManagedTensor, TensorElement, TensorError, TensorInfo,
};

use super::{CONFS, DEVICE_CONFS, handle, live_blocks};
use crate::common::machine::HostMachine;
use crate::common::prelude::*;

const ON: StreamId = StreamId::DEFAULT;
const HOST: DLDevice = DLDevice { device_type: DLDevice::CPU, device_id: 0 };

/// A foreign tensor, whose deleter counts its calls.
struct ForeignTensor {
    deleted: Arc<AtomicUsize>,
    tensor: DLTensor,
    version: DLPackVersion,
    flags: u64,
}

impl ForeignTensor {
    /// Describes floats on the host. A null array has no memory; others must outlive the tensor.
    fn new(shape: *mut i64, ndim: i32, strides: *mut i64) -> Self {
        let tensor = DLTensor {
            data: std::ptr::without_provenance_mut(4096),
            device: HOST,
            ndim,
            dtype: f32::DATA_TYPE,
            shape,
            strides,
            byte_offset: 0,
        };
        let version = DLPackVersion { major: 1, minor: 7 };
        Self { deleted: Arc::default(), tensor, version, flags: 0 }
    }

    /// Imports the tensor in the structure with a version. `Ok` has the number of calls of the deleter
    /// before and after the drop.
    fn import(self) -> (Result<TensorInfo, TensorError>, [usize; 2]) {
        unsafe extern "C" fn delete(raw: *mut DLManagedTensorVersioned) {
            // SAFETY: `import` below made the pointer from a box, and the library calls this once.
            let managed = unsafe { Box::from_raw(raw) };
            count(managed.manager_ctx);
        }
        let deleted = Arc::clone(&self.deleted);
        let raw = Box::into_raw(Box::new(DLManagedTensorVersioned {
            version: self.version,
            manager_ctx: Arc::into_raw(self.deleted).cast_mut().cast(),
            deleter: Some(delete),
            flags: self.flags,
            dl_tensor: self.tensor,
        }));
        // SAFETY: the tensor was just made, and its arrays outlive it.
        outcome(unsafe { ManagedTensor::from_raw(raw) }, &deleted)
    }

    fn import_unversioned(self) -> (Result<TensorInfo, TensorError>, [usize; 2]) {
        unsafe extern "C" fn delete(raw: *mut DLManagedTensor) {
            // SAFETY: as in `import`.
            let managed = unsafe { Box::from_raw(raw) };
            count(managed.manager_ctx);
        }
        let deleted = Arc::clone(&self.deleted);
        let raw = Box::into_raw(Box::new(DLManagedTensor {
            dl_tensor: self.tensor,
            manager_ctx: Arc::into_raw(self.deleted).cast_mut().cast(),
            deleter: Some(delete),
        }));
        // SAFETY: the tensor was just made, and its arrays outlive it.
        outcome(unsafe { ManagedTensor::from_unversioned(raw) }, &deleted)
    }
}

fn count(context: *mut c_void) {
    // SAFETY: `import` stored a reference to the counter.
    let deleted = unsafe { Arc::from_raw(context.cast::<AtomicUsize>()) };
    deleted.fetch_add(1, SeqCst);
}

fn outcome(
    imported: Result<ManagedTensor, TensorError>,
    deleted: &AtomicUsize,
) -> (Result<TensorInfo, TensorError>, [usize; 2]) {
    let before = deleted.load(SeqCst);
    let info = imported.map(|tensor| tensor.info().clone());
    (info, [before, deleted.load(SeqCst)])
}

#[test]
fn a_buffer_leaves_as_a_tensor_and_comes_back() {
    for conf in &DEVICE_CONFS {
        let machine = HostMachine::new(256 * MIB);
        let handle = handle(&machine, conf);
        let vec = handle.from_slice(&[1.5f64, 2.0, -3.0], ON).unwrap();
        let address = vec.address();
        let raw = vec.into_tensor().unwrap().into_raw();
        // SAFETY: `into_raw` just returned it.
        let seen = unsafe { &*raw };
        assert_eq!(seen.version, DLPackVersion { major: 1, minor: 0 });
        assert_eq!((seen.flags, seen.dl_tensor.ndim, seen.dl_tensor.byte_offset), (0, 1, 0));
        assert_eq!(seen.dl_tensor.device, HOST);
        assert_eq!(seen.dl_tensor.dtype, DLDataType { code: 2, bits: 64, lanes: 1 });
        assert_eq!(seen.dl_tensor.data.addr() as u64, address);
        for (array, only) in [(seen.dl_tensor.shape, 3), (seen.dl_tensor.strides, 1)] {
            // SAFETY: the tensor has one dimension.
            assert_eq!(unsafe { *array }, only);
        }
        // SAFETY: the memory is the host's and has three values; `into_tensor` has waited for its stream.
        let values = unsafe { std::slice::from_raw_parts(seen.dl_tensor.data.cast::<f64>(), 3) };
        assert_eq!(values, [1.5, 2.0, -3.0]);
        // SAFETY: `into_raw` returned it, and it is used once.
        let tensor = unsafe { ManagedTensor::from_raw(raw) }.unwrap();
        assert_eq!(tensor.view::<f64>(&handle, ON).unwrap().to_vec().unwrap(), [1.5, 2.0, -3.0]);
        let mut vec = DeviceVec::<f64>::from_tensor(&handle, tensor, ON).unwrap();
        vec.view_mut().copy_from_host(&[4.0, 5.0, 6.0]).unwrap();
        assert_eq!((vec.address(), vec.to_vec().unwrap()), (address, vec![4.0, 5.0, 6.0]));
        assert_eq!(live_blocks(&handle), 1);
        drop(vec);
        assert_eq!(live_blocks(&handle), 0);
    }
}

#[test]
fn a_tensor_keeps_its_block_and_its_allocator() {
    let machine = HostMachine::new(64 * MIB);
    let (raw, unversioned) = {
        let handle = handle(&machine, CONFS[0]);
        let raw = handle.zeroed::<u8>(100, ON).unwrap().into_tensor().unwrap().into_raw();
        let tensor = handle.zeroed::<i16>(7, ON).unwrap().into_tensor().unwrap();
        drop(handle.zeroed::<u8>(9, ON).unwrap().into_tensor().unwrap());
        assert_eq!(live_blocks(&handle), 2);
        (raw, tensor.into_unversioned().unwrap())
    };
    assert!(machine.used_bytes() > 0);
    // SAFETY: `into_unversioned` returned it.
    let deleter = unsafe { (*unversioned).deleter }.unwrap();
    // SAFETY: this is the one call with it.
    unsafe { deleter(unversioned) };
    assert!(machine.used_bytes() > 0);
    let raw = raw.expose_provenance();
    // Another thread may call it.
    let deletes = move || {
        let raw = std::ptr::with_exposed_provenance_mut::<DLManagedTensorVersioned>(raw);
        // SAFETY: `into_raw` returned it.
        let deleter = unsafe { (*raw).deleter }.unwrap();
        // SAFETY: this is the one call with it.
        unsafe { deleter(raw) };
    };
    thread::spawn(deletes).join().unwrap();
    assert_eq!(machine.used_bytes(), 0);
}

#[test]
fn an_empty_buffer_is_a_tensor_without_data() {
    let machine = HostMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let tensor = handle.uninit::<u32>(0, ON).unwrap().into_tensor().unwrap();
    assert_eq!((tensor.info().address, tensor.info().shape.clone()), (0, vec![0]));
    let raw = tensor.into_unversioned().unwrap();
    // SAFETY: `into_unversioned` returned it, and it is used once.
    let tensor = unsafe { ManagedTensor::from_unversioned(raw) }.unwrap();
    assert!(DeviceVec::<u32>::from_tensor(&handle, tensor, ON).unwrap().is_empty());
}

#[test]
fn a_simulated_device_has_no_tensors() {
    let machine = SimMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let error = handle.zeroed::<u8>(1, ON).unwrap().into_tensor().unwrap_err();
    assert!(matches!(error, TensorError::NoMemory { driver: "sim" }), "{error}");
    assert_eq!(live_blocks(&handle), 0);
}

#[test]
fn contiguous_foreign_tensors_are_read_and_deleted_once() {
    let (mut shape, mut strides) = ([2i64, 1, 3], [3i64, 99, 1]);
    let (shape, strides) = (shape.as_mut_ptr(), strides.as_mut_ptr());
    for strides in [null_mut(), strides] {
        let mut tensor = ForeignTensor::new(shape, 3, strides);
        (tensor.tensor.byte_offset, tensor.flags) = (64, DLManagedTensorVersioned::READ_ONLY);
        let (info, deleted) = tensor.import();
        let info = info.unwrap();
        assert_eq!((info.address, info.size_bytes().unwrap(), deleted), (4160, 24, [0, 1]));
        assert_eq!((info.shape.as_slice(), info.is_read_only), ([2, 1, 3].as_slice(), true));
        let (info, deleted) = ForeignTensor::new(shape, 3, strides).import_unversioned();
        assert!(!info.unwrap().is_read_only);
        assert_eq!(deleted, [0, 1]);
    }
    // A number has no dimensions, and needs no arrays.
    let (info, deleted) = ForeignTensor::new(null_mut(), 0, null_mut()).import();
    assert_eq!((info.unwrap().size_bytes().unwrap(), deleted), (4, [0, 1]));
    // Without elements neither data nor strides are used.
    let (mut shape, mut strides) = ([i64::MAX, 0, i64::MAX], [7i64, 7, 7]);
    let mut tensor = ForeignTensor::new(shape.as_mut_ptr(), 3, strides.as_mut_ptr());
    tensor.tensor.data = null_mut();
    let (info, deleted) = tensor.import();
    assert_eq!((info.unwrap().size_bytes().unwrap(), deleted), (0, [0, 1]));
}

#[test]
fn impossible_foreign_tensors_are_refused_and_deleted_once() {
    let mut shape = [2i64, 3];
    let mut huge = [i64::MAX, 2];
    let mut negative = [2i64, -3];
    let mut turned = [1i64, 2];
    let shape = shape.as_mut_ptr();
    type Bend = fn(&mut ForeignTensor);
    let two = |shape, bend: Bend| {
        let mut tensor = ForeignTensor::new(shape, 2, null_mut());
        bend(&mut tensor);
        tensor
    };
    for (tensor, message) in [
        (
            two(shape, |t| t.version = DLPackVersion { major: 2, minor: 3 }),
            "the tensor has version 2.3 of DLPack; expected version 1",
        ),
        (two(shape, |t| t.tensor.ndim = -1), "the tensor has -1 dimensions; expected 0 to 64"),
        (two(shape, |t| t.tensor.ndim = 65), "the tensor has 65 dimensions; expected 0 to 64"),
        (two(shape, |t| t.tensor.ndim = i32::MIN), "the tensor has -2147483648 dimensions"),
        (two(null_mut(), |_| {}), "the tensor has 2 dimensions, and its shape is null"),
        (two(huge.as_mut_ptr(), |_| {}), "a tensor of shape [9223372036854775807, 2] at 0x1000"),
        (two(negative.as_mut_ptr(), |_| {}), "a tensor of shape [2, -3] at 0x1000"),
        (
            two(shape, |t| t.tensor.byte_offset = u64::MAX),
            "a tensor of shape [2, 3] at 0x1000 with 4 bytes per element is not possible",
        ),
        (two(shape, |t| t.tensor.byte_offset = u64::MAX - 4100), "a tensor of shape [2, 3] at 0x"),
        (
            two(shape, |t| t.tensor.data = null_mut()),
            "the tensor has 24 bytes, and its data is null",
        ),
        (two(shape, |t| t.tensor.dtype.bits = 4), "elements of 1 x 4 bits are not supported"),
        (two(shape, |t| t.tensor.dtype.lanes = 0), "elements of 0 x 32 bits are not supported"),
        (
            ForeignTensor::new(shape, 2, turned.as_mut_ptr()),
            "the stride of dimension 0 is 1 elements; only 3 is supported",
        ),
    ] {
        let (info, deleted) = tensor.import();
        let error = info.expect_err(message).to_string();
        assert!(error.starts_with(message), "{error}");
        assert_eq!(deleted, [1, 1], "{error}");
    }
    let mut tensor = ForeignTensor::new(shape, 2, null_mut());
    tensor.tensor.ndim = 1000;
    let (info, deleted) = tensor.import_unversioned();
    assert!(matches!(info, Err(TensorError::Dimensions { ndim: 1000 })));
    assert_eq!(deleted, [1, 1]);
    // SAFETY: null is allowed.
    let null = unsafe { ManagedTensor::from_raw(null_mut()) };
    assert!(matches!(null, Err(TensorError::Null)));
    // SAFETY: null is allowed.
    let null = unsafe { ManagedTensor::from_unversioned(null_mut()) };
    assert!(matches!(null, Err(TensorError::Null)));
}

#[test]
fn a_buffer_is_made_only_over_a_fitting_tensor() {
    let machine = HostMachine::new(64 * MIB);
    let handle = handle(&machine, CONFS[0]);
    let fitting = TensorInfo {
        address: 4096,
        device: HOST,
        data_type: f32::DATA_TYPE,
        shape: vec![2, 3],
        is_read_only: false,
    };
    let refused = |bend: fn(&mut TensorInfo)| {
        let (mut info, keeps) = (fitting.clone(), Arc::new(()));
        bend(&mut info);
        let tensor = ManagedTensor::new(info, Box::new(Arc::clone(&keeps))).unwrap();
        let error = DeviceVec::<f32>::from_tensor(&handle, tensor, ON).unwrap_err();
        assert_eq!(Arc::strong_count(&keeps), 1, "{error}");
        error.to_string()
    };
    assert_eq!(refused(|info| info.is_read_only = true), "the tensor is read-only");
    assert_eq!(refused(|info| info.address = 4098), "the address 0x1002 is not a multiple of 4");
    let error =
        refused(|info| info.device = DLDevice { device_type: DLDevice::CUDA, device_id: 3 });
    assert!(error.contains("device_type: 2, device_id: 3 }; expected"), "{error}");
    let error = refused(|info| info.data_type = i32::DATA_TYPE);
    assert!(error.contains("code: 0, bits: 32, lanes: 1 }; expected"), "{error}");

    let tensor = ManagedTensor::new(fitting.clone(), Box::new(())).unwrap();
    assert_eq!(DeviceVec::<f32>::from_tensor(&handle, tensor, ON).unwrap().len(), 6);
    // What is read-only can be viewed, and goes on only where that is visible.
    let read_only = TensorInfo { is_read_only: true, ..fitting };
    let tensor = ManagedTensor::new(read_only, Box::new(())).unwrap();
    assert_eq!(tensor.view::<f32>(&handle, ON).unwrap().len(), 6);
    assert!(matches!(tensor.into_unversioned(), Err(TensorError::ReadOnly)));
}
