//! A recording in memory: the events of one device, the final layout and the settings.
//!
//! The readers build and check a [`Trace`], for any encoding. Addresses and sizes are in bytes.

use std::convert::Infallible;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::Serialize;

use super::devices::DeviceFigures;
use super::evidence::MissingEntries;
use super::host::HostMemory;
use super::log::Log;
use super::stacks::{StackId, Stacks};
use super::totals::Totals;
use stratalloc::config::{Compat, Config, TorchVersion};
use stratalloc::history::{Action, Entry, Event, SegmentLayout, Snapshot};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::PoolKind;

/// One recording.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// The events of one device, in the order in which the allocator recorded them.
    pub events: Vec<TraceEvent>,
    /// The segments at the end of the recording, in address order.
    pub segments: Vec<SegmentLayout>,
    /// The configuration string at the time of the recording.
    pub conf: String,
    /// Whether `expandable_segments:True` was removed from the configuration, because PyTorch ignored it.
    pub ignores_expandable: bool,
    /// The device whose events these are.
    pub device: u32,
    /// All devices of the recording with events or memory, the one to look at first first; empty if there is
    /// one only, or if the reader was limited to one. The other data is that of `device` alone.
    pub devices: Vec<DeviceFigures>,
    /// The requests of a log in RMM's format, instead of events.
    pub log: Option<Arc<Log>>,
    /// Whether the recording is a log of requests, without an allocator's decisions.
    pub requests_only: bool,
    /// The stacks that events and blocks refer to.
    pub stacks: Stacks,
    /// The stacks of the requests for the live blocks in `segments`, in address order. Without blocks whose
    /// stack the file does not contain.
    pub block_stacks: Vec<BlockStack>,
    /// What only this library's snapshots contain, if it wrote the snapshot.
    pub made_here: Option<MadeHere>,
    /// The number of entries of the device in the file, including those that are not events.
    pub entries: u64,
    /// The largest number of entries of another device in the file.
    pub entries_elsewhere: u64,
    /// The entries that the file does not contain, as PyTorch's `skip_actions` leaves them out. Those that
    /// follow from others are among the events.
    pub missing: MissingEntries,
    /// Entries whose action is unknown. They are not among the events.
    pub unknown: UnknownEntries,
    /// The oldest version of PyTorch whose snapshots have this one's keys, if the keys show it.
    pub torch: Option<TorchVersion>,
    /// Texts that the program attached to blocks, in order.
    pub annotations: Vec<Annotation>,
    /// Moments that the program or a profiler marked, in order.
    pub marks: Vec<Mark>,
    /// Pinned host memory, if the recording contains it.
    pub host: Option<HostMemory>,
    /// The owners of the used memory of the device at the end, if the recording contains them.
    pub account: Vec<Owner>,
    /// Figures that the file states itself, if it is not a snapshot.
    pub totals: Option<Totals>,
}

/// The stack of the request for a live block at the end of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStack {
    /// The block's address.
    pub address: u64,
    /// The stack.
    pub stack: StackId,
}

/// A part of the used memory of a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Owner {
    /// The allocator, a library, or a process.
    pub owner: String,
    /// What the memory is used for.
    pub kind: String,
    /// The number of bytes. That of an unknown owner is negative if other rows overlap.
    pub bytes: i64,
    /// The way in which the bytes were found.
    pub found_by: String,
}

/// A text that a program attached to a live block, as `torch.cuda.memory._annotate_tensor` does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Annotation {
    /// The number of events before the annotation in the recording.
    pub events_before: u32,
    /// The address of the block.
    pub address: u64,
    /// The recorded size, in bytes.
    pub size_bytes: u64,
    /// The text, cut to 80 characters.
    pub text: String,
}

/// A moment at which the program set another text for its requests
/// (`torch.cuda.memory._set_memory_metadata`), or at which a range of a profiler began (`record_function`,
/// with `global_record_annotations=True`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The number of events before it.
    pub events_before: u32,
    /// The text, cut to 80 characters.
    pub text: String,
}

/// Entries whose action is unknown, as in files of newer PyTorch versions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnknownEntries {
    /// The number of entries.
    pub entries: u64,
    /// The action of the first such entry, cut to 80 characters.
    pub first_action: String,
}

