//! The table of driver calls: all methods of the driver's traits that can fail.
//!
//! `calls! { Trait then with.. }` expands to `then! { with.. entries }`, with one entry for each method
//! of the trait. Code for all calls is generated from these entries. An entry is a variant of [`Call`]
//! followed by the method's signature. `stream: StreamId as stream` means that an interceptor translates
//! this argument with its method `stream`; `as address` and `as device_address` likewise. A file that
//! uses the table imports the types in the signatures. Methods that cannot fail (`info`,
//! `is_per_thread_stream`, `granularity_bytes`, the accessors of optional parts) are not in the table.

use std::sync::Arc;

use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverResult, HostMemory, Ipc, MemoryInfo,
    MemoryPools, Peers, PinnedMemory, Processes, VirtualMemory,
};
use crate::ids::{EventId, StreamId};

#[doc(hidden)]
#[macro_export]
macro_rules! calls {
    (Driver $then:ident $($with:tt)*) => { $then! { $($with)*
        MakeCurrent make_current() -> ();
        MemoryInfo memory_info() -> MemoryInfo;
        Allocate allocate(size_bytes: u64) -> u64;
        Free free(address: u64, size_bytes: u64) -> ();
        CreateStream create_stream() -> StreamId;
        DestroyStream destroy_stream(stream: StreamId as stream) -> ();
        SynchronizeStream synchronize_stream(stream: StreamId as stream) -> ();
        SynchronizeDevice synchronize_device() -> ();
        CreateEvent create_event() -> EventId;
        RecordEvent record_event(event: EventId, stream: StreamId as stream) -> ();
        QueryEvent query_event(event: EventId) -> bool;
        SynchronizeEvent synchronize_event(event: EventId) -> ();
        WaitEvent wait_event(stream: StreamId as stream, event: EventId) -> ();
        DestroyEvent destroy_event(event: EventId) -> ();
        Copy copy(
            to: u64 as address, from: u64 as address, size_bytes: u64, stream: StreamId as stream
        ) -> ();
        CopyFromHost copy_from_host(
            to: u64 as address, from: &[u8], stream: StreamId as stream
        ) -> ();
        CopyToHost copy_to_host(
            to: &mut [u8], from: u64 as address, stream: StreamId as stream
        ) -> ();
        Fill fill(to: u64 as address, byte: u8, size_bytes: u64, stream: StreamId as stream) -> ();
        CaptureStatus capture_status(stream: StreamId as stream) -> CaptureStatus;
    } };
    (VirtualMemory $then:ident $($with:tt)*) => { $then! { $($with)*
        Reserve reserve(size_bytes: u64) -> u64;
        Unreserve unreserve(address: u64, size_bytes: u64) -> ();
        Create create(size_bytes: u64, exportable: Exportable) -> PhysicalId;
        Release release(piece: PhysicalId) -> ();
        Map map(address: u64 as address, size_bytes: u64, piece: PhysicalId) -> ();
        SetAccess set_access(address: u64 as address, size_bytes: u64, device: DeviceId) -> ();
        Unmap unmap(address: u64 as address, size_bytes: u64) -> ();
        Export export(piece: PhysicalId) -> OwnedFd;
        Import import(descriptor: OwnedFd, size_bytes: u64) -> PhysicalId;
    } };
    (Fabric $then:ident $($with:tt)*) => { $then! { $($with)*
        ExportHandle export_handle(piece: PhysicalId) -> FabricHandle;
        ImportHandle import_handle(handle: &FabricHandle) -> PhysicalId;
    } };
    (MemoryPools $then:ident $($with:tt)*) => { $then! { $($with)*
        DefaultPool default_pool() -> DriverPoolId;
        CreatePool create_pool() -> DriverPoolId;
        DestroyPool destroy_pool(pool: DriverPoolId) -> ();
        SetReleaseThreshold set_release_threshold(pool: DriverPoolId, bytes: u64) -> ();
        ReleaseThreshold release_threshold(pool: DriverPoolId) -> u64;
        KeepMemory keep_memory(pool: DriverPoolId, keep: bool) -> ();
        AllowReuse allow_reuse(pool: DriverPoolId) -> ();
        OpenPool open_pool(pool: DriverPoolId, other: DeviceId) -> ();
        AllocateAsync allocate_async(
            pool: DriverPoolId, bytes: u64, on: StreamId as stream
        ) -> u64;
        FreeAsync free_async(address: u64, on: StreamId as stream) -> ();
        Trim trim(pool: DriverPoolId, keep_bytes: u64) -> ();
        Usage usage(pool: DriverPoolId) -> DriverPoolUsage;
        ResetHighMarks reset_high_marks(pool: DriverPoolId) -> ();
        GraphUsage graph_usage() -> DriverPoolUsage;
        ResetGraphHighMarks reset_graph_high_marks() -> ();
        TrimGraphs trim_graphs() -> ();
    } };
    (Ipc $then:ident $($with:tt)*) => { $then! { $($with)*
        Share share(base: u64 as address) -> [u8; 64];
        Open open(handle: &[u8; 64]) -> u64;
        Close close(address: u64) -> ();
    } };
    (Peers $then:ident $($with:tt)*) => { $then! { $($with)*
        CanAccess can_access(other: DeviceId) -> bool;
        EnableAccess enable_access(other: DeviceId) -> ();
        CopyPeer copy_peer(
            to: (DeviceId, u64) as device_address,
            from: (DeviceId, u64) as device_address,
            size_bytes: u64,
            stream: StreamId as stream
        ) -> ();
    } };
    (Capture $then:ident $($with:tt)*) => { $then! { $($with)*
        ExpectCaptures expect_captures(expected: bool) -> ();
        Expected expected() -> u64;
        Begin begin(stream: StreamId as stream) -> u64;
        End end(stream: StreamId as stream) -> ();
        Frontier frontier(stream: StreamId as stream) -> Vec<NodeId>;
        Dependencies dependencies(node: NodeId) -> Vec<NodeId>;
        AddToFrontier add_to_frontier(stream: StreamId as stream, nodes: &[NodeId]) -> ();
        FreeBehind free_behind(
            address: u64, stream: StreamId as stream, nodes: &[NodeId]
        ) -> NodeId;
    } };
    (Processes $then:ident $($with:tt)*) => { $then! { $($with)*
        List list() -> Vec<ProcessUsage>;
    } };
    (PinnedMemory $then:ident $($with:tt)*) => { $then! { $($with)*
        Pin pin(size_bytes: u64) -> PinnedId;
        Unpin unpin(pinned: PinnedId) -> ();
        CopyOut copy_out(
            to: PinnedRange, from: u64 as address, stream: StreamId as stream
        ) -> ();
        CopyIn copy_in(
            to: u64 as address, from: PinnedRange, stream: StreamId as stream
        ) -> ();
        ReadPinned read_pinned(from: PinnedId, offset_bytes: u64, into: &mut [u8]) -> ();
        WritePinned write_pinned(to: PinnedId, offset_bytes: u64, from: &[u8]) -> ();
    } };
    (HostMemory $then:ident $($with:tt)*) => { $then! { $($with)*
        AllocateHost allocate_host(size_bytes: u64) -> u64;
        FreeHost free_host(address: u64, size_bytes: u64) -> ();
        RegisterHost register_host(address: u64, size_bytes: u64) -> ();
        UnregisterHost unregister_host(address: u64) -> ();
        HostNode host_node() -> Option<u32>;
    } };
}
pub use calls;

