//! Imports of most tests of the test program `main`.

pub(crate) use std::collections::{BTreeMap, BTreeSet, HashMap};
pub(crate) use std::panic::{AssertUnwindSafe, catch_unwind};
pub(crate) use std::path::{Path, PathBuf};
pub(crate) use std::process::{Command, Stdio};
pub(crate) use std::sync::atomic::Ordering::SeqCst;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Barrier, OnceLock};
pub(crate) use std::time::Duration;
pub(crate) use std::{fs, thread};

pub(crate) use parking_lot::{Mutex, MutexGuard};
pub(crate) use quickcheck::{Arbitrary, Gen};
pub(crate) use stratalloc::allocator::{
    Allocation, Caching, Control, Counters, CrossStream, DeviceAllocator, Hooks, MemoryPool,
    PeerAccess, PoolOptions, PoolScope, PrivatePools, Recording, Request, ScopeFilter,
    SegmentAllocator, Sharing, Token,
};
pub(crate) use stratalloc::config::{Compat, Config, KeyTable, Settings};
pub(crate) use stratalloc::driver::{
    Capture, CaptureStatus, Driver, DriverResult, Intercepted, Interceptor,
};
pub(crate) use stratalloc::error::{
    AllocError, DriverError, DriverErrorKind, FractionError, FreeError, HandleError, OutOfMemory,
    PoolError,
};
pub(crate) use stratalloc::handle::Handle;
pub(crate) use stratalloc::history::{
    Action, BlockStateName, Entry, Event, Frame, History, RecordOptions, SegmentLayout, Stack,
    StackLevel,
};
pub(crate) use stratalloc::ids::{DeviceId, EventId, OwnerId, PoolId, StreamId};
pub(crate) use stratalloc::registry::{self, BuildError, BuildOptions, Constructed};
pub(crate) use stratalloc::sharing::{FormatError, SharedHandle, SharingError};
pub(crate) use stratalloc::size::{GIB, KIB, MIB, PoolKind};
pub(crate) use stratalloc::stats::{PerPool, Statistics};
pub(crate) use stratalloc::strategies::native::{Engine, EngineOptions};
pub(crate) use stratalloc::strategies::plugin::Callbacks;
pub(crate) use stratalloc::strategies::{
    CpuAllocator, MallocAsyncAllocator, PluggableAllocator, Strategy,
};
pub(crate) use stratalloc::switch::{SwitchError, Switchable};
pub(crate) use stratalloc_conformance::histories;
#[cfg(target_os = "linux")]
pub(crate) use stratalloc_sim::Host;
pub(crate) use stratalloc_sim::{CallCosts, EventMode, SimOptions};
pub(crate) use stratalloc_sim::{FaultControl, FaultPlan, Faulty, HeldResources, Sim};

pub(crate) use super::base::{Base, Breaks};
pub(crate) use super::fixture::{
    BOTH, FAR, Fixture, FixtureOn, HOME, ROOMY, SIDE, Tested, config, fixtures, on_new_thread,
};
pub(crate) use super::folder::Folder;
pub(crate) use super::invariants::holds_exactly;
pub(crate) use super::machine::{Machine, SimMachine};
pub(crate) use super::plain::plain;
pub(crate) use super::rng::Rng;
pub(crate) use super::runs::runs;
pub(crate) use super::stacks::Counted;
pub(crate) use super::{Checked, Segments, ensure, ensure_eq, invariants, unconfigured};
