//! The retries before a request fails, and the out-of-memory report.

use parking_lot::RwLockReadGuard;

use super::{MallocAsyncAllocator, Note, Route};
use crate::allocator::Request;
use crate::driver::{
    DriverPoolUsage, may_be_captured, name_holders, synchronize_outside_captures, unless_captured,
};
use crate::error::{AllocError, DriverError, DriverErrorKind, OutOfMemory, PoolError};
use crate::history::Action;
use crate::ids::PoolId;
use crate::limit::Charge;
use crate::size::human_bytes;

/// The reason why a request got no memory.
#[derive(Clone, Debug)]
pub(super) enum Refusal {
    /// The limit was reached; the driver was not called.
    Limit,
    /// The driver failed.
    Driver(DriverError),
    /// The pool lost its last user after the request was routed.
    Pool(PoolError),
}

impl Refusal {
    /// Returns the refusal if it is about lack of memory; turns any other one into the caller's error.
    fn about_memory(self) -> Result<Self, AllocError> {
        match self {
            Self::Driver(error) if !error.is_out_of_memory() => Err(error.into()),
            Self::Pool(error) => Err(error.into()),
            other => Ok(other),
        }
    }

    /// Combines this refusal with that of the next attempt. If the driver was out of memory the first
    /// time, another error of the driver does not replace this one, except a lost device.
    fn followed_by(self, again: Self) -> Result<Self, AllocError> {
        match (self, again) {
            (Self::Driver(first), Self::Driver(again)) if !again.is_out_of_memory() => {
                unless_lost(Err::<(), _>(again))?;
                Ok(Self::Driver(first))
            }
            (_, again) => again.about_memory(),
        }
    }
}

/// An address from the driver.
#[derive(Debug)]
pub(super) struct Obtained<'a> {
    pub(super) address: u64,
    pub(super) charge: Charge<'a>,
    /// Prevents the destruction of a private pool until the block is in the table.
    pub(super) _pool_guard: Option<RwLockReadGuard<'a, ()>>,
    /// Prevents that a block of a destroyed graph with the same address is freed until then.
    pub(super) _address_guard: RwLockReadGuard<'a, ()>,
}

