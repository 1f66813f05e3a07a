//! Properties that need a test procedure of their own: out of memory, memory pressure, driver failures,
//! limits, requests at invalid places, bare addresses.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::fixture::{Fixture, Step};
use super::report::{Device, Outcome};
use super::script::{Op, Script};
use super::search::{self, Broken};
use super::suite::{Case, NO_CACHE};
use super::{Checked, Options, accounts, invariants, leaks};
use stratalloc::allocator::{Caching, DeviceAllocator, Request};
use stratalloc::driver::Driver;
use stratalloc::error::{DriverErrorKind, HandleError};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc_sim::{FaultControl, FaultPlan, Faulty};

/// The number of equal blocks that together fill the device's memory.
const PIECES: u64 = 32;

/// The reason for not testing out of memory: the allocator never ran out.
const ENDLESS: &str = "it allocates more than the device has";

/// The maximum number of calls per script that are made to fail, on the simulated device.
const SIM_FAILURES: u64 = 200;

/// The same maximum for host memory, where each run creates a device with threads of its own.
const HOST_FAILURES: u64 = 20;

/// The same maximum for a GPU.
const GPU_FAILURES: u64 = 8;

impl Case<'_> {
    pub(super) fn running_out(&self) -> Result<Outcome, Broken> {
        let piece = self.options.device_bytes / PIECES;
        let tested = self.once(|fixture| {
            let Some(count) = fill(fixture, piece)? else { return Ok(false) };
            report_has_numbers(fixture, piece)?;
            for _ in 0..2 {
                fixture.free_everything()?;
                let again = fill(fixture, piece)?.unwrap_or(0);
                if again < count {
                    return Err(format!("{count} pieces fitted before frees, {again} do after"));
                }
            }
            fixture.free_everything()?;
            // Small free blocks in the cache must not prevent the allocation of a larger block.
            let large = piece * (count / 2).max(1);
            match fixture.allocate(large, fixture.streams[0])? {
                Step::Got => Ok(true),
                _ => Err(format!("{count} pieces of {piece} were freed; {large} bytes do not fit")),
            }
        })?;
        Ok(Outcome::of(tested, 1, ENDLESS))
    }

    pub(super) fn pressure(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.hooks.is_some())? {
            return Ok(Outcome::NotTested { why: "it offers no hooks for memory pressure" });
        }
        let piece = self.options.device_bytes / PIECES;
        let tested = self.once(|fixture| {
            let callbacks = Arc::new(AtomicU64::new(0));
            let reported = Arc::new(AtomicU64::new(0));
            let Some(hooks) = fixture.allocator.control().hooks else { return Ok(false) };
            let (count, bytes) = (Arc::clone(&callbacks), Arc::clone(&reported));
            let callback = hooks.add_free_memory_callback(Arc::new(move || {
                count.fetch_add(1, Ordering::Relaxed);
                false
            }));
            let observer = hooks.add_oom_observer(Arc::new(move |report| {
                bytes.store(report.requested_bytes, Ordering::Relaxed);
            }));
            fixture.lines.push("add a callback and an observer".to_owned());
            if fill(fixture, piece)?.is_none() {
                return Ok(false);
            }
            if callbacks.load(Ordering::Relaxed) == 0 {
                return Err("no free-memory callback was called".to_owned());
            }
            match reported.load(Ordering::Relaxed) {
                bytes if bytes == piece => {}
                bytes => return Err(format!("{piece} bytes failed, the observer got {bytes}")),
            }
            let Some(hooks) = fixture.allocator.control().hooks else { return Ok(false) };
            for hook in [callback, observer] {
                if !hooks.remove(hook) || hooks.remove(hook) {
                    return Err("a hook is not removed once and no more than once".to_owned());
                }
            }
            fixture.lines.push("remove both".to_owned());
            fixture.free_everything()?;
            callbacks.store(0, Ordering::Relaxed);
            reported.store(0, Ordering::Relaxed);
            fill(fixture, piece)?;
            if callbacks.load(Ordering::Relaxed) != 0 || reported.load(Ordering::Relaxed) != 0 {
                return Err("a hook that was removed is still called".to_owned());
            }
            fixture.free_everything().map(|()| true)
        })?;
        Ok(Outcome::of(tested, 1, ENDLESS))
    }

    pub(super) fn driver_failures(&self) -> Result<Outcome, Broken> {
        // Each script is run again for each driver call that is made to fail, so few and short scripts are
        // enough.
        let options = Options {
            scripts: self.options.scripts.div_ceil(2),
            longest: self.options.longest.min(24),
            ..self.options.clone()
        };
        // Many allocators release their cache only when the device's memory runs out, so some scripts
        // run on a small device.
        let work = |case: &Case<'_>, small_bytes| case.each_call_fails(small_bytes);
        let runs = self.on_a_small_device_too(&options, &work)?;
        Ok(Outcome::of(runs > 0, runs, "it makes no call to the driver"))
    }

    /// Runs each script again for each of its driver calls, and makes that call fail, once with each of two
    /// errors. Some calls are left out if a script makes many. If `small_bytes` is given, it is the size of
    /// the device, and each script ends with a request for nearly all of that. Returns the number of runs.
    fn each_call_fails(&self, small_bytes: Option<u64>) -> Result<u64, Broken> {
        let runs = Cell::new(0);
        // `pressed` adds up to as many frees as the script has operations, so the script itself is half as
        // long.
        let longest = self.options.longest / if small_bytes.is_some() { 2 } else { 1 };
        let options = Options { longest, ..self.options.clone() };
        search::scripts(&options, Op::is_plain, &|script| {
            let pressed = small_bytes.map(|bytes| script.pressed(bytes));
            let script = pressed.as_ref().unwrap_or(script);
            let calls = self.with_a_failure(script, None)?;
            for at in (0..calls).step_by(self.calls_apart(calls)) {
                for kind in [DriverErrorKind::Other, DriverErrorKind::OutOfMemory] {
                    let plan = FaultPlan { at, kind, repeat: false, only: None };
                    self.with_a_failure(script, Some(plan)).map_err(|broken| {
                        let what = format!("driver call {at} fails ({kind:?}): {}", broken.what);
                        Broken { what, ..broken }
                    })?;
                    runs.set(runs.get() + 1);
                }
            }
            Ok(())
        })?;
        Ok(runs.get())
    }

    /// Returns the step from one driver call that is made to fail to the next: 1, or more if the script makes
    /// more calls than the device's maximum.
    fn calls_apart(&self, calls: u64) -> usize {
        let most = match self.device {
            Device::Sim => SIM_FAILURES,
            Device::Host => HOST_FAILURES,
            Device::Cuda => GPU_FAILURES,
        };
        usize::try_from(calls.div_ceil(most)).unwrap_or(1).max(1)
    }

    /// Runs a script with a driver that fails as planned. Returns the number of driver calls up to its end.
    pub(super) fn with_a_failure(
        &self,
        script: &Script,
        plan: Option<FaultPlan>,
    ) -> Result<u64, Broken> {
        let machine = self.machine()?;
        let before = machine.held();
        let driver = Arc::new(Faulty::new(machine.driver()));
        if let Some(plan) = plan {
            driver.arm(plan);
        }
        let own = Arc::clone(&driver) as Arc<dyn Driver>;
        let done = search::on_a_fixture(&*machine, own, self.build, |fixture| {
            fixture.faulty = plan.is_some();
            search::follow(fixture, script, &[invariants::live_blocks_never_overlap])?;
            let calls = driver.counted_calls();
            driver.disarm();
            fixture.faulty = false;
            fixture.free_everything()?;
            match fixture.allocate(4096, fixture.streams[0])? {
                Step::Got => fixture.free_everything()?,
                _ => return Err("nothing is live, and 4096 bytes do not fit".to_owned()),
            }
            accounts::counters_end_at_nothing(fixture)?;
            fixture.forget_all()?;
            Ok((calls, fixture.lines.clone()))
        });
        // A constructor may return an error when its driver fails, but must not panic.
        let may_refuse = driver.failed_calls() > 0;
        let (calls, lines) = match done {
            Err(refused) if may_refuse && refused.what.starts_with(search::NOT_BUILT) => {
                (0, refused.lines)
            }
            done => done?,
        };
        let released = leaks::all_came_back(&before, &machine.held());
        released.map_err(|what| Broken { what, lines, seed: None })?;
        Ok(calls)
    }

    pub(super) fn limits(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.caching.is_some())? {
            return Ok(Outcome::NotTested { why: NO_CACHE });
        }
        let limit = self.options.device_bytes / 4;
        let tested = self.once(|fixture| {
            set_limit(fixture, Some(limit))?;
            if caching(fixture)?.limit_bytes() != Some(limit) {
                return Ok(false);
            }
            let piece = self.options.device_bytes / PIECES;
            let Some(count) = fill(fixture, piece)? else {
                return Err(format!("requests never fail under a limit of {limit} bytes"));
            };
            stays_below(fixture, limit)?;
            if fixture.model.requested_bytes() > limit {
                return Err(format!("{count} pieces of {piece} bytes fit into {limit} bytes"));
            }
            fixture.free_everything()?;
            set_limit(fixture, None)?;
            match fixture.allocate(limit + piece, fixture.streams[0])? {
                Step::Got => {}
                _ => return Err(format!("no limit any more, {} bytes do not fit", limit + piece)),
            }
            let caching = caching(fixture)?;
            let refuses = |fraction| caching.set_memory_fraction(fraction).is_err();
            if [-0.1, 1.1, f64::NAN, f64::INFINITY].into_iter().all(refuses) {
                return Ok(true);
            }
            Err("a fraction of the memory that is none was taken".to_owned())
        })?;
        Ok(Outcome::of(tested, 1, "it takes no limit in bytes"))
    }

    /// Checks that requests at invalid places fail: in a pool that was never created, and at an address where
    /// no block starts.
    pub(super) fn strange_places(&self) -> Result<(), Broken> {
        self.once(|fixture| {
            let request = Request::new(512, fixture.streams[0]);
            let pool = PoolId::next_user();
            for (request, place) in [
                (request.in_pool(pool), format!("in pool {pool}, which was never created")),
                (request.at(256), "at address 256, where no block starts".to_owned()),
            ] {
                fixture.lines.push(format!("allocate 512 bytes {place}"));
                if let Ok(block) = fixture.allocator.allocate(request) {
                    let start = block.address();
                    return Err(format!("512 bytes {place}, were allocated at {start:#x}"));
                }
            }
            fixture.free_everything()
        })
    }

    pub(super) fn bare_addresses(&self) -> Result<Outcome, Broken> {
        if !self.supports(|control| control.by_address)? {
            return Ok(Outcome::NotTested { why: "it offers no bare addresses" });
        }
        self.once(|fixture| {
            let stream = fixture.streams[0];
            fixture.allocate(4096, stream)?;
            let kept = fixture.model.live.first().map_or(0, super::model::Live::start);
            fixture
                .lines
                .push("bare addresses: allocate, free, and free what does not live".to_owned());
            let raw = &*fixture.allocator;
            let mut live = vec![(kept, 4096)];
            for bytes in [1, 512, 4096, 65_536, 1 << 20, 3 << 20] {
                let allocated = fixture.allocator.allocate(Request::new(bytes, stream));
                let start = allocated.map_err(|error| format!("{bytes} bytes: {error}"))?.address();
                let end = start.saturating_add(bytes);
                if live.iter().any(|&(other, size)| start < other + size && other < end) {
                    return Err(format!("{bytes} bytes at {start:#x} overlap a live block"));
                }
                live.push((start, bytes));
            }
            for &(start, bytes) in &live[1..] {
                let inside = (bytes > 1).then_some(start + bytes / 2);
                inside.map_or(Ok(()), |at| refuses(raw, at, "inside a block"))?;
                let freed =
                    raw.free_raw(start).map_err(|error| format!("a live block: {error}"))?;
                if freed != bytes {
                    return Err(format!("free_raw returned {freed} for a block of {bytes} bytes"));
                }
                refuses(raw, start, "of a block that was freed")?;
            }
            for address in [0, 1, u64::MAX] {
                refuses(raw, address, "of nothing")?;
            }
            fixture.free_everything()
        })?;
        Ok(Outcome::Passed { runs: 1 })
    }
}

