//! The host device detects a block that is reused too early, because its bytes are then wrong.
//!
//! The same program runs twice: on the device itself, and on a wrapper that records events on the wrong
//! stream. Only with the wrapper does the allocator reuse the block while another stream still writes to it.
//! Other tests replay recordings in real memory.

use stratalloc_sim::{Gates, WorkGate};

use crate::common::prelude::*;

const OWNER: StreamId = StreamId(64);
const OTHER: StreamId = StreamId(128);
const BYTES: u64 = 64 * 1024;

/// Replaces the stream of each call, such as `record_event`, by one on which no work runs.
#[derive(Debug)]
struct WrongStream;

impl Interceptor for WrongStream {
    fn stream(&self, _: StreamId) -> DriverResult<StreamId> {
        Ok(StreamId(192))
    }
}

fn host() -> Arc<Host> {
    Arc::new(Host::with_bytes(256 * MIB))
}

/// Frees a block that a delayed stream will write to, allocates a block of the same size and writes to
/// it. Returns true if these bytes survive the delayed write.
fn bytes_survive(host: &Arc<Host>, driver: Arc<dyn Driver>) -> bool {
    let allocator =
        registry::build(&Config::default(), driver, BuildOptions::default()).expect("it is built");
    let cross: &dyn CrossStream = allocator.cross_stream();
    let first = allocator.take_on(BYTES, OWNER);
    let first_address = first.address();
    let gate = host.hold(OTHER);
    host.fill(first_address, 0xEE, BYTES, OTHER).expect("the block is live");
    cross.record_stream(&first, OTHER).expect("the block is live");
    allocator.give(first);

    let second = allocator.take_on(BYTES, OWNER);
    host.fill(second.address(), 0x11, BYTES, OWNER).expect("the block is live");
    host.synchronize_stream(OWNER).expect("the stream lives");
    gate.open();
    host.synchronize_stream(OTHER).expect("the stream lives");
    let mut bytes = vec![0; usize::try_from(BYTES).expect("it is small")];
    host.copy_to_host(&mut bytes, second.address(), OWNER).expect("the block is live");
    let survived = bytes.iter().all(|byte| *byte == 0x11);
    assert_eq!(survived, second.address() != first_address);
    allocator.give(second);
    survived
}

#[test]
fn a_block_is_not_reused_while_another_stream_writes_to_it() {
    let host = host();
    assert!(bytes_survive(&host, Arc::clone(&host) as Arc<dyn Driver>));
}

#[test]
fn events_on_the_wrong_stream_show_as_wrong_bytes() {
    let host = host();
    let broken = Arc::new(Intercepted::with(Arc::clone(&host), WrongStream));
    assert!(!bytes_survive(&host, broken));
}

#[test]
fn a_block_recorded_on_a_stream_that_is_gone_can_be_freed() {
    let host = host();
    let allocator =
        registry::build(&Config::default(), host.clone(), BuildOptions::default()).unwrap();
    let stream = host.create_stream().unwrap();
    let block = allocator.take_on(BYTES, OWNER);
    allocator.record(&block, stream);
    host.destroy_stream(stream).unwrap();
    allocator.give(block);
    let statistics = allocator.stats();
    assert_eq!(statistics.active.all.current, 0);
}

/// Replays a shipped recording in real memory. Work finishes when the recording completes it, or at once
/// if `held_back` is false.
fn replayed(name: &str, held_back: bool) -> stratalloc_recording::Run {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("traces/{name}.pickle.xz"));
    let trace = stratalloc_recording::reader::read(&path, &Default::default()).expect("it ships");
    let workload = stratalloc_recording::Workload::of(&trace, 150_109_880_320);
    let conf = config(&trace.conf);
    let host = Host::with_bytes(4096 * MIB);
    let gated = Arc::new(Gates::before(host));
    let work_gate = held_back.then(|| Arc::clone(&gated) as Arc<dyn WorkGate>);
    let allocator = registry::build(&conf, gated, BuildOptions::default()).expect("it can");
    let run = stratalloc_recording::run(
        &workload,
        &allocator,
        work_gate,
        2,
        &stratalloc_recording::Silent,
    );
    run.expect("nothing fails")
}

#[test]
fn a_recording_replays_in_real_memory() {
    let run = replayed("multistream.default", false);
    assert_eq!((run.allocations, run.ooms), (3230, 0));
}

/// A recording of several streams must reserve the recorded bytes. It does so only if blocks used by
/// other streams stay unavailable as long as in the recording.
#[test]
fn held_back_work_keeps_blocks_unavailable_until_the_recorded_completion() {
    for (name, reserved) in
        [("multistream.default", 2_187_329_536), ("multistream.expandable", 1_558_183_936)]
    {
        let held = replayed(name, true).statistics.reserved_bytes.all;
        assert_eq!((held.current, held.peak), (reserved, reserved), "{name}");
        let free_running = replayed(name, false).statistics.reserved_bytes.all;
        assert!(free_running.peak < reserved, "{name}: {}", free_running.peak);
    }
}
