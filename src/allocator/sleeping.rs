//! Memory that sleeps: private pools whose memory is released and later mapped again at the same addresses.
//!
//! A **tag** is a private pool with [`PoolOptions::tag`](super::PoolOptions::tag). Its memory always
//! comes from virtual memory, whatever the setting `expandable_segments` is. [`Sleeping::pause`] copies
//! the live blocks to host memory, unless the tag keeps no backup, and releases the physical
//! memory. The addresses stay reserved. [`Sleeping::resume`] maps new memory at these addresses and
//! copies the blocks back, so pointers and captured graphs stay valid.
//!
//! While a tag is not awake, its blocks can be freed. Requests in it fail or wait, see [`WhileAsleep`].
//! Checkpoints and sharing of its blocks are refused. Nothing may access the memory of the tag, and no
//! graph that uses it may be launched.

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::Freed;
use crate::error::{DriverError, Holder, PoolError};
use crate::ids::{PoolId, StreamId};
use crate::size::human_bytes;

/// What a pause does with the contents of live blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backup {
    /// Copies them to host memory, or to files in [`TagOptions::directory`].
    #[default]
    Host,
    /// Drops them. After the resume they are undefined.
    None,
}

/// What happens to requests in a tag that is not awake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhileAsleep {
    /// They fail with [`PoolError::Asleep`].
    #[default]
    Fail,
    /// They wait until another thread resumes the tag. A request fails all the same if its stream is
    /// being captured, if it comes from a tracker, or if the pool has no users any more.
    Wait,
}

/// Options of a tag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagOptions {
    /// The name, unique among the tags of an allocator that have users.
    pub name: String,
    /// What a pause does with contents, unless [`PauseOptions::backup`] states otherwise.
    pub backup: Backup,
    /// Whether the backup is pinned memory that is kept from one pause to the next. Copies are faster,
    /// but host memory stays in use while the tag is awake. Without it,
    /// threads copy through small pinned buffers into ordinary memory. A free releases the whole pages of its
    /// block, and the resume the rest.
    pub keep_backup: bool,
    /// The directory of files for backups. `None`: backups are in host memory. With a directory,
    /// `keep_backup` has no effect: the files are removed by the resume.
    pub directory: Option<PathBuf>,
    /// Whether a resume also maps the free memory that the tag's cache had at the pause, unless the device
    /// is short of memory. Without it, a pause releases whole free pages.
    pub keep_free: bool,
    /// What happens to requests while the tag is not awake.
    pub requests: WhileAsleep,
}

impl TagOptions {
    /// Returns the options of a tag with a backup in host memory.
    #[must_use]
    pub fn host(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Returns the options of a tag whose contents are dropped by a pause.
    #[must_use]
    pub fn dropped(name: impl Into<String>) -> Self {
        Self { name: name.into(), backup: Backup::None, ..Self::default() }
    }
}

/// Options of one pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PauseOptions {
    /// What happens to contents this time. `None`: as the tag's options state.
    pub backup: Option<Backup>,
    /// Further streams whose work uses the tag, to wait for.
    pub streams: Vec<StreamId>,
    /// Whether the caller has waited for all work that uses the tag. Then the pause waits for nothing.
    pub synchronized: bool,
}

/// The result of a pause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    /// Bytes copied to the backup: the sizes of all live blocks. If a graph or a checkpoint may
    /// refer to freed blocks, all mapped bytes.
    pub copied_bytes: u64,
    /// Number of copies. Adjacent blocks are copied together.
    pub copies: u64,
    /// Live blocks whose contents were dropped, in address order.
    pub dropped: Vec<Freed>,
    /// Bytes of memory that were unmapped, without free pages that were released before.
    pub unmapped_bytes: u64,
    /// Bytes that the driver failed to unmap. The tag sleeps, but this memory stays in use.
    pub still_held_bytes: u64,
    /// The driver's first error, if it failed to unmap or release some of the memory.
    pub error: Option<DriverError>,
}

/// The result of a resume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Bytes of memory that were mapped again.
    pub mapped_bytes: u64,
    /// Bytes copied back from the backup.
    pub copied_bytes: u64,
}

