//! Traces of PyTorch's profiler with `profile_memory=True`, in the format of Chrome's traces.
//!
//! Each allocation and each free of the caching allocator is an instant event `[memory]`, with the address,
//! the bytes (negative for a free) and the allocator's totals after it. With `with_stack=True` the calls of
//! Python functions are events with a duration; those that enclose a request on its thread are its stack. The
//! file has no streams, no segments and no requested sizes, so it is a log of requests of rounded sizes.
//!
//! `events` parses the file, `stacks` finds the calls that enclose a request, and this module builds the
//! trace of one device.
//!
//! Source of the format: `torch/csrc/profiler` (the metadata of `ExtraFields<EventType::Allocation>`), and
//! Kineto's `output_json.cpp`.

mod events;
mod stacks;

use std::collections::{BTreeMap, HashMap, HashSet};

use self::events::{MemoryEvent, ProfileEvents};
use super::Limits;
use super::budget::OverBudget;
use super::error::{Failure, Foreign, Mismatch};
use super::input::Input;
use super::interpret::DEVICES_MAX;
use crate::devices::DeviceFigures;
use crate::totals::{Totals, TotalsSource};
use crate::{Trace, TraceEvent};
use stratalloc::history::{Action, BlockLayout, BlockStateName, SegmentLayout};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::size::{MIB, PoolKind, align_up};

/// The most host memory that the tables of live and freed blocks take for each event.
const TABLE_BYTES_PER_EVENT: u64 = 128;
/// The most events of a trace for one of the file: a free and a request of what other threads hold, a free
/// that was not recorded, and the event itself.
const EVENTS_MAX: usize = 6;
/// Blocks of which only the sum is known lie at most here.
const ADDRESS_MAX: u64 = 1 << 62;

/// Reads a trace to its end.
pub(super) fn parse(mut input: Input<'_>, limits: &Limits) -> Result<Trace, Failure> {
    let mut found = ProfileEvents::parse(&mut input)?;
    let at = input.offset();
    drop(input);
    found.budget.decoded_and_dropped(at);
    let (devices, device) = devices_of(&found, limits)?;
    let too_large = |error: OverBudget| Failure::Json {
        at,
        path: "traceEvents".to_owned(),
        problem: error.to_string(),
    };
    built(found, devices, device).map_err(too_large)
}

/// Returns the figures of all devices, in the order in which they are compared, and the number of the one to
/// read.
fn devices_of(
    found: &ProfileEvents,
    limits: &Limits,
) -> Result<(Vec<DeviceFigures>, u32), Failure> {
    if found.memory.is_empty() {
        let foreign = match found.without_address {
            0 => Foreign::ProfileWithoutMemory,
            _ => Foreign::ProfileWithoutAddresses,
        };
        return Err(Failure::Foreign { foreign });
    }
    let mut devices: BTreeMap<u32, DeviceFigures> = BTreeMap::new();
    for event in &found.memory {
        let figures = devices.entry(event.device).or_default();
        figures.device = event.device;
        figures.events += 1;
        let peaks = [&mut figures.reserved_peak_bytes, &mut figures.live_peak_bytes];
        for (peak, bytes) in peaks.into_iter().zip([event.reserved_bytes, event.allocated_bytes]) {
            *peak = bytes.unwrap_or_default().max(*peak);
        }
        if event.is_failure {
            #[expect(clippy::cast_sign_loss, clippy::cast_possible_truncation, reason = "a time")]
            let time_us = event.time_us as u64;
            let first = figures.first_failure_us.unwrap_or(u64::MAX).min(time_us);
            (figures.first_failure_us, figures.failures) = (Some(first), figures.failures + 1);
        }
    }
    let mut devices: Vec<DeviceFigures> = devices.into_values().collect();
    devices.sort_by_key(DeviceFigures::order);
    let first = devices.first().map(|figures| figures.device);
    let number = limits.device.or(first).unwrap_or_default();
    if devices.iter().all(|figures| figures.device != number) {
        let found = format!("events of {} other devices", devices.len());
        let mismatch = Mismatch::new("events of the requested device", found);
        return Err(Failure::Content { path: "traceEvents".to_owned(), mismatch });
    }
    devices.truncate(if devices.len() > 1 && limits.device.is_none() { DEVICES_MAX } else { 0 });
    Ok((devices, number))
}

