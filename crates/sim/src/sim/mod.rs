//! The simulated device. It keeps exact books of addresses, bytes and order, and refuses calls that a real
//! device would refuse.
//!
//! [`Sim`] has any size and a simulated clock; its events are under the test's control. It stores no bytes:
//! copies check their ranges and move nothing, and copies to the host return zeros. No call waits. Calls that
//! synchronise and copies from or to the host finish the work that they would wait for, and advance the clock
//! to its end. No other call does, not even [`free`](Driver::free). The default costs of calls on the clock
//! were measured on an H200.
//!
//! [`Host`](crate::Host) has memory behind its addresses (`backing`), and worker threads that run its work
//! (`workers`). Its calls take no simulated time.
//!
//! Read next: `work` (streams and events), `ranges` (addresses and bytes), `control` (controls for
//! tests).

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use hashbrown::HashSet;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::refusal::{Done, Refusal, check_whole, ensure, invalid, out_of_memory};
use stratalloc::driver::call::{Call, calls, forward};
use stratalloc::driver::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, HostMemory, MemoryInfo, MemoryPools,
    Peers, PinnedMemory, ProcessUsage, Processes, VirtualMemory,
};
use stratalloc::error::DriverErrorKind;
use stratalloc::ids::{DeviceId, EventId, StreamId};
use stratalloc::size::MIB;

pub(super) mod backing;
mod control;
mod costs;
mod graph;
mod host_memory;
mod idle;
mod mapping;
mod peers;
mod pinned;
mod pool_books;
mod pools;
mod ranges;
#[cfg(test)]
mod tests;
mod work;
// Only `host`, which needs Linux, has threads.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
mod workers;

use backing::{Backing, Task};
pub use costs::{CallCosts, Cost};
use graph::Graphs;
use host_memory::PageLocked;
use mapping::Mappings;
use pinned::Pinned;
use pools::Pools;
use ranges::{AddressSpace, Budget};
use work::{Event, Mark, Work};
pub use workers::Gate;
use workers::Job;

/// Granularity of addresses, and of the sizes of physical pieces.
const GRANULARITY_BYTES: u64 = 2 * MIB;

/// When events count as finished.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventMode {
    /// When the test finishes them, or when a call waits for them.
    Manual,
    /// Immediately.
    #[default]
    Immediate,
    /// This many nanoseconds after they were recorded. Events of a stream finish in order, and after the
    /// events that the stream waited for.
    After(u64),
}

/// Order in which a simulated device assigns addresses to new segments and reservations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressOrder {
    /// The lowest free addresses that fit.
    #[default]
    Lowest,
    /// Above all addresses that were assigned before.
    Rising,
    /// Below all addresses that were assigned before.
    Falling,
}

/// Properties of a simulated device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Ordinal of the device.
    pub device: DeviceId,
    /// Total memory.
    pub total_bytes: u64,
    /// Human-readable name.
    pub name: String,
    /// When events finish.
    pub event_mode: EventMode,
    /// Cost of each call on the clock.
    pub costs: CallCosts,
    /// Number of other devices that it can access: those with the lowest ordinals. With 0, [`Driver::peers`]
    /// returns `None`.
    pub reachable_devices: u32,
    /// Whether physical pieces can be exported as fabric handles. Only this device can import them.
    pub fabric: bool,
    /// Order of the addresses of new segments and reservations.
    pub addresses: AddressOrder,
    /// Maximum of the bytes of page-locked host memory. `None`: as much as the device has memory.
    pub host_bytes: Option<u64>,
    /// The NUMA node of the host that [`HostMemory::host_node`] returns.
    pub host_node: Option<u32>,
}

impl Default for Sim {
    fn default() -> Self {
        Self::new(SimOptions::default())
    }
}

impl Default for SimOptions {
    /// Returns the options of an H200 whose events finish immediately.
    fn default() -> Self {
        Self {
            device: DeviceId(0),
            total_bytes: 150_109_880_320,
            name: "simulated H200".to_owned(),
            event_mode: EventMode::default(),
            costs: CallCosts::H200,
            reachable_devices: 0,
            fabric: false,
            addresses: AddressOrder::default(),
            host_bytes: None,
            host_node: None,
        }
    }
}

/// A simulated device without memory, with a clock.
///
/// It accepts streams that it did not create, because recordings contain raw handles. It refuses destroyed
/// streams. A call that synchronises finishes the work that it would wait for, in every [`EventMode`].
pub type Sim = SimulatedDevice<Clock>;

