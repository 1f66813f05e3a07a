//! Sharing by fabric handles, which need neither a thread nor file descriptors.

use stratalloc::driver::Exportable;
use stratalloc::sharing::PAGES_MAX;

use super::tools::{SHARED, allocate, engine, forged, handle, shared, sim, sim_with, two, wrong};
use crate::common::prelude::*;

fn out(sim: &Sim) -> (HeldResources, u64) {
    (sim.held(), sim.piece_holds())
}

#[test]
fn a_block_goes_through_the_fabric_and_leaves_nothing_behind() {
    let (sim, ours, theirs) = two(sim_with(true));
    let (small, large) = (allocate(&ours, 512), allocate(&ours, 45 * MIB));
    let handle = ours.share(&large).unwrap();
    assert_eq!((sim.calls("export_handle"), sim.calls("export")), (3, 0));
    assert_eq!(ours.share(&large).unwrap().as_bytes(), handle.as_bytes(), "equal bytes");
    assert_eq!(sim.calls("export_handle"), 3, "each page is exported once");
    let before = out(&sim);
    let handle = SharedHandle::from_bytes(handle.as_bytes()).unwrap();
    let imported = theirs.open(&handle).unwrap();
    assert_eq!(imported.size_bytes(), 45 * MIB);
    assert_eq!(sim.held().mapped_bytes() - before.0.mapped_bytes(), 60 * MIB);
    let calls = sim.total_calls();
    let again = theirs.open(&handle).unwrap();
    assert_eq!((again.address(), sim.total_calls()), (imported.address(), calls), "mapped once");
    drop((imported, again));
    assert_eq!(out(&sim), before);
    drop(ours.open(&ours.share(&small).unwrap()).expect("by their own allocator too"));
    assert_eq!(out(&sim), before);
    [small, large].into_iter().for_each(|block| ours.give(block));
    drop((ours, theirs));
    assert!(sim.held().is_nothing());
}

#[test]
fn the_kind_of_handle_can_be_chosen() {
    for (chosen, fabric, descriptor) in
        [("unspecified", 1, 0), ("fabric", 1, 0), ("posix_fd", 0, 1)]
    {
        let sim = sim_with(true);
        let text = format!("{SHARED},expandable_segments_handle_type:{chosen}");
        let ours = engine(sim.clone(), &text);
        let block = allocate(&ours, 512);
        // Only the driver call is checked, not whether sharing succeeds.
        let shared = ours.share(&block);
        let calls = (sim.calls("export_handle"), sim.calls("export"));
        assert_eq!(calls, (fabric, descriptor), "{chosen}: {shared:?}");
    }
}

#[test]
fn fabric_handles_are_refused_as_a_setting_where_the_device_has_none() {
    let text = format!("{SHARED},expandable_segments_handle_type:fabric");
    let config = config(&text);
    let options = EngineOptions { settings: config.settings().clone(), ..EngineOptions::default() };
    let refused = Engine::new(sim_with(false), &options).unwrap_err();
    assert_eq!(refused.kind(), DriverErrorKind::NotSupported);
    assert!(refused.message().contains("use posix_fd"), "{refused}");
    let ours = engine(sim_with(false), SHARED);
    assert_eq!(ours.apply(&config).unwrap_err().kind(), DriverErrorKind::NotSupported);
    // Without `expandable_segments_ipc` no page is exportable, so the type of handle has no effect.
    let text = "expandable_segments:True,expandable_segments_handle_type:fabric";
    drop(allocate(&engine(sim_with(false), text), 512));
}

#[test]
fn released_pages_cannot_be_opened() {
    let (sim, ours, theirs) = two(sim_with(true));
    let (block, handle) = shared(&ours, 30 * MIB);
    let kept = theirs.open(&handle).unwrap();
    ours.give(block);
    ours.empty_cache().unwrap();
    drop(theirs.open(&handle).expect("an open handle may be opened again"));
    drop(kept);
    let before = out(&sim);
    assert!(matches!(theirs.open(&handle), Err(SharingError::Driver(_))));
    assert_eq!(out(&sim), before);
}

#[test]
fn a_device_without_fabric_refuses_without_a_call() {
    let plain = sim();
    let theirs = engine(plain.clone(), SHARED);
    let calls = plain.total_calls();
    let refused = theirs.open(&handle(true)).unwrap_err();
    assert_eq!(refused, SharingError::NotSupported { what: "pages of a fabric" });
    assert_eq!(plain.total_calls(), calls);
}

