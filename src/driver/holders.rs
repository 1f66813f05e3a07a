//! Adds the processes that hold memory of a device to the reports of failed requests.

use std::cmp::Reverse;

use super::Driver;
use crate::error::{Holder, OutOfMemory};
use crate::size::human_bytes;

/// Adds the processes that hold most of the device's memory to the report of a request that the driver
/// refused. If others (other processes, or other libraries in this process) hold at least as many bytes
/// as the request needs, appends a hint as well.
pub(crate) fn name_holders(report: &mut OutOfMemory, driver: &dyn Driver) {
    report.holders = largest_holders(driver);
    report.hints.extend(held_by_others(report));
    report.hints.extend(of_another_namespace(report));
}

/// Returns a hint if the complete list of processes lacks the id of this process, which holds memory. The
/// driver then lists it under another id, as it may in a container.
fn of_another_namespace(report: &OutOfMemory) -> Option<String> {
    let holders = &report.holders;
    let is_complete = !holders.is_empty() && holders.len() < OutOfMemory::HOLDERS_MAX;
    let is_foreign = is_complete && report.reserved_bytes > 0;
    (is_foreign && !holders.iter().any(Holder::is_this_process)).then(|| {
        "none of the process ids is that of this process: they may be of another pid namespace."
            .to_owned()
    })
}

/// Returns the processes that hold most memory, largest first. Returns an empty list when the driver has
/// no process list or fails to read it: the report is useful without the list.
pub(crate) fn largest_holders(driver: &dyn Driver) -> Vec<Holder> {
    let list = driver.processes().and_then(|processes| processes.list().ok());
    let mut holders = list.unwrap_or_default();
    holders.retain(|holder| holder.used_bytes > 0);
    holders.sort_unstable_by_key(|holder| (Reverse(holder.used_bytes), holder.process));
    holders.truncate(OutOfMemory::HOLDERS_MAX);
    holders
}

/// Returns a hint if others hold at least as many bytes as the request needs.
fn held_by_others(report: &OutOfMemory) -> Option<String> {
    let others =
        report.device_total_bytes.zip(report.device_free_bytes).map_or(0, |(total, free)| {
            total.saturating_sub(free).saturating_sub(report.reserved_bytes)
        });
    if others < report.rounded_bytes {
        return None;
    }
    // In a container, the list may name this process by its pid on the host. Then `this` is `None`.
    let this = report.holders.iter().find(|holder| holder.is_this_process());
    let other = report.holders.iter().find(|holder| !holder.is_this_process());
    let beside = this.map_or(0, |this| this.used_bytes.saturating_sub(report.reserved_bytes));
    let which = match other.filter(|_| this.is_some()) {
        Some(other) if other.used_bytes > beside => {
            let bytes = human_bytes(other.used_bytes);
            format!("process {} has the largest share, {bytes}", other.process)
        }
        _ if beside > others / 2 => {
            "look for other allocators and libraries in this process".to_owned()
        }
        _ => "look for other processes on it".to_owned(),
    };
    Some(format!("{} of the device are held by others: {which}.", human_bytes(others)))
}
