//! `replay --verify` on recordings of programs that were short of memory.

use super::made::{MIB, Made};
use super::*;

const BASE: u64 = 0x7f00_0000_0000;

fn verified(file: &str, set: &[&str]) -> Value {
    run(&[&["replay", "--verify", "--json", file], set].concat()).json()
}

/// Checks that no decision differs. Also checks how often a retry and how often a call of `empty_cache`
/// emptied the cache.
#[track_caller]
fn is_exact(row: &Value, retries: u64, calls: u64) {
    assert_eq!(row["first_mismatch"], Value::Null, "{row}");
    let found = (&row["retries"], &row["empty_caches_inferred"]);
    assert_eq!(found, (&retries.into(), &calls.into()), "{row}");
}

/// The limit is 1,000 MiB. Garbage collection starts at 500 MiB.
#[test]
fn an_empty_cache_differs_from_a_collection_in_what_it_releases() {
    let folder = Folder::new("collected");
    let conf = "garbage_collection_threshold:0.5";
    let set = ["--total-memory", "2000MiB", "--memory-fraction", "0.5"];
    // Garbage collection releases only the old segment. An explicit call of `empty_cache` releases both.
    for (name, young_goes, calls) in [("own.json", false, 0), ("call.json", true, 1)] {
        let mut made = Made::with_conf(conf);
        let (old, young) = (BASE, BASE + 512 * MIB);
        for (address, mib) in [(old, 100), (young, 120), (BASE + 1024 * MIB, 360)] {
            made.segment(address, mib * MIB);
            made.alloc(address, mib * MIB);
        }
        made.free(old, 100 * MIB);
        made.free(young, 120 * MIB);
        // Makes the free segments older: each request that does not use a free block increases its age.
        for _ in 0..8 {
            made.alloc(young, 110 * MIB);
            made.free(young, 110 * MIB);
        }
        made.release(old);
        if young_goes {
            made.release(young);
        }
        made.segment(BASE + 2048 * MIB, 130 * MIB);
        made.alloc(BASE + 2048 * MIB, 130 * MIB);
        let row = verified(&folder.file(name, &made.json()), &set);
        let found = (&row["address_mismatches"], &row["segment_mismatches"]);
        assert_eq!(found, (&0.into(), &0.into()), "{name}: {row}");
        assert_eq!((&row["empty_caches_inferred"], &row["retries"]), (&calls.into(), &0.into()));
    }
}

#[test]
fn a_retry_on_a_full_device_is_no_empty_cache() {
    let mut made = Made::default();
    made.segment(BASE, 600 * MIB);
    made.alloc(BASE, 600 * MIB);
    made.segment(BASE + 1024 * MIB, 300 * MIB);
    made.alloc(BASE + 1024 * MIB, 300 * MIB);
    made.free(BASE, 600 * MIB);
    // 100 MiB are free under the limit. The new segment gets the address of the old one.
    made.release(BASE);
    made.segment(BASE, 650 * MIB);
    made.alloc(BASE, 650 * MIB);
    let folder = Folder::new("retried");
    let file = folder.file("retried.json", &made.json());
    let row = verified(&file, &["--total-memory", "1000MiB"]);
    is_exact(&row, 1, 0);
    // With more memory no request needs the release, so `empty_cache` must have caused it.
    let row = verified(&file, &["--total-memory", "2000MiB"]);
    is_exact(&row, 0, 1);
}

/// A block that another stream uses becomes free only while the request waits for it. It would then fit.
#[test]
fn a_request_that_waits_for_events_does_not_search_again() {
    let mut made = Made::default();
    let (used, cached, new) = (BASE, BASE + 1024 * MIB, BASE + 2048 * MIB);
    for (address, mib) in [(used, 300), (cached, 300)] {
        made.segment(address, mib * MIB);
        made.alloc(address, mib * MIB);
    }
    made.free(cached, 300 * MIB);
    made.wait_for_other_streams(used, 300 * MIB);
    made.alloc(cached, 300 * MIB);
    made.complete(used, 300 * MIB);
    made.release(used);
    made.segment(new, 260 * MIB);
    made.alloc(new, 260 * MIB);
    let folder = Folder::new("waited");
    let file = folder.file("waited.json", &made.json());
    let row = verified(&file, &["--total-memory", "700MiB"]);
    is_exact(&row, 1, 0);
}

/// The recording does not show in which order an allocator that waits for all events visits the streams.
#[test]
fn events_that_are_waited_for_complete_in_any_order() {
    for flipped in [false, true] {
        let mut made = Made::default();
        let blocks = [BASE, BASE + 1024 * MIB];
        for address in blocks {
            made.segment(address, 300 * MIB);
            made.alloc(address, 300 * MIB);
            made.wait_for_other_streams(address, 300 * MIB);
        }
        for at in if flipped { [1, 0] } else { [0, 1] } {
            made.complete(blocks[at], 300 * MIB);
        }
        blocks.into_iter().for_each(|address| made.release(address));
        made.segment(BASE + 2048 * MIB, 500 * MIB);
        made.alloc(BASE + 2048 * MIB, 500 * MIB);
        let folder = Folder::new("any_order");
        let file = folder.file("any_order.json", &made.json());
        let row = verified(&file, &["--total-memory", "700MiB"]);
        assert_eq!(row["first_mismatch"], Value::Null, "{row}");
    }
}

#[test]
fn a_replay_that_differs_names_what_the_recording_probably_lacks() {
    let folder = Folder::new("lacks");
    let mut made = Made::with_conf("garbage_collection_threshold:0.5");
    made.segment(BASE, 20 * MIB);
    made.alloc(BASE + 4 * MIB, 3 * MIB);
    let collects = folder.file("collects.json", &made.json());
    let mut made = Made::default();
    made.segment(BASE, 20 * MIB);
    made.alloc(BASE + 4 * MIB, 3 * MIB);
    let odd = folder.file("odd.json", &made.json());
    let frac = &trace("unet.frac045");
    let pools = &case("2.11.0.unrecorded_pool");
    let true_limit = &["--total-memory", "8192MiB", "--memory-fraction", "0.0244140625"];
    let wrong_limit = &["--memory-fraction", "0.05"];
    let mut made = Made::default();
    for segment in [BASE, BASE + 64 * MIB] {
        made.segment(segment, 20 * MIB);
        made.alloc(segment, 3 * MIB);
    }
    let grown = folder.file("grown.json", &made.json());
    let possible_limit = &["--total-memory", "80GiB"];
    for (file, set, lacks) in [
        // The true limit is 6,442 MiB.
        (frac, &wrong_limit[..], "its limit: the entries show one between 6,366 and 6,550 MiB"),
        (pools, &true_limit[..], "the pools of requests, which PyTorch records from 2.12 on"),
        (
            &collects,
            &[],
            "the limit near which garbage_collection_threshold acted: --memory-fraction",
        ),
        (&grown, possible_limit, "settings that changed while the program ran, or other rules"),
        (&odd, &[], "settings that changed while the program ran"),
    ] {
        let row = verified(file, set);
        let found = row["probably_lacks"].as_str().unwrap_or_default();
        assert!(found.starts_with(lacks), "{file}: {found}");
        let stdout = run(&[&["replay", "--verify", file], set].concat()).stdout;
        assert!(stdout.contains(&format!("  the recording probably lacks {lacks}")), "{stdout}");
    }
    let stdout = run(&["replay", &collects]).stderr;
    assert!(stdout.contains("garbage_collection_threshold acts near a limit"), "{stdout}");
    let exact = verified(&trace("serve.default"), &[]);
    assert_eq!(exact["probably_lacks"], Value::Null);
}
