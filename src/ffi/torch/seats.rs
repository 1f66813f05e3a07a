//! One allocator per device, found by its ordinal without a lock.

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::ffi::guard::{Failure, Status};
use crate::ffi::instance::Instance;
use crate::ffi::table::{self, Keeper};
use crate::stats::Statistics;

/// As many as PyTorch counts.
const DEVICES_MAX: usize = 128;

/// What kind of device to open; `cuda` if it is not set.
const VARIABLE: &str = "STRATALLOC_DEVICE";

/// The allocator of one device.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) instance: Arc<Instance>,
    pub(super) handle: u64,
}

static SEATS: [OnceLock<Seat>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];
/// Held while an allocator is made.
static OPENING: Mutex<()> = Mutex::new(());

/// The allocator of a device, made if there is none yet.
#[inline]
pub(super) fn seat(device: c_int) -> Result<&'static Seat, Failure> {
    let place = usize::try_from(device).ok().and_then(|device| SEATS.get(device));
    match place.and_then(OnceLock::get) {
        Some(seat) => Ok(seat),
        None => open(device),
    }
}

/// The allocator of a device that has one.
#[inline]
pub(super) fn opened(device: c_int) -> Result<&'static Seat, Failure> {
    let place = usize::try_from(device).ok().and_then(|device| SEATS.get(device));
    place.and_then(OnceLock::get).ok_or_else(|| none(device))
}

/// The counters of a device's allocator; zeros if there is none yet, because to ask makes none.
pub(super) fn statistics(device: c_int) -> Result<Statistics, Failure> {
    let place = usize::try_from(device).ok().and_then(|device| SEATS.get(device));
    let place = place.ok_or_else(|| none(device))?;
    place.get().map_or_else(|| Ok(Statistics::default()), |seat| seat.instance.statistics())
}

/// All allocators there are.
pub(super) fn seats() -> impl Iterator<Item = &'static Seat> {
    SEATS.iter().filter_map(OnceLock::get)
}

#[cold]
fn none(device: c_int) -> Failure {
    Failure::new(Status::InvalidArgument, format_args!("device {device} has no allocator"))
}

/// A failure is not kept: the next call tries again.
#[cold]
fn open(device: c_int) -> Result<&'static Seat, Failure> {
    let place = usize::try_from(device).ok().and_then(|device| SEATS.get(device));
    let place = place.ok_or_else(|| none(device))?;
    let _opening = OPENING.lock();
    if let Some(seat) = place.get() {
        return Ok(seat);
    }
    // What is no text is no kind of device, which is said then.
    let kind = std::env::var_os(VARIABLE);
    let kind = kind.map_or_else(|| "cuda".to_owned(), |kind| kind.to_string_lossy().into_owned());
    let instance = Arc::new(Instance::open(None, &format!("{kind}:{device}"))?);
    let handle = table::add(Arc::clone(&instance), Keeper::Process)?;
    Ok(place.get_or_init(|| Seat { instance, handle }))
}