/// `forward! { via; calls }` generates the methods of a trait. Each method returns
/// `via(self, call, act)`. `act` calls the method of the same name on the driver that `via` passes to
/// it.
#[doc(hidden)]
#[macro_export]
macro_rules! forward {
    ($via:expr; $($variant:ident $name:ident(
        $($arg:ident: $type:ty $(as $meaning:ident)?),*
    ) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $type)*) -> $crate::driver::DriverResult<$out> {
            $via(self, $crate::driver::call::Call::$variant, |to| to.$name($($arg),*))
        })*
    };
}
pub use forward;

/// `parts! { then }` passes the accessors of a driver's optional parts to the macro `then`.
macro_rules! parts {
    ($then:ident) => {
        $then! {
            virtual_memory VirtualMemory; memory_pools MemoryPools; ipc Ipc; peers Peers;
            capture Capture; processes Processes; pinned_memory PinnedMemory;
            host_memory HostMemory;
        }
    };
}
pub(super) use parts;

macro_rules! share {
    ($($part:ident $of:ident;)*) => {
        $(fn $part(&self) -> Option<&dyn $of> {
            (**self).$part()
        })*
    };
}

macro_rules! enumerate {
    ([] $($variant:ident $name:ident($($signature:tt)*) -> $out:ty;)*) => {
        /// A call to a driver.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Call {
            $(#[doc = concat!("`", stringify!($name), "`")] $variant,)*
        }

        impl Call {
            /// Every call, in the order of the variants.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// Returns the method's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => stringify!($name),)*
                }
            }
        }
    };
    ([$next:ident $($later:ident)*] $($calls:tt)*) => {
        calls! { $next enumerate [$($later)*] $($calls)* }
    };
}

enumerate! {
    [Driver VirtualMemory Fabric MemoryPools Ipc Peers Capture Processes PinnedMemory HostMemory]
}

impl Call {
    /// Returns the call with this name.
    ///
    /// # Panics
    ///
    /// When no call has that name. Otherwise a test with a misspelt name would match no call and test
    /// nothing.
    pub fn named(name: &str) -> Self {
        Self::ALL
            .into_iter()
            .find(|call| call.name() == name)
            .unwrap_or_else(|| panic!("no driver call is named {name:?}"))
    }
}

/// Forwards all calls to the shared driver.
impl<D: Driver + ?Sized> Driver for Arc<D> {
    fn info(&self) -> DeviceInfo {
        (**self).info()
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        (**self).is_per_thread_stream(stream)
    }

    calls! { Driver forward straight; }
    parts! { share }
}

fn straight<D: ?Sized, T>(
    shared: &Arc<D>,
    _: Call,
    act: impl FnOnce(&D) -> DriverResult<T>,
) -> DriverResult<T> {
    act(shared)
}
