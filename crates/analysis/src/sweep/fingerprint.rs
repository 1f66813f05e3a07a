//! A hash of what determines the needs of a recording: its settings and its requests and frees.
//!
//! Streams, private pools and blocks enter the hash as ordinals, in the order of their first use. Addresses,
//! times, stacks and names do not enter it. So ranks that did the same work have equal fingerprints,
//! although their addresses and handles differ.

use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

use crate::grouped;
use stratalloc::ids::{PoolId, StreamId};
use stratalloc_recording::{Op, Ops, Trace, Workload};

/// A hash of 128 bits, as 32 hexadecimal digits. Not protected against inputs that are chosen to collide.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint(String);

impl Fingerprint {
    /// Returns the fingerprint of a list of texts.
    pub fn of_texts(texts: &[&str]) -> Self {
        let mut hash = Hasher::default();
        texts.iter().for_each(|text| hash.text(text));
        hash.done()
    }

    /// Returns the hexadecimal digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the fingerprint of a recording. `limit_bytes` is the limit that its failed requests show.
    pub(super) fn of(trace: &Trace, workload: &Workload, limit_bytes: Option<u64>) -> Self {
        let mut hash = Hasher::default();
        hash.text(&trace.conf);
        facts(trace, limit_bytes).iter().for_each(|(_, value)| hash.text(value));
        Normalised::new(workload).hash(&mut hash);
        hash.done()
    }
}

/// Returns the data of a recording that change its needs, besides its configuration, requests and frees: the
/// name and the value of each, as they are printed.
pub(super) fn facts(trace: &Trace, limit_bytes: Option<u64>) -> [(&'static str, String); 6] {
    let bytes = |bytes: Option<u64>| {
        bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{} bytes", grouped(bytes)))
    };
    let made_here = trace.made_here;
    let [limit, total] =
        made_here.map_or([None; 2], |made| [made.limit_bytes, made.total_bytes]).map(bytes);
    let kind = if trace.requests_only { "requests" } else { "events" };
    let recorder = if made_here.is_some() { "this library" } else { "PyTorch" };
    [
        ("version of PyTorch", trace.torch_version().to_string()),
        ("kind of recording", kind.to_owned()),
        ("recorded by", recorder.to_owned()),
        ("limit", limit),
        ("total memory", total),
        ("limit that failed requests show", bytes(limit_bytes)),
    ]
}

/// Where the operations of two recordings differ first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Differs {
    /// An operation of each recording; `None` if the recording ends before.
    Operations([Option<Place>; 2]),
    /// Only blocks from before the recordings differ, of which none is freed.
    BlocksBefore,
}

/// An operation of a recording, with the ordinals of its stream and its private pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The index in [`Workload::ops`].
    pub(super) index: usize,
    pub(super) stream: u64,
    pub(super) pool: u64,
}

/// Returns the first difference between the operations of two recordings, compared as in their fingerprints.
pub(super) fn first_differing(workloads: [&Workload; 2]) -> Option<Differs> {
    let [mut a, mut b] = workloads.map(Normalised::new);
    let starts = [a.first, b.first];
    for at in 0..a.rest().len().max(b.rest().len()) {
        let words = [&mut a, &mut b].map(|side| {
            let op = side.ops.get(side.first + at)?;
            Some(side.operation(op))
        });
        if words[0] != words[1] {
            let place = |side: usize| {
                let words = words[side]?;
                // The ordinals of the freed block, if it lived before the recording, or of the request.
                let ordinals = words.block.map_or(words.operation[0] >> 3, |block| block[2]);
                let (stream, pool) = (ordinals & ORDINAL_MAX, words.pool());
                Some(Place { index: starts[side] + at, stream, pool })
            };
            return Some(Differs::Operations([place(0), place(1)]));
        }
    }
    (a.numbers.len() != b.numbers.len() || a.left() != b.left()).then_some(Differs::BlocksBefore)
}

/// Hashes words of 64 bits: as FNV-1a of 128 bits does, but with a word instead of a byte in each step.
struct Hasher(u128);

impl Default for Hasher {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Hasher {
    fn word(&mut self, word: u64) {
        // FNV's prime leaves the low bits independent of the high ones, so the high half is added to the
        // low one.
        const FACTOR: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        self.0 = (self.0 ^ u128::from(word)).wrapping_mul(FACTOR);
        self.0 ^= self.0 >> 64;
    }

