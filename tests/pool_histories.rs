//! Random histories of private pools: scopes, captures, checkpoints, segment allocators, deferred frees,
//! switching between kinds of segments, limits, and driver calls that fail.
//!
//! After every step each invariant of `common/invariants.rs` must hold, and exactly the allocated blocks
//! must be live. A block that is freed while another stream's work uses it must not be reused before a wait
//! for that work. Memory that a graph allocated in a pool must stay there while the pool has users. A
//! capture must make no request on a stream outside of it fail. At the end nothing may remain: no pool,
//! memory, mapping or address space, and the pools' segment allocators must have all their memory back.
//!
//! Captures run on the simulated and the host device. `failing` makes each driver call of one history fail.

mod failing;
mod ops;

use stratalloc::allocator::PoolCheckpoint;
#[cfg(target_os = "linux")]
use stratalloc_sim::Host;

#[cfg(target_os = "linux")]
use crate::common::gpu::{Gpu, turn};
use crate::common::prelude::*;
use ops::Op;

const OWN_START: u64 = 1 << 55;

/// A pool's segment allocator. Its addresses are far from the device's and never reused.
#[derive(Debug, Default)]
struct Own {
    next: AtomicU64,
    out_bytes: AtomicU64,
}

impl SegmentAllocator for Own {
    fn allocate(&self, size_bytes: u64, _: StreamId) -> Option<u64> {
        let out = self.out_bytes.fetch_add(size_bytes, Ordering::Relaxed);
        if out > 128 * MIB {
            self.out_bytes.fetch_sub(size_bytes, Ordering::Relaxed);
            return None;
        }
        Some(OWN_START + self.next.fetch_add(1 << 32, Ordering::Relaxed))
    }

    fn free(&self, _: u64, size_bytes: u64, _: StreamId) {
        self.out_bytes.fetch_sub(size_bytes, Ordering::Relaxed);
    }
}

/// A live block, and whether unfinished work of other streams was recorded for it.
struct Mine {
    block: Allocation,
    used_elsewhere: bool,
}

struct History<D> {
    fixture: FixtureOn<Faulty<Arc<D>>>,
    base: Arc<D>,
    own: Arc<Own>,
    segments: Segments,
    streams: [StreamId; 4],
    pools: Vec<PoolId>,
    held: Vec<Mine>,
    checkpoints: Vec<PoolCheckpoint>,
    /// The pool of the current capture, which is on the second stream. It is the default pool if the
    /// capture has no scope.
    capture: Option<PoolId>,
    forked: bool,
    /// Whether the last capture began on this thread. The thread may not wait during such a capture.
    began_here: bool,
    /// The open scopes, the newest last.
    scopes: Vec<(PoolId, ScopeFilter)>,
    /// Blocks allocated inside captures, with their pools. Graphs use them while their pool has users.
    graphs: Vec<(PoolId, u64, u64)>,
    /// Ranges (start and end) that were freed while other streams used them, with the number of calls that
    /// had waited for work until then. After a further such call, a range may be allocated again.
    waiting: Vec<(u64, u64, Option<u64>)>,
}

fn unless_refused<T>(result: Result<T, PoolError>) -> Result<Option<T>, String> {
    match result {
        Ok(value) => Ok(Some(value)),
        // A call that is illegal now, or that fails as planned, returns an error and changes nothing.
        Err(_) => Ok(None),
    }
}

impl<D: Base> History<D> {
    fn new(segments: Segments) -> Self {
        let expandable_segments = segments.expandable(true);
        let settings = Settings { expandable_segments, ..Settings::default() };
        let fixture = FixtureOn::<Faulty<Arc<D>>>::with(512 * MIB, settings);
        let base = Arc::clone(fixture.device.inner());
        let [a, b, c] = [0; 3].map(|_| base.create_stream().expect("streams are free"));
        let streams = [StreamId::DEFAULT, a, b, c];
        Self {
            fixture,
            base,
            own: Arc::default(),
            segments,
            streams,
            pools: Vec::new(),
            held: Vec::new(),
            checkpoints: Vec::new(),
            capture: None,
            forked: false,
            began_here: false,
            scopes: Vec::new(),
            graphs: Vec::new(),
            waiting: Vec::new(),
        }
    }

    fn engine(&self) -> &Engine {
        self.fixture.engine()
    }

