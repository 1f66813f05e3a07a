//! `backend:pinned`: sizes, reuse after streams, the release of memory, and where memory comes from.

mod histories;
mod memory;
mod reuse;

use stratalloc::driver::HostMemory;
use stratalloc::strategies::PinnedAllocator;

use crate::common::prelude::*;

/// Returns an allocator over `driver` with further keys.
pub(crate) fn pinned_over(driver: Arc<dyn Driver>, keys: &str) -> PinnedAllocator {
    let config = config(&format!("backend:pinned,{keys}"));
    PinnedAllocator::new(driver, config.settings()).expect("the device has host memory")
}

/// Returns a simulated device whose events finish when the test finishes them.
fn device(host_bytes: u64) -> Arc<Sim> {
    let (event_mode, host_bytes) = (EventMode::Manual, Some(host_bytes));
    Arc::new(Sim::new(SimOptions { event_mode, host_bytes, ..SimOptions::default() }))
}

/// Returns an allocator with further keys, and its device, whose host memory has no limit that matters.
fn pinned(keys: &str) -> (Arc<Sim>, PinnedAllocator) {
    let sim = device(1 << 40);
    (Arc::clone(&sim), pinned_over(sim, keys))
}

/// Returns the system's line about the mapping that contains an address, with its policy and the pages on
/// each node. `None` if the system has no such lines.
#[cfg(target_os = "linux")]
pub(crate) fn pages_at(address: u64) -> Option<String> {
    let text = fs::read_to_string("/proc/self/numa_maps").ok()?;
    let start = |line: &str| u64::from_str_radix(line.split(' ').next().unwrap_or(""), 16).ok();
    let mut below = text.lines().filter(|line| start(line).is_some_and(|start| start <= address));
    below.next_back().map(str::to_owned)
}

fn reserved(own: &PinnedAllocator) -> u64 {
    own.stats().reserved_bytes.all.current.unsigned_abs()
}

#[test]
fn buffers_of_307_mib_are_not_rounded_to_powers_of_two() {
    const LIMIT_BYTES: u64 = 20 * GIB + GIB / 2;
    for (keys, holds_bytes) in [("", 68 * 307 * MIB), ("pinned_rounding:power_of_two", 34 * GIB)] {
        let (_, own) = pinned(keys);
        // The buffers are also freed and allocated again, as a loader does in each epoch.
        for _ in 0..3 {
            let buffers: Vec<_> = (0..68).map(|_| own.take(307 * MIB)).collect();
            buffers.into_iter().for_each(|buffer| own.give(buffer));
        }
        assert_eq!((reserved(&own), own.stats().num_device_alloc), (holds_bytes, 68), "{keys}");
        assert_eq!(holds_bytes <= LIMIT_BYTES, keys.is_empty());
    }
}

#[test]
fn sizes_are_rounded_as_configured() {
    for (keys, sizes) in [
        ("", [(1, 512), (513, 1024), (MIB - 1, MIB), (MIB + 1, MIB + 4096)]),
        ("pinned_rounding:power_of_two", [(1, 512), (513, 1024), (3 * MIB, 4 * MIB), (5, 512)]),
        (
            "pinned_rounding:power_of_two,pinned_max_round_threshold_mb:2",
            [(513, 1024), (MIB + 1, 2 * MIB), (2 * MIB, 2 * MIB), (5 * MIB, 5 * MIB)],
        ),
        (
            "pinned_rounding:power_of_two,pinned_max_cached_size_mb:2",
            [(513, 1024), (MIB + 1, 2 * MIB), (2 * MIB, 2 * MIB), (5 * MIB, 5 * MIB)],
        ),
        (
            "pinned_use_cuda_host_register:True",
            [(1, 4096), (4097, 8192), (MIB - 1, MIB), (MIB + 1, MIB + 4096)],
        ),
    ] {
        for (requested, rounded) in sizes {
            let (_, own) = pinned(keys);
            let block = own.take(requested);
            assert_eq!((block.size_bytes(), reserved(&own)), (requested, rounded), "{keys}");
            let base = own.caching().base_allocation(&block).unwrap();
            assert_eq!((base.address, base.size_bytes), (block.address(), rounded));
            own.give(block);
        }
    }
}

