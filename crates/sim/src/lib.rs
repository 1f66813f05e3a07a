//! Devices without a GPU: a simulated one, and the memory of this machine with a device's semantics.
//!
//! [`Sim`] has any capacity and no bytes; its clock and its events are under the caller's control. [`Host`]
//! has real bytes and real threads. [`Faulty`] lets calls of any driver fail; `Gated` completes work when the
//! caller decides; `Recorded` gives the addresses of a recording. Read next: `sim`, `host`.

mod faulty;
mod free_ranges;
mod gated;
mod held;
#[cfg(target_os = "linux")]
mod host;
mod pool_books;
mod recorded;
mod refusal;
mod sim;
#[cfg(test)]
mod tests;

pub use faulty::{FaultControl, FaultPlan, Faults, Faulty};
pub use gated::{Gated, Gates, WorkGate};
pub use held::HeldResources;
#[cfg(target_os = "linux")]
pub use host::{Gate, Host, HostOptions};
pub use recorded::{Recorded, RecordedAddresses, RecordedState};
pub use sim::{AddressOrder, CallCosts, Cost, EventMode, Sim, SimOptions};
