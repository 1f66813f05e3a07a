//! Cost of a cache hit: `cargo bench --features stacks --bench hot_path`.
//!
//! Configurations come from `ALLOC_CONF`; the default is every built-in strategy. The cases are those of
//! `stratalloc bench`, which runs on machines without cargo.

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use stratalloc::allocator::DeviceAllocator;
use stratalloc::config::{Config, KeyTable};
use stratalloc::history::{RecordOptions, RustStacks, StackLevel};
use stratalloc::ids::StreamId;
use stratalloc::registry::{self, BuildOptions};
use stratalloc::size::{KIB, MIB};
use stratalloc::strategies::Strategy;
use stratalloc_cli::cases::{Client, Raw, Typed};
use stratalloc_sim::Sim;

/// Further configurations of the native strategy, in addition to the default.
const NATIVE: [&str; 2] = [
    "backend:native,expandable_segments:True",
    "backend:native,garbage_collection_threshold:0.9,per_process_memory_fraction:0.9",
];

/// Returns the configurations to time. `pluggable` is not among them, because it needs a user's library:
/// set it in `ALLOC_CONF`.
fn confs() -> Vec<String> {
    if let Ok(text) = std::env::var("ALLOC_CONF") {
        return vec![text];
    }
    let names = registry::names().into_iter().filter(|name| name != "pluggable");
    names.map(|name| format!("backend:{name}")).chain(NATIVE.map(str::to_owned)).collect()
}

fn build(conf: &str, raw_addresses: bool) -> Strategy {
    let config = Config::parse(conf, &KeyTable::default())
        .unwrap_or_else(|error| panic!("{error}\n{}", error.caret(conf)));
    let driver = Arc::new(Sim::new(Default::default()));
    registry::build(&config, driver, BuildOptions { raw_addresses }).expect("the strategy is built")
}

fn pair<C: Client>(client: &C, bytes: u64) {
    let block = client.take(black_box(bytes), StreamId::DEFAULT);
    client.give(black_box(block));
}

fn cache_hit(criterion: &mut Criterion) {
    for conf in confs() {
        let mut group = criterion.benchmark_group(format!("cache_hit/sim/{conf}"));
        group.throughput(Throughput::Elements(1));
        for bytes in [512, 64 * KIB, 2 * MIB, 64 * MIB] {
            let strategy = build(&conf, false);
            pair(&Typed(&strategy), bytes);
            group.bench_with_input(BenchmarkId::new("typed", bytes), &bytes, |bencher, &bytes| {
                bencher.iter(|| pair(&Typed(&strategy), bytes));
            });
        }
        let strategy = build(&conf, true);
        if let Some(raw) = Raw::of(&strategy) {
            group.bench_function(BenchmarkId::new("raw", 512), |bencher| {
                bencher.iter(|| pair(&raw, 512));
            });
        }
        group.finish();
    }
}

/// Times an allocation and a free with the history on, which makes three entries and reads the clock
/// twice. Reading the clock is also timed on its own.
fn recording(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("recording/sim/backend:native");
    group.bench_function("clock", |bencher| bencher.iter(std::time::Instant::now));
    let strategy = build("backend:native", false);
    let history = strategy.control().recording.expect("it records").history();
    for (name, entries_max) in [("off", None), ("on", Some(1_000_000))] {
        if let Some(entries_max) = entries_max {
            history.start(&RecordOptions::at_most(entries_max));
        }
        group.bench_function(name, |bencher| bencher.iter(|| pair(&Typed(&strategy), 512)));
    }
    group.finish();
}

/// Calls `what` with this many additional stack frames below the caller.
#[inline(never)]
fn below(functions: u32, what: &mut dyn FnMut()) {
    match functions {
        0 => what(),
        _ => below(functions - 1, what),
    }
    // Code after the call keeps it from being a tail call, which would leave no frame.
    black_box(functions);
}

/// Times an allocation that records its stack, and a walk over the stack alone, both at a depth of 30
/// frames.
fn stacks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("stacks/sim/backend:native");
    let strategy = build("backend:native", false);
    let history = strategy.control().recording.expect("it records").history();
    history.set_stack_provider(Some(Arc::new(RustStacks::new())));
    group.bench_function("walk", |bencher| {
        bencher.iter(|| {
            below(30, &mut || {
                backtrace::trace(|frame| {
                    black_box(frame.ip());
                    true
                });
            });
        });
    });
    let levels = [("never", StackLevel::Never), ("of_live_blocks", StackLevel::OfLiveBlocks)];
    for (name, level) in levels {
        history.start(&RecordOptions::at_most(1_000_000).with_stacks(level));
        group.bench_function(name, |bencher| {
            bencher.iter(|| below(30, &mut || pair(&Typed(&strategy), 512)));
        });
    }
    group.finish();
}

fn holes(criterion: &mut Criterion) {
    for conf in confs() {
        let mut group = criterion.benchmark_group(format!("holes/sim/{conf}"));
        for holes in [0usize, 4096, 65_536] {
            let strategy = build(&conf, false);
            let client = Typed(&strategy);
            let mut blocks: Vec<_> =
                (0..2 * holes).map(|_| Some(client.take(KIB, StreamId::DEFAULT))).collect();
            for block in blocks.iter_mut().step_by(2) {
                client.give(block.take().expect("each hole is made once"));
            }
            group.bench_function(BenchmarkId::from_parameter(holes), |bencher| {
                bencher.iter(|| pair(&client, KIB));
            });
            blocks.into_iter().flatten().for_each(|block| client.give(block));
        }
        group.finish();
    }
}

criterion_group!(benches, cache_hit, recording, stacks, holes);
criterion_main!(benches);
