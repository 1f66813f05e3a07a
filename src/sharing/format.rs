//! The bytes of a shared handle, version 1: fixed layout, little-endian, no padding.
//!
//! ```text
//! at   bytes
//! 0    8      "stratshr"
//! 8    2      version
//! 10   1      kind: 1 a plain allocation, 2 pages, 3 pages of a fabric
//! 11   1      zero
//! 12   4      process id
//! 16   8      start time of the process, in clock ticks since boot; 0 unknown
//! 24   8      offset of the block in the shared memory
//! 32   8      size of the block
//!      a plain allocation:
//! 40   8      size of the allocation
//! 48   64     the driver's handle
//!      pages:
//! 40   16     the secret that a request for the pages must carry
//! 56   16     name of the socket where requests are answered
//! 72   8      size of a page
//! 80   4      number of pages
//! 84   4      zero
//! 88   32 n   for each page: identity 8, file's device 8, file's inode 8, zero 8
//!      pages of a fabric:
//! 40   8      size of a page
//! 48   4      number of pages
//! 52   4      zero
//! 56   64 n   the driver's handle of each page
//! end  8      checksum (FNV-1a) of everything before it
//! ```
//!
//! The checksum detects accidental changes, not forgery. A handle of pages contains the secret that gives
//! access to them, so the handle must be kept secret. For pages of a fabric, the rules of the fabric
//! decide which processes may open them.

use std::fmt;

use super::error::FormatError;
use super::process::ProcessMark;
use super::{PAGES_MAX, Random};

const MAGIC: [u8; 8] = *b"stratshr";
const VERSION: u16 = 1;
const KIND_FIXED: u8 = 1;
const KIND_PAGES: u8 = 2;
const KIND_FABRIC: u8 = 3;
const HEAD_BYTES: usize = 40;
const FIXED_BYTES: usize = HEAD_BYTES + 8 + 64;
const PAGES_HEAD_BYTES: usize = HEAD_BYTES + 48;
const ENTRY_BYTES: usize = 32;
const FABRIC_HEAD_BYTES: usize = HEAD_BYTES + 16;
const FABRIC_HANDLE_BYTES: usize = 64;
const CHECKSUM_BYTES: usize = 8;

/// A block of memory for another process, as bytes that can be sent over any channel.
///
/// Sharing a block twice gives equal bytes. Keep them secret: a process that has them can open the block
/// as long as the exporting process lives. If the block's pages are sent as file descriptors, that
/// process must belong to the same user.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct SharedHandle {
    bytes: Box<[u8]>,
    contents: Contents,
}

/// The decoded contents of a handle. The sizes of received contents have been checked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Contents {
    Fixed(FixedShare),
    Pages(PagesShare),
    Fabric(FabricShare),
}

/// The range of the block in the shared memory. It has at least one byte, and its end does not
/// overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Extent {
    pub(crate) offset_bytes: u64,
    pub(crate) size_bytes: u64,
}

/// A block in a plain allocation (a fixed segment).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FixedShare {
    pub(crate) owner: ProcessMark,
    pub(crate) extent: Extent,
    pub(crate) segment_bytes: u64,
    pub(crate) handle: [u8; 64],
}

/// A block in pages that are sent as file descriptors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PagesShare {
    pub(crate) owner: ProcessMark,
    pub(crate) extent: Extent,
    pub(crate) secret: Random,
    pub(crate) socket: Random,
    pub(crate) page_bytes: u64,
    pub(crate) pages: Box<[PageEntry]>,
}

/// A block of pages with fabric handles, which are valid on all machines of the fabric.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FabricShare {
    pub(crate) owner: ProcessMark,
    pub(crate) extent: Extent,
    pub(crate) page_bytes: u64,
    pub(crate) pages: Box<[[u8; FABRIC_HANDLE_BYTES]]>,
}

/// One page: its random identity, and the file behind its descriptor in the exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageEntry {
    pub(crate) identity: u64,
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl Extent {
    /// Checks that the block begins in the first page and ends in the last one.
    fn check_pages(self, page_bytes: u64, pages: usize) -> Result<(), FormatError> {
        let Self { offset_bytes, size_bytes } = self;
        let shared_bytes = page_bytes.checked_mul(pages as u64).unwrap_or(0);
        let end = offset_bytes.checked_add(size_bytes).filter(|end| *end <= shared_bytes);
        let last = shared_bytes.saturating_sub(page_bytes);
        let fits = offset_bytes < page_bytes && end.is_some_and(|end| end > last);
        if fits && size_bytes > 0 {
            return Ok(());
        }
        Err(FormatError::Extent { offset_bytes, size_bytes, shared_bytes })
    }
}

