//! The operations of a workload, in 16 bytes each.
//!
//! Recordings have millions of operations and few pairs of a stream and a pool, so each pair is stored once.

use std::fmt;
use std::ops::Range;

use hashbrown::HashMap;

use stratalloc::ids::{PoolId, StreamId};

/// One operation. `id` is the number of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Allocates a block.
    Allocate {
        /// The block's number.
        id: u32,
        /// Size in bytes.
        bytes: u64,
        /// The stream.
        stream: StreamId,
        /// The pool.
        pool: PoolId,
    },
    /// A request that failed when it was recorded; the recorded size is already rounded.
    AllocateFailing {
        /// The block's number, if the request succeeds now. The block is freed at once.
        id: u32,
        /// Size in bytes.
        bytes: u64,
        /// The stream.
        stream: StreamId,
    },
    /// Frees a block.
    Free {
        /// The block's number.
        id: u32,
    },
    /// Frees a block that work on another stream still uses.
    FreeInUse {
        /// The block's number.
        id: u32,
        /// The lane, which stands for the stream that uses the block.
        lane: StreamId,
    },
    /// Finishes the work that a [`FreeInUse`](Self::FreeInUse) waits for, so its block can become free.
    Finished {
        /// The block's number.
        id: u32,
    },
    /// Calls `empty_cache` explicitly.
    EmptyCache,
}

impl Op {
    /// Returns the number of the block.
    pub fn block(&self) -> Option<u32> {
        match *self {
            Self::Allocate { id, .. }
            | Self::AllocateFailing { id, .. }
            | Self::Free { id }
            | Self::FreeInUse { id, .. }
            | Self::Finished { id } => Some(id),
            Self::EmptyCache => None,
        }
    }

    /// Returns true for a request, successful or not.
    pub fn is_request(&self) -> bool {
        matches!(self, Self::Allocate { .. } | Self::AllocateFailing { .. })
    }
}

/// A stream, or a lane, and a pool.
type Heap = (StreamId, PoolId);

#[derive(Clone, Copy)]
enum Kind {
    Allocate,
    Free,
    AllocateFailing,
    FreeInUse,
    Finished,
    EmptyCache,
}

/// An operation. Unused fields are 0.
#[derive(Clone, Copy)]
struct PackedOp {
    bytes: u64,
    id: u32,
    /// The kind, in the lowest [`KIND_BITS`] bits, and the index of the heap.
    kind_and_heap: u32,
}

const KIND_BITS: u32 = 3;
const KIND_MASK: u32 = (1 << KIND_BITS) - 1;
/// The index of the last heap that is stored. A recording with more heaps has 2^29 requests or more.
const HEAP_LAST: u32 = u32::MAX >> KIND_BITS;
const _: () = assert!(size_of::<PackedOp>() == 16);

/// An operation in [`Ops`], which is unpacked as far as it is asked.
#[derive(Clone, Copy)]
pub(crate) struct OpRef<'a> {
    ops: &'a Ops,
    packed: &'a PackedOp,
}

impl OpRef<'_> {
    /// Returns the block, the bytes, the stream and the pool of an [`Op::Allocate`].
    #[inline]
    pub(crate) fn allocated(self) -> Option<(u32, u64, StreamId, PoolId)> {
        if !self.packed.is(Kind::Allocate) {
            return None;
        }
        let (stream, pool) = self.ops.heap(self.packed);
        Some((self.packed.id, self.packed.bytes, stream, pool))
    }

    /// Returns the block of an [`Op::Free`].
    #[inline]
    pub(crate) fn freed(self) -> Option<u32> {
        self.packed.is(Kind::Free).then_some(self.packed.id)
    }

    pub(crate) fn unpacked(self) -> Op {
        self.ops.unpacked(self.packed)
    }
}

impl PackedOp {
    #[inline]
    fn is(&self, kind: Kind) -> bool {
        self.kind_and_heap & KIND_MASK == kind as u32
    }
}

