//! When a freed block is reused, and by which request.

use stratalloc::handle::Released;

use super::*;

#[test]
fn a_block_that_no_stream_uses_is_reused_at_once_on_any_stream() {
    let (sim, own) = pinned("");
    let block = own.take_on(MIB, SIDE);
    let address = block.address();
    own.give(block);
    assert_eq!(own.take_on(MIB, FAR).address(), address);
    assert_eq!(sim.calls("record_event"), 0);
}

#[test]
fn a_block_is_reused_when_the_work_of_every_announced_stream_has_finished() {
    let (sim, own) = pinned("");
    let block = own.take_on(MIB, HOME);
    let address = block.address();
    for stream in [HOME, SIDE, SIDE] {
        own.cross_stream().record_stream(&block, stream).unwrap();
    }
    own.give(block);
    assert_eq!(sim.calls("record_event"), 2, "one for each stream");
    let second = own.take(MIB);
    assert_ne!(second.address(), address);
    sim.complete_stream(HOME);
    assert_ne!(own.take(MIB).address(), address);
    sim.complete_stream(SIDE);
    let reused = own.take(MIB);
    assert_eq!(reused.address(), address);
    // The uses of the last life of the block have no effect on this one.
    own.give(reused);
    assert_eq!(own.take(MIB).address(), address);
}

#[test]
fn a_buffer_is_reused_after_the_work_of_its_own_stream() {
    let sim = device(1 << 40);
    let handle = stratalloc::build("backend:pinned", Arc::clone(&sim) as _).unwrap();
    let buffer = handle.uninit::<u8>(1 << 20, SIDE).unwrap();
    let address = buffer.address();
    drop(buffer);
    let second = handle.uninit::<u8>(1 << 20, SIDE).unwrap();
    assert_ne!(second.address(), address);
    sim.complete_stream(SIDE);
    assert_eq!(handle.uninit::<u8>(1 << 20, SIDE).unwrap().address(), address);
}

#[test]
fn a_buffer_waits_for_its_own_stream_after_a_switch_too() {
    for layers in ["", ",layers:[statistics]", ",layers:[front]", ",layers:[limit:1GiB]"] {
        let sim = device(1 << 40);
        let conf = format!("backend:pinned{layers}");
        let handle = stratalloc::build(&conf, Arc::clone(&sim) as _).unwrap();
        let buffers = [(); 3].map(|()| handle.uninit::<u8>(1 << 20, SIDE).unwrap());
        handle.switch("backend:native").unwrap();
        handle.switch("backend:cudaMallocAsync").unwrap();
        let held_bytes = sim.held().pinned_bytes;
        assert!(held_bytes >= 3 << 20, "{layers}");
        let [dropped, released, also_dropped] = buffers;
        drop(dropped);
        let Released::Block(block) = released.release() else { panic!("it has a block") };
        handle.free(block).unwrap();
        drop(also_dropped);
        assert_eq!(sim.held().pinned_bytes, held_bytes, "{layers}: the work is running");
        sim.complete_stream(SIDE);
        handle.control().caching.unwrap().empty_cache().unwrap();
        assert_eq!((sim.held().pinned_bytes, handle.lost_blocks()), (0, 0), "{layers}");
    }
}

#[test]
fn a_buffer_of_the_device_announces_no_stream_after_a_switch_to_pinned() {
    let sim = device(1 << 40);
    let handle = stratalloc::build("backend:native", Arc::clone(&sim) as _).unwrap();
    let buffer = handle.uninit::<u8>(1 << 20, SIDE).unwrap();
    handle.switch("backend:pinned").unwrap();
    drop(buffer);
    assert_eq!((sim.calls("record_event"), handle.lost_blocks()), (0, 0));
}

#[test]
fn a_request_takes_the_smallest_block_that_is_at_most_an_eighth_larger() {
    let (_, own) = pinned("");
    let sizes = [8 * MIB, 9 * MIB, 10 * MIB, 9 * MIB];
    let addresses = sizes.map(|bytes| own.take(bytes)).map(|block| {
        let address = block.address();
        own.give(block);
        address
    });
    // Of the two blocks of 9 MiB, the one that was freed last.
    let found = own.take(8 * MIB + 4096);
    assert_eq!(found.address(), addresses[3]);
    assert_eq!(own.take(8 * MIB).address(), addresses[0]);
    // 10 MiB are more than an eighth too large for 8 MiB.
    let new = own.take(8 * MIB + 8192);
    assert_eq!(new.address(), addresses[1]);
    assert!(!addresses.contains(&own.take(8 * MIB).address()));
}

