//! Limits that are fractions: the bytes that a fraction allows, the fraction that is read back, and the
//! messages of requests that a limit refuses.

use stratalloc::size::human_bytes;
use stratalloc_sim::SimOptions;

use crate::common::fixture::Built as _;
use crate::common::prelude::*;
use crate::reference::H200_BYTES;

/// Every strategy that has a limit, some with layers around them.
const CONFS: [&str; 8] = [
    "backend:native",
    "backend:native,expandable_segments:True",
    "backend:cudaMallocAsync",
    "backend:cpu",
    "backend:pinned",
    "backend:native,layers:[front,statistics]",
    "backend:pinned,layers:[statistics]",
    "backend:cpu,layers:[track,limit:1GiB]",
];

fn device(total_bytes: u64) -> Arc<dyn Driver> {
    Arc::new(Sim::new(SimOptions { total_bytes, ..SimOptions::default() }))
}

fn allocator(conf: &str, total_bytes: u64) -> Switchable {
    Switchable::built(&config(conf), device(total_bytes))
}

#[expect(clippy::cast_precision_loss, reason = "the usual way to calculate a fraction")]
fn share(bytes: u64, total_bytes: u64) -> f64 {
    bytes as f64 / total_bytes as f64
}

#[test]
fn a_fraction_worth_some_bytes_allows_a_request_of_these_bytes() {
    for total_bytes in [H200_BYTES, 16_945_512_448] {
        for conf in &CONFS[..3] {
            let allocator = allocator(conf, total_bytes);
            for mib in (20..=1000).step_by(20) {
                let fraction = share(mib * MIB, total_bytes);
                allocator.caching().set_memory_fraction(fraction).unwrap();
                allocator.give(allocator.take(mib * MIB));
                allocator.caching().empty_cache().unwrap();
            }
            let built = Switchable::built(
                &config(&format!(
                    "{conf},per_process_memory_fraction:{}",
                    share(340 * MIB, total_bytes)
                )),
                device(total_bytes),
            );
            built.give(built.take(340 * MIB));
        }
    }
}

#[test]
fn the_fraction_that_is_set_is_read_back_and_setting_it_again_changes_nothing() {
    for conf in CONFS {
        let allocator = allocator(conf, H200_BYTES);
        let caching = allocator.caching();
        assert_eq!(caching.memory_fraction().unwrap(), 1.0, "{conf}");
        let total_bytes = caching.total_bytes().unwrap();
        for step in 1..200u32 {
            let fraction = f64::from(step) / 200.0;
            caching.set_memory_fraction(fraction).unwrap();
            let limit_bytes = caching.limit_bytes().expect("it is below 1");
            let answer = caching.memory_fraction().unwrap();
            assert!((answer - fraction).abs() < 1e-9, "{conf}: {fraction} set, {answer} read");
            caching.set_memory_fraction(answer).unwrap();
            assert_eq!(caching.limit_bytes(), Some(limit_bytes), "{conf}: {fraction}");
            let odd_bytes = (u64::from(step) * 7_654_321).min(total_bytes - 1);
            caching.set_limit_bytes(Some(odd_bytes));
            caching.set_memory_fraction(caching.memory_fraction().unwrap()).unwrap();
            assert_eq!(caching.limit_bytes(), Some(odd_bytes), "{conf}");
        }
        caching.set_memory_fraction(1.0).unwrap();
        assert_eq!((caching.limit_bytes(), caching.memory_fraction().unwrap()), (None, 1.0));
    }
}

#[test]
fn after_a_switch_the_fraction_is_one_of_the_memory_of_the_new_strategy() {
    let device_bytes = 8 * GIB;
    let allocator = allocator("backend:native", device_bytes);
    for conf in CONFS {
        allocator.switch(conf).unwrap();
        let caching = allocator.caching();
        let is_of_host = conf.contains("cpu") || conf.contains("pinned");
        assert_eq!(caching.total_bytes().unwrap() == device_bytes, !is_of_host, "{conf}");
        caching.set_memory_fraction(0.25).unwrap();
        assert!((caching.memory_fraction().unwrap() - 0.25).abs() < 1e-9, "{conf}");
        caching.set_limit_bytes(Some(512 * MIB + 1));
        caching.set_memory_fraction(caching.memory_fraction().unwrap()).unwrap();
        assert_eq!(caching.limit_bytes(), Some(512 * MIB + 1), "{conf}");
    }
}

