//! The GPU that tests use, and what a test says that leaves something out.
//!
//! Only want of a device is a reason to skip a test: a device that does not work fails it. With
//! `STRATALLOC_REQUIRE_CUDA=1` want of a device does, too.

use std::fmt::Display;
use std::sync::Arc;

use parking_lot::MutexGuard;

use stratalloc::conformance::gpu;
pub(crate) use stratalloc::conformance::part::Part;
use stratalloc::conformance::skip;
use stratalloc::driver::{Cuda, Driver};
use stratalloc::error::DriverError;
use stratalloc::ids::DeviceId;
use stratalloc::size::human_bytes;

/// A part of the GPU.
pub(crate) type Gpu = Part<Arc<Cuda>>;

/// The running test.
fn test() -> String {
    std::thread::current().name().unwrap_or("a thread of a test").to_owned()
}

/// Says what the running test leaves out, and why.
pub(crate) fn skip(why: impl Display) {
    skip::skipped(test(), why);
}

/// Says so if the error is for want of a device.
fn unless_absent<T>(error: &DriverError) -> Option<T> {
    assert!(gpu::is_absent(error), "the CUDA device does not work: {error}");
    skip::for_want_of_a_device(test(), &error.to_string());
    None
}

/// The right to be the only test of this program on the device: one that waits for the device breaks
/// another's capture, or waits for what another holds back.
pub(crate) use stratalloc::conformance::gpu::alone;

/// The same where there is a device, or a line why there is none.
pub(crate) fn turn() -> Option<MutexGuard<'static, ()>> {
    let alone = alone();
    shared().map(|_| alone)
}

/// A new opening of the first device, alone, or a line why there is none. The right to be alone is named
/// first, and so goes last: closing a device breaks captures, too.
pub(crate) fn device() -> Option<(MutexGuard<'static, ()>, Arc<Cuda>)> {
    let alone = alone();
    match Cuda::open(DeviceId(0)) {
        Ok(cuda) => Some((alone, Arc::new(cuda))),
        Err(error) => unless_absent(&error),
    }
}

/// The first device, opened once for all tests of the program, or a line why there is none.
pub(crate) fn shared() -> Option<Arc<Cuda>> {
    match gpu::first() {
        Ok(cuda) => Some(cuda),
        Err(error) => unless_absent(&error),
    }
}

/// The second device, or a line that there is none.
pub(crate) fn second() -> Option<Cuda> {
    match Cuda::open(DeviceId(1)) {
        Ok(cuda) => Some(cuda),
        Err(error) => {
            assert!(gpu::is_absent(&error), "the second CUDA device does not work: {error}");
            skip("one CUDA device only");
            None
        }
    }
}

/// Whether so much is free, or a line that it is not.
pub(crate) fn has_free(cuda: &Cuda, bytes: u64) -> bool {
    let free = cuda.memory_info().expect("the device answers").free_bytes;
    if free < bytes {
        skip(format_args!("{} of {} are free", human_bytes(free), human_bytes(bytes)));
    }
    free >= bytes
}
