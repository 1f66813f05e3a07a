//! The library's machines, and one that is a part of a device.

pub(crate) use stratalloc::conformance::machine::*;
#[cfg(target_os = "linux")]
use stratalloc::driver::{Held, HoldsWork};

#[cfg(target_os = "linux")]
use super::part::Part;

#[cfg(target_os = "linux")]
impl<D: HoldsWork + 'static> Real for Part<D> {
    fn out(&self) -> Held {
        self.held()
    }
}
