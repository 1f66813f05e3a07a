//! Layers for alignment and guards, in which a block starts at another address than the block below the
//! layer.

use stratalloc::layers::align;

use super::fixture::{DEFAULT, Two, allocated, built, native, sim};
use crate::common::prelude::*;

#[test]
fn every_block_starts_at_a_multiple_and_lies_inside_what_was_taken() {
    let two = Two::new(u64::MAX);
    let aligned = align::align(Arc::clone(&two), 256, 1);
    let blocks: Vec<_> = (1..200).map(|bytes| aligned.take(bytes)).collect();
    for block in &blocks {
        let (start, end) = (block.address(), block.address() + block.size_bytes());
        assert!(start.is_multiple_of(256));
        let inside =
            two.state.lock().live.iter().any(|(at, size)| *at <= start && end <= at + size);
        assert!(inside, "{block:?}");
    }
    blocks.into_iter().for_each(|block| aligned.give(block));
    assert_eq!(two.live_bytes(), 0);
    let huge = aligned.try_allocate(u64::MAX - 10, DEFAULT);
    assert!(matches!(huge, Err(AllocError::TooLarge { .. })));
    assert!(matches!(aligned.try_allocate(0, DEFAULT), Err(AllocError::ZeroBytes)));
}

#[test]
fn an_allocator_that_aligns_less_than_requested_is_detected() {
    let two = Two::new(u64::MAX);
    let aligned = align::align(Arc::clone(&two), 4096, 2048);
    let refused = aligned.try_allocate(10, DEFAULT).unwrap_err();
    assert!(matches!(refused, AllocError::Driver(_)), "{refused}");
    assert_eq!(two.live_bytes(), 0, "the block went back");
}

#[test]
fn handles_of_moved_blocks_are_checked() {
    let (two, other) = (Two::new(u64::MAX), Two::new(u64::MAX));
    let aligned = align::align(Arc::clone(&two), 64, 1);
    let block = aligned.take(10);
    let (address, owner, token) = (block.address(), block.owner(), block.token());
    let forged = || stratalloc::allocator::Allocation::new(address, 10, owner, token);
    two.state.lock().stubborn = true;
    let block = aligned.free(block).unwrap_err().allocation;
    assert_eq!(block, forged(), "a refused free gives the handle back as it was");
    two.state.lock().stubborn = false;
    aligned.give(block);
    let refused = aligned.free(forged()).unwrap_err();
    assert_eq!(refused.reason, HandleError::Stale { address });
    let refused = aligned.free(other.take(10)).unwrap_err();
    assert!(matches!(refused.reason, HandleError::Foreign { .. }));
    other.free(refused.allocation).unwrap();
}

#[test]
fn moved_blocks_cross_streams_and_go_by_address_and_hide_what_names_blocks_below() {
    let aligned = align::align(native(&sim(), true), 4096, 512);
    let (block, raw) = (aligned.take(100), &aligned);
    let bare = aligned.try_allocate(100, DEFAULT).map(|b| b.address()).unwrap();
    assert!(block.address().is_multiple_of(4096) && bare.is_multiple_of(4096));
    let crossing = aligned.cross_stream();
    crossing.record_stream(&block, StreamId(64)).unwrap();
    raw.record_stream_raw(bare, StreamId(64)).unwrap();
    let base = aligned.caching().base_allocation(&block).unwrap();
    assert!((base.address..base.address + base.size_bytes).contains(&block.address()));
    aligned.give(block);
    raw.free_raw(bare).unwrap();
    assert_eq!(raw.free_raw(bare), Err(HandleError::UnknownAddress { address: bare }));
    let damage = aligned.stats();
    assert_eq!((damage.allocation.all.current, damage.active.all.current), (0, 2), "both drain");
    assert!(aligned.control().private_pools.is_none() && aligned.control().sharing.is_none());
    let at = aligned.allocate(Request::new(1, DEFAULT).at(4096));
    assert!(matches!(at, Err(AllocError::NoBlockAt { .. })));
}

#[test]
fn guards_are_for_memory_of_the_host_only() {
    let config = config("layers:[guard]");
    let refused = registry::build(&config, sim(), BuildOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("driver is sim"), "{refused}");
    let plain = built("layers:[align:64KiB]", sim(), false);
    assert!(plain.take(5).address().is_multiple_of(64 << 10));
}

#[cfg(target_os = "linux")]
mod guards {
    use parking_lot::Mutex;
    use stratalloc::config::Settings;
    use stratalloc::driver::Driver;
    use stratalloc::layers::guard::{self, Damage, Side};
    use stratalloc::strategies::native::{Engine, EngineOptions};
    use stratalloc_sim::{Host, HostOptions};

    use super::*;

    const GUARD: u8 = 0xA5;
    const FRESH: u8 = 0xCB;
    const FREED: u8 = 0xDD;

    struct Fixture {
        host: Arc<Host>,
        guarded: guard::Guarded<Engine>,
        damage: Arc<Mutex<Vec<Damage>>>,
    }