impl UnknownEntries {
    pub(super) fn count(&mut self, action: String) {
        if self.entries == 0 {
            self.first_action = action;
        }
        self.entries += 1;
    }
}

/// Returns true for an entry that a replay ignores. A tag that sleeps keeps its blocks and addresses, so a
/// pause or a resume changes no decision that is replayed.
pub(super) fn is_remark(action: Action) -> bool {
    matches!(action, Action::Snapshot | Action::TagPause | Action::TagResume)
}

impl Trace {
    /// Returns the number of requests and frees.
    #[must_use]
    pub fn operations(&self) -> usize {
        let is_operation = |event: &TraceEvent| {
            matches!(event.action, Action::Alloc | Action::FreeRequested | Action::OutOfMemory)
        };
        self.each_event().filter(is_operation).count()
    }

    /// Returns all events in order. Those of a log have no addresses.
    pub fn each_event(&self) -> impl Iterator<Item = TraceEvent> + '_ {
        let logged = self.log.iter().flat_map(|log| log.events());
        self.events.iter().copied().chain(logged)
    }

    /// Returns the number of events.
    #[must_use]
    pub fn event_count(&self) -> u64 {
        self.events.len() as u64 + self.log.as_ref().map_or(0, |log| log.event_count())
    }

    /// Builds a trace from a snapshot, without stacks and without entries of snapshots and of tags that were
    /// paused or resumed.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Self {
        let event = |entry: &Entry| {
            let time_us = entry.time_us();
            TraceEvent { time_us, ..entry.event.into() }
        };
        let is_decision = |entry: &&Entry| !is_remark(entry.event.action);
        let decisions = snapshot.entries.iter().filter(is_decision);
        let about = &snapshot.about;
        let mut trace = Self {
            events: decisions.map(event).collect(),
            segments: snapshot.segments.iter().map(|segment| segment.layout.clone()).collect(),
            conf: about.config_text(),
            device: about.device.0,
            made_here: Some(MadeHere {
                limit_bytes: about.limit_bytes,
                total_bytes: Some(about.total_bytes).filter(|bytes| *bytes > 0),
            }),
            entries: snapshot.entries.len() as u64,
            ..Self::default()
        };
        // The host memory of a snapshot of this process is not limited.
        let Ok(()) = MissingEntries::add_frees(&mut trace, |_| Ok::<_, Infallible>(()));
        trace
    }

    /// Returns the stack of the live block at an address at the end, if the file contains it.
    #[must_use]
    pub fn stack_at_end(&self, address: u64) -> Option<StackId> {
        let at = self.block_stacks.binary_search_by_key(&address, |block| block.address).ok()?;
        Some(self.block_stacks[at].stack)
    }

    /// Gives each request without a stack that of its block, if the block is live at the end. `charge` is
    /// called with the host memory for that; nothing changes if it fails.
    pub(super) fn add_stacks_of_blocks<E>(&mut self, charge: impl FnOnce(u64) -> Result<(), E>) {
        let lacks_stack =
            |event: &TraceEvent| event.action == Action::Alloc && event.stack.is_none();
        let is_charged = || charge(self.block_stacks.len() as u64).is_ok();
        if self.block_stacks.is_empty() || !self.events.iter().any(lacks_stack) || !is_charged() {
            return;
        }
        // Only the last entries about an address are about the block that is there at the end.
        let mut is_found = vec![false; self.block_stacks.len()];
        for event in self.events.iter_mut().rev() {
            if !matches!(event.action, Action::Alloc | Action::FreeCompleted) {
                continue;
            }
            let blocks = &self.block_stacks;
            let Ok(at) = blocks.binary_search_by_key(&event.address, |block| block.address) else {
                continue;
            };
            if !std::mem::replace(&mut is_found[at], true) && lacks_stack(event) {
                event.stack = Some(blocks[at].stack);
            }
        }
    }

    /// Returns the entries of requests, successful or not. Those of a log have no addresses.
    pub fn requests(&self) -> impl Iterator<Item = TraceEvent> + '_ {
        let logged = self.log.iter().flat_map(|log| log.requests());
        self.events.iter().filter(|event| event.is_request()).copied().chain(logged)
    }

    /// Returns the configuration with the rules that applied when the recording was made. For PyTorch's
    /// recordings these are the rules of the recording's version, unless `config` names a version. For
    /// recordings of this library, returns `config` unchanged.
    #[must_use]
    pub fn as_recorded(&self, config: Config) -> Config {
        match (self.made_here, config.settings().compat) {
            (Some(_), _) | (_, Compat::Version(_)) => config,
            _ => config.with_compat(Compat::PyTorch),
        }
    }

    /// Returns the version of PyTorch whose allocator made the recording, as far as the file shows it.
    /// Entries contain a pool from 2.12 on. Settings contain `max_round_threshold` from 2.13 on. The
    /// file contains `host_traces` from 2.14 on. Without any of these, returns 2.11.
    #[must_use]
    pub fn torch_version(&self) -> TorchVersion {
        let names_pools = || self.events.iter().any(|event| event.names_pool);
        let least = if names_pools() { TorchVersion::V2_12 } else { TorchVersion::V2_11 };
        self.torch.unwrap_or(least)
    }

    /// Returns the configuration with the recording's version of PyTorch in place of `compat:pytorch`.
    #[must_use]
    pub fn resolved(&self, config: &Config) -> Config {
        let compat = config.settings().compat;
        match compat.or_version(self.torch_version()) {
            same if same == compat => config.clone(),
            named => config.clone().with_compat(named),
        }
    }
}

