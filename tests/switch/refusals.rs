//! An allocator that accepts a configuration but not its memory fraction. The whole string must then be
//! refused.

use std::sync::Mutex;

use stratalloc::allocator::{BaseAllocation, CacheInfo};

use super::{Fixture, Narrow, register};
use crate::common::prelude::*;

/// The values of `max_split_bytes` applied so far.
type Applied = Arc<Mutex<Vec<Option<u64>>>>;

/// An allocator that accepts no memory fraction.
type Fractionless = Narrow<Applied>;

impl Caching for Fractionless {
    fn empty_cache(&self) -> Result<(), DriverError> {
        self.inner.caching().empty_cache()
    }

    fn set_limit_bytes(&self, limit_bytes: Option<u64>) {
        self.inner.caching().set_limit_bytes(limit_bytes);
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<(), FractionError> {
        Err(FractionError { fraction })
    }

    fn limit_bytes(&self) -> Option<u64> {
        self.inner.caching().limit_bytes()
    }

    fn apply(&self, config: &Config) -> Result<(), DriverError> {
        self.inner.caching().apply(config)?;
        self.more.lock().expect("no thread panics").push(config.settings().max_split_bytes);
        Ok(())
    }

    fn cache_info(&self) -> Result<CacheInfo, DriverError> {
        self.inner.caching().cache_info()
    }

    fn layout(&self) -> Vec<SegmentLayout> {
        self.inner.caching().layout()
    }

    fn base_allocation(&self, allocation: &Allocation) -> Result<BaseAllocation, HandleError> {
        self.inner.caching().base_allocation(allocation)
    }
}

#[test]
fn a_fraction_that_is_refused_takes_back_the_rest_of_its_string() {
    let applied = Applied::default();
    register("fractionless", Arc::clone(&applied), |own| {
        let mut control = Control::default();
        control.counters = own.inner.control().counters;
        control.caching = Some(own);
        control
    });
    let fixture = Fixture::new(8 * GIB, "backend:fractionless");
    fixture.update("max_split_size_mb:40").expect("a good string");
    let before = fixture.config();
    let further = "max_split_size_mb:64,per_process_memory_fraction:0.25";
    let error = fixture.update(further).expect_err("the fraction is refused");
    assert!(
        matches!(&error, SwitchError::Apply(cause) if cause.to_string().contains("0.25")),
        "{error}"
    );
    assert_eq!(fixture.config(), before);
    let (own, refused) = (Some(40 * MIB), Some(64 * MIB));
    assert_eq!(*applied.lock().expect("no thread panics"), [own, refused, own]);
    assert_eq!(fixture.caching().limit_bytes(), None);
    fixture.give(fixture.take(MIB));
}