    fn pool(&self, pick: u8) -> Option<PoolId> {
        let at = usize::from(pick).checked_rem(self.pools.len())?;
        Some(self.pools[at])
    }

    fn pick(&self, pick: u8) -> Option<usize> {
        usize::from(pick).checked_rem(self.held.len())
    }

    fn is_captured(&self, stream: StreamId) -> bool {
        let [_, first, second, _] = self.streams;
        self.capture.is_some() && (stream == first || self.forked && stream == second)
    }

    /// Returns the pool that a request on a stream should use.
    fn routed(&self, stream: StreamId) -> PoolId {
        let accepts = |(_, filter): &&(PoolId, ScopeFilter)| match filter {
            ScopeFilter::Stream(own) => *own == stream,
            ScopeFilter::Capture(_) => self.is_captured(stream),
            ScopeFilter::Thread(_) | ScopeFilter::Where(_) => true,
        };
        let found = self.scopes.iter().rev().find(accepts);
        found.map_or(PoolId::DEFAULT, |(pool, _)| *pool)
    }

    /// Checks the result of a request on `stream` that `pool` should serve.
    fn took(
        &mut self,
        made: Result<Allocation, AllocError>,
        stream: StreamId,
        pool: PoolId,
    ) -> Checked {
        let block = match made {
            Ok(block) => block,
            Err(AllocError::Driver(error)) if error.kind() == DriverErrorKind::CaptureActive => {
                ensure!(self.is_captured(stream), "a capture elsewhere failed a request: {error}");
                return Ok(());
            }
            Err(AllocError::OutOfMemory(_) | AllocError::Driver(_) | AllocError::Pool(_)) => {
                return Ok(());
            }
            Err(other) => return Err(other.to_string()),
        };
        let (start, end) = (block.address(), block.address() + block.size_bytes());
        let waits = self.base.waits();
        for (from, to, then) in &self.waiting {
            let early = waits.is_some() && waits == *then && start < *to && *from < end;
            ensure!(!early, "{start:#x} was allocated while work on it was unfinished");
        }
        for (of, from, to) in &self.graphs {
            let is_graphs = *of != pool && start < *to && *from < end;
            ensure!(!is_graphs, "{start:#x} is a graph's in {of:?} and went to {pool:?}");
        }
        if pool != PoolId::DEFAULT && self.is_captured(stream) {
            self.graphs.push((pool, start, end));
        } else if start < OWN_START && !self.is_captured(stream) {
            // Writes to both ends of the block by device code.
            for at in [start, start + block.size_bytes() - 1] {
                self.base.fill(at, 0xEE, 1, stream).map_err(|error| error.to_string())?;
            }
        }
        self.held.push(Mine { block, used_elsewhere: false });
        Ok(())
    }

    fn give(&mut self, at: usize) -> Checked {
        let Mine { block, used_elsewhere } = self.held.swap_remove(at);
        let range = (block.address(), block.address() + block.size_bytes(), self.base.waits());
        match self.fixture.free(block) {
            Ok(()) if used_elsewhere => self.waiting.push(range),
            Ok(()) => {}
            Err(refused) => self.held.push(Mine { block: refused.allocation, used_elsewhere }),
        }
        Ok(())
    }

    fn use_elsewhere(&mut self, at: usize, stream: StreamId) -> Checked {
        let others = self.fixture.cross_stream();
        // A use inside a capture ends with the capture or at a join, so only uses outside of captures
        // are tracked here.
        let captured = self.is_captured(stream);
        let mine = &mut self.held[at];
        let record = |by| others.record_stream(&mine.block, by).map_err(|error| error.to_string());
        record(stream)?;
        if !captured {
            // The block's own stream is not known here. At least one of these two is another stream.
            record(self.streams[0])?;
            record(self.streams[3])?;
            mine.used_elsewhere = true;
        }
        Ok(())
    }

    fn restore(&mut self, pick: u8) -> Checked {
        let Some(at) = usize::from(pick).checked_rem(self.checkpoints.len()) else {
            return Ok(());
        };
        let Some(restored) =
            unless_refused(self.engine().checkpoints().restore(&self.checkpoints[at]))?
        else {
            return Ok(());
        };
        let freed = |mine: &Mine| restored.freed.iter().any(|f| f.address == mine.block.address());
        let (stale, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.held).into_iter().partition(freed);
        self.held = rest;
        for mine in stale {
            ensure!(self.fixture.free(mine.block).is_err(), "an old handle was taken");
        }
        for block in restored.live {
            self.held.push(Mine { block, used_elsewhere: false });
        }
        Ok(())
    }

