//! The sums of the measured differences.

use std::collections::BTreeMap;
use std::fmt::Write;

use parking_lot::Mutex;

use crate::calls::Kind;
use crate::device::{Ordinal, Used};

/// What was measured on a device.
#[derive(Default)]
struct Device {
    /// The used bytes before the first measured call.
    first_used_bytes: u64,
    /// The sum of all differences. A call subtracts what other calls added while it ran.
    measured_bytes: i64,
    rows: BTreeMap<(String, Kind), Row>,
}

/// The calls of one kind from one library that changed the used bytes.
#[derive(Default)]
struct Row {
    bytes: i64,
    calls: u64,
}

static DEVICES: Mutex<BTreeMap<Ordinal, Device>> = Mutex::new(BTreeMap::new());

/// A call that is being measured.
pub(crate) struct Measurement {
    ordinal: Ordinal,
    used_bytes: u64,
    measured_bytes: i64,
}

impl Measurement {
    /// Begins a measurement on the current device. Returns `None` if the thread has no current context.
    pub(crate) fn begin() -> Option<Self> {
        let mut devices = DEVICES.lock();
        let Used { ordinal, used_bytes } = Used::now()?;
        let device = devices
            .entry(ordinal)
            .or_insert_with(|| Device { first_used_bytes: used_bytes, ..Device::default() });
        Some(Self { ordinal, used_bytes, measured_bytes: device.measured_bytes })
    }

    /// Ends the measurement. Adds the difference, if there is one, to the library that `find` returns.
    pub(crate) fn end(self, kind: Kind, find: impl FnOnce() -> String) {
        let difference = self.difference();
        if difference != 0 {
            // The search takes long, so no lock is held.
            let library = find();
            let mut devices = DEVICES.lock();
            let row =
                devices.entry(self.ordinal).or_default().rows.entry((library, kind)).or_default();
            row.bytes += difference;
            row.calls += 1;
        }
    }

    fn difference(&self) -> i64 {
        let mut devices = DEVICES.lock();
        let now = Used::now().filter(|now| now.ordinal == self.ordinal);
        let (Some(now), Some(device)) = (now, devices.get_mut(&self.ordinal)) else {
            return 0;
        };
        let growth = now.used_bytes.cast_signed() - self.used_bytes.cast_signed();
        let difference = growth - (device.measured_bytes - self.measured_bytes);
        device.measured_bytes += difference;
        difference
    }
}

/// Returns all sums as JSON.
pub(crate) fn json() -> String {
    let devices = DEVICES.lock();
    let mut text = String::from("{\"devices\":[");
    for (at, (ordinal, device)) in devices.iter().enumerate() {
        let comma = if at > 0 { "," } else { "" };
        let first = device.first_used_bytes;
        let start =
            format_args!("{comma}{{\"device\":{ordinal},\"first_used_bytes\":{first},\"rows\":[");
        // Writing into a string cannot fail.
        let _ = text.write_fmt(start);
        for (at, ((library, kind), row)) in device.rows.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let Row { bytes, calls } = row;
            let kind = kind.name();
            let row = format_args!(
                "{comma}{{\"library\":\"{library}\",\"kind\":\"{kind}\",\"bytes\":{bytes},\"calls\":{calls}}}"
            );
            let _ = text.write_fmt(row);
        }
        text.push_str("]}");
    }
    text.push_str("]}");
    text
}
