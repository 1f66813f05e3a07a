//! Limits and memory pressure across a switch.

use super::{ASYNC, EXPANDABLE, FRONT, Fixture, NATIVE, register};
use crate::common::prelude::*;

#[test]
fn a_limit_spans_old_and_new_and_rises_as_the_old_drains() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let caching = fixture.caching();
    caching.set_limit_bytes(Some(100 * MIB));
    let old: Vec<_> = (0..3).map(|_| fixture.take(20 * MIB)).collect();
    fixture.switch(EXPANDABLE);
    assert_eq!(caching.limit_bytes(), Some(100 * MIB), "the limit is that of both");
    let new = fixture.take(40 * MIB);
    let report = fixture.fail(2 * MIB, HOME).to_string();
    assert!(report.contains("1 replaced allocators hold 60.00 MiB"), "{report}");
    let mut old = old.into_iter();
    fixture.give(old.next().expect("three"));
    let more = fixture.take(20 * MIB);
    fixture.fail(2 * MIB, HOME);
    old.for_each(|block| fixture.give(block));
    let rest = fixture.take(40 * MIB);
    fixture.fail(2 * MIB, HOME);
    assert!(fixture.used_bytes() <= 100 * MIB);
    [new, more, rest].into_iter().for_each(|block| fixture.give(block));
}

#[test]
fn a_limit_stays_unless_the_new_string_sets_another() {
    let fixture = Fixture::new(8 * GIB, "backend:native,per_process_memory_fraction:0.5");
    let caching = fixture.caching();
    let half = caching.limit_bytes().expect("half of the device");
    fixture.switch(EXPANDABLE);
    assert_eq!(caching.limit_bytes(), Some(half));
    fixture.switch("backend:native,per_process_memory_fraction:0.25");
    assert_eq!(caching.limit_bytes(), Some(half / 2));
    caching.set_memory_fraction(0.75).expect("a fraction");
    fixture.switch(ASYNC);
    assert_eq!(caching.limit_bytes(), Some(half + half / 2));
    caching.set_limit_bytes(None);
    fixture.switch(NATIVE);
    assert_eq!(caching.limit_bytes(), None);
    assert!(caching.set_memory_fraction(1.5).is_err() && caching.limit_bytes().is_none());
}

#[test]
fn idle_memory_of_retired_allocators_is_released_before_out_of_memory_is_reported() {
    let pairs = [(NATIVE, NATIVE), (NATIVE, EXPANDABLE), (NATIVE, ASYNC), (ASYNC, NATIVE)];
    for (from, to) in pairs {
        let fixture = Fixture::new(200 * MIB, from);
        let ooms = fixture.count_ooms();
        let old: Vec<_> = (0..16).map(|_| fixture.take(12 * MIB)).collect();
        fixture.switch(to);
        // A retired allocator releases free memory only after an eighth of its blocks was freed. One of
        // sixteen is less, so the memory stays with it until it is needed.
        let mut old = old.into_iter();
        fixture.give(old.next().expect("sixteen"));
        assert_eq!(fixture.used_bytes(), 192 * MIB, "{to}");
        let big = fixture.take(16 * MIB);
        assert!(fixture.used_bytes() >= 196 * MIB, "{to}");
        let counters = fixture.counters();
        assert_eq!((ooms.load(SeqCst), counters.statistics().num_ooms), (0, 0), "{to}");
        fixture.fail(60 * MIB, HOME);
        assert_eq!((ooms.load(SeqCst), counters.statistics().num_ooms), (1, 1), "{to}");
        old.chain([big]).for_each(|block| fixture.give(block));
        assert_eq!(fixture.retired(), 0, "{to}");
    }
}

