//! The GPU that tests use, and the message of a skipped test.
//!
//! A test is skipped only if there is no device. A device that does not work fails the test. With
//! `STRATALLOC_REQUIRE_CUDA=1` a missing device fails the test too.

use std::fmt::Display;
use std::sync::Arc;

use parking_lot::MutexGuard;

use stratalloc::driver::{Cuda, Driver};
use stratalloc::error::DriverError;
use stratalloc::ids::DeviceId;
use stratalloc::size::human_bytes;
use stratalloc_conformance::gpu;
pub(crate) use stratalloc_conformance::part::{Part, Share};
use stratalloc_conformance::skip;

/// The GPU, limited to a part of its memory.
pub(crate) type Gpu = Part<Arc<Cuda>>;

/// Returns the name of the running test.
fn test() -> String {
    std::thread::current().name().unwrap_or("a thread of a test").to_owned()
}

/// Prints that the running test is skipped, and why.
pub(crate) fn skip(why: impl Display) {
    skip::skipped(test(), why);
}

/// Prints that the test is skipped if the error means that there is no device. Panics on any other
/// error.
fn unless_absent<T>(error: &DriverError) -> Option<T> {
    assert!(gpu::is_absent(error), "the CUDA device does not work: {error}");
    skip::for_want_of_a_device(test(), &error.to_string());
    None
}

/// Waits until no other test of this program uses the device. Otherwise a test that synchronizes the
/// device could break another test's capture, or wait for work that another test delays.
pub(crate) use stratalloc_conformance::gpu::alone;

/// Waits like [`alone`] if there is a device; otherwise prints that the test is skipped.
pub(crate) fn turn() -> Option<MutexGuard<'static, ()>> {
    let alone = alone();
    shared().map(|_| alone)
}

/// Opens the first device a second time and for exclusive use, or prints that there is none. The guard is
/// first in the tuple, so that the caller drops it last: closing a device can break another test's capture.
pub(crate) fn device() -> Option<(MutexGuard<'static, ()>, Arc<Cuda>)> {
    let alone = alone();
    match Cuda::open(DeviceId(0)) {
        Ok(cuda) => Some((alone, Arc::new(cuda))),
        Err(error) => unless_absent(&error),
    }
}

/// Returns the first device, which all tests of this program share, or prints that there is none.
pub(crate) fn shared() -> Option<Arc<Cuda>> {
    match gpu::first() {
        Ok(cuda) => Some(cuda),
        Err(error) => unless_absent(&error),
    }
}

/// Opens the second device, or prints that there is none.
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

/// Returns true if `bytes` are free on the device. Otherwise prints that the test is skipped.
pub(crate) fn has_free(cuda: &Cuda, bytes: u64) -> bool {
    let free = cuda.memory_info().expect("the device answers").free_bytes;
    if free < bytes {
        skip(format_args!("{} of {} are free", human_bytes(free), human_bytes(bytes)));
    }
    free >= bytes
}