/// Allocates blocks of `piece` bytes until the allocator is out of memory, and returns how many succeeded.
/// Returns `None` if it can still allocate once the blocks add up to twice the device's memory.
fn fill(fixture: &mut Fixture<'_>, piece: u64) -> Result<Option<u64>, String> {
    let lines = fixture.lines.len();
    let mut count = 0;
    while count < 2 * PIECES && matches!(fixture.allocate(piece, fixture.streams[0])?, Step::Got) {
        invariants::live_blocks_never_overlap(fixture, &Step::Got)?;
        count += 1;
    }
    fixture.lines.truncate(lines);
    let full = count < 2 * PIECES;
    let end = if full { ": out of memory then" } else { "" };
    fixture.lines.push(format!(
        "allocate {piece} bytes {count} times on stream {}{end}",
        fixture.streams[0]
    ));
    Ok(full.then_some(count))
}

/// Checks that the out-of-memory report states the requested size, and that the counter of live blocks equals
/// the number of live blocks in the model.
fn report_has_numbers(fixture: &Fixture<'_>, piece: u64) -> Checked {
    let Some(report) = &fixture.report else { return Err("there is no report".to_owned()) };
    if report.requested_bytes != piece {
        let reported = report.requested_bytes;
        return Err(format!("the error reports {reported} bytes; the request was for {piece}"));
    }
    let counted = fixture.statistics().map(|s| s.allocation.all.current);
    let live = i64::try_from(fixture.model.live.len()).unwrap_or(i64::MAX);
    match counted {
        Some(counted) if counted != live => {
            Err(format!("after a request that failed {live} blocks are live, {counted} counted"))
        }
        _ => Ok(()),
    }
}

