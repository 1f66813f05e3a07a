//! Replays the requests of a recording with any strategy, and measures the time.

use std::hash::Hash;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use hashbrown::HashSet;
use thiserror::Error;

use super::blocks::{Blocks, DENSE_MAX, EveryBlock, LiveBlocks};
use super::evidence::NoHistory;
use super::lanes::LaneWork;
use super::ops::{Op, OpRef, Ops};
use super::progress::{Cancelled, Progress, Silent, Stage};
use super::workload::Workload;
use stratalloc::allocator::{Allocation, DeviceAllocator, PoolOptions, Request};
use stratalloc::error::{
    AllocError, DriverError, FractionError, FreeError, HandleError, OutOfMemory, PoolError,
};
use stratalloc::ids::{PoolId, StreamId};
use stratalloc::registry::BuildError;
use stratalloc::stats::Statistics;
use stratalloc::strategies::{NoCache, Strategy};
use stratalloc_sim::WorkGate;

/// The reason why a recording could not be replayed.
#[non_exhaustive]
#[derive(Debug, Error)]
pub enum ReplayError {
    /// No allocator can be built from the configuration.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The memory fraction is out of range.
    #[error(transparent)]
    Fraction(#[from] FractionError),
    /// The allocator failed for a reason other than memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// The allocator refused the handle of a block that it had allocated.
    #[error("the allocator refused its own block: {0}")]
    Handle(#[from] HandleError),
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The memory cannot be limited, because the strategy has no cache.
    #[error(transparent)]
    NoCache(#[from] NoCache),
    /// The decisions cannot be compared, because the strategy is not built on the native engine.
    #[error("this strategy makes no decisions that a recording could be compared with")]
    NotVerifiable,
    /// The recording has more heaps (pairs of a stream and a pool) than any real program. It is refused,
    /// because the allocator keeps tens of KiB of host memory for each heap.
    #[error(
        "the recording uses {heaps} pairs of a stream and a pool; at most {HEAPS_MAX} are \
         repeated"
    )]
    TooManyHeaps {
        /// The number of pairs.
        heaps: usize,
    },
    /// The recording cannot be verified, because a log of requests contains no decisions.
    #[error("the recording is a log of requests: it can be replayed without --verify")]
    RequestsOnly,
    /// The recording shows only the moment when it was written.
    #[error(transparent)]
    NoHistory(#[from] NoHistory),
    /// The caller cancelled the replay.
    #[error(transparent)]
    Cancelled(#[from] Cancelled),
    /// Time ran out before a search had a result.
    #[error("time ran out before the need of the recorded setting was known")]
    OutOfTime,
    /// The state before the first event cannot be reconstructed.
    #[error(
        "{blocks} blocks lived before the recording began, and their addresses are unknown, so its \
         decisions cannot be verified; it can be replayed without --verify"
    )]
    LiveBefore {
        /// The number of these blocks.
        blocks: usize,
    },
}

impl From<FreeError> for ReplayError {
    fn from(error: FreeError) -> Self {
        Self::Handle(error.reason)
    }
}

/// The result of replaying a workload.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Requests that succeeded in the first pass.
    pub allocations: u64,
    /// Blocks that were freed in the first pass, not counting those freed after its last operation.
    pub frees: u64,
    /// Requests that failed in the first pass.
    pub ooms: u64,
    /// The report of the first request in the first pass that failed for lack of memory.
    pub first_out_of_memory: Option<Box<OutOfMemory>>,
    /// The counters at the end of the first pass, before the remaining blocks were freed.
    pub statistics: Statistics,
    /// The median of nanoseconds per operation (request or free) over passes 2 to N. If there was only one
    /// pass, the value of that pass. Zero without a clock.
    pub ns_per_op: f64,
    /// Seconds for all passes. Zero without a clock.
    pub wall_s: f64,
}

/// How a workload is replayed, and the callbacks.
pub struct Manner<'a> {
    /// The number of passes; 0 counts as 1.
    pub passes: u32,
    /// Blocks that exist already, by number. If any, the first pass skips the operations before the
    /// recording.
    pub held: Vec<(u32, Allocation)>,
    /// Called once, when all blocks from before the recording have been allocated.
    pub begun: &'a dyn Fn(),
    /// Called at the end of the first pass with its counters; may add to them.
    pub on_read: &'a dyn Fn(&mut Statistics),
    /// Measures the time. Receives the number of passes done after each of several, and may cancel the next.
    pub progress: &'a dyn Progress,
}

