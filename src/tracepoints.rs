//! Static tracepoints of the provider `stratalloc`, in the format of SystemTap's SDT (feature
//! `tracepoints`).
//!
//! The tracepoints have the names and arguments of PyTorch's: `malloc` with address, device, requested
//! bytes and stream; `free` with the address. Each tracepoint is one `nop`. The ELF section
//! `.note.stapsdt` lists its name and the registers that hold its arguments. Without the feature these
//! functions compile to nothing.

use crate::history::Action;
use crate::ids::{DeviceId, StreamId};

/// Fires `malloc`. Called before another thread can free the block and allocate its address again.
/// `stream` is a closure that runs only with the feature, because the compiler would not remove an
/// unused atomic load.
#[inline(always)]
pub(crate) fn malloc(
    address: u64,
    device: DeviceId,
    bytes: u64,
    stream: impl FnOnce() -> StreamId,
) {
    #[cfg(feature = "tracepoints")]
    probe::probe!(stratalloc, malloc, address, device.0, bytes, stream().0);
    #[cfg(not(feature = "tracepoints"))]
    let _ = (address, device, bytes, stream);
}

/// Fires `free`. Called before the address can be allocated again.
#[inline(always)]
pub(crate) fn free(address: u64) {
    #[cfg(feature = "tracepoints")]
    probe::probe!(stratalloc, free, address);
    #[cfg(not(feature = "tracepoints"))]
    let _ = address;
}

/// Fires the tracepoint of a history entry, if its action has one.
#[inline(always)]
pub(crate) fn of(action: Action, address: u64, device: DeviceId, bytes: u64, stream: StreamId) {
    match action {
        Action::Alloc => malloc(address, device, bytes, || stream),
        Action::FreeRequested => free(address),
        _ => {}
    }
}
