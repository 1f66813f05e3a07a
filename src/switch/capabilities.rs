//! The optional capabilities of a switchable allocator: those of the current one.
//!
//! A call about a block or an address goes to the allocator that made the block. A call about all memory
//! (statistics, layout, peaks) goes to all allocators. Settings (a limit, peers, hooks) also apply to later
//! allocators. A capability that only a retired allocator has stays available until that allocator is
//! dropped. Until then, a call of it that goes to the current allocator fails.

use std::cell::RefCell;
use std::sync::Arc;

use super::core::Core;
use super::generation::Generation;
use super::{Switchable, is_unknown, of_maker};
use crate::allocator::{
    Allocation, BaseAllocation, ByteAccess, CacheInfo, Caching, Counters, CrossStream,
    DeviceAllocator, Expandable, ExpandableSegment, HostBytes, Imported, PeerAccess, Recording,
    Sharing,
};
use crate::config::Config;
use crate::error::{DriverError, DriverErrorKind, FractionError, HandleError};
use crate::history::{History, SegmentLayout, Snapshot};
use crate::ids::{DeviceId, StreamId};
use crate::sharing::{SharedHandle, SharingError};
use crate::stats::{PerPool, Statistics};
use crate::strategies::Strategy;

/// Returns the error for a capability that an earlier or retired allocator has, and the current one lacks.
#[cold]
fn lacks(strategy: &Strategy, call: &'static str) -> DriverError {
    let message = format!("backend:{} has no such capability", strategy.name());
    DriverError::new(DriverErrorKind::NotSupported, call, 0, message)
}

fn unknown_block(allocation: &Allocation) -> HandleError {
    HandleError::UnknownAddress { address: allocation.address() }
}

impl Switchable {
    /// Shares a block through the allocator that made it.
    fn share_by(
        &self,
        address: u64,
        share: impl Fn(&dyn Sharing) -> Result<SharedHandle, SharingError>,
    ) -> Result<SharedHandle, SharingError> {
        let found = self.core.call_maker(|strategy| match share(strategy.control().sharing?) {
            Err(SharingError::Handle(reason)) if is_unknown(&reason) => None,
            answer => Some(answer),
        });
        found.unwrap_or(Err(HandleError::UnknownAddress { address }.into()))
    }
}

impl CrossStream for Switchable {
    fn record_stream(&self, allocation: &Allocation, stream: StreamId) -> Result<(), HandleError> {
        let found = self.core.call_maker(|strategy| {
            of_maker(strategy.control().cross_stream?.record_stream(allocation, stream))
        });
        found.unwrap_or_else(|| Err(unknown_block(allocation)))
    }

    /// Returns the answer of the current allocator. `Switchable::record_own_stream` asks the allocator
    /// of the block.
    fn needs_own_stream(&self) -> bool {
        self.core.call(|generation| {
            let streams = generation.strategy.control().cross_stream;
            streams.is_some_and(CrossStream::needs_own_stream)
        })
    }

    fn process_events(&self) -> Result<(), DriverError> {
        let current = self.core.call(Generation::process_events);
        current.and(self.core.drop_drained())
    }
}

impl Caching for Switchable {
    fn empty_cache(&self) -> Result<(), DriverError> {
        let current = self.core.call(Generation::release_idle);
        current.and(self.core.release_idle())
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        let mut state = self.core.state.lock();
        state.limit_bytes = limit_bytes;
        self.core.set_current_limit(&state);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        let mut state = self.core.state.lock();
        let current = self.core.generations.current();
        let caching = current.strategy.control().caching;
        let refused = FractionError { fraction };
        let caching = caching.filter(|_| (0.0..=1.0).contains(&fraction)).ok_or(refused)?;
        caching.set_memory_fraction(fraction)?;
        state.limit_bytes = caching.limit_bytes();
        self.core.set_current_limit(&state);
        Ok(())
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.core.state.lock().limit_bytes
    }

    fn total_bytes(&self) -> Result<u64, DriverError> {
        self.core.call(|generation| match generation.strategy.control().caching {
            Some(caching) => caching.total_bytes(),
            None => Err(lacks(&generation.strategy, "total_bytes")),
        })
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        let mut state = self.core.state.lock();
        let current = self.core.generations.current();
        let caching = current.strategy.control().caching;
        let caching = caching.ok_or_else(|| lacks(&current.strategy, "apply"))?;
        if !state.fits(&current.strategy, config) {
            let message =
                "another backend, other layers or another key that is read once: switch instead";
            return Err(DriverError::new(DriverErrorKind::InvalidValue, "apply", 0, message));
        }
        self.core.apply(&mut state, caching, config.clone(), true)
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.core.call(|generation| match generation.strategy.control().caching {
            Some(caching) => caching.cache_info(),
            None => Err(lacks(&generation.strategy, "cache_info")),
        })
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        let all = self.core.each(|one| one.strategy.control().caching.map(Caching::layout));
        let mut layout: Vec<_> = all.into_iter().flatten().flatten().collect();
        SegmentLayout::sort(&mut layout);
        layout
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let base =
            |strategy: &Strategy| of_maker(strategy.control().caching?.base_allocation(allocation));
        self.core.call_maker(base).unwrap_or_else(|| Err(unknown_block(allocation)))
    }
}

