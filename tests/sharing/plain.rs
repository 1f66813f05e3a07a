//! Sharing blocks of fixed segments: by the driver's handle of the segment and the block's offset.

use stratalloc::driver::{Ipc, Parts};

use super::tools::{allocate, engine, forged, shared, sim};
use crate::common::prelude::*;

/// An IPC driver that returns addresses without memory.
#[derive(Debug, Default)]
struct Shares {
    opened: Mutex<Vec<u64>>,
    refuses: Mutex<bool>,
}

const ELSEWHERE: u64 = 0x5_0000_0000;

impl Interceptor for Shares {
    fn parts<'a>(&'a self, parts: Parts<'a>) -> Parts<'a> {
        Parts { ipc: Some(self), ..parts }
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

fn shares() -> Arc<Intercepted<Arc<Sim>, Shares>> {
    Arc::new(Intercepted::with(sim(), Shares::default()))
}

/// Returns the handle with another process id, as if another process had made it.
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
    assert_eq!(driver.interceptor().opened.lock().len(), 1);
    for (opened, block) in opened.iter().zip([&a, &b]) {
        assert_eq!(opened.address(), block.address() + ELSEWHERE);
        assert_eq!(opened.size_bytes(), block.size_bytes());
    }
    drop(opened);
    assert_eq!(driver.interceptor().opened.lock().len(), 0);
}

#[test]
fn what_cannot_be_closed_is_closed_later() {
    let driver = shares();
    let engine = engine(driver.clone(), "");
    let block = allocate(&engine, 3 * MIB);
    let handle = from_elsewhere(&engine.share(&block).unwrap());
    let opened = engine.open(&handle).unwrap();
    *driver.interceptor().refuses.lock() = true;
    drop(opened);
    assert_eq!(driver.interceptor().opened.lock().len(), 1);
    engine.empty_cache().unwrap_err();
    *driver.interceptor().refuses.lock() = false;
    engine.empty_cache().unwrap();
    assert_eq!(driver.interceptor().opened.lock().len(), 0);
}

#[test]
fn ones_own_handle_and_devices_that_cannot_are_refused() {
    let able = engine(shares(), "");
    let (_block, handle) = shared(&able, 3 * MIB);
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
    let (_block, handle) = shared(&engine, 3 * MIB);
    for (at, value) in [(24, 18 * MIB), (24, u64::MAX), (32, 21 * MIB), (32, 0), (40, MIB)] {
        let bytes = forged(handle.as_bytes(), at, &value.to_le_bytes());
        let error = SharedHandle::from_bytes(&bytes).unwrap_err();
        assert!(matches!(error, FormatError::Extent { .. }), "{at} {value}: {error}");
    }
}