fn caching<'b>(fixture: &'b Fixture<'_>) -> Result<&'b dyn Caching, String> {
    let caching = fixture.allocator.control().caching;
    caching.ok_or_else(|| "the allocator no longer offers control over cached memory".to_owned())
}

fn set_limit(fixture: &mut Fixture<'_>, limit: Option<u64>) -> Checked {
    fixture.lines.push(match limit {
        Some(bytes) => format!("set the limit to {bytes} bytes"),
        None => "remove the limit".to_owned(),
    });
    caching(fixture)?.set_limit_bytes(limit);
    Ok(())
}

fn stays_below(fixture: &Fixture<'_>, limit: u64) -> Checked {
    let reserved = fixture.reserved_bytes();
    match u64::try_from(reserved) {
        Ok(reserved) if reserved <= limit => Ok(()),
        _ => Err(format!("{reserved} bytes are reserved under a limit of {limit}")),
    }
}

fn refuses(raw: &dyn DeviceAllocator, address: u64, what: &str) -> Checked {
    let recorded = raw.record_stream_raw(address, StreamId::DEFAULT);
    for (call, done) in
        [("free_raw", raw.free_raw(address).map(drop)), ("record_stream_raw", recorded)]
    {
        match done {
            Err(HandleError::UnknownAddress { address: named }) if named == address => {}
            Err(error) => return Err(format!("{call} of {address:#x}, {what}: {error}")),
            Ok(()) => return Err(format!("{call} took the address {address:#x} {what}")),
        }
    }
    Ok(())
}
