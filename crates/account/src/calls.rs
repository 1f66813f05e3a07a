//! The functions of the driver that are measured, and their wrappers.
//!
//! The wrappers do not depend on the signatures of the functions, so new versions of a function are measured
//! too. A wrapper passes on twelve integers. No measured function has more arguments, or a structure as an
//! argument. If a function has fewer, the others are unused registers and words of the caller's stack.

#![expect(unsafe_code, reason = "calling a foreign library")]

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::caller;
use crate::totals::Measurement;

/// What the memory is used for that a function of the driver allocates or frees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Memory,
    Code,
    Graphs,
    Streams,
    Context,
}

impl Kind {
    /// Returns the name in the JSON text.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Memory => "allocations",
            Self::Code => "kernels",
            Self::Graphs => "graphs",
            Self::Streams => "streams",
            Self::Context => "context",
        }
    }
}

/// Functions whose names begin with `prefix`.
struct Measured {
    prefix: &'static str,
    kind: Kind,
    /// The argument that identifies a kernel. Only the first call for each kernel is measured.
    kernel: Option<usize>,
}

const fn measured(prefix: &'static str, kind: Kind) -> Measured {
    Measured { prefix, kind, kernel: None }
}

const fn once(prefix: &'static str, kernel: usize) -> Measured {
    Measured { prefix, kind: Kind::Code, kernel: Some(kernel) }
}

/// The measured functions. The first entry that matches counts.
const MEASURED: [Measured; 30] = [
    measured("cuMemAlloc", Kind::Memory),
    measured("cuMemFree", Kind::Memory),
    measured("cuMemCreate", Kind::Memory),
    measured("cuMemRelease", Kind::Memory),
    measured("cuMemMap", Kind::Memory),
    measured("cuMemUnmap", Kind::Memory),
    measured("cuMemSetAccess", Kind::Memory),
    measured("cuMemAddressReserve", Kind::Memory),
    measured("cuMemHostAlloc", Kind::Memory),
    measured("cuMemHostRegister", Kind::Memory),
    measured("cuMemPoolCreate", Kind::Memory),
    measured("cuMemPoolDestroy", Kind::Memory),
    measured("cuMemPoolTrimTo", Kind::Memory),
    measured("cuMulticast", Kind::Memory),
    measured("cuArray", Kind::Memory),
    measured("cuMipmappedArray", Kind::Memory),
    once("cuLaunchKernelEx", 1),
    once("cuLaunch", 0),
    once("cuKernelGetFunction", 1),
    measured("cuModule", Kind::Code),
    measured("cuLibrary", Kind::Code),
    once("cuFuncSetAttribute", 0),
    once("cuFuncLoad", 0),
    measured("cuGraphInstantiate", Kind::Graphs),
    measured("cuGraphExec", Kind::Graphs),
    measured("cuGraphUpload", Kind::Graphs),
    measured("cuDeviceGraphMemTrim", Kind::Graphs),
    measured("cuStreamCreate", Kind::Streams),
    measured("cuStreamDestroy", Kind::Streams),
    measured("cuCtx", Kind::Context),
];

/// Functions with these prefixes are not measured, because programs call them often and they allocate
/// nothing.
const EXCEPTED: [&str; 6] = [
    "cuCtxGet",
    "cuCtxPush",
    "cuCtxPop",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuGraphExecKernel",
];

/// `CUDA_ERROR_STUB_LIBRARY`: the driver is missing.
pub(crate) const NO_DRIVER: c_int = 34;

/// A function of the driver with any signature of at most twelve integers or pointers.
pub(crate) type Function = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> c_int;

/// A function that a wrapper calls.
struct Slot {
    function: AtomicPtr<()>,
    /// The function's entry in [`MEASURED`].
    measured: AtomicUsize,
}

static SLOTS: [Slot; 256] =
    [const { Slot { function: AtomicPtr::new(ptr::null_mut()), measured: AtomicUsize::new(0) } };
        256];

/// The number of slots that are in use.
static USED: Mutex<usize> = Mutex::new(0);