impl FixedShare {
    fn check(&self) -> Result<(), FormatError> {
        let Extent { offset_bytes, size_bytes } = self.extent;
        let end = offset_bytes.checked_add(size_bytes);
        if size_bytes > 0 && end.is_some_and(|end| end <= self.segment_bytes) {
            return Ok(());
        }
        let shared_bytes = self.segment_bytes;
        Err(FormatError::Extent { offset_bytes, size_bytes, shared_bytes })
    }
}

impl Contents {
    /// Returns the kind, the process that shared the block, and the range of the block.
    fn head(&self) -> (u8, ProcessMark, Extent) {
        match self {
            Self::Fixed(share) => (KIND_FIXED, share.owner, share.extent),
            Self::Pages(share) => (KIND_PAGES, share.owner, share.extent),
            Self::Fabric(share) => (KIND_FABRIC, share.owner, share.extent),
        }
    }

    /// Checks that the sizes are consistent.
    fn check(&self) -> Result<(), FormatError> {
        match self {
            Self::Fixed(share) => share.check(),
            Self::Pages(share) => share.extent.check_pages(share.page_bytes, share.pages.len()),
            Self::Fabric(share) => share.extent.check_pages(share.page_bytes, share.pages.len()),
        }
    }
}

impl SharedHandle {
    /// Returns the bytes to send.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Decodes the bytes that another process sent. The memory that this allocates is proportional to the
    /// length of `bytes`, whatever they contain.
    ///
    /// # Errors
    ///
    /// [`FormatError`] when the bytes are not a valid handle.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FormatError> {
        Ok(Self { contents: read(bytes)?, bytes: bytes.into() })
    }

    /// Returns the size of the block in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        let (_, _, extent) = self.contents.head();
        extent.size_bytes
    }

    /// Returns the id of the process that shared the block, in that process's own pid namespace.
    #[must_use]
    pub fn process(&self) -> u32 {
        let (_, owner, _) = self.contents.head();
        owner.process
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// Encodes contents that this process made. Checks their sizes, as `from_bytes` does.
    pub(crate) fn of(contents: Contents) -> Result<Self, FormatError> {
        let (kind, owner, extent) = contents.head();
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([kind, 0]);
        bytes.extend(owner.process.to_le_bytes());
        bytes.extend(owner.started.to_le_bytes());
        bytes.extend(extent.offset_bytes.to_le_bytes());
        bytes.extend(extent.size_bytes.to_le_bytes());
        match &contents {
            Contents::Fixed(share) => {
                bytes.extend(share.segment_bytes.to_le_bytes());
                bytes.extend(share.handle);
            }
            Contents::Pages(share) => {
                bytes.extend(share.secret);
                bytes.extend(share.socket);
                write_page_count(&mut bytes, share.page_bytes, share.pages.len())?;
                for page in &share.pages {
                    bytes.extend(page.identity.to_le_bytes());
                    bytes.extend(page.device.to_le_bytes());
                    bytes.extend(page.inode.to_le_bytes());
                    bytes.extend([0; 8]);
                }
            }
            Contents::Fabric(share) => {
                write_page_count(&mut bytes, share.page_bytes, share.pages.len())?;
                bytes.extend(share.pages.as_flattened());
            }
        }
        contents.check()?;
        bytes.extend(checksum(&bytes).to_le_bytes());
        Ok(Self { bytes: bytes.into(), contents })
    }
}

impl fmt::Debug for SharedHandle {
    /// Omits the bytes: they may contain a secret, and debug output may be written to logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedHandle")
            .field("process", &self.process())
            .field("size_bytes", &self.size_bytes())
            .finish_non_exhaustive()
    }
}

/// Writes the size of a page and the number of pages.
fn write_page_count(bytes: &mut Vec<u8>, page_bytes: u64, pages: usize) -> Result<(), FormatError> {
    bytes.extend(page_bytes.to_le_bytes());
    bytes.extend(check_count(pages as u64)?.to_le_bytes());
    bytes.extend([0; 4]);
    Ok(())
}