impl Default for Manner<'_> {
    /// Returns one pass without callbacks.
    fn default() -> Self {
        Self { passes: 1, held: Vec::new(), begun: &|| (), on_read: &|_| (), progress: &Silent }
    }
}

/// Replays a workload `passes` times. After each pass the remaining blocks are freed; the cache stays.
///
/// With a `work_gate`, the work of other streams finishes at the recorded moments; without one, when the
/// device finishes it. `progress` measures the time; if there are several passes, it receives the number of
/// passes done, and may cancel the next. Peaks and sums of counters begin when the blocks from before the
/// recording have been allocated.
///
/// # Errors
///
/// [`ReplayError`] when the allocator fails for a reason other than memory, or `progress` cancels. Also,
/// before the first request, when the workload has more pairs of stream and pool than any program.
pub fn run(
    workload: &Workload,
    strategy: &Strategy,
    work_gate: Option<Arc<dyn WorkGate>>,
    passes: u32,
    progress: &dyn Progress,
) -> Result<Run, ReplayError> {
    run_as(workload, strategy, work_gate, Manner { passes, progress, ..Manner::default() })
}

/// Replays like [`run`], with all options.
///
/// # Errors
///
/// Those of [`run`].
pub fn run_as(
    workload: &Workload,
    strategy: &Strategy,
    work_gate: Option<Arc<dyn WorkGate>>,
    manner: Manner<'_>,
) -> Result<Run, ReplayError> {
    // Not generic, so that this crate compiles the loop for all of its users.
    match strategy.engine() {
        Some(engine) => run_on(workload, engine, work_gate, manner),
        None => run_on(workload, strategy, work_gate, manner),
    }
}

fn run_on<A: DeviceAllocator>(
    workload: &Workload,
    allocator: &A,
    work_gate: Option<Arc<dyn WorkGate>>,
    manner: Manner<'_>,
) -> Result<Run, ReplayError> {
    if manner.passes <= 1 && workload.blocks > DENSE_MAX {
        run_with(workload, allocator, work_gate, manner, LiveBlocks::new())
    } else {
        run_with(workload, allocator, work_gate, manner, EveryBlock::of(workload))
    }
}

fn run_with<A: DeviceAllocator, B: Blocks>(
    workload: &Workload,
    allocator: &A,
    work_gate: Option<Arc<dyn WorkGate>>,
    manner: Manner<'_>,
    blocks: B,
) -> Result<Run, ReplayError> {
    let mut before = if manner.held.is_empty() { workload.seeded as usize } else { 0 };
    let mut runner = Runner::new(workload, allocator, work_gate, blocks, manner.held)?;
    let (progress, passes) = (manner.progress, manner.passes.max(1));
    let begin = progress.elapsed();
    let mut result = Run::default();
    let mut times = Vec::new();
    for pass in 0..passes {
        progress.check()?;
        let start = progress.elapsed();
        let mut counts = PassCounts::default();
        let (seeds, ops) = (workload.seeded as usize, &workload.ops);
        if pass > 0 {
            before = seeds;
        }
        runner.steps(ops, 0..before, &mut counts)?;
        if pass == 0 {
            if let Some(counters) = allocator.control().counters.filter(|_| workload.seeded > 0) {
                counters.reset_accumulated();
                counters.reset_peaks();
            }
            (manner.begun)();
        }
        runner.steps(ops, seeds..ops.len(), &mut counts)?;
        let operations = (counts.allocations + counts.frees + counts.ooms).max(1);
        let elapsed = progress.elapsed().saturating_sub(start);
        #[expect(clippy::cast_precision_loss, reason = "operations are far below 2^52")]
        times.push(elapsed.as_secs_f64() * 1e9 / operations as f64);
        if pass == 0 {
            let counters = allocator.control().counters;
            result.statistics = counters.map(|c| c.statistics()).unwrap_or_default();
            (manner.on_read)(&mut result.statistics);
            result.allocations = counts.allocations;
            result.frees = counts.frees;
            result.ooms = counts.ooms;
            result.first_out_of_memory = runner.first_out_of_memory.take();
        }
        runner.free_survivors()?;
        if passes > 1 {
            progress.at(Stage::Replay, u64::from(pass) + 1, passes.into());
        }
    }
    if times.len() > 1 {
        times.remove(0);
    }
    times.sort_by(f64::total_cmp);
    result.ns_per_op = times[times.len() / 2];
    result.wall_s = progress.elapsed().saturating_sub(begin).as_secs_f64();
    Ok(result)
}