/// Builds the trace of one device.
fn built(
    mut found: ProfileEvents,
    devices: Vec<DeviceFigures>,
    device: u32,
) -> Result<Trace, OverBudget> {
    found.memory.retain(|event| event.device == device);
    found.find_stacks()?;
    let ProfileEvents { mut budget, mut memory, stacks, has_call_lines, .. } = found;
    // Events of several threads are not in order. Events at one time stay in the order of the file.
    memory.sort_by(|one, other| one.time_us.total_cmp(&other.time_us));
    budget.charge((memory.len() as u64).saturating_mul(TABLE_BYTES_PER_EVENT))?;
    let unseen = Unseen::of(&memory);
    let mut log = RequestLog::default();
    for event in &memory {
        budget.reserve(&mut log.events, EVENTS_MAX)?;
        log.add(event, &unseen);
    }
    let totals = totals(&memory, &unseen, log.most_others_bytes);
    let totals = Totals { has_call_lines, ..totals };
    let lasting =
        (unseen.lasting_bytes > 0).then(|| one_block(unseen.address, unseen.lasting_bytes));
    Ok(Trace {
        events: log.events,
        segments: lasting.into_iter().collect(),
        device,
        devices,
        requests_only: true,
        stacks: stacks.finish(),
        entries: memory.len() as u64,
        totals: Some(totals),
        ..Trace::default()
    })
}

/// The blocks whose requests are recorded, while the events are read in order.
#[derive(Default)]
struct RecordedBlocks {
    /// The bytes of each live block, by its address.
    live: HashMap<u64, u64>,
    live_bytes: u64,
    /// The addresses of blocks that were freed without a recorded request.
    freed_before: HashSet<u64>,
    freed_before_bytes: u64,
}

/// The meaning of an event.
enum Change {
    /// A request. If a live block had this address, its free was not recorded.
    Request {
        freed_bytes: Option<u64>,
    },
    Free,
    /// A request that failed, or a free of a block that is free.
    None,
}

impl RecordedBlocks {
    fn see(&mut self, event: &MemoryEvent) -> Change {
        let bytes = event.bytes.unsigned_abs();
        if event.is_failure {
            return Change::None;
        }
        if event.bytes > 0 {
            let freed_bytes = self.live.insert(event.address, bytes);
            self.live_bytes =
                self.live_bytes.saturating_sub(freed_bytes.unwrap_or(0)).saturating_add(bytes);
            return Change::Request { freed_bytes };
        }
        if let Some(bytes) = self.live.remove(&event.address) {
            self.live_bytes = self.live_bytes.saturating_sub(bytes);
            return Change::Free;
        }
        if self.freed_before.insert(event.address) {
            self.freed_before_bytes = self.freed_before_bytes.saturating_add(bytes);
            return Change::Free;
        }
        Change::None
    }

    /// Returns the allocated bytes that no recorded request and no recorded free explains, if the blocks from
    /// before the trace that it frees are not subtracted. `allocated_bytes` is the allocator's counter.
    fn unexplained(&self, allocated_bytes: u64) -> i128 {
        i128::from(allocated_bytes) - i128::from(self.live_bytes)
            + i128::from(self.freed_before_bytes)
    }
}

/// The blocks without a recorded request and a recorded free. The allocator's counter shows their sum.
struct Unseen {
    /// An address above all recorded ones.
    address: u64,
    /// The bytes of the blocks from before the trace that it frees.
    freed_before_bytes: u64,
    /// The bytes before the first event.
    before_bytes: Option<u64>,
    /// The bytes that are unexplained at every moment: those of blocks that outlive the trace.
    lasting_bytes: u64,
}

impl Unseen {
    fn of(memory: &[MemoryEvent]) -> Self {
        let ends = memory.iter().map(|e| e.address.saturating_add(e.bytes.unsigned_abs()));
        let end = ends.max().unwrap_or(0).min(ADDRESS_MAX);
        let before_bytes = memory.first().and_then(|event| {
            let change = if event.is_failure { 0 } else { i128::from(event.bytes) };
            u64::try_from(i128::from(event.allocated_bytes?) - change).ok()
        });
        let mut blocks = RecordedBlocks::default();
        let mut least = before_bytes.map(i128::from);
        for event in memory {
            blocks.see(event);
            if let Some(bytes) = event.allocated_bytes {
                let bytes = blocks.unexplained(bytes);
                least = Some(least.map_or(bytes, |least| least.min(bytes)));
            }
        }
        let freed_before_bytes = blocks.freed_before_bytes;
        let lasting = least.unwrap_or(0) - i128::from(freed_before_bytes);
        let lasting_bytes = u64::try_from(lasting.max(0)).unwrap_or(0);
        Self { address: align_up(end, 2 * MIB), freed_before_bytes, before_bytes, lasting_bytes }
    }
}