    fn text(&mut self, text: &str) {
        self.word(text.len() as u64);
        for part in text.as_bytes().chunks(8) {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            self.word(u64::from_le_bytes(word));
        }
    }

    fn done(mut self) -> Fingerprint {
        (0..2).for_each(|word| self.word(word));
        Fingerprint(format!("{:032x}", self.0))
    }
}

/// Numbers for handles, in the order of their first use. The default handle has number 0.
struct Ordinals<K> {
    known: HashMap<K, u64>,
}

impl<K: Copy + Eq + Hash> Ordinals<K> {
    fn new(default: K) -> Self {
        Self { known: HashMap::from_iter([(default, 0)]) }
    }

    fn of(&mut self, handle: K) -> u64 {
        let new = self.known.len() as u64;
        *self.known.entry(handle).or_insert(new)
    }

    /// Returns the ordinal of a handle; the largest number if it has none.
    fn known(&self, handle: K) -> u64 {
        self.known.get(&handle).copied().unwrap_or(u64::MAX)
    }

    /// Assigns ordinals to the handles of blocks that have none. Their order depends on the sizes of the
    /// blocks, not on the order in which they are given.
    fn add_by_blocks(&mut self, blocks: impl Iterator<Item = (K, [u64; 3])>) {
        let mut blocks_of: HashMap<K, Vec<[u64; 3]>> = HashMap::new();
        for (handle, block) in blocks.filter(|(handle, _)| !self.known.contains_key(handle)) {
            blocks_of.entry(handle).or_default().push(block);
        }
        blocks_of.values_mut().for_each(|blocks| blocks.sort_unstable());
        let mut new: Vec<(K, Vec<[u64; 3]>)> = blocks_of.into_iter().collect();
        new.sort_unstable_by(|(_, a), (_, b)| a.cmp(b));
        for (handle, _) in new {
            self.of(handle);
        }
    }
}

/// Streams have ordinals of 29 bits: behind the three bits of a kind, below the 32 of a pool.
const ORDINAL_MAX: u64 = (1 << 29) - 1;

/// A workload whose handles are replaced by ordinals.
struct Normalised<'a> {
    streams: Ordinals<StreamId>,
    pools: Ordinals<PoolId>,
    /// All operations. The allocations of the blocks from before the recording come first, in the order of
    /// their addresses.
    ops: &'a Ops,
    /// The index of the first operation of the recording itself.
    first: usize,
    /// The blocks that were draining before the recording.
    drains: HashSet<u32>,
    /// The ordinals of the blocks from before the recording, in the order of their first use.
    numbers: Vec<Option<u64>>,
    next_number: u64,
}

/// What an operation adds to the hash.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Words {
    /// The block from before the recording that it uses, if no operation used it before.
    block: Option<[u64; 3]>,
    operation: [u64; 2],
}

impl Words {
    /// Returns the ordinal of the pool.
    fn pool(&self) -> u64 {
        self.block.map_or(self.operation[0], |block| block[2]) >> 32
    }
}

impl<'a> Normalised<'a> {
    fn new(workload: &'a Workload) -> Self {
        let (ops, seeded) = (&workload.ops, workload.seeded as usize);
        let is_draining =
            |op: &Op| matches!(op, Op::FreeInUse { lane, .. } if *lane == Workload::LANE_BEFORE);
        let drains: Vec<Op> = ops.range(seeded..ops.len()).take_while(is_draining).collect();
        Self {
            streams: Ordinals::new(StreamId::DEFAULT),
            pools: Ordinals::new(PoolId::DEFAULT),
            ops,
            first: seeded + drains.len(),
            drains: drains.iter().filter_map(Op::block).collect(),
            numbers: vec![None; seeded],
            next_number: 0,
        }
    }