/// The state of a tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TagState {
    /// Its memory is mapped, and it serves requests.
    #[default]
    Awake,
    /// A thread is pausing it.
    Pausing,
    /// Its memory was released.
    Asleep,
    /// A thread is resuming it.
    Resuming,
}

/// Facts about a tag at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagInfo {
    /// Its name and its other options.
    pub options: TagOptions,
    /// Its state.
    pub state: TagState,
    /// Bytes of its live blocks.
    pub live_bytes: u64,
    /// Bytes of memory that it holds from the driver.
    pub mapped_bytes: u64,
    /// Bytes of its address space whose memory was released by a pause.
    pub asleep_bytes: u64,
    /// Bytes in the backup.
    pub backed_bytes: u64,
    /// Bytes of pinned memory that it keeps for backups.
    pub kept_backup_bytes: u64,
    /// Number of pauses that completed.
    pub pauses: u64,
    /// Number of resumes that completed.
    pub resumes: u64,
}

/// Private pools that can be paused and resumed.
pub trait Sleeping: Send + Sync {
    /// Saves the contents of a tag's live blocks (see [`Backup`](super::Backup)), releases its memory and
    /// keeps its addresses and blocks. Before that, unless [`PauseOptions::synchronized`] is set, waits for
    /// the work on the streams of the pool, on the streams that
    /// [use](super::CrossStream::record_stream) its live blocks, and on those in the options. Waits for the
    /// whole device instead if one of these is a per-thread default stream, or if a graph was captured in
    /// the pool or a checkpoint of it was taken. Work for which the call does not wait must not use the
    /// tag's memory until the resume. Waits while another thread pauses or resumes the tag. Does nothing if
    /// the tag is asleep already.
    ///
    /// # Errors
    ///
    /// [`SleepError`]. The tag is awake then, with all its contents. A failure of the driver to unmap or
    /// release memory is no error: see [`Paused::error`].
    fn pause(&self, pool: PoolId, options: &PauseOptions) -> Result<Paused, SleepError>;

    /// Maps memory at the addresses of a paused tag and copies its live blocks back. If memory is
    /// short, releases as much cached memory as is missing. Waits for the copies, and while another
    /// thread pauses or resumes the tag. Does nothing if it is awake already.
    ///
    /// # Errors
    ///
    /// [`SleepError`]. The tag is asleep then, and its backup is complete.
    fn resume(&self, pool: PoolId) -> Result<Resumed, SleepError>;

    /// Returns facts about a tag. Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`SleepError`] when the pool is unknown or no tag.
    fn tag_info(&self, pool: PoolId) -> Result<TagInfo, SleepError>;

    /// Sets [`TagOptions::directory`], which the next pause reads. A backup that exists stays where it is.
    /// Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`SleepError`] when the pool is unknown or no tag.
    fn set_directory(&self, pool: PoolId, directory: Option<&Path>) -> Result<(), SleepError>;

    /// Returns all tags that have users, by their pools' ids. Does not wait for the device.
    fn tags(&self) -> Vec<(PoolId, TagInfo)>;

    /// Reads bytes of a live block from the backup of a paused tag. `address` may lie inside the block.
    /// Does not wait for the device.
    ///
    /// # Errors
    ///
    /// [`SleepError::NoBackup`] when the bytes are not all in one block of a backup, and while the tag is
    /// being paused or resumed.
    fn read_backup(&self, address: u64, into: &mut [u8]) -> Result<(), SleepError>;
}

impl fmt::Debug for dyn Sleeping + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sleeping")
    }
}

