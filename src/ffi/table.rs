//! Handles: numbers that name allocators, looked up and never followed.
//!
//! A handle is a slot and the slot's generation, so that a handle of a destroyed allocator is
//! refused although its slot serves another. An allocator that is destroyed while other threads are
//! inside goes when the last of them has left.

use std::sync::Arc;

use super::guard::{Failure, Status};
use super::instance::Instance;
use crate::sync::{Global, Rank};

/// Who may end an allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keeper {
    /// Whoever has the handle.
    Caller,
    /// Nobody: PyTorch's blocks live as long as the process.
    Process,
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    held: Option<(Arc<Instance>, Keeper)>,
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
        if let Some(next) = slot.generation.checked_add(1) {
            slot.generation = next;
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
pub(super) fn add(instance: Arc<Instance>, keeper: Keeper) -> Result<u64, Failure> {
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
    slot.held = Some((instance, keeper));
    Ok(u64::from(slot.generation) << 32 | (u64::from(index) + 1))
}

/// The allocator that a handle names.
#[inline]
pub(super) fn find(handle: u64) -> Result<Arc<Instance>, Failure> {
    let table = TABLE.read();
    let slot = parts(handle).and_then(|(index, generation)| {
        table.slots.get(index).filter(|slot| slot.generation == generation)
    });
    match slot.and_then(|slot| slot.held.as_ref()) {
        Some((instance, _)) => Ok(Arc::clone(instance)),
        None => Err(unknown(handle)),
    }
}

/// All allocators, each with a small number of its own.
pub(super) fn all() -> Vec<(u64, Arc<Instance>)> {
    let table = TABLE.read();
    let held = table.slots.iter().map(|slot| slot.held.as_ref());
    let numbered = (1..).zip(held);
    numbered.filter_map(|(number, held)| Some((number, Arc::clone(&held?.0)))).collect()
}

/// Takes a handle out of use and returns its allocator, to be dropped with no lock held.
pub(super) fn remove(handle: u64) -> Result<Arc<Instance>, Failure> {
    let mut table = TABLE.lock();
    let slot = table.slot(handle).ok_or_else(|| unknown(handle))?;
    if slot.held.as_ref().is_some_and(|(_, keeper)| *keeper == Keeper::Process) {
        let text = "PyTorch's allocators stay until the process ends";
        return Err(Failure::new(Status::InvalidArgument, text));
    }
    let (instance, _) = slot.held.take().ok_or_else(|| unknown(handle))?;
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