    fn begin(&mut self, pool: u8, announced: bool, here: bool) -> Checked {
        let (None, Some(pool)) = (self.capture, self.pool(pool)) else {
            return Ok(());
        };
        self.began_here = here;
        let Some(graphs) = self.base.capture() else {
            return Ok(());
        };
        let begin = || graphs.begin(self.streams[1]);
        let begun = match here {
            true => begin(),
            false => on_new_thread(begin),
        };
        let filter = ScopeFilter::Capture(begun.map_err(|error| error.to_string())?);
        if !announced {
            self.capture = Some(PoolId::DEFAULT);
            return Ok(());
        }
        match self.engine().private_pools().open_scope(pool, filter.clone()) {
            Ok(()) => {
                self.capture = Some(pool);
                self.scopes.push((pool, filter));
            }
            Err(_) => graphs.end(self.streams[1]).map_err(|error| error.to_string())?,
        }
        Ok(())
    }

    /// Makes work submitted to `then` from now on wait for the work that `first` has so far.
    fn after(&self, first: StreamId, then: StreamId) -> Checked {
        let event = self.base.create_event().map_err(|error| error.to_string())?;
        // Fails if the capture was invalidated, because it then accepts no more work.
        let recorded = self.base.record_event(event, first);
        let _ = recorded.and_then(|()| self.base.wait_event(then, event));
        self.base.destroy_event(event).map_err(|error| error.to_string())
    }

    fn end_capture(&mut self) -> Checked {
        let Some(pool) = self.capture.take() else {
            return Ok(());
        };
        if std::mem::take(&mut self.forked) {
            self.after(self.streams[2], self.streams[1])?;
        }
        let graphs = self.base.capture().expect("a capture was begun");
        // Fails if the test has invalidated the capture on purpose. The capture has ended in both cases.
        let _ = graphs.end(self.streams[1]);
        if pool == PoolId::DEFAULT {
            return Ok(());
        }
        self.scopes.retain(|(of, _)| *of != pool);
        // If the pool was released during the capture, it loses its last user now.
        if !self.pools.contains(&pool) {
            self.graphs.retain(|(of, _, _)| *of != pool);
        }
        unless_refused(self.engine().private_pools().close_scope(pool))?;
        unless_refused(self.engine().private_pools().release_pool(pool)).map(drop)
    }