#[test]
fn hooks_are_carried_from_allocator_to_allocator() {
    let fixture = Fixture::new(100 * MIB, NATIVE);
    let (callbacks, ooms) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let hooks = fixture.hooks();
    let (a, t) = (Arc::clone(&callbacks), Arc::clone(&ooms));
    hooks.add_free_memory_callback(Arc::new(move || {
        a.fetch_add(1, SeqCst);
        false
    }));
    hooks.add_oom_observer(Arc::new(move |report| {
        assert!(report.requested_bytes > 0);
        t.fetch_add(1, SeqCst);
    }));
    for (round, conf) in [NATIVE, EXPANDABLE, ASYNC, NATIVE].into_iter().enumerate() {
        fixture.switch(conf);
        let before = callbacks.load(SeqCst);
        fixture.fail(500 * MIB, HOME);
        assert_eq!(ooms.load(SeqCst), round + 1, "{conf}");
        assert!(callbacks.load(SeqCst) > before, "{conf}");
    }
}

#[test]
fn an_observer_or_a_callback_that_asks_for_too_much_again_is_called_once() {
    let fixture = Fixture::new(100 * MIB, NATIVE);
    let (callbacks, ooms) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let too_much = |switchable: &Switchable| {
        let request = Request::new(500 * MIB, StreamId::DEFAULT);
        assert!(switchable.allocate(request).is_err());
    };
    let hooks = fixture.hooks();
    let (count, switchable) = (Arc::clone(&ooms), fixture.allocator.clone());
    hooks.add_oom_observer(Arc::new(move |_| {
        count.fetch_add(1, SeqCst);
        too_much(&switchable);
    }));
    for (round, conf) in [NATIVE, EXPANDABLE, ASYNC, NATIVE].into_iter().enumerate() {
        fixture.switch(conf);
        fixture.fail(500 * MIB, HOME);
        assert_eq!(ooms.load(SeqCst), round + 1, "{conf}");
    }
    let (count, switchable) = (Arc::clone(&callbacks), fixture.allocator.clone());
    hooks.add_free_memory_callback(Arc::new(move || {
        count.fetch_add(1, SeqCst);
        too_much(&switchable);
        false
    }));
    fixture.fail(500 * MIB, HOME);
    assert!((1..4).contains(&callbacks.load(SeqCst)), "{}", callbacks.load(SeqCst));
}

#[test]
fn a_callback_that_switches_whenever_it_is_asked_ends_in_an_error() {
    let fixture = Fixture::new(100 * MIB, NATIVE);
    let (ooms, switchable) = (fixture.count_ooms(), fixture.allocator.clone());
    fixture.hooks().add_free_memory_callback(Arc::new(move || {
        switchable.switch(NATIVE).expect("it can be built");
        false
    }));
    fixture.fail(500 * MIB, HOME);
    let counters = fixture.counters();
    assert_eq!((ooms.load(SeqCst), counters.statistics().num_ooms), (1, 1));
    fixture.give(fixture.take(50 * MIB));
}

#[test]
fn a_limit_that_a_call_has_changed_stays_when_a_further_string_switches() {
    let fixture = Fixture::new(8 * GIB, "backend:native,per_process_memory_fraction:0.5");
    let caching = fixture.caching();
    caching.set_limit_bytes(Some(100 * MIB));
    fixture.update(ASYNC).expect("it can");
    assert_eq!(caching.limit_bytes(), Some(100 * MIB));
    caching.set_limit_bytes(None);
    fixture.update(NATIVE).expect("it can");
    assert_eq!(caching.limit_bytes(), None);
    let further = "backend:cudaMallocAsync,per_process_memory_fraction:0.25";
    fixture.update(further).expect("it can");
    assert_eq!(caching.limit_bytes(), Some(2 * GIB));
}

#[test]
fn a_fraction_in_a_further_string_that_does_not_switch_is_enforced() {
    for conf in [NATIVE, EXPANDABLE, ASYNC, FRONT] {
        let fixture = Fixture::new(8 * GIB, conf);
        let caching = fixture.caching();
        let kept = fixture.take(GIB);
        fixture.update("per_process_memory_fraction:0.25").expect("a good string");
        assert_eq!(caching.limit_bytes(), Some(2 * GIB), "{conf}");
        fixture.fail(2 * GIB, HOME);
        // The configured fraction persists. A string without a fraction does not change a limit that a
        // call has set in the meantime.
        caching.set_limit_bytes(Some(3 * GIB));
        fixture.update("throw_on_cudamalloc_oom:False").expect("a good string");
        assert_eq!(caching.limit_bytes(), Some(3 * GIB), "{conf}");
        fixture.update("per_process_memory_fraction:1.0").expect("a good string");
        assert_eq!(caching.limit_bytes(), None, "{conf}");
        let more = fixture.take(3 * GIB);
        assert_eq!(fixture.retired(), 0, "nothing was switched: {conf}");
        [kept, more].into_iter().for_each(|block| fixture.give(block));
    }
}

