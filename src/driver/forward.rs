//! Forwarding of driver calls, written once.
//!
//! `forward! { via, to; .. }` writes the named methods of a trait. Each is `via(self, "name", to, act)`, and
//! `act` does the call on what `to` leads to. `stream: StreamId as real` hands `self.real(stream)?` on. The
//! user's file imports the types of the signatures. Below it: `Arc` as a driver.

use std::sync::Arc;

use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, Ipc, MemoryInfo, MemoryPools, Peers,
    Processes, VirtualMemory,
};
use crate::ids::{EventId, StreamId};

macro_rules! forward {
    (@ $self:ident $arg:ident) => { $arg };
    (@ $self:ident $arg:ident $meant:ident) => { $self.$meant($arg)? };
    ($via:expr, $to:expr; $(
        $name:ident($($arg:ident: $type:ty $(as $meant:ident)?),*) -> $out:ty;
    )*) => {
        $(fn $name(&self $(, $arg: $type)*) -> $crate::driver::DriverResult<$out> {
            $via(self, stringify!($name), $to, |inner| {
                inner.$name($($crate::driver::forward::forward!(@ self $arg $($meant)?)),*)
            })
        })*
    };
}
pub(crate) use forward;

/// Does a call on what `to` leads to, and nothing else.
pub(crate) fn straight<'a, W: ?Sized, P: ?Sized + 'a, T>(
    wrapper: &'a W,
    _call: &'static str,
    to: impl FnOnce(&'a W) -> &'a P,
    act: impl FnOnce(&'a P) -> DriverResult<T>,
) -> DriverResult<T> {
    act(to(wrapper))
}

/// A shared driver is a driver.
impl<D: Driver + ?Sized> Driver for Arc<D> {
    fn info(&self) -> DeviceInfo {
        (**self).info()
    }

    forward! { straight, inside;
        make_current() -> ();
        memory_info() -> MemoryInfo;
        allocate(size_bytes: u64) -> u64;
        free(address: u64, size_bytes: u64) -> ();
        create_stream() -> StreamId;
        destroy_stream(stream: StreamId) -> ();
        synchronize_stream(stream: StreamId) -> ();
        synchronize_device() -> ();
        create_event() -> EventId;
        record_event(event: EventId, stream: StreamId) -> ();
        query_event(event: EventId) -> bool;
        synchronize_event(event: EventId) -> ();
        wait_event(stream: StreamId, event: EventId) -> ();
        destroy_event(event: EventId) -> ();
        copy(to: u64, from: u64, size_bytes: u64, stream: StreamId) -> ();
        copy_from_host(to: u64, from: &[u8], stream: StreamId) -> ();
        copy_to_host(to: &mut [u8], from: u64, stream: StreamId) -> ();
        fill(to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> ();
        capture_status(stream: StreamId) -> CaptureStatus;
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        (**self).is_per_thread_stream(stream)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        (**self).virtual_memory()
    }

    fn memory_pools(&self) -> Option<&dyn MemoryPools> {
        (**self).memory_pools()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        (**self).ipc()
    }

    fn peers(&self) -> Option<&dyn Peers> {
        (**self).peers()
    }

    fn capture(&self) -> Option<&dyn Capture> {
        (**self).capture()
    }

    fn processes(&self) -> Option<&dyn Processes> {
        (**self).processes()
    }
}

fn inside<D: ?Sized>(shared: &Arc<D>) -> &D {
    shared
}
