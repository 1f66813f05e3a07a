//! Keeps the newest entries while recording is on.
//!
//! Entries are stored in 64 **shards**, each with its own lock. The entries of one heap of the strategy
//! `native` (the blocks of one stream of one pool) go to one shard, under the heap's lock. So threads on
//! different heaps rarely contend. Each entry has a timestamp in nanoseconds, which increases on each
//! thread. Readers merge the shards by timestamp.
//!
//! A shard is a list of chunks. Full chunks never change, so readers share them without a copy. All
//! shards share one limit on the number of chunks. At the limit, the full chunk whose last entry is the
//! oldest is dropped. The limit is 128 chunks more than `entries_max` entries fill. So the newest
//! entries are always kept, even if most of them are in one shard.

use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use hashbrown::HashMap;
use parking_lot::{Mutex, MutexGuard};

use super::annotations::{Annotation, Annotations};
use super::clock::{Moment, Operation};
use super::context::{Context, Gathered, Sources};
use super::entries::{Entries, Row};
use super::event::{Action, Entry, Event};
use super::late::LateEntries;
use super::live::Leaks;
use super::options::{RecordOptions, StackLevel};
use super::snapshot::About;
use super::trackers::Trackers;
use crate::config::Config;
use crate::ids::DeviceId;

const SHARDS: usize = 64;
const CHUNK_ENTRIES: usize = 256;
/// The chunks that are allowed beyond those that `entries_max` entries fill: see the [module](self).
const SPARE_CHUNKS: usize = 2 * SHARDS;

/// Called when recording starts or stops.
pub(crate) trait Listener: Send + Sync {
    /// Called with true when recording starts, and with false when it stops.
    fn records(&self, on: bool);
}

/// Calls the listeners that are still alive, and removes the others.
fn call(listeners: &mut Vec<Weak<dyn Listener>>, on: bool) {
    listeners
        .retain(|listener| listener.upgrade().inspect(|listener| listener.records(on)).is_some());
}

/// The time when a live block or a segment was allocated, its size, and the call stack and names
/// ([`Context`]) of that request. Kept only while call stacks are recorded (any [`StackLevel`] but
/// `Never`).
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) moment: Moment,
    pub(super) size_bytes: u64,
    pub(super) context: Option<Context>,
}

#[derive(Debug, Default)]
struct Shard {
    full: VecDeque<Arc<Vec<Entry>>>,
    open: Vec<Entry>,
    /// Keyed by address, like `segments`.
    blocks: HashMap<u64, Holder>,
    segments: HashMap<u64, Holder>,
}

/// The history of one device's memory. Off until it is started.
///
/// The history outlives the strategy that records in it: after a [switch](crate::switch) the next
/// strategy records in the same history.
#[derive(Debug)]
pub struct History {
    /// 0 if off, else 1 plus the [`StackLevel`].
    mode: AtomicU8,
    /// Bit set: the actions that are not recorded.
    skipped: AtomicU64,
    entries_max: AtomicUsize,
    chunks: AtomicUsize,
    dropped: AtomicU64,
    /// Bit set: the shards that have entries.
    filled: AtomicU64,
    shards: Box<[Alone<Mutex<Shard>>]>,
    /// For each shard, the time of the last entry of its oldest full chunk. `u64::MAX` without such a
    /// chunk.
    oldest: Box<[AtomicU64]>,
    /// References to chunks and contexts that may be the last ones. They are dropped when no lock is
    /// held, because dropping a context may run user code.
    removed: Mutex<Removed>,
    any_removed: AtomicBool,
    /// True if any entry ever had a context. While false, dropping a chunk runs no user code.
    has_contexts: AtomicBool,
    pub(super) sources: Sources,
    pub(super) trackers: Trackers,
    pub(super) annotations: Annotations,
    /// The number of segment numbers that were assigned.
    pub(super) segment_count: AtomicU64,
    about: Mutex<About>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
    pub(super) leaks: Leaks,
    pub(super) late: LateEntries,
}

/// Entries and contexts that were removed under a lock and are dropped later.
#[derive(Debug, Default)]
struct Removed {
    chunks: Vec<Arc<Vec<Entry>>>,
    contexts: Vec<Context>,
}

/// Aligned so that no two shards share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Alone<T>(T);