fn read(bytes: &[u8]) -> Result<Contents, FormatError> {
    let mut parts = Parts { all: bytes, at: 0 };
    if parts.array::<8>()? != MAGIC {
        return Err(FormatError::Magic);
    }
    // The version is checked before the rest, which another version may have changed.
    let version = u16::from_le_bytes(parts.array()?);
    if version != VERSION {
        return Err(FormatError::Version { version, known: VERSION });
    }
    let [kind] = parts.array()?;
    parts.zero::<1>()?;
    let owner = ProcessMark { process: parts.u32()?, started: parts.u64()? };
    let extent = Extent { offset_bytes: parts.u64()?, size_bytes: parts.u64()? };
    let contents = match kind {
        KIND_FIXED => {
            parts.check_len(FIXED_BYTES + CHECKSUM_BYTES)?;
            let segment_bytes = parts.u64()?;
            let share = FixedShare { owner, extent, segment_bytes, handle: parts.array()? };
            Contents::Fixed(share)
        }
        KIND_PAGES => {
            let (secret, socket) = (parts.array()?, parts.array()?);
            let (page_bytes, count) = parts.page_count()?;
            // The length is checked before allocating, so that the allocation is not larger than the
            // received bytes.
            parts.check_len(PAGES_HEAD_BYTES + count * ENTRY_BYTES + CHECKSUM_BYTES)?;
            let pages = (0..count).map(|_| parts.entry()).collect::<Result<_, _>>()?;
            Contents::Pages(PagesShare { owner, extent, secret, socket, page_bytes, pages })
        }
        KIND_FABRIC => {
            let (page_bytes, count) = parts.page_count()?;
            parts.check_len(FABRIC_HEAD_BYTES + count * FABRIC_HANDLE_BYTES + CHECKSUM_BYTES)?;
            let pages = (0..count).map(|_| parts.array()).collect::<Result<_, _>>()?;
            Contents::Fabric(FabricShare { owner, extent, page_bytes, pages })
        }
        kind => return Err(FormatError::Kind { kind }),
    };
    parts.check_sum()?;
    contents.check()?;
    Ok(contents)
}

fn check_count(pages: u64) -> Result<u32, FormatError> {
    let count = u32::try_from(pages).ok();
    let legal = count.filter(|count| (1..=PAGES_MAX as u64).contains(&u64::from(*count)));
    legal.ok_or(FormatError::PageCount { pages, most: PAGES_MAX as u64 })
}

/// Reads fields of a handle from bytes, in order.
struct Parts<'b> {
    all: &'b [u8],
    at: usize,
}

impl Parts<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let end = self.at + N;
        let short = FormatError::Length { len: self.all.len(), expected: end as u64 };
        let part = self.all.get(self.at..end).and_then(|part| part.try_into().ok());
        let part = part.ok_or(short)?;
        self.at = end;
        Ok(part)
    }

    fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    fn zero<const N: usize>(&mut self) -> Result<(), FormatError> {
        let at = self.at;
        let part: [u8; N] = self.array()?;
        let wrong = part.iter().position(|byte| *byte != 0);
        wrong.map_or(Ok(()), |offset| Err(FormatError::Reserved { at: at + offset }))
    }

    /// Reads the size of a page and the number of pages.
    fn page_count(&mut self) -> Result<(u64, usize), FormatError> {
        let page_bytes = self.u64()?;
        let count = check_count(u64::from(self.u32()?))?;
        self.zero::<4>()?;
        Ok((page_bytes, count as usize))
    }

    fn entry(&mut self) -> Result<PageEntry, FormatError> {
        let (identity, device, inode) = (self.u64()?, self.u64()?, self.u64()?);
        self.zero::<8>()?;
        Ok(PageEntry { identity, device, inode })
    }

    fn check_len(&self, expected: usize) -> Result<(), FormatError> {
        if self.all.len() == expected {
            return Ok(());
        }
        Err(FormatError::Length { len: self.all.len(), expected: expected as u64 })
    }

    fn check_sum(&mut self) -> Result<(), FormatError> {
        let sum = checksum(&self.all[..self.at]);
        if self.u64()? == sum { Ok(()) } else { Err(FormatError::Checksum) }
    }
}

/// The hash function FNV-1a (Fowler, Noll and Vo) with 64 bits.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
