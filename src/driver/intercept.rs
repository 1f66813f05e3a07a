//! A wrapper that intercepts the calls to another driver.
//!
//! [`Intercepted`] passes every call of every part to an [`Interceptor`], which has a method for each
//! call. Each method calls the inner driver unless it is overridden. [`Interceptor::around`] runs around
//! every call that can fail. [`Interceptor::stream`] and [`Interceptor::address`] translate the streams
//! and addresses in arguments. Read next, in `stratalloc-sim`: `faulty` (calls that fail), `gated` (work
//! held back), `recorded` (recorded addresses).

use std::fmt;
use std::os::fd::OwnedFd;

use super::call::{Call, calls, parts};
use super::{
    Capture, CaptureStatus, DeviceInfo, Driver, DriverPoolId, DriverPoolUsage, DriverResult,
    Exportable, Fabric, FabricHandle, HoldsWork, HostMemory, Ipc, MemoryInfo, MemoryPools, NodeId,
    Peers, PhysicalId, PinnedId, PinnedMemory, PinnedRange, ProcessUsage, Processes, VirtualMemory,
};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::{DeviceId, EventId, StreamId};

/// Generates a method of [`Interceptor`] for each call of a part.
macro_rules! hooks {
    ($part:ident $of:path; $($variant:ident $name:ident(
        $($arg:ident: $type:ty $(as $meaning:ident)?),*
    ) -> $out:ty;)*) => {
        $(
            #[doc = concat!("Does [`", stringify!($part), "::", stringify!($name), "`].")]
            fn $name(&self, inner: &dyn Driver $(, $arg: $type)*) -> DriverResult<$out> {
                let part = $of(inner).ok_or_else(|| lacking(Call::$variant))?;
                part.$name($(translated!(self inner $arg $($meaning)?)),*)
            }
        )*
    };
}

/// Translates an argument of a call for the inner driver.
macro_rules! translated {
    ($self:ident $inner:ident $arg:ident) => {
        $arg
    };
    ($self:ident $inner:ident $arg:ident address) => {
        $self.address($arg)
    };
    ($self:ident $inner:ident $arg:ident stream) => {
        $self.stream($arg)?
    };
    ($self:ident $inner:ident $arg:ident device_address) => {
        device_address($self, $inner, $arg)
    };
}

/// The behaviour that an [`Intercepted`] driver changes. The default methods change nothing.
///
/// Methods run on the calling thread and may wait only where the call may. There is a method for each
/// call, with the caller's arguments. The default method calls the inner driver, after translating
/// streams and addresses with [`stream`](Self::stream) and [`address`](Self::address).
/// [`around`](Self::around) does not run for calls that cannot fail.
pub trait Interceptor: fmt::Debug + Send + Sync {
    /// Runs around every call that can fail. `call` is the method's name in the driver traits. `act`
    /// makes the call.
    ///
    /// # Errors
    ///
    /// Those of `act`, or an error of the interceptor, which may return without calling `act`.
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        let _ = call;
        act()
    }

    /// Translates an address in a call's arguments into an address of the inner driver. Not used for the
    /// addresses of `free`, `unreserve` and `close`, and not for stream-ordered memory. Never waits.
    fn address(&self, address: u64) -> u64 {
        address
    }

    /// Translates a stream in a call's arguments into a stream of the inner driver.
    ///
    /// # Errors
    ///
    /// [`DriverError`] when the inner driver has no such stream. An intercepted call that can fail returns
    /// this error.
    fn stream(&self, stream: StreamId) -> DriverResult<StreamId> {
        Ok(stream)
    }

    /// Returns whether `stream` is the per-thread default stream. Never waits.
    fn is_per_thread_stream(&self, inner: &dyn Driver, stream: StreamId) -> bool {
        self.stream(stream).is_ok_and(|stream| inner.is_per_thread_stream(stream))
    }

    /// Returns [`Driver::info`].
    fn info(&self, inner: &dyn Driver) -> DeviceInfo {
        inner.info()
    }

    /// Returns the optional parts, given those of the inner driver. Never waits. Only the queried part
    /// is set in `parts`. The others are `None`, because a driver may take long to find out whether it
    /// has them.
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        parts
    }

    calls! { Driver hooks Driver Some; }
    calls! { VirtualMemory hooks VirtualMemory Driver::virtual_memory; }
    calls! { Fabric hooks Fabric fabric; }
    calls! { MemoryPools hooks MemoryPools Driver::memory_pools; }
    calls! { Ipc hooks Ipc Driver::ipc; }
    calls! { Peers hooks Peers Driver::peers; }
    calls! { Capture hooks Capture Driver::capture; }
    calls! { Processes hooks Processes Driver::processes; }
    calls! { PinnedMemory hooks PinnedMemory Driver::pinned_memory; }
    calls! { HostMemory hooks HostMemory Driver::host_memory; }
}