impl Default for History {
    fn default() -> Self {
        Self {
            mode: AtomicU8::new(0),
            skipped: AtomicU64::new(0),
            entries_max: AtomicUsize::new(usize::MAX),
            chunks: AtomicUsize::new(0),
            dropped: AtomicU64::new(0),
            filled: AtomicU64::new(0),
            shards: (0..SHARDS).map(|_| Alone::default()).collect(),
            oldest: (0..SHARDS).map(|_| AtomicU64::new(u64::MAX)).collect(),
            removed: Mutex::default(),
            any_removed: AtomicBool::new(false),
            has_contexts: AtomicBool::new(false),
            sources: Sources::default(),
            trackers: Trackers::default(),
            annotations: Annotations::default(),
            segment_count: AtomicU64::new(0),
            about: Mutex::default(),
            listeners: Mutex::default(),
            leaks: Leaks::default(),
            late: LateEntries::default(),
        }
    }
}

impl History {
    /// Starts recording, or changes the options of a running recording. Keeps as many of the earlier
    /// entries as the options allow, or none if `options.clear` is set.
    pub fn start(&self, options: &RecordOptions) {
        if options.clear {
            self.clear();
        }
        self.entries_max.store(options.entries_max.max(1), Ordering::Relaxed);
        let bits = options.skip.iter().fold(0, |bits, action| bits | 1_u64 << *action as u64);
        self.skipped.store(bits, Ordering::Relaxed);
        self.gather_from(options.stacks);
        while self.chunks.load(Ordering::Relaxed) > self.chunks_max()
            && self.drop_oldest().is_some()
        {}
        self.release();
    }

    /// Stops recording and drops all entries, as PyTorch does.
    pub fn stop(&self) {
        self.turn(0);
        self.forget_holders();
        self.clear();
    }

    /// Turns recording on at this level of stacks.
    pub(super) fn gather_from(&self, stacks: StackLevel) {
        self.turn(1 + stacks as u8);
        if stacks == StackLevel::Never {
            self.forget_holders();
        }
    }

    /// Drops the contexts of live blocks and segments. While recording is off, frees do not remove
    /// contexts, so these would become stale.
    fn forget_holders(&self) {
        for shard in &self.shards {
            let Shard { blocks, segments, .. } = &mut *shard.0.lock();
            let holders = mem::take(blocks).into_values().chain(mem::take(segments).into_values());
            self.drop_later(None, holders.filter_map(|holder| holder.context));
        }
    }

    fn turn(&self, mode: u8) {
        let mut listeners = self.listeners.lock();
        self.mode.store(mode, Ordering::Release);
        call(&mut listeners, mode != 0);
    }

    /// Adds a listener for later starts and stops, and calls all listeners with the current state.
    pub(crate) fn listen(&self, listener: Weak<dyn Listener>) {
        let mut listeners = self.listeners.lock();
        listeners.push(listener);
        call(&mut listeners, self.is_on());
    }

    /// Drops all entries. Live blocks keep their stacks.
    pub fn clear(&self) {
        for (number, shard) in self.shards.iter().enumerate() {
            let mut shard = shard.0.lock();
            let (full, open) = (mem::take(&mut shard.full), mem::take(&mut shard.open));
            self.is_empty_now(number, &shard);
            let chunks = full.len() + usize::from(open.capacity() > 0);
            self.chunks.fetch_sub(chunks, Ordering::Relaxed);
            drop(shard);
            full.into_iter().for_each(|chunk| self.drop_later(Some(chunk), None));
            self.drop_later(Some(Arc::new(open)), None);
        }
        self.dropped.store(0, Ordering::Relaxed);
        self.annotations.clear();
        self.release();
    }

    /// Sets the device and the configuration that snapshots list.
    pub(crate) fn describe(&self, device: DeviceId, total_bytes: u64, config: &Config) {
        let config = config.clone();
        *self.about.lock() = About { device, total_bytes, config, limit_bytes: None };
    }

    /// Replaces the configuration that snapshots list, after it was changed at run time.
    pub(crate) fn configured(&self, config: &Config) {
        self.about.lock().config = config.clone();
    }