/// The reason why a tag was not paused or not resumed.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SleepError {
    /// The pool was created without [`PoolOptions::tag`](super::PoolOptions::tag).
    #[error("pool {pool} is no tag: create it with the option `tag`")]
    NotATag {
        /// The pool.
        pool: PoolId,
    },
    /// A tag of this name exists with other options.
    #[error("tag {name:?} exists with other options")]
    OtherOptions {
        /// The name.
        name: String,
    },
    /// The allocator has no tags.
    #[error("this allocator has no memory that sleeps: use backend:native without align and guard")]
    NotSupported,
    /// A graph is being captured. Pausing or resuming now would break the capture.
    #[error("pool {pool} cannot be paused or resumed while a graph is captured")]
    Capturing {
        /// The pool.
        pool: PoolId,
    },
    /// The pause needs a wait for the whole device, which open scopes forbid: a graph, a per-thread
    /// stream or a stream that was destroyed may use the pool.
    #[error(
        "pool {pool} needs a wait for the device, which open scopes forbid: synchronize the device \
         first and state that in the options"
    )]
    NeedsSynchronization {
        /// The pool.
        pool: PoolId,
    },
    /// The calling thread runs a tracker, which may not wait.
    #[error("a tracker may not pause or resume pool {pool}")]
    InTracker {
        /// The pool.
        pool: PoolId,
    },
    /// Other processes may have the page open.
    #[error("the page at {address:#x} is shared with other processes")]
    Shared {
        /// The start of the page.
        address: u64,
    },
    /// The process has forked since the pool was created. The memory belongs to the parent.
    #[error("the memory of pool {pool} belongs to the parent process")]
    Forked {
        /// The pool.
        pool: PoolId,
    },
    /// The program has not enough memory for the backup.
    #[error(
        "no memory for a backup of {size_bytes} bytes{}",
        available_bytes.map(|bytes| format!(": {bytes} bytes are available")).unwrap_or_default()
    )]
    HostMemory {
        /// The bytes that were requested.
        size_bytes: u64,
        /// The host memory that is available, if less than that was found.
        available_bytes: Option<u64>,
        /// The driver's error, if pinned memory was requested.
        #[source]
        driver: Option<DriverError>,
    },
    /// A file of the backup could not be created, written or read.
    #[error(
        "a backup of {size_bytes} bytes in files in {directory:?}{}: {source}",
        available_bytes.map(|bytes| format!(", which has {bytes} free bytes")).unwrap_or_default()
    )]
    Disk {
        /// The directory of the files.
        directory: PathBuf,
        /// The bytes of the backup.
        size_bytes: u64,
        /// The free bytes of the file system, if it is full.
        available_bytes: Option<u64>,
        /// The failed call. Its code is the system's error number, or 0 if there is none.
        source: DriverError,
    },
    /// The device has not enough memory for a resume.
    #[error("{0}")]
    OutOfMemory(Box<MissingMemory>),
    /// The bytes are not in a backup.
    #[error("the bytes at {address:#x} are in no backup")]
    NoBackup {
        /// The address.
        address: u64,
    },
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The pool is unknown or has no users.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// The numbers of a resume that failed for lack of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MissingMemory {
    /// The name of the tag.
    pub tag: String,
    /// The bytes that the tag needs.
    pub needed_bytes: u64,
    /// The bytes that are missing.
    pub missing_bytes: u64,
    /// Free memory of the device, if the driver reports it.
    pub device_free_bytes: Option<u64>,
    /// The most bytes that this allocator may reserve, if it is limited.
    pub limit_bytes: Option<u64>,
    /// The bytes that this allocator holds from the driver.
    pub reserved_bytes: u64,
    /// The pools that hold most of them, largest first, at most 5, with their bytes.
    pub pools: Vec<(PoolId, u64)>,
    /// The processes that hold most of the device's memory, largest first, at most 5.
    pub holders: Vec<Holder>,
}

impl fmt::Display for MissingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let h = human_bytes;
        let (needed, missing) = (h(self.needed_bytes), h(self.missing_bytes));
        write!(f, "tag {:?} stays asleep: it needs {needed}, of which {missing} are", self.tag)?;
        write!(f, " missing; this allocator holds {}", h(self.reserved_bytes))?;
        if let Some(limit) = self.limit_bytes {
            write!(f, " of at most {}", h(limit))?;
        }
        if let Some(free) = self.device_free_bytes {
            write!(f, "; {} of the device are free", h(free))?;
        }
        for (pool, bytes) in &self.pools {
            write!(f, "; pool {pool} holds {}", h(*bytes))?;
        }
        for Holder { process, used_bytes } in &self.holders {
            write!(f, "; process {process} holds {}", h(*used_bytes))?;
        }
        Ok(())
    }
}