#[test]
fn a_fraction_in_a_further_string_binds_every_strategy() {
    let next = AtomicUsize::new(1 << 20);
    let allocate = move |bytes: u64, _, _| {
        let bytes = usize::try_from(bytes).ok()?.next_multiple_of(512);
        Some(next.fetch_add(bytes, SeqCst) as u64)
    };
    registry::register_callbacks("unlimited", Callbacks::new(allocate, |_, _, _, _| {}))
        .expect("the name is free");
    let layers = "backend:native,layers:[statistics,track,oom_retry:2]";
    let (cpu, pinned) = ("backend:cpu", "backend:pinned");
    for conf in [NATIVE, EXPANDABLE, ASYNC, FRONT, layers, cpu, pinned, "backend:unlimited"] {
        for fraction in ["", ",per_process_memory_fraction:0.5"] {
            let fixture = Fixture::new(8 * GIB, &format!("{conf}{fraction}"));
            fixture.update("per_process_memory_fraction:0.000001").expect("a good string");
            fixture.fail(MIB, HOME);
            let caching = fixture.caching();
            assert!(caching.limit_bytes().is_some_and(|limit| limit < MIB), "{conf}");
            assert_eq!(fixture.retired(), 0, "nothing was switched: {conf}");
            let by_handle = Handle::of(fixture.allocator.clone());
            by_handle.uninit::<u8>(1 << 20, StreamId::DEFAULT).expect_err("the same limit");
        }
    }
}

#[test]
fn a_fraction_in_a_further_string_spans_old_and_new() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let old = fixture.take(1000 * MIB);
    fixture.switch(EXPANDABLE);
    fixture.update("per_process_memory_fraction:0.25").expect("a good string");
    fixture.fail(1200 * MIB, HOME);
    let new = fixture.take(1000 * MIB);
    assert!(fixture.used_bytes() <= 2 * GIB);
    [old, new].into_iter().for_each(|block| fixture.give(block));
}

#[test]
fn a_further_string_that_the_device_refuses_moves_no_limit() {
    let config = config(NATIVE);
    let options = SimOptions { total_bytes: 8 * GIB, ..SimOptions::default() };
    let plain = plain(Arc::new(Sim::new(options)));
    let switchable = Switchable::build(&config, plain, BuildOptions::default())
        .expect("fixed segments need little");
    let further = "per_process_memory_fraction:0.25,expandable_segments:True";
    switchable.update(further).expect_err("the device has no virtual memory");
    assert_eq!(switchable.caching().limit_bytes(), None);
    let part = switchable.config().settings().per_process_memory_fraction;
    assert!(part >= 1.0, "{part}");
    switchable.give(switchable.take(3 * GIB));
}

#[test]
fn a_fraction_set_in_code_is_enforced() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let caching = fixture.caching();
    let half = Settings { per_process_memory_fraction: 0.5, ..Settings::default() };
    caching.apply(&Config::from_settings(half)).expect("it fits");
    assert_eq!(caching.limit_bytes(), Some(4 * GIB));
    caching.apply(&Config::default()).expect("it fits");
    assert_eq!(caching.limit_bytes(), Some(4 * GIB), "it was not set");
    let half = Settings { per_process_memory_fraction: 0.5, ..Settings::default() };
    caching.apply(&Config::from_settings(half)).expect("it fits");
    caching.set_limit_bytes(Some(3 * GIB));
    fixture.update("throw_on_cudamalloc_oom:False").expect("a good string");
    assert_eq!(caching.limit_bytes(), Some(3 * GIB), "a call set it after the code");
}

