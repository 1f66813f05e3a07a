//! Handles: numbers that name allocators, looked up and never followed.
//!
//! A handle is a slot and the slot's generation, so that a handle of a destroyed allocator is
//! refused although its slot serves another. An allocator that is destroyed while other threads are
//! inside goes when the last of them has left. Handles of PyTorch's allocators have a generation of their
//! own, and the device's number in place of the slot: they are found without a lock.

use std::ffi::c_int;
use std::ops::Deref;
use std::sync::Arc;

use super::guard::{Failure, Status, status};
use super::instance::Instance;
use super::torch;
use crate::sync::{Global, Rank};

/// The handle of PyTorch's allocator on device 0. That of device N is N more.
pub const TORCH_HANDLE: u64 = 0x4000_0000_0000_0001;

/// The generation in handles of PyTorch's allocators. No slot reaches it.
const TORCH: u32 = 1 << 30;

/// The allocator that a handle names.
pub(super) enum Named {
    Own(Arc<Instance>),
    /// It lives as long as the process.
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
struct Slot {
    generation: u32,
    held: Option<Arc<Instance>>,
}

#[derive(Debug)]
struct Table {
    slots: Vec<Slot>,
    empty: Vec<u32>,
}

static TABLE: Global<Table> =
    Global::new(Rank::Handles, Table { slots: Vec::new(), empty: Vec::new() });

/// The slot's index and the generation that a handle says. Handle 0 names nothing.
fn parts(handle: u64) -> Option<(usize, u32)> {
    let slot = usize::try_from((handle & u64::from(u32::MAX)).checked_sub(1)?).ok()?;
    Some((slot, u32::try_from(handle >> 32).ok()?))
}

impl Table {
    fn slot(&mut self, handle: u64) -> Option<&mut Slot> {
        let (index, generation) = parts(handle)?;
        self.slots.get_mut(index).filter(|slot| slot.generation == generation)
    }

    /// Offers a slot that has become empty. One whose generations are used up stays empty for ever.
    fn offer(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        if slot.generation + 1 < TORCH {
            slot.generation += 1;
            self.empty.extend(u32::try_from(index));
        }
    }
}

#[cold]
fn unknown(handle: u64) -> Failure {
    let text = format_args!("no allocator has the handle {handle:#x}, or it was destroyed");
    Failure::new(Status::UnknownHandle, text)
}

/// Gives an allocator a handle.
pub(super) fn add(instance: Instance) -> Result<u64, Failure> {
    let mut table = TABLE.lock();
    let index = match table.empty.pop() {
        Some(index) => index,
        None => {
            let full = || Failure::new(Status::OutOfMemory, "there are too many allocators");
            // One less than all numbers, because handle 0 names nothing.
            let next = u32::try_from(table.slots.len()).ok().filter(|n| *n < u32::MAX);
            let next = next.ok_or_else(full)?;
            table.slots.push(Slot { generation: 1, held: None });
            next
        }
    };
    let slot = &mut table.slots[index as usize];
    slot.held = Some(Arc::new(instance));
    Ok(u64::from(slot.generation) << 32 | (u64::from(index) + 1))
}

/// The allocator that a handle names.
#[inline]
pub(super) fn find(handle: u64) -> Result<Named, Failure> {
    let found = parts(handle).and_then(|(index, generation)| match generation {
        TORCH => torch::find(c_int::try_from(index).ok()?).map(Named::Torch),
        _ => {
            let table = TABLE.read();
            let slot = table.slots.get(index).filter(|slot| slot.generation == generation)?;
            slot.held.as_ref().map(|instance| Named::Own(Arc::clone(instance)))
        }
    });
    found.ok_or_else(|| unknown(handle))
}

/// Runs a call that cannot fail on the allocator that a handle names.
pub(super) fn on(handle: u64, work: impl FnOnce(&Instance)) -> Status {
    status(|| {
        work(&*find(handle)?);
        Ok(())
    })
}

/// All allocators, each with a small number of its own.
pub(super) fn all() -> Vec<(u64, Named)> {
    let torch = torch::open_devices().filter_map(|(device, instance)| {
        Some((2 * u64::try_from(device).ok()?, Named::Torch(instance)))
    });
    let table = TABLE.read();
    let own = (1..)
        .step_by(2)
        .zip(&table.slots)
        .filter_map(|(number, slot)| Some((number, Named::Own(Arc::clone(slot.held.as_ref()?)))));
    torch.chain(own).collect()
}

/// Takes a handle out of use and returns its allocator, to be dropped with no lock held.
pub(super) fn remove(handle: u64) -> Result<Arc<Instance>, Failure> {
    if let Named::Torch(_) = find(handle)? {
        let text = "PyTorch's allocators stay until the process ends";
        return Err(Failure::new(Status::InvalidArgument, text));
    }
    let mut table = TABLE.lock();
    let held = table.slot(handle).and_then(|slot| slot.held.take());
    let instance = held.ok_or_else(|| unknown(handle))?;
    if let Some((index, _)) = parts(handle) {
        table.offer(index);
    }
    Ok(instance)
}

/// Takes all handles out of use and leaves their allocators as they are, without looking at them.
pub(super) fn forget_all() {
    let mut table = TABLE.lock();
    for index in 0..table.slots.len() {
        if let Some(held) = table.slots[index].held.take() {
            std::mem::forget(held);
            table.offer(index);
        }
    }
}