/// Returns true if every request of a workload succeeds. Stops at the first failure. Does not free the
/// blocks that are live at the end; their memory is released when the allocator is dropped.
///
/// # Errors
///
/// The same as [`run`].
pub fn is_served(
    workload: &Workload,
    strategy: &Strategy,
    work_gate: Option<Arc<dyn WorkGate>>,
) -> Result<bool, ReplayError> {
    let mut served = true;
    walk(workload, strategy, work_gate, Vec::new(), |step| {
        served = !step.is_failure;
        if served { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    Ok(served)
}

/// A finished operation.
pub struct Step<'a> {
    /// The index of the operation in [`Workload::ops`].
    pub at: usize,
    /// Whether the operation was a request that failed.
    pub is_failure: bool,
    /// The live blocks.
    pub blocks: &'a dyn Blocks,
}

/// Replays a workload once and passes each finished operation to `on_step`, which may stop the replay. Does
/// not free the blocks that are live at the end. Blocks in `held` exist already. If there are any, all
/// operations from before the recording are skipped, and only the last of them is passed to `on_step`.
///
/// # Errors
///
/// Those of [`run`].
pub fn walk(
    workload: &Workload,
    strategy: &Strategy,
    work_gate: Option<Arc<dyn WorkGate>>,
    held: Vec<(u32, Allocation)>,
    mut on_step: impl FnMut(Step<'_>) -> ControlFlow<()>,
) -> Result<(), ReplayError> {
    match strategy.engine() {
        Some(engine) => walk_on(workload, engine, work_gate, held, &mut on_step),
        None => walk_on(workload, strategy, work_gate, held, &mut on_step),
    }
}

/// Called after each operation.
type OnStep<'a> = dyn FnMut(Step<'_>) -> ControlFlow<()> + 'a;

fn walk_on<A: DeviceAllocator>(
    workload: &Workload,
    allocator: &A,
    work_gate: Option<Arc<dyn WorkGate>>,
    held: Vec<(u32, Allocation)>,
    on_step: &mut OnStep<'_>,
) -> Result<(), ReplayError> {
    if workload.blocks > DENSE_MAX {
        walk_with(workload, allocator, work_gate, LiveBlocks::new(), held, on_step)
    } else {
        walk_with(workload, allocator, work_gate, EveryBlock::of(workload), held, on_step)
    }
}

fn walk_with<A: DeviceAllocator, B: Blocks>(
    workload: &Workload,
    allocator: &A,
    work_gate: Option<Arc<dyn WorkGate>>,
    blocks: B,
    held: Vec<(u32, Allocation)>,
    on_step: &mut OnStep<'_>,
) -> Result<(), ReplayError> {
    let mut counts = PassCounts::default();
    let before = if held.is_empty() { 0 } else { workload.seeded as usize };
    let mut runner = Runner::new(workload, allocator, work_gate, blocks, held)?;
    let first = before.saturating_sub(1);
    for (at, op) in (first..).zip(workload.ops.refs(first..workload.ops.len())) {
        let failures = counts.ooms;
        if at >= before {
            runner.step(op, &mut counts)?;
        }
        let is_failure = counts.ooms > failures;
        if on_step(Step { at, is_failure, blocks: &runner.blocks }).is_break() {
            break;
        }
    }
    Ok(())
}

/// The maximum number of pairs of a stream and a pool in a workload.
const HEAPS_MAX: usize = 8192;

/// Returns an error if there are more than [`HEAPS_MAX`] different pairs.
pub(super) fn check_heaps<P: Copy + Eq + Hash>(
    pairs: impl Iterator<Item = (StreamId, P)>,
) -> Result<(), ReplayError> {
    // Most requests have the pair of the previous one, which is not hashed again.
    let mut previous = None;
    let is_other = |pair: &(StreamId, P)| previous.replace(*pair) != Some(*pair);
    let heaps = pairs.filter(is_other).collect::<HashSet<_>>().len();
    if heaps > HEAPS_MAX { Err(ReplayError::TooManyHeaps { heaps }) } else { Ok(()) }
}

/// Returns the (stream, pool) pairs of all requests.
fn pairs(workload: &Workload) -> impl Iterator<Item = (StreamId, PoolId)> {
    workload.ops.iter().filter_map(|op| match op {
        Op::Allocate { stream, pool, .. } => Some((stream, pool)),
        Op::AllocateFailing { stream, .. } => Some((stream, PoolId::DEFAULT)),
        Op::Free { .. } | Op::FreeInUse { .. } | Op::Finished { .. } | Op::EmptyCache => None,
    })
}

/// Creates the workload's private pools, which exist as long as the allocator. Keeps pools that exist
/// already. Returns false if the allocator has no private pools.
fn create_pools(
    workload: &Workload,
    allocator: &impl DeviceAllocator,
) -> Result<bool, ReplayError> {
    let Some(pools) = allocator.control().private_pools else {
        return Ok(false);
    };
    for &pool in &workload.pools {
        match pools.create_pool(pool, PoolOptions::default()) {
            Ok(()) | Err(PoolError::Taken { .. }) => {}
            Err(error) => return Err(ReplayError::Alloc(error.into())),
        }
    }
    Ok(true)
}

#[derive(Clone, Copy, Debug, Default)]
struct PassCounts {
    allocations: u64,
    frees: u64,
    ooms: u64,
}

struct Runner<'a, A, B> {
    allocator: &'a A,
    lanes: Option<LaneWork>,
    blocks: B,
    first_out_of_memory: Option<Box<OutOfMemory>>,
    /// Whether the allocator has private pools.
    has_pools: bool,
}

impl<'a, A: DeviceAllocator, B: Blocks> Runner<'a, A, B> {
    fn new(
        workload: &Workload,
        allocator: &'a A,
        work_gate: Option<Arc<dyn WorkGate>>,
        mut blocks: B,
        held: Vec<(u32, Allocation)>,
    ) -> Result<Self, ReplayError> {
        check_heaps(pairs(workload))?;
        let has_pools = create_pools(workload, allocator)?;
        held.into_iter().for_each(|(id, block)| blocks.put(id, block));
        let lanes = work_gate.map(LaneWork::new);
        Ok(Self { allocator, lanes, blocks, first_out_of_memory: None, has_pools })
    }

    /// Runs the operations with these indices. Not inlined, so that the loop has all registers.
    #[inline(never)]
    fn steps(
        &mut self,
        ops: &Ops,
        range: Range<usize>,
        counts: &mut PassCounts,
    ) -> Result<(), ReplayError> {
        ops.refs(range).try_for_each(|op| self.step(op, counts))
    }

    /// Runs an operation. Inlined in each loop: a call takes 30 instructions, of which most save registers
    /// and return the result.
    #[inline(always)]
    fn step(&mut self, op: OpRef<'_>, counts: &mut PassCounts) -> Result<(), ReplayError> {
        if let Some((id, bytes, stream, pool)) = op.allocated() {
            match self.allocate(pool, Request::new(bytes, stream)) {
                Ok(allocation) => {
                    self.blocks.put(id, allocation);
                    counts.allocations += 1;
                }
                Err(error) => {
                    self.failed(error)?;
                    counts.ooms += 1;
                }
            }
        } else if let Some(id) = op.freed() {
            if let Some(allocation) = self.blocks.take(id) {
                self.free(allocation)?;
                counts.frees += 1;
            }
        } else {
            self.rarer_step(op, counts)?;
        }
        Ok(())
    }

    /// Runs an operation of a kind that is rare in most recordings. This is a separate function, so that
    /// the loop over the common operations keeps its values in registers.
    #[inline(never)]
    fn rarer_step(&mut self, op: OpRef<'_>, counts: &mut PassCounts) -> Result<(), ReplayError> {
        match op.unpacked() {
            Op::Allocate { .. } | Op::Free { .. } => {}
            Op::AllocateFailing { bytes, stream, .. } => {
                match self.allocator.allocate(Request::new(bytes, stream)) {
                    Ok(allocation) => {
                        self.free(allocation)?;
                        counts.allocations += 1;
                        counts.frees += 1;
                    }
                    // This request also failed when it was recorded.
                    Err(AllocError::ZeroBytes) => counts.ooms += 1,
                    Err(error) => {
                        self.failed(error)?;
                        counts.ooms += 1;
                    }
                }
            }
            Op::FreeInUse { id, lane } => {
                if let Some(allocation) = self.blocks.take(id) {
                    self.free_in_use(id, lane, allocation)?;
                    counts.frees += 1;
                }
            }
            Op::Finished { id } => {
                if let Some(lanes) = &mut self.lanes {
                    lanes.finish(u64::from(id))?;
                }
            }
            Op::EmptyCache => {
                if let Some(caching) = self.allocator.control().caching {
                    caching.empty_cache()?;
                }
            }
        }
        Ok(())
    }

    /// Handles a failed request. Only errors other than lack of memory and excessive size end the replay.
    #[cold]
    fn failed(&mut self, error: AllocError) -> Result<(), ReplayError> {
        match error {
            AllocError::OutOfMemory(report) => {
                self.first_out_of_memory.get_or_insert(report);
                Ok(())
            }
            AllocError::TooLarge { .. } => Ok(()),
            error => Err(error.into()),
        }
    }

    /// Allocates in `pool`. An allocator without private pools serves all requests from one pool.
    #[inline]
    fn allocate(&self, pool: PoolId, request: Request) -> Result<Allocation, AllocError> {
        let is_private = pool != PoolId::DEFAULT && self.has_pools;
        self.allocator.allocate(if is_private { request.in_pool(pool) } else { request })
    }

    fn free_in_use(
        &mut self,
        id: u32,
        lane: StreamId,
        allocation: Allocation,
    ) -> Result<(), ReplayError> {
        if let Some(lanes) = &self.lanes {
            lanes.hold(lane)?;
        }
        if let Some(cross) = self.allocator.control().cross_stream {
            cross.record_stream(&allocation, lane)?;
        }
        self.free(allocation)?;
        if let Some(lanes) = &mut self.lanes {
            lanes.freed(lane, u64::from(id))?;
        }
        Ok(())
    }

    #[inline]
    fn free(&self, allocation: Allocation) -> Result<(), ReplayError> {
        Ok(self.allocator.free(allocation)?)
    }

    /// Frees all live blocks and finishes all work of lanes, so that no pass starts with live blocks.
    fn free_survivors(&mut self) -> Result<(), ReplayError> {
        while let Some(allocation) = self.blocks.take_any() {
            self.free(allocation)?;
        }
        if let Some(lanes) = &mut self.lanes {
            lanes.finish_all()?;
        }
        if let Some(cross) = self.allocator.control().cross_stream {
            cross.process_events()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stratalloc::config::Config;
    use stratalloc::registry::{self, BuildOptions};
    use stratalloc_sim::{Sim, SimOptions};

    fn repeat(ops: Vec<Op>) -> Result<Run, ReplayError> {
        let device = Arc::new(Sim::new(SimOptions::default()));
        let allocator = registry::build(&Config::default(), device, BuildOptions::default())?;
        let blocks = u32::try_from(ops.len()).unwrap();
        let workload = Workload { ops: ops.into(), blocks, ..Workload::default() };
        run(&workload, &allocator, None, 1, &Silent)
    }

    fn allocate(id: u32, bytes: u64, stream: u64) -> Op {
        Op::Allocate { id, bytes, stream: StreamId(stream), pool: PoolId::DEFAULT }
    }

    #[test]
    fn requests_that_no_device_could_serve_are_counted() {
        let stream = StreamId::DEFAULT;
        let vain = |id, bytes| Op::AllocateFailing { id, bytes, stream };
        let run = repeat(vec![vain(0, 0), vain(1, u64::MAX), allocate(2, 1 << 62, 0)]).unwrap();
        assert_eq!((run.allocations, run.ooms), (0, 3));
        let error = repeat(vec![allocate(0, 0, 0)]).unwrap_err();
        assert!(matches!(error, ReplayError::Alloc(AllocError::ZeroBytes)), "{error}");
    }

    #[test]
    fn more_streams_than_programs_have_are_refused_before_any_request() {
        let one_each = |count: u32| (0..count).map(|id| allocate(id, 512, id.into())).collect();
        let error = repeat(one_each(8193)).unwrap_err();
        assert!(matches!(error, ReplayError::TooManyHeaps { heaps: 8193 }), "{error}");
        assert_eq!(repeat(one_each(100)).unwrap().allocations, 100);
    }
}
