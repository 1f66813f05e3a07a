//! Expandable segments: growth, gaps, memory pressure, failing calls, and switching the kind of segments
//! while blocks are live.
//!
//! `pool_histories` tests them with random histories.

use stratalloc::config::Reserve;
#[cfg(target_os = "linux")]
use stratalloc_sim::Host;

use crate::common::prelude::*;

/// Declares a test of each function for every device.
macro_rules! on_every_device {
    ($($name:ident)*) => {
        mod sim {
            $(#[test] fn $name() { super::$name::<super::Sim>(); })*
        }
        #[cfg(target_os = "linux")]
        mod host {
            $(#[test] fn $name() { super::$name::<super::Host>(); })*
        }
        #[cfg(target_os = "linux")]
        mod cuda {
            use crate::common::gpu::{Gpu, turn};
            $(#[test] fn $name() { if let Some(_turn) = turn() { super::$name::<Gpu>(); } })*
        }
    };
}

on_every_device! {
    a_segment_grows_in_place_and_large_requests_join_small_holes
    empty_cache_unmaps_whole_free_pages_and_unreserves_address_space
    a_block_freed_for_another_stream_keeps_its_pages_until_its_work_is_done
    pages_of_a_stream_that_is_gone_go_back
    an_allocator_that_goes_waits_for_work_on_its_pages
    both_kinds_of_segments_share_a_limit
    the_limit_binds_whole_pages
    the_collector_works_beside_expandable_segments
    oversize_rules_do_not_leak_reserved_memory
    a_device_without_virtual_memory_refuses_with_the_reason
}

type Fixture<D> = FixtureOn<Faulty<Arc<D>>>;

impl<D: Base> Fixture<D> {
    fn apply(&self, conf: &str) {
        self.engine().apply(&config(conf)).expect("it has virtual memory");
    }

    /// Drops the allocator and checks that no memory or object remains on the device.
    fn end(self) -> Checked {
        let Self { device, allocator } = self;
        drop(allocator);
        let held = device.held();
        if held.is_nothing() { Ok(()) } else { Err(format!("{held:?} is left")) }
    }
}

const ON: &str = "expandable_segments:True";

fn a_segment_grows_in_place_and_large_requests_join_small_holes<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, ON);
    let first = fixture.take(30 * MIB);
    let second = fixture.take(30 * MIB);
    assert_eq!(second.address(), first.address() + 30 * MIB, "one range, no gap");
    assert_eq!(fixture.stats().reserved_bytes.all.current, 60 << 20);
    fixture.give(first);
    fixture.give(second);
    let joined = fixture.take(60 * MIB);
    assert_eq!(fixture.stats().num_device_alloc, 2, "nothing more was mapped");
    fixture.give(joined);
    assert_eq!(fixture.stats().segment.all.current, 0, "pages are no segments");
    fixture.check();
}

#[test]
fn rests_are_cut_off_down_to_512_bytes() {
    let fixture = Fixture::<Sim>::new(1 << 30, ON);
    let block = fixture.take(20 * MIB - 512);
    let free = fixture.stats().free_blocks;
    assert_eq!(free, 1);
    fixture.give(block);
}

fn empty_cache_unmaps_whole_free_pages_and_unreserves_address_space<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, ON);
    let blocks: Vec<_> = (0..4).map(|_| fixture.take(20 * MIB)).collect();
    let mut blocks = blocks.into_iter();
    let (a, b, c, d) = (blocks.next(), blocks.next(), blocks.next(), blocks.next());
    for block in [b, d].into_iter().flatten() {
        fixture.give(block);
    }
    fixture.engine().empty_cache().expect("the driver works");
    assert_eq!(fixture.used_bytes(), 40 * MIB);
    fixture.check();
    let again = fixture.take(20 * MIB);
    let first = a.as_ref().map(Allocation::address);
    assert_eq!(Some(again.address()), first.map(|at| at + 20 * MIB), "the lowest gap");
    for block in [a, c, Some(again)].into_iter().flatten() {
        fixture.give(block);
    }
    fixture.engine().empty_cache().expect("the driver works");
    assert!(fixture.device.held().is_nothing(), "{:?}", fixture.device.held());
    assert_eq!(fixture.used_bytes(), 0);
}

