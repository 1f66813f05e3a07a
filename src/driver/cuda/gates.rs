//! Holds back the work of a CUDA stream with a number in pinned host memory.
//!
//! The device waits at a point of the stream (`cuStreamWaitValue32`) until the number is large enough.
//! The wait blocks no thread of the program or the driver, so streams wait independently. Only streams
//! that share a hardware queue run one after the other. By default a device has eight such queues
//! (`CUDA_DEVICE_MAX_CONNECTIONS`).
#![expect(unsafe_code, reason = "memory that the device reads while we write")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use hashbrown::HashMap;

use super::Cuda;
use super::api::{Api, got};
use crate::driver::{DriverResult, HoldsWork};
use crate::error::{DriverError, DriverErrorKind};
use crate::ids::StreamId;

/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const SEEN_BY_DEVICES: u32 = 3;
/// `CU_STREAM_WAIT_VALUE_GEQ`: waits until `number - value >= 0`, as a signed difference.
const AT_LEAST: u32 = 0;
/// The length of the array. Each stream whose work was ever held back uses one number.
const NUMBERS: usize = 1024;
/// A number larger than the value of any gate, so all gates of the stream are open.
const ALL_OPEN: u32 = i32::MAX as u32;

/// The numbers that streams wait for, in pinned host memory.
#[derive(Debug)]
struct Numbers {
    api: &'static Api,
    device: i32,
    context: u64,
    /// Address of the array for the program (`here`) and for the device (`there`).
    here: u64,
    there: u64,
}

impl Numbers {
    /// Creates the numbers, all 0. They retain the context as long as they live.
    fn new(cuda: &Cuda) -> DriverResult<Self> {
        let api = cuda.api;
        let context = got(|context| api.context_retain(context, cuda.device))?;
        let mut numbers = Self { api, device: cuda.device, context, here: 0, there: 0 };
        let _entered = cuda.enter()?;
        api.host_allocate(&mut numbers.here, NUMBERS * size_of::<u32>(), SEEN_BY_DEVICES).ok()?;
        for at in 0..NUMBERS {
            numbers.number(at).store(0, Ordering::Release);
        }
        api.host_pointer(&mut numbers.there, numbers.here, 0).ok()?;
        Ok(numbers)
    }

    fn number(&self, at: usize) -> &AtomicU32 {
        assert!(at < NUMBERS && self.here != 0, "numbers are assigned in `hold_back` alone");
        let pointer = (self.here as *mut u32).wrapping_add(at);
        // SAFETY: the library allocated `NUMBERS` numbers, page-aligned. Only `drop` frees them. The
        // program accesses them only here, and the device only reads them.
        unsafe { AtomicU32::from_ptr(pointer) }
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        if self.here != 0 && self.api.context_push(self.context).ok().is_ok() {
            (0..NUMBERS).for_each(|at| self.number(at).store(ALL_OPEN, Ordering::Release));
            // After this wait no stream reads the numbers any more. On a lost device the wait fails, and
            // no stream reads them either.
            let _ = self.api.context_synchronize();
            let _ = self.api.host_free(self.here);
            let mut popped = 0;
            let _ = self.api.context_pop(&mut popped);
        }
        let _ = self.api.context_release(self.device);
    }
}

/// The assignment of numbers to streams.
#[derive(Debug, Default)]
pub(super) struct Gates {
    numbers: Option<Arc<Numbers>>,
    /// Index of a stream's number, and the value of its last gate.
    streams: HashMap<u64, (usize, u32)>,
    /// Numbers of destroyed streams without closed gates: index, and value of the last gate.
    unused: Vec<(usize, u32)>,
    /// The first index that was never used.
    fresh: usize,
}

impl Gates {
    /// Removes a destroyed stream. Its number is reused if all its gates are open.
    pub(super) fn forget(&mut self, stream: u64) {
        if let (Some(numbers), Some((at, gates))) = (&self.numbers, self.streams.remove(&stream))
            && numbers.number(at).load(Ordering::Acquire) >= gates
        {
            self.unused.push((at, gates));
        }
    }
}

/// Holds back work submitted to its stream after it. Dropping it lets the stream run past this gate and
/// all earlier ones.
#[derive(Debug)]
pub struct Gate {
    numbers: Arc<Numbers>,
    at: usize,
    value: u32,
}

impl Gate {
    /// Lets the stream run.
    pub fn open(self) {}
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.numbers.number(self.at).fetch_max(self.value, Ordering::AcqRel);
    }
}

fn too_many(what: &str) -> DriverError {
    let kind = DriverErrorKind::NotSupported;
    DriverError::new(kind, "cuStreamWaitValue32_v2", 0, format!("more than {what}"))
}

/// Calls that wait for the device, such as `free`, deadlock if the calling thread holds a closed gate.
/// The wrapper `Gated` of `stratalloc-sim` opens the gates before such calls.
impl HoldsWork for Cuda {
    type Gate = Gate;

    fn hold_back(&self, stream: StreamId) -> DriverResult<Gate> {
        let mut gates = self.gates.lock();
        let numbers = match &gates.numbers {
            Some(numbers) => Arc::clone(numbers),
            None => Arc::clone(gates.numbers.insert(Arc::new(Numbers::new(self)?))),
        };
        let known = gates.streams.get(&stream.0).copied();
        let number = known.or_else(|| gates.unused.last().copied());
        let (at, before) = number.unwrap_or((gates.fresh, 0));
        let value = before + 1;
        if at >= NUMBERS {
            return Err(too_many("1024 streams"));
        }
        if value >= ALL_OPEN {
            return Err(too_many("2^31 gates of one stream"));
        }
        let _entered = self.enter()?;
        let address = numbers.there + (at * size_of::<u32>()) as u64;
        self.api.stream_wait_value(stream.0, address, value, AT_LEAST).ok()?;
        if known.is_none() && gates.unused.pop().is_none() {
            gates.fresh += 1;
        }
        gates.streams.insert(stream.0, (at, value));
        Ok(Gate { numbers, at, value })
    }
}

#[cfg(test)]
mod tests;