    fn step(&mut self, op: Op) -> Checked {
        let stream = |n: u8| self.streams[usize::from(n) % 4];
        match op {
            Op::Take { bytes, stream: n } => {
                let made = self.fixture.try_allocate(bytes, stream(n));
                self.took(made, stream(n), self.routed(stream(n)))?;
            }
            Op::TakeIn { pool, bytes, stream: n } => {
                if let Some(pool) = self.pool(pool) {
                    let made = self.engine().allocate(Request::new(bytes, stream(n)).in_pool(pool));
                    self.took(made, stream(n), pool)?;
                }
            }
            Op::Give { pick } => {
                if let Some(at) = self.pick(pick) {
                    self.give(at)?;
                }
            }
            Op::Use { pick, stream: n } => {
                if let Some(at) = self.pick(pick) {
                    let other = stream(n);
                    self.use_elsewhere(at, other)?;
                }
            }
            Op::Create { no_split, helps: use_on_oom, own } if self.pools.len() < 6 => {
                let allocator = own.then(|| Arc::clone(&self.own) as Arc<dyn SegmentAllocator>);
                let pool = PoolId::next_user();
                let options = PoolOptions { allocator, use_on_oom, no_split, tag: None };
                self.engine()
                    .private_pools()
                    .create_pool(pool, options)
                    .map_err(|error| error.to_string())?;
                self.pools.push(pool);
            }
            Op::Create { .. } => {}
            Op::Release { pool } => {
                if let Some(at) = usize::from(pool).checked_rem(self.pools.len()) {
                    let pool = self.pools.swap_remove(at);
                    self.close(pool)?;
                    unless_refused(self.engine().private_pools().release_pool(pool)).map(drop)?;
                    self.checkpoints.retain(|checkpoint| checkpoint.pool != pool);
                    self.graphs.retain(|(of, _, _)| *of != pool);
                }
            }
            Op::Empty { pool } => {
                if let Some(pool) = self.pool(pool) {
                    unless_refused(self.engine().private_pools().empty_pool(pool)).map(drop)?;
                }
            }
            Op::OpenThread { pool } => self.open(pool, ScopeFilter::this_thread())?,
            Op::OpenStream { pool, stream: n } => {
                self.open(pool, ScopeFilter::Stream(stream(n)))?
            }
            Op::Close { pool } => {
                if let Some(pool) = self.pool(pool) {
                    self.close(pool)?;
                }
            }
            Op::Checkpoint { pool } => {
                if let Some(pool) = self.pool(pool)
                    && let Some(taken) =
                        unless_refused(self.engine().checkpoints().checkpoint(pool))?
                {
                    self.checkpoints.truncate(3);
                    self.checkpoints.insert(0, taken);
                }
            }
            Op::Restore { pick } => self.restore(pick)?,
            Op::Begin { pool, announced, here } => self.begin(pool, announced, here)?,
            Op::Fork if self.capture.is_some() => {
                self.after(self.streams[1], self.streams[2])?;
                self.forked = true;
            }
            Op::Join if self.forked => self.after(self.streams[2], self.streams[1])?,
            Op::Break if self.capture.is_some() => {
                let event = self.base.create_event().map_err(|error| error.to_string())?;
                // This invalidates a capture on purpose: a captured stream waits for an event from
                // outside of the capture.
                let recorded = self.base.record_event(event, self.streams[3]);
                let _ = recorded.and_then(|()| self.base.wait_event(self.streams[1], event));
                self.base.destroy_event(event).map_err(|error| error.to_string())?;
                self.end_capture()?;
            }
            Op::Fork | Op::Join | Op::Break => {}
            Op::End => self.end_capture()?,
            Op::Finish => {
                self.base.finish_all();
                self.waiting.clear();
            }
            // `empty_cache` may fail as planned. Memory that was not released then stays reserved.
            Op::EmptyCache => {
                if let Err(error) = self.engine().empty_cache() {
                    let capture = error.kind() == DriverErrorKind::CaptureActive;
                    let is_ours = self.capture.is_some() && self.began_here;
                    ensure!(!capture || is_ours, "a capture elsewhere keeps the cache: {error}");
                }
            }
            Op::Switch { expandable, max_split, collect, reuse, compat } => {
                let settings = Settings {
                    garbage_collection_threshold: collect.then_some(0.5),
                    expandable_segments: self.segments.expandable(expandable),
                    max_split_bytes: max_split.then_some(32 * MIB),
                    graph_capture_record_stream_reuse: reuse,
                    ..Settings::default()
                };
                let compat = if compat { Compat::PyTorch } else { Compat::Default };
                let config = Config::from_settings(settings).with_compat(compat);
                self.engine().apply(&config).map_err(|error| error.to_string())?;
            }
            Op::Limit { mib } => {
                let caching: &dyn Caching = self.engine();
                caching.set_limit_bytes(mib.map(|mib| u64::from(mib) * 2 * MIB));
            }
            Op::Fault { after, lost } => self.fixture.device.arm(FaultPlan {
                at: after.into(),
                kind: if lost { DriverErrorKind::Other } else { DriverErrorKind::OutOfMemory },
                repeat: false,
                only: None,
            }),
        }
        self.check()
    }

    /// Closes a pool's scope and removes the scope's user, unless the scope is that of the current
    /// capture.
    fn close(&mut self, pool: PoolId) -> Checked {
        if self.capture == Some(pool) {
            return Ok(());
        }
        self.scopes.retain(|(of, _)| *of != pool);
        match self.engine().private_pools().close_scope(pool) {
            // After an error of the driver the scope is closed too.
            Ok(()) | Err(PoolError::Driver(_)) => {
                unless_refused(self.engine().private_pools().release_pool(pool)).map(drop)
            }
            Err(_) => Ok(()),
        }
    }

    fn open(&mut self, pool: u8, filter: ScopeFilter) -> Checked {
        if let Some(pool) = self.pool(pool)
            && unless_refused(self.engine().private_pools().open_scope(pool, filter.clone()))?
                .is_some()
        {
            self.scopes.push((pool, filter));
        }
        Ok(())
    }