fn a_block_freed_for_another_stream_keeps_its_pages_until_its_work_is_done<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, ON);
    let block = fixture.take(20 * MIB);
    fixture.engine().record_stream(&block, StreamId(9)).expect("it is live");
    fixture.give(block);
    assert_eq!(fixture.stats().active.all.current, 1);
    fixture.engine().empty_cache().expect("it waits for the work");
    assert_eq!(fixture.used_bytes(), 0);
}

fn an_allocator_that_goes_waits_for_work_on_its_pages<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, ON);
    let block = fixture.take_on(40 * MIB, StreamId(64));
    for byte in 0..20 {
        let own = fixture.device.fill(block.address(), byte, 10 * MIB, StreamId(64));
        let other = fixture.device.fill(block.address() + 20 * MIB, byte, MIB, StreamId(128));
        own.and(other).expect("the block is live");
    }
    fixture.end().expect("nothing is left");
}

/// Work of the destroyed stream may still use the pages, so the device must be synchronized before they are
/// released.
fn pages_of_a_stream_that_is_gone_go_back<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, ON);
    let gone = fixture.device.create_stream().expect("it has streams");
    let (first, second) = (fixture.take_on(30 * MIB, gone), fixture.take(30 * MIB));
    fixture.device.fill(first.address(), 1, 30 * MIB, gone).expect("it takes work");
    [first, second].into_iter().for_each(|block| fixture.give(block));
    fixture.device.destroy_stream(gone).expect("it is ours");
    fixture.engine().empty_cache().expect("it waits for the device");
    assert_eq!(fixture.used_bytes(), 0);
    fixture.give(fixture.take(1000 * MIB));
    fixture.check();
}

/// Fixed and expandable segments share one limit, and memory pressure releases both.
fn both_kinds_of_segments_share_a_limit<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, "max_split_size_mb:40");
    fixture.engine().set_limit_bytes(Some(120 * MIB));
    let fixed = fixture.take(40 * MIB);
    fixture.apply("max_split_size_mb:40,expandable_segments:True");
    let grown = fixture.take(40 * MIB);
    fixture.apply("max_split_size_mb:40,expandable_segments:False");
    let more = fixture.take(40 * MIB);
    fixture.fail(40 * MIB, HOME);
    for block in [fixed, grown, more] {
        fixture.give(block);
    }
    fixture.give(fixture.take(120 * MIB));
    fixture.check();
}

/// Whole pages are mapped, so a request can map more than the missing bytes. The limit applies to the pages:
/// where usual pages would exceed it, fine pages are mapped. Under PyTorch's rules the last page may exceed
/// the limit.
fn the_limit_binds_whole_pages<D: Base>() {
    for large_mib in [20, 64] {
        let letter = format!("expandable_segments:True,large_segment_size_mb:{large_mib}");
        let limit_bytes = 55 * MIB;
        let filled = |conf: &str| {
            let fixture = Fixture::<D>::new(1024 * MIB, conf);
            fixture.engine().set_limit_bytes(Some(limit_bytes));
            let mut live = Vec::new();
            while let Ok(block) = fixture.try_allocate(11 * MIB, StreamId(0)) {
                live.push(block);
            }
            fixture.check();
            let reserved = fixture.stats().memory_reserved().unsigned_abs();
            let (blocks, released) = (live.len(), fixture.stats().num_device_free);
            live.into_iter().for_each(|block| fixture.give(block));
            fixture.end().expect("nothing is left");
            (blocks, reserved, released)
        };
        let (blocks, reserved, released) = filled(&letter);
        assert!(reserved <= limit_bytes, "{reserved}");
        assert_eq!(blocks, filled("").0, "as many blocks as with fixed segments");
        assert_eq!(released, 0, "nothing that lives can be released");
        let (_, reserved, _) = filled(&format!("{letter},compat:pytorch"));
        assert!(reserved > limit_bytes, "{reserved}");
    }
}

