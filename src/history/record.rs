//! Keeps the newest entries while somebody wants them.
//!
//! Entries lie in 64 **shards**, each with its own lock. What one heap of the engine does goes to one shard,
//! under the heap's lock, so threads on different heaps do not meet. Every entry has a time in nanoseconds
//! that rises on each thread; readers merge the shards by it. A shard is a row of chunks: full ones never
//! change, so a reader takes them without a copy. All shards share one budget of chunks. When it is spent,
//! the full chunk whose last entry is the oldest of all makes room: there are 128 chunks more than the most
//! entries fill, so the newest entries are always there, however unevenly heaps work.

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
/// Chunks beyond what the most entries fill: see the [module](self).
const SPARE_CHUNKS: usize = 2 * SHARDS;

/// Told when recording starts and stops.
pub(crate) trait Listener: Send + Sync {
    /// Whether it is on from now on.
    fn records(&self, on: bool);
}

/// Calls those listeners that live, and forgets the others.
fn call(listeners: &mut Vec<Weak<dyn Listener>>, on: bool) {
    listeners
        .retain(|listener| listener.upgrade().inspect(|listener| listener.records(on)).is_some());
}

/// Who holds a block or a segment, as long as stacks are gathered.
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
    /// Live blocks and memory of the driver by address.
    blocks: HashMap<u64, Holder>,
    segments: HashMap<u64, Holder>,
}

/// The history of one device's memory. Off at first.
///
/// It outlives the strategy that writes it: what a [switch](crate::switch) puts in force goes on with it.
#[derive(Debug)]
pub struct History {
    /// 0 when off, else 1 and the level of [`StackLevel`].
    mode: AtomicU8,
    /// Bits of actions that are not recorded.
    skipped: AtomicU64,
    entries_max: AtomicUsize,
    chunks: AtomicUsize,
    dropped: AtomicU64,
    /// Shards that have entries, as bits.
    filled: AtomicU64,
    shards: Box<[Alone<Mutex<Shard>>]>,
    /// When the last entry of the first full chunk of each shard happened.
    oldest: Box<[AtomicU64]>,
    /// What may hold the last references to contexts. Those are dropped where no lock is held.
    gone: Mutex<Gone>,
    any_gone: AtomicBool,
    /// Whether any entry ever had a context: until then none must be released.
    has_contexts: AtomicBool,
    pub(super) sources: Sources,
    pub(super) trackers: Trackers,
    pub(super) annotations: Annotations,
    /// How many segments were numbered.
    pub(super) segment_count: AtomicU64,
    about: Mutex<About>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
    pub(super) leaks: Leaks,
    pub(super) late: LateEntries,
}

/// What was dropped under a lock.
#[derive(Debug, Default)]
struct Gone {
    chunks: Vec<Arc<Vec<Entry>>>,
    contexts: Vec<Context>,
}

