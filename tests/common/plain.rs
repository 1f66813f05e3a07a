//! A device without its optional parts: no virtual memory, no pools, no capture.
//!
//! `straight!` writes the calls that every driver has, for wrappers that change a few of them.

use std::sync::Arc;

use stratalloc::driver::{CaptureStatus, DeviceInfo, Driver, DriverResult, MemoryInfo};
use stratalloc::ids::{EventId, StreamId};

/// Forwards the calls that every driver has to `self.$to`, all but `allocate`.
macro_rules! straight {
    ($to:ident) => {
        $crate::common::plain::straight_but_captures!($to);
        $crate::common::plain::forward! { $to:
            capture_status(stream: StreamId) -> DriverResult<CaptureStatus>;
        }
    };
}

/// The same without `capture_status`.
macro_rules! straight_but_captures {
    ($to:ident) => {
        $crate::common::plain::straight_but_records!($to);
        $crate::common::plain::forward! { $to:
            record_event(event: EventId, stream: StreamId) -> DriverResult<()>;
        }
    };
}

/// The same without `capture_status` and `record_event`.
macro_rules! straight_but_records {
    ($to:ident) => {
        $crate::common::plain::forward! { $to:
            info() -> DeviceInfo;
            memory_info() -> DriverResult<MemoryInfo>;
            free(address: u64, size_bytes: u64) -> DriverResult<()>;
            create_stream() -> DriverResult<StreamId>;
            destroy_stream(stream: StreamId) -> DriverResult<()>;
            synchronize_stream(stream: StreamId) -> DriverResult<()>;
            synchronize_device() -> DriverResult<()>;
            create_event() -> DriverResult<EventId>;
            query_event(event: EventId) -> DriverResult<bool>;
            synchronize_event(event: EventId) -> DriverResult<()>;
            wait_event(stream: StreamId, event: EventId) -> DriverResult<()>;
            destroy_event(event: EventId) -> DriverResult<()>;
            copy(to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()>;
            copy_from_host(to: u64, from: &[u8], stream: StreamId) -> DriverResult<()>;
            copy_to_host(to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()>;
            fill(to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()>;
        }
    };
}

/// Forwards these calls to `self.$to`.
macro_rules! forward {
    ($to:ident: $($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(fn $name(&self, $($argument: $kind),*) -> $result {
            self.$to.$name($($argument),*)
        })*
    };
}

pub(crate) use {forward, straight, straight_but_captures, straight_but_records};

/// Another device without its optional parts.
#[derive(Debug)]
pub(crate) struct Plain<D> {
    pub(crate) inner: Arc<D>,
}

impl<D: Driver> Driver for Plain<D> {
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        self.inner.allocate(size_bytes)
    }

    straight!(inner);
}
