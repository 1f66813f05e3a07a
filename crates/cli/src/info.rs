//! `stratalloc info`: the devices, their features and the strategies.

use std::io::Write;

use clap::Args;
use serde_json::{Value, json};

use stratalloc::driver::{DeviceInfo, Driver, ProcessUsage};
use stratalloc::registry;
use stratalloc::size::human_bytes;

use super::account;
use super::device::Device;
use super::outcome::{Outcome, Result, out};
use super::show::{columns, is_json, table};

/// List the devices and strategies of this machine, and their features; or the owners of a device's
/// memory.
#[derive(Args, Debug)]
pub(crate) struct Info {
    /// Device to list: sim, host or cuda:N. Default: all.
    #[arg(long)]
    device: Option<Device>,
    /// List the owners of the memory of each CUDA device that this process uses. Asks the process, and waits
    /// for its answer.
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

/// A device and the processes that hold its memory, or the reason why the device cannot be used.
type DeviceRow = (Device, Result<(DeviceInfo, Vec<&'static str>, Processes), String>);

/// The processes that hold memory of a device, largest first, or the reason why they cannot be listed.
type Processes = Result<Vec<ProcessUsage>, String>;

pub(crate) fn run(args: &Info) -> Result<Outcome> {
    let devices = args.device.map_or_else(Device::all, |device| vec![device]);
    if let Some(process) = args.pid {
        return account::run(process, &devices);
    }
    let found: Vec<DeviceRow> = devices.into_iter().map(find).collect();
    match is_json() {
        true => writeln!(out(), "{}", as_json(&found))?,
        false => write_tables(&found)?,
    }
    Ok(Outcome::Good)
}

fn find(device: Device) -> DeviceRow {
    let opened = device.open(None).map_err(|error| error.to_string());
    let found = opened.map(|opened| {
        let driver = &*opened.driver;
        (driver.info(), parts(driver), holders_of(driver))
    });
    (device, found)
}

fn as_json(found: &[DeviceRow]) -> Value {
    let device = |(device, found): &DeviceRow| match found {
        Ok((info, can, holders)) => {
            let process =
                |usage: &ProcessUsage| json!({"process": usage.process, "bytes": usage.used_bytes});
            let list = holders.as_ref().ok();
            let list = list.map(|list| list.iter().map(process).collect::<Vec<_>>());
            json!({
                "device": device.to_string(),
                "name": info.name,
                "memory_bytes": info.total_bytes,
                "can": can,
                "processes": list,
                "error": holders.as_ref().err(),
            })
        }
        Err(error) => json!({"device": device.to_string(), "error": error}),
    };
    let backends = registry::backends().into_iter();
    let backends = backends.map(|backend| json!({"name": backend.name, "about": backend.about}));
    json!({
        "devices": found.iter().map(device).collect::<Vec<_>>(),
        "backends": backends.collect::<Vec<_>>(),
    })
}

fn write_tables(found: &[DeviceRow]) -> std::io::Result<()> {
    let row = |(device, found): &DeviceRow| match found {
        Ok((info, can, _)) => {
            let memory = human_bytes(info.total_bytes);
            vec![device.to_string(), info.name.clone(), memory, can.join(", ")]
        }
        Err(error) => {
            vec![device.to_string(), "not usable".to_owned(), String::new(), error.clone()]
        }
    };
    let mut out = out();
    table(
        &mut out,
        &columns("device | name | memory: | can"),
        &found.iter().map(row).collect::<Vec<_>>(),
    )?;
    writeln!(out)?;
    let holders: Vec<_> = found.iter().flat_map(holder_rows).collect();
    if !holders.is_empty() {
        table(&mut out, &columns("device | process: | holds:"), &holders)?;
        writeln!(out)?;
    }
    let rows: Vec<Vec<String>> =
        registry::backends().into_iter().map(|backend| vec![backend.name, backend.about]).collect();
    table(&mut out, &columns("backend | what it is"), &rows)
}

fn holder_rows((device, found): &DeviceRow) -> Vec<Vec<String>> {
    match found {
        Ok((_, _, Ok(list))) => {
            let row = |usage: &ProcessUsage| {
                vec![device.to_string(), usage.process.to_string(), human_bytes(usage.used_bytes)]
            };
            list.iter().map(row).collect()
        }
        Ok((_, _, Err(error))) => vec![vec![device.to_string(), "?".to_owned(), error.clone()]],
        Err(_) => Vec::new(),
    }
}

fn holders_of(driver: &dyn Driver) -> Processes {
    let Some(processes) = driver.processes() else {
        return Ok(Vec::new());
    };
    let mut list = processes.list().map_err(|error| error.to_string())?;
    list.retain(|usage| usage.used_bytes > 0);
    list.sort_by_key(|usage| (std::cmp::Reverse(usage.used_bytes), usage.process));
    Ok(list)
}

/// Returns the names of the features that a device has.
fn parts(driver: &dyn Driver) -> Vec<&'static str> {
    let parts = [
        ("virtual memory", driver.virtual_memory().is_some()),
        ("memory pools", driver.memory_pools().is_some()),
        ("ipc", driver.ipc().is_some()),
        ("peers", driver.peers().is_some()),
        ("capture", driver.capture().is_some()),
        ("process list", driver.processes().is_some()),
    ];
    parts.into_iter().filter(|(_, can)| *can).map(|(part, _)| part).collect()
}

#[cfg(test)]
mod tests {
    use stratalloc::error::DriverErrorKind;
    use stratalloc_sim::{FaultControl, FaultPlan, Faulty, Sim, SimOptions};

    use super::*;

    #[test]
    fn a_device_lists_its_holders_or_the_reason_why_it_cannot() {
        let faulty = Faulty::new(Sim::new(SimOptions::default()));
        assert!(holders_of(&faulty).unwrap().is_empty(), "no process holds memory");
        faulty.allocate(3 << 20).unwrap();
        let own = std::process::id().to_string();
        let rows = |driver: &Faulty<Sim>| {
            holder_rows(&(Device::Sim, Ok((driver.info(), parts(driver), holders_of(driver)))))
        };
        assert_eq!(rows(&faulty), [["sim", &own, "3.00 MiB"]]);
        let kind = DriverErrorKind::Other;
        faulty.arm(FaultPlan { at: 0, kind, repeat: false, only: Some("list") });
        let rows = rows(&faulty);
        assert!(rows[0][2].contains("made to fail"), "{rows:?}");
    }
}
