//! Out of memory: requests beyond the device, limits, and observers.

use stratalloc::size::EIB;

use super::{H200_BYTES, signed};
use crate::common::prelude::*;

// From PyTorch's tests: the error for 800,000,000 GiB contains the size and the device's capacity.
// 8,000,000,000 GiB exceed 1 EiB and are refused without a device call. The device works afterwards.
#[test]
fn absurd_requests_fail_with_their_numbers_and_leave_the_device_working() {
    let fixture = Fixture::new(H200_BYTES, "");
    let message = fixture.try_allocate(800_000_000 * GIB, HOME).unwrap_err().to_string();
    assert!(message.contains("tried to allocate 800000000.00 GiB"), "{message}");
    assert!(message.contains("The device has 139.80 GiB in total"), "{message}");
    let calls = fixture.device.total_calls();
    let error = fixture.try_allocate(8_000_000_000 * GIB, HOME).unwrap_err();
    assert!(error.to_string().contains("more than 1 EiB"), "{error}");
    assert!(matches!(error, AllocError::TooLarge { requested_bytes } if requested_bytes > EIB));
    assert_eq!(fixture.device.total_calls(), calls, "the device was not called");
    fixture.give(fixture.take(1));
    fixture.check();
}

// PyTorch's test reads back 1, 0 and three random fractions. Here the limit is read back in bytes.
#[test]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "the limit is a product of doubles, rounded or truncated to whole bytes"
)]
fn the_limit_that_a_fraction_sets_is_read_back() {
    for (conf, truncates) in [("", false), ("compat:pytorch", true)] {
        let fixture = Fixture::new(H200_BYTES, conf);
        assert_eq!(fixture.caching().limit_bytes(), None);
        for fraction in [0.0, 0.123, 0.5, 0.877_3] {
            fixture.caching().set_memory_fraction(fraction).unwrap();
            let product = fraction * H200_BYTES as f64;
            let expected = if truncates { product as u64 } else { product.round() as u64 };
            assert_eq!(fixture.caching().limit_bytes(), Some(expected));
        }
        fixture.caching().set_memory_fraction(1.0).unwrap();
        assert_eq!(fixture.caching().limit_bytes(), None);
    }
}

// As in PyTorch, the configured fraction applies from the start, and a fraction of 0 allows no memory.
#[test]
fn a_configured_fraction_is_in_force_from_the_first_request_and_not_moved_later() {
    let of = |fraction| Settings { per_process_memory_fraction: fraction, ..Settings::default() };
    for (fraction, limit) in [(0.0, Some(0)), (0.5, Some(GIB)), (1.0, None)] {
        let fixture = Fixture::with(2 * GIB, of(fraction));
        assert_eq!(fixture.caching().limit_bytes(), limit);
        fixture.apply(of(0.25));
        assert_eq!(fixture.caching().limit_bytes(), limit, "later strings do not move the limit");
        match limit {
            Some(0) => drop(fixture.fail(1, HOME)),
            Some(most) => {
                let all = fixture.take(most);
                fixture.fail(1, HOME);
                fixture.give(all);
            }
            None => fixture.give(fixture.take(2 * GIB)),
        }
        fixture.check();
    }
}

// As in PyTorch, a request is refused without a device call exactly if reserved + segment > limit.
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
        let fixture = Fixture::new(GIB, "");
        let held = fixture.take(30 * MIB);
        fixture.caching().set_limit_bytes(Some(30 * MIB + segment - 1));
        let calls = fixture.device.calls("allocate");
        let report = fixture.fail(request, HOME);
        assert_eq!(report.segment_bytes, segment);
        assert_eq!(report.driver, None, "the limit refused, not the device");
        assert_eq!(fixture.device.calls("allocate"), calls, "the device was not called");
        fixture.caching().set_limit_bytes(Some(30 * MIB + segment));
        let fits = fixture.take(request);
        assert_eq!(fixture.stats().memory_reserved(), signed(30 * MIB + segment));
        fixture.check();
        fixture.give(fits);
        fixture.give(held);
    }
}

// As in PyTorch, each observer is called once for each failure.
#[test]
fn observers_see_the_very_report_that_the_caller_gets() {
    let fixture = Fixture::new(GIB, "");
    let seen: Arc<Mutex<Vec<OutOfMemory>>> = Arc::default();
    let sink = Arc::clone(&seen);
    let hooks = fixture.hooks();
    hooks.add_oom_observer(Arc::new(move |report| sink.lock().push(report.clone())));
    fixture.give(fixture.take(GIB / 2));
    assert!(seen.lock().is_empty());
    let first = fixture.fail(2 * GIB, HOME);
    let second = fixture.fail(3 * GIB, HOME);
    assert_eq!(*seen.lock(), [first, second]);
    assert_eq!(fixture.stats().num_ooms, 2);
}

// As in PyTorch, free-memory callbacks are called before a segment is allocated from the device.
#[test]
fn a_free_memory_callback_is_asked_before_the_device_is() {
    let fixture = Arc::new(Fixture::new(GIB, ""));
    let held = Mutex::new(Some(fixture.take(600 * MIB)));
    let inner = Arc::downgrade(&fixture);
    fixture.hooks().add_free_memory_callback(Arc::new(move || {
        let (Some(fixture), Some(block)) = (inner.upgrade(), held.lock().take()) else {
            return false;
        };
        fixture.give(block);
        true
    }));
    let calls = fixture.device.calls("allocate");
    let block = fixture.take(600 * MIB);
    assert_eq!(fixture.device.calls("allocate"), calls, "what the callback freed was reused");
    fixture.give(block);
    fixture.check();
}

/// Calls that are refused must change neither the counters nor the layout nor the device. `shadow` tests
/// all such calls.
#[test]
fn a_refused_call_changes_nothing_and_calls_no_driver() {
    let orphan = Fixture::new(GIB, "").take(512);
    let fixture = Fixture::new(GIB, "");
    let (block, freed) = (fixture.take(512), fixture.take(MIB));
    assert_eq!((block.address(), block.token()), (orphan.address(), orphan.token()));
    let stale = Allocation::new(freed.address(), MIB, freed.owner(), freed.token());
    fixture.give(freed);
    let before = fixture.state();
    let refused = fixture.free(orphan).expect_err("its allocator was dropped");
    assert!(matches!(refused.reason, HandleError::Foreign { .. }), "{refused}");
    fixture.free(stale).expect_err("it was freed");
    for bytes in [0, EIB + 1, u64::MAX] {
        fixture.try_allocate(bytes, HOME).expect_err("no device has so many");
    }
    assert_eq!(fixture.state(), before);
    assert_eq!(fixture.fail(EIB, HOME).segment_bytes, EIB, "an exbibyte is merely out of memory");
}
