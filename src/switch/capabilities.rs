//! The optional capabilities of a switchable allocator: those of the current one.
//!
//! A call about a block or an address goes to the allocator that made it. A call about everything goes
//! to all allocators. Settings made by such a call (a limit, peers, hooks) also apply to later
//! allocators. A capability that only a retired allocator has stays available until that allocator is
//! dropped; the current one then returns an error.

use std::sync::Arc;

use super::core::Core;
use super::generation::Generation;
use super::{Switchable, is_unknown, of_maker};
use crate::allocator::{
    Allocation, BaseAllocation, CacheInfo, Caching, Counters, CrossStream, DeviceAllocator,
    Expandable, ExpandableSegment, Imported, PeerAccess, Recording, Sharing,
};
use crate::config::Config;
use crate::error::{DriverError, DriverErrorKind, FractionError, HandleError};
use crate::history::{History, SegmentLayout, Snapshot};
use crate::ids::{DeviceId, StreamId};
use crate::sharing::{SharedHandle, SharingError};
use crate::stats::{PerPool, Statistics};
use crate::strategies::Strategy;

/// The error of a current allocator that lacks a capability which was there when the caller obtained it.
#[cold]
fn lacks(strategy: &Strategy, call: &'static str) -> DriverError {
    let message = format!("backend:{} has no such capability", strategy.name());
    DriverError::new(DriverErrorKind::NotSupported, call, 0, message)
}

fn unknown_block(allocation: &Allocation) -> HandleError {
    HandleError::UnknownAddress { address: allocation.address() }
}

impl Switchable {
    /// Calls the current allocator, and the retired ones unless a scope is open. Retired allocators have
    /// no record of the scope; if they waited for the device or queried events, a stream capture would
    /// break.
    fn call_outside_scopes<R>(&self, call: impl Fn(&Strategy) -> R) -> Vec<R> {
        let mut answers = vec![self.core.call(|generation| call(&generation.strategy))];
        if self.core.generations.retired() > 0
            && let Some(_no_scopes) = self.core.hold_scopes_off()
        {
            let retired = self.core.each(|g| g.is_retired().then(|| call(&g.strategy)));
            answers.extend(retired.into_iter().flatten());
        }
        self.core.retry_blocked_drop();
        answers
    }

