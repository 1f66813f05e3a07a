//! A device under a test's control: the driver, and the hand brake on its work.
//!
//! Tests say which streams have finished; a machine that cannot hold its work back says so and
//! gets the checks that hold anyway. A new driver joins the shadow test by one implementation.

use std::fmt::Debug;
use std::sync::Arc;

#[cfg(target_os = "linux")]
use crate::driver::host::{Host, HostOptions};
use crate::driver::sim::{CallCosts, EventMode, SimOptions};
use crate::driver::{Driver, Held, HoldsWork, Sim};
use crate::ids::{EventId, StreamId};

use super::Checked;
#[cfg(target_os = "linux")]
use super::gates::Gates;

/// A driver and what a test may do to the work that runs on it.
pub trait Machine: Debug {
    /// The driver.
    fn driver(&self) -> Arc<dyn Driver>;

    /// Streams to work on; `count` of them.
    ///
    /// # Panics
    ///
    /// When the device cannot make that many.
    fn streams(&self, count: usize) -> Vec<StreamId>;

    /// Whether events stay unfinished until the test finishes them.
    fn holds_work(&self) -> bool;

    /// Events that have not finished, oldest first. Empty when the machine cannot tell.
    fn unfinished(&self) -> Vec<(EventId, StreamId)>;

    /// Finishes all work of a stream.
    fn finish_stream(&self, stream: StreamId);

    /// Finishes one event alone, out of its stream's order. Nothing when the machine cannot.
    fn finish_event(&self, _event: EventId) {}

    /// What the device has given out.
    fn held(&self) -> Held;

    /// How often memory went back in a way that waits for all work on a real device, where this one
    /// does not wait.
    fn waits_owed(&self) -> u64 {
        0
    }

    /// Puts a pattern into a block, in the order of its stream.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    fn write(&self, _address: u64, _bytes: u64, _seed: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// Whether the pattern is still there, as the stream sees it.
    ///
    /// # Errors
    ///
    /// When it is not, or the device refuses.
    fn verify(&self, _address: u64, _bytes: u64, _seed: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// Submits work on another stream that spoils a block and runs some [steps](Self::step) later, when
    /// that stream is waited for through this machine, or after 2 ms.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    fn spoil_later(&self, _address: u64, _bytes: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// The test has done an operation.
    fn step(&self) {}

    /// Bytes taken from the device.
    fn used_bytes(&self) -> u64 {
        let info = self.driver().memory_info().expect("the machine answers");
        info.total_bytes - info.free_bytes
    }
}

/// The simulated device.
#[derive(Debug)]
pub struct SimMachine(pub Arc<Sim>);

impl SimMachine {
    /// A device of `total_bytes` whose events wait for the test.
    pub fn new(total_bytes: u64) -> Self {
        Self::with_events(total_bytes, EventMode::Manual)
    }

    /// A device of `total_bytes` whose events finish as `event_mode` says.
    pub fn with_events(total_bytes: u64, event_mode: EventMode) -> Self {
        Self(Arc::new(Sim::new(SimOptions {
            total_bytes,
            event_mode,
            costs: CallCosts::NONE,
            ..SimOptions::default()
        })))
    }
}

impl Machine for SimMachine {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.0) as Arc<dyn Driver>
    }

    fn streams(&self, count: usize) -> Vec<StreamId> {
        // The default stream, and others whose raw values are in no order.
        let created = (1..count).map(|_| self.0.create_stream().expect("streams are free"));
        let mut streams: Vec<_> = created.collect();
        streams.insert(count / 2, StreamId::DEFAULT);
        streams
    }

    fn holds_work(&self) -> bool {
        true
    }

    fn unfinished(&self) -> Vec<(EventId, StreamId)> {
        self.0.pending_events()
    }

    fn finish_stream(&self, stream: StreamId) {
        self.0.complete_stream(stream);
    }

    fn finish_event(&self, event: EventId) {
        self.0.complete_event(event);
    }

    fn held(&self) -> Held {
        self.0.held()
    }

    fn waits_owed(&self) -> u64 {
        self.0.calls("free")
    }
}