/// Operations in order.
#[derive(Clone, Default)]
pub struct Ops {
    packed: Vec<PackedOp>,
    heaps: Vec<Heap>,
    /// The index of each heap.
    numbers: HashMap<Heap, u32>,
    /// The heap of the last operation that has one. Most operations have that of the previous one.
    last: Option<(Heap, u32)>,
}

impl Ops {
    /// Returns the number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packed.len()
    }

    /// Returns true if there are no operations.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Returns the host memory of the operations, in bytes.
    #[must_use]
    pub fn host_bytes(&self) -> usize {
        self.packed.capacity() * size_of::<PackedOp>()
    }

    /// Returns the operation with this index, if there is one.
    #[must_use]
    pub fn get(&self, at: usize) -> Option<Op> {
        Some(self.unpacked(self.packed.get(at)?))
    }

    /// Returns all operations in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Op> + ExactSizeIterator + use<'_> {
        self.packed.iter().map(|op| self.unpacked(op))
    }

    /// Returns the operations with these indices in order. Indices behind the last operation are ignored.
    pub fn range(&self, range: Range<usize>) -> impl ExactSizeIterator<Item = Op> + use<'_> {
        self.refs(range).map(OpRef::unpacked)
    }

    /// Returns the operations like [`range`](Self::range), without unpacking them.
    pub(crate) fn refs(
        &self,
        range: Range<usize>,
    ) -> impl ExactSizeIterator<Item = OpRef<'_>> + use<'_> {
        let end = range.end.min(self.len());
        let packed = self.packed[range.start.min(end)..end].iter();
        packed.map(|packed| OpRef { ops: self, packed })
    }

    /// Appends an operation.
    pub fn push(&mut self, op: Op) {
        let packed = self.packed(op);
        self.packed.push(packed);
    }

    /// Replaces each operation by the result of `change`.
    pub fn change(&mut self, mut change: impl FnMut(Op) -> Op) {
        for at in 0..self.packed.len() {
            let op = change(self.unpacked(&self.packed[at]));
            self.packed[at] = self.packed(op);
        }
    }

    fn packed(&mut self, op: Op) -> PackedOp {
        match op {
            Op::Allocate { id, bytes, stream, pool } => {
                self.pack(Kind::Allocate, id, bytes, Some((stream, pool)))
            }
            Op::AllocateFailing { id, bytes, stream } => {
                self.pack(Kind::AllocateFailing, id, bytes, Some((stream, PoolId::DEFAULT)))
            }
            Op::Free { id } => self.pack(Kind::Free, id, 0, None),
            Op::FreeInUse { id, lane } => {
                self.pack(Kind::FreeInUse, id, 0, Some((lane, PoolId::DEFAULT)))
            }
            Op::Finished { id } => self.pack(Kind::Finished, id, 0, None),
            Op::EmptyCache => self.pack(Kind::EmptyCache, 0, 0, None),
        }
    }

    /// Returns the streams of requests and the lanes of frees, each once.
    pub(crate) fn streams(&self) -> Vec<StreamId> {
        let mut streams: Vec<_> = self.heaps.iter().map(|(stream, _)| *stream).collect();
        streams.sort_unstable();
        streams.dedup();
        streams
    }

    /// Renames every stream and lane.
    pub(crate) fn rename_streams(&mut self, rename: impl Fn(StreamId) -> StreamId) {
        self.heaps.iter_mut().for_each(|(stream, _)| *stream = rename(*stream));
        self.numbers = self.heaps.iter().copied().zip(0..).collect();
        self.last = None;
    }

    fn pack(&mut self, kind: Kind, id: u32, bytes: u64, heap: Option<Heap>) -> PackedOp {
        let heap = heap.map_or(0, |heap| self.number(heap));
        PackedOp { bytes, id, kind_and_heap: kind as u32 | heap << KIND_BITS }
    }

    fn number(&mut self, heap: Heap) -> u32 {
        if let Some((last, number)) = self.last
            && last == heap
        {
            return number;
        }
        let next = u32::try_from(self.heaps.len()).unwrap_or(HEAP_LAST).min(HEAP_LAST);
        let number = *self.numbers.entry(heap).or_insert_with(|| {
            self.heaps.push(heap);
            next
        });
        self.last = Some((heap, number));
        number
    }

    #[inline]
    fn unpacked(&self, op: &PackedOp) -> Op {
        let PackedOp { bytes, id, kind_and_heap } = *op;
        let heap = || self.heap(op);
        match kind_and_heap & KIND_MASK {
            kind if kind == Kind::Allocate as u32 => {
                let (stream, pool) = heap();
                Op::Allocate { id, bytes, stream, pool }
            }
            kind if kind == Kind::AllocateFailing as u32 => {
                Op::AllocateFailing { id, bytes, stream: heap().0 }
            }
            kind if kind == Kind::Free as u32 => Op::Free { id },
            kind if kind == Kind::FreeInUse as u32 => Op::FreeInUse { id, lane: heap().0 },
            kind if kind == Kind::Finished as u32 => Op::Finished { id },
            _ => Op::EmptyCache,
        }
    }

    #[inline]
    fn heap(&self, op: &PackedOp) -> Heap {
        self.heaps[(op.kind_and_heap >> KIND_BITS) as usize]
    }
}

