//! Buffers that cudarc's functions accept as their own slices.
//!
//! A [`CudaVec`] is a cudarc slice over a block of this library, together with the owner of the block.
//! So cudarc's kernels, copies and cuBLAS accept it. cudarc's events order its readers and writers on
//! all streams. Dropping a `CudaVec` makes the slice's stream wait for its readers and writers, and
//! then frees the block on that stream. The `CudaVec` keeps the stream alive until then. If there are
//! several concurrent readers, cudarc records only the last one: the program must order the others
//! itself.
//!
//! Lending a buffer to another stream orders the two streams. It keeps the other stream alive until the
//! block is freed. With the feature `cudarc`, the program chooses cudarc's CUDA version and linking.
//! `cuda-dynamic` selects version 12.9, loaded at run time. This module has no unsafe code. The unsafe
//! part is in [`driver::cuda`](crate::driver::cuda).

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, CudaStream, DeviceSlice};

use super::{BufferError, DeviceVec, Handle};
use crate::driver::cuda::{CudaVec, is_on, stream_of, with_address};

impl Handle {
    /// Allocates a buffer of zeros for cudarc on one of cudarc's streams.
    ///
    /// # Errors
    ///
    /// [`BufferError`], also when the stream does not belong to the primary context of the handle's
    /// device. Nothing stays allocated then.
    pub fn cuda_zeroed<T: Pod + Send + Sync>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.check_stream(stream)?;
        self.zeroed(len, stream_of(stream))?.into_cuda_checked(stream)
    }

    /// Allocates a buffer for cudarc with a copy of these values. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`] as for [`cuda_zeroed`](Self::cuda_zeroed). Nothing stays allocated then.
    pub fn cuda_from_slice<T: Pod + Send + Sync>(
        &self,
        values: &[T],
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.check_stream(stream)?;
        self.from_slice(values, stream_of(stream))?.into_cuda_checked(stream)
    }

    /// Checks that the stream belongs to the primary context of this device. Work on any other stream
    /// could access other memory, or none.
    fn check_stream(&self, stream: &CudaStream) -> Result<(), BufferError> {
        let info = self.driver().info();
        if is_on(&info, stream)? {
            return Ok(());
        }
        Err(BufferError::OtherDevice { device: info.device, driver: info.driver })
    }
}

impl<T: Pod + Send + Sync> DeviceVec<T> {
    /// Converts the buffer for cudarc, for use on one of cudarc's streams of the same device. If that
    /// is not the buffer's own stream, it waits for the work submitted to the buffer's stream so far,
    /// and the allocator is notified that it uses the buffer. The calling thread does not wait.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the stream does not belong to the primary context of the buffer's device.
    /// Also when the streams differ and the allocator does not support several streams per block, or
    /// when the device fails. The buffer is dropped then.
    pub fn into_cuda(self, stream: &Arc<CudaStream>) -> Result<CudaVec<T>, BufferError> {
        self.handle().check_stream(stream)?;
        self.into_cuda_checked(stream)
    }

    /// Converts the buffer for a stream that has passed `check_stream`.
    fn into_cuda_checked(mut self, stream: &Arc<CudaStream>) -> Result<CudaVec<T>, BufferError> {
        self.lend(stream_of(stream), Arc::<CudaStream>::clone(stream))?;
        Ok(CudaVec::over(stream, self.address(), self.len(), Box::new(self))?)
    }

    /// Reverses [`into_cuda`](Self::into_cuda): the buffer is used on its own stream again. That stream
    /// waits for cudarc's stream, which waits for all work that cudarc recorded. The calling thread
    /// does not wait.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device fails to order the streams. The buffer is dropped then.
    pub fn from_cuda(handle: &Handle, vec: CudaVec<T>) -> Result<Self, BufferError> {
        let (address, len, stream) = (vec.address(), vec.len(), stream_of(vec.stream()));
        let alive = Arc::clone(vec.stream());
        match vec.into_keeper().downcast::<Self>() {
            Ok(own) => {
                own.handle().order(stream, own.stream())?;
                Ok(*own)
            }
            // `keeps` is dropped before the stream, because tuples are dropped in order.
            Err(keeps) => Self::adopt(handle, address, len, stream, Box::new((keeps, alive))),
        }
    }

    /// Takes ownership of a buffer that cudarc allocated. Dropping the result frees the buffer through
    /// cudarc. The buffer's stream waits for all work that cudarc recorded. The calling thread does not
    /// wait.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the buffer's stream does not belong to the primary context of the handle's
    /// device, or the device fails. cudarc frees the buffer then.
    pub fn from_cuda_slice(handle: &Handle, slice: CudaSlice<T>) -> Result<Self, BufferError> {
        handle.check_stream(slice.stream())?;
        let (address, slice) = with_address(slice)?;
        let (len, stream) = (slice.len(), stream_of(slice.stream()));
        Self::adopt(handle, address, len, stream, Box::new(slice))
    }
}
