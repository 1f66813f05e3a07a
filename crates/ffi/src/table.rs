//! Handles of allocators: numbers that are looked up and never dereferenced.
//!
//! The handle of an allocator that a caller creates is the number of an object (`user_data`). Each number
//! is used once, so the handle of a destroyed allocator is refused. If calls are running when their
//! allocator is destroyed, the last of these calls drops the allocator. The handle of a device's allocator,
//! which is never destroyed (`devices`), is a constant plus the device's ordinal. It is looked up without a
//! lock.

#![expect(unsafe_code, reason = "what is never freed is read without a lock")]

use std::ffi::c_int;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::user_data;

/// The handle of PyTorch's allocator on device 0. For device N, add N.
pub const DEVICE_HANDLE: u64 = 0x4000_0000_0000_0001;

/// The maximum number of devices, as in PyTorch.
const DEVICES_MAX: usize = 128;

/// A device's allocator. Null until it is created. Never freed.
#[derive(Debug)]
pub(super) struct Entry(AtomicPtr<Instance>);

impl Entry {
    #[inline]
    pub(super) fn get(&self) -> Option<&'static Instance> {
        // SAFETY: the pointer is null, or `put` has leaked its target.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    /// Stores the allocator of a device that has none.
    pub(super) fn put(&self, instance: Instance) -> &'static Instance {
        let instance: &'static mut Instance = Box::leak(Box::new(instance));
        self.0.store(instance, Ordering::Release);
        instance
    }
}

/// Allocators that are never freed, by the ordinals of their devices.
#[derive(Debug)]
pub(super) struct Permanent([Entry; DEVICES_MAX]);

/// The allocators that have handles.
pub(super) static PERMANENT: Permanent = Permanent::new();

impl Permanent {
    pub(super) const fn new() -> Self {
        Self([const { Entry(AtomicPtr::new(null_mut())) }; DEVICES_MAX])
    }

    /// Returns the entry of a device. `None` for an ordinal that no device has.
    #[inline]
    pub(super) fn entry(&self, device: c_int) -> Option<&Entry> {
        usize::try_from(device).ok().and_then(|device| self.0.get(device))
    }

    /// Returns the allocator of a device, if it has one.
    #[inline]
    pub(super) fn get(&self, device: c_int) -> Option<&'static Instance> {
        self.entry(device).and_then(Entry::get)
    }

    /// Returns all existing allocators, with the ordinals of their devices.
    pub(super) fn all(&self) -> impl Iterator<Item = (c_int, &'static Instance)> {
        (0..).zip(&self.0).filter_map(|(device, entry)| Some((device, entry.get()?)))
    }

    /// Removes all allocators in a forked child, without dropping them.
    pub(super) fn forget_all(&self) {
        self.0.iter().for_each(|entry| entry.0.store(null_mut(), Ordering::Relaxed));
    }
}

/// An allocator found by its handle.
pub(super) enum Named {
    Own(Arc<Instance>),
    /// An allocator of a device, which is never freed.
    Permanent(&'static Instance),
}

impl Deref for Named {
    type Target = Instance;

    #[inline]
    fn deref(&self) -> &Instance {
        match self {
            Self::Own(instance) => instance,
            Self::Permanent(instance) => instance,
        }
    }
}

/// Returns the allocator of a handle.
#[inline]
pub(super) fn find(handle: u64) -> Result<Named, Failure> {
    let device = handle.checked_sub(DEVICE_HANDLE).and_then(|device| c_int::try_from(device).ok());
    match device.and_then(|device| PERMANENT.get(device)) {
        Some(instance) => Ok(Named::Permanent(instance)),
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
    let permanent = PERMANENT.all().filter_map(|(device, instance)| {
        Some((2 * u64::try_from(device).ok()?, Named::Permanent(instance)))
    });
    let own = user_data::all().into_iter().map(|(handle, instance)| {
        (2 * (handle - user_data::FIRST_NUMBER) + 1, Named::Own(instance))
    });
    permanent.chain(own).collect()
}

/// Removes a handle, and drops its allocator with no lock held. Does nothing if it is of the process that
/// forked this one.
pub(super) fn release(handle: u64) -> Result<(), Failure> {
    if user_data::is_of_parent(handle) {
        return Ok(());
    }
    match find(handle)? {
        Named::Permanent(_) => {
            Err(Failure::invalid("PyTorch's allocators stay until the process ends"))
        }
        Named::Own(_) => user_data::release::<Instance>("allocator", handle),
    }
}
