//! Pinned memory of the program, in slabs. Only a device with memory keeps their bytes.

use std::ops::Range;
use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::{Done, Kind, Locked, SimulatedDevice, State, ensure, invalid};
use stratalloc::driver::call::{calls, forward};
use stratalloc::driver::{PinnedId, PinnedMemory, PinnedRange};
use stratalloc::ids::StreamId;

/// The bytes of a slab, shared with the copies that use them.
type Bytes = Arc<Mutex<Vec<u8>>>;

/// All slabs.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    slabs: HashMap<PinnedId, Slab>,
    last: u64,
}

#[derive(Debug)]
struct Slab {
    size_bytes: u64,
    /// Empty if the device has no memory.
    bytes: Bytes,
}

impl Pinned {
    /// Returns the bytes of all slabs.
    pub(super) fn bytes(&self) -> u64 {
        self.slabs.values().map(|slab| slab.size_bytes).sum()
    }

    fn slab(&self, id: PinnedId) -> Done<&Slab> {
        self.slabs.get(&id).ok_or_else(|| invalid(format!("no pinned memory {}", id.0)))
    }

    /// Returns the memory of a slab, and a checked range in it.
    fn range(&self, of: PinnedRange) -> Done<(Bytes, Range<usize>)> {
        let PinnedRange { pinned, offset_bytes, size_bytes } = of;
        let slab = self.slab(pinned)?;
        let end = offset_bytes.checked_add(size_bytes).filter(|end| *end <= slab.size_bytes);
        let Some(end) = end else {
            let all = slab.size_bytes;
            return Err(invalid(format!("{size_bytes} bytes at {offset_bytes} of {all} pinned")));
        };
        let [start, end] = [offset_bytes, end].map(|at| usize::try_from(at).unwrap_or(usize::MAX));
        Ok((Arc::clone(&slab.bytes), start..end))
    }
}

impl State {
    fn pin(&mut self, size_bytes: u64) -> Done<PinnedId> {
        ensure!(size_bytes > 0, "0 bytes cannot be pinned");
        let stored = if self.backing.is_some() { size_bytes } else { 0 };
        let stored = usize::try_from(stored).unwrap_or(usize::MAX);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(stored).map_err(|_| super::out_of_memory("pinned memory"))?;
        bytes.resize(stored, 0);
        self.pinned.last += 1;
        let id = PinnedId(self.pinned.last);
        self.pinned.slabs.insert(id, Slab { size_bytes, bytes: Arc::new(Mutex::new(bytes)) });
        Ok(id)
    }

    /// A device with memory detects copies that still use the slab.
    fn unpin(&mut self, pinned: PinnedId) -> Done<()> {
        let slab = self.pinned.slab(pinned)?;
        let is_unused = Arc::strong_count(&slab.bytes) == 1;
        ensure!(is_unused, "a running copy uses pinned memory {}", pinned.0);
        self.pinned.slabs.remove(&pinned);
        Ok(())
    }

    fn read_pinned(&mut self, from: PinnedId, offset_bytes: u64, into: &mut [u8]) -> Done<()> {
        let size_bytes = into.len() as u64;
        let of = PinnedRange { pinned: from, offset_bytes, size_bytes };
        let (bytes, range) = self.pinned.range(of)?;
        match self.backing {
            Some(_) => into.copy_from_slice(&bytes.lock()[range]),
            None => into.fill(0),
        }
        Ok(())
    }

    fn write_pinned(&mut self, to: PinnedId, offset_bytes: u64, from: &[u8]) -> Done<()> {
        let size_bytes = from.len() as u64;
        let of = PinnedRange { pinned: to, offset_bytes, size_bytes };
        let (bytes, range) = self.pinned.range(of)?;
        if self.backing.is_some() {
            bytes.lock()[range].copy_from_slice(from);
        }
        Ok(())
    }
}

impl Locked<'_> {
    fn copy_out(&mut self, to: PinnedRange, from: u64, stream: StreamId) -> Done<()> {
        let (bytes, range) = self.pinned.range(to)?;
        self.check_reachable(from, to.size_bytes)?;
        let task = self.backing.as_ref().map(|backing| backing.read(from, bytes, range));
        self.run(stream, task)
    }

    fn copy_in(&mut self, to: u64, from: PinnedRange, stream: StreamId) -> Done<()> {
        let (bytes, range) = self.pinned.range(from)?;
        self.check_reachable(to, from.size_bytes)?;
        let task = self.backing.as_ref().map(|backing| backing.write(to, bytes, range));
        self.run(stream, task)
    }
}

impl<K: Kind> PinnedMemory for SimulatedDevice<K> {
    calls! { PinnedMemory forward Self::call; }
}
