//! Tags: pools that can be paused and resumed at the same addresses.

#![expect(unsafe_code, reason = "exported names and callers' pointers")]

use std::ffi::{c_char, c_void};
use std::path::Path;

use super::calls::stream_of;
use super::guard::{Failure, Status};
use super::pointers::{read, read_any, store};
use super::pools::Pool;
use super::table;
use stratalloc::allocator::{Backup, PauseOptions, PoolOptions, TagOptions, TagState, WhileAsleep};
use stratalloc::ids::PoolId;

/// A pause copies the contents of live blocks to host memory. Without it, contents are dropped.
pub const TAG_BACKUP: u32 = 1;
/// The backup is pinned memory that is kept from one pause to the next.
pub const TAG_KEEP_BACKUP: u32 = 2;
/// Requests in a tag that is not awake wait until another thread resumes it. Without it, they fail.
pub const TAG_WAIT: u32 = 4;
/// A resume also maps the free memory that the tag's cache had at the pause, unless the device is short
/// of memory.
pub const TAG_KEEP_FREE: u32 = 8;

/// This pause copies contents, whatever the tag's options are.
pub const PAUSE_BACKUP: u32 = 1;
/// This pause drops contents, whatever the tag's options are.
pub const PAUSE_DROP: u32 = 2;
/// The caller has waited for all work that uses the tag, so the pause waits for nothing.
pub const PAUSE_SYNCHRONIZED: u32 = 4;

/// The result of `stratalloc_tag_pause`, in bytes except for `copies` and `dropped_blocks`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Paused {
    /// Copied to host memory.
    pub copied_bytes: u64,
    /// Number of copies.
    pub copies: u64,
    /// Number of live blocks whose contents were dropped.
    pub dropped_blocks: u64,
    /// Sum of their requested sizes.
    pub dropped_bytes: u64,
    /// Memory that was unmapped.
    pub unmapped_bytes: u64,
    /// Memory that the driver failed to unmap. The tag sleeps, but this memory stays in use.
    pub still_held_bytes: u64,
}

/// The result of `stratalloc_tag_resume`, in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Memory that was mapped again.
    pub mapped_bytes: u64,
    /// Copied back from the backup.
    pub copied_bytes: u64,
}

/// Facts about a tag, in bytes except for the state and the counts.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagInfo {
    /// 0: awake, 1: being paused, 2: asleep, 3: being resumed.
    pub state: u32,
    /// A sum of `STRATALLOC_TAG_BACKUP`, `STRATALLOC_TAG_KEEP_BACKUP`, `STRATALLOC_TAG_WAIT` and
    /// `STRATALLOC_TAG_KEEP_FREE`.
    pub options: u32,
    /// Live blocks.
    pub live_bytes: u64,
    /// Memory held from the driver.
    pub mapped_bytes: u64,
    /// Address space whose memory a pause has released.
    pub asleep_bytes: u64,
    /// Blocks in the backup.
    pub backed_bytes: u64,
    /// Pinned memory that is kept for backups.
    pub kept_backup_bytes: u64,
    /// Number of pauses that completed.
    pub pauses: u64,
    /// Number of resumes that completed.
    pub resumes: u64,
}

fn options_of(name: &str, options: u32) -> Result<TagOptions, Failure> {
    if options & !(TAG_BACKUP | TAG_KEEP_BACKUP | TAG_WAIT | TAG_KEEP_FREE) != 0 {
        let text = format_args!("options {options:#x}: expected a sum of 1, 2, 4 and 8");
        return Err(Failure::invalid(text));
    }
    let has = |option| options & option != 0;
    Ok(TagOptions {
        name: name.to_owned(),
        backup: if has(TAG_BACKUP) { Backup::Host } else { Backup::None },
        keep_backup: has(TAG_KEEP_BACKUP),
        directory: None,
        keep_free: has(TAG_KEEP_FREE),
        requests: if has(TAG_WAIT) { WhileAsleep::Wait } else { WhileAsleep::Fail },
    })
}

fn number_of(options: &TagOptions) -> u32 {
    let bit = |is_set, bit| if is_set { bit } else { 0 };
    bit(options.backup == Backup::Host, TAG_BACKUP)
        | bit(options.keep_backup, TAG_KEEP_BACKUP)
        | bit(options.requests == WhileAsleep::Wait, TAG_WAIT)
        | bit(options.keep_free, TAG_KEEP_FREE)
}

