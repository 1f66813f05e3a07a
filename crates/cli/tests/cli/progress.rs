//! What long work uses of its caller: reports, threads, the clock and cancellation.

use std::thread::ThreadId;

use rayon::prelude::*;
use stratalloc_analysis::{
    Advice, AdviceOptions, Capacity, Memory, Need, Recording, SearchOptions, Side, measure,
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
