//! Simulated devices, for tests and replays without a GPU.
//!
//! [`Sim`] has a total size but stores no bytes; the caller advances its clock and finishes its events.
//! [`Host`] stores its bytes in memory of this machine, and worker threads run its work. Three wrappers
//! change a driver: [`Faulty`] makes chosen calls fail, [`Gated`] holds work back until the caller releases
//! it, and [`Recorded`] returns the addresses of a recording. Read next: the modules `sim` and `host`.

mod faulty;
mod free_ranges;
mod gated;
mod held;
#[cfg(target_os = "linux")]
mod host;
mod recorded;
mod refusal;
mod sim;
#[cfg(test)]
mod tests;

pub use faulty::{FaultControl, FaultPlan, Faults, Faulty};
pub use gated::{Gated, Gates, WorkGate};
pub use held::HeldResources;
#[cfg(target_os = "linux")]
pub use host::{Host, HostOptions, Threads};
pub use recorded::{Recorded, RecordedAddresses, RecordedState};
pub use sim::{
    AddressOrder, CallCosts, Clock, Cost, EventMode, Gate, Kind, Sim, SimOptions, SimulatedDevice,
};