/// Creates a tag with one user, the caller, and stores the id of its pool. All functions for pools take
/// this id. `options` is a sum of `STRATALLOC_TAG_BACKUP`, `STRATALLOC_TAG_KEEP_BACKUP`,
/// `STRATALLOC_TAG_WAIT` and `STRATALLOC_TAG_KEEP_FREE`, or 0. `stratalloc_pool_release` removes the user.
///
/// # Safety
///
/// `name` is text that ends with a zero; `pool` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_create(
    handle: u64,
    name: *const c_char,
    options: u32,
    pool: *mut Pool,
) -> Status {
    let work = || {
        // SAFETY: required of the caller (`# Safety`).
        let tag = options_of(unsafe { read(name, "name") }?, options)?;
        let id = PoolId::next_user();
        let options = PoolOptions { tag: Some(tag), ..PoolOptions::default() };
        table::find(handle)?.pools()?.create_pool(id, options)?;
        Ok(id.into())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pool, "pool", work) }
}

/// Makes a pool that has served no request a tag. Its other options are reset.
///
/// # Safety
///
/// `name` is text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_of_pool(
    handle: u64,
    pool: Pool,
    name: *const c_char,
    options: u32,
) -> Status {
    super::guard::status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let tag = options_of(unsafe { read(name, "name") }?, options)?;
        let options = PoolOptions { tag: Some(tag), ..PoolOptions::default() };
        Ok(table::find(handle)?.pools()?.set_pool_options(pool.into(), &options)?)
    })
}

/// Sets the directory of files in which the next pauses of a tag save contents, in place of host memory.
/// Null: host memory. The directory must exist at the pause, and the files are removed by the resume.
///
/// # Safety
///
/// `directory` is null or text that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_set_directory(
    handle: u64,
    pool: Pool,
    directory: *const c_char,
) -> Status {
    super::guard::status(|| {
        // SAFETY: required of the caller (`# Safety`).
        let directory = unsafe { read_any(directory, "directory") }?.map(Path::new);
        Ok(table::find(handle)?.sleeping()?.set_directory(pool.into(), directory)?)
    })
}

/// Stores the id of the pool of the tag with this name. Fails with `BAD_POOL` if there is none.
///
/// # Safety
///
/// `name` is text that ends with a zero; `pool` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_find(
    handle: u64,
    name: *const c_char,
    pool: *mut Pool,
) -> Status {
    let work = || {
        // SAFETY: required of the caller (`# Safety`).
        let name = unsafe { read(name, "name") }?;
        let tags = table::find(handle)?.sleeping()?.tags();
        let found = tags.into_iter().find(|(_, tag)| tag.options.name == name);
        let missing = || Failure::new(Status::BadPool, format_args!("no tag is named {name:?}"));
        Ok(found.ok_or_else(missing)?.0.into())
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(pool, "pool", work) }
}

/// Pauses a tag: waits for the work that uses it, saves or drops the contents of its live blocks, and
/// releases its memory. The addresses stay reserved. Waits for the streams of the pool, for those
/// recorded for its live blocks, and for `count` further ones. `options` is a sum of
/// `STRATALLOC_PAUSE_BACKUP` or `STRATALLOC_PAUSE_DROP` and `STRATALLOC_PAUSE_SYNCHRONIZED`, or 0. If
/// the call fails, the tag is awake with all its contents. Does nothing if the tag is asleep.
///
/// # Safety
///
/// `count` streams may be read from `streams`, unless `count` is 0; `paused` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_pause(
    handle: u64,
    pool: Pool,
    options: u32,
    streams: *const *mut c_void,
    count: usize,
    paused: *mut Paused,
) -> Status {
    let work = || {
        let backup = match options & !PAUSE_SYNCHRONIZED {
            0 => None,
            PAUSE_BACKUP => Some(Backup::Host),
            PAUSE_DROP => Some(Backup::None),
            _ => {
                let text = format_args!("options {options:#x}: expected 1 or 2, and 4, or 0");
                return Err(Failure::invalid(text));
            }
        };
        if streams.is_null() && count > 0 {
            return Err(Failure::null("streams"));
        }
        // SAFETY: not null, and `count` streams may be read (`# Safety`). Unaligned, because C guarantees
        // no alignment.
        let stream = |at| stream_of(unsafe { streams.wrapping_add(at).read_unaligned() });
        let options = PauseOptions {
            backup,
            streams: (0..count).map(stream).collect(),
            synchronized: options & PAUSE_SYNCHRONIZED != 0,
        };
        let done = table::find(handle)?.sleeping()?.pause(pool.into(), &options)?;
        Ok(Paused {
            copied_bytes: done.copied_bytes,
            copies: done.copies,
            dropped_blocks: done.dropped.len() as u64,
            dropped_bytes: done.dropped.iter().map(|block| block.size_bytes).sum(),
            unmapped_bytes: done.unmapped_bytes,
            still_held_bytes: done.still_held_bytes,
        })
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(paused, "paused", work) }
}

