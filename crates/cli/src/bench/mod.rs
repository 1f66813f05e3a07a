//! `stratalloc bench`: times the hot path of any configuration, and basic operations of the machine
//! (floors).

pub mod cases;
mod cells;
mod floors;
mod host_memory;
pub(super) mod loops;
mod results;
mod turns;

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;

use stratalloc::config::Config;
use stratalloc::driver::Driver;
use stratalloc::ids::StreamId;
use stratalloc::registry::BuildOptions;
use stratalloc::strategies::Strategy;

use super::device::{Device, OpenDevice};
use super::outcome::{BadArguments, Outcome, Result};
use super::settings;
use super::show::spinner;
use super::values;
use cases::{Effort, Pool, Tail, Together, Typed};
use cells::BenchCase;
use loops::Loops;
use results::{Results, Subject};

/// Time the hot path, and the floors of this machine.
#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// Configuration to time. Can be given several times. Default: the environment's, or native.
    #[arg(long, value_parser = values::conf(), hide_possible_values = true)]
    conf: Vec<String>,
    /// Device: sim, host or cuda:N.
    #[arg(long, default_value = "sim")]
    device: Device,
    /// Time only cases whose name begins with this. Can be given several times. Floors have names, too.
    #[arg(long)]
    case: Vec<String>,
    /// Largest number of threads for cases with several: 1 to 1024.
    #[arg(long, default_value_t = default_threads(), value_parser = threads)]
    threads: usize,
    /// Read lines such as `pair:512B backend:native` from standard input, and time one case of one
    /// thread briefly for each. For programs that time other allocators in between. `driver` stands for
    /// the device's stream-ordered pool without an allocator. `floor:lock_pair` needs no configuration;
    /// other floors are not timed. Needs --json; excludes --case and --conf.
    #[arg(long, requires = "json", conflicts_with_all = ["conf", "case"])]
    turns: bool,
}

impl Bench {
    /// Builds an allocator with an empty cache, on a thread for which the device is current.
    fn build(&self, config: &Config, raw_addresses: bool, streams: usize) -> Result<Built> {
        let (OpenDevice { driver, .. }, streams) = self.open(streams)?;
        let options = BuildOptions { raw_addresses };
        let strategy = stratalloc::registry::build(config, Arc::clone(&driver), options)?;
        Ok(Built { strategy, driver, streams })
    }

    /// Opens the device's stream-ordered pool and creates streams.
    fn open_pool(&self, streams: usize) -> Result<(Pool, Vec<StreamId>)> {
        let (opened, streams) = self.open(streams)?;
        Ok((Pool::of(opened.driver)?, streams))
    }

    fn open(&self, streams: usize) -> Result<(OpenDevice, Vec<StreamId>)> {
        let opened = self.device.open(None)?;
        opened.driver.make_current()?;
        let streams = opened.streams(streams)?;
        Ok((opened, streams))
    }
}

fn threads(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=1024).contains(count));
    count.ok_or_else(|| "expected a whole number from 1 to 1024".to_owned())
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).clamp(2, 16)
}

/// The number of rounds in which everything is timed. Within a round the subjects take turns, so that
/// other load on the machine affects all alike.
const ROUNDS: usize = 5;
/// No further round of a case begins after this much time per subject.
const ROUNDS_TIME: Duration = Duration::from_secs(4);

pub(crate) fn run(args: &Bench, loops: &Loops) -> Result<Outcome> {
    if args.turns {
        return turns::run(args, loops);
    }
    let confs = settings::confs_or_default(&args.conf)?;
    // Keeps the device's context alive between cases.
    let _open = args.device.open(None)?;
    let device = args.device.to_string();
    let subject = |conf: &str| Subject { conf: conf.to_owned(), device: device.clone() };
    let timed = confs.iter().map(|(text, config)| (subject(text), TimedKind::Allocator(config)));
    let mut timed: Vec<_> = timed.collect();
    let has = |backend| confs.iter().any(|(_, config)| config.settings().backend == backend);
    if has("cudaMallocAsync") {
        timed.push((subject("driver"), TimedKind::DriverPool));
    }
    let (subjects, timed) = timed.into_iter().unzip();
    let (results, bar) = (Results::default(), spinner());
    let mut session = Session { args, loops, subjects, timed, results, bar };
    session.floors()?;
    if has("cpu") {
        session.other_host_memory()?;
    }
    session.cells(&cells::FIRST)?;
    session.latencies()?;
    session.cells(&cells::LAST)?;
    session.cells(&cells::RAW)?;
    if has("cpu") {
        session.cells(&cells::of_host_memory())?;
    }
    session.bar.finish_and_clear();
    if session.results.is_empty() {
        return Err(BadArguments(format!("no case begins with {:?}", args.case)).into());
    }
    session.results.print()?;
    Ok(Outcome::Good)
}

/// An allocator on an empty device, and streams of that device.
struct Built {
    strategy: Strategy,
    driver: Arc<dyn Driver>,
    streams: Vec<StreamId>,
}

/// The kind of a subject of the benchmark.
#[derive(Clone, Copy)]
enum TimedKind<'a> {
    Allocator(&'a Config),
    /// The driver's stream-ordered pool, used directly: the reference for `backend:cudaMallocAsync`.
    DriverPool,
}

/// The result of one timing; `None` if the case is not supported.
type Timed<T> = Result<Option<T>>;

/// Returns the result of one thread as that of a group.
fn one(ns: f64) -> Together {
    Together { ns, mops: 1000.0 / ns }
}

