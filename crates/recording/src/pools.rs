//! Finds the pool of each recorded request.
//!
//! Newer recordings contain the pool of each request. Older ones contain pools only in the final layout.
//! There a request gets the pool of the segment that contains its recorded address. Fixed segments that
//! were freed before the end, or allocated before the first event, are taken to belong to the default pool.
//! Expandable segments are found by their reserved address ranges: pages that are mapped outside all known
//! reservations begin a new one.
//!
//! Only the pool is taken from the recorded address. The replay chooses the block in that pool itself.

use std::collections::{BTreeMap, HashMap};

use super::trace::{Trace, TraceEvent};
use stratalloc::history::Action;
use stratalloc::ids::PoolId;

/// Fixed segments and reserved address ranges, and their pools. `see` updates the fixed segments.
#[derive(Debug, Default)]
pub struct PoolRouting {
    /// The pools, other than the default pool, of fixed segments that live to the end, by the index of the
    /// event that allocated the segment.
    lasting: HashMap<usize, PoolId>,
    /// The current fixed segments: the end and the pool of each, by its start.
    segments: BTreeMap<u64, (u64, PoolId)>,
    /// The pool of each reservation of an expandable segment, by the start of the reservation.
    reservations: BTreeMap<u64, PoolId>,
    reserved_bytes: u64,
}

impl PoolRouting {
    /// Finds the pools of a trace. `total_bytes` is the memory of the recorded device. For each expandable
    /// segment, PyTorch reserves nine eighths of that as address space.
    pub fn of(trace: &Trace, total_bytes: u64) -> Self {
        let reserved_bytes = total_bytes.saturating_add(total_bytes / 8);
        let mut routing = Self { reserved_bytes, ..Self::default() };
        let mut last: HashMap<u64, usize> = HashMap::new();
        for (at, event) in trace.events.iter().enumerate() {
            match event.action {
                Action::SegmentAlloc => {
                    last.insert(event.address, at);
                }
                Action::SegmentFree => {
                    last.remove(&event.address);
                }
                Action::SegmentMap if routing.reservation(event.address).is_none() => {
                    routing.reservations.insert(event.address, PoolId::DEFAULT);
                }
                _ => {}
            }
        }
        for segment in trace.segments.iter().filter(|segment| segment.pool != PoolId::DEFAULT) {
            if !segment.expandable {
                if let Some(at) = last.get(&segment.address) {
                    routing.lasting.insert(*at, segment.pool);
                }
            } else if let Some(start) = routing.reservation(segment.address) {
                routing.reservations.insert(start, segment.pool);
            }
        }
        routing
    }

    /// Updates the fixed segments for a segment event, which is event number `at`.
    pub fn see(&mut self, at: usize, event: &TraceEvent) {
        match event.action {
            Action::SegmentAlloc => {
                let pool = self.lasting.get(&at).copied().unwrap_or_default();
                let end = event.address.saturating_add(event.size_bytes);
                self.segments.insert(event.address, (end, pool));
            }
            Action::SegmentFree => {
                self.segments.remove(&event.address);
            }
            _ => {}
        }
    }

    /// Returns the pool of a request; for a failed one without a recorded pool, the default pool.
    pub fn pool_of(&self, request: &TraceEvent) -> PoolId {
        if let Some(named) = request.named_pool() {
            return named;
        }
        match request.action {
            Action::Alloc => self.pool_at(request.address),
            _ => PoolId::DEFAULT,
        }
    }

    /// Returns the pool of the segment or reservation at an address; without one, the default pool.
    pub fn pool_at(&self, address: u64) -> PoolId {
        let segment = self.segments.range(..=address).next_back();
        if let Some((_, (_, pool))) = segment.filter(|(_, (end, _))| address < *end) {
            return *pool;
        }
        let start = self.reservation(address);
        start.map_or(PoolId::DEFAULT, |start| self.reservations[&start])
    }

    /// Returns the start of the reservation that contains an address, if there is one.
    fn reservation(&self, address: u64) -> Option<u64> {
        let (start, _) = self.reservations.range(..=address).next_back()?;
        (address - start < self.reserved_bytes).then_some(*start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::history::SegmentLayout;
    use stratalloc::ids::StreamId;
    use stratalloc::size::{MIB, PoolKind};

    fn event(action: Action, address: u64, size_bytes: u64) -> TraceEvent {
        TraceEvent::new(action, address, size_bytes, StreamId(0))
    }

    fn segment(address: u64, pool: PoolId, expandable: bool) -> SegmentLayout {
        SegmentLayout {
            address,
            size_bytes: 2 * MIB,
            stream: StreamId(0),
            kind: PoolKind::Small,
            pool,
            expandable,
            asleep: false,
            blocks: Vec::new(),
        }
    }

    #[test]
    fn a_segment_that_was_freed_belonged_to_the_default_pool() {
        let pool = PoolId { capture: 3, user: 0 };
        let trace = Trace {
            events: vec![
                event(Action::SegmentAlloc, 0x1000_0000, 2 * MIB),
                event(Action::Alloc, 0x1000_0200, 512),
                event(Action::SegmentFree, 0x1000_0000, 2 * MIB),
                event(Action::SegmentAlloc, 0x1000_0000, 2 * MIB),
                event(Action::Alloc, 0x1000_0200, 512),
            ],
            segments: vec![segment(0x1000_0000, pool, false)],
            ..Trace::default()
        };
        let mut routing = PoolRouting::of(&trace, 1 << 37);
        let pools: Vec<_> = (0..)
            .zip(&trace.events)
            .filter_map(|(at, event)| {
                routing.see(at, event);
                (event.action == Action::Alloc).then(|| routing.pool_of(event))
            })
            .collect();
        assert_eq!(pools, [PoolId::DEFAULT, pool]);
    }

    #[test]
    fn pages_belong_to_the_pool_of_their_reservation() {
        let pool = PoolId { capture: 0, user: 9 };
        let far = 1 << 40;
        let trace = Trace {
            events: vec![
                event(Action::SegmentMap, 0x1000_0000, 2 * MIB),
                event(Action::SegmentMap, far, 2 * MIB),
            ],
            segments: vec![segment(0x1000_0000, PoolId::DEFAULT, true), segment(far, pool, true)],
            ..Trace::default()
        };
        let routing = PoolRouting::of(&trace, 1 << 37);
        assert_eq!(routing.pool_of(&event(Action::Alloc, 0x1000_0200, 1)), PoolId::DEFAULT);
        assert_eq!(routing.pool_of(&event(Action::Alloc, far + 6 * MIB, 1)), pool);
        assert_eq!(routing.pool_of(&event(Action::OutOfMemory, far, 1)), PoolId::DEFAULT);
    }
}
