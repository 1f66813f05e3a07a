//! A typed buffer: values of one type in one block, which is freed when the buffer is dropped.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use bytemuck::Pod;

use super::memory::{BufferMemory, Released};
use super::view::{Source, extent};
use super::{BufferError, DeviceView, DeviceViewMut, Handle, size_of_many};
use crate::allocator::{Allocation, DeviceAllocator};
use crate::ids::StreamId;

/// A buffer of values of type `T` on a device.
///
/// The block belongs to one stream, on which copies and fills of the buffer run. Dropping the buffer
/// frees the block. At that time work on this stream may still be running. Work on other streams must
/// have been announced with [`record_stream`](Self::record_stream).
pub struct DeviceVec<T> {
    memory: BufferMemory,
    address: u64,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> DeviceVec<T> {
    /// Creates a buffer in a block that holds at least `len` values.
    pub(super) fn of_block(
        handle: Handle,
        block: Option<Allocation>,
        len: usize,
        stream: StreamId,
    ) -> Self {
        let address = block.as_ref().map_or(0, Allocation::address);
        let memory = block.map_or(Released::Nothing, Released::Block);
        Self { memory: BufferMemory::new(handle, memory, stream), address, len, of: PhantomData }
    }

    /// Creates a buffer over a block. It has as many values as fit, and the stream of the block.
    ///
    /// # Errors
    ///
    /// Returns the block when values have no size, or when the block belongs to an allocator other than
    /// the handle's. Only some allocators (those with a cache) can detect the latter.
    pub fn from_block(
        handle: &Handle,
        block: Allocation,
        stream: StreamId,
    ) -> Result<Self, Allocation> {
        let item_bytes = size_of::<T>() as u64;
        let own = handle
            .control()
            .caching
            .map_or(Ok(()), |caching| caching.base_allocation(&block).map(drop));
        match usize::try_from(block.size_bytes().checked_div(item_bytes).unwrap_or(0)) {
            Ok(len) if own.is_ok() && item_bytes > 0 => {
                Ok(Self::of_block(handle.clone(), Some(block), len, stream))
            }
            _ => Err(block),
        }
    }

    /// Creates a buffer over foreign memory: `len` values at `address`. The memory must stay valid
    /// while `keeps` is alive. Dropping the buffer drops `keeps` and frees nothing else.
    ///
    /// The address is not checked. The caller is responsible for it, as for all addresses that are
    /// passed to a [`Driver`](crate::driver::Driver). The whole range must be device memory, and no
    /// value of the program may be stored there.
    ///
    /// The devices `sim` and `host` check each access and refuse memory that they have not allocated.
    /// CUDA does not check, and has one address space for all memory of the process. So an address of
    /// pinned or managed host memory is also valid for a copy, and so is any host address if the device
    /// can access pageable memory. Copies and fills of the buffer then access that host memory. If a
    /// value of the program is stored there, behavior is undefined. Any other wrong address makes the
    /// device's calls fail or access other device memory.
    ///
    /// Source: CUDA programming guide, "Unified Virtual Address Space".
    ///
    /// # Errors
    ///
    /// [`BufferError::TooLong`].
    pub fn adopt(
        handle: &Handle,
        address: u64,
        len: usize,
        stream: StreamId,
        keeps: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, BufferError> {
        let bytes = size_of_many::<T>(len)?;
        if address.checked_add(bytes).is_none() {
            return Err(BufferError::TooLong { len, item_bytes: size_of::<T>() });
        }
        let memory = BufferMemory::new(handle.clone(), Released::Foreign(keeps), stream);
        Ok(Self { memory, address, len, of: PhantomData })
    }

    /// Returns the handle that allocated the buffer.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.memory.handle
    }

    extent!(self => self);

    /// Returns the stream of the buffer.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.memory.stream
    }

    /// Returns a view of all values for reading.
    #[must_use]
    pub fn view(&self) -> DeviceView<'_, T> {
        DeviceView {
            handle: &self.memory.handle,
            source: Source::Buffer(&self.memory),
            address: self.address,
            len: self.len,
            stream: self.memory.stream,
            of: PhantomData,
        }
    }

    /// Returns a view of all values for writing.
    #[must_use]
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { view: self.view() }
    }

    /// Returns a view of a range of values for reading.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceView<'_, T>, BufferError> {
        self.view().slice(range)
    }

    /// Returns a view of a range of values for writing.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<DeviceViewMut<'_, T>, BufferError> {
        Ok(DeviceViewMut { view: self.view().slice(range)? })
    }

    /// Copies the values to the host. Waits for the stream.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device fails.
    pub fn to_vec(&self) -> Result<Vec<T>, BufferError> {
        self.view().to_vec()
    }

    /// Announces that work on another stream uses the buffer. When the buffer is dropped, its block is
    /// not reused before the work submitted to that stream until then has finished. Does nothing for
    /// foreign memory.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the allocator does not support several streams per block, or when the block
    /// is not live.
    pub fn record_stream(&self, stream: StreamId) -> Result<(), BufferError> {
        self.memory.record_stream(stream)
    }

    /// Prepares the buffer for use on another stream. That stream waits for the work submitted to the
    /// buffer's own stream so far. `alive` keeps the other stream alive as long as the memory, because
    /// the free waits for its work.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the allocator does not support several streams per block, or when the
    /// device fails.
    pub fn lend(
        &mut self,
        stream: StreamId,
        alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<(), BufferError> {
        self.memory.lend(stream, alive)
    }

    /// Returns the memory without freeing it. No longer keeps the streams alive that the buffer was
    /// lent to. The owner of foreign memory may be dropped at once, as when the buffer is dropped.
    pub fn release(self) -> Released {
        self.memory.release()
    }

    /// Returns the memory and its owner.
    pub(super) fn memory(&self) -> &BufferMemory {
        &self.memory
    }

    /// Returns the memory, which is freed when it is dropped, without the type of the values.
    pub(super) fn into_memory(self) -> BufferMemory {
        self.memory
    }
}

impl<T> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceVec")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("stream", &self.memory.stream)
            .field("memory", self.memory.kind())
            .finish()
    }
}