#[test]
fn without_a_fabric_pages_that_want_one_are_shared_as_descriptors() {
    let sim = sim();
    let memory = sim.virtual_memory().unwrap();
    let piece = memory.create(2 * MIB, Exportable::Fabric).unwrap();
    assert!(memory.fabric().is_none());
    memory.export(piece).expect("as a descriptor all the same");
    memory.release(piece).unwrap();
}

#[test]
fn pages_that_may_not_leave_do_not_leave_through_the_fabric() {
    let engine = engine(sim_with(true), "expandable_segments:True");
    let block = allocate(&engine, MIB);
    assert!(matches!(engine.share(&block), Err(SharingError::NotExportable { .. })));
}

#[test]
fn the_layout_is_fixed() {
    let handle = handle(true);
    let bytes = handle.as_bytes();
    assert_eq!(bytes.len(), 56 + 3 * 64 + 8);
    assert_eq!(&bytes[..12], b"stratshr\x01\x00\x03\x00");
    assert_eq!(bytes[12..16], std::process::id().to_le_bytes());
    assert_eq!(bytes[32..40], (45 * MIB + 512).to_le_bytes());
    assert_eq!(bytes[40..48], (20 * MIB).to_le_bytes());
    assert_eq!(bytes[48..52], 3u32.to_le_bytes());
    assert_eq!((handle.process(), handle.size_bytes()), (std::process::id(), 45 * MIB + 512));
}

#[test]
fn each_mistake_is_refused() {
    let handle = handle(true);
    let good = handle.as_bytes();
    let with = |at: usize, bytes: &[u8]| wrong(&forged(good, at, bytes));
    let most = PAGES_MAX as u64;
    assert_eq!(with(52, &[0, 1]), FormatError::Reserved { at: 53 });
    assert_eq!(with(48, &[0; 4]), FormatError::PageCount { pages: 0, most });
    let pages = u64::from(u32::MAX);
    assert_eq!(with(48, &[255; 4]), FormatError::PageCount { pages, most });
    let expected = 56 + 4 * 64 + 8;
    assert_eq!(with(48, &[4]), FormatError::Length { len: good.len(), expected });
    for (at, value) in [(24, 20 * MIB), (24, u64::MAX), (32, 0), (32, 60 * MIB + 1), (40, 0)] {
        let error = with(at, &value.to_le_bytes());
        assert!(matches!(error, FormatError::Extent { .. }), "{at} {value:#x}: {error:?}");
    }
}

/// Handles that are well-formed but have a wrong page size or wrong contents.
#[test]
fn lies_about_pages_cost_nothing() {
    let (sim, ours, theirs) = two(sim_with(true));
    let (_block, handle) = shared(&ours, 45 * MIB + 512);
    let before = out(&sim);
    for (at, value) in [(40, 16 * MIB), (40, 22 * MIB), (40, 20 * MIB + 512), (56, 999), (64, 1)] {
        let bytes = forged(handle.as_bytes(), at, &u64::to_le_bytes(value));
        if let Ok(forged) = SharedHandle::from_bytes(&bytes) {
            theirs.open(&forged).expect_err("it lies");
        }
        assert_eq!(out(&sim), before, "{at} {value}");
    }
    drop(theirs.open(&handle).expect("the truth still works"));
}

/// Makes each driver call of sharing and opening fail once.
#[test]
fn each_failing_call_leaves_nothing_half_done() {
    let sim = sim_with(true);
    let faulty = Arc::new(Faulty::new(Arc::clone(&sim)));
    let (ours, theirs) = (engine(faulty.clone(), SHARED), engine(faulty.clone(), SHARED));
    let warm = allocate(&theirs, 512);
    let block = allocate(&ours, 45 * MIB);
    let mut failed = 0;
    for at in 0.. {
        let before = out(&sim);
        faulty.fail_call(at, None);
        let opened = ours.share(&block).and_then(|handle| theirs.open(&handle));
        let struck = faulty.failed_calls() > 0;
        assert_eq!(opened.is_err(), struck, "call {at}");
        faulty.disarm();
        drop(opened);
        // The next `open` tries the failed releases again.
        drop(theirs.open(&ours.share(&block).unwrap()).unwrap());
        assert_eq!(out(&sim), before, "call {at}");
        if !struck {
            break;
        }
        failed += 1;
    }
    assert!(failed >= 8, "{failed}: three imports, and then a range");
    ours.give(block);
    theirs.give(warm);
}
