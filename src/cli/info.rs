//! `stratalloc info`: devices found and what they can do, and the strategies.

use std::error::Error;
use std::io::Write;

use clap::Args;

use crate::driver::{Driver, ProcessUsage};
use crate::registry;
use crate::size::human_bytes;

use super::device::Device;
use super::outcome::{Outcome, out};
use super::show::{Side, table};

/// Arguments of `info`.
#[derive(Args, Debug)]
pub(crate) struct Info {}

pub(crate) fn run(_: &Info) -> Result<Outcome, Box<dyn Error>> {
    let mut rows = Vec::new();
    let mut holders = Vec::new();
    for device in Device::all() {
        rows.push(match device.open(None) {
            Ok(opened) => {
                holders.extend(holders_of(device, &*opened.driver));
                row(device, &*opened.driver)
            }
            Err(error) => {
                vec![device.to_string(), "not usable".to_owned(), String::new(), error.to_string()]
            }
        });
    }
    let mut out = out();
    let heading = [
        ("device", Side::Left),
        ("name", Side::Left),
        ("memory", Side::Right),
        ("can", Side::Left),
    ];
    table(&mut out, &heading, &rows)?;
    writeln!(out)?;
    if !holders.is_empty() {
        let heading = [("device", Side::Left), ("process", Side::Right), ("holds", Side::Right)];
        table(&mut out, &heading, &holders)?;
        writeln!(out)?;
    }
    let rows: Vec<Vec<String>> =
        registry::backends().into_iter().map(|backend| vec![backend.name, backend.about]).collect();
    table(&mut out, &[("backend", Side::Left), ("what it is", Side::Left)], &rows)?;
    Ok(Outcome::Good)
}

/// The processes that hold memory of a device, the largest first, or why nobody can tell.
fn holders_of(device: Device, driver: &dyn Driver) -> Vec<Vec<String>> {
    let Some(processes) = driver.processes() else {
        return Vec::new();
    };
    let mut list = match processes.list() {
        Ok(list) => list,
        Err(error) => return vec![vec![device.to_string(), "?".to_owned(), error.to_string()]],
    };
    list.retain(|usage| usage.used_bytes > 0);
    list.sort_by_key(|usage| (std::cmp::Reverse(usage.used_bytes), usage.process));
    let row = |usage: ProcessUsage| {
        vec![device.to_string(), usage.process.to_string(), human_bytes(usage.used_bytes)]
    };
    list.into_iter().map(row).collect()
}

fn row(device: Device, driver: &dyn Driver) -> Vec<String> {
    let info = driver.info();
    let parts = [
        ("virtual memory", driver.virtual_memory().is_some()),
        ("memory pools", driver.memory_pools().is_some()),
        ("ipc", driver.ipc().is_some()),
        ("peers", driver.peers().is_some()),
        ("capture", driver.capture().is_some()),
        ("process list", driver.processes().is_some()),
    ];
    let can: Vec<&str> = parts.into_iter().filter(|(_, can)| *can).map(|(part, _)| part).collect();
    vec![device.to_string(), info.name, human_bytes(info.total_bytes), can.join(", ")]
}

#[cfg(test)]
mod tests {
    use crate::driver::sim::SimOptions;
    use crate::driver::{FaultPlan, Faulty, Sim};
    use crate::error::DriverErrorKind;

    use super::*;

    #[test]
    fn a_device_lists_who_holds_it_and_says_why_it_cannot() {
        let faulty = Faulty::new(Sim::new(SimOptions::default()));
        assert!(holders_of(Device::Sim, &faulty).is_empty(), "nobody holds anything");
        faulty.allocate(3 << 20).unwrap();
        let own = std::process::id().to_string();
        assert_eq!(holders_of(Device::Sim, &faulty), [["sim", &own, "3.00 MiB"]]);
        let kind = DriverErrorKind::Other;
        faulty.arm(FaultPlan { at: 0, kind, repeat: false, only: Some("list") });
        let rows = holders_of(Device::Sim, &faulty);
        assert!(rows[0][2].contains("made to fail"), "{rows:?}");
    }
}
