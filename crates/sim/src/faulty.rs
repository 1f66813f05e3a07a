//! A driver wrapper in which the k-th call fails, to test that users of a driver recover from errors.
//!
//! A call that is made to fail never reaches the inner driver. A test first counts the calls of an operation.
//! Then it repeats the operation once per counted call, each time with a [`FaultPlan`] that fails that call.
//! Methods that cannot fail (`info`, `granularity_bytes`, accessors such as `virtual_memory`) are neither
//! counted nor failed.

use parking_lot::Mutex;

use stratalloc::driver::call::Call;
use stratalloc::driver::{DriverResult, Intercepted, Interceptor};
use stratalloc::error::{DriverError, DriverErrorKind};

/// The calls that fail, and their error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    /// The index of the call that fails, counted from 0 since the plan was armed. With `only`, calls of other
    /// methods do not count.
    pub at: u64,
    /// The kind of the error.
    pub kind: DriverErrorKind,
    /// Whether every later call that counts fails too.
    pub repeat: bool,
    /// Name of the only method that can fail, spelled as in the driver traits. `None`: every method can.
    pub only: Option<&'static str>,
}

/// A driver whose calls fail as its [`FaultPlan`] requires.
pub type Faulty<D> = Intercepted<D, Faults>;

/// The plan and the counters of a [`Faulty`] driver.
#[derive(Debug, Default)]
pub struct Faults(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    plan: Option<FaultPlan>,
    counted: u64,
    failed: u64,
}

/// Control of a [`Faulty`] driver. Before [`arm`](Self::arm), calls are counted and none fails.
pub trait FaultControl {
    /// Sets the plan and counts calls and failures from 0 again.
    ///
    /// # Panics
    ///
    /// When `plan.only` is not the name of a method that can fail.
    fn arm(&self, plan: FaultPlan);

    /// Removes the plan, and counts calls and failures from 0 again.
    fn disarm(&self);

    /// Returns the number of calls since the plan was armed, failed ones included. With `only`, calls of
    /// other methods do not count. Without a plan, all calls count, from the last [`disarm`](Self::disarm) or
    /// from the creation of the driver.
    fn counted_calls(&self) -> u64;

    /// Returns the number of calls that were made to fail since the plan was armed.
    fn failed_calls(&self) -> u64;
}

impl<D> FaultControl for Faulty<D> {
    fn arm(&self, plan: FaultPlan) {
        if let Some(name) = plan.only {
            Call::named(name);
        }
        *self.interceptor().0.lock() = State { plan: Some(plan), ..State::default() };
    }

    fn disarm(&self) {
        *self.interceptor().0.lock() = State::default();
    }

    fn counted_calls(&self) -> u64 {
        self.interceptor().0.lock().counted
    }

    fn failed_calls(&self) -> u64 {
        self.interceptor().0.lock().failed
    }
}

impl Interceptor for Faults {
    /// Counts a call and fails it if the plan requires it.
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let mut state = self.0.lock();
        if state.plan.and_then(|plan| plan.only).is_none_or(|only| only == call) {
            let index = state.counted;
            state.counted += 1;
            if let Some(plan) = state.plan
                && (index == plan.at || (plan.repeat && index > plan.at))
            {
                state.failed += 1;
                let message = format!("made to fail as call {index}");
                return Err(DriverError::new(plan.kind, call, 0, message));
            }
        }
        drop(state);
        act()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use stratalloc::driver::Driver;

    use super::*;
    use crate::{Sim, SimOptions};
    use stratalloc::driver::{DriverPoolId, Exportable, NodeId, PhysicalId, PinnedId, PinnedRange};
    use stratalloc::ids::{DeviceId, EventId, StreamId};
    use stratalloc::size::MIB;

    fn faulty() -> Faulty<Arc<Sim>> {
        Faulty::new(Arc::new(Sim::new(SimOptions::default())))
    }

    fn plan(at: u64) -> FaultPlan {
        FaultPlan { at, kind: DriverErrorKind::Other, repeat: false, only: None }
    }

    /// Calls each method that can fail and that a [`Sim`] with default options supports, once.
    fn call_all(driver: &dyn Driver) -> Vec<DriverResult<()>> {
        let (stream, event, at) = (StreamId(7), EventId(1), 0x1000);
        let memory = driver.virtual_memory().unwrap();
        let pools = driver.memory_pools().unwrap();
        let pool = DriverPoolId(0);
        let pinned = driver.pinned_memory().unwrap();
        let host = driver.host_memory().unwrap();
        let slab = PinnedId(1);
        let part = PinnedRange { pinned: slab, offset_bytes: 0, size_bytes: 1 };
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
            pinned.pin(MIB).map(drop),
            pinned.unpin(slab),
            pinned.copy_out(part, at, stream),
            pinned.copy_in(at, part, stream),
            pinned.read_pinned(slab, 0, &mut [0]),
            pinned.write_pinned(slab, 0, &[0]),
            host.allocate_host(MIB).map(drop),
            host.free_host(at, MIB),
            host.register_host(at, MIB),
            host.unregister_host(at),
            host.host_node().map(drop),
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
            assert_eq!(error.message(), format!("made to fail as call {at}"));
            assert_eq!(driver.failed_calls(), 1);
            assert_eq!(driver.inner().calls(error.call()), 0);
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
            assert_eq!(error.kind(), DriverErrorKind::DeviceLost);
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
