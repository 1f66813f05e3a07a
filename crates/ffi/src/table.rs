//! Handles of allocators: numbers that are looked up and never dereferenced.
//!
//! A handle is the number of an object (`user_data`). Each number is used once, so the handle of a
//! destroyed allocator is refused. If calls are running when their allocator is destroyed, the last of
//! these calls drops the allocator. Handles of PyTorch's allocators consist of a constant and the device's
//! ordinal. They are looked up without a lock.

use std::ffi::c_int;
use std::ops::Deref;
use std::sync::Arc;

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::{torch, user_data};

/// The handle of PyTorch's allocator on device 0. For device N, add N.
pub const TORCH_HANDLE: u64 = 0x4000_0000_0000_0001;

/// An allocator found by its handle.
pub(super) enum Named {
    Own(Arc<Instance>),
    /// An allocator of PyTorch, which is never freed.
    Torch(&'static Instance),
}

impl Deref for Named {
    type Target = Instance;

    #[inline]
    fn deref(&self) -> &Instance {
        match self {
            Self::Own(instance) => instance,
            Self::Torch(instance) => instance,
        }
    }
}

/// Returns the allocator of a handle.
#[inline]
pub(super) fn find(handle: u64) -> Result<Named, Failure> {
    let device = handle.checked_sub(TORCH_HANDLE).and_then(|device| c_int::try_from(device).ok());
    match device.and_then(torch::find) {
        Some(instance) => Ok(Named::Torch(instance)),
        None => user_data::find("allocator", handle).map(Named::Own),
    }
}

/// Runs `work`, which cannot fail, on the allocator of a handle.
pub(super) fn on(handle: u64, work: impl FnOnce(&Instance)) -> Status {
    status(|| {
        work(&*find(handle)?);
        Ok(())
    })
}

/// Runs `work`, which releases a part of the allocator of a handle. Does nothing if the handle is of the
/// process that forked this one.
pub(super) fn release_on(
    handle: u64,
    work: impl FnOnce(&Instance) -> Result<(), Failure>,
) -> Status {
    status(|| if user_data::is_of_parent(handle) { Ok(()) } else { work(&*find(handle)?) })
}

/// Returns all allocators, each with a small number that is unique among them.
pub(super) fn all() -> Vec<(u64, Named)> {
    let torch = torch::open_devices().filter_map(|(device, instance)| {
        Some((2 * u64::try_from(device).ok()?, Named::Torch(instance)))
    });
    let own = user_data::all().into_iter().map(|(handle, instance)| {
        (2 * (handle - user_data::FIRST_NUMBER) + 1, Named::Own(instance))
    });
    torch.chain(own).collect()
}

/// Removes a handle, and drops its allocator with no lock held. Does nothing if it is of the process that
/// forked this one.
pub(super) fn release(handle: u64) -> Result<(), Failure> {
    if user_data::is_of_parent(handle) {
        return Ok(());
    }
    match find(handle)? {
        Named::Torch(_) => {
            Err(Failure::invalid("PyTorch's allocators stay until the process ends"))
        }
        Named::Own(_) => user_data::release::<Instance>("allocator", handle),
    }
}
