//! What long work uses of its caller: reports, threads, the clock and cancellation.

use std::thread::ThreadId;

use rayon::prelude::*;
use stratalloc_analysis::{
    Advice, AdviceOptions, Budget, Capacity, Memory, Need, Recording, SearchOptions, Side, Tried,
    measure,
};
use stratalloc_recording::{Limits, Progress, ReplayError, Silent, Stage, reader};

use super::trace;
use crate::common::prelude::*;

fn recording() -> Recording {
    let trace = reader::read(trace("cudagraph.default").as_ref(), &Limits::default());
    let trace = trace.expect("a recording");
    let config = Config::parse(&trace.conf, &KeyTable::default()).expect("a configuration");
    Recording::new(trace, Some(config), Memory::default())
}

fn searched(progress: &dyn Progress) -> Result<Advice, ReplayError> {
    Advice::search(&recording(), &AdviceOptions::default(), progress)
}

struct Backwards;

impl Progress for Backwards {
    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        (0..jobs).rev().for_each(job);
    }
}

struct Threads;

impl Progress for Threads {
    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        (0..jobs).into_par_iter().for_each(job);
    }
}

/// Cancels when it was asked so many times, and counts the questions.
struct Cancels {
    after: u64,
    asked: AtomicU64,
}

impl Progress for Cancels {
    fn is_cancelled(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed) >= self.after
    }
}

/// A clock that advances by a second each time it is read. Collects the reports and their threads.
#[derive(Default)]
struct Watched {
    seconds: AtomicU64,
    reports: Mutex<Vec<(Stage, u64, u64)>>,
    threads: Mutex<Vec<ThreadId>>,
}

impl Progress for Watched {
    fn at(&self, stage: Stage, done: u64, of: u64) {
        self.reports.lock().push((stage, done, of));
        self.threads.lock().push(thread::current().id());
    }

    fn elapsed(&self) -> Duration {
        Duration::from_secs(self.seconds.fetch_add(1, Ordering::Relaxed))
    }

    fn each(&self, jobs: usize, job: &(dyn Fn(usize) + Sync)) {
        Threads.each(jobs, job);
    }
}

impl Watched {
    fn reports(self) -> Vec<(Stage, u64, u64)> {
        let here = thread::current().id();
        assert!(self.threads.into_inner().into_iter().all(|thread| thread == here));
        self.reports.into_inner()
    }
}

#[test]
fn advice_does_not_depend_on_the_order_and_the_threads_of_jobs() {
    let advice = searched(&Silent).unwrap();
    assert!(!advice.is_cut_short && advice.tried.len() > 5);
    assert_eq!(searched(&Backwards).unwrap(), advice);
    assert_eq!(searched(&Threads).unwrap(), advice);
}

#[test]
fn a_cancelled_search_ends_before_its_next_replay() {
    for after in [0, 1, 2, 7, 30, 150, 1000] {
        let cancels = Cancels { after, asked: AtomicU64::new(0) };
        let error = searched(&cancels).unwrap_err();
        assert!(matches!(error, ReplayError::Cancelled(_)), "{after}: {error}");
        assert_eq!(cancels.asked.into_inner(), after + 1);
    }
}

#[test]
fn a_comparison_can_be_cancelled() {
    for after in [0, 10, 40] {
        let cancels = Cancels { after, asked: AtomicU64::new(0) };
        let error = Side::of(recording(), &cancels).unwrap_err();
        assert!(matches!(error, ReplayError::Cancelled(_)), "{after}: {error}");
    }
}

#[test]
fn only_a_clock_cuts_a_search_short() {
    let time = Duration::from_secs(3);
    let options = AdviceOptions { time, ..AdviceOptions::default() };
    let search = |progress: &dyn Progress| Advice::search(&recording(), &options, progress);
    assert!(search(&Watched::default()).unwrap().is_cut_short);
    assert!(!search(&Silent).unwrap().is_cut_short);
}

#[test]
fn a_search_that_is_cut_short_keeps_only_settings_with_all_orders_of_addresses() {
    let (recording, mut counts) = (recording(), Vec::new());
    for seconds in [0, 100, 200, 400, 100_000] {
        let time = Duration::from_secs(seconds);
        let options = AdviceOptions { time, quick: true, ..AdviceOptions::default() };
        let advice = Advice::search(&recording, &options, &Watched::default()).unwrap();
        assert!(advice.tried.contains(&advice.recorded), "{seconds}");
        let is_sure = |tried: &Tried| tried.need.all_orders || tried.need.needs_bytes.is_none();
        assert!(!advice.is_cut_short || advice.tried.iter().all(is_sure), "{advice:?}");
        counts.push((advice.tried.len(), advice.is_cut_short));
    }
    assert_eq!(counts[0], (1, true));
    assert!(counts.is_sorted_by_key(|(tried, _)| *tried) && !counts[4].1, "{counts:?}");
    let hurried = AdviceOptions { always_recorded: false, ..AdviceOptions::default() };
    for seconds in [0, 1, 7, 20] {
        let options = AdviceOptions { time: Duration::from_secs(seconds), ..hurried };
        let error = Advice::search(&recording, &options, &Watched::default()).unwrap_err();
        assert!(matches!(error, ReplayError::OutOfTime), "{seconds}: {error}");
    }
}

#[test]
fn without_time_for_replays_a_limit_is_that_of_the_failed_requests() {
    let read = || reader::read(trace("unet.frac045").as_ref(), &Limits::default()).expect("it is");
    let config = Config::parse(&read().conf, &KeyTable::default()).ok();
    let (watched, memory) = (Watched::default(), Memory::default());
    let budget = Budget::new(&watched, Duration::ZERO);
    let hurried = Recording::timed(read(), config.clone(), memory, &budget);
    let bare = Recording::unverified(read(), config.clone(), memory);
    assert_eq!((hurried.limit, hurried.is_verified), (bare.limit, false));
    assert!(Recording::new(read(), config, memory).is_verified);
}

#[test]
fn a_search_reports_settings_on_the_calling_thread() {
    let watched = Watched::default();
    let options = AdviceOptions { quick: true, time: Duration::MAX, ..AdviceOptions::default() };
    Advice::search(&recording(), &options, &watched).unwrap();
    let reports = watched.reports();
    assert!(reports.iter().all(|(stage, done, of)| *stage == Stage::Settings && done <= of));
    assert!(reports.is_sorted_by_key(|(_, done, _)| *done));
    let (_, done, of) = reports.last().unwrap();
    assert_eq!(done, of);
}

#[test]
fn passes_are_timed_by_the_clock_and_reported() {
    let (recording, config) = (recording(), Config::default());
    let passes = |passes, progress: &dyn Progress| {
        measure(&recording, &config, Capacity::Limited, passes, progress).unwrap().run
    };
    let watched = Watched::default();
    let run = passes(3, &watched);
    assert!(run.wall_s >= 3.0 && run.ns_per_op > 0.0, "{run:?}");
    assert_eq!(watched.reports(), [1, 2, 3].map(|done| (Stage::Replay, done, 3)));
    let untimed = passes(3, &Silent);
    assert_eq!((untimed.wall_s, untimed.ns_per_op), (0.0, 0.0));
    // A search replays once on each device, and reports none of these passes.
    let watched = Watched::default();
    Need::search(&recording, &config, &SearchOptions::QUICK, &watched).unwrap();
    assert_eq!(watched.reports(), []);
}
