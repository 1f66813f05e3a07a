//! The CUDA device that tests use.

use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::machine::{Machine, RealMachine};
use super::part::Share;
use stratalloc::driver::{Cuda, DriverResult};
use stratalloc::error::DriverError;
use stratalloc::ids::DeviceId;

/// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
const NONE_THERE: [i64; 2] = [34, 100];
/// `CUDA_ERROR_INVALID_DEVICE`.
const NO_SUCH_DEVICE: i64 = 101;

/// Returns true if an error of [`Cuda::open`] means that there is no driver or no such device. Any other
/// error means that the device or driver does not work.
#[must_use]
pub fn is_absent(error: &DriverError) -> bool {
    match error.call() {
        "load libcuda" => true,
        "cuInit" => NONE_THERE.contains(&error.code()),
        "cuDeviceGet" => error.code() == NO_SUCH_DEVICE,
        _ => false,
    }
}

/// Returns the first CUDA device, opened once per process.
///
/// # Errors
///
/// [`DriverError`] when the device cannot be opened. If there is no device, [`is_absent`] returns true for
/// the error.
pub fn first() -> DriverResult<Arc<Cuda>> {
    static FIRST: OnceLock<DriverResult<Arc<Cuda>>> = OnceLock::new();
    FIRST.get_or_init(|| Cuda::open(DeviceId(0)).map(Arc::new)).clone()
}

/// Returns a guard for exclusive use of the device among the tests of this program, because the delayed work
/// of one test would delay others. Waits until no other test holds the guard.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// Returns a test machine whose device is a part of `cuda`, with `bytes` of memory.
pub(super) fn part(cuda: &Arc<Cuda>, bytes: u64) -> Box<dyn Machine> {
    Box::new(RealMachine::of(Share::of(Arc::clone(cuda), bytes)))
}
