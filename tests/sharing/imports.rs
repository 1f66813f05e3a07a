//! Opening handles on the simulated device: reserved address space, shared mappings, and their release.

use super::tools::{SHARED, allocate, engine, forged, shared, sim, two};
use crate::common::prelude::*;

/// Returns the device's reserved bytes, mapped bytes, number of physical allocations and used bytes.
fn held(sim: &Sim) -> (u64, u64, u64, u64) {
    let info = stratalloc::driver::Driver::memory_info(sim).expect("sim answers");
    let used = info.total_bytes - info.free_bytes;
    let held = sim.held();
    (
        held.reservations.iter().map(|(_, bytes)| bytes).sum(),
        held.mapped_bytes(),
        sim.piece_holds(),
        used,
    )
}

#[test]
fn an_import_reserves_only_what_is_shared() {
    let (sim, ours, theirs) = two(sim());
    let first = allocate(&ours, 30 * MIB);
    let (second, handle) = shared(&ours, 30 * MIB);
    let before = held(&sim);
    let imported = theirs.open(&handle).unwrap();
    // The second block is covered by the pages from 20 to 60 MiB, which are two pages of 20 MiB.
    let after = held(&sim);
    assert_eq!(after.0 - before.0, 40 * MIB);
    assert_eq!(after.1 - before.1, 40 * MIB);
    assert_eq!(after.3, before.3, "the memory is the owner's");
    assert_eq!(imported.size_bytes(), 30 * MIB);
    assert_eq!(imported.address() % (2 * MIB), (second.address() - first.address()) % (2 * MIB));
    drop(imported);
    assert_eq!(held(&sim), before);
    drop((first, second));
}

#[test]
fn the_same_pages_are_mapped_once() {
    let (sim, ours, theirs) = two(sim());
    // The two small blocks are in one page.
    let (a, b) = (allocate(&ours, 512), allocate(&ours, 1024));
    let (handle_a, handle_b) = (ours.share(&a).unwrap(), ours.share(&b).unwrap());
    assert_eq!(ours.share(&a).unwrap().as_bytes(), handle_a.as_bytes(), "equal bytes each time");
    let before = held(&sim);
    let first = theirs.open(&handle_a).unwrap();
    let calls = sim.total_calls();
    let again = theirs.open(&handle_a).unwrap();
    let beside = theirs.open(&handle_b).unwrap();
    assert_eq!(sim.total_calls(), calls, "no driver call for what is mapped");
    assert_eq!(first.address(), again.address());
    assert_eq!(beside.address() - first.address(), b.address() - a.address());
    drop(first);
    drop(again);
    assert_ne!(held(&sim), before);
    drop(beside);
    assert_eq!(held(&sim), before);
    let again = theirs.open(&handle_b).unwrap();
    assert_eq!(again.size_bytes(), 1024);
}

#[test]
fn pages_may_be_opened_by_their_own_allocator() {
    let sim = sim();
    let engine = engine(sim.clone(), SHARED);
    let block = allocate(&engine, 3 * MIB);
    let imported = engine.open(&engine.share(&block).unwrap()).unwrap();
    assert_ne!(imported.address(), block.address());
    drop(imported);
    engine.give(block);
    engine.empty_cache().unwrap();
    assert_eq!(held(&sim), (0, 0, 0, 0));
}

/// Raises the descriptor limit of this process so that `pages` pages can be opened. Returns true if the
/// system allows that.
#[cfg(target_os = "linux")]
fn may_open(pages: u64) -> bool {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // The device needs two descriptors for each page and the allocator one. A few more are being sent.
    let wanted = 4 * pages + 500;
    let enough = limit.maximum.is_none_or(|most| most >= wanted);
    let current = limit.current.map(|now| now.max(wanted));
    enough && setrlimit(Resource::Nofile, rustix::process::Rlimit { current, ..limit }).is_ok()
}

#[cfg(target_os = "linux")]
#[test]
fn many_pages_come_in_several_answers() {
    let pages = 601;
    if !may_open(pages) {
        eprintln!("skipped: too few descriptors are allowed");
        return;
    }
    let options = stratalloc_sim::SimOptions::default();
    let sim = Arc::new(Sim::new(options));
    let ours = engine(sim.clone(), SHARED);
    let theirs = engine(sim.clone(), SHARED);
    let (_block, handle) = shared(&ours, pages * 20 * MIB);
    let before = held(&sim);
    let imported = theirs.open(&handle).unwrap();
    assert_eq!(sim.held().mapped_bytes(), before.1 + pages * 20 * MIB);
    assert_eq!(sim.calls("import"), pages);
    drop(imported);
    assert_eq!(held(&sim), before);
}

