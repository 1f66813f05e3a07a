//! Buffers that cudarc's code takes for its own.
//!
//! A [`CudaVec`] is a cudarc slice over one of our blocks. cudarc's events order its readers and
//! writers on all streams, and when it is dropped its own stream is made to wait for the last of them
//! before the block is freed behind it; until then the buffer keeps that stream alive. Of several
//! readers at once cudarc remembers the last: order the others yourself. Only safe code is here; what is
//! not is in [`driver::cuda`](crate::driver::cuda).

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, CudaStream, DeviceSlice};

use super::{BufferError, DeviceVec, Handle};
use crate::driver::cuda::{CudaVec, is_on, settled, stream_of};

impl Handle {
    /// A buffer of zeros for cudarc, on one of its streams.
    ///
    /// # Errors
    ///
    /// [`BufferError`], also when the stream is not one of the primary context of the handle's device;
    /// nothing stays allocated then.
    pub fn cuda_zeroed<T: Pod + Send + Sync>(
        &self,
        len: usize,
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.check_stream(stream)?;
        self.zeroed(len, stream_of(stream))?.into_cuda_checked(stream)
    }

    /// A buffer for cudarc with a copy of these values. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`] as of [`cuda_zeroed`](Self::cuda_zeroed); nothing stays allocated then.
    pub fn cuda_from_slice<T: Pod + Send + Sync>(
        &self,
        values: &[T],
        stream: &Arc<CudaStream>,
    ) -> Result<CudaVec<T>, BufferError> {
        self.check_stream(stream)?;
        self.from_slice(values, stream_of(stream))?.into_cuda_checked(stream)
    }

    /// Work on streams of other devices or contexts could touch other memory, or none.
    fn check_stream(&self, stream: &CudaStream) -> Result<(), BufferError> {
        let info = self.driver().info();
        if is_on(&info, stream)? {
            return Ok(());
        }
        Err(BufferError::OtherDevice { device: info.device, driver: info.driver })
    }
}

impl<T: Pod + Send + Sync> DeviceVec<T> {
    /// The same buffer for cudarc's code, on one of cudarc's streams of the same device. If that is not
    /// the buffer's own stream, it comes behind what the own one was given so far, and its use is
    /// announced. Does not wait.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the stream is not one of the primary context of the buffer's device, when
    /// the allocator knows no streams and the streams differ, or when the device fails. The buffer is
    /// dropped then.
    pub fn into_cuda(self, stream: &Arc<CudaStream>) -> Result<CudaVec<T>, BufferError> {
        self.handle().check_stream(stream)?;
        self.into_cuda_checked(stream)
    }

    /// The same for a stream that was found to be of the buffer's device.
    fn into_cuda_checked(mut self, stream: &Arc<CudaStream>) -> Result<CudaVec<T>, BufferError> {
        self.lend(stream_of(stream), Arc::<CudaStream>::clone(stream))?;
        Ok(CudaVec::over(stream, self.address(), self.len(), Box::new(self))?)
    }

    /// Takes back what [`into_cuda`](Self::into_cuda) made; it is on its own stream again, which waits
    /// for the stream of cudarc's, which waits for everything that cudarc knows of. The caller does not.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device refuses to order the streams. The buffer is dropped then.
    pub fn from_cuda(handle: &Handle, vec: CudaVec<T>) -> Result<Self, BufferError> {
        let (address, len, stream) = (vec.address(), vec.len(), stream_of(vec.stream()));
        let alive = Arc::clone(vec.stream());
        match vec.into_keeper().downcast::<Self>() {
            Ok(own) => {
                own.handle().order(stream, own.stream())?;
                Ok(*own)
            }
            // Tuples are dropped from the left: the stream goes last.
            Err(keeps) => Self::adopt(handle, address, len, stream, Box::new((keeps, alive))),
        }
    }

    /// Takes over a buffer that cudarc allocated; cudarc frees it when this is dropped. Its stream waits
    /// for everything that cudarc knows of; the caller does not.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when its stream is not one of the primary context of the handle's device, or the
    /// device fails. cudarc frees the buffer then.
    pub fn from_cuda_slice(handle: &Handle, slice: CudaSlice<T>) -> Result<Self, BufferError> {
        handle.check_stream(slice.stream())?;
        let (address, slice) = settled(slice)?;
        let (len, stream) = (slice.len(), stream_of(slice.stream()));
        Self::adopt(handle, address, len, stream, Box::new(slice))
    }
}
