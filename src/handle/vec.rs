//! A typed buffer: values of one type in one block, freed when it is dropped.

#[cfg(test)]
mod tests;

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

/// Values of type `T` on a device.
///
/// Its block belongs to one stream, on which its copies and fills run. Dropping it frees the block:
/// work that was submitted to that stream may still run, work on other streams must have been
/// announced with [`record_stream`](Self::record_stream).
pub struct DeviceVec<T> {
    handle: Handle,
    memory: Released,
    address: u64,
    len: usize,
    stream: StreamId,
    /// Streams that others used it on. Dropped behind the memory.
    lent: Vec<Lent>,
    of: PhantomData<T>,
}

/// A stream that a buffer was lent to.
struct Lent {
    stream: StreamId,
    /// Keeps it alive: the free of the memory asks for it.
    _alive: Arc<dyn Any + Send + Sync>,
}

/// The memory of a buffer, which [`DeviceVec::release`] gives up.
#[must_use = "dropping it leaks the block until the allocator goes, or lets go of foreign memory"]
pub enum Released {
    /// There was no memory.
    Nothing,
    /// A block to be freed with the allocator of the buffer's handle.
    Block(Allocation),
    /// What kept foreign memory.
    Foreign(Box<dyn Any + Send + Sync>),
}

impl<T: Pod> DeviceVec<T> {
    /// A buffer in a block that holds at least so many values.
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

    /// A buffer over a block that was allocated by hand: as many values as fit, on the block's stream.
    ///
    /// # Errors
    ///
    /// The block, when values have no size, or when it belongs to another allocator than the handle's
    /// and that one can tell (those with a cache can).
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

    /// A buffer over memory of somebody else: `len` values at `address`, which stay valid as long as
    /// `keeps` lives. Dropping the buffer drops `keeps` and frees nothing.
    ///
    /// The address is a number, and the caller vouches for it, as whoever calls a
    /// [`Driver`](crate::driver::Driver) vouches for addresses and streams: all of the range is memory of
    /// the device, and no value of the program lies there. Nothing is checked here. The devices `sim` and
    /// `host` look at every access and refuse what they have not given out. CUDA does not: it has one
    /// address space for all memory of the process, so the address of pinned or managed memory of the host
    /// (of any memory of the host, where the device reaches pageable memory) is a legal one, and copies and
    /// fills of the buffer read and write what stands there. If a value of the program stands there, the
    /// program's behaviour is undefined. Any other wrong address makes the device's calls fail or touch
    /// other memory of the device.
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

    /// The handle that made it.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    extent!(self => self);

    /// The stream it belongs to.
    #[must_use]
    pub fn stream(&self) -> StreamId {
        self.stream
    }

    /// All values, to read.
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

    /// All values, to write.
    #[must_use]
    pub fn view_mut(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { view: self.view() }
    }

    /// Some values, to read.
    ///
    /// # Errors
    ///
    /// [`BufferError::OutOfRange`].
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<DeviceView<'_, T>, BufferError> {
        self.view().slice(range)
    }

    /// Some values, to write.
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

    /// The values, on the host. Waits for the stream.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the device fails.
    pub fn to_vec(&self) -> Result<Vec<T>, BufferError> {
        self.view().to_vec()
    }

    /// Announces that work on another stream uses the buffer. After its drop the block is used again
    /// only when the work submitted there before the drop has finished. Foreign memory is not ours to
    /// keep: nothing happens then.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the allocator knows no streams, or the block no more.
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

    /// Makes the buffer ready for use on another stream, which comes behind what was submitted to its
    /// own one, and keeps that stream alive as long as the memory: the free comes behind its work.
    ///
    /// # Errors
    ///
    /// [`BufferError`] when the allocator knows no streams, or the device refuses.
    #[cfg_attr(
        not(any(test, all(feature = "cudarc", target_pointer_width = "64", unix))),
        expect(dead_code, reason = "only buffers for cudarc are lent")
    )]
    pub(super) fn lend(
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

    /// Gives up the memory without freeing it. Streams of cudarc that the buffer was lent to are no
    /// longer kept alive.
    pub fn release(mut self) -> Released {
        std::mem::replace(&mut self.memory, Released::Nothing)
    }
}

impl<T> Drop for DeviceVec<T> {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.memory, Released::Nothing) {
            Released::Nothing => {}
            Released::Block(block) => {
                if self.handle.free(block).is_err() {
                    self.handle.lost_one();
                }
            }
            Released::Foreign(keeps) => {
                // Its owner frees it behind its own stream, and knows of no other.
                for Lent { stream, .. } in &self.lent {
                    if self.handle.order(*stream, self.stream).is_err() {
                        // The last resort; a device that is lost has no work left.
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
        let kind = match self.memory {
            Released::Nothing => "none",
            Released::Block(_) => "block",
            Released::Foreign(_) => "foreign",
        };
        f.debug_struct("DeviceVec")
            .field("address", &format_args!("{:#x}", self.address))
            .field("len", &self.len)
            .field("stream", &self.stream)
            .field("memory", &kind)
            .finish()
    }
}

impl fmt::Debug for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("Nothing"),
            Self::Block(block) => f.debug_tuple("Block").field(block).finish(),
            Self::Foreign(_) => f.write_str("Foreign"),
        }
    }
}