/// Additional data in snapshots of this library: inputs of its decisions that PyTorch does not record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MadeHere {
    /// The limit on reserved bytes.
    pub limit_bytes: Option<u64>,
    /// The memory of the device.
    pub total_bytes: Option<u64>,
}

/// One entry of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// The kind of event.
    pub action: Action,
    /// The address. For `oom`, the free bytes of the device.
    pub address: u64,
    /// The size in bytes.
    pub size_bytes: u64,
    /// The stream, as a raw handle.
    pub stream: StreamId,
    /// The pool. The default pool if the recording does not contain pools.
    pub pool: PoolId,
    /// Whether the recording contains the pool.
    pub names_pool: bool,
    /// Whether the entry has the label `empty_cache`: an explicit call of `empty_cache` caused it.
    pub empty_cache: bool,
    /// The stack of the caller, if the recording has stacks.
    pub stack: Option<StackId>,
    /// The time in microseconds on the recorded machine's clock; 0 if not recorded.
    pub time_us: u64,
}

impl From<Event> for TraceEvent {
    fn from(event: Event) -> Self {
        let Event { action, address, size_bytes, stream, pool } = event;
        Self { pool, names_pool: true, ..Self::new(action, address, size_bytes, stream) }
    }
}

impl TraceEvent {
    /// Creates an event with default values in all other fields.
    #[must_use]
    pub fn new(action: Action, address: u64, size_bytes: u64, stream: StreamId) -> Self {
        Self {
            action,
            address,
            size_bytes,
            stream,
            pool: PoolId::DEFAULT,
            names_pool: false,
            empty_cache: false,
            stack: None,
            time_us: 0,
        }
    }

    /// Returns the segment or mapped range that a segment event describes, without blocks.
    pub fn in_segment(&self, kind: PoolKind, pool: PoolId, expandable: bool) -> SegmentLayout {
        let Self { address, size_bytes, stream, .. } = *self;
        let (asleep, blocks) = (false, Vec::new());
        SegmentLayout { address, size_bytes, stream, kind, pool, expandable, asleep, blocks }
    }

    /// Returns by how many bytes the event changes the reserved memory.
    pub fn reserved_change(&self) -> i128 {
        let bytes = i128::from(self.size_bytes);
        match self.action {
            Action::SegmentAlloc | Action::SegmentMap => bytes,
            Action::SegmentFree | Action::SegmentUnmap => -bytes,
            _ => 0,
        }
    }

    /// Returns true if the event is a request for memory, successful or not.
    pub fn is_request(&self) -> bool {
        matches!(self.action, Action::Alloc | Action::OutOfMemory)
    }

    /// Returns the pool, if the recording contains it.
    #[must_use]
    pub fn named_pool(&self) -> Option<PoolId> {
        self.names_pool.then_some(self.pool)
    }
}