    fn check(&self) -> Checked {
        let own = self.own.out_bytes.load(Ordering::Relaxed);
        let used = self.fixture.used_bytes() - self.engine().unreleased_bytes() + own;
        let segments = invariants::check_all(self.engine(), used)?;
        let ours = self.held.iter().map(|m| (m.block.address(), m.block.size_bytes()));
        let mut ours: Vec<_> = ours.collect();
        ours.sort_unstable();
        ensure_eq!(ours, invariants::live_blocks(&segments), "live blocks, ours and in segments");
        for (pool, start, end) in &self.graphs {
            let layout = self
                .engine()
                .private_pools()
                .pool_layout(*pool)
                .map_err(|error| error.to_string())?;
            let holds = |s: &SegmentLayout| s.address <= *start && *end <= s.address + s.size_bytes;
            ensure!(layout.iter().any(holds), "{start:#x} of {pool:?} is a graph's, and went back");
        }
        Ok(())
    }

    /// Frees everything, or drops the allocator while blocks are live if `keeps` is true.
    fn end(mut self, keeps: bool) -> Checked {
        self.fixture.device.disarm();
        self.end_capture()?;
        self.graphs.clear();
        for pool in std::mem::take(&mut self.pools) {
            unless_refused(self.engine().private_pools().close_scope(pool))?;
            while unless_refused(self.engine().private_pools().release_pool(pool))?.is_some() {}
        }
        if keeps {
            // If a call failed as planned when a scope was closed, the driver still expects a capture.
            // Undo that here.
            if let Some(graphs) = self.base.capture() {
                while graphs.expected().is_ok_and(|expected| expected > 0) {
                    graphs.expect_captures(false).map_err(|error| error.to_string())?;
                }
            }
            return self.gone();
        }
        while !self.held.is_empty() {
            let before = self.held.len();
            self.give(before - 1)?;
            ensure!(self.held.len() < before, "a block was refused without a fault");
        }
        self.base.finish_all();
        self.engine().empty_cache().map_err(|error| error.to_string())?;
        self.check()?;
        let engine = self.engine();
        let left = (
            engine.private_pool_count(),
            engine.statistics().memory_reserved(),
            engine.unreleased_bytes(),
            self.own.out_bytes.load(Ordering::Relaxed),
        );
        ensure_eq!(left, (0, 0, 0, 0), "pools, reserved, unreleased and own bytes at the end");
        self.gone()
    }

    fn gone(self) -> Checked {
        let Self { base, fixture, own, .. } = self;
        drop(fixture);
        ensure_eq!(own.out_bytes.load(Ordering::Relaxed), 0, "bytes of the pools' own allocator");
        ensure_eq!(base.held(), HeldResources::default(), "what the device still has out");
        Ok(())
    }
}

fn run<D: Base>(segments: Segments, ops: &[Op]) -> Checked {
    let mut history = History::<D>::new(segments);
    for (at, op) in ops.iter().enumerate() {
        history.step(*op).map_err(|error| format!("step {at}, {op:?}: {error}"))?;
    }
    history.end(ops.len().is_multiple_of(2))
}

/// Runs each property on every device.
macro_rules! on_every_device {
    ($($device:ident $base:ident if $turn:expr;)*) => { $(
        mod $device {
            use super::*;

            #[test]
            fn pools_of_fixed_segments() {
                if let Some(_turn) = $turn {
                    histories(runs(50), 150, |ops| run::<$base>(Segments::Fixed, ops));
                }
            }

            #[test]
            fn pools_of_expandable_segments() {
                if let Some(_turn) = $turn {
                    histories(runs(50), 150, |ops| run::<$base>(Segments::Expandable, ops));
                }
            }

            #[test]
            fn pools_while_segments_switch() {
                if let Some(_turn) = $turn {
                    histories(runs(100), 150, |ops| run::<$base>(Segments::Switching, ops));
                }
            }

            #[test]
            fn each_failing_call_leaves_pools_that_work() {
                if let Some(_turn) = $turn {
                    failing::each_failing_call::<$base>();
                }
            }
        }
    )* };
}

on_every_device! { sim Sim if Some(()); }
#[cfg(target_os = "linux")]
on_every_device! { host Host if Some(()); }
#[cfg(target_os = "linux")]
on_every_device! { cuda Gpu if turn(); }