/// Resumes a tag: maps memory at its addresses and copies its live blocks back. If memory is short,
/// releases as much cached memory as is missing. If the call fails, the tag is asleep with its backup.
/// Does nothing if the tag is awake.
///
/// # Safety
///
/// `resumed` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_resume(
    handle: u64,
    pool: Pool,
    resumed: *mut Resumed,
) -> Status {
    let work = || {
        let done = table::find(handle)?.sleeping()?.resume(pool.into())?;
        Ok(Resumed { mapped_bytes: done.mapped_bytes, copied_bytes: done.copied_bytes })
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(resumed, "resumed", work) }
}

/// Stores facts about a tag. Does not wait for the device.
///
/// # Safety
///
/// `info` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_info(
    handle: u64,
    pool: Pool,
    info: *mut TagInfo,
) -> Status {
    let work = || {
        let now = table::find(handle)?.sleeping()?.tag_info(pool.into())?;
        Ok(TagInfo {
            state: match now.state {
                TagState::Awake => 0,
                TagState::Pausing => 1,
                TagState::Asleep => 2,
                TagState::Resuming => 3,
            },
            options: number_of(&now.options),
            live_bytes: now.live_bytes,
            mapped_bytes: now.mapped_bytes,
            asleep_bytes: now.asleep_bytes,
            backed_bytes: now.backed_bytes,
            kept_backup_bytes: now.kept_backup_bytes,
            pauses: now.pauses,
            resumes: now.resumes,
        })
    };
    // SAFETY: required of the caller (`# Safety`).
    unsafe { store(info, "info", work) }
}