/// A device with real memory, as a machine needs it.
#[cfg(target_os = "linux")]
pub trait Real: HoldsWork + 'static {
    /// What it has given out.
    fn out(&self) -> Held;

    /// The machine goes, and with it the test: what is still out need not stay so.
    fn take_back(&self) {}
}

#[cfg(target_os = "linux")]
impl Real for Host {
    fn out(&self) -> Held {
        self.held()
    }
}

/// Real memory: work runs when it likes, and bytes can be looked at.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct RealMachine<D: Real> {
    /// They open before the device goes.
    gates: Gates<D::Gate>,
    device: Arc<D>,
}

/// The machine's own memory.
#[cfg(target_os = "linux")]
pub type HostMachine = RealMachine<Host>;

#[cfg(target_os = "linux")]
impl HostMachine {
    /// A device of `total_bytes`.
    pub fn new(total_bytes: u64) -> Self {
        Self::of(Host::new(HostOptions { total_bytes, ..HostOptions::default() }))
    }
}

#[cfg(target_os = "linux")]
impl<D: Real> RealMachine<D> {
    /// `device`, with a thread that opens gates.
    #[must_use]
    pub fn of(device: D) -> Self {
        Self { device: Arc::new(device), gates: Gates::new() }
    }
}

#[cfg(target_os = "linux")]
impl<D: Real> Drop for RealMachine<D> {
    fn drop(&mut self) {
        self.gates.open_all();
        self.device.take_back();
    }
}

/// How many bytes at each end of a block carry a pattern.
#[cfg(target_os = "linux")]
const PATTERN_BYTES: u64 = 64;

#[cfg(target_os = "linux")]
fn pattern(seed: u64, count: u64) -> Vec<u8> {
    (0..count).map(|n| (seed.wrapping_mul(31).wrapping_add(n) % 251) as u8).collect()
}

#[cfg(target_os = "linux")]
impl<D: Real> Machine for RealMachine<D> {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.device) as Arc<dyn Driver>
    }

    fn streams(&self, count: usize) -> Vec<StreamId> {
        let created = (1..count).map(|_| self.device.create_stream().expect("streams are free"));
        std::iter::once(StreamId::DEFAULT).chain(created).collect()
    }

    fn holds_work(&self) -> bool {
        false
    }

    fn unfinished(&self) -> Vec<(EventId, StreamId)> {
        Vec::new()
    }

    fn finish_stream(&self, stream: StreamId) {
        self.gates.open(stream);
        self.device.synchronize_stream(stream).expect("the stream lives");
    }

    fn held(&self) -> Held {
        self.device.out()
    }

    fn spoil_later(&self, address: u64, bytes: u64, stream: StreamId) -> Checked {
        let gate = self.device.hold_back(stream).map_err(|error| error.to_string())?;
        // Kept first: the driver may make the next call wait for somebody who waits for what is held back.
        self.gates.keep(stream, gate);
        let submitted = self.device.fill(address, 0xEE, bytes.min(PATTERN_BYTES), stream);
        submitted.map_err(|error| error.to_string())
    }

    fn step(&self) {
        self.gates.step();
    }

    fn write(&self, address: u64, bytes: u64, seed: u64, stream: StreamId) -> Checked {
        let count = bytes.min(PATTERN_BYTES);
        let pattern = pattern(seed, count);
        self.gates.open(stream);
        for at in [address, address + bytes - count] {
            self.device.copy_from_host(at, &pattern, stream).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn verify(&self, address: u64, bytes: u64, seed: u64, stream: StreamId) -> Checked {
        // Where both ends overlap the last writer's pattern stands; look at the tail only.
        let count = bytes.min(PATTERN_BYTES);
        let mut found = vec![0; usize::try_from(count).expect("it is small")];
        let ends = if bytes >= 2 * count {
            vec![address, address + bytes - count]
        } else {
            vec![address + bytes - count]
        };
        self.gates.open(stream);
        for at in ends {
            self.device.copy_to_host(&mut found, at, stream).map_err(|error| error.to_string())?;
            if found != pattern(seed, count) {
                return Err(format!("bytes at {at:#x} are not intact"));
            }
        }
        Ok(())
    }
}
