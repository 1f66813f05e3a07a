//! Two devices: streams of one device that use blocks of the other.

use parking_lot::MutexGuard;

use stratalloc::driver::HoldsWork;

use super::*;

/// Returns the first device and a device that can access it, or prints why there is none.
fn pair() -> Option<(MutexGuard<'static, ()>, Arc<Cuda>, Cuda)> {
    let ((alone, cuda), other) = (device()?, second()?);
    if !Peers::can_access(&*cuda, DeviceId(1)).expect("the driver answers") {
        skip("the second device cannot reach the first");
        return None;
    }
    Some((alone, cuda, other))
}

/// Pending work on a stream of another device must finish before a block is used again, as work on the
/// block's own device must.
#[test]
fn a_block_that_another_device_writes_is_not_reused_before() {
    let Some((_alone, cuda, other)) = pair() else { return };
    let pools = "backend:cudaMallocAsync,malloc_async_own_pool:True";
    for conf in ["", "expandable_segments:True", pools] {
        let strategy = strategy(&cuda, conf);
        strategy.peer_access().enable_peer_access(DeviceId(1)).unwrap();
        let (home, there) = (cuda.create_stream().unwrap(), other.create_stream().unwrap());
        let bytes = 4 * MIB;
        let block = strategy.take_on(bytes, home);
        let address = block.address();
        // The first fill on each device may make the driver load code and synchronize the device for that,
        // so it runs before work is delayed.
        cuda.fill(address, 1, bytes, home).unwrap();
        cuda.synchronize_stream(home).unwrap();
        other.fill(address, 3, bytes, there).unwrap();
        other.synchronize_stream(there).unwrap();
        let gate = other.hold_back(there).unwrap();
        other.fill(address, 4, bytes, there).unwrap();
        strategy.record(&block, there);
        strategy.give(block);
        // The driver's pool may return the same memory, because it orders the new use after the work of
        // `there`.
        let next = strategy.take_on(bytes, home);
        assert!(conf == pools || next.address() != address, "{conf}: the other device works");
        cuda.fill(next.address(), 2, bytes, home).unwrap();
        gate.open();
        other.synchronize_stream(there).unwrap();
        assert!(holds(&cuda, next.address(), bytes, 2, home), "{conf}");
        if conf != pools {
            strategy.cross_stream().process_events().unwrap();
            let again = strategy.take_on(bytes, home);
            assert_eq!(again.address(), address, "{conf}: free by now");
            strategy.give(again);
        }
        strategy.give(next);
        strategy.caching().empty_cache().unwrap();
        other.destroy_stream(there).unwrap();
    }
}

/// Observes the first `free` of a driver while a copy of another device is held back. Opens the gate before
/// the first call that waits.
#[derive(Debug)]
struct AtFree {
    other: Arc<Cuda>,
    /// The other device's stream with the copy, and an event after the copy.
    copy: Mutex<Option<(StreamId, EventId)>>,
    /// The gate before the copy.
    gate: Mutex<Option<<Cuda as HoldsWork>::Gate>>,
    /// Whether the copy had finished at the call of `free`.
    had_finished: Mutex<Option<bool>>,
}

impl Interceptor for AtFree {
    fn around<T>(
        &self,
        call: &'static str,
        act: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<T> {
        match call {
            "synchronize_stream" | "synchronize_device" => drop(self.gate.lock().take()),
            "free" => {
                if let Some((stream, event)) = self.copy.lock().take() {
                    *self.had_finished.lock() = Some(self.other.query_event(event)?);
                    // Otherwise the copy would write to memory that the driver no longer has.
                    drop(self.gate.lock().take());
                    self.other.synchronize_stream(stream)?;
                    self.other.destroy_event(event)?;
                }
            }
            _ => {}
        }
        act()
    }
}

/// The driver's `free` waits for the work of its own device. The copy is work of the other device, and the
/// block's stream waits for it, as in PyTorch's copies between devices.
#[test]
fn a_segment_that_another_device_writes_is_freed_after_the_copy() {
    let Some((_alone, cuda, other)) = pair() else { return };
    let other = Arc::new(other);
    let bytes = 30 * MIB;
    let source = other.allocate(bytes).unwrap();
    let (home, there) = (cuda.create_stream().unwrap(), other.create_stream().unwrap());
    for (conf, finished) in [("", true), ("compat:pytorch-2.15", false)] {
        let at_free = AtFree {
            other: Arc::clone(&other),
            copy: Mutex::default(),
            gate: Mutex::default(),
            had_finished: Mutex::default(),
        };
        let driver = Arc::new(Intercepted::with(Arc::clone(&cuda), at_free));
        let allocator =
            build(&config(conf), Arc::clone(&driver) as _, BuildOptions::default()).unwrap();
        allocator.peer_access().enable_peer_access(DeviceId(1)).unwrap();
        let block = allocator.take_on(bytes, home);
        let copy = || {
            let (to, from) = ((DeviceId(0), block.address()), (DeviceId(1), source));
            other.copy_peer(to, from, bytes, there).unwrap();
        };
        // The first copy may make the driver load code and synchronize the device for that, so it runs
        // before work is delayed.
        copy();
        other.synchronize_stream(there).unwrap();
        let gate = other.hold_back(there).unwrap();
        copy();
        let event = other.create_event().unwrap();
        other.record_event(event, there).unwrap();
        cuda.wait_event(home, event).unwrap();
        *driver.interceptor().copy.lock() = Some((there, event));
        *driver.interceptor().gate.lock() = Some(gate);
        allocator.give(block);
        allocator.caching().empty_cache().unwrap();
        assert_eq!(*driver.interceptor().had_finished.lock(), Some(finished), "{conf}");
        drop(allocator);
    }
    other.free(source, bytes).unwrap();
    other.destroy_stream(there).unwrap();
    cuda.destroy_stream(home).unwrap();
}

#[test]
fn bytes_go_from_device_to_device() {
    let Some((_alone, cuda, other)) = pair() else { return };
    let strategy = strategy(&cuda, "");
    let stream = cuda.create_stream().unwrap();
    let block = strategy.take_on(MIB, stream);
    let there = other.allocate(MIB).unwrap();
    cuda.fill(block.address(), 9, MIB, stream).unwrap();
    let (to, from) = ((DeviceId(1), there), (DeviceId(0), block.address()));
    cuda.copy_peer(to, from, MIB, stream).unwrap();
    cuda.synchronize_stream(stream).unwrap();
    assert!(holds(&other, there, MIB, 9, StreamId::DEFAULT));
    other.free(there, MIB).unwrap();
    strategy.give(block);
}
