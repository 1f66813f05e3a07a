//! The hints of a report are true: if a hint recommends a setting, the failed request succeeds with that
//! setting. If no setting would help, no hint recommends one.

use stratalloc::registry::build;

use crate::common::prelude::*;

/// A scenario, with sizes in MiB: the blocks that are allocated first, which of them are freed, and the
/// request that fails.
struct Scenario {
    total_mib: u64,
    /// A block that is allocated and freed before all others.
    warm_mib: Option<u64>,
    taken_mib: Vec<u64>,
    freed: fn(usize) -> bool,
    asked_mib: u64,
    /// Whether the device has virtual memory.
    has_pages: bool,
}

impl Scenario {
    fn of(total_mib: u64, taken_mib: Vec<u64>, freed: fn(usize) -> bool, asked_mib: u64) -> Self {
        Self { total_mib, warm_mib: None, taken_mib, freed, asked_mib, has_pages: true }
    }

    fn run(&self, conf: &str) -> Result<(), Box<OutOfMemory>> {
        let config = config(conf);
        let total_bytes = self.total_mib * MIB;
        let sim = Arc::new(Sim::new(SimOptions { total_bytes, ..SimOptions::default() }));
        let driver: Arc<dyn Driver> = if self.has_pages { sim } else { plain(sim) };
        let strategy = build(&config, driver, BuildOptions::default()).expect("it can be built");
        let ask = |mib: u64| match strategy.try_allocate(mib * MIB, HOME) {
            Ok(block) => Ok(block),
            Err(AllocError::OutOfMemory(report)) => Err(report),
            Err(other) => panic!("{other}"),
        };
        let give = |block| strategy.give(block);
        if let Some(mib) = self.warm_mib {
            give(ask(mib)?);
        }
        let taken = self.taken_mib.iter().map(|mib| ask(*mib)).collect::<Result<Vec<_>, _>>()?;
        let numbered = taken.into_iter().enumerate();
        numbered.filter(|(n, _)| (self.freed)(*n)).for_each(|(_, block)| give(block));
        give(ask(self.asked_mib)?);
        Ok(())
    }

    /// Returns the only hint of the failure under `conf`.
    #[track_caller]
    fn hint(&self, conf: &str) -> String {
        let report = self.run(conf).expect_err("it does not fit");
        assert_eq!(report.hints.len(), 1, "{report}");
        report.hints[0].clone()
    }

    /// Checks that the request fails under `before` with a hint that contains `words`, and succeeds
    /// under `after`.
    #[track_caller]
    fn is_saved(&self, before: &str, words: &str, after: &str) {
        let hint = self.hint(before);
        assert!(hint.contains(words), "{hint}");
        if let Err(report) = self.run(after) {
            panic!("{after} did not help:\n{report}");
        }
    }
}

const EXPANDABLE: &str = "expandable_segments:True";

#[test]
fn pieces_that_are_whole_pages_are_joined_by_expandable_segments() {
    let mut scenario = Scenario::of(160, vec![40; 4], |n| n % 2 == 0, 70);
    scenario.warm_mib = Some(160);
    let words =
        "80.00 MiB are cached but cut into pieces that are too small: expandable_segments:True";
    scenario.is_saved("", words, EXPANDABLE);
}

#[test]
fn nothing_is_promised_where_live_blocks_keep_every_page() {
    let scenario = Scenario::of(200, vec![2; 100], |n| n % 2 == 0, 30);
    for conf in ["", EXPANDABLE, "max_split_size_mb:20", "roundup_power2_divisions:4"] {
        let hint = scenario.hint(conf);
        assert!(hint.contains("100.00 MiB are cached but cut into pieces"), "{conf}: {hint}");
        assert!(!hint.contains("_segments") && !hint.contains("max_split"), "{conf}: {hint}");
    }
}

#[test]
fn a_limit_of_splits_is_named_where_a_large_segment_was_cut_and_pages_cannot_be_joined() {
    let mut scenario = Scenario::of(365, vec![9; 4], |n| n % 2 == 0, 170);
    (scenario.warm_mib, scenario.has_pages) = (Some(200), false);
    scenario.is_saved("", "max_split_size_mb:20 may help", "max_split_size_mb:20");
    scenario.has_pages = true;
    scenario.is_saved("", "expandable_segments:True may join them", EXPANDABLE);
}

#[test]
fn own_segments_are_named_where_pages_keep_what_they_would_release() {
    let scenario = Scenario::of(200, vec![12; 16], |n| n % 2 == 0, 13);
    scenario.is_saved(EXPANDABLE, "expandable_segments:False may help", "");
}

#[test]
fn a_smaller_shared_segment_is_named_where_only_the_segment_has_no_room() {
    let scenario = Scenario::of(38, vec![9; 2], |_| false, 9);
    let words = "18.00 MiB are free, enough for the request";
    scenario.is_saved("", words, "large_segment_size_mb:18");
    assert!(scenario.hint("").contains("large_segment_size_mb:18"));
}