/// On cache lines of its own.
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
            gone: Mutex::default(),
            any_gone: AtomicBool::new(false),
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
    /// Starts recording, or goes on with other options. Entries recorded before are kept, as far as there
    /// is room, unless the options say otherwise.
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

    /// Stops recording and forgets, as PyTorch does.
    pub fn stop(&self) {
        self.turn(0);
        self.forget_holders();
        self.clear();
    }

    /// Gathers stacks of this level from now on. Turns the history on.
    pub(super) fn gather_from(&self, stacks: StackLevel) {
        self.turn(1 + stacks as u8);
        if stacks == StackLevel::Never {
            self.forget_holders();
        }
    }

    /// Nobody strikes holders off any more: they would go stale.
    fn forget_holders(&self) {
        for shard in &self.shards {
            let Shard { blocks, segments, .. } = &mut *shard.0.lock();
            let holders = mem::take(blocks).into_values().chain(mem::take(segments).into_values());
            self.bury(None, holders.filter_map(|holder| holder.context));
        }
    }

    fn turn(&self, mode: u8) {
        let mut listeners = self.listeners.lock();
        self.mode.store(mode, Ordering::Release);
        call(&mut listeners, mode != 0);
    }

    /// Tells a listener whether recording is on, now and whenever that changes.
    pub(crate) fn listen(&self, listener: Weak<dyn Listener>) {
        let mut listeners = self.listeners.lock();
        listeners.push(listener);
        call(&mut listeners, self.is_on());
    }

    /// Forgets all entries. Live blocks keep their stacks.
    pub fn clear(&self) {
        for (number, shard) in self.shards.iter().enumerate() {
            let mut shard = shard.0.lock();
            let (full, open) = (mem::take(&mut shard.full), mem::take(&mut shard.open));
            self.is_empty_now(number, &shard);
            let chunks = full.len() + usize::from(open.capacity() > 0);
            self.chunks.fetch_sub(chunks, Ordering::Relaxed);
            drop(shard);
            full.into_iter().for_each(|chunk| self.bury(Some(chunk), None));
            self.bury(Some(Arc::new(open)), None);
        }
        self.dropped.store(0, Ordering::Relaxed);
        self.annotations.clear();
        self.release();
    }

    /// Says whose history it is: snapshots tell it.
    pub(crate) fn describe(&self, device: DeviceId, total_bytes: u64, config: &Config) {
        let config = config.clone();
        *self.about.lock() = About { device, total_bytes, config, limit_bytes: None };
    }

    /// Says that another configuration is in force.
    pub(crate) fn configured(&self, config: &Config) {
        self.about.lock().config = config.clone();
    }

    /// Whether anything is recorded now.
    #[inline]
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.mode.load(Ordering::Relaxed) != 0
    }

    /// Whose stacks are gathered now.
    #[must_use]
    pub fn stacks(&self) -> StackLevel {
        match self.mode.load(Ordering::Relaxed) {
            0 | 1 => StackLevel::Never,
            2 => StackLevel::OfLiveBlocks,
            3 => StackLevel::OfAllocations,
            _ => StackLevel::OfFrees,
        }
    }

    /// What is kept now, as of one moment. Shares full chunks with the recorder and copies the others.
    /// Reading takes nothing away. Writers wait while the rows are gathered.
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

    /// Takes the recorded events into `into`, oldest first, and forgets the entries.
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
            // Contexts go where no lock is held.
            drop(full);
        }
        if rows > 1 {
            taken.sort_by_key(|entry| entry.moment);
        }
        into.extend(taken.into_iter().map(|entry| entry.event));
    }

    /// Adds an event if recording is on. The event is built only then. `row` is the same for all events whose
    /// order a lock of the caller keeps.
    #[inline]
    pub(crate) fn record(&self, row: u64, event: impl FnOnce() -> Event) {
        if self.is_on() {
            let event = event();
            self.push(row, Moment::of(event.action), event);
        }
    }

    /// The moment of an event that is added later, if recording is on.
    #[inline]
    pub(crate) fn moment(&self) -> Option<Moment> {
        self.is_on().then(Moment::now)
    }

    /// Adds an event that happened at a [`moment`](Self::moment). It goes before those of its row that
    /// happened later.
    #[cold]
    pub(crate) fn push(&self, row: u64, moment: Moment, event: Event) {
        self.push_all(row, &[(moment, event)]);
    }

    /// The same for events of one row, in order.
    pub(crate) fn push_all(&self, row: u64, events: &[(Moment, Event)]) {
        let skipped = self.skipped.load(Ordering::Relaxed);
        let context = Context::current();
        let number = shard_of(row);
        let mut shard = self.shards[number].0.lock();
        // Under the lock: whoever forgets holders has changed it before.
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
                shard = self.make_room(number, shard);
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
                // Made where it stays: it is longer than a line of the cache.
                _ => {
                    open.push(Entry { event: *event, moment, context });
                    open.len() - 1
                }
            };
            self.trackers.keep(&open[at]);
        }
    }

    /// Whether entries of which stacks are gathered from a level on need nothing that may be gathered, or
    /// delivered to trackers, under no lock only.
    #[inline]
    pub(crate) fn is_plain(&self, from: StackLevel) -> bool {
        self.stacks() < from && self.sources.is_silent() && !self.trackers.any()
    }

    /// While the answer lives, entries of memory that is taken or given back stand together.
    pub(crate) fn operation(&self) -> Operation {
        Operation::begin()
    }

    /// A chunk with room at the end of the shard: a new one, or after one of all shards' was dropped.
    fn make_room<'a>(
        &'a self,
        number: usize,
        mut shard: MutexGuard<'a, Shard>,
    ) -> MutexGuard<'a, Shard> {
        let mut room = None;
        if self.chunks.load(Ordering::Relaxed) >= self.chunks_max() {
            // Another shard is never locked while this one is.
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

    /// Drops the full chunk whose last entry is the oldest, and gives its room if nobody else needs it. None
    /// when there is no such chunk.
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
                true => self.bury(Some(chunk), None),
                false => room = Arc::try_unwrap(chunk).ok(),
            }
        }
        self.tell_oldest(number, &shard);
        drop(shard);
        room.iter_mut().for_each(Vec::clear);
        Some(room)
    }

    fn tell_oldest(&self, number: usize, shard: &Shard) {
        let last = shard.full.front().and_then(|chunk| chunk.last());
        self.oldest[number]
            .store(last.map_or(u64::MAX, |last| last.moment.time_ns()), Ordering::Relaxed);
    }

    fn is_empty_now(&self, number: usize, shard: &Shard) {
        self.tell_oldest(number, shard);
        self.filled.fetch_and(!(1_u64 << number), Ordering::Relaxed);
    }

    /// Remembers who holds what.
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
        let gone = match action {
            Action::Alloc | Action::SegmentAlloc | Action::SegmentMap => {
                let context = context.cloned();
                of.insert(address, Holder { moment, size_bytes, context })
            }
            // Who got the address since then keeps it.
            _ if of.get(&address).is_some_and(|holder| holder.moment > moment) => None,
            _ => of.remove(&address),
        };
        self.bury(None, gone.and_then(|holder| holder.context));
    }

    /// Keeps what may be the last reference to a context until no lock is held.
    fn bury(&self, chunk: Option<Arc<Vec<Entry>>>, contexts: impl IntoIterator<Item = Context>) {
        let mut contexts = contexts.into_iter().peekable();
        if chunk.is_none() && contexts.peek().is_none() {
            return;
        }
        let mut gone = self.gone.lock();
        gone.chunks.extend(chunk);
        gone.contexts.extend(contexts);
        self.any_gone.store(true, Ordering::Release);
    }

    /// Drops what was [buried](Self::bury). Holds no lock while contexts are released, which is foreign code.
    #[inline]
    pub(crate) fn release(&self) {
        if !self.any_gone.load(Ordering::Acquire) {
            return;
        }
        let gone = {
            let mut gone = self.gone.lock();
            self.any_gone.store(false, Ordering::Relaxed);
            mem::take(&mut *gone)
        };
        drop(gone);
    }

    /// Gathers the context of a request; while the answer lives, what this thread records has it. Holds no
    /// lock.
    #[inline]
    pub(crate) fn of_request(&self) -> Option<Gathered<'_>> {
        Gathered::new(self, StackLevel::OfLiveBlocks)
    }

    /// The same for a free, or whatever else gives memory back.
    #[inline]
    pub(crate) fn of_free(&self) -> Option<Gathered<'_>> {
        Gathered::new(self, StackLevel::OfFrees)
    }

    /// Who holds blocks now, in no order; nobody unless stacks are gathered.
    pub(super) fn live_blocks(&self) -> Vec<Holder> {
        let of = |shard: &Alone<Mutex<Shard>>| -> Vec<Holder> {
            shard.0.lock().blocks.values().cloned().collect()
        };
        self.shards.iter().flat_map(of).collect()
    }

    /// The context of the live block that starts at `address`, where stacks are gathered.
    #[cfg(feature = "ffi")]
    pub(crate) fn context_of_block(&self, address: u64) -> Option<Context> {
        self.shards.iter().find_map(|shard| shard.0.lock().blocks.get(&address).cloned())?.context
    }

    /// Gives those who hold blocks the contexts that `named` makes of theirs, and forgets who holds segments.
    /// Holds no lock while it makes them.
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
                    self.bury(None, holder.context.replace(context));
                }
            }
            let segments = mem::take(segments).into_values();
            self.bury(None, segments.filter_map(|holder| holder.context));
        }
        self.release();
    }

    pub(super) fn about(&self) -> About {
        self.about.lock().clone()
    }

    /// What is kept, and who holds the block or the segment at an address.
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

/// Whether entries of an action get the context of their operation, at this level of stacks.
pub(super) fn wants_context(stacks: StackLevel, action: Action) -> bool {
    match stacks {
        // It has no stack, only names.
        StackLevel::Never | StackLevel::OfFrees => true,
        StackLevel::OfLiveBlocks => false,
        StackLevel::OfAllocations => !action.gives_back(),
    }
}

/// Numbers of heaps follow each other, and raw streams are addresses.
fn shard_of(row: u64) -> usize {
    let mixed = row ^ row >> 6 ^ row >> 12 ^ row >> 18;
    let [low, ..] = mixed.to_le_bytes();
    usize::from(low) % SHARDS
}

/// Entries and holders as of one moment.
pub(crate) struct Captured {
    pub(super) about: About,
    pub(super) entries: Entries,
    pub(super) annotations: Vec<Annotation>,
    pub(super) blocks: HashMap<u64, Holder>,
    pub(super) segments: HashMap<u64, Holder>,
}
