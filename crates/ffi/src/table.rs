//! Handles of allocators: numbers that are looked up and never dereferenced.
//!
//! A handle consists of a slot and a generation. Each generation is used once, so the handle of a
//! destroyed allocator is refused even if its slot was reused. If calls are running when their
//! allocator is destroyed, the last of them drops it. Handles of PyTorch's allocators have a reserved
//! generation, and the device's ordinal in place of the slot. They are looked up without a lock.

use std::ffi::c_int;
use std::ops::Deref;
use std::sync::Arc;

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::torch;
use stratalloc::sync::{Global, Rank};

/// The handle of PyTorch's allocator on device 0. For device N, add N.
pub const TORCH_HANDLE: u64 = 0x4000_0000_0000_0001;

/// The generation of all handles of PyTorch's allocators. No other handle has it.
const TORCH: u32 = 1 << 30;

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

#[derive(Debug)]
struct Table {
    /// Allocators with their handles.
    slots: Vec<Option<(u64, Arc<Instance>)>>,
    /// The generation of the newest handle.
    generation: u32,
}

static TABLE: Global<Table> =
    Global::new(Rank::Handles, Table { slots: Vec::new(), generation: 0 });

/// Returns the index of the slot and the generation of a handle. Handle 0 is never valid.
fn parts(handle: u64) -> Option<(usize, u32)> {
    let slot = usize::try_from((handle & u64::from(u32::MAX)).checked_sub(1)?).ok()?;
    Some((slot, u32::try_from(handle >> 32).ok()?))
}

#[cold]
fn unknown(handle: u64) -> Failure {
    let text = format_args!("no allocator has the handle {handle:#x}, or it was destroyed");
    Failure::new(Status::UnknownHandle, text)
}

/// Stores an allocator and returns its handle.
pub(super) fn add(instance: Instance) -> Result<u64, Failure> {
    let Table { slots, generation } = &mut *TABLE.lock();
    let index = slots.iter().position(Option::is_none).unwrap_or(slots.len());
    // Slot numbers start at 1, because handle 0 is never valid.
    let number = u32::try_from(index + 1).ok().filter(|_| *generation + 1 < TORCH);
    let full = || Failure::new(Status::OutOfMemory, "there are too many allocators");
    let number = number.ok_or_else(full)?;
    *generation += 1;
    let handle = u64::from(*generation) << 32 | u64::from(number);
    if index == slots.len() {
        slots.push(None);
    }
    slots[index] = Some((handle, Arc::new(instance)));
    Ok(handle)
}

/// Returns the allocator of a handle.
#[inline]
pub(super) fn find(handle: u64) -> Result<Named, Failure> {
    let found = parts(handle).and_then(|(index, generation)| match generation {
        TORCH => torch::find(c_int::try_from(index).ok()?).map(Named::Torch),
        _ => {
            let table = TABLE.read();
            let (own, instance) = table.slots.get(index)?.as_ref()?;
            (*own == handle).then(|| Named::Own(Arc::clone(instance)))
        }
    });
    found.ok_or_else(|| unknown(handle))
}

/// Runs `work`, which cannot fail, on the allocator of a handle.
pub(super) fn on(handle: u64, work: impl FnOnce(&Instance)) -> Status {
    status(|| {
        work(&*find(handle)?);
        Ok(())
    })
}

/// Returns all allocators, each with a small number that is unique among them.
pub(super) fn all() -> Vec<(u64, Named)> {
    let torch = torch::open_devices().filter_map(|(device, instance)| {
        Some((2 * u64::try_from(device).ok()?, Named::Torch(instance)))
    });
    let table = TABLE.read();
    let own = (1..)
        .step_by(2)
        .zip(&table.slots)
        .filter_map(|(number, slot)| Some((number, Named::Own(Arc::clone(&slot.as_ref()?.1)))));
    torch.chain(own).collect()
}

/// Removes a handle and returns its allocator. The caller can then drop it with no lock held.
pub(super) fn remove(handle: u64) -> Result<Arc<Instance>, Failure> {
    if let Named::Torch(_) = find(handle)? {
        let text = "PyTorch's allocators stay until the process ends";
        return Err(Failure::invalid(text));
    }
    let slots = &mut TABLE.lock().slots;
    let held = slots.iter_mut().find_map(|slot| slot.take_if(|(own, _)| *own == handle));
    held.map(|(_, instance)| instance).ok_or_else(|| unknown(handle))
}

/// Removes all handles without dropping or accessing their allocators.
pub(super) fn forget_all() {
    TABLE.lock().slots.iter_mut().for_each(|slot| std::mem::forget(slot.take()));
}
