//! `stratalloc bench`: the hot path of any configuration, timed beside the floors of the machine.

pub mod cases;
mod cells;
mod floors;
mod host_memory;
pub(super) mod loops;
mod turns;

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::allocator::DeviceAllocator;
use crate::config::Config;
use crate::driver::Driver;
use crate::ids::StreamId;
use crate::registry::BuildOptions;
use crate::strategies::Strategy;

use super::device::Device;
use super::outcome::{BadWords, Outcome, out};
use super::settings;
use super::show::shown_conf;
use cases::{Effort, Pool, Raw, Tail, Together, Typed};
use cells::Cell;
use loops::Loops;

/// Arguments of `bench`.
#[derive(Args, Debug)]
pub(crate) struct Bench {
    /// A configuration to time; can be given several times. Default: the environment's, or native.
    #[arg(long)]
    conf: Vec<String>,
    /// sim, host or cuda:N.
    #[arg(long, default_value = "sim")]
    device: Device,
    /// Only cases whose name begins with this; can be given several times. Floors have names too.
    #[arg(long)]
    case: Vec<String>,
    /// The most threads of the cases that use several: 1 to 1024.
    #[arg(long, default_value_t = default_threads(), value_parser = threads)]
    threads: usize,
    /// One JSON object a line.
    #[arg(long)]
    pub(crate) json: bool,
    /// Time one case of one thread, briefly, for each line on the input, as `pair:512B backend:native`: for
    /// programs that time other allocators in between. `driver` stands for the device's stream-ordered pool
    /// with nothing on top; `floor:lock_pair` needs none, and other floors are not timed. With --json;
    /// without --case and --conf.
    #[arg(long, requires = "json", conflicts_with_all = ["conf", "case"])]
    turns: bool,
}

impl Bench {
    /// An allocator with an empty cache of its own, on a thread that works with the device as a program's
    /// threads do.
    fn build(
        &self,
        config: &Config,
        raw_addresses: bool,
        streams: usize,
    ) -> Result<Built, Box<dyn Error>> {
        let opened = self.device.open(None)?;
        opened.driver.make_current()?;
        let streams = opened.streams(streams)?;
        let options = BuildOptions { raw_addresses };
        let driver = opened.driver;
        let strategy = crate::registry::build(config, Arc::clone(&driver), options)?;
        Ok(Built { strategy, driver, streams })
    }

    /// The device's stream-ordered pool, and streams.
    fn open_pool(&self, streams: usize) -> Result<(Pool, Vec<StreamId>), Box<dyn Error>> {
        let opened = self.device.open(None)?;
        opened.driver.make_current()?;
        let streams = opened.streams(streams)?;
        Ok((Pool::of(opened.driver)?, streams))
    }
}

fn threads(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| (1..=1024).contains(count));
    count.ok_or_else(|| "expected a whole number from 1 to 1024".to_owned())
}

fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).clamp(2, 16)
}

#[derive(Serialize)]
struct Row<'a> {
    case: &'a str,
    threads: usize,
    conf: &'a str,
    device: &'a str,
    ns_per_op: f64,
    mops: f64,
}

/// How often tails are timed; the least of each is reported.
const TAIL_REPETITIONS: usize = 5;

/// How often all numbers of threads are timed in turn, at most.
const CROWD_ROUNDS: usize = 5;
/// After so much time no further round begins.
const CROWD_TIME: Duration = Duration::from_secs(4);

pub(crate) fn run(args: &Bench, loops: &Loops) -> Result<Outcome, Box<dyn Error>> {
    if args.turns {
        return turns::run(args, loops);
    }
    let confs = settings::confs_or_default(&args.conf)?;
    let device = args.device.to_string();
    let mut printer = Printer { args, loops, conf: "", device: "", done: 0 };
    printer.floors()?;
    if confs.iter().any(|(_, config)| config.settings().backend == "cpu") {
        printer.other_host_memory()?;
    }
    for (text, config) in &confs {
        printer.conf = text;
        printer.device = &device;
        let build = |raw_addresses, streams| args.build(config, raw_addresses, streams);
        printer.typed(&build)?;
        printer.raw(&build)?;
        if config.settings().backend == "cpu" {
            printer.host_memory(config)?;
        }
    }
    if confs.iter().any(|(_, config)| config.settings().backend == "cudaMallocAsync") {
        printer.conf = "driver";
        printer.driver_alone()?;
    }
    if printer.done == 0 {
        return Err(BadWords(format!("no case begins with {:?}", args.case)).into());
    }
    Ok(Outcome::Good)
}