    /// Returns true if recording is on.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.mode.load(Ordering::Relaxed) != 0
    }

    /// Returns the level of stacks that is gathered now.
    #[must_use]
    pub fn stacks(&self) -> StackLevel {
        match self.mode.load(Ordering::Relaxed) {
            0 | 1 => StackLevel::Never,
            2 => StackLevel::OfLiveBlocks,
            3 => StackLevel::OfAllocations,
            _ => StackLevel::OfFrees,
        }
    }

    /// Returns the current entries. Shares full chunks with the recorder and copies the others. Removes
    /// nothing. Threads that record wait while the shards are read.
    #[must_use]
    pub fn entries(&self) -> Entries {
        let shards: Vec<_> = self.shards.iter().map(|shard| shard.0.lock()).collect();
        self.entries_of(&shards)
    }

    fn entries_of(&self, shards: &[MutexGuard<'_, Shard>]) -> Entries {
        let rows = shards.iter().filter(|shard| !shard.full.is_empty() || !shard.open.is_empty());
        let rows = rows.map(|shard| {
            let open = Some(Arc::new(shard.open.clone())).filter(|open| !open.is_empty());
            Row::new(shard.full.iter().cloned().chain(open))
        });
        let entries_max = self.entries_max.load(Ordering::Relaxed);
        Entries::newest(rows.collect(), entries_max, self.dropped.load(Ordering::Relaxed))
    }

    /// Moves the recorded events to `into`, oldest first, and drops the entries.
    pub fn drain_into(&self, into: &mut Vec<Event>) {
        let mut filled = self.filled.load(Ordering::Acquire);
        let (mut taken, mut rows) = (Vec::new(), 0);
        while filled != 0 {
            let number = filled.trailing_zeros() as usize;
            filled &= filled - 1;
            rows += 1;
            let mut shard = self.shards[number].0.lock();
            let full = mem::take(&mut shard.full);
            self.chunks.fetch_sub(full.len(), Ordering::Relaxed);
            taken.extend(full.iter().flat_map(|chunk| chunk.iter().cloned()));
            taken.append(&mut shard.open);
            self.is_empty_now(number, &shard);
            drop(shard);
            // A dropped chunk may drop contexts, which is user code and must run without a lock.
            drop(full);
        }
        if rows > 1 {
            taken.sort_by_key(|entry| entry.moment);
        }
        into.extend(taken.into_iter().map(|entry| entry.event));
    }

    /// Records an event if recording is on, and calls `event` only then. `row` selects the shard.
    /// Events that the caller orders by one lock must have the same `row`.
    #[inline(always)]
    pub(crate) fn record(&self, row: u64, event: impl FnOnce() -> Event) {
        if self.is_on() {
            let event = event();
            self.push(row, Moment::of(event.action), event);
        }
    }

    /// Returns the timestamp of an event that is recorded later, or `None` if recording is off.
    #[inline]
    pub(crate) fn moment(&self) -> Option<Moment> {
        self.is_on().then(Moment::now)
    }

    /// Records an event with an earlier [timestamp](Self::moment). Inserts it before later entries of
    /// the open chunk.
    #[cold]
    pub(crate) fn push(&self, row: u64, moment: Moment, event: Event) {
        self.push_all(row, &[(moment, event)]);
    }

    /// Records several events of one row, in order.
    pub(crate) fn push_all(&self, row: u64, events: &[(Moment, Event)]) {
        let skipped = self.skipped.load(Ordering::Relaxed);
        let context = Context::current();
        let number = shard_of(row);
        let mut shard = self.shards[number].0.lock();
        // The level is read under the shard's lock. `forget_holders` takes this lock after the level
        // was changed, so no context is added after it.
        let stacks = self.stacks();
        for &(moment, ref event) in events {
            if stacks != StackLevel::Never {
                self.hold(&mut shard, moment, event, context.as_ref());
            }
            let is_skipped = skipped & 1_u64 << event.action as u64 != 0;
            if is_skipped && !self.trackers.any() {
                continue;
            }
            let wanted = wants_context(stacks, event.action);
            let context = if wanted { context.clone() } else { None };
            if is_skipped {
                self.trackers.keep(&Entry { event: *event, moment, context });
                continue;
            }
            if context.is_some() {
                self.has_contexts.store(true, Ordering::Relaxed);
            }
            if shard.open.len() == shard.open.capacity() {
                shard = self.grow_open_chunk(number, shard);
            }
            let open = &mut shard.open;
            if open.is_empty() {
                self.filled.fetch_or(1_u64 << number, Ordering::Release);
            }
            let at = match open.last() {
                Some(last) if last.moment > moment => {
                    let at = open.partition_point(|before| before.moment <= moment);
                    open.insert(at, Entry { event: *event, moment, context });
                    at
                }
                // The entry is built in place, because it is larger than a cache line.
                _ => {
                    open.push(Entry { event: *event, moment, context });
                    open.len() - 1
                }
            };
            self.trackers.keep(&open[at]);
        }
    }

    /// Returns true if an operation needs neither a context nor a call of trackers. Both may run user
    /// code, which must not run under a lock. `from` is the level of stacks from which on the operation
    /// gathers one.
    #[inline]
    pub(crate) fn is_plain(&self, from: StackLevel) -> bool {
        self.stacks() < from && self.sources.has_no_labels() && !self.trackers.any()
    }

    /// Opens an operation. Until the result is dropped, consecutive entries of segments share a time.
    pub(crate) fn operation(&self) -> Operation {
        Operation::begin()
    }

    /// Makes room for an entry in the open chunk. If the open chunk is full, moves it to the shard's
    /// list of full chunks. If the limit of chunks is reached, drops the oldest chunk of all shards.
    fn grow_open_chunk<'a>(
        &'a self,
        number: usize,
        mut shard: MutexGuard<'a, Shard>,
    ) -> MutexGuard<'a, Shard> {
        let mut room = None;
        if self.chunks.load(Ordering::Relaxed) >= self.chunks_max() {
            // Only one shard may be locked at a time, and `drop_oldest` locks another one.
            drop(shard);
            room = self.drop_oldest().flatten();
            shard = self.shards[number].0.lock();
        }
        if shard.open.len() == shard.open.capacity() {
            let room = room.unwrap_or_else(|| Vec::with_capacity(CHUNK_ENTRIES));
            let full = mem::replace(&mut shard.open, room);
            self.chunks.fetch_add(1, Ordering::Relaxed);
            if let Some(last) = full.last() {
                if shard.full.is_empty() {
                    self.oldest[number].store(last.moment.time_ns(), Ordering::Relaxed);
                }
                shard.full.push_back(Arc::new(full));
            }
        }
        shard
    }

    fn chunks_max(&self) -> usize {
        let entries_max = self.entries_max.load(Ordering::Relaxed);
        entries_max.div_ceil(CHUNK_ENTRIES).saturating_add(SPARE_CHUNKS)
    }

    /// Drops the full chunk whose last entry is the oldest. Returns `None` if there is no full chunk.
    /// Otherwise returns the chunk's memory for reuse, or `Some(None)` if it cannot be reused.
    fn drop_oldest(&self) -> Option<Option<Vec<Entry>>> {
        let times = self.oldest.iter().map(|time| time.load(Ordering::Relaxed)).enumerate();
        let (number, _) =
            times.filter(|(_, time)| *time != u64::MAX).min_by_key(|(_, time)| *time)?;
        let mut room = None;
        let mut shard = self.shards[number].0.lock();
        if let Some(chunk) = shard.full.pop_front() {
            self.chunks.fetch_sub(1, Ordering::Relaxed);
            self.dropped.fetch_add(chunk.len() as u64, Ordering::Relaxed);
            match self.has_contexts.load(Ordering::Relaxed) {
                true => self.drop_later(Some(chunk), None),
                false => room = Arc::try_unwrap(chunk).ok(),
            }
        }
        self.update_oldest(number, &shard);
        drop(shard);
        room.iter_mut().for_each(Vec::clear);
        Some(room)
    }

    fn update_oldest(&self, number: usize, shard: &Shard) {
        let last = shard.full.front().and_then(|chunk| chunk.last());
        self.oldest[number]
            .store(last.map_or(u64::MAX, |last| last.moment.time_ns()), Ordering::Relaxed);
    }

    fn is_empty_now(&self, number: usize, shard: &Shard) {
        self.update_oldest(number, shard);
        self.filled.fetch_and(!(1_u64 << number), Ordering::Relaxed);
    }

    /// Updates the contexts of live blocks and segments after an event.
    fn hold(&self, shard: &mut Shard, moment: Moment, event: &Event, context: Option<&Context>) {
        let Event { action, address, size_bytes, .. } = *event;
        let Shard { blocks, segments, .. } = shard;
        let of = match action {
            Action::Alloc | Action::FreeCompleted => blocks,
            Action::SegmentAlloc
            | Action::SegmentFree
            | Action::SegmentMap
            | Action::SegmentUnmap => segments,
            _ => return,
        };
        let removed = match action {
            Action::Alloc | Action::SegmentAlloc | Action::SegmentMap => {
                let context = context.cloned();
                of.insert(address, Holder { moment, size_bytes, context })
            }
            // The address was allocated again after this event, so the newer context stays.
            _ if of.get(&address).is_some_and(|holder| holder.moment > moment) => None,
            _ => of.remove(&address),
        };
        self.drop_later(None, removed.and_then(|holder| holder.context));
    }

    /// Stores references to a chunk and to contexts, which may be the last ones. `release` drops them
    /// when no lock is held.
    fn drop_later(
        &self,
        chunk: Option<Arc<Vec<Entry>>>,
        contexts: impl IntoIterator<Item = Context>,
    ) {
        let mut contexts = contexts.into_iter().peekable();
        if chunk.is_none() && contexts.peek().is_none() {
            return;
        }
        let mut removed = self.removed.lock();
        removed.chunks.extend(chunk);
        removed.contexts.extend(contexts);
        self.any_removed.store(true, Ordering::Release);
    }

    /// Drops what [`drop_later`](Self::drop_later) stored. Holds no lock while it drops contexts, which
    /// runs user code.
    #[inline]
    pub(crate) fn release(&self) {
        if !self.any_removed.load(Ordering::Acquire) {
            return;
        }
        let removed = {
            let mut removed = self.removed.lock();
            self.any_removed.store(false, Ordering::Relaxed);
            mem::take(&mut *removed)
        };
        drop(removed);
    }

    /// Gathers the context of a request. Entries of this thread have the context until the result is
    /// dropped. Holds no lock.
    #[inline]
    pub(crate) fn of_request(&self) -> Option<Gathered<'_>> {
        Gathered::new(self, StackLevel::OfLiveBlocks)
    }

    /// Gathers the context of a free or of another operation that releases memory.
    #[inline]
    pub(crate) fn of_free(&self) -> Option<Gathered<'_>> {
        Gathered::new(self, StackLevel::OfFrees)
    }

    /// Returns the contexts of live blocks, in no order. Returns none if stacks are not gathered.
    pub(super) fn live_blocks(&self) -> Vec<Holder> {
        let of = |shard: &Alone<Mutex<Shard>>| -> Vec<Holder> {
            shard.0.lock().blocks.values().cloned().collect()
        };
        self.shards.iter().flat_map(of).collect()
    }

    /// Returns the context of the live block at `address`, if stacks are gathered.
    #[doc(hidden)]
    pub fn context_of_block(&self, address: u64) -> Option<Context> {
        self.shards.iter().find_map(|shard| shard.0.lock().blocks.get(&address).cloned())?.context
    }

    /// Replaces the context of each live block by the result of `named` for it, and drops the contexts
    /// of segments. Holds no lock while it calls `named`.
    pub(super) fn rename_holders(&self, mut named: impl FnMut(&Context) -> Context) {
        for shard in &self.shards {
            let held =
                |(at, holder): (&u64, &Holder)| Some((*at, holder.moment, holder.context.clone()?));
            let held: Vec<_> = shard.0.lock().blocks.iter().filter_map(held).collect();
            let renamed: Vec<_> =
                held.iter().map(|(at, moment, context)| (*at, *moment, named(context))).collect();
            let Shard { blocks, segments, .. } = &mut *shard.0.lock();
            for (at, moment, context) in renamed {
                if let Some(holder) = blocks.get_mut(&at).filter(|now| now.moment == moment) {
                    self.drop_later(None, holder.context.replace(context));
                }
            }
            let segments = mem::take(segments).into_values();
            self.drop_later(None, segments.filter_map(|holder| holder.context));
        }
        self.release();
    }

    pub(super) fn about(&self) -> About {
        self.about.lock().clone()
    }

    /// Returns all entries, and the contexts of live blocks and segments.
    pub(crate) fn capture(&self) -> Captured {
        let shards: Vec<_> = self.shards.iter().map(|shard| shard.0.lock()).collect();
        let entries = self.entries_of(&shards);
        let all = |of: fn(&Shard) -> &HashMap<u64, Holder>| {
            shards
                .iter()
                .flat_map(|s| of(s).iter().map(|(at, holder)| (*at, holder.clone())))
                .collect()
        };
        Captured {
            about: self.about.lock().clone(),
            entries,
            annotations: self.annotations.all(),
            blocks: all(|shard| &shard.blocks),
            segments: all(|shard| &shard.segments),
        }
    }
}

/// Returns true if, at this level of stacks, entries of the action get the context of their operation.
pub(super) fn wants_context(stacks: StackLevel, action: Action) -> bool {
    match stacks {
        // At the level `Never` a context has no stack, only names and metadata.
        StackLevel::Never | StackLevel::OfFrees => true,
        StackLevel::OfLiveBlocks => false,
        StackLevel::OfAllocations => !action.is_release(),
    }
}

/// Returns the shard of a row. A row is the number of a heap or a stream handle. Mixes in higher bits,
/// because stream handles are addresses, whose low bits are equal.
fn shard_of(row: u64) -> usize {
    let mixed = row ^ row >> 6 ^ row >> 12 ^ row >> 18;
    let [low, ..] = mixed.to_le_bytes();
    usize::from(low) % SHARDS
}

/// Entries and contexts at one moment.
pub(crate) struct Captured {
    pub(super) about: About,
    pub(super) entries: Entries,
    pub(super) annotations: Vec<Annotation>,
    pub(super) blocks: HashMap<u64, Holder>,
    pub(super) segments: HashMap<u64, Holder>,
}
