//! A device under a test's control: the driver, and control over when its work finishes.
//!
//! The test decides when the work of a stream finishes. A machine that runs its work by itself returns false
//! from `holds_work`, and some checks are then left out. To run tests over another driver, implement
//! [`Machine`].

use std::fmt::Debug;
use std::sync::Arc;

use stratalloc::driver::{Driver, HoldsWork};
use stratalloc::ids::{EventId, StreamId};
use stratalloc_sim::{CallCosts, EventMode, HeldResources, Sim, SimOptions};
#[cfg(target_os = "linux")]
use stratalloc_sim::{Host, HostOptions};

use super::Checked;
#[cfg(target_os = "linux")]
use super::gates::Gates;

/// A driver, with control over the work that runs on it.
pub trait Machine: Debug {
    /// Returns the driver.
    fn driver(&self) -> Arc<dyn Driver>;

    /// Returns `count` streams to work on.
    ///
    /// # Panics
    ///
    /// When the device cannot create that many.
    fn streams(&self, count: usize) -> Vec<StreamId>;

    /// Returns true if events stay unfinished until the test finishes them or a call waits for them.
    fn holds_work(&self) -> bool;

    /// Returns the unfinished events, oldest first, or nothing if the machine cannot list them.
    fn unfinished(&self) -> Vec<(EventId, StreamId)>;

    /// Finishes all work of a stream.
    fn finish_stream(&self, stream: StreamId);

    /// Finishes one event alone, out of its stream's order. Does nothing if the machine cannot do that.
    fn finish_event(&self, _event: EventId) {}

    /// Returns the resources that the device has allocated.
    fn held(&self) -> HeldResources;

    /// Returns how many frees so far did not wait for the device's work, although they would on a real
    /// device.
    fn waits_owed(&self) -> u64 {
        0
    }

    /// Writes a pattern into a block, in stream order. A machine without bytes does nothing.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    fn write(&self, _address: u64, _bytes: u64, _seed: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// Checks, in stream order, that the pattern is still in the block. A machine without bytes does nothing.
    ///
    /// # Errors
    ///
    /// When the pattern has changed, or the device fails.
    fn verify(&self, _address: u64, _bytes: u64, _seed: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// Submits work to `stream` that overwrites the start of a block. The work is delayed until some
    /// [steps](Self::step) later, until 2 ms have passed, or until `stream` is waited for through this
    /// machine. A machine that cannot delay work does nothing.
    ///
    /// # Errors
    ///
    /// When the device refuses.
    fn spoil_later(&self, _address: u64, _bytes: u64, _stream: StreamId) -> Checked {
        Ok(())
    }

    /// Counts an operation of the test. Delays of work are measured in operations.
    fn step(&self) {}

    /// Returns the bytes allocated from the device.
    fn used_bytes(&self) -> u64 {
        let info = self.driver().memory_info().expect("the machine answers");
        info.total_bytes - info.free_bytes
    }
}

/// The simulated device.
#[derive(Debug)]
pub struct SimMachine(pub Arc<Sim>);

impl SimMachine {
    /// Creates a device of `total_bytes` whose events finish when the test finishes them.
    pub fn new(total_bytes: u64) -> Self {
        Self::with_events(total_bytes, EventMode::Manual)
    }

    /// Creates a device of `total_bytes` with the given event mode.
    pub fn with_events(total_bytes: u64, event_mode: EventMode) -> Self {
        Self(Arc::new(Sim::new(SimOptions {
            total_bytes,
            event_mode,
            costs: CallCosts::default(),
            ..SimOptions::default()
        })))
    }
}

impl Machine for SimMachine {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.0) as Arc<dyn Driver>
    }

    fn streams(&self, count: usize) -> Vec<StreamId> {
        // The default stream is among them and not the first, so raw values are not in ascending order.
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

    fn held(&self) -> HeldResources {
        self.0.held()
    }

    fn waits_owed(&self) -> u64 {
        self.0.calls("free")
    }
}

/// A device with real memory, for a [`RealMachine`].
#[cfg(target_os = "linux")]
pub trait Real: HoldsWork + 'static {
    /// Returns the resources that the device has allocated.
    fn held(&self) -> HeldResources;

    /// Called when the machine is dropped. The device may free what is still allocated.
    fn free_all(&self) {}
}

#[cfg(target_os = "linux")]
impl Real for Host {
    fn held(&self) -> HeldResources {
        self.held()
    }
}

/// A machine with real memory: work runs by itself, and bytes can be read.
#[cfg(target_os = "linux")]
#[derive(Debug)]
pub struct RealMachine<D: Real> {
    /// Declared before the device, so that the gates are dropped first.
    gates: Gates<D::Gate>,
    device: Arc<D>,
}

/// A machine on host memory.
#[cfg(target_os = "linux")]
pub type HostMachine = RealMachine<Host>;

#[cfg(target_os = "linux")]
impl HostMachine {
    /// Creates a device of `total_bytes`.
    pub fn new(total_bytes: u64) -> Self {
        Self::of(Host::new(HostOptions { total_bytes, ..HostOptions::default() }))
    }
}

#[cfg(target_os = "linux")]
impl<D: Real> RealMachine<D> {
    /// Creates a machine on `device`, with a thread that opens gates.
    #[must_use]
    pub fn of(device: D) -> Self {
        Self { device: Arc::new(device), gates: Gates::new() }
    }
}

#[cfg(target_os = "linux")]
impl<D: Real> Drop for RealMachine<D> {
    fn drop(&mut self) {
        self.gates.open_all();
        self.device.free_all();
    }
}

/// The number of bytes at each end of a block that carry a pattern.
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

    fn held(&self) -> HeldResources {
        self.device.held()
    }

    fn spoil_later(&self, address: u64, bytes: u64, stream: StreamId) -> Checked {
        let gate = self.device.hold_back(stream).map_err(|error| error.to_string())?;
        // `keep` makes the gate open in time. It must precede `fill`, which may wait for a thread that itself
        // waits for the work behind this gate.
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
        // If the two ends overlap, the tail was written last and has overwritten the head, so only the
        // tail is checked.
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
