//! Devices that tests build bare, wrap as they like, and ask at the end what is still out.

use std::sync::Arc;

#[cfg(target_os = "linux")]
use stratalloc::driver::host::{Host, HostOptions};
use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
use stratalloc::driver::{Driver, FaultPlan, Faulty, Held, Sim};
use stratalloc::error::DriverErrorKind;

/// A device that can say what it has given out.
pub(crate) trait Base: Driver + Sized + 'static {
    fn with_bytes(total_bytes: u64) -> Self;
    fn finish_all(&self);
    fn held(&self) -> Held;
    /// How often somebody waited for work so far; `None` when the device does not count.
    fn waits(&self) -> Option<u64> {
        None
    }
    /// Bytes that it has given out.
    fn used_bytes(&self) -> u64 {
        let info = self.memory_info().expect("the device works");
        info.total_bytes - info.free_bytes
    }
}

/// Another device whose calls can fail, but not those of a test's own questions.
impl<D: Base> Base for Faulty<Arc<D>> {
    fn with_bytes(total_bytes: u64) -> Self {
        Self::new(Arc::new(D::with_bytes(total_bytes)))
    }

    fn finish_all(&self) {
        self.inner().finish_all();
    }

    fn held(&self) -> Held {
        self.inner().held()
    }

    fn waits(&self) -> Option<u64> {
        self.inner().waits()
    }

    fn used_bytes(&self) -> u64 {
        self.inner().used_bytes()
    }
}

impl Base for Sim {
    fn with_bytes(total_bytes: u64) -> Self {
        let (event_mode, costs) = (EventMode::Manual, CallCosts::NONE);
        Self::new(SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() })
    }

    fn finish_all(&self) {
        self.complete_all();
    }

    fn held(&self) -> Held {
        self.held()
    }

    fn waits(&self) -> Option<u64> {
        let calls = ["synchronize_event", "synchronize_stream", "synchronize_device"];
        Some(calls.iter().map(|call| self.calls(call)).sum())
    }
}

#[cfg(target_os = "linux")]
impl Base for Host {
    fn with_bytes(total_bytes: u64) -> Self {
        Self::new(HostOptions { total_bytes, ..HostOptions::default() })
    }

    fn finish_all(&self) {
        self.synchronize_device().expect("the device works");
    }

    fn held(&self) -> Held {
        self.held()
    }
}

#[cfg(all(feature = "cuda", target_os = "linux"))]
impl Base for super::gpu::Gpu {
    fn with_bytes(total_bytes: u64) -> Self {
        Self::new(super::gpu::shared().expect("looked for before"), total_bytes)
    }

    fn finish_all(&self) {
        self.synchronize_device().expect("the device works");
    }

    fn held(&self) -> Held {
        self.held()
    }
}

/// Calls that fail on purpose.
pub(crate) trait Breaks {
    /// Lets the `at`-th call from now on fail, or of all calls named `only`.
    fn fail_call(&self, at: u64, only: Option<&'static str>);
}

impl<D: Driver> Breaks for Faulty<D> {
    fn fail_call(&self, at: u64, only: Option<&'static str>) {
        self.arm(FaultPlan { at, kind: DriverErrorKind::Other, repeat: false, only });
    }
}
