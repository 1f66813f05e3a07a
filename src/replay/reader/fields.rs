//! What the entries of a snapshot must say: events, blocks and segments, field by field.
//!
//! Both syntaxes hand their fields here, so a pickle and a JSON file with the same content give
//! the same trace and the same complaints. Older and newer dialects differ in fields that may be
//! absent; each default is named where it is taken.

use super::error::Mismatch;
use super::parts::{Beside, Parts};
use super::words::Word;
use crate::config::TorchVersion;
use crate::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use crate::ids::{PoolId, StreamId};
use crate::replay::{MadeHere, StackId, TraceEvent};
use crate::size::{PoolKind, SMALL_SEGMENT_BYTES};

/// A value without structure, or a pair of numbers: all that fields hold.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Scalar {
    None,
    Bool(bool),
    Int(i128),
    Word(Word),
    Text(String),
    Pair(u64, u64),
    /// Anything else, in words.
    Other(&'static str),
}

/// How much of an unknown text an error repeats.
pub(super) const SHOWN_CHARS: usize = 80;

impl Scalar {
    fn describe(&self) -> String {
        match self {
            Self::None => "nothing (None)".to_owned(),
            Self::Bool(b) => b.to_string(),
            Self::Int(i) => i.to_string(),
            Self::Word(word) => format!("{:?}", word.text()),
            Self::Text(text) => {
                let shown: String = text.chars().take(SHOWN_CHARS).collect();
                format!("{shown:?}")
            }
            Self::Pair(a, b) => format!("({a}, {b})"),
            Self::Other(what) => (*what).to_owned(),
        }
    }

    pub(super) fn mismatch(&self, expected: &'static str) -> Mismatch {
        Mismatch::new(expected, self.describe())
    }

    fn number(&self) -> Result<u64, Mismatch> {
        match self {
            Self::Int(i) => u64::try_from(*i).ok(),
            _ => None,
        }
        .ok_or_else(|| self.mismatch("a whole number from 0 to 2^64 - 1"))
    }

    /// A stream; None is the default one.
    fn stream(&self) -> Result<StreamId, Mismatch> {
        match self {
            Self::None => Ok(StreamId::DEFAULT),
            other => other.number().map(StreamId),
        }
    }

    fn pool(&self) -> Result<Option<PoolId>, Mismatch> {
        match *self {
            Self::None => Ok(None),
            Self::Pair(capture, user) => Ok(Some(PoolId { capture, user })),
            _ => Err(self.mismatch("a pair of whole numbers")),
        }
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word.text()),
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The configuration string; None is the empty one.
    pub(super) fn into_conf(self) -> Result<String, Mismatch> {
        match self {
            Self::None => Ok(String::new()),
            Self::Word(word) => Ok(word.text().to_owned()),
            Self::Text(text) => Ok(text),
            other => Err(other.mismatch("a configuration string or None")),
        }
    }
}

/// The settings of the allocator.
#[derive(Default)]
pub(super) struct SettingsFields {
    conf: String,
    is_ours: bool,
    limit_bytes: Option<u64>,
    total_bytes: Option<u64>,
    torch: Option<TorchVersion>,
}

impl SettingsFields {
    /// The keys that are read.
    pub(super) const KEYS: [Word; 5] =
        [Word::Conf, Word::Stratalloc, Word::LimitBytes, Word::TotalBytes, Word::MaxRoundThreshold];

    /// Takes one field of [`KEYS`](Self::KEYS).
    pub(super) fn set(&mut self, key: Word, value: Scalar) -> Result<(), Mismatch> {
        match key {
            Word::Conf => self.conf = value.into_conf()?,
            Word::Stratalloc => self.is_ours = true,
            Word::MaxRoundThreshold => self.torch = Some(TorchVersion::V2_13),
            Word::LimitBytes if value == Scalar::None => {}
            Word::LimitBytes => self.limit_bytes = Some(value.number()?),
            Word::TotalBytes => self.total_bytes = Some(value.number()?).filter(|bytes| *bytes > 0),
            _ => {}
        }
        Ok(())
    }

