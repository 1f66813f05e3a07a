//! The host device catches a block that is reused too early: its bytes are wrong, visibly.
//!
//! The same program runs twice, on the device itself and on a double that lies about events. Only
//! with the lie does the allocator hand the block out while another stream still writes to it.
use std::sync::Arc;

use stratalloc::allocator::{CrossStream, DeviceAllocator, Request};
use stratalloc::config::{Config, KeyTable};
use stratalloc::driver::host::{Host, HostOptions};
use stratalloc::driver::{
    Brake, CaptureStatus, DeviceInfo, Driver, DriverResult, Gated, MemoryInfo,
};
use stratalloc::ids::{EventId, StreamId};
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::MIB;

const OWNER: StreamId = StreamId(64);
const OTHER: StreamId = StreamId(128);
const BYTES: u64 = 64 * 1024;

/// Says that every event has passed.
#[derive(Debug)]
struct BrokenEventWait(Arc<Host>);

impl Driver for BrokenEventWait {
    fn query_event(&self, _: EventId) -> DriverResult<bool> {
        Ok(true)
    }
    fn synchronize_event(&self, _: EventId) -> DriverResult<()> {
        Ok(())
    }

    fn info(&self) -> DeviceInfo {
        self.0.info()
    }
    fn memory_info(&self) -> DriverResult<MemoryInfo> {
        self.0.memory_info()
    }
    fn allocate(&self, size_bytes: u64) -> DriverResult<u64> {
        self.0.allocate(size_bytes)
    }
    fn free(&self, address: u64, size_bytes: u64) -> DriverResult<()> {
        self.0.free(address, size_bytes)
    }
    fn create_stream(&self) -> DriverResult<StreamId> {
        self.0.create_stream()
    }
    fn destroy_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.0.destroy_stream(stream)
    }
    fn synchronize_stream(&self, stream: StreamId) -> DriverResult<()> {
        self.0.synchronize_stream(stream)
    }
    fn synchronize_device(&self) -> DriverResult<()> {
        self.0.synchronize_device()
    }
    fn create_event(&self) -> DriverResult<EventId> {
        self.0.create_event()
    }
    fn record_event(&self, event: EventId, stream: StreamId) -> DriverResult<()> {
        self.0.record_event(event, stream)
    }
    fn wait_event(&self, stream: StreamId, event: EventId) -> DriverResult<()> {
        self.0.wait_event(stream, event)
    }
    fn destroy_event(&self, event: EventId) -> DriverResult<()> {
        self.0.destroy_event(event)
    }
    fn copy(&self, to: u64, from: u64, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.0.copy(to, from, size_bytes, stream)
    }
    fn copy_from_host(&self, to: u64, from: &[u8], stream: StreamId) -> DriverResult<()> {
        self.0.copy_from_host(to, from, stream)
    }
    fn copy_to_host(&self, to: &mut [u8], from: u64, stream: StreamId) -> DriverResult<()> {
        self.0.copy_to_host(to, from, stream)
    }
    fn fill(&self, to: u64, byte: u8, size_bytes: u64, stream: StreamId) -> DriverResult<()> {
        self.0.fill(to, byte, size_bytes, stream)
    }
    fn capture_status(&self, stream: StreamId) -> DriverResult<CaptureStatus> {
        self.0.capture_status(stream)
    }
}

fn host() -> Arc<Host> {
    Arc::new(Host::new(HostOptions { total_bytes: 256 * MIB, ..HostOptions::default() }))
}