impl MallocAsyncAllocator {
    /// Tries once: charges the limit, then calls the driver.
    #[inline]
    pub(super) fn obtain(&self, route: &Route, request: Request) -> Result<Obtained<'_>, Refusal> {
        let Request { bytes, stream, .. } = request;
        let charge = self.limit.charge(bytes).ok_or(Refusal::Limit)?;
        if let Some(capture) = route.capture {
            self.attach_leaves(stream, capture).map_err(Refusal::Driver)?;
        }
        let _pool_guard = self.keep_pool(route).map_err(Refusal::Pool)?;
        let _address_guard = self.addresses.read();
        let taken = self.memory_pools().allocate_async(route.driver_pool, bytes, stream);
        let address = taken.map_err(Refusal::Driver)?;
        Ok(Obtained { address, charge, _pool_guard, _address_guard })
    }

    /// Retries a request that was refused: first if freeing deferred blocks or the free-memory callbacks
    /// freed something, then after waiting for streams and trimming the pools.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] if the limit or the driver refused the memory. Any other error of the
    /// first attempt is returned unchanged. After the driver was out of memory, another error of a retry
    /// is returned only if the device or the pool was lost.
    #[cold]
    pub(super) fn allocate_under_pressure(
        &self,
        route: &Route,
        request: Request,
        refusal: Refusal,
    ) -> Result<Obtained<'_>, AllocError> {
        let mut refusal = refusal.about_memory()?;
        let waiting = self.captures.deferred();
        // A block that the driver fails to free stays deferred; `process_events` reports the error.
        let _ = self.free_deferred();
        let freed = self.captures.deferred() < waiting;
        if self.hooks.free_some_memory() || freed {
            match self.obtain(route, request) {
                Ok(obtained) => return Ok(obtained),
                Err(again) => refusal = refusal.followed_by(again)?,
            }
        }
        if matches!(refusal, Refusal::Driver(_)) && self.may_wait(route, request)? {
            self.blocks.lock().counters.num_retries += 1;
            // Failures other than a lost device are ignored: the memory released before may be enough.
            unless_lost(self.wait_and_trim(route, request))?;
            match self.obtain(route, request) {
                Ok(obtained) => {
                    self.blocks.lock().counters.note(Note::TrimThatHelped);
                    return Ok(obtained);
                }
                Err(again) => refusal = refusal.followed_by(again)?,
            }
        }
        let mut report = Box::new(self.report(route, request, &refusal));
        self.history.explain(&mut report);
        self.hooks.notify_out_of_memory(&report);
        Err(AllocError::OutOfMemory(report))
    }

    /// Returns true if the request belongs to no capture. In a capture the thread may not wait, and
    /// trimming would not help, because memory of graphs does not come from the pool. If the driver
    /// fails to report the capture status, returns true if no scope is open.
    fn may_wait(&self, route: &Route, request: Request) -> Result<bool, DriverError> {
        if route.capture.is_some() {
            return Ok(false);
        }
        let capture = unless_lost(self.capture_of(request.stream))?;
        Ok(capture.map_or(!self.scopes.any(), |capture| capture.is_none()))
    }

    /// Waits for running work, then releases free memory of the request's own pool, the main pool, pools
    /// with `use_on_oom`, pools without users, and graphs. With `compat:pytorch`, waits only for the
    /// request's stream, as PyTorch does. Otherwise waits also for the streams on which blocks were
    /// freed, because their memory cannot be released before.
    fn wait_and_trim(&self, route: &Route, request: Request) -> Result<(), DriverError> {
        unless_captured(self.driver.synchronize_stream(request.stream))?;
        if !self.settings.read().compat.is_pytorch() {
            self.wait_for_freed()?;
        }
        let pools = self.memory_pools();
        pools.trim(self.main.id, 0)?;
        self.on_helping_pools(route, |pool| pools.trim(pool, 0))?;
        self.destroy_empty_pools();
        pools.trim_graphs()
    }

    /// Waits for the streams on which blocks were freed: memory cannot be released while work that
    /// precedes its free is pending. Captured streams are skipped. Instead of a stream that no longer
    /// exists, or a per-thread default stream, the device is synchronized. That would break a capture,
    /// so it is skipped while a scope is open (see `expects_captures` in `src/driver/mod.rs`).
    pub(super) fn wait_for_freed(&self) -> Result<(), DriverError> {
        let mut streams = self.blocks.lock().freed_on.clone();
        streams.extend(self.joins.lock().stream);
        let mut rest = false;
        for stream in streams {
            if self.driver.is_per_thread_stream(stream) {
                rest = true;
                continue;
            }
            if may_be_captured(&*self.driver, stream) {
                continue;
            }
            match self.driver.synchronize_stream(stream) {
                Err(error) if error.kind() == DriverErrorKind::InvalidValue => {
                    rest = true;
                    self.blocks.lock().freed_on.remove(&stream);
                }
                waited => unless_captured(waited)?,
            }
        }
        if rest { unless_captured(synchronize_outside_captures(&*self.driver)) } else { Ok(()) }
    }

    fn report(&self, route: &Route, request: Request, refusal: &Refusal) -> OutOfMemory {
        let (allocated_bytes, draining_bytes) = {
            let mut blocks = self.blocks.lock();
            blocks.counters.num_ooms += 1;
            (blocks.counters.live_bytes(), blocks.counters.waiting_bytes())
        };
        let info = self.driver.memory_info().ok();
        let free = info.map_or(0, |info| info.free_bytes);
        self.record(Action::OutOfMemory, free, request.bytes, request.stream, route.pool);
        let main = self.usage_of_main();
        let private = self.usage_of_private_pools();
        let cached_private_bytes = idle(private);
        let mut report = OutOfMemory {
            device: self.device.device,
            pool: route.pool,
            device_free_bytes: info.map(|info| info.free_bytes),
            device_total_bytes: info.map(|info| info.total_bytes),
            limit_bytes: self.limit.get(),
            allocated_bytes,
            reserved_bytes: main.reserved_bytes + private.reserved_bytes,
            cached_large_bytes: idle(main) + cached_private_bytes,
            cached_private_bytes,
            draining_bytes,
            ..OutOfMemory::of(request.bytes, request.stream)
        };
        report.hints = hints(&report, refusal);
        if let Refusal::Driver(error) = refusal {
            report.driver = Some(error.clone());
            name_holders(&mut report, &*self.driver);
        }
        report
    }
}

fn hints(report: &OutOfMemory, refusal: &Refusal) -> Vec<String> {
    let mut hints = Vec::new();
    let needed = report.requested_bytes;
    if let (Refusal::Limit, Some(limit)) = (refusal, report.limit_bytes) {
        let h = report.bytes_in_reason();
        let free = report
            .device_free_bytes
            .map_or(String::new(), |free| format!(", the device still has {} free", h(free)));
        hints.push(format!(
            "the limit of {} refused the request{free}: raise the memory fraction.",
            h(limit)
        ));
    }
    if report.cached_large_bytes >= needed && matches!(refusal, Refusal::Driver(_)) {
        hints.push(format!(
            "the driver holds {} of free memory in pieces that are too small or between \
             blocks in use: backend:native,expandable_segments:True may join them.",
            human_bytes(report.cached_large_bytes)
        ));
    }
    if report.draining_bytes >= needed {
        hints.push(format!(
            "{} were freed while a graph was captured and wait for its end.",
            human_bytes(report.draining_bytes)
        ));
    }
    if report.pool == PoolId::DEFAULT && report.cached_private_bytes >= needed {
        hints.push(
            "private pools hold enough idle memory: create them with use_on_oom, or release them."
                .to_owned(),
        );
    }
    hints
}

pub(super) fn idle(usage: DriverPoolUsage) -> u64 {
    usage.reserved_bytes.saturating_sub(usage.used_bytes)
}

/// Returns `None` for a failed call. If the device is lost, returns the error instead, because every
/// later call would fail too.
fn unless_lost<T>(done: Result<T, DriverError>) -> Result<Option<T>, DriverError> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.kind() == DriverErrorKind::DeviceLost => Err(error),
        Err(_) => Ok(None),
    }
}
