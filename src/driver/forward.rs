//! Forwarding of driver calls, written once.
//!
//! `forward!` writes the named methods of a trait for a wrapper. Each asks `via`, a function
//! `(&wrapper, call name) -> DriverResult<&target>`, for the one to call: there a wrapper counts or
//! refuses. The user's file imports the types of the signatures. Below it: `Arc` as a driver.

use std::sync::Arc;

use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, Ipc, MemoryInfo, MemoryPools, Peers,
    Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{EventId, StreamId};

macro_rules! forward {
    // Groups. The first of a trait's are the calls that name no address.
    (@driver_without_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            make_current() -> ();
            memory_info() -> MemoryInfo;
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
            capture_status(stream: StreamId) -> CaptureStatus;
        }
    };
    (@driver_with_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            allocate(size_bytes: u64) -> u64;
            free(address: u64, size_bytes: u64) -> ();
            copy(to: u64, from: u64, size_bytes: u64, stream: StreamId) -> ();
            copy_from_host(to: u64, from: &[u8], stream: StreamId) -> ();
            copy_to_host(to: &mut [u8], from: u64, stream: StreamId) -> ();
            fill(to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> ();
        }
    };
    (@virtual_without_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            create(size_bytes: u64, exportable: Exportable) -> PhysicalId;
            release(piece: PhysicalId) -> ();
            export(piece: PhysicalId) -> OwnedFd;
            import(descriptor: OwnedFd, size_bytes: u64) -> PhysicalId;
        }
    };
    (@virtual_with_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            reserve(size_bytes: u64) -> u64;
            unreserve(address: u64, size_bytes: u64) -> ();
            map(address: u64, size_bytes: u64, piece: PhysicalId) -> ();
            set_access(address: u64, size_bytes: u64, device: DeviceId) -> ();
            unmap(address: u64, size_bytes: u64) -> ();
        }
    };
    (@fabric $via:ident) => {
        $crate::driver::forward::forward! { $via:
            export_handle(piece: PhysicalId) -> FabricHandle;
            import_handle(handle: &FabricHandle) -> PhysicalId;
        }
    };
    (@memory_pools $via:ident) => {
        $crate::driver::forward::forward! { $via:
            default_pool() -> DriverPoolId;
            create_pool() -> DriverPoolId;
            destroy_pool(pool: DriverPoolId) -> ();
            set_release_threshold(pool: DriverPoolId, bytes: u64) -> ();
            release_threshold(pool: DriverPoolId) -> u64;
            keep_memory(pool: DriverPoolId, keep: bool) -> ();
            allow_reuse(pool: DriverPoolId) -> ();
            open_pool(pool: DriverPoolId, other: DeviceId) -> ();
            allocate_async(pool: DriverPoolId, bytes: u64, on: StreamId) -> u64;
            free_async(address: u64, on: StreamId) -> ();
            trim(pool: DriverPoolId, keep_bytes: u64) -> ();
            usage(pool: DriverPoolId) -> DriverPoolUsage;
            reset_high_marks(pool: DriverPoolId) -> ();
            graph_usage() -> DriverPoolUsage;
            reset_graph_high_marks() -> ();
            trim_graphs() -> ();
        }
    };
    (@ipc $via:ident) => {
        $crate::driver::forward::forward! { $via:
            share(base: u64) -> [u8; 64];
            open(handle: &[u8; 64]) -> u64;
            close(address: u64) -> ();
        }
    };
    (@peers_without_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            can_access(other: DeviceId) -> bool;
            enable_access(other: DeviceId) -> ();
        }
    };
    (@peers_with_addresses $via:ident) => {
        $crate::driver::forward::forward! { $via:
            copy_peer(
                to: (DeviceId, u64), from: (DeviceId, u64), size_bytes: u64, stream: StreamId
            ) -> ();
        }
    };
    (@capture $via:ident) => {
        $crate::driver::forward::forward! { $via:
            expect_captures(expected: bool) -> ();
            expected() -> u64;
            begin(stream: StreamId) -> u64;
            end(stream: StreamId) -> ();
            frontier(stream: StreamId) -> Vec<NodeId>;
            dependencies(node: NodeId) -> Vec<NodeId>;
            add_to_frontier(stream: StreamId, nodes: &[NodeId]) -> ();
            free_behind(address: u64, stream: StreamId, nodes: &[NodeId]) -> NodeId;
        }
    };
    (@processes $via:ident) => {
        $crate::driver::forward::forward! { $via: list() -> Vec<ProcessUsage>; }
    };
    ($via:ident: $($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $type)*) -> $crate::driver::DriverResult<$out> {
            $via(self, stringify!($name))?.$name($($arg),*)
        })*
    };
}
pub(crate) use forward;

/// An optional part of a wrapped driver, for a call to it. A wrapper announces a part only when
/// the inner driver does, so this fails only when the wrapper's methods are called past that.
pub(super) fn part<'a, T: ?Sized>(call: &'static str, part: Option<&'a T>) -> DriverResult<&'a T> {
    part.ok_or_else(|| {
        let message = "the wrapped driver does not have this part";
        DriverError::new(DriverErrorKind::NotSupported, call, 801, message)
    })
}

/// A shared driver is a driver.
impl<D: Driver + ?Sized> Driver for Arc<D> {
    fn info(&self) -> DeviceInfo {
        (**self).info()
    }

    forward! { @driver_without_addresses inside }
    forward! { @driver_with_addresses inside }

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

#[expect(clippy::unnecessary_wraps, reason = "the shape that `forward!` asks for")]
fn inside<'a, D: Driver + ?Sized>(shared: &'a Arc<D>, _call: &str) -> DriverResult<&'a D> {
    Ok(shared)
}