#[test]
fn a_background_thread_makes_blocks_free_without_requests() {
    let sim = Arc::new(Sim::default());
    let own = pinned_over(Arc::clone(&sim) as _, "pinned_use_background_threads:True");
    for _ in 0..20 {
        let block = own.take(MIB);
        own.record_stream_raw(block.address(), SIDE).unwrap();
        own.give(block);
        while own.stats().active.all.current > 0 {
            thread::yield_now();
        }
    }
    assert_eq!(reserved(&own), MIB);
    // The thread waits without a timeout now. With an age of 0 it releases the block.
    own.caching()
        .apply(&config("backend:pinned,pinned_use_background_threads:True,pinned_trim_age_s:0"))
        .unwrap();
    while reserved(&own) > 0 {
        thread::yield_now();
    }
    drop(own);
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn a_block_that_was_used_in_a_capture_is_not_reused() {
    let (sim, own) = pinned("");
    let stream = sim.create_stream().unwrap();
    let block = own.take(MIB);
    let address = block.address();
    sim.begin(stream).unwrap();
    own.cross_stream().record_stream(&block, stream).unwrap();
    own.give(block);
    sim.end(stream).unwrap();
    sim.complete_all();
    assert_ne!(own.take(MIB).address(), address);
    own.caching().empty_cache().unwrap();
    assert_eq!(own.stats().active.all.current, 2, "the graph may still use it");
    drop(own);
    sim.destroy_stream(stream).unwrap();
    assert_eq!(sim.held(), HeldResources::default());
}

#[test]
fn a_block_whose_stream_is_captured_when_it_is_freed_waits_for_the_end_of_the_capture() {
    let (sim, own) = pinned("");
    let stream = sim.create_stream().unwrap();
    let block = own.take(MIB);
    let address = block.address();
    own.cross_stream().record_stream(&block, stream).unwrap();
    sim.begin(stream).unwrap();
    own.give(block);
    assert_ne!(own.take(MIB).address(), address);
    sim.end(stream).unwrap();
    assert_ne!(own.take(MIB).address(), address, "the event was recorded only now");
    sim.complete_stream(stream);
    assert_eq!(own.take(MIB).address(), address);
}

#[test]
fn a_stream_that_was_destroyed_is_waited_for() {
    let (sim, own) = pinned("");
    let stream = sim.create_stream().unwrap();
    let block = own.take(MIB);
    let address = block.address();
    own.cross_stream().record_stream(&block, stream).unwrap();
    sim.destroy_stream(stream).unwrap();
    own.give(block);
    assert_eq!(own.take(MIB).address(), address);
}

#[test]
fn a_free_that_cannot_record_events_leaves_the_block_live() {
    let sim = device(GIB);
    let driver = Arc::new(Faulty::new(Arc::clone(&sim)));
    let own = pinned_over(Arc::clone(&driver) as _, "");
    let block = own.take(MIB);
    own.cross_stream().record_stream(&block, SIDE).unwrap();
    let only = Some("record_event");
    driver.arm(FaultPlan { at: 0, kind: DriverErrorKind::Other, repeat: false, only });
    let refused = own.free(block).unwrap_err();
    assert!(matches!(refused.reason, HandleError::Driver(_)));
    assert_eq!(own.stats().allocation.all.current, 1);
    own.give(refused.allocation);
    assert_eq!(own.stats().allocation.all.current, 0);
}

#[test]
fn the_default_stream_can_be_announced_while_another_stream_is_captured() {
    let sim = device(GIB);
    let driver = Arc::new(Faulty::new(Arc::clone(&sim)));
    let own = pinned_over(Arc::clone(&driver) as _, "");
    let block = own.take(MIB);
    let address = block.address();
    // So CUDA refuses the query for the legacy default stream during that capture.
    let (kind, only) = (DriverErrorKind::CaptureActive, Some("capture_status"));
    driver.arm(FaultPlan { at: 0, kind, repeat: true, only });
    own.cross_stream().record_stream(&block, HOME).unwrap();
    own.give(block);
    let other = own.take(MIB);
    assert_ne!(other.address(), address);
    driver.disarm();
    own.cross_stream().process_events().unwrap();
    assert_eq!(sim.calls("record_event"), 1, "once the capture has ended");
    sim.complete_stream(HOME);
    assert_eq!(own.take(MIB).address(), address);
}
