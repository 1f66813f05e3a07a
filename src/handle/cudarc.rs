//! Buffers that cudarc's code takes for its own.
//!
//! A [`CudaVec`] is a cudarc slice over one of our blocks. cudarc's events order its readers and
//! writers on all streams, and when it is dropped its own stream is made to wait for them before the
//! block is freed there. Only safe code is here; what is not is in [`driver::cuda`](crate::driver::cuda).

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceSlice};

use super::{BufferError, DeviceVec, Handle};
use crate::driver::cuda::{CudaVec, stream_of};

impl Handle {
    /// A buffer of zeros for cudarc, on one of its streams. The stream belongs to the handle's device.
    ///
    /// # Errors
    ///
    /// [`BufferError`]; nothing stays allocated then.
    pub fn cuda_zeroed<T: Pod + Send + Sync>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.zeroed(len, stream_of(stream))?.into_cuda(stream)
    }

    /// A buffer for cudarc with a copy of these values. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`]; nothing stays allocated then.
    pub fn cuda_from_slice<T: Pod + Send + Sync>(
        &self,
        values: &[T],
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.from_slice(values, stream_of(stream))?.into_cuda(stream)
    }
}

impl<T: Pod + Send + Sync> DeviceVec<T> {
    /// The same buffer for cudarc's code, on one of cudarc's streams of the same device. If that is not
    /// the buffer's own stream, its use there is announced; work that the own stream was given before is
    /// not waited for.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the allocator knows no streams and the streams differ.
    pub fn into_cuda(self, stream: &Arc<CudaStream>) -> Result<CudaVec<T>, BufferError> {
        self.record_stream(stream_of(stream))?;
        Ok(CudaVec::over(stream, self.address(), self.len(), Box::new(self)))
    }

    /// Takes back what [`into_cuda`](Self::into_cuda) made, or takes over a buffer of cudarc's, which is
    /// kept as long as this lives. Its stream waits for everything that cudarc knows of.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when so many values cannot be.
    pub fn from_cuda(handle: &Handle, vec: CudaVec<T>) -> Result<Self, BufferError> {
        let (address, len, stream) = (vec.address(), vec.len(), stream_of(vec.stream()));
        match vec.into_keeper().downcast::<Self>() {
            Ok(own) => Ok(*own),
            Err(keeps) => Self::adopt(handle, address, len, stream, keeps),
        }
    }

    /// Takes over a buffer that cudarc allocated; cudarc frees it when this is dropped.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when so many values cannot be.
    pub fn from_cuda_slice(handle: &Handle, slice: CudaSlice<T>) -> Result<Self, BufferError> {
        let stream = Arc::clone(slice.stream());
        let address = slice.device_ptr(&stream).0;
        let len = slice.len();
        Self::adopt(handle, address, len, stream_of(&stream), Box::new(slice))
    }
}