impl Extend<Op> for Ops {
    fn extend<I: IntoIterator<Item = Op>>(&mut self, ops: I) {
        let ops = ops.into_iter();
        self.packed.reserve(ops.size_hint().0);
        ops.for_each(|op| self.push(op));
    }
}

impl FromIterator<Op> for Ops {
    fn from_iter<I: IntoIterator<Item = Op>>(ops: I) -> Self {
        let mut all = Self::default();
        all.extend(ops);
        all
    }
}

impl From<Vec<Op>> for Ops {
    fn from(ops: Vec<Op>) -> Self {
        ops.into_iter().collect()
    }
}

impl PartialEq for Ops {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for Ops {}

impl fmt::Debug for Ops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_kind() -> Vec<Op> {
        let (stream, pool) = (StreamId(7), PoolId { capture: 1, user: 2 });
        vec![
            Op::Allocate { id: 0, bytes: u64::MAX, stream, pool },
            Op::AllocateFailing { id: u32::MAX, bytes: 3, stream },
            Op::Free { id: u32::MAX },
            Op::FreeInUse { id: 5, lane: StreamId(u64::MAX) },
            Op::Finished { id: 5 },
            Op::EmptyCache,
        ]
    }

    #[test]
    fn operations_are_returned_as_they_were_added() {
        let ops = Ops::from(every_kind());
        assert_eq!(ops.iter().collect::<Vec<_>>(), every_kind());
        assert_eq!(ops.range(2..4).collect::<Vec<_>>(), every_kind()[2..4]);
        assert_eq!((ops.range(5..90).len(), ops.range(9..30).len()), (1, 0));
        assert_eq!((ops.get(5), ops.get(6)), (Some(Op::EmptyCache), None));
        assert_eq!(ops.streams(), [StreamId(7), StreamId(u64::MAX)]);
    }

    #[test]
    fn a_change_keeps_the_order() {
        let mut ops = Ops::from(every_kind());
        ops.change(|op| match op {
            Op::Allocate { id, bytes, pool, .. } => {
                Op::Allocate { id, bytes: bytes / 2, stream: StreamId(9), pool }
            }
            other => other,
        });
        let mut expected = every_kind();
        let (stream, pool) = (StreamId(9), PoolId { capture: 1, user: 2 });
        expected[0] = Op::Allocate { id: 0, bytes: u64::MAX / 2, stream, pool };
        assert_eq!(ops, Ops::from(expected));
    }
}
