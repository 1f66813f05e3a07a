//! The cost of an operation in a real program: `cargo bench --bench replay`.
//!
//! Each iteration replays a whole recording with a warm cache. The configuration comes from
//! `ALLOC_CONF`, or else from the list below.

use std::path::Path;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use stratalloc::config::{Config, KeyTable};
use stratalloc::registry::{self, BuildOptions};
use stratalloc_recording::{Limits, Workload, reader, run};
use stratalloc_sim::{EventMode, Sim, SimOptions};

const BUILT_IN: [&str; 2] = ["backend:native", "backend:native,max_split_size_mb:256"];
const RECORDINGS: [&str; 3] = ["resnet50.default", "multistream.default", "serve.default"];

fn confs() -> Vec<String> {
    match std::env::var("ALLOC_CONF") {
        Ok(text) => vec![text],
        Err(_) => BUILT_IN.map(str::to_owned).to_vec(),
    }
}

fn replay(criterion: &mut Criterion) {
    for name in RECORDINGS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces");
        let path = folder.join(format!("{name}.pickle.xz"));
        let trace = reader::read(&path, &Limits::default()).expect("shipped recordings are read");
        let workload = Workload::of(&trace, 150_109_880_320);
        let mut group = criterion.benchmark_group(format!("replay/sim/{name}"));
        group.throughput(Throughput::Elements(workload.ops.len() as u64));
        for conf in confs() {
            let config = Config::parse(&conf, &KeyTable::default())
                .unwrap_or_else(|error| panic!("{error}\n{}", error.caret(&conf)));
            let options = SimOptions { event_mode: EventMode::Manual, ..SimOptions::default() };
            let sim = Arc::new(Sim::new(options));
            let strategy = registry::build(&config, Arc::clone(&sim) as _, BuildOptions::default())
                .expect("the strategy is built");
            group.bench_function(&conf, |bencher| {
                bencher.iter(|| {
                    run(
                        &workload,
                        &strategy,
                        Some(Arc::<Sim>::clone(&sim)),
                        1,
                        &stratalloc_recording::Silent,
                    )
                    .expect("the recording fits the device")
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, replay);
criterion_main!(benches);
