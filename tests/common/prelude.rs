//! What most tests of the large program import.

pub(crate) use std::sync::Arc;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

pub(crate) use stratalloc::allocator::{
    Allocation, Caching, Counters, CrossStream, DeviceAllocator, MemoryPool, PoolOptions,
    PoolScope, PrivatePools, Request, ScopeFilter, Token,
};
pub(crate) use stratalloc::config::{Compat, Config, KeyTable, Settings};
pub(crate) use stratalloc::conformance::histories;
pub(crate) use stratalloc::driver::sim::{CallCosts, EventMode, SimOptions};
pub(crate) use stratalloc::driver::{Capture, Driver, FaultPlan, Faulty, Sim};
pub(crate) use stratalloc::error::{
    AllocError, DriverErrorKind, FreeError, HandleError, OutOfMemory, PoolError,
};
pub(crate) use stratalloc::history::{Action, BlockStateName, RecordOptions, SegmentLayout};
pub(crate) use stratalloc::ids::{DeviceId, PoolId, StreamId};
pub(crate) use stratalloc::registry::{self, BuildOptions};
pub(crate) use stratalloc::size::{GIB, KIB, MIB};
pub(crate) use stratalloc::stats::Statistics;
pub(crate) use stratalloc::strategies::native::{Engine, EngineOptions};
pub(crate) use stratalloc::strategies::{MallocAsyncAllocator, PluggableAllocator, Strategy};
pub(crate) use stratalloc::switch::Switchable;

pub(crate) use super::base::{Base, Breaks};
pub(crate) use super::bed::{BOTH, Bed, BedOn, FAR, HOME, ROOMY, SIDE, Tested, config, elsewhere};
pub(crate) use super::machine::{Machine, SimMachine};
pub(crate) use super::runs::runs;
pub(crate) use super::{Checked, law};
