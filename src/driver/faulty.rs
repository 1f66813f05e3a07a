//! A driver that fails the k-th call, to show that whoever uses it gives nothing away half done.
//!
//! A call that is made to fail never reaches the inner driver. A test counts the calls of some work
//! once, then does the work once for each index with a plan that fails there. Questions that cannot
//! fail (`info`, `granularity_bytes`, which parts there are) are neither counted nor failed.

use std::os::fd::OwnedFd;

use parking_lot::Mutex;

use super::call::Call;
use super::forward::{forward, part};
use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverPoolId, DriverPoolUsage, DriverResult,
    Exportable, Fabric, FabricHandle, Ipc, MemoryInfo, MemoryPools, NodeId, Peers, PhysicalId,
    ProcessUsage, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};

/// Which calls fail, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// The index of the call, counted from 0 since the plan was armed. With `only`, calls of other
    /// names do not count.
    pub at: u64,
    /// The kind of error it reports.
    pub kind: DriverErrorKind,
    /// Whether every call from then on fails, not just this one.
    pub repeat: bool,
    /// The one method that fails, by its name in the driver traits. `None`: any.
    pub only: Option<&'static str>,
}

/// A driver that fails as planned; everything else is `D`'s.
#[derive(Debug)]
pub struct Faulty<D> {
    inner: D,
    faults: Mutex<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    plan: Option<FaultPlan>,
    counted: u64,
    failed: u64,
}

impl<D: Driver> Faulty<D> {
    /// Wraps a driver. Nothing fails before [`arm`](Self::arm), but calls are counted.
    #[must_use]
    pub fn new(inner: D) -> Self {
        Self { inner, faults: Mutex::default() }
    }

    /// Makes a plan the current one and counts calls and failures from 0 again.
    ///
    /// # Panics
    ///
    /// When `plan.only` is not the name of a method that can fail.
    pub fn arm(&self, plan: FaultPlan) {
        if let Some(name) = plan.only {
            Call::named(name);
        }
        *self.faults.lock() = Faults { plan: Some(plan), ..Faults::default() };
    }

    /// Drops the plan: nothing fails any more, and calls and failures are counted from 0 again.
    pub fn disarm(&self) {
        *self.faults.lock() = Faults::default();
    }

    /// Calls that the plan counted since it was armed, failed ones included. Without a plan: all
    /// calls.
    #[must_use]
    pub fn counted_calls(&self) -> u64 {
        self.faults.lock().counted
    }

    /// Calls that were made to fail since the plan was armed.
    #[must_use]
    pub fn failed_calls(&self) -> u64 {
        self.faults.lock().failed
    }

    /// The driver that does the work. Calls to it directly are neither counted nor failed.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Counts a call and fails it if it is its turn.
    fn enter(&self, call: &'static str) -> DriverResult<&D> {
        let mut faults = self.faults.lock();
        let only = faults.plan.and_then(|plan| plan.only);
        if only.is_some_and(|only| only != call) {
            return Ok(&self.inner);
        }
        let index = faults.counted;
        faults.counted += 1;
        match faults.plan {
            Some(plan) if index == plan.at || (plan.repeat && index > plan.at) => {
                faults.failed += 1;
                let message = format!("made to fail as call {index}");
                Err(DriverError::new(plan.kind, call, 0, message))
            }
            _ => Ok(&self.inner),
        }
    }
}

macro_rules! enter_part {
    ($name:ident: $accessor:ident -> $part:ident) => {
        fn $name<'a, D: Driver>(
            faulty: &'a Faulty<D>,
            call: &'static str,
        ) -> DriverResult<&'a dyn $part> {
            part(call, faulty.enter(call)?.$accessor())
        }
    };
}

enter_part!(enter_virtual_memory: virtual_memory -> VirtualMemory);
fn enter_fabric<'a, D: Driver>(
    faulty: &'a Faulty<D>,
    call: &'static str,
) -> DriverResult<&'a dyn Fabric> {
    part(call, faulty.enter(call)?.virtual_memory().and_then(VirtualMemory::fabric))
}