/// A simulated device of either kind: [`Sim`] or [`Host`](crate::Host).
///
/// Dropping it finishes all work that its threads run, even work behind closed gates, and releases all
/// memory.
#[derive(Debug)]
pub struct SimulatedDevice<K: Kind> {
    shared: Arc<Shared>,
    kind: PhantomData<K>,
}

/// The kind of a simulated device: what finishes its work.
pub trait Kind: fmt::Debug + Send + Sync + 'static {
    /// Name of the driver.
    const DRIVER: &'static str;
}

/// The kind of [`Sim`]: the clock or the test finishes work.
#[derive(Debug)]
pub enum Clock {}

impl Kind for Clock {
    const DRIVER: &'static str = "sim";
}

/// The state of a device, and the condition variable for changes to its work.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    options: SimOptions,
    now_ns: u64,
    counts: [u64; Call::ALL.len()],
    budget: Budget,
    memory: AddressSpace,
    work: Work,
    mappings: Mappings,
    graphs: Graphs,
    pools: Pools,
    pinned: Pinned,
    host: PageLocked,
    /// Other devices for which access was enabled.
    peers: HashSet<DeviceId>,
    /// The memory behind the addresses. `None`: there is none.
    backing: Option<Arc<dyn Backing>>,
}

/// The locked state during a call. The lock is released only while the call waits for work.
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    shared: &'a Arc<Shared>,
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Sim {
    /// Creates a device without allocations.
    #[must_use]
    pub fn new(options: SimOptions) -> Self {
        Self::with(options, None)
    }
}

impl<K: Kind> SimulatedDevice<K> {
    /// Creates a device. With a backing, the device has memory, and worker threads run its work.
    pub(super) fn with(options: SimOptions, backing: Option<Arc<dyn Backing>>) -> Self {
        let addresses = 0x7f00_0000_0000..0x7fff_ffe0_0000_0000;
        let state = State {
            now_ns: 0,
            counts: [0; Call::ALL.len()],
            budget: Budget { used_bytes: 0, peak_used_bytes: 0, total_bytes: options.total_bytes },
            memory: AddressSpace::new(addresses, options.addresses, backing.clone(), true),
            work: Work::new(options.event_mode, backing.is_some()),
            mappings: Mappings::new(options.addresses, backing.clone()),
            graphs: Graphs::default(),
            pools: Pools::new(backing.clone()),
            pinned: Pinned::default(),
            host: PageLocked::new(&options, backing.clone()),
            peers: HashSet::new(),
            options,
            backing,
        };
        let shared = Shared { state: Mutex::new(state), changed: Condvar::new() };
        Self { shared: Arc::new(shared), kind: PhantomData }
    }