fn fabric(inner: &dyn Driver) -> Option<&dyn Fabric> {
    inner.virtual_memory()?.fabric()
}

/// Translates an address if it belongs to this interceptor's device. Leaves addresses of other devices
/// unchanged.
fn device_address<I: Interceptor + ?Sized>(
    interceptor: &I,
    inner: &dyn Driver,
    (device, address): (DeviceId, u64),
) -> (DeviceId, u64) {
    let is_own = device == inner.info().device;
    (device, if is_own { interceptor.address(address) } else { address })
}

/// Returns the error for an optional interface that the inner driver lacks. A caller gets this error only if
/// it calls the method without the accessor of the interface, which returns `None` in that case.
#[cold]
pub fn lacking(call: Call) -> DriverError {
    let message = "the wrapped driver lacks this part";
    DriverError::new(DriverErrorKind::NotSupported, call.name(), 801, message)
}

/// The optional parts of a driver. The default has none.
#[derive(Clone, Copy, Default)]
pub struct Parts<'a> {
    /// See [`Driver::virtual_memory`].
    pub virtual_memory: Option<&'a dyn VirtualMemory>,
    /// See [`VirtualMemory::fabric`].
    pub fabric: Option<&'a dyn Fabric>,
    /// See [`Driver::memory_pools`].
    pub memory_pools: Option<&'a dyn MemoryPools>,
    /// See [`Driver::ipc`].
    pub ipc: Option<&'a dyn Ipc>,
    /// See [`Driver::peers`].
    pub peers: Option<&'a dyn Peers>,
    /// See [`Driver::capture`].
    pub capture: Option<&'a dyn Capture>,
    /// See [`Driver::processes`].
    pub processes: Option<&'a dyn Processes>,
    /// See [`Driver::pinned_memory`].
    pub pinned_memory: Option<&'a dyn PinnedMemory>,
    /// See [`Driver::host_memory`].
    pub host_memory: Option<&'a dyn HostMemory>,
}

/// A driver whose calls pass through an [`Interceptor`].
#[derive(Debug)]
pub struct Intercepted<D, I> {
    inner: D,
    interceptor: I,
}

impl<D, I: Default> Intercepted<D, I> {
    /// Wraps a driver with a default interceptor.
    #[must_use]
    pub fn new(inner: D) -> Self {
        Self::with(inner, I::default())
    }
}

impl<D, I> Intercepted<D, I> {
    /// Wraps a driver with an interceptor.
    #[must_use]
    pub const fn with(inner: D, interceptor: I) -> Self {
        Self { inner, interceptor }
    }

    /// Returns the inner driver. Calls made on it are not intercepted.
    #[must_use]
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Returns the interceptor.
    #[must_use]
    pub fn interceptor(&self) -> &I {
        &self.interceptor
    }
}

macro_rules! intercept {
    ($($variant:ident $name:ident(
        $($arg:ident: $type:ty $(as $meaning:ident)?),*
    ) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $type)*) -> DriverResult<$out> {
            let act = || self.interceptor.$name(&self.inner $(, $arg)*);
            self.interceptor.around(Call::$variant.name(), act)
        })*
    };
}

macro_rules! announce {
    ($($part:ident $of:ident;)*) => {
        $(fn $part(&self) -> Option<&dyn $of> {
            let $part = self.inner.$part().map(|_| self as _);
            self.interceptor.parts(Parts { $part, ..Parts::default() }).$part
        })*
    };
}

impl<D: Driver, I: Interceptor> Driver for Intercepted<D, I> {
    fn info(&self) -> DeviceInfo {
        self.interceptor.info(&self.inner)
    }

    fn is_per_thread_stream(&self, stream: StreamId) -> bool {
        self.interceptor.is_per_thread_stream(&self.inner, stream)
    }

    calls! { Driver intercept }
    parts! { announce }
}

impl<D: Driver, I: Interceptor> VirtualMemory for Intercepted<D, I> {
    fn granularity_bytes(&self) -> u64 {
        let part = self.inner.virtual_memory();
        part.expect("announced only when the inner driver has it").granularity_bytes()
    }

    fn fabric(&self) -> Option<&dyn Fabric> {
        let fabric = fabric(&self.inner).map(|_| self as _);
        self.interceptor.parts(Parts { fabric, ..Parts::default() }).fabric
    }

    calls! { VirtualMemory intercept }
}

macro_rules! intercept_parts {
    ($($part:ident)*) => {
        $(impl<D: Driver, I: Interceptor> $part for Intercepted<D, I> {
            calls! { $part intercept }
        })*
    };
}
intercept_parts! { Fabric MemoryPools Ipc Peers Capture Processes PinnedMemory HostMemory }

impl<D: HoldsWork, I: Interceptor> HoldsWork for Intercepted<D, I> {
    type Gate = D::Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<D::Gate> {
        self.inner.hold_back(self.interceptor.stream(stream)?)
    }
}