#[test]
fn pages_that_may_not_leave_name_the_key() {
    let engine = engine(sim(), "expandable_segments:True");
    let block = allocate(&engine, MIB);
    let error = engine.share(&block).unwrap_err();
    assert_eq!(error, SharingError::NotExportable { address: block.address() });
    assert!(error.to_string().contains("expandable_segments_ipc:True"), "{error}");
}

#[test]
fn foreign_and_stale_allocations_are_refused() {
    let (_sim, ours, theirs) = two(sim());
    let block = allocate(&ours, MIB);
    let error = theirs.share(&block).unwrap_err();
    assert!(matches!(error, SharingError::Handle(HandleError::Foreign { .. })), "{error}");
    assert!(matches!(theirs.base_allocation(&block), Err(HandleError::Foreign { .. })));
}

#[test]
fn what_was_opened_stays_and_what_was_released_is_reported() {
    let (sim, ours, theirs) = two(sim());
    let (block, handle) = shared(&ours, 25 * MIB);
    let imported = theirs.open(&handle).unwrap();
    ours.give(block);
    ours.empty_cache().unwrap();
    assert_eq!(sim.held().mapped_bytes(), 40 * MIB, "the importer's");
    // The page is still open here, so no request is sent to the other process.
    drop(theirs.open(&handle).unwrap());
    drop(imported);
    assert_eq!(held(&sim), (0, 0, 0, 0));
    assert_eq!(theirs.open(&handle).unwrap_err(), SharingError::PageGone { page: 0 });
    // New pages at the same address are not the shared ones.
    let _block = allocate(&ours, 25 * MIB);
    assert_eq!(theirs.open(&handle).unwrap_err(), SharingError::PageGone { page: 0 });
}

#[test]
fn an_import_outlives_both_allocators() {
    let (sim, ours, theirs) = two(sim());
    let (_block, handle) = shared(&ours, MIB);
    let imported = theirs.open(&handle).unwrap();
    drop(ours);
    drop(theirs);
    assert_eq!(held(&sim), (2 * MIB, 2 * MIB, 1, 2 * MIB));
    drop(imported);
    assert_eq!(held(&sim), (0, 0, 0, 0));
    let late = engine(sim, SHARED);
    // The allocator was dropped, but its process still runs.
    let process = std::process::id();
    assert_eq!(late.open(&handle).unwrap_err(), SharingError::Unreachable { process });
}

#[test]
fn forged_handles_are_refused() {
    let (sim, ours, theirs) = two(sim());
    let (_block, handle) = shared(&ours, 25 * MIB);
    let before = held(&sim);
    let open = |at: usize, with: &[u8]| {
        let handle = SharedHandle::from_bytes(&forged(handle.as_bytes(), at, with));
        theirs.open(&handle.expect("its form is good")).expect_err("it is forged")
    };
    let process = std::process::id();
    assert_eq!(open(40, &[7; 16]), SharingError::Refused { process });
    // Changes a page's identity, then its inode, then the page size.
    assert_eq!(open(88 + 32, &[7; 8]), SharingError::PageGone { page: 1 });
    assert_eq!(open(88 + 16, &[7; 8]), SharingError::WrongDescriptor { page: 0 });
    let odd = (20 * MIB + 512).to_le_bytes();
    assert!(matches!(open(72, &odd), SharingError::PageSize { .. }));
    let other = (22 * MIB).to_le_bytes();
    assert!(matches!(open(72, &other), SharingError::Driver(_)), "the driver checks the size");
    assert_eq!(held(&sim), before);
    // The handle is of a process that started at another time, and no process listens at its socket.
    let mut gone = forged(handle.as_bytes(), 56, &[9; 16]);
    gone = forged(&gone, 16, &1u64.to_le_bytes());
    let gone = SharedHandle::from_bytes(&gone).unwrap();
    assert_eq!(theirs.open(&gone).unwrap_err(), SharingError::ExporterGone { process });
}