    /// Adds the settings to the other parts of the snapshot.
    pub(super) fn finish(self, parts: &mut Parts) {
        let Self { conf, is_ours, limit_bytes, total_bytes, torch } = self;
        parts.conf = conf;
        parts.made_here = is_ours.then_some(MadeHere { limit_bytes, total_bytes });
        parts.torch = parts.torch.max(torch);
    }
}

/// The fields of one kind of entry, collected one by one.
pub(super) trait Fields: Default {
    /// What the finished entry is.
    type Entry;
    /// The entry in words.
    const WHAT: &'static str;
    /// Whether a list of blocks belongs to it.
    const HAS_BLOCKS: bool = false;
    /// Whether a stack belongs to it.
    const HAS_STACK: bool = false;

    /// Whether the field is read at all.
    fn wants(key: Word) -> bool;

    /// Takes one field that is wanted.
    fn set(&mut self, key: Word, value: &Scalar) -> Result<(), Mismatch>;

    /// Takes the blocks, where they belong.
    fn set_blocks(&mut self, _blocks: Vec<BlockLayout>) {}

    /// Takes the stack, where it belongs.
    fn set_stack(&mut self, _stack: Option<StackId>) {}

    /// Returns the entry, or `None` for one without a meaning for memory, of which `beside` takes note.
    fn finish(self, beside: &mut Beside) -> Result<Option<Self::Entry>, Mismatch>;
}

fn needed<T>(field: Option<T>, expected: &'static str) -> Result<T, Mismatch> {
    field.ok_or_else(|| Mismatch::new(expected, "no such key"))
}

/// Fields of a trace entry.
#[derive(Default)]
pub(super) struct EventFields {
    action: Option<Kind>,
    address: Option<u64>,
    device_free: Option<u64>,
    size: Option<u64>,
    stream: Option<StreamId>,
    pool: Option<PoolId>,
    empty_cache: bool,
    /// The user's metadata.
    text: Option<String>,
    stack: Option<StackId>,
    time_us: u64,
}

enum Kind {
    Memory(Action),
    /// `annotate`: a text that belongs to a block.
    Annotate,
    /// `snapshot` and `user_defined`: a remark.
    Remark,
    /// An action of a newer version.
    Unknown(String),
}

impl Fields for EventFields {
    type Entry = TraceEvent;
    const WHAT: &'static str = "a trace entry (a dictionary)";
    const HAS_STACK: bool = true;

    fn wants(key: Word) -> bool {
        use Word::{
            Action, Addr, DeviceFree, PoolId, SegmentPoolId, Size, Stream, TimeUs, UserMetadata,
        };
        matches!(
            key,
            Action
                | Addr
                | DeviceFree
                | Size
                | Stream
                | PoolId
                | SegmentPoolId
                | UserMetadata
                | TimeUs
        )
    }

    fn set(&mut self, key: Word, value: &Scalar) -> Result<(), Mismatch> {
        match key {
            Word::Action => {
                let name = value.text().ok_or_else(|| value.mismatch("the name of an action"))?;
                self.action = Some(match (value, Action::from_name(name)) {
                    (_, Some(Action::Snapshot)) | (Scalar::Word(Word::UserDefined), None) => {
                        Kind::Remark
                    }
                    (_, Some(action)) => Kind::Memory(action),
                    (Scalar::Word(Word::Annotate), None) => Kind::Annotate,
                    (_, None) => Kind::Unknown(name.to_owned()),
                });
            }
            Word::Addr => self.address = Some(value.number()?),
            Word::DeviceFree => self.device_free = Some(value.number()?),
            Word::Size => self.size = Some(value.number()?),
            Word::Stream => self.stream = Some(value.stream()?),
            Word::PoolId | Word::SegmentPoolId => self.pool = value.pool()?,
            Word::UserMetadata => {
                self.empty_cache = matches!(value, Scalar::Word(Word::EmptyCache));
                self.text = value.text().filter(|text| !text.is_empty()).map(str::to_owned);
            }
            // Nothing that is replayed depends on it.
            Word::TimeUs => self.time_us = value.number().unwrap_or(0),
            _ => {}
        }
        Ok(())
    }

