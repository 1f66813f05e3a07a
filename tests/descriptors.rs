//! 64 GiB of mapped pages need few file descriptors, and all descriptors and mappings are released.
//!
//! The test counts the descriptors of the whole process, so it is the only test of its program. It never
//! touches the pages, so they use no physical memory.
#![cfg(target_os = "linux")]

use std::fs;
use std::sync::Arc;

use stratalloc::allocator::{Allocation, Caching, Counters, DeviceAllocator, Request};
use stratalloc::config::{Config, KeyTable};
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::{GIB, MIB};
use stratalloc_sim::{Host, HostOptions};

const DESCRIPTORS_MAX: usize = 256;

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").expect("this is Linux").count()
}

/// Returns the lines of `/proc/self/maps` that overlap one of the ranges or show a memory file of this
/// library.
fn mappings(ranges: &[(u64, u64)]) -> Vec<String> {
    let table = fs::read_to_string("/proc/self/maps").expect("this is Linux");
    let ours = |line: &&str| {
        let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
        let (from, to) = range.expect("each line begins with a range");
        let number = |text| u64::from_str_radix(text, 16).expect("ranges are hexadecimal");
        let (from, to) = (number(from), number(to));
        line.contains("memfd:stratalloc")
            || ranges.iter().any(|(at, size)| from < at + size && *at < to)
    };
    table.lines().filter(ours).map(str::to_owned).collect()
}

#[test]
fn sixty_four_gibibytes_of_pages_cost_few_descriptors_and_all_go_back() {
    let before = descriptors();
    let options = HostOptions { total_bytes: 66 * GIB, ..HostOptions::default() };
    let host = Arc::new(Host::new(options));
    let config = Config::parse("expandable_segments:True", &KeyTable::default());
    let config = config.expect("a legal string");
    let driver = Arc::clone(&host) as Arc<_>;
    let allocator = registry::build(&config, driver, BuildOptions::default());
    let allocator = allocator.expect("the host has virtual memory");
    let engine = allocator.engine().expect("built on the engine");

    // 2 GiB in pages of 2 MiB and 62 GiB in pages of 20 MiB, on two streams.
    let small = (0..2048_u64).map(|n| (MIB, n % 2));
    let large = (0..62_u64).map(|n| (GIB, n % 2));
    let take = |(bytes, stream)| {
        allocator.allocate(Request::new(bytes, StreamId(stream * 64))).expect("it fits")
    };
    let blocks: Vec<Allocation> = small.chain(large).map(take).collect();
    assert!(Counters::statistics(engine).memory_reserved() >= 64 << 30);
    let full = host.held();
    assert!(full.mapped.len() >= 1024 + 62 * 1024 / 20, "{} pages", full.mapped.len());
    assert_eq!(full.mapped.iter().map(|(_, bytes)| bytes).min(), Some(&(2 * MIB)));
    assert_eq!(full.mapped.iter().map(|(_, bytes)| bytes).max(), Some(&(20 * MIB)));
    assert_eq!(full.reservations.len(), 4, "two kinds on two streams");
    assert!(descriptors() <= DESCRIPTORS_MAX, "{} descriptors", descriptors());
    assert!(descriptors() <= before + 1, "pages share one file");
    assert!(!mappings(&full.reservations).is_empty());

    // Frees every other block of each stream first, so that pages that are not adjacent are unmapped.
    let (even, odd): (Vec<_>, Vec<_>) =
        blocks.into_iter().enumerate().partition(|(n, _)| n % 4 < 2);
    for part in [even, odd] {
        for (_, block) in part {
            allocator.free(block).expect("it is live");
        }
        engine.empty_cache().expect("the system works");
        assert!(descriptors() <= before + 1, "pages share one file");
    }
    assert!(host.held().is_nothing(), "{:?}", host.held());
    assert_eq!(mappings(&full.reservations), [""; 0]);
    assert_eq!(Counters::statistics(engine).memory_reserved(), 0);
    let again = take((GIB, 0));
    assert!(descriptors() <= before + 1, "the file is used again");
    allocator.free(again).expect("it is live");

    drop(allocator);
    assert!(host.held().is_nothing(), "{:?}", host.held());
    drop(host);
    assert_eq!(mappings(&full.reservations), [""; 0]);
    assert_eq!(descriptors(), before);
}
