//! An allocator that takes a configuration, but not its fraction: the whole string is refused.

use std::sync::Mutex;

use stratalloc::allocator::{BaseAllocation, CacheInfo, Control};
use stratalloc::error::{DriverError, FractionError};
use stratalloc::switch::SwitchError;

use super::Bed;
use crate::common::prelude::*;

/// What was applied so far: the sizes from which on nothing is split.
type Applied = Arc<Mutex<Vec<Option<u64>>>>;

/// Limits to parts of the device are beyond it.
#[derive(Debug)]
struct Fractionless {
    inner: Engine,
    applied: Applied,
}

impl Fractionless {
    fn cache(&self) -> &dyn Caching {
        self.inner.caching()
    }
}

impl DeviceAllocator for Fractionless {
    fn allocate(&self, request: Request) -> Result<Allocation, AllocError> {
        self.inner.allocate(request)
    }

    fn free(&self, allocation: Allocation) -> Result<(), FreeError> {
        self.inner.free(allocation)
    }

    fn name(&self) -> &str {
        "fractionless"
    }

    fn control(&self) -> Control<'_> {
        let mut control = Control::default();
        control.counters = self.inner.control().counters;
        control.caching = Some(self);
        control
    }
}

impl Caching for Fractionless {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.cache().empty_cache()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.cache().set_limit_bytes(limit_bytes);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        Err(FractionError { fraction })
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.cache().limit_bytes()
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.cache().apply(config)?;
        self.applied.lock().expect("nobody panics").push(config.settings().max_split_bytes);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.cache().cache_info()
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.cache().layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.cache().base_allocation(allocation)
    }
}

#[test]
fn a_fraction_that_is_refused_takes_back_the_rest_of_its_string() {
    let applied = Applied::default();
    let seen = Arc::clone(&applied);
    let make = move |driver: Arc<dyn Driver>, _: &_| -> registry::Constructed {
        let inner = Engine::new(driver, &EngineOptions::default())?;
        Ok(Box::new(Fractionless { inner, applied: Arc::clone(&seen) }))
    };
    registry::register("fractionless", make).expect("the name is free");
    let bed = Bed::new(8 * GIB, "backend:fractionless");
    bed.update("max_split_size_mb:40").expect("a good string");
    let before = bed.config();
    let further = "max_split_size_mb:64,per_process_memory_fraction:0.25";
    let error = bed.update(further).expect_err("the fraction is refused");
    assert!(
        matches!(&error, SwitchError::Apply(cause) if cause.to_string().contains("0.25")),
        "{error}"
    );
    assert_eq!(bed.config(), before);
    let (own, refused) = (Some(40 * MIB), Some(64 * MIB));
    assert_eq!(*applied.lock().expect("nobody panics"), [own, refused, own]);
    assert_eq!(bed.caching().limit_bytes(), None);
    bed.give(bed.take(MIB));
}