#[test]
fn what_rounding_and_whole_blocks_cost_is_named_where_it_is_what_is_missing() {
    let rounded = Scenario::of(512, vec![33; 10], |_| false, 64);
    rounded.is_saved("roundup_power2_divisions:2", "roundup_power2_divisions rounds them up", "");
    let whole = Scenario { warm_mib: Some(100), ..Scenario::of(112, vec![85], |_| false, 14) };
    whole.is_saved("max_split_size_mb:20", "max_split_size_mb allocates large ones whole", "");
}

#[test]
fn settings_that_cost_nothing_here_are_not_named() {
    let scenario = Scenario::of(38, vec![9; 2], |_| false, 9);
    for conf in ["roundup_power2_divisions:8", "max_split_size_mb:20"] {
        let hint = scenario.hint(conf);
        assert!(hint.contains("large_segment_size_mb:18"), "{conf}: {hint}");
    }
    // The request would not fit without the rounding either.
    let report = Scenario::of(100, vec![], |_| false, 130).run("roundup_power2_divisions:2");
    assert_eq!(report.expect_err("it does not fit").hints, [""; 0]);
}

#[test]
fn pages_of_any_legal_size_can_be_counted() {
    // To choose a hint, the report adds up what expandable segments would hold: a page of 1 EiB for each
    // stream. The sum must not overflow.
    let settings = Settings { large_segment_bytes: 1 << 60, ..Settings::default() };
    let fixture = Fixture::with(400 * MIB, settings);
    (1..=16).for_each(|n| drop(fixture.take_on(12 * MIB, StreamId(n))));
    assert_eq!(fixture.fail(300 * MIB, HOME).hints, [""; 0]);
}

#[test]
fn idle_memory_of_a_private_pool_is_no_matter_of_streams() {
    for use_on_oom in [false, true] {
        let fixture = Fixture::new(200 * MIB, "");
        let pools = fixture.private_pools();
        let options = PoolOptions { use_on_oom, ..PoolOptions::default() };
        let pool = PoolId { capture: 0, user: 1 };
        pools.create_pool(pool, options).expect("it is new");
        fixture.give(fixture.take_in(pool, 150 * MIB, HOME));
        if use_on_oom {
            fixture.give(fixture.take(100 * MIB));
            continue;
        }
        let report = fixture.fail(100 * MIB, HOME);
        assert_eq!(report.hints.len(), 1, "{report}");
        let hint = &report.hints[0];
        assert!(hint.contains("150.00 MiB are cached in private pools"), "{hint}");
        assert!(hint.contains("use_on_oom"), "{hint}");
    }
}

#[test]
fn what_the_default_pool_caches_is_named_to_a_private_one() {
    let fixture = Fixture::new(20 * MIB, "");
    let _pinned = fixture.take(2 * MIB);
    let pools = fixture.private_pools();
    let pool = PoolId { capture: 0, user: 1 };
    pools.create_pool(pool, PoolOptions::default()).expect("it is new");
    let result = fixture.allocate(Request::new(12 * MIB, HOME).in_pool(pool));
    let report = result.expect_err("it is another pool's").to_string();
    assert!(report.contains("18.00 MiB are cached in other pools"), "{report}");
    assert!(!report.contains("streams, which"), "{report}");
}

#[test]
fn another_allocator_of_this_process_is_not_called_another_process() {
    let fixture = Fixture::new(200 * MIB, "");
    let held = fixture.device.allocate(150 * MIB).expect("it fits");
    let report = fixture.fail(100 * MIB, SIDE);
    let hint = report.hints.last().expect("another process holds it");
    assert!(hint.contains("150.00 MiB of the device are held by others"), "{hint}");
    assert!(hint.contains("other allocators and libraries in this process"), "{hint}");
    fixture.device.free(held, 150 * MIB).expect("it was allocated");
}

#[test]
fn a_report_omits_what_is_unknown() {
    let text = OutOfMemory::of(32 * MIB, StreamId(7)).to_string();
    assert_eq!(
        text,
        "out of memory on device 0: tried to allocate 32.00 MiB for a request of 32.00 MiB \
         (32.00 MiB rounded) on stream 7.\n"
    );
    let bare = OutOfMemory { requested_bytes: 5, ..OutOfMemory::default() }.to_string();
    assert_eq!(bare.lines().count(), 1, "{bare}");
    assert!(bare.contains("tried to allocate 5 bytes"), "{bare}");
}

#[test]
fn a_layers_limit_is_on_what_callers_hold() {
    let fixture = Fixture::with(400 * MIB, Settings::default());
    let limited = stratalloc::layers::limit::limit(fixture.allocator, 100 * MIB);
    let held = limited.take(60 * MIB);
    let refused = limited.try_allocate(50 * MIB, HOME).expect_err("it is above").to_string();
    assert!(refused.contains("Callers may hold 100.00 MiB and hold 60.00 MiB."), "{refused}");
    assert!(!refused.contains("It holds") && !refused.contains("No block is free"), "{refused}");
    limited.give(held);
}