    /// Shares a block through the allocator that made it.
    fn share_by(
        &self,
        address: u64,
        share: impl Fn(&dyn Sharing) -> Result<SharedHandle, SharingError>,
    ) -> Result<SharedHandle, SharingError> {
        let found =
            self.core.find_map(|generation| match share(generation.strategy.control().sharing?) {
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

    fn process_events(&self) -> Result<(), DriverError> {
        let processed = self.call_outside_scopes(|strategy| {
            strategy.control().cross_stream.map_or(Ok(()), CrossStream::process_events)
        });
        self.core.check_all_retired();
        processed.into_iter().collect()
    }
}

impl Caching for Switchable {
    fn empty_cache(&self) -> Result<(), DriverError> {
        let emptied = self.call_outside_scopes(|strategy| {
            strategy.control().caching.map_or(Ok(()), Caching::empty_cache)
        });
        self.core.check_all_retired();
        self.core.update_limit();
        emptied.into_iter().collect()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.core.with_state(|state| {
            state.limit_bytes = limit_bytes;
            self.core.set_current_limit(state);
        })
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        self.core.with_state(|state| {
            let current = self.core.generations.current();
            let caching = current.strategy.control().caching;
            let refused = FractionError { fraction };
            let caching = caching.filter(|_| (0.0..=1.0).contains(&fraction)).ok_or(refused)?;
            caching.set_memory_fraction(fraction)?;
            state.limit_bytes = caching.limit_bytes();
            drop(current);
            self.core.set_current_limit(state);
            Ok(())
        })
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.core.state.lock().limit_bytes
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.core.with_state(|state| {
            let current = self.core.generations.current();
            let caching = current.strategy.control().caching;
            let caching = caching.ok_or_else(|| lacks(&current.strategy, "apply"))?;
            if !state.fits(&current.strategy, config) {
                let message =
                    "another backend, other layers or another key that is read once: switch instead";
                return Err(DriverError::new(DriverErrorKind::InvalidValue, "apply", 0, message));
            }
            self.core.apply(state, caching, config.clone(), true)
        })
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.core.call(|generation| match generation.strategy.control().caching {
            Some(caching) => caching.cache_info(),
            None => Err(lacks(&generation.strategy, "cache_info")),
        })
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        let all = self
            .core
            .call_all(|g| g.strategy.control().caching.map(Caching::layout).unwrap_or_default());
        let mut layout: Vec<_> = all.into_iter().flatten().collect();
        SegmentLayout::sort(&mut layout);
        layout
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        let base =
            |strategy: &Strategy| of_maker(strategy.control().caching?.base_allocation(allocation));
        let found = self.core.find_map(|generation| base(&generation.strategy));
        found.unwrap_or_else(|| Err(unknown_block(allocation)))
    }
}

impl Expandable for Switchable {
    fn expandable_segments(&self) -> Vec<ExpandableSegment> {
        let segments = |strategy: &Strategy| {
            strategy.control().expandable.map(Expandable::expandable_segments)
        };
        let all =
            self.core.call_all(|generation| segments(&generation.strategy).unwrap_or_default());
        let mut all: Vec<_> = all.into_iter().flatten().collect();
        all.sort_by_key(|segment| segment.address);
        all
    }

    fn set_reserve_class(&self, stream: StreamId, class: Option<&str>) {
        self.core.with_state(|state| {
            match class {
                Some(class) => drop(state.classes.insert(stream, class.to_owned())),
                None => drop(state.classes.remove(&stream)),
            }
            if let Some(expandable) = self.core.generations.current().strategy.control().expandable
            {
                expandable.set_reserve_class(stream, class);
            }
        })
    }
}

impl Counters for Switchable {
    fn statistics(&self) -> Statistics {
        self.core.with_counters(|ledger, all| {
            let off = |own: &mut Statistics| own.reserved_bytes = PerPool::default();
            let all = Generation::counted_once(all, Generation::statistics, off);
            ledger.sum(&all.collect::<Vec<_>>())
        })
    }

    fn reset_peaks(&self) {
        self.core.with_counters(Core::begin_peaks);
    }

    fn reset_accumulated(&self) {
        self.core.with_counters(|ledger, all| {
            ledger.reset_accumulated();
            all.iter().filter_map(|one| one.counters()).for_each(Counters::reset_accumulated);
        });
    }
}

impl PeerAccess for Switchable {
    fn enable_peer_access(&self, device: DeviceId) -> Result<(), DriverError> {
        self.core.with_state(|state| {
            let all = self.core.generations.all();
            let strategy = &all[0].strategy;
            let current = strategy
                .control()
                .peer_access
                .ok_or_else(|| lacks(strategy, "enable_peer_access"))?;
            // The current allocator comes last. If it gives a peer access, all retired ones have done so.
            for retired in
                all[1..].iter().filter_map(|retired| retired.strategy.control().peer_access)
            {
                retired.enable_peer_access(device)?;
            }
            current.enable_peer_access(device)?;
            if !state.peers.contains(&device) {
                state.peers.push(device);
            }
            Ok(())
        })
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

    /// The snapshot of the current allocator, with the segments that retired ones still hold. Those are
    /// gathered a moment earlier.
    fn snapshot(&self) -> Snapshot {
        let of = |strategy: &Strategy| strategy.control().recording.map(Recording::snapshot);
        let parts = self.core.history.operation();
        let retired = self.core.each(|g| g.is_retired().then(|| of(&g.strategy)).flatten());
        let now = self.core.call(|generation| of(&generation.strategy)).unwrap_or_default();
        self.core.retry_blocked_drop();
        drop(parts);
        let whole = retired.into_iter().flatten().fold(now, Snapshot::with_segments_of);
        self.core.history.note_snapshot(&whole);
        whole
    }
}
