//! A typed buffer: values of one type in one block, which is freed when the buffer is dropped.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use bytemuck::Pod;

use super::view::extent;
use super::{BufferError, DeviceView, DeviceViewMut, Handle, size_of_many};
use crate::allocator::{Allocation, DeviceAllocator};
use crate::ids::StreamId;

/// A buffer of values of type `T` on a device.
///
/// The block belongs to one stream, on which copies and fills of the buffer run. Dropping the buffer
/// frees the block. At that time work on this stream may still be running. Work on other streams must
/// have been announced with [`record_stream`](Self::record_stream).
pub struct DeviceVec<T> {
    handle: Handle,
    memory: Released,
    address: u64,
    len: usize,
    stream: StreamId,
    /// The streams that the buffer was lent to. Dropped after the memory, because freeing it uses them.
    lent: Vec<Lent>,
    of: PhantomData<T>,
}

/// A stream that a buffer was lent to.
struct Lent {
    stream: StreamId,
    /// Keeps the stream alive, because freeing the memory uses it.
    _alive: Arc<dyn Any + Send + Sync>,
}

/// The memory of a buffer, as returned by [`DeviceVec::release`].
#[must_use = "dropping it leaks the block until the allocator is dropped, or frees foreign memory"]
pub enum Released {
    /// The buffer had no memory.
    Nothing,
    /// A block, which the allocator of the buffer's handle must free.
    Block(Allocation),
    /// The owner of foreign memory.
    Foreign(Box<dyn Any + Send + Sync>),
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
        Self { handle, memory, address, len, stream, lent: Vec::new(), of: PhantomData }
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
        let memory = Released::Foreign(keeps);
        let lent = Vec::new();
        Ok(Self { handle: handle.clone(), memory, address, len, stream, lent, of: PhantomData })
    }

    /// Returns the handle that allocated the buffer.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    extent!(self => self);

    /// Returns the stream of the buffer.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// Returns a view of all values for reading.
    #[must_use]
    pub fn view(&self) -> DeviceView<'_, T> {
        DeviceView {
            handle: &self.handle,
            address: self.address,
            len: self.len,
            stream: self.stream,
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
        let Released::Block(block) = &self.memory else {
            return Ok(());
        };
        if stream == self.stream {
            return Ok(());
        }
        let streams = self
            .handle
            .control()
            .cross_stream
            .ok_or_else(|| BufferError::NoStreams { backend: self.handle.name().to_owned() })?;
        Ok(streams.record_stream(block, stream)?)
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
        self.record_stream(stream)?;
        if self.lent.iter().all(|lent| lent.stream != stream) {
            self.lent.push(Lent { stream, _alive: alive });
        }
        self.handle.order(self.stream, stream)
    }

    /// Returns the memory without freeing it. No longer keeps the streams alive that the buffer was
    /// lent to.
    pub fn release(mut self) -> Released {
        std::mem::replace(&mut self.memory, Released::Nothing)
    }
}

impl<T> Drop for DeviceVec<T> {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.memory, Released::Nothing) {
            Released::Nothing => {}
            Released::Block(block) => {
                // Blocks of `backend:pinned` wait for announced streams only. If the announcement fails,
                // the work on the stream may still use the block, so it stays allocated.
                let announced = match self.handle.control().cross_stream {
                    Some(streams) if self.handle.name() == "pinned" => {
                        streams.record_stream(&block, self.stream).is_ok()
                    }
                    _ => true,
                };
                if !announced || self.handle.free(block).is_err() {
                    self.handle.lost_one();
                }
            }
            Released::Foreign(keeps) => {
                // Order the other streams first: the owner frees the memory on this buffer's stream and
                // does not wait for others.
                for Lent { stream, .. } in &self.lent {
                    if self.handle.order(*stream, self.stream).is_err() {
                        // Fallback: wait on the host. If this fails too, the device is lost, and no
                        // work is running on it.
                        let _ = self.handle.driver().synchronize_stream(*stream);
                    }
                }
                drop(keeps);
            }
        }
    }
}

impl<T> fmt::Debug for DeviceVec<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceVec")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("stream", &self.stream)
            .field("memory", &self.memory)
            .finish()
    }
}

impl fmt::Debug for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "Nothing",
            Self::Block(_) => "Block",
            Self::Foreign(_) => "Foreign",
        })
    }
}
