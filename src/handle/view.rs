//! Views of buffers, and copies between buffers and the host.
//!
//! All work is submitted to the buffer's stream. Only blocks in host memory that the device does not know
//! (`backend:cpu`) are read and written by the calling thread, before the call returns. A view borrows its
//! buffer, so it cannot outlive the block. A copy between buffers reads the source on the stream of the
//! target. The free of the source then waits for that stream, so both buffers may be dropped at once.

use std::marker::PhantomData;
use std::ops::{Bound, RangeBounds};

use bytemuck::Pod;

use super::dlpack::ManagedTensor;
use super::memory::{BufferMemory, Released};
use super::{BufferError, Handle};
use crate::allocator::{ByteAccess, DeviceAllocator};
use crate::driver::Driver;
use crate::error::HandleError;
use crate::ids::StreamId;

/// Generates the methods that return the address and the length of a view.
macro_rules! extent {
    ($self:ident => $view:expr) => {
        /// Returns the device address of the first value. 0 if the buffer has no bytes.
        #[must_use]
        pub fn address(&$self) -> u64 {
            $view.address
        }

        /// Returns the number of values.
        #[must_use]
        pub fn len(&$self) -> usize {
            $view.len
        }

        /// Returns true if there are no values.
        #[must_use]
        pub fn is_empty(&$self) -> bool {
            $view.len == 0
        }

        /// Returns the size in bytes.
        #[must_use]
        pub fn size_bytes(&$self) -> u64 {
            ($view.len * size_of::<T>()) as u64
        }
    };
}
pub(super) use extent;

/// The owner of a view's memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source<'a> {
    Buffer(&'a BufferMemory),
    Tensor(&'a ManagedTensor),
}

/// A read-only view of values in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceView<'a, T> {
    pub(super) handle: &'a Handle,
    pub(super) source: Source<'a>,
    pub(super) address: u64,
    pub(super) len: usize,
    pub(super) stream: StreamId,
    pub(super) of: PhantomData<&'a T>,
}

/// A writable view of values in a buffer.
#[derive(Debug)]
pub struct DeviceViewMut<'a, T> {
    pub(super) view: DeviceView<'a, T>,
}

impl<'a, T: Pod> DeviceView<'a, T> {
    extent!(self => self);

    /// Returns a view of a range of these values.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceView<'a, T>, BufferError> {
        let start = match range.start_bound() {
            Bound::Included(&at) => at,
            Bound::Excluded(&at) => at.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let end = match range.end_bound() {
            Bound::Included(&at) => at.saturating_add(1),
            Bound::Excluded(&at) => at,
            Bound::Unbounded => self.len,
        };
        if start > end || end > self.len {
            return Err(BufferError::OutOfRange { start, end, len: self.len });
        }
        let address = self.address + (start * size_of::<T>()) as u64;
        Ok(DeviceView { address, len: end - start, ..*self })
    }