#[test]
fn a_switch_leaves_live_blocks_valid() {
    let sim = device(GIB);
    let native = config("backend:native");
    let own = Switchable::build(&native, Arc::clone(&sim) as _, BuildOptions::default()).unwrap();
    let on_device = own.take(MIB);
    own.switch("backend:pinned").unwrap();
    let on_host = own.take(MIB);
    assert_eq!(sim.held().pinned_bytes, MIB);
    own.update("pinned_rounding:power_of_two").unwrap();
    assert_eq!(own.take(3 * MIB).size_bytes(), 3 * MIB);
    assert_eq!(sim.held().pinned_bytes, 5 * MIB, "the same allocator, with the new rounding");
    // A fixed key needs another allocator, which takes the place of this one.
    own.update("pinned_use_cuda_host_register:True").unwrap();
    own.give(own.take(MIB));
    assert_eq!((sim.calls("allocate_host"), sim.calls("register_host")), (2, 1));
    own.give(on_host);
    own.give(on_device);
    own.switch("backend:native").unwrap();
    own.give(own.take(MIB));
    drop(own);
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn counters_and_layout_agree_with_the_device() {
    let (sim, own) = pinned("");
    let blocks = [MIB, 3 * MIB, 5 * MIB].map(|bytes| own.take(bytes));
    let [first, second, third] = blocks;
    own.record_stream_raw(second.address(), SIDE).unwrap();
    own.give(second);
    own.give(third);
    let s = own.stats();
    assert_eq!((s.allocation.all.current, s.active.all.current), (1, 2));
    assert_eq!(s.allocated_bytes.all.current.unsigned_abs(), MIB);
    assert_eq!(s.active_bytes.all.current.unsigned_abs(), 4 * MIB);
    assert_eq!((s.segment.all.current, s.free_blocks), (3, 1));
    assert_eq!(reserved(&own), sim.held().pinned_bytes);
    let layout = own.caching().layout();
    let states: Vec<_> = layout.iter().map(|s| (s.size_bytes, s.blocks[0].state)).collect();
    let expected = [
        (MIB, BlockStateName::ActiveAllocated),
        (3 * MIB, BlockStateName::ActivePendingFree),
        (5 * MIB, BlockStateName::Inactive),
    ];
    assert_eq!(states, expected);
    let info = own.caching().cache_info().unwrap();
    assert_eq!((info.free_blocks, info.largest_cached_bytes), (1, 5 * MIB));
    own.give(first);
    own.counters().reset_peaks();
    own.counters().reset_accumulated();
    let s = own.stats();
    assert_eq!((s.allocation.all.peak, s.allocation.all.allocated), (0, 0));
    let calls = s.own.iter().find(|own| own.name == "pinned.allocate_us.count");
    assert_eq!(calls.map(|own| own.count), Some(0));
}

#[test]
fn the_history_has_blocks_and_segments_in_order() {
    let (sim, own) = pinned("");
    own.recording().history().start(&RecordOptions::default());
    let block = own.take(MIB - 100);
    own.record_stream_raw(block.address(), SIDE).unwrap();
    own.give(block);
    sim.complete_stream(SIDE);
    own.cross_stream().process_events().unwrap();
    own.caching().empty_cache().unwrap();
    let entries = own.recording().history().entries();
    let actions: Vec<_> = entries.iter().map(|entry| entry.event.action).collect();
    let expected = [
        Action::SegmentAlloc,
        Action::Alloc,
        Action::FreeRequested,
        Action::FreeCompleted,
        Action::SegmentFree,
    ];
    assert_eq!(actions, expected);
    let sizes: Vec<_> = entries.iter().map(|entry| entry.event.size_bytes).collect();
    assert_eq!(sizes, [MIB, MIB - 100, MIB - 100, MIB - 100, MIB], "segments are whole");
}
