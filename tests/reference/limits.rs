//! Running out: requests beyond the device, limits, and who is told.

use parking_lot::Mutex;
use stratalloc::error::FractionError;
use stratalloc::size::{EIB, TIB};

use super::{H200_BYTES, signed};
use crate::common::prelude::*;

// The reference: 800,000,000 GiB name the size and the device's capacity; 8,000,000,000 GiB are more
// than 1 EiB and never reach the device; the device goes on working.
#[test]
fn absurd_requests_fail_with_their_numbers_and_leave_the_device_working() {
    let bed = Bed::new(H200_BYTES, "");
    let message = bed.ask(800_000_000 * GIB, HOME).unwrap_err().to_string();
    assert!(message.contains("tried to allocate 800000000.00 GiB"), "{message}");
    assert!(message.contains("The device has 139.80 GiB in all"), "{message}");
    let calls = bed.device.total_calls();
    let error = bed.ask(8_000_000_000 * GIB, HOME).unwrap_err();
    assert!(error.to_string().contains("more than 1 EiB"), "{error}");
    assert!(matches!(error, AllocError::TooLarge { requested_bytes } if requested_bytes > EIB));
    assert_eq!(bed.device.total_calls(), calls, "the device was not asked");
    let block = bed.take(1);
    bed.give(block);
    bed.check();
}

// The reference: half of the memory twice fails, because something else is held too; after the first
// half is freed the very same request succeeds, also in a size that the cached half cannot serve.
#[test]
fn a_request_that_failed_succeeds_once_memory_was_freed() {
    let bed = Bed::new(8 * GIB, "");
    let small = bed.take(1);
    let half = bed.take(4 * GIB);
    bed.fail(4 * GIB, HOME);
    bed.give(half);
    let again = bed.take(4 * GIB);
    bed.give(again);
    assert_eq!(bed.stats().num_alloc_retries, 1, "the cached half was reused");
    let larger = bed.take(6 * GIB);
    assert_eq!(bed.stats().memory_reserved(), signed(6 * GIB + 2 * MIB));
    bed.give(larger);
    bed.give(small);
    bed.check();
}

// The reference: fractions outside [0, 1] are refused; with one half, 0.499 of the memory less what
// is reserved fits, and 0.5 does not, because the segment is rounded up.
#[test]
fn a_memory_fraction_limits_what_is_reserved_and_must_be_a_fraction() {
    let bed = Bed::new(H200_BYTES, "");
    for fraction in [-0.1, 2.0, 1.000_000_1, f64::NAN, f64::INFINITY] {
        let before = bed.state();
        let error = bed.caching().set_memory_fraction(fraction).unwrap_err();
        assert!(error == FractionError { fraction } || fraction.is_nan());
        assert_eq!(bed.state(), before);
    }
    let small = bed.take(1);
    bed.caching().set_memory_fraction(0.5).unwrap();
    let reserved = bed.stats().memory_reserved().unsigned_abs();
    let almost_half = bed.take(H200_BYTES * 499 / 1000 - reserved);
    bed.give(almost_half);
    bed.empty_cache();
    let report = bed.fail(H200_BYTES / 2, HOME);
    assert_eq!(report.limit_bytes, Some(H200_BYTES / 2));
    bed.caching().set_memory_fraction(1.0).unwrap();
    let half = bed.take(H200_BYTES / 2);
    bed.give(half);
    bed.give(small);
}

// The reference reads back 1, 0 and three random fractions. Here the limit is read back in bytes.
#[test]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the limit is a product of doubles, cut to whole bytes"
)]
fn the_limit_that_a_fraction_sets_is_read_back() {
    let bed = Bed::new(H200_BYTES, "");
    assert_eq!(bed.caching().limit_bytes(), None);
    for fraction in [0.0, 0.123, 0.5, 0.877_3] {
        bed.caching().set_memory_fraction(fraction).unwrap();
        let expected = (fraction * H200_BYTES as f64) as u64;
        assert_eq!(bed.caching().limit_bytes(), Some(expected));
    }
    bed.caching().set_memory_fraction(1.0).unwrap();
    assert_eq!(bed.caching().limit_bytes(), None);
}