/// The memory that a request may use: a limit, or the device itself.
#[derive(Clone, Copy, Debug)]
enum Bound {
    Limit,
    Device,
}

/// Returns the request sizes in MiB, of all multiples of 10 MiB below 1,000 MiB, that are refused although
/// the bound is 4 KiB larger.
fn refused_within(conf: &str, bound: Bound) -> Vec<u64> {
    let is_refused = |mib: &u64| {
        let bytes = mib * MIB + 4096;
        let (total_bytes, limit_bytes) = match bound {
            Bound::Limit => (2 * GIB, Some(bytes)),
            Bound::Device => (bytes, None),
        };
        let fixture = Fixture::<Sim>::new(total_bytes, conf);
        fixture.engine().set_limit_bytes(limit_bytes);
        let block = fixture.try_allocate(mib * MIB, HOME);
        let is_refused = block.is_err();
        block.into_iter().for_each(|block| fixture.give(block));
        fixture.engine().empty_cache().expect("nothing is in use");
        fixture.check();
        assert!(fixture.end().is_ok(), "{conf}: {mib} MiB");
        is_refused
    };
    (30..1000).step_by(10).filter(is_refused).collect()
}

#[test]
fn requests_that_fit_the_limit_or_the_device_are_served_by_fine_pages() {
    for bound in [Bound::Limit, Bound::Device] {
        for large in ["", ",large_segment_size_mb:12", ",large_segment_size_mb:64"] {
            let conf = format!("{ON}{large}");
            assert_eq!(refused_within(&conf, bound), [0; 0], "{conf} {bound:?}");
        }
    }
    let exact = format!("{ON},compat:pytorch");
    assert_eq!(refused_within(&exact, Bound::Limit), [0; 0], "whole pages may exceed the limit");
    assert_eq!(refused_within(&exact, Bound::Device).len(), 49, "whole pages exceed the device");
}

/// Only the missing pages are compared with the limit, by PyTorch's rules the size of a fixed segment.
#[test]
fn a_request_that_extends_a_free_block_needs_only_the_missing_pages() {
    for (conf, is_served) in [(ON.to_owned(), true), (format!("{ON},compat:pytorch"), false)] {
        let fixture = Fixture::<Sim>::new(GIB, &conf);
        let first = fixture.take(30 * MIB);
        fixture.give(fixture.take(10 * MIB));
        fixture.engine().set_limit_bytes(Some(60 * MIB));
        let second = fixture.try_allocate(30 * MIB, HOME);
        assert_eq!(second.is_ok(), is_served, "{conf}");
        assert_eq!(fixture.stats().num_alloc_retries, i64::from(!is_served), "{conf}");
        second.into_iter().for_each(|block| fixture.give(block));
        fixture.give(first);
        fixture.check();
    }
}

#[test]
fn free_pages_are_released_before_fine_pages_are_mapped() {
    let fixture = Fixture::<Sim>::new(GIB, ON);
    fixture.engine().set_limit_bytes(Some(70 * MIB));
    let live = fixture.take(20 * MIB);
    fixture.give(fixture.take_on(40 * MIB, SIDE));
    let grown = fixture.take(50 * MIB);
    assert_eq!(fixture.stats().memory_reserved(), 70 << 20);
    let sizes: Vec<u64> = fixture
        .allocator
        .expandable()
        .expandable_segments()
        .iter()
        .map(|of| of.page_bytes / MIB)
        .collect();
    assert_eq!(sizes.iter().filter(|mib| **mib == 2).count(), 1, "{sizes:?}");
    [live, grown].into_iter().for_each(|block| fixture.give(block));
    fixture.engine().set_limit_bytes(None);
    fixture.give(fixture.take(300 * MIB));
    let pages = fixture.allocator.expandable().expandable_segments();
    let fine = pages.iter().filter(|of| of.page_bytes == 2 * MIB);
    assert!(fine.map(|of| of.mapped_bytes).sum::<u64>() <= 50 * MIB, "usual pages grow");
    fixture.check();
    fixture.end().expect("nothing is left");
}