/// Copies `size` bytes at `pointer`, inside one live block of a paused tag, from the backup.
///
/// # Safety
///
/// `size` bytes from `into` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stratalloc_tag_read_backup(
    handle: u64,
    pointer: *mut c_void,
    into: *mut c_void,
    size: usize,
) -> Status {
    super::guard::status(|| {
        if into.is_null() {
            return Err(Failure::null("into"));
        }
        if isize::try_from(size).is_err() {
            return Err(Failure::invalid("size is more than there can be"));
        }
        // SAFETY: not null, and not larger than a slice can be. The rest is required of the caller
        // (`# Safety`).
        let into = unsafe { std::slice::from_raw_parts_mut(into.cast::<u8>(), size) };
        Ok(table::find(handle)?.sleeping()?.read_backup(pointer.addr() as u64, into)?)
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::ptr::{null, null_mut};

    use super::*;
    use crate::*;

    fn create(conf: &str, device: &str) -> u64 {
        let [conf, device] = [conf, device].map(|text| CString::new(text).expect("no zero inside"));
        let mut handle = 0;
        // SAFETY: both texts end with a zero, and the handle's pointer is to a local variable.
        let made = unsafe { stratalloc_create(conf.as_ptr(), device.as_ptr(), &raw mut handle) };
        assert_eq!(made, Status::Ok);
        handle
    }

    fn allocate(handle: u64, bytes: u64) -> Result<*mut c_void, Status> {
        let mut pointer = null_mut();
        // SAFETY: the pointer is to a local variable.
        match unsafe { stratalloc_allocate(handle, bytes, null_mut(), &raw mut pointer) } {
            Status::Ok => Ok(pointer),
            other => Err(other),
        }
    }

    /// Creates a tag and returns its pool.
    fn tag(handle: u64, name: &str, options: u32) -> Result<Pool, Status> {
        let name = CString::new(name).expect("no zero inside");
        let mut pool = Pool::default();
        // SAFETY: the text ends with a zero, and the pointer is to a local variable.
        match unsafe { stratalloc_tag_create(handle, name.as_ptr(), options, &raw mut pool) } {
            Status::Ok => Ok(pool),
            other => Err(other),
        }
    }

    fn pause(handle: u64, pool: Pool, options: u32) -> Result<Paused, Status> {
        let mut paused = Paused::default();
        let streams = [null_mut::<c_void>()];
        // SAFETY: the pointers are to local variables.
        let done = unsafe {
            stratalloc_tag_pause(handle, pool, options, streams.as_ptr(), 1, &raw mut paused)
        };
        if done == Status::Ok { Ok(paused) } else { Err(done) }
    }

    fn resume(handle: u64, pool: Pool) -> Result<Resumed, Status> {
        let mut resumed = Resumed::default();
        // SAFETY: the pointer is to a local variable.
        match unsafe { stratalloc_tag_resume(handle, pool, &raw mut resumed) } {
            Status::Ok => Ok(resumed),
            other => Err(other),
        }
    }

    fn info(handle: u64, pool: Pool) -> TagInfo {
        let mut info = TagInfo::default();
        // SAFETY: the pointer is to a local variable.
        assert_eq!(unsafe { stratalloc_tag_info(handle, pool, &raw mut info) }, Status::Ok);
        info
    }

    fn read_backup(handle: u64, pointer: *mut c_void, into: &mut [u8]) -> Status {
        // SAFETY: the slice can be written.
        unsafe { stratalloc_tag_read_backup(handle, pointer, into.as_mut_ptr().cast(), into.len()) }
    }

    #[test]
    fn a_tag_sleeps_and_wakes_with_its_bytes() {
        for conf in ["", "expandable_segments:True"] {
            let handle = create(conf, "host");
            let pool = tag(handle, "weights", TAG_BACKUP | TAG_KEEP_BACKUP).unwrap();
            let mut found = Pool::default();
            // SAFETY: the text ends with a zero, and the pointer is to a local variable.
            let known = unsafe { stratalloc_tag_find(handle, c"weights".as_ptr(), &raw mut found) };
            assert_eq!((known, found), (Status::Ok, pool));
            assert_eq!(stratalloc_pool_scope_open_thread(handle, pool), Status::Ok);
            let block = allocate(handle, 1 << 20).unwrap();
            // SAFETY: the block is live host memory of this size.
            unsafe { block.cast::<u8>().write_bytes(7, 1 << 20) };
            let paused = pause(handle, pool, 0).unwrap();
            assert_eq!((paused.copied_bytes, paused.dropped_blocks), (1 << 20, 0));
            let asleep = info(handle, pool);
            assert_eq!((asleep.state, asleep.options, asleep.mapped_bytes), (2, 3, 0));
            assert_eq!((asleep.backed_bytes, asleep.kept_backup_bytes), (1 << 20, 1 << 20));
            assert_eq!(allocate(handle, 512), Err(Status::Asleep));
            let text = crate::guard::last_error();
            assert!(text.contains("is asleep: resume its tag first"), "{text}");
            let mut bytes = [0; 100];
            assert_eq!(read_backup(handle, block, &mut bytes), Status::Ok);
            assert_eq!(bytes, [7; 100]);
            assert_eq!(read_backup(handle, null_mut(), &mut bytes), Status::UnknownAddress);
            assert_eq!(resume(handle, pool).unwrap().copied_bytes, 1 << 20);
            // SAFETY: the block is live host memory of this size.
            let bytes = unsafe { std::slice::from_raw_parts(block.cast::<u8>(), 1 << 20) };
            assert!(bytes.iter().all(|byte| *byte == 7));
            let dropped = pause(handle, pool, PAUSE_DROP | PAUSE_SYNCHRONIZED).unwrap();
            assert_eq!((dropped.dropped_blocks, dropped.dropped_bytes), (1, 1 << 20));
            assert_eq!(stratalloc_free(handle, block), Status::Ok);
            assert_eq!(stratalloc_pool_scope_close(handle, pool), Status::Ok);
            assert_eq!(resume(handle, pool), Ok(Resumed::default()));
            let counts = info(handle, pool);
            assert_eq!((counts.pauses, counts.resumes), (2, 2));
            assert_eq!(stratalloc_destroy(handle), Status::Ok);
        }
    }

    #[test]
    fn a_directory_has_the_backup_until_the_resume() {
        let handle = create("", "host");
        let pool = tag(handle, "weights", TAG_BACKUP | TAG_KEEP_FREE).unwrap();
        let name = format!("stratalloc-ffi-{}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::create_dir(&directory).unwrap();
        let files = || std::fs::read_dir(&directory).unwrap().count();
        let text = CString::new(directory.to_str().unwrap()).unwrap();
        // SAFETY: the text ends with a zero.
        let set = unsafe { stratalloc_tag_set_directory(handle, pool, text.as_ptr()) };
        assert_eq!(set, Status::Ok);
        assert_eq!(stratalloc_pool_scope_open_thread(handle, pool), Status::Ok);
        let block = allocate(handle, 1 << 20).unwrap();
        // SAFETY: the block is live host memory of this size.
        unsafe { block.cast::<u8>().write_bytes(7, 1 << 20) };
        pause(handle, pool, 0).unwrap();
        assert_eq!((files(), info(handle, pool).options), (1, TAG_BACKUP | TAG_KEEP_FREE));
        assert_eq!(resume(handle, pool).unwrap().copied_bytes, 1 << 20);
        // SAFETY: the block is live host memory of this size.
        let bytes = unsafe { std::slice::from_raw_parts(block.cast::<u8>(), 1 << 20) };
        assert!(files() == 0 && bytes.iter().all(|byte| *byte == 7));
        std::fs::remove_dir(&directory).unwrap();
        assert_eq!(pause(handle, pool, 0), Err(Status::DriverFailed));
        let text = crate::guard::last_error();
        assert!(text.contains("a backup of 1048576 bytes in files in"), "{text}");
        // SAFETY: null is allowed.
        let unset = unsafe { stratalloc_tag_set_directory(handle, pool, null()) };
        assert_eq!(unset, Status::Ok);
        assert_eq!(pause(handle, pool, 0).unwrap().copied_bytes, 1 << 20);
        assert_eq!(stratalloc_pool_scope_close(handle, pool), Status::Ok);
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }

    #[test]
    fn wrong_arguments_and_other_pools_are_refused() {
        let handle = create("", "sim");
        assert_eq!(tag(handle, "weights", 16), Err(Status::InvalidArgument));
        let pool = tag(handle, "weights", TAG_WAIT).unwrap();
        assert_eq!(tag(handle, "weights", 0), Err(Status::NotSupported));
        assert_eq!(pause(handle, pool, PAUSE_BACKUP | PAUSE_DROP), Err(Status::InvalidArgument));
        let mut other = Pool::default();
        // SAFETY: the pointer is to a local variable.
        let made = unsafe { stratalloc_pool_create(handle, 0, &raw mut other) };
        assert_eq!(made, Status::Ok);
        assert_eq!(pause(handle, other, 0), Err(Status::BadPool));
        // SAFETY: the text ends with a zero.
        let late = unsafe { stratalloc_tag_of_pool(handle, other, c"late".as_ptr(), TAG_BACKUP) };
        assert_eq!(late, Status::Ok);
        assert!(pause(handle, other, 0).is_ok());
        // SAFETY: the text ends with a zero, and the pointer is to a local variable.
        let found = unsafe { stratalloc_tag_find(handle, c"none".as_ptr(), &raw mut other) };
        assert_eq!(found, Status::BadPool);
        let mut paused = Paused::default();
        // SAFETY: no stream can be read from null, which is refused.
        let none = unsafe { stratalloc_tag_pause(handle, pool, 0, null(), 1, &raw mut paused) };
        assert_eq!(none, Status::InvalidArgument);
        // SAFETY: a text that is null is refused, and the pointer is to a local variable.
        let unnamed = unsafe { stratalloc_tag_create(handle, null(), 0, &raw mut other) };
        assert_eq!(unnamed, Status::InvalidArgument);
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
        let handle = create("backend:cudaMallocAsync", "sim");
        assert_eq!(tag(handle, "weights", TAG_BACKUP), Err(Status::NotSupported));
        assert_eq!(resume(handle, pool), Err(Status::NotSupported));
        assert_eq!(stratalloc_destroy(handle), Status::Ok);
    }
}
