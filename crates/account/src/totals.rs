//! The sums of the measured differences.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::calls::Kind;
use crate::device::{self, Ordinal};

/// What was measured on a device.
struct Device {
    /// The used bytes before the first measured call, if there was one.
    first_used_bytes: Option<u64>,
    /// The used bytes when a call last began or ended.
    last_used_bytes: u64,
    /// The number of calls that run.
    running: u32,
    /// What the used bytes have grown by while calls ran. The next call that ends gets these bytes.
    pending_bytes: i64,
    rows: BTreeMap<(String, Kind), Row>,
}

impl Device {
    const fn new() -> Self {
        let (last_used_bytes, running, pending_bytes) = (0, 0, 0);
        let rows = BTreeMap::new();
        Self { first_used_bytes: None, last_used_bytes, running, pending_bytes, rows }
    }

    /// Adds what the used bytes have grown by since a call began or ended. Growth while no call runs is not
    /// measured.
    fn note(&mut self, used_bytes: u64) {
        if self.running > 0 {
            self.pending_bytes += used_bytes.cast_signed() - self.last_used_bytes.cast_signed();
        }
        self.last_used_bytes = used_bytes;
    }
}

/// The calls of one kind from one library that changed the used bytes.
#[derive(Default)]
struct Row {
    bytes: i64,
    calls: u64,
}

/// The devices by their number. Each has its own lock, because a call of the driver for one device may wait
/// for a kernel that another device must launch.
static DEVICES: [Mutex<Device>; 64] = [const { Mutex::new(Device::new()) }; 64];

/// A call that is being measured.
pub(crate) struct Measurement {
    device: &'static Mutex<Device>,
    ordinal: Ordinal,
}

impl Measurement {
    /// Begins a measurement on the current device. Returns `None` if the thread has no current context.
    pub(crate) fn begin() -> Option<Self> {
        let ordinal = device::current()?;
        let device = DEVICES.get(usize::try_from(ordinal).ok()?)?;
        let mut state = device.lock();
        let used_bytes = device::used_bytes()?;
        state.first_used_bytes.get_or_insert(used_bytes);
        state.note(used_bytes);
        state.running += 1;
        Some(Self { device, ordinal })
    }

    /// Ends the measurement. Adds the growth, if there is any, to the library that `find` returns.
    pub(crate) fn end(self, kind: Kind, find: impl FnOnce() -> String) {
        let bytes = self.growth();
        if bytes != 0 {
            // The search takes long, so no lock is held.
            let library = find();
            let mut device = self.device.lock();
            let row = device.rows.entry((library, kind)).or_default();
            row.bytes += bytes;
            row.calls += 1;
        }
    }

    /// Returns the growth that no other call has got.
    fn growth(&self) -> i64 {
        // The call may have changed the current device. Then the next call on this device gets the growth.
        let is_current = device::current() == Some(self.ordinal);
        let mut device = self.device.lock();
        let used_bytes = if is_current { device::used_bytes() } else { None };
        if let Some(used_bytes) = used_bytes {
            device.note(used_bytes);
        }
        device.running -= 1;
        std::mem::take(&mut device.pending_bytes)
    }
}

/// Returns all sums as JSON.
pub(crate) fn json() -> String {
    let mut devices = Vec::new();
    for (ordinal, device) in DEVICES.iter().enumerate() {
        let device = device.lock();
        if let Some(first) = device.first_used_bytes {
            let rows: Vec<_> = device.rows.iter().map(|(key, row)| row_json(key, row)).collect();
            let rows = rows.join(",");
            devices.push(format!(
                r#"{{"device":{ordinal},"first_used_bytes":{first},"rows":[{rows}]}}"#
            ));
        }
    }
    format!(r#"{{"devices":[{}]}}"#, devices.join(","))
}

fn row_json((library, kind): &(String, Kind), Row { bytes, calls }: &Row) -> String {
    let kind = kind.name();
    format!(r#"{{"library":"{library}","kind":"{kind}","bytes":{bytes},"calls":{calls}}}"#)
}