impl HostBytes for Switchable {
    fn access(
        &self,
        allocation: &Allocation,
        address: u64,
        access: &mut ByteAccess<'_>,
    ) -> Result<(), HandleError> {
        let access = RefCell::new(access);
        let found = self.core.call_maker(|strategy| {
            let bytes = strategy.control().host_bytes?;
            of_maker(bytes.access(allocation, address, &mut access.borrow_mut()))
        });
        found.unwrap_or_else(|| Err(unknown_block(allocation)))
    }
}

impl Expandable for Switchable {
    fn expandable_segments(&self) -> Vec<ExpandableSegment> {
        let all = self.core.each(|one| {
            one.strategy.control().expandable.map(|expandable| expandable.expandable_segments())
        });
        let mut all: Vec<_> = all.into_iter().flatten().flatten().collect();
        all.sort_by_key(|segment| segment.address);
        all
    }

    fn set_reserve_class(&self, stream: StreamId, class: Option<&str>) {
        let mut state = self.core.state.lock();
        match class {
            Some(class) => drop(state.classes.insert(stream, class.to_owned())),
            None => drop(state.classes.remove(&stream)),
        }
        if let Some(expandable) = self.core.generations.current().strategy.control().expandable {
            expandable.set_reserve_class(stream, class);
        }
    }
}

impl Counters for Switchable {
    fn statistics(&self) -> Statistics {
        let ledger = self.core.ledger.lock();
        let all = self.core.generations.all();
        let off = |own: &mut Statistics| own.reserved_bytes = PerPool::default();
        let all = Generation::counted_once(&all, Generation::statistics, off);
        ledger.sum(&all.collect::<Vec<_>>())
    }

    fn reset_peaks(&self) {
        let mut ledger = self.core.ledger.lock();
        Core::begin_peaks(&mut ledger, &self.core.generations.all());
    }

    fn reset_accumulated(&self) {
        let mut ledger = self.core.ledger.lock();
        ledger.reset_accumulated();
        let all = self.core.generations.all();
        all.iter().filter_map(|one| one.counters()).for_each(Counters::reset_accumulated);
    }
}

impl PeerAccess for Switchable {
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        let mut state = self.core.state.lock();
        let all = self.core.generations.all();
        let current = &all[0].strategy;
        if current.control().peer_access.is_none() {
            return Err(lacks(current, "enable_peer_access"));
        }
        // The current allocator is called last. So once it has enabled access, every retired allocator
        // that supports peer access has enabled it too.
        for peers in all.iter().rev().filter_map(|one| one.strategy.control().peer_access) {
            peers.enable_peer_access(device)?;
        }
        if !state.peers.contains(&device) {
            state.peers.push(device);
        }
        Ok(())
    }

    fn peers(&self) -> Vec<DeviceId> {
        let peers = |strategy: &Strategy| strategy.control().peer_access.map(PeerAccess::peers);
        self.core.call(|generation| peers(&generation.strategy)).unwrap_or_default()
    }
}

impl Sharing for Switchable {
    fn share(&self, allocation: &Allocation) -> Result<SharedHandle, SharingError> {
        self.share_by(allocation.address(), |sharing| sharing.share(allocation))
    }

    fn share_raw(&self, address: u64) -> Result<SharedHandle, SharingError> {
        self.share_by(address, |sharing| sharing.share_raw(address))
    }

    fn open(&self, handle: &SharedHandle) -> Result<Imported, SharingError> {
        self.core.call(|generation| match generation.strategy.control().sharing {
            Some(sharing) => sharing.open(handle),
            None => Err(lacks(&generation.strategy, "open").into()),
        })
    }
}

impl Recording for Switchable {
    fn history(&self) -> &Arc<History> {
        &self.core.history
    }

    /// Returns the snapshot of the current allocator, with the segments that retired ones held a moment
    /// earlier.
    fn snapshot(&self) -> Snapshot {
        let of = |strategy: &Strategy| strategy.control().recording.map(Recording::snapshot);
        let parts = self.core.history.operation();
        let all = self.core.generations.all();
        let retired: Vec<_> = all[1..].iter().filter_map(|old| of(&old.strategy)).collect();
        let now = of(&all[0].strategy).unwrap_or_default();
        drop(parts);
        let whole = retired.into_iter().fold(now, Snapshot::with_segments_of);
        self.core.history.note_snapshot(&whole);
        whole
    }
}
