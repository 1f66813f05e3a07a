//! Tags of a handle: memory that sleeps.

use super::Handle;
use crate::allocator::{
    DeviceAllocator, PauseOptions, Paused, PoolOptions, PoolScope, PrivatePools, Resumed,
    ScopeFilter, SleepError, Sleeping, TagInfo, TagOptions, TagState,
};
use crate::error::PoolError;
use crate::ids::PoolId;

/// Memory of a handle that can be paused and resumed at the same addresses: see
/// [`allocator::Sleeping`](Sleeping).
///
/// Dropping it removes its user of the pool, as with a [`MemoryPool`](crate::allocator::MemoryPool). The
/// blocks of a tag that sleeps can still be freed then, but it cannot be resumed.
///
/// ```
/// use std::sync::Arc;
/// use stratalloc::allocator::{TagOptions, TagState};
/// use stratalloc::{Handle, StreamId};
/// use stratalloc_sim::Sim;
///
/// let handle = stratalloc::build("backend:native", Arc::new(Sim::default()))?;
/// let weights = handle.tag(TagOptions::host("weights"))?;
/// let scope = weights.enter()?;
/// let buffer = handle.zeroed::<f32>(1 << 20, StreamId::DEFAULT)?;
/// drop(scope);
///
/// let paused = weights.pause()?;
/// assert_eq!(paused.copied_bytes, 4 << 20);
/// assert_eq!(weights.info()?.mapped_bytes, 0);
/// weights.resume()?;
/// assert_eq!(weights.info()?.state, TagState::Awake);
/// # drop(buffer);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping it removes the user of the tag"]
#[derive(Debug)]
pub struct Tag {
    handle: Handle,
    pool: PoolId,
}

impl Handle {
    /// Returns the tag with the name in the options, and creates it if there is none. Several values may
    /// refer to one tag.
    ///
    /// # Errors
    ///
    /// [`SleepError::NotSupported`] when the current strategy has no tags. [`SleepError::OtherOptions`] when
    /// the tag exists with other options; options without a directory accept any, because it may have been
    /// set since. [`SleepError::Pool`] when the device has no virtual memory.
    pub fn tag(&self, options: TagOptions) -> Result<Tag, SleepError> {
        if let Some(tag) = self.known_tag(&options)? {
            return Ok(tag);
        }
        let pool = PoolId::next_user();
        let tag = Some(options.clone());
        match self.switchable().create_pool(pool, PoolOptions { tag, ..PoolOptions::default() }) {
            Ok(()) => Ok(Tag { handle: self.clone(), pool }),
            // Another thread may have created the tag since.
            Err(error) => self.known_tag(&options)?.ok_or_else(|| error.into()),
        }
    }

    /// Returns the tag with the name in the options, if there is one, with one more user.
    fn known_tag(&self, options: &TagOptions) -> Result<Option<Tag>, SleepError> {
        let sleeping = self.control().sleeping.ok_or(SleepError::NotSupported)?;
        let mut tags = sleeping.tags().into_iter();
        let Some((pool, tag)) = tags.find(|(_, tag)| tag.options.name == options.name) else {
            return Ok(None);
        };
        let directory = options.directory.clone().or_else(|| tag.options.directory.clone());
        if tag.options != (TagOptions { directory, ..options.clone() }) {
            return Err(SleepError::OtherOptions { name: tag.options.name });
        }
        self.switchable().retain_pool(pool)?;
        Ok(Some(Tag { handle: self.clone(), pool }))
    }

    /// Returns facts about all tags.
    #[must_use]
    pub fn tags(&self) -> Vec<(PoolId, TagInfo)> {
        self.control().sleeping.map(Sleeping::tags).unwrap_or_default()
    }
}

impl Tag {
    /// Returns the id of the tag's pool, for [`Request::in_pool`](crate::allocator::Request::in_pool).
    #[must_use]
    pub fn pool(&self) -> PoolId {
        self.pool
    }

    /// Routes the calling thread's requests to this tag until the guard is dropped. Scopes may nest.
    ///
    /// # Errors
    ///
    /// [`PoolError`] when the pool has no users any more.
    pub fn enter(&self) -> Result<PoolScope<'_>, PoolError> {
        PoolScope::open(self.handle.switchable(), self.pool, ScopeFilter::this_thread())
    }

    /// Pauses the tag with default options. Waits as [`Sleeping::pause`] does.
    ///
    /// # Errors
    ///
    /// [`SleepError`]; the tag is awake then.
    pub fn pause(&self) -> Result<Paused, SleepError> {
        self.pause_with(&PauseOptions::default())
    }

    /// Pauses the tag: see [`Sleeping::pause`].
    ///
    /// # Errors
    ///
    /// [`SleepError`]; the tag is awake then.
    pub fn pause_with(&self, options: &PauseOptions) -> Result<Paused, SleepError> {
        self.handle.switchable().pause(self.pool, options)
    }

    /// Resumes the tag: see [`Sleeping::resume`].
    ///
    /// # Errors
    ///
    /// [`SleepError`]; the tag is asleep then.
    pub fn resume(&self) -> Result<Resumed, SleepError> {
        self.handle.switchable().resume(self.pool)
    }

    /// Returns facts about the tag. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`SleepError`] when all users of the pool were released.
    pub fn info(&self) -> Result<TagInfo, SleepError> {
        self.handle.switchable().tag_info(self.pool)
    }

    /// Returns the state of the tag. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// As [`info`](Self::info).
    pub fn state(&self) -> Result<TagState, SleepError> {
        self.info().map(|info| info.state)
    }

    /// Returns the bytes of its live blocks. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// As [`info`](Self::info).
    pub fn live_bytes(&self) -> Result<u64, SleepError> {
        self.info().map(|info| info.live_bytes)
    }

    /// Returns the bytes of its blocks in the backup. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// As [`info`](Self::info).
    pub fn backed_bytes(&self) -> Result<u64, SleepError> {
        self.info().map(|info| info.backed_bytes)
    }
}

impl Drop for Tag {
    fn drop(&mut self) {
        let pools = self.handle.switchable();
        // If the driver fails, the memory stays cached. It is released later.
        let _ = pools.release_pool(self.pool).and_then(|()| pools.empty_pool(self.pool));
    }
}