/// Frees a block that a held stream is about to write to, takes a block of the same size and writes
/// to it. True when those bytes survive the held write.
fn bytes_survive(host: &Arc<Host>, driver: Arc<dyn Driver>) -> bool {
    let allocator =
        registry::build(&Config::default(), driver, BuildOptions::default()).expect("it is built");
    let cross: &dyn CrossStream = allocator.cross_stream().expect("native knows streams");
    let first = allocator.allocate(Request::new(BYTES, OWNER)).expect("it fits");
    let first_address = first.address();
    let gate = host.hold(OTHER);
    host.fill(first_address, 0xEE, BYTES, OTHER).expect("the block is live");
    cross.record_stream(&first, OTHER).expect("the block is live");
    allocator.free(first).expect("the block is live");

    let second = allocator.allocate(Request::new(BYTES, OWNER)).expect("it fits");
    host.fill(second.address(), 0x11, BYTES, OWNER).expect("the block is live");
    host.synchronize_stream(OWNER).expect("the stream lives");
    gate.open();
    host.synchronize_stream(OTHER).expect("the stream lives");
    let mut bytes = vec![0; usize::try_from(BYTES).expect("it is small")];
    host.copy_to_host(&mut bytes, second.address(), OWNER).expect("the block is live");
    let survived = bytes.iter().all(|byte| *byte == 0x11);
    assert_eq!(survived, second.address() != first_address);
    allocator.free(second).expect("the block is live");
    survived
}

#[test]
fn a_block_is_not_reused_while_another_stream_writes_to_it() {
    let host = host();
    assert!(bytes_survive(&host, Arc::clone(&host) as Arc<dyn Driver>));
}

#[test]
fn a_broken_event_wait_shows_as_wrong_bytes() {
    let host = host();
    let broken = Arc::new(BrokenEventWait(Arc::clone(&host)));
    assert!(!bytes_survive(&host, broken));
}

#[test]
fn a_block_recorded_on_a_stream_that_is_gone_can_be_freed() {
    let host = host();
    let driver = Arc::clone(&host) as Arc<dyn Driver>;
    let allocator = registry::build(&Config::default(), driver, BuildOptions::default()).unwrap();
    let stream = host.create_stream().unwrap();
    let block = allocator.allocate(Request::new(BYTES, OWNER)).unwrap();
    allocator.cross_stream().unwrap().record_stream(&block, stream).unwrap();
    host.destroy_stream(stream).unwrap();
    allocator.free(block).unwrap();
    let statistics = allocator.counters().unwrap().statistics();
    assert_eq!(statistics.active.all.current, 0);
}

/// A shipped recording's requests, on real memory whose work finishes when the recording says so, or
/// at once.
fn replayed(name: &str, held_back: bool) -> stratalloc::replay::Run {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("tests/traces/{name}.pickle.xz"));
    let trace = stratalloc::replay::reader::read(&path, &Default::default()).expect("it ships");
    let workload = stratalloc::replay::Workload::of(&trace, 150_109_880_320);
    let conf = Config::parse(&trace.conf, &KeyTable::default()).expect("it was used");
    let host = Host::new(HostOptions { total_bytes: 4096 * MIB, ..HostOptions::default() });
    let gated = Arc::new(Gated::new(host));
    let brake = held_back.then(|| Arc::clone(&gated) as Arc<dyn Brake>);
    let allocator = registry::build(&conf, gated, BuildOptions::default()).expect("it can");
    let run = stratalloc::replay::run(&workload, &allocator, brake, 2, &|_| {});
    run.expect("nothing fails")
}

#[test]
fn a_recording_replays_in_real_memory() {
    let run = replayed("multistream.default", false);
    assert_eq!((run.allocations, run.ooms), (3230, 0));
}

/// A recording of several streams reserves what it reserved, because blocks that other streams used
/// stay away as long as they did there.
#[test]
fn held_back_work_keeps_blocks_away_as_long_as_the_recording_says() {
    for (name, reserved) in
        [("multistream.default", 2_187_329_536), ("multistream.expandable", 1_558_183_936)]
    {
        let held = replayed(name, true).statistics.reserved_bytes.all;
        assert_eq!((held.current, held.peak), (reserved, reserved), "{name}");
        let free_running = replayed(name, false).statistics.reserved_bytes.all;
        assert!(free_running.peak < reserved, "{name}: {}", free_running.peak);
    }
}
