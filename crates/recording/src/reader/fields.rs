//! The fields of a snapshot's entries: events, blocks and segments.
//!
//! Older and newer files differ in which optional fields they have. The default of such a field is given
//! where the field is read.

use super::error::Mismatch;
use super::heap::Record;
use super::interpret::{Interpreter, Stop};
use super::words::Word;
use crate::trace::is_remark;
use crate::{Annotation, BlockStack, StackId, TraceEvent};
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::PoolKind;

/// The value of a field: a value without structure, or a pair of numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Scalar {
    None,
    Bool(bool),
    Int(i128),
    Word(Word),
    Text(String),
    Pair(u64, u64),
    /// Any other value; the text is the name of its kind.
    Other(&'static str),
}

/// The maximum number of characters kept of a text that is not a [`Word`].
pub(super) const SHOWN_CHARS: usize = 80;

impl Scalar {
    fn describe(&self) -> String {
        match self {
            Self::None => "nothing (None)".to_owned(),
            Self::Bool(b) => b.to_string(),
            Self::Int(i) => i.to_string(),
            Self::Word(word) => format!("{:?}", word.text()),
            Self::Text(text) => format!("{text:?}"),
            Self::Pair(a, b) => format!("({a}, {b})"),
            Self::Other(what) => (*what).to_owned(),
        }
    }

    pub(super) fn mismatch(&self, expected: &'static str) -> Mismatch {
        Mismatch::new(expected, self.describe())
    }

    pub(super) fn number(self) -> Result<u64, Mismatch> {
        match self {
            Self::Int(i) => u64::try_from(i).ok(),
            _ => None,
        }
        .ok_or_else(|| self.mismatch("a whole number from 0 to 2^64 - 1"))
    }

    pub(super) fn number_or_none(self) -> Result<Option<u64>, Mismatch> {
        match self {
            Self::None => Ok(None),
            other => other.number().map(Some),
        }
    }

    /// Returns the stream. Python's None means the default stream.
    fn stream(self) -> Result<StreamId, Mismatch> {
        Ok(self.number_or_none()?.map_or(StreamId::DEFAULT, StreamId))
    }

