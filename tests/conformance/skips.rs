//! Tests that are skipped for lack of a device print a message that the test harness does not hide.

use std::process::Output;

use stratalloc_conformance::gpu::is_absent;
use stratalloc_conformance::skip::REQUIRE_CUDA;

use crate::common::prelude::*;

/// Runs one test of this program in a process that sees no CUDA device.
fn without_a_device(test: &str, required: &str) -> Output {
    Command::new(std::env::current_exe().expect("this program has a path"))
        .args(["--exact", test])
        .env("CUDA_VISIBLE_DEVICES", "")
        .env(REQUIRE_CUDA, required)
        .output()
        .expect("it starts")
}

const TEST: &str = "conformance::native::cuda::live_blocks_never_overlap";

#[test]
fn a_test_without_a_device_prints_that_although_it_passes() {
    for not_required in ["", "0"] {
        let output = without_a_device(TEST, not_required);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        // Only the first such line of a process contains the driver's message, in brackets.
        let line = "native on cuda: live blocks never overlap: skipped: no CUDA device (";
        assert!(stderr.starts_with(line) && stderr.lines().count() == 1, "{stderr}");
    }
}

#[test]
fn a_test_without_a_device_fails_where_one_is_required() {
    let output = without_a_device(TEST, "1");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && stdout.contains("requires one"), "{stdout}");
}

#[test]
fn what_is_not_offered_is_reported() {
    let output = without_a_device("conformance::native::sim::bytes_stay_intact", "");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("skipped: the device has no bytes"), "{stderr}");
}

#[test]
fn only_want_of_a_device_is_taken_for_it() {
    let absent = |kind, call, code| is_absent(&DriverError::new(kind, call, code, "words"));
    assert!(absent(DriverErrorKind::NotSupported, "load libcuda", 0), "no driver");
    assert!(absent(DriverErrorKind::NotSupported, "cuInit", 100), "no device");
    assert!(absent(DriverErrorKind::Other, "cuDeviceGet", 101), "no such device");
    // Codes for a broken driver, an incompatible driver and a lost device.
    for code in [3, 46, 802, 803, 999] {
        assert!(!absent(DriverErrorKind::NotSupported, "cuInit", code), "{code}");
    }
    assert!(!absent(DriverErrorKind::OutOfMemory, "cuDevicePrimaryCtxRetain", 2));
    assert!(!absent(DriverErrorKind::NotSupported, "memory_pools", 0));
}
