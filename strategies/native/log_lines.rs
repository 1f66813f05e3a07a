//! Log lines of the engine: driver calls that a miss makes, and the steps of a miss.

use log::Level;

use super::cell::HeapCell;
use super::engine::Engine;
use super::growth::{Growth, Refusal};
use super::policy::Plan;
use crate::diagnostics::note;
use crate::error::DriverError;

impl Engine {
    /// Logs a line with the heap's device, stream and pool.
    pub(super) fn note(&self, cell: &HeapCell, text: impl FnOnce() -> String) {
        note(Level::Debug, || {
            let (device, stream, pool) = (self.device.device, cell.stream(), cell.pool());
            format!("{} (device {device}, stream {stream}, pool {pool})", text())
        });
    }

    /// Logs whether the driver, or the pool's own allocator, allocated a segment.
    pub(super) fn note_segment(
        &self,
        cell: &HeapCell,
        plan: &Plan,
        answer: &Result<u64, DriverError>,
    ) {
        let (bytes, asked) = (plan.segment_bytes, plan.requested_bytes);
        self.note(cell, || match answer {
            Ok(address) => {
                format!("allocated a segment of {bytes} bytes at {address:#x} for {asked} bytes")
            }
            Err(error) => format!("no segment of {bytes} bytes for {asked} bytes: {error}"),
        });
    }

    /// Logs that a segment or pages were not requested from the driver, because the limit or a setting
    /// forbids it.
    pub(super) fn note_refusal(
        &self,
        growth: &Growth,
        cell: &HeapCell,
        bytes: u64,
        refusal: &Refusal,
    ) {
        self.note(cell, || {
            let why = match refusal {
                Refusal::Forbidden => "throw_on_cudamalloc_oom",
                _ => "the limit",
            };
            let reserved_bytes = growth.reserved_bytes();
            format!(
                "no driver call for {bytes} bytes: {why} forbids it at {reserved_bytes} reserved"
            )
        });
    }

    /// Logs a step of a miss and the bytes that it released.
    pub(super) fn note_step(&self, step: &str, released_bytes: u64) {
        note(Level::Debug, || {
            let device = self.device.device;
            format!("{step}: released {released_bytes} bytes (device {device})")
        });
    }
}