/// An allocator on an empty device, and streams of that.
struct Built {
    strategy: Strategy,
    driver: Arc<dyn Driver>,
    streams: Vec<StreamId>,
}

/// Makes one that finds bare addresses or does not, with so many streams.
type Build<'b> = dyn Fn(bool, usize) -> Result<Built, Box<dyn Error>> + 'b;

struct Printer<'a> {
    args: &'a Bench,
    loops: &'a Loops,
    conf: &'a str,
    device: &'a str,
    done: usize,
}

impl Printer<'_> {
    fn wants(&self, case: &str) -> bool {
        self.args.case.is_empty() || self.args.case.iter().any(|c| case.starts_with(c.as_str()))
    }

    fn row(&mut self, case: &str, threads: usize, ns: f64, mops: f64) -> std::io::Result<()> {
        if self.done == 0 && !self.args.json {
            writeln!(
                out(),
                "{:<24} {:>7} {:>12} {:>10}  conf",
                "case",
                "threads",
                "ns_per_op",
                "mops"
            )?;
        }
        self.done += 1;
        let ns_per_op = (ns * 100.0).round() / 100.0;
        let mops = (mops * 1000.0).round() / 1000.0;
        if self.args.json {
            let (conf, device) = (self.conf, self.device);
            let row = Row { case, threads, conf, device, ns_per_op, mops };
            writeln!(out(), "{}", serde_json::to_string(&row)?)
        } else {
            let conf = shown_conf(self.conf);
            writeln!(out(), "{case:<24} {threads:>7} {ns_per_op:>12.1} {mops:>10.2}  {conf}")
        }
    }

    fn single(&mut self, case: &str, time: impl FnOnce() -> f64) -> std::io::Result<()> {
        if !self.wants(case) {
            return Ok(());
        }
        let ns = time();
        self.row(case, 1, ns, 1000.0 / ns)
    }

    fn tails(&mut self, prefix: &str, time: impl Fn() -> Tail) -> std::io::Result<()> {
        let cases = [("p50", 500), ("p99", 990), ("p999", 999)]
            .map(|(name, part)| (format!("{prefix}{name}"), part));
        if !cases.iter().any(|(case, _)| self.wants(case)) {
            return Ok(());
        }
        let tails: Vec<Tail> = (0..TAIL_REPETITIONS).map(|_| time()).collect();
        for (case, part) in cases {
            if self.wants(&case) {
                let least = tails.iter().map(|t| t.quantile(part)).fold(f64::MAX, f64::min);
                self.row(&case, 1, least, 1000.0 / least)?;
            }
        }
        Ok(())
    }

    fn floors(&mut self) -> Result<(), Box<dyn Error>> {
        self.single("floor:atomic_rmw", floors::atomic_rmw)?;
        self.crowds("floor:lock_pair", |threads| Ok(floors::lock_pair(threads)))?;
        self.single("floor:malloc_pair_512B", floors::malloc_pair)?;
        self.tails("floor:tail_", floors::tail)?;
        Ok(())
    }

    /// A case for each number of threads. All of them in turn, several times if that is quick, so that
    /// an hour in which others use the machine is the same for all; each shows the median of its times.
    fn crowds(
        &mut self,
        case: &str,
        mut time: impl FnMut(usize) -> Result<Together, Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        if !self.wants(case) {
            return Ok(());
        }
        let mut rows: Vec<_> = self.thread_counts().into_iter().map(|n| (n, Vec::new())).collect();
        let start = Instant::now();
        for round in 0..CROWD_ROUNDS {
            if round > 0 && start.elapsed() > CROWD_TIME {
                break;
            }
            for (threads, times) in &mut rows {
                times.push(time(*threads)?);
            }
        }
        for (threads, times) in rows {
            let Together { ns, mops } = cases::median(times);
            self.row(case, threads, ns, mops)?;
        }
        Ok(())
    }

    /// 1, 2, 4 and so on, up to the most.
    fn thread_counts(&self) -> Vec<usize> {
        let most = self.args.threads.max(1);
        let mut counts: Vec<usize> =
            std::iter::successors(Some(1), |n| Some(n * 2)).take_while(|n| *n < most).collect();
        counts.push(most);
        counts
    }

    /// Cases of one thread, each on an allocator of its own.
    fn cells(&mut self, cells: &[(&str, Cell)], build: &Build<'_>) -> Result<(), Box<dyn Error>> {
        for (case, cell) in cells.iter().filter(|(case, _)| self.wants(case)).collect::<Vec<_>>() {
            if let Some(ns) = cells::time(*cell, build, self.loops, Effort::WHOLE)? {
                self.row(case, 1, ns, 1000.0 / ns)?;
            }
        }
        Ok(())
    }

    fn typed(&mut self, build: &Build<'_>) -> Result<(), Box<dyn Error>> {
        let loops = self.loops;
        self.cells(&cells::FIRST, build)?;
        let Built { strategy, .. } = build(false, 0)?;
        self.tails("tail:", || (loops.tail)(&Typed(&strategy)))?;
        for (case, own) in [("threads:own_stream", true), ("threads:one_stream", false)] {
            self.crowds(case, |threads| {
                let Built { strategy, driver, streams } =
                    build(false, if own { threads } else { 1 })?;
                Ok((loops.threads)(&Typed(&strategy), &*driver, threads, &streams))
            })?;
        }
        self.cells(&cells::LAST, build)
    }

    /// What only memory of the host has: threads with caches of their own, and pages that are touched.
    fn host_memory(&mut self, config: &Config) -> Result<(), Box<dyn Error>> {
        self.crowds("threads:own_guard", |threads| {
            Ok(host_memory::guards(config.settings(), threads)?)
        })?;
        let memory = host_memory::own(config.settings())?;
        self.touch(&*memory)?;
        Ok(())
    }

    fn touch(&mut self, memory: &dyn host_memory::Memory) -> std::io::Result<()> {
        let mut cases = host_memory::TOUCHED.into_iter();
        cases.try_for_each(|(case, bytes)| self.single(case, || host_memory::touch(memory, bytes)))
    }

    /// Other allocators of host memory.
    fn other_host_memory(&mut self) -> std::io::Result<()> {
        if !host_memory::TOUCHED.iter().any(|(case, _)| self.wants(case)) {
            return Ok(());
        }
        for (name, memory) in host_memory::others() {
            self.conf = name;
            self.device = "host";
            self.touch(&*memory)?;
        }
        Ok(())
    }

    /// The driver's stream-ordered pool with nothing on top: what `cudaMallocAsync` is held against.
    fn driver_alone(&mut self) -> Result<(), Box<dyn Error>> {
        let args = self.args;
        let open = |streams| args.open_pool(streams);
        for (case, cell) in cells::FIRST {
            if self.wants(case)
                && let Some(ns) = cells::time_pool(cell, open, Effort::WHOLE)?
            {
                self.row(case, 1, ns, 1000.0 / ns)?;
            }
        }
        self.crowds("threads:own_stream", |threads| {
            let (pool, streams) = args.open_pool(threads)?;
            Ok(cases::threads(&pool, pool.driver(), threads, &streams))
        })
    }

    /// The same by bare address, where the strategy can.
    fn raw(&mut self, build: &Build<'_>) -> Result<(), Box<dyn Error>> {
        let loops = self.loops;
        self.cells(&cells::RAW, build)?;
        if build(true, 0)?.strategy.raw_addresses().is_none() {
            return Ok(());
        }
        self.crowds("threads_raw:own_stream", |threads| {
            let Built { strategy, driver, streams } = build(true, threads)?;
            let raw = strategy.raw_addresses().ok_or("it has no bare addresses any more")?;
            Ok((loops.threads_raw)(&Raw(raw), &*driver, threads, &streams))
        })
    }
}