    /// Splits the view in two at `middle`.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn split_at(
        &self,
        middle: usize,
    ) -> Result<(DeviceView<'a, T>, DeviceView<'a, T>), BufferError> {
        Ok((self.slice(..middle)?, self.slice(middle..)?))
    }

    /// Copies the values to the host. Waits for the stream.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the lengths differ or the device fails.
    pub fn copy_to_host(&self, into: &mut [T]) -> Result<(), BufferError> {
        self.same_length(self.len, into.len())?;
        self.read(bytemuck::cast_slice_mut(into), self.stream)
    }

    /// Copies the bytes to the host, after the work of `stream`.
    fn read(&self, into: &mut [u8], stream: StreamId) -> Result<(), BufferError> {
        if self.access_on_host(&mut ByteAccess::Read(into))? {
            return Ok(());
        }
        self.submit(|driver, _| Ok(driver.copy_to_host(into, self.address, stream)?))
    }

    /// Accesses the bytes if they are host memory that the device does not know. Returns false, without an
    /// access, if the device must access them.
    fn access_on_host(&self, access: &mut ByteAccess<'_>) -> Result<bool, BufferError> {
        let Source::Buffer(memory) = self.source else { return Ok(false) };
        let (Released::Block(block), Some(bytes)) =
            (memory.kind(), self.handle.control().host_bytes)
        else {
            return Ok(false);
        };
        match bytes.access(block, self.address, access) {
            Ok(()) => Ok(true),
            Err(HandleError::Foreign { .. } | HandleError::UnknownAddress { .. }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns true if the device cannot access the bytes itself.
    fn is_on_host(&self) -> Result<bool, BufferError> {
        self.access_on_host(&mut ByteAccess::Write(&[]))
    }

    /// Copies the values to the host. Waits for the stream. On a simulated device, which stores no bytes,
    /// the values are zeros, except those of `backend:cpu`.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device fails.
    pub fn to_vec(&self) -> Result<Vec<T>, BufferError> {
        let mut values = vec![T::zeroed(); self.len];
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// Calls `work` with the driver and the size in bytes, unless the view is empty.
    fn submit(
        &self,
        work: impl FnOnce(&dyn Driver, u64) -> Result<(), BufferError>,
    ) -> Result<(), BufferError> {
        match self.size_bytes() {
            0 => Ok(()),
            bytes => work(&**self.handle.driver(), bytes),
        }
    }

    /// Makes the free of the memory wait for `stream`: see [`BufferMemory::waits_for`].
    fn waits_for(&self, stream: StreamId) -> Result<bool, BufferError> {
        match self.source {
            _ if stream == self.stream => Ok(true),
            Source::Buffer(memory) => memory.waits_for(stream),
            Source::Tensor(tensor) => tensor.waits_for(stream),
        }
    }

    fn same_length(&self, from: usize, to: usize) -> Result<(), BufferError> {
        if from == to { Ok(()) } else { Err(BufferError::Length { from, to }) }
    }
}

impl<'a, T: Pod> DeviceViewMut<'a, T> {
    /// Returns a read-only view of the same values.
    #[must_use]
    pub fn as_view(&self) -> DeviceView<'_, T> {
        self.view
    }

    extent!(self => self.view);

    /// Returns a writable view of a range of these values.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<DeviceViewMut<'_, T>, BufferError> {
        Ok(DeviceViewMut { view: self.view.slice(range)? })
    }

    /// Splits the view in two at `middle`.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn split_at_mut(
        self,
        middle: usize,
    ) -> Result<(DeviceViewMut<'a, T>, DeviceViewMut<'a, T>), BufferError> {
        let (before, behind) = self.view.split_at(middle)?;
        Ok((DeviceViewMut { view: before }, DeviceViewMut { view: behind }))
    }

    /// Copies values from the host. Waits for the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the lengths differ or the device fails.
    pub fn copy_from_host(&mut self, from: &[T]) -> Result<(), BufferError> {
        self.view.same_length(from.len(), self.view.len)?;
        self.write(bytemuck::cast_slice(from))
    }

    fn write(&mut self, from: &[u8]) -> Result<(), BufferError> {
        if self.view.access_on_host(&mut ByteAccess::Write(from))? {
            return Ok(());
        }
        let DeviceView { address, stream, .. } = self.view;
        self.view.submit(|driver, _| Ok(driver.copy_from_host(address, from, stream)?))
    }

    /// Submits a copy from a buffer of the same device, on this buffer's stream. Does not wait for work
    /// on the source's stream: call [`Handle::order`] before if the source is still being written. If one of
    /// the two is memory of `backend:cpu`, waits for the copy.
    ///
    /// The source may be dropped at once. Its free waits for the copy, as after
    /// [`record_stream`](super::DeviceVec::record_stream). If the source is foreign memory, or its
    /// allocator does not support several streams per block, later work on the source's stream waits for
    /// the copy.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the lengths differ, the source's block is not live or the device fails.
    pub fn copy_from(&mut self, from: &DeviceView<'_, T>) -> Result<(), BufferError> {
        self.view.same_length(from.len, self.view.len)?;
        if from.is_on_host()? || self.view.is_on_host()? {
            let mut bytes = vec![0; from.len * size_of::<T>()];
            from.read(&mut bytes, self.view.stream)?;
            return self.write(&bytes);
        }
        let DeviceView { address, stream, .. } = self.view;
        self.view.submit(|driver, bytes| {
            let waits = from.waits_for(stream)?;
            driver.copy(address, from.address, bytes, stream)?;
            if !waits {
                from.handle.wait_on_stream(stream, from.stream);
            }
            Ok(())
        })
    }

    /// Submits a fill with zeros.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device fails.
    pub fn fill_zero(&mut self) -> Result<(), BufferError> {
        let size_bytes = self.view.size_bytes();
        if self.view.access_on_host(&mut ByteAccess::Fill { byte: 0, size_bytes })? {
            return Ok(());
        }
        let DeviceView { address, stream, .. } = self.view;
        self.view.submit(|driver, bytes| Ok(driver.fill(address, 0, bytes, stream)?))
    }
}