// The reference: the configured fraction counts when an allocator is built, and 0 allows nothing.
#[test]
fn a_configured_fraction_is_in_force_from_the_first_request_and_not_moved_later() {
    let of = |fraction| Settings { per_process_memory_fraction: fraction, ..Settings::default() };
    for (fraction, limit) in [(0.0, Some(0)), (0.5, Some(GIB)), (1.0, None)] {
        let bed = Bed::with(2 * GIB, of(fraction));
        assert_eq!(bed.caching().limit_bytes(), limit);
        bed.apply(of(0.25));
        assert_eq!(bed.caching().limit_bytes(), limit, "later strings do not move the limit");
        match limit {
            Some(0) => drop(bed.fail(1, HOME)),
            Some(most) => {
                let all = bed.take(most);
                bed.fail(1, HOME);
                bed.give(all);
            }
            None => bed.give(bed.take(2 * GIB)),
        }
        bed.check();
    }
}

// The reference refuses before asking the device exactly when reserved + segment > limit.
#[test]
fn the_limit_refuses_exactly_when_the_next_segment_would_pass_it() {
    for (request, segment) in [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (99 * MIB, 100 * MIB),
    ] {
        let bed = Bed::new(GIB, "");
        let held = bed.take(30 * MIB);
        bed.caching().set_limit_bytes(Some(30 * MIB + segment - 1));
        let calls = bed.device.calls("allocate");
        let report = bed.fail(request, HOME);
        assert_eq!(report.segment_bytes, segment);
        assert_eq!(report.driver, None, "the limit refused, not the device");
        assert_eq!(bed.device.calls("allocate"), calls, "the device was not asked");
        bed.caching().set_limit_bytes(Some(30 * MIB + segment));
        let fits = bed.take(request);
        assert_eq!(bed.stats().memory_reserved(), signed(30 * MIB + segment));
        bed.check();
        bed.give(fits);
        bed.give(held);
    }
}

#[test]
fn a_limit_below_what_is_reserved_releases_nothing_and_still_serves_hits() {
    let bed = Bed::new(GIB, "");
    let cached = bed.take(30 * MIB);
    bed.give(cached);
    bed.caching().set_limit_bytes(Some(MIB));
    assert_eq!(bed.segment_sizes(), [30 * MIB]);
    let hit = bed.take(30 * MIB);
    bed.fail(1, HOME);
    bed.give(hit);
    bed.caching().set_limit_bytes(None);
    bed.give(bed.take(1));
}

// The reference: 4 TiB are out of memory with and without a size from which blocks are not split.
#[test]
fn four_tebibytes_are_out_of_memory_with_and_without_oversize_blocks() {
    for max_split_bytes in [None, Some(GIB)] {
        let bed = Bed::with(H200_BYTES, Settings { max_split_bytes, ..Settings::default() });
        let report = bed.fail(4 * TIB, HOME);
        assert_eq!(report.requested_bytes, 4 * TIB);
        assert!(report.driver.is_some());
        assert_eq!(bed.stats().num_ooms, 1);
        bed.check();
    }
}

// The reference: whoever asked to be told of failures is told, once for each.
#[test]
fn observers_see_the_very_report_that_the_caller_gets() {
    let bed = Bed::new(GIB, "");
    let seen: Arc<Mutex<Vec<OutOfMemory>>> = Arc::default();
    let sink = Arc::clone(&seen);
    let hooks = bed.hooks();
    hooks.add_oom_observer(Arc::new(move |report| sink.lock().push(report.clone())));
    bed.give(bed.take(GIB / 2));
    assert!(seen.lock().is_empty());
    let first = bed.fail(2 * GIB, HOME);
    let second = bed.fail(3 * GIB, HOME);
    assert_eq!(*seen.lock(), [first, second]);
    assert_eq!(bed.stats().num_ooms, 2);
}

// The reference asks callbacks for memory before it takes any from the device.
#[test]
fn a_free_memory_callback_is_asked_before_the_device_is() {
    let bed = Arc::new(Bed::new(GIB, ""));
    let held = Mutex::new(Some(bed.take(600 * MIB)));
    let inner = Arc::downgrade(&bed);
    bed.hooks().add_free_memory_callback(Arc::new(move || {
        let (Some(bed), Some(block)) = (inner.upgrade(), held.lock().take()) else {
            return false;
        };
        bed.give(block);
        true
    }));
    let calls = bed.device.calls("allocate");
    let block = bed.take(600 * MIB);
    assert_eq!(bed.device.calls("allocate"), calls, "what the callback freed was reused");
    bed.give(block);
    bed.check();
}