    fn pool(self) -> Result<Option<PoolId>, Mismatch> {
        match self {
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

    fn action(self) -> Result<Kind, Mismatch> {
        let name = self.text().ok_or_else(|| self.mismatch("the name of an action"))?;
        Ok(match (&self, Action::from_name(name)) {
            (Self::Word(Word::UserDefined), None) => Kind::Remark,
            (_, Some(action)) if is_remark(action) => Kind::Remark,
            (_, Some(action)) => Kind::Memory(action),
            (Self::Word(Word::Annotate), None) => Kind::Annotate,
            (_, None) => Kind::Unknown(name.to_owned()),
        })
    }

    fn state(self) -> Result<BlockStateName, Mismatch> {
        let state = self.text().and_then(BlockStateName::from_name);
        state.ok_or_else(|| self.mismatch("active_allocated, active_pending_free or inactive"))
    }

    /// Returns the number of a device, or `None` for -1, which is the host.
    fn device(self) -> Result<Option<u32>, Mismatch> {
        match self {
            Self::Int(-1) => Ok(None),
            Self::Int(number) if number > u32::MAX.into() => {
                Err(self.mismatch("the number of a device"))
            }
            number => Ok(u32::try_from(number.number()?).ok()),
        }
    }

    fn pool_kind(self) -> Result<PoolKind, Mismatch> {
        match self {
            Self::Word(Word::Small) => Ok(PoolKind::Small),
            Self::Word(Word::Large) => Ok(PoolKind::Large),
            _ => Err(self.mismatch("small or large")),
        }
    }

    fn bool(self) -> Result<bool, Mismatch> {
        match self {
            Self::Bool(b) => Ok(b),
            _ => Err(self.mismatch("true or false")),
        }
    }
}

/// An entry of a list in the file.
pub(super) trait Entry: Sized {
    /// The name of this kind of entry, for messages.
    const WHAT: &'static str;

    /// Reads an entry. Returns `None` for an entry that is not an event. Annotations and unknown actions
    /// are added to [`Interpreter::beside`]; other such entries are ignored.
    fn read(from: &mut Interpreter<'_>, record: &Record) -> Result<Option<Self>, Stop>;
}

pub(super) fn needed<T>(field: Option<T>, expected: &'static str) -> Result<T, Mismatch> {
    field.ok_or_else(|| Mismatch::new(expected, "no such key"))
}

enum Kind {
    Memory(Action),
    /// `annotate`: a text attached to a block.
    Annotate,
    /// `snapshot` and `user_defined`: entries that are ignored.
    Remark,
    /// Any other action, as newer versions of PyTorch may have.
    Unknown(String),
}

impl Entry for TraceEvent {
    const WHAT: &'static str = "a trace entry (a dictionary)";

    fn read(from: &mut Interpreter<'_>, record: &Record) -> Result<Option<Self>, Stop> {
        let action = from.field(record, Word::Action, Scalar::action)?;
        let address = from.field(record, Word::Addr, Scalar::number)?;
        let device_free = from.field(record, Word::DeviceFree, Scalar::number)?;
        let size = from.field(record, Word::Size, Scalar::number)?;
        let stream = from.field(record, Word::Stream, Scalar::stream)?;
        let pool = from.field(record, Word::PoolId, Scalar::pool)?;
        let pool = from.field(record, Word::SegmentPoolId, Scalar::pool)?.or(pool).flatten();
        let metadata = from.field(record, Word::UserMetadata, Ok)?;
        // A malformed time becomes 0, because replays do not depend on the time.
        let time_us = from.field(record, Word::TimeUs, |time| Ok(time.number().unwrap_or(0)))?;
        let stack = from.stack(record);
        let action = match needed(action, "the key action")? {
            Kind::Memory(action) => action,
            Kind::Remark => return Ok(None),
            Kind::Annotate => {
                let address = needed(address, "the key addr")?;
                let text = metadata.as_ref().and_then(Scalar::text).unwrap_or_default().to_owned();
                from.budget.charge(text.len() as u64)?;
                from.budget.reserve(&mut from.beside.annotations, 1)?;
                let (events_before, size_bytes) = (from.beside.events, size.unwrap_or(0));
                let annotation = Annotation { events_before, address, size_bytes, text };
                from.beside.annotations.push(annotation);
                return Ok(None);
            }
            Kind::Unknown(action) => {
                from.beside.unknown.count(action);
                return Ok(None);
            }
        };
        let is_call = metadata == Some(Scalar::Word(Word::EmptyCache));
        if matches!(action, Action::Alloc | Action::OutOfMemory) {
            let text = metadata.as_ref().filter(|_| !is_call).and_then(Scalar::text);
            from.beside.see(text.unwrap_or_default(), &mut from.budget)?;
        }
        from.beside.events = from.beside.events.saturating_add(1);
        let size_bytes = needed(size, "the key size")?;
        let address = if action == Action::OutOfMemory {
            needed(device_free.or(address), "the key device_free or addr")?
        } else {
            let address = needed(address, "the key addr")?;
            address.checked_add(size_bytes).ok_or_else(|| too_far(size_bytes, address))?;
            address
        };
        Ok(Some(Self {
            action,
            address,
            size_bytes,
            stream: needed(stream, "the key stream")?,
            pool: pool.unwrap_or_default(),
            names_pool: pool.is_some(),
            empty_cache: is_call,
            stack,
            time_us: time_us.unwrap_or(0),
        }))
    }
}

/// The part of an event by which devices are compared.
pub(super) struct BriefEvent {
    pub(super) action: Action,
    pub(super) size_bytes: u64,
    pub(super) time_us: u64,
}

impl BriefEvent {
    /// Reads an entry. Returns `None` for one that is not an event, and for a malformed one.
    pub(super) fn read(from: &Interpreter<'_>, record: &Record) -> Option<Self> {
        let scalar = |key: Word| Some(from.scalar(record[key as usize]?));
        let number = |key: Word| scalar(key)?.number().ok();
        let Kind::Memory(action) = scalar(Word::Action)?.action().ok()? else { return None };
        let time_us = number(Word::TimeUs).unwrap_or(0);
        Some(Self { action, size_bytes: number(Word::Size)?, time_us })
    }
}

fn too_far(size_bytes: u64, address: u64) -> Mismatch {
    Mismatch::new("memory that ends below 2^64", format!("{size_bytes} bytes at {address}"))
}

/// Stands for the address of a block in old files, which do not contain it, until `lay_blocks` computes it.
/// No real block starts at this address.
const ADDRESS_ABSENT: u64 = u64::MAX;

/// A block, and the data of its request.
pub(super) struct ListedBlock {
    layout: BlockLayout,
    /// Whether the file contains the requested bytes.
    is_requested_known: bool,
    stack: Option<StackId>,
    history: Option<BlockHistory>,
}

/// The latest request in a block's `history`, which PyTorch 2.0 writes in place of `frames`.
struct BlockHistory {
    address: u64,
    requested_bytes: Option<u64>,
    stack: Option<StackId>,
}

impl BlockHistory {
    /// Returns `None` if the block has no history, or one that cannot be read: no recording is refused
    /// because of it.
    fn read(from: &mut Interpreter<'_>, block: &Record) -> Option<Self> {
        let latest = from.first_record(block[Word::History as usize]?)?;
        let address = from.number(&latest, Word::Addr)?;
        let requested_bytes = from.number(&latest, Word::RealSize);
        Some(Self { address, requested_bytes, stack: from.stack(&latest) })
    }
}

impl ListedBlock {
    /// Returns the block's address and stack, if it has a stack.
    fn with_stack(&self) -> Option<BlockStack> {
        Some(BlockStack { address: self.layout.address, stack: self.stack? })
    }

    /// Adds the data of the block's history. If the latest request was for another address, it was made
    /// before that for the block, which was not recorded.
    fn add_history(&mut self) {
        let Self { layout, is_requested_known, stack, history } = self;
        let history = history.take().filter(|latest| latest.address == layout.address);
        let Some(BlockHistory { requested_bytes, stack: older, .. }) = history else { return };
        let known = requested_bytes.filter(|bytes| *bytes <= layout.size_bytes);
        if let Some(bytes) = known.filter(|_| !*is_requested_known) {
            layout.requested_bytes = bytes;
        }
        *stack = stack.or(older);
    }
}

impl Entry for ListedBlock {
    const WHAT: &'static str = "a block (a dictionary)";

    fn read(from: &mut Interpreter<'_>, record: &Record) -> Result<Option<Self>, Stop> {
        let size = from.field(record, Word::Size, Scalar::number)?;
        let address = from.field(record, Word::Address, Scalar::number)?;
        let requested = from.field(record, Word::RequestedSize, Scalar::number)?;
        let state = from.field(record, Word::State, Scalar::state)?;
        let size_bytes = needed(size, "the key size")?;
        let state = needed(state, "the key state")?;
        // Old files have no requested_size. It is then the size of the block if the block is live, and 0
        // if it is free.
        let default_bytes = match state {
            BlockStateName::Inactive => 0,
            _ => size_bytes,
        };
        let is_live = state != BlockStateName::Inactive;
        let stack = if is_live { from.stack(record) } else { None };
        let history = if is_live { BlockHistory::read(from, record) } else { None };
        let layout = BlockLayout {
            address: address.unwrap_or(ADDRESS_ABSENT),
            size_bytes,
            requested_bytes: requested.unwrap_or(default_bytes),
            state,
        };
        Ok(Some(Self { layout, is_requested_known: requested.is_some(), stack, history }))
    }
}

/// A segment and its device. `None` for host memory, and if the file does not contain the device.
pub(super) struct ListedSegment {
    pub(super) device: Option<u32>,
    pub(super) layout: SegmentLayout,
    /// The stacks of its live blocks, in address order. Empty if they exceed the memory limit.
    pub(super) stacks: Vec<BlockStack>,
}

impl Entry for ListedSegment {
    const WHAT: &'static str = "a segment (a dictionary)";

    fn read(from: &mut Interpreter<'_>, record: &Record) -> Result<Option<Self>, Stop> {
        let stream = from.field(record, Word::Stream, Scalar::stream)?;
        let pool = from.field(record, Word::SegmentPoolId, Scalar::pool)?.flatten();
        let device = from.field(record, Word::Device, Scalar::device)?.flatten();
        let address = from.field(record, Word::Address, Scalar::number)?;
        let size = from.field(record, Word::TotalSize, Scalar::number)?;
        let kind = from.field(record, Word::SegmentType, Scalar::pool_kind)?;
        let expandable = from.field(record, Word::IsExpandable, Scalar::bool)?;
        let blocks: Option<Vec<ListedBlock>> =
            from.at(record, Word::Blocks, Interpreter::entries)?;
        let address = needed(address, "the key address")?;
        let size_bytes = needed(size, "the key total_size")?;
        let mut listed = needed(blocks, "the key blocks")?;
        lay_blocks(address, size_bytes, &mut listed)?;
        listed.iter_mut().for_each(ListedBlock::add_history);
        let mut blocks = from.budget.vec_of(listed.len())?;
        blocks.extend(listed.iter().map(|block| block.layout));
        let with_stack = listed.iter().filter(|block| block.stack.is_some()).count();
        let mut stacks = from.budget.vec_of(with_stack).unwrap_or_default();
        if stacks.capacity() >= with_stack {
            stacks.extend(listed.iter().filter_map(ListedBlock::with_stack));
        }
        from.budget.release(size_of_val(&*listed) as u64);
        Ok(Some(Self {
            device,
            stacks,
            layout: SegmentLayout {
                address,
                size_bytes,
                stream: needed(stream, "the key stream")?,
                // Old files do not contain the kind. It is then derived from the size.
                kind: kind.unwrap_or(PoolKind::of_segment(size_bytes)),
                pool: pool.unwrap_or(PoolId::DEFAULT),
                expandable: expandable.unwrap_or(false),
                // A replay never pauses, so the key is not read.
                asleep: false,
                blocks,
            },
        }))
    }
}

/// Checks that the blocks tile the segment, and computes the addresses that are not in the file.
fn lay_blocks(start: u64, size_bytes: u64, blocks: &mut [ListedBlock]) -> Result<(), Mismatch> {
    start.checked_add(size_bytes).ok_or_else(|| too_far(size_bytes, start))?;
    let mut sum_bytes = 0_u64;
    for (i, ListedBlock { layout: block, .. }) in blocks.iter_mut().enumerate() {
        let address = start.checked_add(sum_bytes).ok_or_else(|| too_far(sum_bytes, start))?;
        if block.address == ADDRESS_ABSENT {
            block.address = address;
        } else if block.address != address {
            return Err(Mismatch::new(
                "blocks that tile the segment",
                format!("blocks[{i}] at {}, where the one before ends at {address}", block.address),
            ));
        }
        sum_bytes =
            sum_bytes.checked_add(block.size_bytes).ok_or_else(|| too_far(u64::MAX, start))?;
    }
    if sum_bytes != size_bytes {
        return Err(Mismatch::new(
            "blocks that tile the segment",
            format!("total_size {size_bytes} and blocks of {sum_bytes} bytes in all"),
        ));
    }
    Ok(())
}