#[test]
fn a_fraction_set_in_code_with_another_allocator_is_enforced_once() {
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let caching = fixture.caching();
    caching.set_limit_bytes(Some(GIB));
    let half = Settings { per_process_memory_fraction: 0.5, ..Settings::default() };
    fixture.switch_to(Config::from_settings(half)).expect("it can");
    assert_eq!(caching.limit_bytes(), Some(4 * GIB), "the code set it last");
    caching.set_limit_bytes(None);
    fixture.update(ASYNC).expect("it can");
    assert_eq!(caching.limit_bytes(), None, "a call set it last");
}

#[test]
fn a_whole_configuration_contains_the_fraction_set_before_its_last_text() {
    let table = registry::key_table();
    let half = Settings { per_process_memory_fraction: 0.5, ..Settings::default() };
    let fraction = config("per_process_memory_fraction:0.5");
    for first in [Config::from_settings(half), fraction] {
        let whole = first.updated("throw_on_cudamalloc_oom:True", &table).expect("a good string");
        let fixture = Fixture::new(8 * GIB, NATIVE);
        let caching = fixture.caching();
        caching.apply(&whole).expect("it fits");
        assert_eq!(caching.limit_bytes(), Some(4 * GIB));
        caching.set_limit_bytes(None);
        fixture.switch_to(whole).expect("it can");
        assert_eq!(caching.limit_bytes(), Some(4 * GIB));
    }
}

#[test]
fn a_registered_allocator_is_rebuilt_for_keys_that_others_read_once() {
    register("reads_once", (), |own| own.inner.control());
    for key in ["library:\"a.so\"", "malloc_async_own_pool:True", "cpu_alignment:256"] {
        let fixture = Fixture::new(8 * GIB, "backend:reads_once");
        let old = fixture.take(MIB);
        fixture.update(key).expect("a good string");
        assert_eq!(fixture.retired(), 1, "{key}");
        fixture.give(old);
    }
}

#[test]
fn a_key_that_is_read_when_an_allocator_is_built_switches() {
    let fixture = Fixture::new(8 * GIB, ASYNC);
    let old = fixture.take(MIB);
    fixture.update("malloc_async_own_pool:True").expect("a good string");
    assert_eq!(fixture.retired(), 1, "the old one still has a block");
    fixture.give(old);
    assert_eq!(fixture.retired(), 0);
    let old = fixture.take(MIB);
    fixture.update("malloc_async_own_pool:True").expect("a good string");
    assert_eq!(fixture.retired(), 0, "it was reported before");
    fixture.give(old);
    let fixture = Fixture::new(8 * GIB, "backend:cpu");
    let old = fixture.take(MIB);
    fixture.update("cpu_alignment:256").expect("a good string");
    assert_eq!(fixture.retired(), 1);
    let new = fixture.take(100);
    assert_eq!(new.address() % 256, 0);
    [old, new].into_iter().for_each(|block| fixture.give(block));
    // Keys of other backends have no effect here.
    let fixture = Fixture::new(8 * GIB, NATIVE);
    let old = fixture.take(MIB);
    fixture.update("malloc_async_own_pool:True,cpu_alignment:256").expect("a good string");
    assert_eq!(fixture.retired(), 0);
    fixture.give(old);
}

#[test]
fn a_request_that_was_rescued_is_no_failure_of_an_allocator_without_hooks() {
    register("hookless", (), |own| {
        let mut control = Control::default();
        control.counters = own.inner.control().counters;
        control
    });
    let fixture = Fixture::new(200 * MIB, NATIVE);
    let old: Vec<_> = (0..16).map(|_| fixture.take(12 * MIB)).collect();
    fixture.switch("backend:hookless");
    let mut old = old.into_iter();
    fixture.give(old.next().expect("sixteen"));
    let big = fixture.take(16 * MIB);
    let counters = fixture.counters();
    assert_eq!(counters.statistics().num_ooms, 0, "it was served");
    fixture.fail(60 * MIB, HOME);
    assert_eq!(counters.statistics().num_ooms, 1);
    old.chain([big]).for_each(|block| fixture.give(block));
}
