//! Devices without a GPU, which are one simulated device of two kinds.
//!
//! [`Sim`] has any capacity and no bytes; its clock and its events are under the caller's control. [`Host`]
//! has real bytes, in the memory of this machine, and real threads. [`Faulty`] lets calls of any driver
//! fail; `Gated` completes work when the caller decides; `Recorded` gives the addresses of a recording. Read
//! next: `sim`, `host`.

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
