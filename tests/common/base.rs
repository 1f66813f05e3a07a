//! Devices that tests create directly, wrap, and inspect at the end for leaks.

use std::sync::Arc;

use stratalloc::driver::Driver;
use stratalloc::error::DriverErrorKind;
use stratalloc_sim::{
    CallCosts, EventMode, FaultControl, FaultPlan, Faulty, HeldResources, Sim, SimOptions,
};
#[cfg(target_os = "linux")]
use stratalloc_sim::{Host, HostOptions};

/// A device that reports which of its objects are still allocated.
pub(crate) trait Base: Driver + Sized + 'static {
    fn with_bytes(total_bytes: u64) -> Self;
    fn finish_all(&self);
    fn held(&self) -> HeldResources;
    /// Returns how many synchronizing calls were made so far; `None` if the device does not count them.
    fn waits(&self) -> Option<u64> {
        None
    }
    /// Returns the bytes allocated on the device.
    fn used_bytes(&self) -> u64 {
        let info = self.memory_info().expect("the device works");
        info.total_bytes - info.free_bytes
    }
}

/// A device whose calls can be made to fail. The methods of `Base` call the inner device, so no fault
/// reaches them.
impl<D: Base> Base for Faulty<Arc<D>> {
    fn with_bytes(total_bytes: u64) -> Self {
        Self::new(Arc::new(D::with_bytes(total_bytes)))
    }

    fn finish_all(&self) {
        self.inner().finish_all();
    }

    fn held(&self) -> HeldResources {
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
        let (event_mode, costs) = (EventMode::Manual, CallCosts::default());
        Self::new(SimOptions { total_bytes, event_mode, costs, ..SimOptions::default() })
    }

    fn finish_all(&self) {
        self.complete_all();
    }

    fn held(&self) -> HeldResources {
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
        self.complete_all();
    }

    fn held(&self) -> HeldResources {
        self.held()
    }
}

#[cfg(target_os = "linux")]
impl Base for super::gpu::Gpu {
    fn with_bytes(total_bytes: u64) -> Self {
        super::gpu::Share::of(super::gpu::shared().expect("looked for before"), total_bytes)
    }

    fn finish_all(&self) {
        self.synchronize_device().expect("the device works");
    }

    fn held(&self) -> HeldResources {
        self.interceptor().held()
    }
}

/// A device whose calls can be made to fail.
pub(crate) trait Breaks {
    /// Makes a later call fail: number `at` from now on, counting all calls or only those named `only`.
    fn fail_call(&self, at: u64, only: Option<&'static str>);
}

impl<D: Driver> Breaks for Faulty<D> {
    fn fail_call(&self, at: u64, only: Option<&'static str>) {
        self.arm(FaultPlan { at, kind: DriverErrorKind::Other, repeat: false, only });
    }
}
