//! `stratalloc info`: devices found and what they can do, and the strategies.

use std::error::Error;
use std::io::Write;

use clap::Args;
use stratalloc::driver::Driver;
use stratalloc::registry;
use stratalloc::size::human_bytes;

use crate::device::Device;
use crate::outcome::{Outcome, out};
use crate::show::{Side, table};

/// Arguments of `info`.
#[derive(Args, Debug)]
pub(crate) struct Info {}

pub(crate) fn run(_: &Info) -> Result<Outcome, Box<dyn Error>> {
    let mut rows = Vec::new();
    for device in Device::all() {
        rows.push(match device.open(None) {
            Ok(opened) => row(device, &*opened.driver),
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
    let rows: Vec<Vec<String>> =
        registry::backends().into_iter().map(|backend| vec![backend.name, backend.about]).collect();
    table(&mut out, &[("backend", Side::Left), ("what it is", Side::Left)], &rows)?;
    Ok(Outcome::Good)
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
