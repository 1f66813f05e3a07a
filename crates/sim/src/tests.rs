//! Interceptors in front of a simulated device.

use std::sync::atomic::{AtomicU64, Ordering};

use stratalloc::driver::{Driver, Intercepted, Interceptor, Parts};

use crate::{Sim, SimOptions};

/// Counts the calls of `parts`.
#[derive(Debug, Default)]
struct Asked(AtomicU64);

impl Interceptor for Asked {
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        self.0.fetch_add(1, Ordering::Relaxed);
        parts
    }
}

#[derive(Debug)]
struct Nothing;

impl Interceptor for Nothing {}

#[test]
fn a_call_for_one_part_asks_for_no_other() {
    let inner = Intercepted::with(Sim::new(SimOptions::default()), Asked::default());
    let driver = Intercepted::with(inner, Nothing);
    assert!(driver.memory_pools().is_some());
    assert_eq!(driver.inner().interceptor().0.load(Ordering::Relaxed), 1);
}
