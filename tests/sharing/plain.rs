//! Plain allocations: the driver's own handle of the segment, with the block's place in it.

use std::sync::Arc;

use parking_lot::Mutex;
use stratalloc::allocator::Sharing;
use stratalloc::driver::{
    CaptureStatus, DeviceInfo, Driver, DriverResult, Ipc, MemoryInfo, Sim, VirtualMemory,
};
use stratalloc::error::{DriverError, DriverErrorKind};
use stratalloc::ids::{EventId, StreamId};
use stratalloc::sharing::{FormatError, SharedHandle, SharingError};

use super::tools::{MIB, allocate, engine, forged, sim};

/// The simulated device with handles for plain allocations. What is opened is nowhere.
#[derive(Debug)]
struct Shares {
    sim: Arc<Sim>,
    opened: Mutex<Vec<u64>>,
    refuses: Mutex<bool>,
}

const ELSEWHERE: u64 = 0x5_0000_0000;

macro_rules! hand_through {
    ($($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $type)*) -> DriverResult<$out> {
            self.sim.$name($($arg),*)
        })*
    };
}

impl Driver for Shares {
    fn info(&self) -> DeviceInfo {
        self.sim.info()
    }

    hand_through! {
        memory_info() -> MemoryInfo;
        allocate(size_bytes: u64) -> u64;
        free(address: u64, size_bytes: u64) -> ();
        create_stream() -> StreamId;
        destroy_stream(stream: StreamId) -> ();
        synchronize_stream(stream: StreamId) -> ();
        synchronize_device() -> ();
        create_event() -> EventId;
        record_event(event: EventId, stream: StreamId) -> ();
        query_event(event: EventId) -> bool;
        synchronize_event(event: EventId) -> ();
        wait_event(stream: StreamId, event: EventId) -> ();
        destroy_event(event: EventId) -> ();
        copy(to: u64, from: u64, size_bytes: u64, stream: StreamId) -> ();
        copy_from_host(to: u64, from: &[u8], stream: StreamId) -> ();
        copy_to_host(to: &mut [u8], from: u64, stream: StreamId) -> ();
        fill(to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> ();
        capture_status(stream: StreamId) -> CaptureStatus;
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.sim.virtual_memory()
    }

    fn ipc(&self) -> Option<&dyn Ipc> {
        Some(self)
    }
}

impl Ipc for Shares {
    fn share(&self, base: u64) -> DriverResult<[u8; 64]> {
        let mut handle = [0; 64];
        handle[..8].copy_from_slice(&base.to_le_bytes());
        Ok(handle)
    }

    fn open(&self, handle: &[u8; 64]) -> DriverResult<u64> {
        let base = handle.first_chunk().map_or(0, |base| u64::from_le_bytes(*base));
        self.opened.lock().push(base + ELSEWHERE);
        Ok(base + ELSEWHERE)
    }

    fn close(&self, address: u64) -> DriverResult<()> {
        if *self.refuses.lock() {
            return Err(DriverError::new(DriverErrorKind::Other, "close", 0, "not now"));
        }
        self.opened.lock().retain(|opened| *opened != address);
        Ok(())
    }
}

fn shares() -> Arc<Shares> {
    Arc::new(Shares { sim: sim(), opened: Mutex::default(), refuses: Mutex::new(false) })
}

/// The handle as another process would have made it.
fn from_elsewhere(handle: &SharedHandle) -> SharedHandle {
    let bytes = forged(handle.as_bytes(), 12, &1u32.to_le_bytes());
    SharedHandle::from_bytes(&bytes).expect("its form is good")
}

#[test]
fn a_block_is_found_at_its_offset_and_its_segment_is_opened_once() {
    let driver = shares();
    let ours = engine(driver.clone(), "");
    let theirs = engine(driver.clone(), "");
    let (a, b) = (allocate(&ours, 3 * MIB), allocate(&ours, 4 * MIB));
    let handles = [&a, &b].map(|block| ours.share(block).unwrap());
    assert_eq!(handles[0].as_bytes().len(), 120);
    assert_eq!(ours.share(&b).unwrap().as_bytes(), handles[1].as_bytes());
    let opened = handles.each_ref().map(|handle| theirs.open(&from_elsewhere(handle)).unwrap());
    assert_eq!(driver.opened.lock().len(), 1);
    for (opened, block) in opened.iter().zip([&a, &b]) {
        assert_eq!(opened.address(), block.address() + ELSEWHERE);
        assert_eq!(opened.size_bytes(), block.size_bytes());
    }
    drop(opened);
    assert_eq!(driver.opened.lock().len(), 0);
}

#[test]
fn what_cannot_be_closed_is_closed_later() {
    let driver = shares();
    let engine = engine(driver.clone(), "");
    let block = allocate(&engine, 3 * MIB);
    let handle = from_elsewhere(&engine.share(&block).unwrap());
    let opened = engine.open(&handle).unwrap();
    *driver.refuses.lock() = true;
    drop(opened);
    assert_eq!(driver.opened.lock().len(), 1);
    engine.empty_cache().unwrap_err();
    *driver.refuses.lock() = false;
    engine.empty_cache().unwrap();
    assert_eq!(driver.opened.lock().len(), 0);
}

#[test]
fn ones_own_handle_and_devices_that_cannot_are_refused() {
    let able = engine(shares(), "");
    let block = allocate(&able, 3 * MIB);
    let handle = able.share(&block).unwrap();
    assert_eq!(able.open(&handle).unwrap_err(), SharingError::OwnProcess);
    let unable = engine(sim(), "");
    let other = allocate(&unable, MIB);
    assert!(matches!(unable.share(&other), Err(SharingError::NotSupported { .. })));
    let error = unable.open(&from_elsewhere(&handle)).unwrap_err();
    assert!(matches!(error, SharingError::NotSupported { .. }), "{error}");
}

#[test]
fn sizes_that_do_not_fit_the_segment_are_refused() {
    let engine = engine(shares(), "");
    let block = allocate(&engine, 3 * MIB);
    let handle = engine.share(&block).unwrap();
    for (at, value) in [(24, 18 * MIB), (24, u64::MAX), (32, 21 * MIB), (32, 0), (40, MIB)] {
        let bytes = forged(handle.as_bytes(), at, &value.to_le_bytes());
        let error = SharedHandle::from_bytes(&bytes).unwrap_err();
        assert!(matches!(error, FormatError::Extent { .. }), "{at} {value}: {error}");
    }
}
