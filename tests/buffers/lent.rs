//! Buffers lent to other streams: which stream waits for which, and in which order memory and streams
//! are freed.

use stratalloc::handle::{BufferError, DeviceVec};
use stratalloc_sim::FaultControl;

use crate::common::prelude::*;

type Device = Arc<Faulty<Arc<Sim>>>;

const CONFS: [&str; 2] = ["backend:native", "backend:cudaMallocAsync"];

/// A device whose work finishes only when the test completes it or a call waits for it. Calls can be made to
/// fail.
fn device() -> Device {
    let options = SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() };
    Arc::new(Faulty::new(Arc::new(Sim::new(options))))
}

fn handle(device: &Device, conf: &str) -> Handle {
    Handle::build(&config(conf), Arc::<Faulty<Arc<Sim>>>::clone(device) as _)
        .expect("the device can")
}

fn live_blocks(handle: &Handle) -> i64 {
    handle.stats().allocation.all.current
}

/// Records an event after all work that a stream has so far.
fn mark(device: &Device, stream: StreamId) -> EventId {
    let event = device.create_event().expect("the device can");
    device.record_event(event, stream).expect("the device can");
    event
}

/// A value that, when it is dropped, records how many blocks are still live.
struct Witness {
    name: &'static str,
    handle: Handle,
    seen: Arc<Mutex<Vec<(&'static str, i64)>>>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.seen.lock().push((self.name, live_blocks(&self.handle)));
    }
}

#[test]
fn a_stream_lives_until_the_block_that_was_lent_to_it_is_freed() {
    for conf in CONFS {
        let device = device();
        let (handle, seen) = (handle(&device, conf), Arc::default());
        let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
        let mut vec = handle.zeroed::<u8>(100, own).unwrap();
        let (name, kept) = ("stream", Arc::clone(&seen));
        let alive = Arc::new(Witness { name, handle: handle.clone(), seen: kept });
        vec.lend(side, Arc::<Witness>::clone(&alive) as _).unwrap();
        vec.lend(side, alive).unwrap();
        assert_eq!(*seen.lock(), [], "the buffer holds it");
        assert_eq!(live_blocks(&handle), 1);
        drop(vec);
        assert_eq!(*seen.lock(), [("stream", 0)], "{conf}");
    }
}

#[test]
fn the_stream_that_a_buffer_is_lent_to_comes_behind_its_own() {
    let device = device();
    let handle = handle(&device, CONFS[0]);
    let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let mut vec = handle.zeroed::<u8>(100, own).unwrap();
    let zeroed = mark(&device, own);
    vec.lend(side, Arc::new(())).unwrap();
    device.inner().complete_stream(side);
    assert_eq!(device.query_event(zeroed), Ok(true));
}

#[test]
fn foreign_memory_goes_behind_the_streams_that_it_was_lent_to() {
    for broken in [false, true] {
        let device = device();
        let handle = handle(&device, CONFS[0]);
        let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
        let seen = Arc::default();
        let keeps = |name| Witness { name, handle: handle.clone(), seen: Arc::clone(&seen) };
        let memory = Box::new(keeps("memory"));
        let mut vec = DeviceVec::<u8>::adopt(&handle, MIB, 100, own, memory).unwrap();
        vec.lend(side, Arc::new(keeps("stream"))).unwrap();
        let used = mark(&device, side);
        if broken {
            let (kind, only) = (DriverErrorKind::Other, Some("create_event"));
            device.arm(FaultPlan { at: 0, kind, repeat: true, only });
        }
        drop(vec);
        if broken {
            assert_eq!(device.inner().calls("synchronize_stream"), 1, "waited for instead");
        } else {
            device.inner().complete_stream(own);
        }
        assert_eq!(device.query_event(used), Ok(true), "broken: {broken}");
        assert_eq!(*seen.lock(), [("memory", 0), ("stream", 0)]);
    }
}

#[test]
fn released_foreign_memory_is_behind_the_streams_that_it_was_lent_to() {
    let device = device();
    let handle = handle(&device, CONFS[0]);
    let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
    let mut vec = DeviceVec::<u8>::adopt(&handle, MIB, 100, own, Box::new(())).unwrap();
    vec.lend(side, Arc::new(())).unwrap();
    let used = mark(&device, side);
    drop(vec.release());
    device.inner().complete_stream(own);
    assert_eq!(device.query_event(used), Ok(true));
}

#[test]
fn a_buffer_that_cannot_be_lent_fails_with_the_reason_and_frees_its_block() {
    for only in ["create_event", "record_event", "wait_event"] {
        let device = device();
        let handle = handle(&device, CONFS[0]);
        let [own, side] = [(); 2].map(|()| device.create_stream().unwrap());
        let mut vec = handle.zeroed::<u8>(100, own).unwrap();
        let kind = DriverErrorKind::Other;
        device.arm(FaultPlan { at: 0, kind, repeat: false, only: Some(only) });
        let refused = vec.lend(side, Arc::new(()));
        assert!(matches!(refused, Err(BufferError::Driver(_))), "{refused:?}");
        drop(vec);
        assert_eq!((live_blocks(&handle), handle.lost_blocks()), (0, 0), "{only}");
    }
}
