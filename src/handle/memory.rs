//! The memory of a buffer: its owner, its stream, and the streams that use it besides.
//!
//! A block is freed on its own stream. Work of other streams must be announced to its allocator before, or
//! the block's stream must wait for that work. Foreign memory is freed by its owner, on the buffer's stream.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::dlpack::ManagedTensor;
use super::{BufferError, Handle};
use crate::allocator::{Allocation, DeviceAllocator, MemoryKind};
use crate::error::HandleError;
use crate::ids::StreamId;

/// The memory of a buffer. Dropping it frees the block, or drops the owner of foreign memory.
pub(super) struct BufferMemory {
    pub(super) handle: Handle,
    memory: Released,
    pub(super) stream: StreamId,
    /// The streams that the buffer was lent to. Dropped after the memory, because freeing it uses them.
    lent: Vec<Lent>,
}

/// A stream that a buffer was lent to.
struct Lent {
    stream: StreamId,
    /// Keeps the stream alive, because freeing the memory uses it.
    _alive: Arc<dyn Any + Send + Sync>,
}

/// The memory of a buffer, as returned by [`DeviceVec::release`](super::DeviceVec::release).
#[must_use = "dropping it leaks the block until the allocator is dropped, or frees foreign memory"]
pub enum Released {
    /// The buffer had no memory.
    Nothing,
    /// A block, which the allocator of the buffer's handle must free.
    Block(Allocation),
    /// The owner of foreign memory.
    Foreign(Box<dyn Any + Send + Sync>),
}

impl BufferMemory {
    pub(super) fn new(handle: Handle, memory: Released, stream: StreamId) -> Self {
        Self { handle, memory, stream, lent: Vec::new() }
    }

    pub(super) fn kind(&self) -> &Released {
        &self.memory
    }

    /// Returns the kind of the memory, as the allocator of the block reports it. For foreign memory,
    /// returns that of the handle's allocator.
    pub(super) fn memory_kind(&self) -> MemoryKind {
        match &self.memory {
            Released::Block(block) => self.handle.switchable().memory_of(block),
            Released::Nothing | Released::Foreign(_) => self.handle.control().memory,
        }
    }

    /// Returns the tensor that owns the memory, if one does.
    pub(super) fn tensor(&self) -> Option<&ManagedTensor> {
        match &self.memory {
            Released::Foreign(keeps) => keeps.downcast_ref(),
            Released::Nothing | Released::Block(_) => None,
        }
    }

    /// Announces that work on another stream uses a block. Does nothing for foreign memory.
    pub(super) fn record_stream(&self, stream: StreamId) -> Result<(), BufferError> {
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

    /// Makes the free of the memory wait for the work of `stream` until then, if the owner supports that.
    /// Otherwise returns false: the memory's own stream must then wait for that work.
    pub(super) fn waits_for(&self, stream: StreamId) -> Result<bool, BufferError> {
        match (&self.memory, self.tensor()) {
            _ if stream == self.stream => Ok(true),
            (_, Some(tensor)) => tensor.waits_for(stream),
            (Released::Foreign(_), None) => Ok(false),
            (Released::Nothing | Released::Block(_), None) => match self.record_stream(stream) {
                Ok(()) => Ok(true),
                // The allocator of the block, which a switch may have replaced, has no such capability.
                Err(
                    BufferError::NoStreams { .. }
                    | BufferError::Handle(HandleError::UnknownAddress { .. }),
                ) => Ok(false),
                Err(error) => Err(error),
            },
        }
    }

    /// See [`DeviceVec::lend`](super::DeviceVec::lend).
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

    /// Returns the memory without freeing it. Its owner may free it at once.
    pub(super) fn release(mut self) -> Released {
        // A block whose streams cannot be announced is not live, and its free fails.
        let _ = self.announce_streams();
        std::mem::replace(&mut self.memory, Released::Nothing)
    }

    /// Makes a free of the memory wait for the streams that use it, as far as its owner does not do that
    /// by itself.
    fn announce_streams(&self) -> Result<(), HandleError> {
        match &self.memory {
            Released::Nothing => Ok(()),
            Released::Block(block) => {
                self.handle.switchable().record_own_stream(block, self.stream)
            }
            Released::Foreign(_) => {
                // The owner frees the memory on this buffer's stream and does not wait for others.
                for Lent { stream, .. } in &self.lent {
                    self.handle.wait_on_stream(*stream, self.stream);
                }
                Ok(())
            }
        }
    }
}

impl Drop for BufferMemory {
    fn drop(&mut self) {
        // If the announcement fails, the work on the stream may still use the block, so it stays allocated.
        let announced = self.announce_streams();
        if let Released::Block(block) = std::mem::replace(&mut self.memory, Released::Nothing)
            && (announced.is_err() || self.handle.free(block).is_err())
        {
            self.handle.lost_one();
        }
    }
}

impl fmt::Debug for BufferMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferMemory")
            .field("memory", &self.memory)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
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