    impl Fixture {
        fn new() -> Self {
            let options = HostOptions { total_bytes: 1 << 28, ..HostOptions::default() };
            let host = Arc::new(Host::new(options));
            let driver: Arc<dyn Driver> = Arc::clone(&host) as _;
            let options = EngineOptions {
                settings: Settings::default(),
                raw_addresses: true,
                ..EngineOptions::default()
            };
            let native = Engine::new(Arc::clone(&driver), &options).expect("the options are valid");
            let damage: Arc<Mutex<Vec<Damage>>> = Arc::default();
            let sink = Arc::clone(&damage);
            let report = Box::new(move |damage: &Damage| sink.lock().push(damage.clone()));
            Self { guarded: guard::guard_to(native, driver, report), host, damage }
        }

        fn byte(&self, address: u64) -> u8 {
            let mut byte = [0];
            self.host
                .copy_to_host(&mut byte, address, DEFAULT)
                .expect("it is memory of the device");
            byte[0]
        }
    }

    #[test]
    fn bytes_written_past_a_block_are_reported_with_their_offset() {
        let fixture = Fixture::new();
        let block = fixture.guarded.take(1001);
        let (start, end) = (block.address(), block.address() + 1001);
        fixture.host.copy_from_host(start, &[7; 1001], DEFAULT).unwrap();
        fixture.guarded.give(block);
        assert_eq!(fixture.damage.lock().as_slice(), [], "its own bytes are the caller's");

        let block = fixture.guarded.take(1001);
        assert_eq!(block.address(), start);
        fixture.host.copy_from_host(end + 3, &[1, GUARD, 2], DEFAULT).unwrap();
        fixture.host.copy_from_host(start - 2, &[9, GUARD], DEFAULT).unwrap();
        fixture.guarded.give(block);
        let damage = std::mem::take(&mut *fixture.damage.lock());
        let [before, behind] = damage.as_slice() else { panic!("{damage:?}") };
        assert!(matches!(
            before,
            Damage::Overwritten { side: Side::Before, nearest_bytes: 2, count: 1, found: 9, .. }
        ));
        let Damage::Overwritten { block, side, nearest_bytes, count, address, found } = behind
        else {
            panic!("{behind}");
        };
        assert_eq!((*side, *nearest_bytes, *count), (Side::Behind, 3, 2));
        assert_eq!((*address, *found, block.size_bytes), (end + 3, 1, 1001));
        assert!(behind.to_string().contains("2 guard bytes behind it"), "{behind}");
        assert_eq!(
            (fixture.guarded.damaged(), allocated(&fixture.guarded)),
            (2, 0),
            "it is freed all the same"
        );
    }

    #[test]
    fn fresh_and_freed_memory_look_like_neither_zero_nor_data() {
        let fixture = Fixture::new();
        let block = fixture.guarded.take(600);
        let address = block.address();
        assert_eq!((fixture.byte(address), fixture.byte(address + 599)), (FRESH, FRESH));
        assert_eq!((fixture.byte(address - 1), fixture.byte(address + 600)), (GUARD, GUARD));
        fixture.guarded.give(block);
        assert_eq!((fixture.byte(address), fixture.byte(address + 599)), (FREED, FREED));
    }

    #[test]
    fn a_free_looks_after_the_work_of_all_announced_streams() {
        let fixture = Fixture::new();
        let side = StreamId(64);
        let raw = &fixture.guarded;
        let address = fixture.guarded.take(64).address();
        fixture.host.synchronize_device().unwrap();
        raw.record_stream_raw(address, side).unwrap();
        let gate = fixture.host.hold(side);
        fixture.host.fill(address + 64, 0, 5, side).unwrap();
        std::thread::scope(|scope| {
            let freeing = scope.spawn(|| raw.free_raw(address));
            drop(gate);
            freeing.join().unwrap().unwrap();
        });
        assert!(matches!(fixture.damage.lock().as_slice(), [Damage::Overwritten { count: 5, .. }]));
    }

    #[test]
    fn streams_that_are_destroyed_before_a_free_are_no_damage_and_hide_none() {
        let fixture = Fixture::new();
        let [own, side] = [0, 1].map(|_| fixture.host.create_stream().unwrap());
        for (on, gone, writes) in [(own, own, false), (DEFAULT, side, true)] {
            let block = fixture.guarded.take_on(1001, on);
            let (start, end) = (block.address(), block.address() + 1001);
            fixture.guarded.record(&block, side);
            fixture.host.fill(start, 3, 1001 + u64::from(writes), side).unwrap();
            fixture.host.destroy_stream(gone).unwrap();
            fixture.guarded.give(block);
            let damage = std::mem::take(&mut *fixture.damage.lock());
            match damage.as_slice() {
                [] => assert!(!writes),
                [Damage::Overwritten { address, count: 1, .. }] => {
                    assert_eq!((*address, writes), (end, true));
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(allocated(&fixture.guarded), 0);
    }
}