enter_part!(enter_memory_pools: memory_pools -> MemoryPools);
enter_part!(enter_ipc: ipc -> Ipc);
enter_part!(enter_peers: peers -> Peers);
enter_part!(enter_capture: capture -> Capture);
enter_part!(enter_processes: processes -> Processes);

fn enter<'a, D: Driver>(faulty: &'a Faulty<D>, call: &'static str) -> DriverResult<&'a D> {
    faulty.enter(call)
}

impl<D: Driver> Driver for Faulty<D> {
    fn info(&self) -> DeviceInfo {
        self.inner.info()
    }

    forward! { @driver_without_addresses enter }
    forward! { @driver_with_addresses enter }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        self.inner.is_per_thread_stream(stream)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as _)
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        self.inner.memory_pools().map(|_| self as _)
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        self.inner.ipc().map(|_| self as _)
    }

    fn peers(&self) -> Option<&dyn Peers> {
        self.inner.peers().map(|_| self as _)
    }

    fn capture(&self) -> Option<&dyn Capture> {
        self.inner.capture().map(|_| self as _)
    }

    fn processes(&self) -> Option<&dyn Processes> {
        self.inner.processes().map(|_| self as _)
    }
}

impl<D: Driver> VirtualMemory for Faulty<D> {
    fn granularity_bytes(&self) -> u64 {
        let part = self.inner.virtual_memory();
        part.expect("announced only when the inner driver has it").granularity_bytes()
    }

    fn fabric(&self) -> Option<&dyn Fabric> {
        self.inner.virtual_memory()?.fabric().map(|_| self as _)
    }

    forward! { @virtual_without_addresses enter_virtual_memory }
    forward! { @virtual_with_addresses enter_virtual_memory }
}

impl<D: Driver> Fabric for Faulty<D> {
    forward! { @fabric enter_fabric }
}

impl<D: Driver> MemoryPools for Faulty<D> {
    forward! { @memory_pools enter_memory_pools }
}

impl<D: Driver> Ipc for Faulty<D> {
    forward! { @ipc enter_ipc }
}

impl<D: Driver> Peers for Faulty<D> {
    forward! { @peers_without_addresses enter_peers }
    forward! { @peers_with_addresses enter_peers }
}

impl<D: Driver> Capture for Faulty<D> {
    forward! { @capture enter_capture }
}

impl<D: Driver> Processes for Faulty<D> {
    forward! { @processes enter_processes }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::sim::{Sim, SimOptions};
    use crate::size::MIB;

    fn faulty() -> Faulty<Arc<Sim>> {
        Faulty::new(Arc::new(Sim::new(SimOptions::default())))
    }

    fn plan(at: u64) -> FaultPlan {
        FaultPlan { at, kind: DriverErrorKind::Other, repeat: false, only: None }
    }