/// The address space of a segment is too small for it as well.
#[test]
fn a_request_far_above_the_device_is_rejected() {
    for compat in ["default", "pytorch"] {
        let conf = format!("{ON},compat:{compat},throw_on_cudamalloc_oom:True");
        let fixture = Fixture::<Sim>::new(GIB, &conf);
        fixture.fail(4 << 40, HOME);
        let stats = fixture.stats();
        assert_eq!((stats.num_oom_rejections, stats.num_ooms), (1, 0), "{compat}");
        fixture.check();
        fixture.end().expect("nothing is left");
    }
}

/// A request of 11 MiB needs 12 MiB in pages of 2 MiB.
#[test]
fn a_refused_request_names_the_pages_that_it_needs() {
    let fixture = Fixture::<Sim>::new(GIB, ON);
    fixture.engine().set_limit_bytes(Some(11 * MIB));
    let report = fixture.fail(11 * MIB, HOME);
    assert_eq!(report.segment_bytes, 12 * MIB);
    let words =
        "the request needs 12.00 MiB: 6 pages of 2.00 MiB, and 11.00 MiB are left: a larger";
    assert!(report.hints.iter().any(|hint| hint.contains(words)), "{:?}", report.hints);
    let exact = Fixture::<Sim>::new(30 * MIB, &format!("{ON},compat:pytorch"));
    let report = exact.fail(30 * MIB, HOME);
    let words = "the request needs 40.00 MiB: 2 pages of 20.00 MiB, and 30.00 MiB are left: \
                 expandable_segments:False, or";
    assert!(report.hints.iter().any(|hint| hint.contains(words)), "{:?}", report.hints);
}

/// Memory that was reserved before the limit was lowered stays reserved and is reused.
#[test]
fn a_block_above_a_lowered_limit_is_waited_for() {
    for (conf, is_over) in [("", false), ("", true), (ON, false), (ON, true)] {
        let fixture = Fixture::<Sim>::new(1 << 30, conf);
        let block = fixture.take(30 * MIB);
        fixture.engine().record_stream(&block, StreamId(9)).expect("it is live");
        fixture.give(block);
        fixture.engine().set_limit_bytes(Some(10 * MIB));
        if is_over {
            fixture.device.finish_all();
        }
        fixture.give(fixture.take(30 * MIB));
        fixture.check();
    }
}

/// Garbage collection releases free fixed segments. Memory pressure then unmaps free pages.
fn the_collector_works_beside_expandable_segments<D: Base>() {
    let fixture = Fixture::<D>::new(1 << 30, "garbage_collection_threshold:0.5");
    fixture.engine().set_limit_bytes(Some(120 * MIB));
    let fixed = fixture.take(40 * MIB);
    fixture.apply("garbage_collection_threshold:0.5,expandable_segments:True");
    let grown = fixture.take(40 * MIB);
    fixture.give(fixed);
    fixture.give(grown);
    fixture.give(fixture.take(80 * MIB));
    fixture.check();
}

fn oversize_rules_do_not_leak_reserved_memory<D: Base>() {
    let reserved = |conf: &str| {
        let fixture = Fixture::<D>::new(64 << 30, conf);
        let hole = fixture.take(100 * MIB);
        let _wall = fixture.take(5 * MIB);
        fixture.give(hole);
        let _small: Vec<_> = (0..3).map(|_| fixture.take(30 * MIB)).collect();
        fixture.check();
        fixture.stats().memory_reserved() >> 20
    };
    assert_eq!(reserved(ON), 120);
    assert_eq!(reserved("expandable_segments:True,max_split_size_mb:64"), 120);
    assert_eq!(reserved("expandable_segments:True,max_split_size_mb:64,compat:pytorch"), 200);
}

