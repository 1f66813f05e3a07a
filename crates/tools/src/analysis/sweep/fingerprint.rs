//! A hash of what determines the needs of a recording: its settings and its requests and frees.
//!
//! Streams, private pools and blocks enter the hash as ordinals, in the order of their first use. Addresses,
//! times, stacks and names do not enter it. So ranks that did the same work have equal fingerprints,
//! although their addresses and handles differ.

use std::hash::Hash;

use hashbrown::{HashMap, HashSet};
use serde::{Deserialize, Serialize};

use crate::replay::{Op, Trace, Workload};
use stratalloc::ids::{PoolId, StreamId};

/// A hash of 128 bits, as 32 hexadecimal digits. Not protected against inputs that are chosen to collide.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Fingerprint(String);

impl Fingerprint {
    /// Returns the fingerprint of a list of texts.
    pub(super) fn of_texts(texts: &[&str]) -> Self {
        let mut hash = Hasher::default();
        texts.iter().for_each(|text| hash.text(text));
        hash.done()
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the fingerprint of a recording. `limit_bytes` is the limit that its failed requests show.
    pub(super) fn of(trace: &Trace, workload: &Workload, limit_bytes: Option<u64>) -> Self {
        let mut hash = Hasher::default();
        hash.text(&trace.conf);
        hash.text(&trace.torch_version().to_string());
        hash.word(u64::from(trace.requests_only));
        let made_here = trace.made_here.map(|made| [made.limit_bytes, made.total_bytes]);
        hash.word(u64::from(made_here.is_some()));
        for bytes in made_here.unwrap_or_default().into_iter().chain([limit_bytes]) {
            hash.word(u64::from(bytes.is_some()));
            hash.word(bytes.unwrap_or(0));
        }
        Normalised::new(&mut hash, workload).hash();
        hash.done()
    }
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
}

/// A workload whose handles are replaced by ordinals.
struct Normalised<'a> {
    hash: &'a mut Hasher,
    streams: Ordinals<StreamId>,
    pools: Ordinals<PoolId>,
    /// The allocations of the blocks from before the recording, in the order of their addresses.
    start: &'a [Op],
    /// The blocks that were draining before the recording.
    drains: HashSet<u32>,
    rest: &'a [Op],
    /// The ordinals of the blocks in `start`, in the order of their first use in `rest`.
    numbers: Vec<Option<u64>>,
    next_number: u64,
}

impl<'a> Normalised<'a> {
    fn new(hash: &'a mut Hasher, workload: &'a Workload) -> Self {
        let (start, rest) = workload.ops.split_at(workload.seeded as usize);
        let is_draining =
            |op: &&Op| matches!(op, Op::FreeInUse { lane, .. } if *lane == Workload::LANE_BEFORE);
        let (drains, rest) = rest.split_at(rest.iter().take_while(is_draining).count());
        Self {
            hash,
            streams: Ordinals::new(StreamId::DEFAULT),
            pools: Ordinals::new(PoolId::DEFAULT),
            start,
            drains: drains.iter().filter_map(Op::block).collect(),
            rest,
            numbers: vec![None; start.len()],
            next_number: 0,
        }
    }

    fn hash(mut self) {
        self.hash.word(self.start.len() as u64);
        for op in self.rest {
            self.operation(op);
        }
        // The order of addresses differs between ranks, so blocks that are never freed are sorted.
        let is_left = |op: &&Op| op.block().is_some_and(|id| self.numbers[id as usize].is_none());
        let left: Vec<&Op> = self.start.iter().filter(is_left).collect();
        let mut left: Vec<[u64; 3]> = left.into_iter().map(|op| self.words(op)).collect();
        left.sort_unstable();
        left.into_iter().flatten().for_each(|word| self.hash.word(word));
    }

    /// Returns what a block from before the recording adds to the hash.
    fn words(&mut self, op: &Op) -> [u64; 3] {
        let Op::Allocate { id, bytes, stream, pool } = *op else { return [0; 3] };
        let is_draining = self.drains.contains(&id);
        let kind = 7 | u64::from(is_draining) << 3;
        [kind, bytes, self.streams.of(stream) | self.pools.of(pool) << 32]
    }

    /// Returns the number of a block. Later blocks have the numbers of their requests.
    fn block(&mut self, id: u32) -> u64 {
        let at = id as usize;
        match self.numbers.get(at) {
            None => u64::from(id),
            Some(Some(number)) => *number,
            Some(None) => {
                self.words(&self.start[at]).into_iter().for_each(|word| self.hash.word(word));
                self.next_number += 1;
                *self.numbers[at].insert(self.next_number - 1)
            }
        }
    }

    /// Adds an operation: its kind in the lowest three bits of a word, then the other fields.
    fn operation(&mut self, op: &Op) {
        let words = match *op {
            Op::Allocate { bytes, stream, pool, .. } => {
                [1 | self.streams.of(stream) << 3 | self.pools.of(pool) << 32, bytes]
            }
            Op::AllocateFailing { bytes, stream, .. } => [2 | self.streams.of(stream) << 3, bytes],
            Op::Free { id } => [3 | self.block(id) << 3, 0],
            Op::FreeInUse { id, lane } => [4 | self.block(id) << 3, u64::MAX - lane.0],
            Op::Finished { id } => [5 | self.block(id) << 3, 0],
            Op::EmptyCache => [6, 0],
        };
        words.into_iter().for_each(|word| self.hash.word(word));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
    use stratalloc::size::{MIB, PoolKind};

    use crate::replay::TraceEvent;

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
        let free = |address, end| crate::replay::free_block(address, end);
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
        add(&|trace| trace.made_here = Some(crate::replay::MadeHere::default()));
        add(&|trace| trace.events.truncate(4));
        add(&|trace| trace.events.swap(4, 5));
        add(&|trace| trace.segments[0].blocks[1].requested_bytes -= 1);
        all.push(Fingerprint::of(&base, &Workload::of(&base, 1 << 37), Some(1 << 34)));
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
