//! Cases that end the process, or that need a process of their own. Each runs in a child.
//!
//! The child is this test program again. An environment variable selects the case.
#![expect(unsafe_code, reason = "touching memory that must fault")]

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

use super::*;
use stratalloc::driver::Exportable;
use stratalloc::size::GIB;

const CASE: &str = "STRATALLOC_HOST_TEST_CASE";
/// Source: POSIX, `signal.h`.
const SEGMENTATION_FAULT: i32 = 11;

/// Runs one test of this file in a child that finds `case` in its environment.
fn child(test: &str, case: &str) -> ExitStatus {
    let program = std::env::current_exe().unwrap();
    let name = format!("host::tests::faults::{test}");
    let mut command = Command::new(program);
    let output = command.args(["--exact", &name]).env(CASE, case).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("running 1 test"), "the child found no {name}: {text}");
    output.status
}

fn touch(address: u64) -> u8 {
    let pointer = std::ptr::with_exposed_provenance::<u8>(usize::try_from(address).unwrap());
    // SAFETY: the range belongs to a reservation of the caller's device. If it is not accessible, the
    // read ends this process, as the test expects.
    unsafe { pointer.read_volatile() }
}

#[test]
fn only_mapped_and_accessible_memory_can_be_touched() {
    let Ok(case) = std::env::var(CASE) else {
        let run = |case| child("only_mapped_and_accessible_memory_can_be_touched", case);
        assert!(run("accessible").success());
        for case in ["reserved", "mapped", "unmapped"] {
            assert_eq!(run(case).signal(), Some(SEGMENTATION_FAULT), "{case}");
        }
        return;
    };
    let host = host();
    let address = host.reserve(4 * MIB).unwrap();
    let piece = host.create(2 * MIB, Exportable::No).unwrap();
    if case != "reserved" {
        host.map(address, 2 * MIB, piece).unwrap();
    }
    if case == "accessible" || case == "unmapped" {
        host.set_access(address, 2 * MIB, DeviceId(0)).unwrap();
        host.fill(address, 9, 2 * MIB, A).unwrap();
        host.synchronize_stream(A).unwrap();
        assert_eq!(touch(address), 9);
    }
    if case == "unmapped" {
        host.unmap(address, 2 * MIB).unwrap();
    }
    assert_eq!(touch(address), 9);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mapping_lines() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Runs in a process of its own, because it counts descriptors and mappings.
#[test]
fn many_pieces_cost_few_descriptors_and_nothing_is_left_behind() {
    if std::env::var(CASE).is_err() {
        let test = "many_pieces_cost_few_descriptors_and_nothing_is_left_behind";
        assert!(child(test, "alone").success());
        return;
    }
    let before = (descriptors(), mapping_lines());
    let total_bytes = 64 * GIB;
    let host = Host::new(HostOptions { total_bytes, ..HostOptions::default() });
    let base = host.reserve(total_bytes).unwrap();
    // In descending order, so that the system cannot merge adjacent mappings: one table entry per piece.
    for page in (0..total_bytes / (2 * MIB)).rev() {
        let piece = host.create(2 * MIB, Exportable::No).unwrap();
        host.map(base + page * 2 * MIB, 2 * MIB, piece).unwrap();
        host.release(piece).unwrap();
    }
    host.set_access(base, total_bytes, DeviceId(0)).unwrap();
    assert_eq!(host.memory_info().unwrap().free_bytes, 0);
    assert!(mapping_lines() > 32_768, "the pieces are apart");
    assert!(descriptors() <= before.0 + 1, "one file holds them all");
    for at in [base, base + total_bytes / 2 - 8, base + total_bytes - 16] {
        host.fill(at, 3, 16, A).unwrap();
        assert_eq!(bytes(&host, at, 16, A), [3; 16]);
    }
    host.unmap(base, total_bytes / 2).unwrap();
    assert_eq!(host.memory_info().unwrap().free_bytes, total_bytes / 2);
    let own = host.create(2 * MIB, Exportable::Descriptor).unwrap();
    let sent = host.export(own).unwrap();
    let region = host.allocate(MIB).unwrap();
    host.fill(region, 1, MIB, A).unwrap();
    let pool = host.default_pool().unwrap();
    host.allocate_async(pool, MIB, A).unwrap();
    drop((host, sent));
    assert_eq!(descriptors(), before.0);
    // The system may keep stacks and heaps of ended threads, which are far fewer than the pieces.
    assert!(mapping_lines() < before.1 + 32, "{} and now {}", before.1, mapping_lines());
}