    /// Calls every method that can fail and that the simulated device has, once.
    fn call_all(driver: &dyn Driver) -> Vec<DriverResult<()>> {
        let (stream, event, at) = (StreamId(7), EventId(1), 0x1000);
        let memory = driver.virtual_memory().unwrap();
        let pools = driver.memory_pools().unwrap();
        let pool = DriverPoolId(0);
        let descriptor = || std::io::pipe().unwrap().0.into();
        vec![
            driver.make_current(),
            driver.memory_info().map(drop),
            driver.allocate(MIB).map(drop),
            driver.free(at, MIB),
            driver.create_stream().map(drop),
            driver.destroy_stream(stream),
            driver.synchronize_stream(stream),
            driver.synchronize_device(),
            driver.create_event().map(drop),
            driver.record_event(event, stream),
            driver.query_event(event).map(drop),
            driver.synchronize_event(event),
            driver.wait_event(stream, event),
            driver.destroy_event(event),
            driver.copy(at, at, MIB, stream),
            driver.copy_from_host(at, &[0], stream),
            driver.copy_to_host(&mut [0], at, stream),
            driver.fill(at, 0, MIB, stream),
            driver.capture_status(stream).map(drop),
            memory.reserve(2 * MIB).map(drop),
            memory.unreserve(at, MIB),
            memory.create(2 * MIB, Exportable::No).map(drop),
            memory.release(PhysicalId(1)),
            memory.map(at, MIB, PhysicalId(1)),
            memory.set_access(at, MIB, DeviceId(0)),
            memory.unmap(at, MIB),
            memory.export(PhysicalId(1)).map(drop),
            memory.import(descriptor(), MIB).map(drop),
            pools.default_pool().map(drop),
            pools.create_pool().map(drop),
            pools.destroy_pool(pool),
            pools.set_release_threshold(pool, 0),
            pools.release_threshold(pool).map(drop),
            pools.keep_memory(pool, true),
            pools.allow_reuse(pool),
            pools.open_pool(pool, DeviceId(1)),
            pools.allocate_async(pool, MIB, stream).map(drop),
            pools.free_async(at, stream),
            pools.trim(pool, 0),
            pools.usage(pool).map(drop),
            pools.reset_high_marks(pool),
            pools.graph_usage().map(drop),
            pools.reset_graph_high_marks(),
            pools.trim_graphs(),
            driver.capture().unwrap().expect_captures(true),
            driver.capture().unwrap().expected().map(drop),
            driver.capture().unwrap().begin(stream).map(drop),
            driver.capture().unwrap().end(stream),
            driver.capture().unwrap().frontier(stream).map(drop),
            driver.capture().unwrap().dependencies(NodeId(1)).map(drop),
            driver.capture().unwrap().add_to_frontier(stream, &[]),
            driver.capture().unwrap().free_behind(at, stream, &[]).map(drop),
            driver.processes().unwrap().list().map(drop),
        ]
    }

    #[test]
    fn every_method_reaches_the_method_of_the_same_name_once() {
        let driver = faulty();
        let results = call_all(&driver);
        assert_eq!(driver.counted_calls(), results.len() as u64);
        let absent = ["share", "open", "close", "can_access", "enable_access", "copy_peer"];
        let absent = [&absent[..], &["export_handle", "import_handle"]].concat();
        let names = Call::ALL.into_iter().map(Call::name);
        let expected = names.filter(|name| !absent.contains(name));
        let counts = driver.inner().call_counts();
        assert_eq!(counts, expected.map(|name| (name, 1)).collect::<Vec<_>>());
    }

    #[test]
    fn each_index_fails_its_own_call_and_spares_the_device() {
        let count = call_all(&faulty()).len();
        for at in 0..count {
            let driver = faulty();
            driver.arm(plan(at as u64));
            let results = call_all(&driver);
            let error = results[at].clone().unwrap_err();
            assert_eq!(error.message, format!("made to fail as call {at}"));
            assert_eq!(driver.failed_calls(), 1);
            assert_eq!(driver.inner().calls(error.call), 0);
            assert_eq!(driver.inner().total_calls(), count as u64 - 1);
        }
    }

    #[test]
    fn a_repeating_plan_fails_from_then_on_until_it_is_dropped() {
        let driver = faulty();
        driver.arm(FaultPlan { repeat: true, kind: DriverErrorKind::DeviceLost, ..plan(1) });
        driver.create_event().unwrap();
        for _ in 0..2 {
            let error = driver.create_event().unwrap_err();
            assert_eq!(error.kind, DriverErrorKind::DeviceLost);
        }
        assert_eq!((driver.counted_calls(), driver.failed_calls()), (3, 2));
        driver.disarm();
        driver.create_event().unwrap();
    }

    #[test]
    fn a_plan_for_one_method_counts_only_that() {
        let driver = faulty();
        driver.arm(FaultPlan { only: Some("allocate"), ..plan(1) });
        let a = driver.allocate(MIB).unwrap();
        driver.create_event().unwrap();
        driver.allocate(MIB).unwrap_err();
        driver.free(a, MIB).unwrap();
        assert_eq!(driver.counted_calls(), 2);
        driver.allocate(MIB).unwrap();
    }

    #[test]
    #[should_panic(expected = "no driver call is named")]
    fn a_plan_for_a_method_that_does_not_exist_is_a_mistake_in_the_test() {
        faulty().arm(FaultPlan { only: Some("alocate"), ..plan(0) });
    }
}