#[test]
fn versions_of_pytorch_truncate_the_limit_up_to_2_14() {
    let fraction = (1..1000).map(|mib| (mib * MIB, share(mib * MIB, H200_BYTES)));
    let limits = |conf: &str| -> Vec<u64> {
        let allocator = allocator(conf, H200_BYTES);
        let limit = |(bytes, fraction)| {
            allocator.caching().set_memory_fraction(fraction).unwrap();
            bytes - allocator.caching().limit_bytes().unwrap()
        };
        fraction.clone().map(limit).collect()
    };
    let missing = |conf: &str| limits(conf).iter().sum::<u64>();
    for conf in ["compat:pytorch-2.10", "compat:pytorch", "compat:pytorch-2.14"] {
        assert!(missing(conf) > 10, "{conf}: {} limits lack a byte", missing(conf));
    }
    assert_eq!(missing("compat:pytorch-2.15"), 0);
    assert_eq!(missing("compat:default"), 0);
    assert!(missing("backend:cudaMallocAsync,compat:pytorch") > 10);
}

/// The threshold is a fraction of the limit, so a cache of exactly that fraction is not collected.
#[test]
fn a_threshold_worth_the_reserved_bytes_collects_nothing() {
    let collected = |conf: &str, mib: u64| {
        let limit_bytes = 1001 * MIB + 512;
        let threshold = share(mib * MIB, limit_bytes);
        let conf = format!("{conf},garbage_collection_threshold:{threshold}");
        let allocator = allocator(&conf, GIB);
        allocator.caching().set_limit_bytes(Some(limit_bytes));
        allocator.give(allocator.take(mib * MIB));
        let small = allocator.take(512);
        let released = allocator.stats().num_device_free;
        allocator.give(small);
        released
    };
    let sum = |conf| (20..1000).step_by(2).map(|mib| collected(conf, mib)).sum::<i64>();
    assert_eq!(sum("compat:default"), 0);
    assert!(sum("compat:pytorch") > 0, "the product is truncated");
}

#[test]
fn a_request_that_the_driver_may_not_get_is_compared_with_the_rounded_fraction() {
    let refused = |conf: &str, mib: u64| {
        let fraction = share(mib * MIB, H200_BYTES);
        let conf =
            format!("{conf},throw_on_cudamalloc_oom:True,per_process_memory_fraction:{fraction}");
        let allocator = allocator(&conf, H200_BYTES);
        allocator.caching().set_limit_bytes(None);
        allocator.try_allocate(mib * MIB, HOME).is_err()
    };
    let count = |conf| (20..1000).step_by(20).filter(|mib| refused(conf, *mib)).count();
    assert_eq!(count("compat:default"), 0);
    assert!(count("compat:pytorch") > 0);
    assert!(count("compat:pytorch-2.15") > 0, "only the limit is rounded");
}

/// Returns the sizes in a message, as texts, that stand behind these words.
fn size_behind<'t>(text: &'t str, words: &str) -> &'t str {
    let at = text.find(words).unwrap_or_else(|| panic!("no {words:?} in {text}"));
    let rest = &text[at + words.len()..];
    let end = ["iB (", " bytes)"].iter().all(|part| rest.contains(part));
    let unit = rest.find("iB").expect("a size") + 2;
    match end && rest[unit..].starts_with(" (") {
        true => &rest[..rest.find(" bytes)").expect("it ends") + " bytes)".len()],
        false => &rest[..unit],
    }
}

#[test]
fn a_message_shows_no_two_equal_sizes_as_the_reason() {
    for conf in CONFS {
        for (held_mib, asked_mib, missing_bytes) in [(0, 340, 1), (0, 340, 4096), (40, 300, 1)] {
            let allocator = allocator(conf, 64 * GIB);
            let held = (held_mib > 0).then(|| allocator.take(held_mib * MIB));
            allocator.caching().set_limit_bytes(Some((held_mib + asked_mib) * MIB - missing_bytes));
            let report = allocator.fail(asked_mib * MIB, HOME);
            let text = report.to_string();
            let limit = (held_mib + asked_mib) * MIB - missing_bytes;
            assert!(text.contains(&format!("{limit} bytes")), "{conf}:\n{text}");
            if held_mib == 0 {
                let tried = size_behind(&text, "tried to allocate ");
                let limit = size_behind(&text, "may reserve ");
                assert_ne!(tried, limit, "{conf}:\n{text}");
            }
            for hint in &report.hints {
                if let Some(shown) = hint.split("the limit of ").nth(1) {
                    assert!(shown.contains(" bytes)"), "{conf}: {hint}");
                }
            }
            held.into_iter().for_each(|block| allocator.give(block));
        }
    }
    let allocator = allocator("layers:[limit:340MiB]", GIB);
    let held = allocator.take(512);
    let text = allocator.fail(340 * MIB, HOME).to_string();
    assert!(text.contains("Callers may hold 340.00 MiB (356515840 bytes)"), "{text}");
    allocator.give(held);
}

#[test]
fn sizes_that_differ_in_their_text_are_not_shown_in_bytes() {
    let allocator = allocator("backend:native", GIB);
    allocator.caching().set_limit_bytes(Some(300 * MIB));
    let text = allocator.fail(340 * MIB, HOME).to_string();
    assert!(text.contains(&format!("may reserve {}.", human_bytes(300 * MIB))), "{text}");
    assert!(!text.contains(" bytes)"), "{text}");
}
