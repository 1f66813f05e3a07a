//! The CUDA device that tests use.

use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::machine::{Machine, RealMachine};
use super::part::Part;
use crate::driver::{Cuda, DriverResult};
use crate::error::DriverError;
use crate::ids::DeviceId;

/// `CUDA_ERROR_STUB_LIBRARY`, `CUDA_ERROR_NO_DEVICE`.
const NONE_THERE: [i64; 2] = [34, 100];
/// `CUDA_ERROR_INVALID_DEVICE`.
const NO_SUCH_DEVICE: i64 = 101;

/// Whether an error of [`Cuda::open`] says that there is no driver or no such device; any other says that
/// what there is does not work.
#[must_use]
pub fn is_absent(error: &DriverError) -> bool {
    match error.call() {
        "load libcuda" => true,
        "cuInit" => NONE_THERE.contains(&error.code()),
        "cuDeviceGet" => error.code() == NO_SUCH_DEVICE,
        _ => false,
    }
}

/// The first device, opened once for the process.
///
/// # Errors
///
/// [`DriverError`] when it cannot be opened; [`is_absent`] tells whether there is none.
pub fn first() -> DriverResult<Arc<Cuda>> {
    static FIRST: OnceLock<DriverResult<Arc<Cuda>>> = OnceLock::new();
    FIRST.get_or_init(|| Cuda::open(DeviceId(0)).map(Arc::new)).clone()
}

/// The right to be the only test of this program on the device: work that one test holds back makes another
/// wait. Waits for the others.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// A part of a device.
pub(super) fn part(cuda: &Arc<Cuda>, bytes: u64) -> Box<dyn Machine> {
    Box::new(RealMachine::of(Part::new(Arc::clone(cuda), bytes)))
}