/// PyTorch's search ends at the first fixed block that the oversize rules forbid. Under the default rules it
/// continues.
#[test]
fn an_oversize_fixed_block_does_not_hide_an_expandable_one() {
    let conf = "max_split_size_mb:20,expandable_segments:True";
    for (fixed_mib, compat) in [(24, false), (24, true), (12, false), (12, true)] {
        let fixture = Fixture::<Sim>::new(1 << 30, "");
        // A fixed block that the oversize rules forbid, larger or smaller than the free expandable
        // block.
        fixture.give(fixture.take(fixed_mib.max(20) * MIB));
        fixture.apply(conf);
        let wall = fixture.take(MIB + 512);
        let more = (fixed_mib == 12).then(|| fixture.take(30 * MIB));
        if let Some(more) = more {
            fixture.give(more);
        }
        let reserved = fixture.stats().memory_reserved();
        fixture.apply(if compat {
            "max_split_size_mb:20,expandable_segments:True,compat:pytorch"
        } else {
            conf
        });
        fixture.engine().set_limit_bytes(Some(1));
        let found = fixture.try_allocate(2 * MIB, StreamId(0));
        assert_eq!(found.is_ok(), !compat, "{fixed_mib} MiB: {found:?}");
        assert!(compat || fixture.stats().memory_reserved() == reserved, "a hit");
        fixture.check();
        found.into_iter().chain([wall]).for_each(|block| fixture.give(block));
    }
}

#[test]
fn a_first_touch_of_a_gibibyte_takes_at_most_sixty_map_calls_and_a_steady_state_none() {
    let fixture = Fixture::<Sim>::new(8 << 30, ON);
    fixture.give(fixture.take(1 << 30));
    assert!(fixture.device.inner().calls("map") <= 60, "{}", fixture.device.inner().calls("map"));
    let before = fixture.device.inner().total_calls();
    (0..1000).for_each(|_| fixture.give(fixture.take(1 << 30)));
    assert_eq!(fixture.device.inner().total_calls(), before);
}

#[test]
fn a_request_larger_than_the_reserve_names_the_key_to_raise() {
    let settings = Settings {
        expandable_segments: true,
        expandable_reserve: Some(Reserve::Bytes(64 * MIB)),
        ..Settings::default()
    };
    let fixture = Fixture::<Sim>::new(1 << 30, ON);
    fixture.engine().apply(&Config::from_settings(settings)).expect("it has virtual memory");
    let report = fixture.fail(100 * MIB, HOME).to_string();
    assert!(report.contains("expandable_segments_reserve"), "{report}");
    let blocks: Vec<_> = (0..4).map(|_| fixture.take(40 * MIB)).collect();
    assert_eq!(
        fixture.device.inner().calls("reserve"),
        2,
        "80 MiB each, in pages: a further one when full"
    );
    blocks.into_iter().for_each(|block| fixture.give(block));
    fixture.check();
}

fn a_device_without_virtual_memory_refuses_with_the_reason<D: Base>() {
    let driver = plain(Arc::new(D::with_bytes(1 << 30)));
    let config = config(ON);
    let refused = registry::build(&config, Arc::clone(&driver) as _, BuildOptions::default());
    let message = refused.expect_err("it cannot").to_string();
    assert!(message.contains("no virtual memory"), "{message}");

    let fixed = registry::build(&Config::default(), driver, BuildOptions::default());
    let fixed = fixed.expect("fixed segments need none");
    let engine = fixed.engine().expect("built on the engine");
    let refused = engine.apply(&config).expect_err("switching needs it too").to_string();
    assert!(refused.contains("no virtual memory"), "{refused}");
    let block = fixed.take(MIB);
    assert_eq!(engine.statistics().segment.all.current, 1, "still fixed segments");
    fixed.give(block);
}