struct Session<'a> {
    args: &'a Bench,
    loops: &'a Loops,
    /// The names of the timed subjects in the results.
    subjects: Vec<Subject>,
    timed: Vec<TimedKind<'a>>,
    results: Results,
    bar: ProgressBar,
}

impl Session<'_> {
    fn wants(&self, case: &str) -> bool {
        self.args.case.is_empty() || self.args.case.iter().any(|c| case.starts_with(c.as_str()))
    }

    /// Times each of `count` subjects in turn, for several rounds if these are quick enough.
    fn rounds<T>(
        &self,
        case: &str,
        count: usize,
        mut time: impl FnMut(usize) -> Timed<T>,
    ) -> Result<Vec<Vec<T>>> {
        self.bar.set_message(case.to_owned());
        self.bar.tick();
        let mut shown: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
        let start = Instant::now();
        for round in 0..ROUNDS {
            if round > 0 && start.elapsed() > ROUNDS_TIME * u32::try_from(count).unwrap_or(1) {
                break;
            }
            for (at, shown) in shown.iter_mut().enumerate() {
                shown.extend(time(at)?);
            }
        }
        Ok(shown)
    }

    /// Times a case for each number of threads and each subject. `time` gets the subject's index.
    fn each(
        &mut self,
        case: &str,
        threads: &[usize],
        subjects: &[Subject],
        time: impl Fn(&Self, usize, usize) -> Timed<Together>,
    ) -> Result<()> {
        if !self.wants(case) {
            return Ok(());
        }
        let cells = threads.iter().flat_map(|n| (0..subjects.len()).map(|at| (at, *n)));
        let cells: Vec<(usize, usize)> = cells.collect();
        let shown =
            self.rounds(case, cells.len(), |cell| time(self, cells[cell].0, cells[cell].1))?;
        for ((at, threads), times) in cells.into_iter().zip(shown) {
            self.results.add(case, threads, &subjects[at], times)?;
        }
        Ok(())
    }

    /// Times single steps, and adds three quantiles as cases whose names begin with `prefix`.
    fn tails(
        &mut self,
        prefix: &str,
        subjects: &[Subject],
        time: impl Fn(&Self, usize) -> Timed<Tail>,
    ) -> Result<()> {
        let cases = [("p50", 500), ("p99", 990), ("p999", 999)]
            .map(|(name, part)| (format!("{prefix}{name}"), part));
        if !cases.iter().any(|(case, _)| self.wants(case)) {
            return Ok(());
        }
        let shown = self.rounds(prefix, subjects.len(), |at| time(self, at))?;
        for (case, part) in cases.iter().filter(|(case, _)| self.wants(case)).collect::<Vec<_>>() {
            for (subject, tails) in subjects.iter().zip(&shown) {
                let times = tails.iter().map(|tail| one(tail.quantile(*part)));
                self.results.add(case, 1, subject, times.collect())?;
            }
        }
        Ok(())
    }

    /// Times the basic operations of the machine.
    fn floors(&mut self) -> Result<()> {
        let (machine, counts) = ([Subject::machine()], self.thread_counts());
        let floor = |ns: f64| Ok(Some(one(ns)));
        self.each("floor:atomic_rmw", &[1], &machine, |_, _, _| floor(floors::atomic_rmw()))?;
        self.each("floor:lock_pair", &counts, &machine, |_, _, n| Ok(Some(floors::lock_pair(n))))?;
        self.each(
            "floor:malloc_pair_512B",
            &[1],
            &machine,
            |_, _, _| floor(floors::malloc_pair()),
        )?;
        self.tails("floor:tail_", &machine, |_, _| Ok(Some(floors::tail())))
    }

    /// Returns the numbers of threads to use: 1, 2, 4 and so on, up to the largest one.
    fn thread_counts(&self) -> Vec<usize> {
        let most = self.args.threads.max(1);
        let mut counts: Vec<usize> =
            std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n < most).collect();
        counts.push(most);
        counts
    }

    /// Times cases of all subjects, each with a new allocator.
    fn cells(&mut self, cells: &[(&str, BenchCase)]) -> Result<()> {
        let (subjects, counts) = (self.subjects.clone(), self.thread_counts());
        for (case, cell) in cells {
            let threads = if cell.is_crowd() { counts.as_slice() } else { &[1] };
            self.each(case, threads, &subjects, |session, at, threads| {
                let (args, loops, what) = (session.args, session.loops, session.timed[at]);
                cells::time(*cell, threads, what, args, loops, Effort::ROUND)
            })?;
        }
        Ok(())
    }

    /// Times single steps of all subjects.
    fn latencies(&mut self) -> Result<()> {
        self.tails("tail:", &self.subjects.clone(), |session, at| match session.timed[at] {
            TimedKind::Allocator(config) => {
                let built = session.args.build(config, false, 0)?;
                Ok(Some((session.loops.tail)(&Typed(&built.strategy))))
            }
            TimedKind::DriverPool => Ok(None),
        })
    }

    /// Times other allocators of host memory.
    fn other_host_memory(&mut self) -> Result<()> {
        if !host_memory::TOUCHED.iter().any(|(case, _)| self.wants(case)) {
            return Ok(());
        }
        let (names, others): (Vec<_>, Vec<_>) = host_memory::others().into_iter().unzip();
        let subject = |name: &str| Subject { conf: name.to_owned(), device: "host".to_owned() };
        let subjects: Vec<Subject> = names.into_iter().map(subject).collect();
        for (case, bytes) in host_memory::TOUCHED {
            self.each(case, &[1], &subjects, |_, at, _| {
                Ok(Some(one(host_memory::touch(&others[at], bytes))))
            })?;
        }
        Ok(())
    }
}
