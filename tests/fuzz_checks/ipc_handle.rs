//! Decodes the bytes of a shared handle, and opens the handle on the host device.
//!
//! The first byte of the input selects the mode. In mode 0 the rest is the handle. In mode 1 the rest is a
//! handle whose checksum is corrected. In modes 2 and 3 the rest is a list of patches (offset, length,
//! bytes) to a real handle of large or of small pages. In all other modes the patches apply to a fabric
//! handle, which is opened on the simulated device that made it.

use std::sync::{Arc, LazyLock};

use stratalloc::allocator::{Allocation, Sharing};
use stratalloc::driver::Driver;
use stratalloc::sharing::SharedHandle;
use stratalloc::strategies::native::Engine;
use stratalloc_sim::{HeldResources, Host, HostOptions, Sim, SimOptions};

use super::sharer;

/// The position, in a handle, of the id of the process that made it.
const PROCESS: std::ops::Range<usize> = 12..16;
/// A bit that no process id has.
const NO_PROCESS: u32 = 1 << 30;

/// An engine that shares blocks and an engine that opens them, on the same device.
struct Two<D> {
    device: Arc<D>,
    opener: Engine,
    handles: Vec<SharedHandle>,
    _sharer: Engine,
    _blocks: Vec<Allocation>,
}

impl<D: Driver + 'static> Two<D> {
    fn on(device: Arc<D>, sizes: &[u64]) -> Self {
        let sharer = sharer::engine(device.clone());
        let shared = sizes.iter().map(|bytes| sharer::shared(&sharer, *bytes));
        let (blocks, handles) = shared.unzip();
        let opener = sharer::engine(device.clone());
        Self { device, opener, handles, _sharer: sharer, _blocks: blocks }
    }
}

static HOST: LazyLock<Two<Host>> = LazyLock::new(|| {
    let options = HostOptions { total_bytes: 1 << 30, ..HostOptions::default() };
    Two::on(Arc::new(Host::new(options)), &[25 << 20, 1000])
});

static FABRIC: LazyLock<Two<Sim>> = LazyLock::new(|| {
    let options = SimOptions { fabric: true, ..SimOptions::default() };
    Two::on(Arc::new(Sim::new(options)), &[25 << 20])
});

/// Checks one input.
pub(crate) fn check(bytes: &[u8]) {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode {
        0 | 1 => {
            let mut forged = of_no_other_process(rest.to_vec());
            if *mode == 1 {
                sharer::seal(&mut forged);
            }
            if let Some(handle) = decoded(&forged) {
                let opened = HOST.opener.open(&handle);
                assert!(opened.is_err(), "{forged:x?} was not shared");
                check_message(&opened.expect_err("it is one").to_string());
            }
        }
        2 | 3 => opened(&HOST, usize::from(*mode) - 2, rest, |host| host.held()),
        _ => opened(&FABRIC, 0, rest, |sim| sim.held()),
    }
}

/// Sets the process id to that of this process or to an impossible one, so that the check contacts no
/// other process.
fn of_no_other_process(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(place) = bytes.get_mut(PROCESS) {
        let number = u32::from_le_bytes(place.try_into().expect("four bytes"));
        if number != std::process::id() {
            place.copy_from_slice(&(number | NO_PROCESS).to_le_bytes());
        }
    }
    bytes
}

/// Decodes a handle. Checks that encoding it gives the same bytes and that its debug text contains no
/// secret.
fn decoded(bytes: &[u8]) -> Option<SharedHandle> {
    match SharedHandle::from_bytes(bytes) {
        Ok(handle) => {
            assert_eq!(handle.as_bytes(), bytes);
            assert_eq!(SharedHandle::from_bytes(handle.as_bytes()), Ok(handle.clone()));
            assert!(handle.size_bytes() > 0);
            assert_eq!(handle.process().to_le_bytes(), bytes[PROCESS]);
            let shown = format!("{handle:?}");
            let (process, size) = (handle.process(), handle.size_bytes());
            let expected = format!("SharedHandle {{ process: {process}, size_bytes: {size}, .. }}");
            assert_eq!(shown, expected);
            Some(handle)
        }
        Err(error) => {
            check_message(&error.to_string());
            None
        }
    }
}

fn check_message(message: &str) {
    assert!(message.len() < 1000 && !message.contains(char::is_control), "{message:?}");
}

/// Opens a patched handle, which may still be valid. Checks that nothing leaks either way.
fn opened<D: Driver>(
    two: &Two<D>,
    handle: usize,
    patches: &[u8],
    held: impl Fn(&D) -> HeldResources,
) {
    let mut bytes = two.handles[handle].as_bytes().to_vec();
    let mut rest = patches;
    while let [at, len, more @ ..] = rest {
        let at = usize::from(*at);
        let end = more.len().min(usize::from(*len));
        for (place, byte) in bytes.iter_mut().skip(at).zip(&more[..end]) {
            *place = *byte;
        }
        rest = &more[end..];
    }
    let mut bytes = of_no_other_process(bytes);
    sharer::seal(&mut bytes);
    let Some(handle) = decoded(&bytes) else { return };
    let before = held(&two.device);
    match two.opener.open(&handle) {
        Ok(imported) => {
            assert_eq!(imported.size_bytes(), handle.size_bytes());
            let inside = |(start, bytes): &(u64, u64)| {
                *start <= imported.address()
                    && imported.address() + imported.size_bytes() <= start + bytes
            };
            let now = held(&two.device);
            let reservations = now.reservations.iter();
            assert!(reservations.clone().any(inside), "{imported:?} in {now:?}");
            drop(imported);
        }
        Err(error) => check_message(&error.to_string()),
    }
    assert_eq!(held(&two.device), before, "{bytes:x?}");
}