/// The requests and frees of one device, in order.
#[derive(Default)]
struct RequestLog {
    events: Vec<TraceEvent>,
    blocks: RecordedBlocks,
    /// The bytes of the block that stands for those of threads that are not recorded.
    others_bytes: u64,
    most_others_bytes: u64,
}

impl RequestLog {
    fn add(&mut self, event: &MemoryEvent, unseen: &Unseen) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
        let time_us = event.time_us as u64;
        let of = |action, address, size_bytes| TraceEvent {
            time_us,
            ..TraceEvent::new(action, address, size_bytes, StreamId::DEFAULT)
        };
        let (address, bytes, stack) = (event.address, event.bytes.unsigned_abs(), event.stack);
        let change = self.blocks.see(event);
        if let Some(allocated_bytes) = event.allocated_bytes {
            let others = self.blocks.unexplained(allocated_bytes)
                - i128::from(unseen.freed_before_bytes)
                - i128::from(unseen.lasting_bytes);
            let others_bytes = u64::try_from(others.max(0)).unwrap_or(0);
            let place = unseen.address.saturating_add(unseen.lasting_bytes);
            let before_bytes = std::mem::replace(&mut self.others_bytes, others_bytes);
            if before_bytes != others_bytes {
                self.most_others_bytes = self.most_others_bytes.max(others_bytes);
                if before_bytes > 0 {
                    self.free(&of(Action::FreeRequested, place, before_bytes));
                }
                if others_bytes > 0 {
                    self.events.push(of(Action::Alloc, place, others_bytes));
                }
            }
        }
        match change {
            Change::Request { freed_bytes } => {
                if let Some(bytes) = freed_bytes {
                    self.free(&of(Action::FreeRequested, address, bytes));
                }
                self.events.push(TraceEvent { stack, ..of(Action::Alloc, address, bytes) });
            }
            Change::Free => self.free(&of(Action::FreeRequested, address, bytes)),
            // The device's free bytes are not recorded.
            Change::None if event.is_failure => {
                self.events.push(TraceEvent { stack, ..of(Action::OutOfMemory, 0, bytes) });
            }
            Change::None => {}
        }
    }

    fn free(&mut self, requested: &TraceEvent) {
        self.events
            .extend([*requested, TraceEvent { action: Action::FreeCompleted, ..*requested }]);
    }
}

/// Returns the figures of the allocator's own counters.
fn totals(memory: &[MemoryEvent], unseen: &Unseen, most_others_bytes: u64) -> Totals {
    let peak = |of: fn(&MemoryEvent) -> Option<u64>| memory.iter().filter_map(of).max();
    let last = |of: fn(&MemoryEvent) -> Option<u64>| memory.iter().rev().find_map(of);
    let has_counters = unseen.before_bytes.is_some();
    Totals {
        entries: memory.len() as u64,
        peak_allocated_bytes: peak(|event| event.allocated_bytes).max(unseen.before_bytes),
        end_allocated_bytes: last(|event| event.allocated_bytes),
        peak_reserved_bytes: peak(|event| event.reserved_bytes),
        end_reserved_bytes: last(|event| event.reserved_bytes),
        failures: Some(memory.iter().filter(|event| event.is_failure).count() as u64),
        unrecorded_bytes: has_counters.then_some(unseen.lasting_bytes),
        other_threads_bytes: has_counters.then_some(most_others_bytes),
        ..Totals::of(TotalsSource::ProfilerTrace)
    }
}

/// Returns a segment with one live block. It stands for blocks of which only the sum is known.
fn one_block(address: u64, bytes: u64) -> SegmentLayout {
    let state = BlockStateName::ActiveAllocated;
    SegmentLayout {
        address,
        size_bytes: bytes,
        stream: StreamId::DEFAULT,
        kind: PoolKind::of_segment(bytes),
        pool: PoolId::DEFAULT,
        expandable: false,
        asleep: false,
        blocks: vec![BlockLayout { address, size_bytes: bytes, requested_bytes: bytes, state }],
    }
}