    /// Returns the operations of the recording itself.
    fn rest(&self) -> impl ExactSizeIterator<Item = Op> + use<'a> {
        self.ops.range(self.first..self.ops.len())
    }

    fn hash(mut self, hash: &mut Hasher) {
        hash.word(self.numbers.len() as u64);
        for op in self.rest() {
            let Words { block, operation } = self.operation(op);
            block.into_iter().flatten().chain(operation).for_each(|word| hash.word(word));
        }
        self.left().into_iter().flatten().for_each(|word| hash.word(word));
    }

    /// Returns the blocks from before the recording that no operation used. They are sorted, because the
    /// order of addresses differs between ranks.
    fn left(&mut self) -> Vec<[u64; 3]> {
        let is_left = |op: &Op| op.block().is_some_and(|id| self.numbers[id as usize].is_none());
        let left: Vec<Op> = self.ops.range(0..self.numbers.len()).filter(is_left).collect();
        // The kind, size, stream and pool of each block.
        let blocks = left.iter().filter_map(|op| match *op {
            Op::Allocate { id, bytes, stream, pool } => Some((self.kind(id), bytes, stream, pool)),
            _ => None,
        });
        let blocks: Vec<_> = blocks.collect();
        let of_stream =
            |&(kind, bytes, stream, pool): &_| (stream, [kind, bytes, self.pools.known(pool)]);
        self.streams.add_by_blocks(blocks.iter().map(of_stream));
        let of_pool =
            |&(kind, bytes, stream, pool): &_| (pool, [kind, bytes, self.streams.known(stream)]);
        self.pools.add_by_blocks(blocks.iter().map(of_pool));
        let mut words: Vec<[u64; 3]> = left.into_iter().map(|op| self.words(op)).collect();
        words.sort_unstable();
        words
    }

    /// Returns the kind of a block from before the recording.
    fn kind(&self, id: u32) -> u64 {
        7 | u64::from(self.drains.contains(&id)) << 3
    }

    /// Returns what a block from before the recording adds to the hash.
    fn words(&mut self, op: Op) -> [u64; 3] {
        let Op::Allocate { id, bytes, stream, pool } = op else { return [0; 3] };
        [self.kind(id), bytes, self.streams.of(stream) | self.pools.of(pool) << 32]
    }

    /// Returns the number of a block, and what it adds to the hash if it is a block from before the recording
    /// that no operation used. Later blocks have the numbers of their requests.
    fn block(&mut self, id: u32) -> (u64, Option<[u64; 3]>) {
        let at = id as usize;
        match self.numbers.get(at) {
            None => (u64::from(id), None),
            Some(Some(number)) => (*number, None),
            Some(None) => {
                let words = self.ops.get(at).map_or([0; 3], |op| self.words(op));
                self.next_number += 1;
                (*self.numbers[at].insert(self.next_number - 1), Some(words))
            }
        }
    }

    /// Returns what an operation adds: its kind in the lowest three bits of a word, then the other fields.
    fn operation(&mut self, op: Op) -> Words {
        let mut block = None;
        let mut number = |id| {
            let (number, words) = self.block(id);
            block = words;
            number
        };
        let operation = match op {
            Op::Allocate { bytes, stream, pool, .. } => {
                [1 | self.streams.of(stream) << 3 | self.pools.of(pool) << 32, bytes]
            }
            Op::AllocateFailing { bytes, stream, .. } => [2 | self.streams.of(stream) << 3, bytes],
            Op::Free { id } => [3 | number(id) << 3, 0],
            Op::FreeInUse { id, lane } => [4 | number(id) << 3, u64::MAX - lane.0],
            Op::Finished { id } => [5 | number(id) << 3, 0],
            Op::EmptyCache => [6, 0],
        };
        Words { block, operation }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
    use stratalloc::size::{MIB, PoolKind};

    use stratalloc_recording::TraceEvent;

    /// Returns a recording that begins with two live blocks, with all addresses from `base` on and one
    /// additional stream. If `is_turned`, the first block has the higher address.
    fn trace(base: u64, stream: u64, is_turned: bool) -> Trace {
        let [first, second] = if is_turned { [4, 0] } else { [0, 4] }.map(|mib| base + mib * MIB);
        let event = |action, address, bytes, stream| TraceEvent {
            time_us: base,
            ..TraceEvent::new(action, address, bytes, StreamId(stream))
        };
        let live = |address| BlockLayout {
            address,
            size_bytes: MIB,
            requested_bytes: MIB,
            state: BlockStateName::ActiveAllocated,
        };
        let free = |address, end| stratalloc_recording::free_block(address, end);
        let end = base + 20 * MIB;
        let at = base + 8 * MIB;
        let segment = SegmentLayout {
            address: base,
            size_bytes: 20 * MIB,
            stream: StreamId(0),
            kind: PoolKind::Large,
            pool: PoolId::DEFAULT,
            expandable: false,
            asleep: false,
            blocks: vec![free(base, at), live(at), free(at + MIB, end)],
        };
        let events = vec![
            event(Action::FreeRequested, first, 3 * MIB, 0),
            event(Action::FreeCompleted, first, 3 * MIB, 0),
            event(Action::SegmentAlloc, base + (1 << 40), 2 * MIB, stream),
            event(Action::Alloc, base + (1 << 40), 512, stream),
            event(Action::FreeRequested, second, 2 * MIB, 0),
            event(Action::FreeCompleted, second, 2 * MIB, 0),
        ];
        Trace { events, segments: vec![segment], ..Trace::default() }
    }

    fn of(trace: &Trace) -> Fingerprint {
        Fingerprint::of(trace, &Workload::of(trace, 1 << 37), None)
    }

    #[test]
    fn addresses_handles_and_times_do_not_enter_it() {
        let [a, b, c] =
            [trace(1 << 40, 7, false), trace(3 << 40, 900, false), trace(1 << 40, 7, true)];
        assert_eq!(Workload::of(&a, 1 << 37).seeded, 3);
        assert_ne!(Workload::of(&a, 1 << 37), Workload::of(&b, 1 << 37));
        assert_ne!(Workload::of(&a, 1 << 37), Workload::of(&c, 1 << 37));
        assert_eq!([of(&b), of(&c)], [of(&a), of(&a)]);
    }

    #[test]
    fn streams_and_pools_of_live_blocks_may_have_any_order_of_addresses() {
        // Three blocks: of one stream and pool, and two of another.
        let live = |order: [(u64, u64, u64); 3]| {
            let segment = |(at, (bytes, stream, pool)): (u64, (u64, u64, u64))| SegmentLayout {
                address: at << 32,
                size_bytes: bytes,
                stream: StreamId(stream),
                kind: PoolKind::Large,
                pool: PoolId { capture: pool, user: 0 },
                expandable: false,
                asleep: false,
                blocks: vec![BlockLayout {
                    address: at << 32,
                    size_bytes: bytes,
                    requested_bytes: bytes,
                    state: BlockStateName::ActiveAllocated,
                }],
            };
            let segments = (1..).zip(order).map(segment).collect();
            Trace { segments, ..Trace::default() }
        };
        let by_stream = [(2 * MIB, 7, 0), (2 * MIB, 9, 0), (4 * MIB, 9, 0)];
        let by_pool = [(2 * MIB, 0, 7), (2 * MIB, 0, 9), (4 * MIB, 0, 9)];
        for [a, b, c] in [by_stream, by_pool] {
            let expected = of(&live([a, b, c]));
            assert_eq!(
                [of(&live([b, a, c])), of(&live([c, b, a]))],
                [expected.clone(), expected.clone()]
            );
            assert_ne!(of(&live([a, a, c])), expected);
        }
        assert_ne!(of(&live(by_stream)), of(&live(by_pool)));
    }

    #[test]
    fn each_size_setting_limit_and_free_changes_it() {
        let base = trace(1 << 40, 7, false);
        let mut all = vec![of(&base)];
        let mut add = |change: &dyn Fn(&mut Trace)| {
            let mut changed = base.clone();
            change(&mut changed);
            all.push(of(&changed));
        };
        add(&|trace| trace.events[3].size_bytes += 1);
        add(&|trace| trace.events[3].stream = StreamId(0));
        add(&|trace| trace.events[3].action = Action::OutOfMemory);
        add(&|trace| trace.conf = "max_split_size_mb:64".to_owned());
        add(&|trace| trace.torch = Some("2.13".parse().unwrap()));
        add(&|trace| trace.made_here = Some(stratalloc_recording::MadeHere::default()));
        add(&|trace| trace.events.truncate(4));
        add(&|trace| trace.events.swap(4, 5));
        add(&|trace| trace.segments[0].blocks[1].requested_bytes -= 1);
        all.push(Fingerprint::of(&base, &Workload::of(&base, 1 << 37), Some(1 << 34)));
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