/// A handle with the right pages but without the secret must open nothing, even if no process listens at its
/// socket.
#[test]
fn a_handle_without_the_secret_opens_nothing_whatever_else_it_names() {
    let (sim, ours, theirs) = two(sim());
    let (_block, handle) = shared(&ours, 25 * MIB);
    let before = held(&sim);
    let process = std::process::id();
    let open = |bytes: &[u8]| theirs.open(&SharedHandle::from_bytes(bytes).unwrap()).unwrap_err();
    let secretless = forged(handle.as_bytes(), 40, &[0; 16]);
    assert_eq!(open(&secretless), SharingError::Refused { process });
    // First a socket name that does not exist. Then also a descriptor number in bytes that are reserved.
    let absent = forged(&secretless, 56, &[9; 16]);
    let unreachable = SharingError::Unreachable { process };
    assert_eq!(open(&absent), unreachable);
    assert!(unreachable.to_string().contains("network namespace"), "{unreachable}");
    let numbered = forged(&absent, 88 + 24, &3u32.to_le_bytes());
    assert_eq!(
        SharedHandle::from_bytes(&numbered).unwrap_err(),
        FormatError::Reserved { at: 88 + 24 }
    );
    assert_eq!(held(&sim), before);
}

fn plan(at: u64, repeat: bool) -> FaultPlan {
    FaultPlan { at, kind: DriverErrorKind::Other, repeat, only: None }
}

#[test]
fn a_failure_at_any_call_leaves_nothing_behind() {
    for repeat in [false, true] {
        let mut at = 0;
        loop {
            let sim = sim();
            let ours = engine(sim.clone(), SHARED);
            let (_block, handle) = shared(&ours, 45 * MIB);
            let before = held(&sim);
            let faulty = Arc::new(Faulty::new(sim.clone()));
            let theirs = engine(faulty.clone(), SHARED);
            theirs.enable_peer_access(DeviceId(1)).unwrap();
            faulty.arm(plan(at, repeat));
            let opened = theirs.open(&handle).map(drop);
            let failed = faulty.failed_calls();
            faulty.disarm();
            assert!(failed > 0 || opened.is_ok(), "{at}: {opened:?}");
            // `empty_cache` retries releases that failed after an import failed or was dropped.
            theirs.empty_cache().unwrap();
            assert_eq!(held(&sim), before, "call {at}, repeat {repeat}");
            drop(theirs.open(&handle).unwrap());
            assert_eq!(held(&sim), before);
            if failed == 0 {
                assert!(at > 10, "an import has more calls than {at}");
                break;
            }
            at += 1;
        }
    }
}

#[test]
fn a_failure_while_sharing_can_be_repeated() {
    for at in 0..4 {
        let sim = sim();
        let faulty = Arc::new(Faulty::new(sim.clone()));
        let ours = engine(faulty.clone(), SHARED);
        let theirs = engine(sim.clone(), SHARED);
        let block = allocate(&ours, 45 * MIB);
        faulty.arm(plan(at, false));
        let shared = ours.share(&block);
        assert_eq!(shared.is_err(), at < 3, "three pages are exported: {shared:?}");
        faulty.disarm();
        drop(theirs.open(&ours.share(&block).unwrap()).unwrap());
        ours.give(block);
        ours.empty_cache().unwrap();
        assert_eq!(held(&sim), (0, 0, 0, 0));
    }
}

#[test]
fn threads_that_open_the_same_get_the_same() {
    let (sim, ours, theirs) = two(sim());
    let (_block, handle) = shared(&ours, 25 * MIB);
    let before = held(&sim);
    for _ in 0..20 {
        let together = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let imported = theirs.open(&handle).expect("it can be opened");
                    together.wait();
                    assert_eq!(sim.held().mapped_bytes(), before.1 + 40 * MIB);
                    together.wait();
                    drop(imported);
                });
            }
        });
        assert_eq!(held(&sim), before);
    }
}

#[test]
fn the_base_of_a_block_is_its_segment_or_its_mapped_range() {
    let fixed = engine(sim(), "");
    let (a, b) = (allocate(&fixed, 3 * MIB), allocate(&fixed, 4 * MIB));
    for block in [&a, &b] {
        let base = fixed.base_allocation(block).unwrap();
        assert_eq!(
            (base.address, base.size_bytes, base.expandable),
            (a.address(), 20 * MIB, false)
        );
    }
    let expandable = engine(sim(), SHARED);
    let (a, b) = (allocate(&expandable, 15 * MIB), allocate(&expandable, 10 * MIB));
    for block in [&a, &b] {
        let base = expandable.base_allocation(block).unwrap();
        assert_eq!((base.address, base.size_bytes, base.expandable), (a.address(), 40 * MIB, true));
    }
    expandable.give(a);
    let far = allocate(&expandable, 100 * MIB);
    expandable.empty_cache().unwrap();
    let base = expandable.base_allocation(&far).unwrap();
    assert!(base.address <= far.address() && base.expandable);
}
