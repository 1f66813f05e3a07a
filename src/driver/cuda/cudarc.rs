//! A cudarc slice over memory that cudarc does not free.
//!
//! cudarc's code wants its own `CudaSlice`, or what its traits describe. This is such a slice with a
//! keeper beside it: dropping it lets the slice go without freeing, after its stream was made to wait
//! for every reader and writer that cudarc knows of, and then drops the keeper, which owns the memory.
#![expect(unsafe_code, reason = "cudarc's contracts for slices and kernel arguments")]

use std::any::Any;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use cudarc::driver::{
    CudaSlice, CudaStream, CudaView, CudaViewMut, DevicePtr, DevicePtrMut, DeviceRepr, DeviceSlice,
    LaunchArgs, PushKernelArg, SyncOnDrop, sys,
};

use crate::ids::StreamId;

/// The stream of a cudarc stream.
#[must_use]
pub fn stream_of(stream: &CudaStream) -> StreamId {
    StreamId(stream.cu_stream() as u64)
}

/// A buffer for cudarc's code. It reads as the `CudaSlice` that it holds; it can be a kernel's
/// argument, and cuBLAS and its relatives take it.
pub struct CudaVec<T> {
    /// Always there until the drop.
    slice: Option<CudaSlice<T>>,
    /// Owns the memory. Dropped behind the slice.
    keeps: Option<Box<dyn Any + Send + Sync>>,
}

impl<T> CudaVec<T> {
    /// A slice of `len` values at `address`, valid as long as `keeps` lives.
    pub(crate) fn over(
        stream: &Arc<CudaStream>,
        address: u64,
        len: usize,
        keeps: Box<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the memory is valid as long as `keeps`, which is dropped after the slice; the slice
        // never frees it, because every way out of here leaks it first.
        let slice = unsafe { stream.upgrade_device_ptr(address, len) };
        Self { slice: Some(slice), keeps: Some(keeps) }
    }

    fn inside(&self) -> &CudaSlice<T> {
        self.slice.as_ref().expect("the slice goes with the drop")
    }

    fn inside_mut(&mut self) -> &mut CudaSlice<T> {
        self.slice.as_mut().expect("the slice goes with the drop")
    }

    /// Where the first value stands on the device.
    #[must_use]
    pub fn address(&self) -> u64 {
        let slice = self.inside();
        slice.device_ptr(slice.stream()).0
    }

    /// All values as cudarc's view, to write.
    pub fn as_view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.inside_mut().as_view_mut()
    }

    /// All values as cudarc's view, to read.
    #[must_use]
    pub fn as_view(&self) -> CudaView<'_, T> {
        self.inside().as_view()
    }

    /// What owns the memory; the slice's stream waits for its readers and writers.
    pub(crate) fn into_keeper(mut self) -> Box<dyn Any + Send + Sync> {
        self.keeps.take().expect("the keeper goes with the drop")
    }
}

impl<T> Drop for CudaVec<T> {
    fn drop(&mut self) {
        if let Some(slice) = self.slice.take() {
            let _address = slice.leak();
        }
    }
}

impl<T> Deref for CudaVec<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.inside()
    }
}

impl<T> fmt::Debug for CudaVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaVec").field("len", &self.inside().len()).finish_non_exhaustive()
    }
}

impl<T> DeviceSlice<T> for CudaVec<T> {
    fn len(&self) -> usize {
        self.inside().len()
    }

    fn stream(&self) -> &Arc<CudaStream> {
        self.inside().stream()
    }
}

impl<T> DevicePtr<T> for CudaVec<T> {
    fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.inside().device_ptr(stream)
    }
}

impl<T> DevicePtrMut<T> for CudaVec<T> {
    fn device_ptr_mut<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        self.inside_mut().device_ptr_mut(stream)
    }
}

// SAFETY: the argument is that of the slice inside, which outlives the launch as the reference does.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b CudaVec<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, vec: &'b CudaVec<T>) -> &mut Self {
        self.arg(vec.inside())
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T: DeviceRepr> PushKernelArg<&'b mut CudaVec<T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, vec: &'b mut CudaVec<T>) -> &mut Self {
        self.arg(vec.inside_mut())
    }
}
