//! Pinned host memory, and copies between it and the device.
//!
//! Slabs are known by numbers, so that callers need no pointer. Each call checks that its range lies
//! inside the slab. Memory of `HostMemory` is known by address, and libcuda checks the addresses.
#![expect(unsafe_code, reason = "bytes of pinned memory")]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::Ordering;

use hashbrown::HashMap;

use super::api::got;
use super::{Cuda, attribute, foreign, size};
use crate::driver::{DriverResult, HostMemory, PinnedId, PinnedMemory, PinnedRange};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::StreamId;

/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

/// The slabs of a device.
#[derive(Debug, Default)]
pub(super) struct Slabs {
    by_number: HashMap<u64, Slab>,
    last_number: u64,
}

#[derive(Clone, Copy, Debug)]
struct Slab {
    pointer: u64,
    size_bytes: u64,
}

impl Cuda {
    /// Returns the pointer to a range of a slab.
    fn pinned_pointer(&self, call: &'static str, of: PinnedRange) -> DriverResult<*mut c_void> {
        let PinnedRange { pinned, offset_bytes, size_bytes } = of;
        let slabs = self.slabs.lock();
        let slab = slabs.by_number.get(&pinned.0);
        let slab = slab.ok_or_else(|| foreign(call, "pinned memory", pinned.0))?;
        let end = offset_bytes.checked_add(size_bytes);
        if end.is_none_or(|end| end > slab.size_bytes) {
            let message = format!(
                "{size_bytes} bytes at offset {offset_bytes} of {} pinned bytes",
                slab.size_bytes
            );
            return Err(DriverError::new(DriverErrorKind::InvalidValue, call, 1, message));
        }
        Ok((slab.pointer + offset_bytes) as *mut c_void)
    }
}

impl PinnedMemory for Cuda {
    fn pin(&self, size_bytes: u64) -> DriverResult<PinnedId> {
        let _ready = self.enter_relaxed()?;
        let bytes = size(size_bytes)?;
        let pointer = got(|pointer| self.api.host_allocate(pointer, bytes, PORTABLE))?;
        let mut slabs = self.slabs.lock();
        slabs.last_number += 1;
        let number = slabs.last_number;
        slabs.by_number.insert(number, Slab { pointer, size_bytes });
        Ok(PinnedId(number))
    }

    fn unpin(&self, pinned: PinnedId) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        let mut slabs = self.slabs.lock();
        let slab = slabs.by_number.get(&pinned.0);
        let slab = slab.ok_or_else(|| foreign("cuMemFreeHost", "pinned memory", pinned.0))?;
        self.api.host_free(slab.pointer).ok()?;
        slabs.by_number.remove(&pinned.0);
        Ok(())
    }

    fn copy_out(&self, to: PinnedRange, from: u64, stream: StreamId) -> DriverResult<()> {
        let pointer = self.pinned_pointer("cuMemcpyDtoHAsync_v2", to)?;
        let _entered = self.enter()?;
        self.api.copy_out(pointer, from, size(to.size_bytes)?, stream.0).ok()
    }

    fn copy_in(&self, to: u64, from: PinnedRange, stream: StreamId) -> DriverResult<()> {
        let pointer = self.pinned_pointer("cuMemcpyHtoDAsync_v2", from)?;
        let _entered = self.enter()?;
        self.api.copy_in(to, pointer, size(from.size_bytes)?, stream.0).ok()
    }

    fn read_pinned(&self, from: PinnedId, offset_bytes: u64, into: &mut [u8]) -> DriverResult<()> {
        let size_bytes = into.len() as u64;
        let range = PinnedRange { pinned: from, offset_bytes, size_bytes };
        let pointer = self.pinned_pointer("read_pinned", range)?;
        // SAFETY: the range lies inside a slab that `pin` allocated, and the caller does not release it
        // during the call. No copy writes to it, and `into` is memory of another object.
        unsafe { ptr::copy_nonoverlapping(pointer.cast::<u8>(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write_pinned(&self, to: PinnedId, offset_bytes: u64, from: &[u8]) -> DriverResult<()> {
        let size_bytes = from.len() as u64;
        let range = PinnedRange { pinned: to, offset_bytes, size_bytes };
        let pointer = self.pinned_pointer("write_pinned", range)?;
        // SAFETY: as in `read_pinned`, and no copy reads the range.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), pointer.cast::<u8>(), from.len()) };
        Ok(())
    }
}

/// The addresses are valid for the program and for every device, because all devices use one address space
/// with the host (unified virtual addressing).
impl HostMemory for Cuda {
    fn allocate_host(&self, size_bytes: u64) -> DriverResult<u64> {
        let _ready = self.enter_relaxed()?;
        self.has_host_memory.store(true, Ordering::Relaxed);
        let bytes = size(size_bytes)?;
        got(|pointer| self.api.host_allocate(pointer, bytes, PORTABLE))
    }

    fn free_host(&self, address: u64, _: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.host_free(address).ok()
    }

    fn register_host(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.has_host_memory.store(true, Ordering::Relaxed);
        self.api.host_register(address, size(size_bytes)?, PORTABLE).ok()
    }

    fn unregister_host(&self, address: u64) -> DriverResult<()> {
        let _ready = self.enter_relaxed()?;
        self.api.host_unregister(address).ok()
    }

    /// Reads the device's attribute. Before CUDA 12.2 there is none, and Linux's entry of the device on the
    /// PCI bus is read instead.
    fn host_node(&self) -> DriverResult<Option<u32>> {
        let node =
            |node: &mut i32| self.api.device_attribute(node, attribute::HOST_NUMA_ID, self.device);
        let node = got(node).ok().and_then(|node| u32::try_from(node).ok());
        Ok(node.or_else(|| self.bus.as_deref().and_then(node_on_bus)))
    }
}

/// Returns the NUMA node that Linux lists for a PCI device.
fn node_on_bus(bus: &str) -> Option<u32> {
    let path = format!("/sys/bus/pci/devices/{}/numa_node", bus.to_ascii_lowercase());
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