/// The wrapper of each slot.
static WRAPPERS: [[Function; 16]; 16] = {
    macro_rules! row {
        ($row:literal: $($at:literal)+) => { [$(wrapper::<{ 16 * $row + $at }>),+] };
    }
    macro_rules! rows {
        ($($row:literal)+) => { [$(row!($row: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)),+] };
    }
    rows!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
};

/// Returns the wrapper of a function of the driver, or `None` if the function is not measured or there is no
/// slot left.
pub(crate) fn wrapped(name: &str, function: NonNull<()>) -> Option<NonNull<()>> {
    if EXCEPTED.iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let measured = MEASURED.iter().position(|measured| name.starts_with(measured.prefix))?;
    let mut used = USED.lock();
    let is_same = |slot: &Slot| slot.function.load(Ordering::Relaxed) == function.as_ptr();
    let at = SLOTS[..*used].iter().position(is_same).unwrap_or(*used);
    let slot = SLOTS.get(at)?;
    if at == *used {
        slot.measured.store(measured, Ordering::Relaxed);
        slot.function.store(function.as_ptr(), Ordering::Release);
        *used += 1;
    }
    NonNull::new(WRAPPERS[at / 16][at % 16] as *mut ())
}

#[rustfmt::skip]
unsafe extern "C" fn wrapper<const AT: usize>(
    a: usize, b: usize, c: usize, d: usize, e: usize, f: usize,
    g: usize, h: usize, i: usize, j: usize, k: usize, l: usize,
) -> c_int {
    let slot = &SLOTS[AT];
    let Some(function) = NonNull::new(slot.function.load(Ordering::Acquire)) else {
        return NO_DRIVER;
    };
    // SAFETY: a slot's function is one of the driver.
    let function = unsafe { as_function(function) };
    // SAFETY: the arguments are those of the caller. The function reads as many as it has.
    let act = || unsafe { function(a, b, c, d, e, f, g, h, i, j, k, l) };
    let measured = slot.measured.load(Ordering::Relaxed);
    let Measured { kind, kernel, .. } = MEASURED[measured];
    // The upper bits of an address are free, so they hold the function.
    let call = kernel.map(|at| [a, b][at] ^ (measured << 56));
    if call.is_some_and(|call| !CALLS.insert(call)) {
        return act();
    }
    let measurement = Measurement::begin();
    let status = act();
    if let Some(measurement) = measurement {
        measurement.end(kind, caller::library);
    }
    status
}

/// Returns a function of the driver as one that can be called.
///
/// # Safety
///
/// `function` is the address of a function of the driver.
pub(crate) unsafe fn as_function(function: NonNull<()>) -> Function {
    // SAFETY: the caller guarantees it.
    unsafe { std::mem::transmute::<NonNull<()>, Function>(function) }
}

/// The calls for kernels that were measured.
static CALLS: Calls = Calls([const { AtomicUsize::new(0) }; Calls::MOST]);

/// A set of calls that only grows and takes no lock. A call is the address of a kernel with the function in
/// its upper bits.
struct Calls([AtomicUsize; Calls::MOST]);

impl Calls {
    const MOST: usize = 1 << 16;
    /// How many places are searched for a call.
    const SEARCHED: usize = 64;

    /// Adds a call. Returns whether it was not in the set. If all places for it are taken, it counts as
    /// measured.
    fn insert(&self, call: usize) -> bool {
        // The multiplier is 2^64 divided by the golden ratio: it spreads addresses that are multiples of 16.
        let hash = (call as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 48;
        for at in 0..Self::SEARCHED {
            let place = &self.0[(hash as usize + at) % Self::MOST];
            let found = place.load(Ordering::Relaxed);
            if found == call {
                return false;
            }
            if found == 0 {
                let set = place.compare_exchange(0, call, Ordering::Relaxed, Ordering::Relaxed);
                match set {
                    Ok(_) => return true,
                    Err(other) if other == call => return false,
                    Err(_) => {}
                }
            }
        }
        false
    }
}