    fn lock(&self) -> Locked<'_> {
        Locked { state: self.shared.state.lock(), shared: &self.shared }
    }

    /// Runs and counts a call. `act` advances the clock by the call's cost.
    fn sized<T>(
        &self,
        call: Call,
        act: impl FnOnce(&mut Locked<'_>) -> Done<T>,
    ) -> DriverResult<T> {
        let mut locked = self.lock();
        locked.counts[call as usize] += 1;
        act(&mut locked).map_err(|refusal| refusal.of(call))
    }

    /// Runs and counts a call, and advances the clock by the cost `other`. `Allocate` and `Free` advance the
    /// clock by costs of their own.
    fn call<T>(&self, call: Call, act: impl FnOnce(&mut Locked<'_>) -> Done<T>) -> DriverResult<T> {
        self.sized(call, |locked| {
            if !matches!(call, Call::Allocate | Call::Free) {
                let cost_ns = locked.options.costs.other.fixed_ns;
                locked.pass(cost_ns);
            }
            act(locked)
        })
    }
}

impl State {
    fn pass(&mut self, ns: u64) {
        self.now_ns = self.now_ns.saturating_add(ns);
    }

    /// Submits work to a stream. On a captured stream the work becomes a node, and the result is `None`.
    /// Otherwise the result is the index of the stream.
    fn submit(&mut self, stream: StreamId) -> Done<Option<usize>> {
        let index = self.work.stream(stream)?;
        Ok(self.graphs.add_node(stream)?.is_none().then_some(index))
    }

    /// Checks that work of the device can access all of these bytes.
    fn check_reachable(&self, address: u64, size_bytes: u64) -> Done<()> {
        let is_valid = self.memory.holds(address, size_bytes)
            || self.mappings.holds(address, size_bytes)
            || self.pools.holds(address, size_bytes)
            || self.host.holds(address, size_bytes);
        ensure!(is_valid, "{size_bytes} bytes at {address:#x} are not all valid memory");
        Ok(())
    }

    fn make_current(&mut self) -> Done<()> {
        Ok(())
    }

    fn memory_info(&mut self) -> Done<MemoryInfo> {
        Ok(MemoryInfo {
            free_bytes: self.budget.free_bytes(),
            total_bytes: self.budget.total_bytes,
        })
    }

    fn allocate(&mut self, size_bytes: u64) -> Done<u64> {
        self.pass(self.options.costs.allocate.of(size_bytes));
        self.budget.check(size_bytes)?;
        let address = self.memory.take(size_bytes)?;
        self.budget.take(size_bytes);
        Ok(address)
    }

    fn create_stream(&mut self) -> Done<StreamId> {
        Ok(self.work.create_stream())
    }

    fn destroy_stream(&mut self, stream: StreamId) -> Done<()> {
        self.graphs.check_not_captured(stream)?;
        self.work.destroy_stream(stream)
    }

    fn create_event(&mut self) -> Done<EventId> {
        Ok(self.work.create_event())
    }

    #[inline]
    fn record_event(&mut self, event: EventId, stream: StreamId) -> Done<()> {
        self.work.event(event)?;
        let index = self.work.stream(stream)?;
        let recorded = match self.graphs.add_node(stream)? {
            Some((capture, node)) => Event::Captured { capture, node },
            None => Event::Marked(self.work.mark(index, self.now_ns)),
        };
        self.work.set_event(event, recorded);
        Ok(())
    }

    #[inline]
    fn query_event(&mut self, event: EventId) -> Done<bool> {
        self.graphs.check_may_wait()?;
        match self.work.event(event)? {
            Event::Fresh => Ok(true),
            Event::Marked(mark) => Ok(self.work.is_finished(mark, self.now_ns)),
            Event::Captured { capture, .. } => Err(self.graphs.refusal_of(capture)),
        }
    }

    fn wait_event(&mut self, stream: StreamId, event: EventId) -> Done<()> {
        let event = self.work.event(event)?;
        let index = self.work.stream(stream)?;
        match event {
            Event::Fresh => Ok(()),
            Event::Marked(mark) => {
                self.graphs.check_no_wait_outside(stream)?;
                self.work.wait(index, mark, self.now_ns);
                Ok(())
            }
            Event::Captured { capture, node } => self.graphs.join(stream, capture, node),
        }
    }

    fn destroy_event(&mut self, event: EventId) -> Done<()> {
        self.work.destroy_event(event)
    }

    #[inline]
    fn capture_status(&mut self, stream: StreamId) -> Done<CaptureStatus> {
        self.work.stream(stream)?;
        Ok(self.graphs.status(stream))
    }

    /// Returns this process alone: no other process can hold memory of a simulated device.
    fn list(&mut self) -> Done<Vec<ProcessUsage>> {
        Ok(vec![ProcessUsage { process: std::process::id(), used_bytes: self.budget.used_bytes }])
    }
}

impl Locked<'_> {
    /// Waits until these marks are reached, or finishes them if no threads run the work. Returns the
    /// simulated time at which the last of them would have finished by itself.
    fn reach(&mut self, marks: &[Mark]) -> u64 {
        while self.work.has_threads && !marks.iter().all(|mark| self.work.is_finished(*mark, 0)) {
            self.shared.changed.wait(&mut self.state);
        }
        marks.iter().map(|mark| self.work.finish(*mark)).max().unwrap_or(0)
    }

    /// Waits for work and advances the clock to its end. Driver pools then release idle memory.
    fn wait_for(&mut self, marks: &[Mark]) {
        let ready_ns = self.reach(marks);
        self.now_ns = self.now_ns.max(ready_ns);
        self.shrink_pools();
    }

    fn wait_for_all(&mut self) {
        let ends = self.work.ends();
        self.wait_for(&ends);
    }

    /// Submits a task to a stream. On a captured stream it never runs.
    fn run(&mut self, stream: StreamId, task: Option<Task>) -> Done<()> {
        if let (Some(stream), Some(task)) = (self.submit(stream)?, task) {
            self.shared.push(&mut self.state, stream, Job::Run(task));
        }
        Ok(())
    }

    /// Frees memory. With worker threads, it first waits for all work, as on a real device. Without them, it
    /// finishes no work, because callers must not rely on `free` to synchronise.
    fn free(&mut self, address: u64, size_bytes: u64) -> Done<()> {
        let cost_ns = self.options.costs.free.of(size_bytes);
        self.pass(cost_ns);
        self.graphs.check_may_wait()?;
        // From here on no work can be submitted to the range. Work submitted before keeps its bytes alive.
        self.memory.give(address, size_bytes)?;
        if self.work.has_threads {
            self.wait_for_all();
        }
        self.budget.give(size_bytes);
        Ok(())
    }

    fn synchronize_stream(&mut self, stream: StreamId) -> Done<()> {
        self.graphs.check_may_wait_for(stream)?;
        let index = self.work.stream(stream)?;
        let end = self.work.end_of(index);
        self.wait_for(&[end]);
        Ok(())
    }

    fn synchronize_device(&mut self) -> Done<()> {
        self.graphs.check_none()?;
        self.wait_for_all();
        Ok(())
    }

    fn synchronize_event(&mut self, event: EventId) -> Done<()> {
        self.graphs.check_may_wait()?;
        match self.work.event(event)? {
            Event::Fresh => {}
            Event::Marked(mark) => self.wait_for(&[mark]),
            Event::Captured { capture, .. } => return Err(self.graphs.refusal_of(capture)),
        }
        Ok(())
    }

    fn copy(&mut self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(to, size_bytes)?;
        self.check_reachable(from, size_bytes)?;
        let is_apart = to.abs_diff(from) >= size_bytes;
        ensure!(is_apart, "{size_bytes} bytes at {to:#x} and {from:#x} overlap");
        let task = self.backing.as_ref().map(|backing| backing.copy(to, from, size_bytes));
        self.run(stream, task)
    }

    fn copy_from_host(&mut self, to: u64, from: &[u8], stream: StreamId) -> Done<()> {
        self.check_reachable(to, from.len() as u64)?;
        self.graphs.check_may_wait_for(stream)?;
        let task = self.backing.as_ref().map(|backing| {
            let bytes = Arc::new(Mutex::new(from.to_vec()));
            backing.write(to, bytes, 0..from.len())
        });
        self.run(stream, task)?;
        self.synchronize_stream(stream)
    }

    /// Without a backing it fills `to` with zeros: there is no memory to read.
    fn copy_to_host(&mut self, to: &mut [u8], from: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(from, to.len() as u64)?;
        self.graphs.check_may_wait_for(stream)?;
        let bytes = Arc::new(Mutex::new(vec![0; to.len()]));
        let backing = self.backing.as_ref();
        let task = backing.map(|backing| backing.read(from, Arc::clone(&bytes), 0..to.len()));
        self.run(stream, task)?;
        self.synchronize_stream(stream)?;
        to.copy_from_slice(&bytes.lock());
        Ok(())
    }

    fn fill(&mut self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> Done<()> {
        self.check_reachable(to, size_bytes)?;
        let task = self.backing.as_ref().map(|backing| backing.fill(to, byte, size_bytes));
        self.run(stream, task)
    }
}

impl<K: Kind> Driver for SimulatedDevice<K> {
    fn info(&self) -> DeviceInfo {
        let SimOptions { device, name, total_bytes, .. } = self.shared.state.lock().options.clone();
        DeviceInfo { device, name, driver: K::DRIVER, total_bytes }
    }

    calls! { Driver forward Self::call; }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        Some(self)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        Some(self)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        (self.shared.state.lock().options.reachable_devices > 0).then_some(self as &dyn Peers)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        Some(self)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        Some(self)
    }

    fn pinned_memory(&self) -> Option<&dyn PinnedMemory> {
        Some(self)
    }

    fn host_memory(&self) -> Option<&dyn HostMemory> {
        Some(self)
    }
}

impl<K: Kind> Processes for SimulatedDevice<K> {
    calls! { Processes forward Self::call; }
}

fn not_supported(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::NotSupported, None, message)
}

fn capture_active(message: impl Into<String>) -> Refusal {
    Refusal::new(DriverErrorKind::CaptureActive, None, message)
}