    fn set_stack(&mut self, stack: Option<StackId>) {
        self.stack = stack;
    }

    fn finish(self, beside: &mut Beside) -> Result<Option<TraceEvent>, Mismatch> {
        let action = match needed(self.action, "the key action")? {
            Kind::Memory(action) => action,
            Kind::Remark => return Ok(None),
            Kind::Annotate => {
                let address = needed(self.address, "the key addr")?;
                beside.annotate(address, self.size.unwrap_or(0), self.text.unwrap_or_default());
                return Ok(None);
            }
            Kind::Unknown(action) => {
                beside.unknown.count(action);
                return Ok(None);
            }
        };
        beside.events = beside.events.saturating_add(1);
        let size_bytes = needed(self.size, "the key size")?;
        let address = if action == Action::OutOfMemory {
            needed(self.device_free.or(self.address), "the key device_free or addr")?
        } else {
            let address = needed(self.address, "the key addr")?;
            if address.checked_add(size_bytes).is_none() {
                return Err(Mismatch::new(
                    "memory that ends below 2^64",
                    format!("{size_bytes} bytes at {address}"),
                ));
            }
            address
        };
        Ok(Some(TraceEvent {
            action,
            address,
            size_bytes,
            stream: needed(self.stream, "the key stream")?,
            pool: self.pool.unwrap_or_default(),
            says_pool: self.pool.is_some(),
            empty_cache: self.empty_cache,
            stack: self.stack,
            time_us: self.time_us,
        }))
    }
}

/// Stands for the address of a block in old files, which do not say it, until the segment's blocks
/// are laid one after the other. No block starts here.
const ADDRESS_ABSENT: u64 = u64::MAX;

/// Fields of a block.
#[derive(Default)]
pub(super) struct BlockFields {
    address: Option<u64>,
    size: Option<u64>,
    requested: Option<u64>,
    state: Option<BlockStateName>,
}

impl Fields for BlockFields {
    type Entry = BlockLayout;
    const WHAT: &'static str = "a block (a dictionary)";

    fn wants(key: Word) -> bool {
        use Word::{Address, RequestedSize, Size, State};
        matches!(key, Address | Size | RequestedSize | State)
    }

    fn set(&mut self, key: Word, value: &Scalar) -> Result<(), Mismatch> {
        match key {
            Word::Address => self.address = Some(value.number()?),
            Word::Size => self.size = Some(value.number()?),
            Word::RequestedSize => self.requested = Some(value.number()?),
            Word::State => {
                let state = value.text().and_then(BlockStateName::from_name);
                self.state = Some(state.ok_or_else(|| {
                    value.mismatch("active_allocated, active_pending_free or inactive")
                })?);
            }
            _ => {}
        }
        Ok(())
    }

    fn finish(self, _: &mut Beside) -> Result<Option<BlockLayout>, Mismatch> {
        let size_bytes = needed(self.size, "the key size")?;
        let state = needed(self.state, "the key state")?;
        // Files from before requested_size: a live block is as large as was asked, as far as they
        // tell; a free one was not asked for.
        let unsaid = match state {
            BlockStateName::Inactive => 0,
            _ => size_bytes,
        };
        Ok(Some(BlockLayout {
            address: self.address.unwrap_or(ADDRESS_ABSENT),
            size_bytes,
            requested_bytes: self.requested.unwrap_or(unsaid),
            state,
        }))
    }
}

/// A segment, and the device that holds it where the file says so.
pub(super) struct ListedSegment {
    pub(super) device: Option<u32>,
    pub(super) layout: SegmentLayout,
}

/// Fields of a segment.
#[derive(Default)]
pub(super) struct SegmentFields {
    device: Option<u32>,
    address: Option<u64>,
    size: Option<u64>,
    stream: Option<StreamId>,
    kind: Option<PoolKind>,
    pool: Option<PoolId>,
    expandable: bool,
    blocks: Option<Vec<BlockLayout>>,
}

