//! Switching the allocator while it is in use. Nothing may be lost, and a failed switch must change
//! nothing.
//!
//! Read next: `draining` (blocks of retired allocators), and the other files of `tests/switch/`.

mod callbacks;
mod capabilities;
mod crowd;
mod draining;
mod failures;
mod handles;
mod limits;
mod refusals;
mod statistics;

use std::fmt::Debug;

use crate::common::prelude::*;

const NATIVE: &str = "backend:native";
const EXPANDABLE: &str = "backend:native,expandable_segments:True";
const ASYNC: &str = "backend:cudaMallocAsync";
const FRONT: &str = "backend:native,layers:[front]";
const ALL: [&str; 4] = [NATIVE, EXPANDABLE, ASYNC, FRONT];

/// An engine that offers only the capabilities that `control` returns.
#[derive(Debug)]
struct Narrow<T> {
    inner: Engine,
    name: &'static str,
    more: T,
    control: for<'a> fn(&'a Self) -> Control<'a>,
}

impl<T: Debug + Send + Sync> DeviceAllocator for Narrow<T> {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.inner.allocate(request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.inner.free(allocation)
    }

    fn name(&self) -> &str {
        self.name
    }

    fn control(&self) -> Control<'_> {
        (self.control)(self)
    }
}

/// Registers a backend that builds a `Narrow` engine with this additional data.
fn register<T: Clone + Debug + Send + Sync + 'static>(
    name: &'static str,
    more: T,
    control: for<'a> fn(&'a Narrow<T>) -> Control<'a>,
) {
    let make = move |driver: Arc<dyn Driver>, _: &_| -> registry::Constructed {
        let inner = Engine::new(driver, &EngineOptions::default())?;
        Ok(Box::new(Narrow { inner, name, more: more.clone(), control }))
    };
    registry::register(name, make).expect("the name is free");
}

/// A switchable allocator on a simulated device.
type Fixture = FixtureOn<Sim, Switchable>;

impl Fixture {
    #[track_caller]
    fn switch(&self, conf: &str) {
        self.allocator.switch(conf).expect("a good string");
    }
}
