//! Pieces that are exported as descriptors, and imported descriptors that must be checked.

use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};

use super::*;
use stratalloc::driver::Exportable;

const PAGE: u64 = 2 * MIB;

fn memory_file(size_bytes: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, size_bytes).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

fn refused(host: &Host, descriptor: OwnedFd, size_bytes: u64, why: &str) {
    let error = host.import(descriptor, size_bytes).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue, "{error}");
    assert!(error.message().contains(why), "{error}");
}

#[test]
fn an_exported_piece_is_the_same_memory_in_another_driver() {
    let (here, there) = (host(), host());
    let (at_here, at_there) = (here.reserve(PAGE).unwrap(), there.reserve(PAGE).unwrap());
    let piece = here.create(PAGE, Exportable::Descriptor).unwrap();
    let sent = here.export(piece).unwrap();
    assert!(fcntl_getfd(&sent).unwrap().contains(FdFlags::CLOEXEC));
    assert!(ftruncate(&sent, 0).is_err(), "it cannot be shrunk");
    let received = there.import(sent, PAGE).unwrap();
    for (host, at, piece) in [(&here, at_here, piece), (&there, at_there, received)] {
        host.map(at, PAGE, piece).unwrap();
        host.set_access(at, PAGE, DeviceId(0)).unwrap();
        host.release(piece).unwrap();
    }
    here.fill(at_here + 10, 6, 10, A).unwrap();
    here.synchronize_stream(A).unwrap();
    assert_eq!(bytes(&there, at_there + 10, 10, B), [6; 10]);
    assert_eq!(here.memory_info().unwrap().free_bytes, 62 * MIB);
    assert_eq!(there.memory_info().unwrap().free_bytes, 64 * MIB, "counted where it was made");
    drop(here);
    assert_eq!(bytes(&there, at_there + 10, 10, B), [6; 10], "the maker is gone, the memory stays");
}

#[test]
fn an_imported_piece_can_be_sent_on() {
    let hosts = [host(), host(), host()];
    let first = hosts[0].create(PAGE, Exportable::Descriptor).unwrap();
    let second = hosts[1].import(hosts[0].export(first).unwrap(), PAGE).unwrap();
    hosts[2].import(hosts[1].export(second).unwrap(), PAGE).unwrap();
}

#[test]
fn descriptors_that_could_fault_later_are_refused() {
    let host = host();
    let piece = host.create(PAGE, Exportable::Descriptor).unwrap();
    refused(&host, host.export(piece).unwrap(), 2 * PAGE, "not 4194304");
    refused(&host, host.export(piece).unwrap(), PAGE + 1, "multiple");
    refused(&host, host.export(piece).unwrap(), 0, "multiple");
    let sealed = SealFlags::SHRINK;
    refused(&host, memory_file(PAGE, SealFlags::GROW), PAGE, "shrinking");
    refused(&host, memory_file(PAGE - 1, sealed), PAGE, "not 2097152");
    refused(&host, memory_file(PAGE, sealed | SealFlags::WRITE), PAGE, "against writing");
    refused(&host, memory_file(PAGE, sealed | SealFlags::FUTURE_WRITE), PAGE, "against writing");
    refused(&host, File::open("/dev/zero").unwrap().into(), PAGE, "not of a memory file");
    refused(&host, std::io::pipe().unwrap().0.into(), PAGE, "not of a memory file");
    let program = File::open(std::env::current_exe().unwrap()).unwrap();
    let program_bytes = program.metadata().unwrap().len();
    let error = host.import(program.into(), program_bytes / PAGE * PAGE).unwrap_err();
    assert_eq!(error.kind(), DriverErrorKind::InvalidValue);
    host.import(memory_file(PAGE, sealed), PAGE).unwrap();
}

#[test]
fn a_descriptor_for_reading_only_is_refused() {
    use std::os::fd::AsRawFd;
    let host = host();
    let file = memory_file(PAGE, SealFlags::SHRINK);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    refused(&host, File::open(path).unwrap().into(), PAGE, "both reading and writing");
}