impl Fields for SegmentFields {
    type Entry = ListedSegment;
    const WHAT: &'static str = "a segment (a dictionary)";
    const HAS_BLOCKS: bool = true;

    fn wants(key: Word) -> bool {
        use Word::{Address, Device, IsExpandable, SegmentPoolId, SegmentType, Stream, TotalSize};
        matches!(
            key,
            Device | Address | TotalSize | Stream | SegmentType | SegmentPoolId | IsExpandable
        )
    }

    fn set(&mut self, key: Word, value: &Scalar) -> Result<(), Mismatch> {
        match key {
            Word::Device => {
                // The host is -1.
                self.device = match value {
                    Scalar::Int(-1) => None,
                    value => Some(
                        u32::try_from(value.number()?)
                            .map_err(|_| value.mismatch("the number of a device"))?,
                    ),
                };
            }
            Word::Address => self.address = Some(value.number()?),
            Word::TotalSize => self.size = Some(value.number()?),
            Word::Stream => self.stream = Some(value.stream()?),
            Word::SegmentType => {
                self.kind = Some(match value {
                    Scalar::Word(Word::Small) => PoolKind::Small,
                    Scalar::Word(Word::Large) => PoolKind::Large,
                    _ => return Err(value.mismatch("small or large")),
                });
            }
            Word::SegmentPoolId => self.pool = value.pool()?,
            Word::IsExpandable => {
                self.expandable = match value {
                    Scalar::Bool(b) => *b,
                    _ => return Err(value.mismatch("true or false")),
                };
            }
            _ => {}
        }
        Ok(())
    }

    fn set_blocks(&mut self, blocks: Vec<BlockLayout>) {
        self.blocks = Some(blocks);
    }

    fn finish(self, _: &mut Beside) -> Result<Option<ListedSegment>, Mismatch> {
        let address = needed(self.address, "the key address")?;
        let size_bytes = needed(self.size, "the key total_size")?;
        let mut blocks = needed(self.blocks, "the key blocks")?;
        lay_blocks(address, size_bytes, &mut blocks)?;
        // The smallest files leave the kind out; small segments have one size of their own.
        let unsaid =
            if size_bytes <= SMALL_SEGMENT_BYTES { PoolKind::Small } else { PoolKind::Large };
        Ok(Some(ListedSegment {
            device: self.device,
            layout: SegmentLayout {
                address,
                size_bytes,
                stream: needed(self.stream, "the key stream")?,
                kind: self.kind.unwrap_or(unsaid),
                pool: self.pool.unwrap_or(PoolId::DEFAULT),
                expandable: self.expandable,
                blocks,
            },
        }))
    }
}

/// Checks that the blocks tile the segment, and says where each of them is if the file does not.
fn lay_blocks(start: u64, size_bytes: u64, blocks: &mut [BlockLayout]) -> Result<(), Mismatch> {
    let too_far = |size: u64| {
        let found = format!("{size} bytes at {start}");
        Mismatch::new("memory that ends below 2^64", found)
    };
    start.checked_add(size_bytes).ok_or_else(|| too_far(size_bytes))?;
    let mut sum_bytes = 0_u64;
    for (i, block) in blocks.iter_mut().enumerate() {
        let address = start.checked_add(sum_bytes).ok_or_else(|| too_far(sum_bytes))?;
        if block.address == ADDRESS_ABSENT {
            block.address = address;
        } else if block.address != address {
            return Err(Mismatch::new(
                "blocks that tile the segment",
                format!("blocks[{i}] at {}, where the one before ends at {address}", block.address),
            ));
        }
        sum_bytes = sum_bytes.checked_add(block.size_bytes).ok_or_else(|| too_far(u64::MAX))?;
    }
    if sum_bytes != size_bytes {
        return Err(Mismatch::new(
            "blocks that tile the segment",
            format!("total_size {size_bytes} and blocks of {sum_bytes} bytes in all"),
        ));
    }
    Ok(())
}
