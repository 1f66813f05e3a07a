//! Counts the instructions of each case with valgrind. `scripts/instructions.sh` runs this and compares
//! the results.

use gungraun::Callgrind;
use gungraun::prelude::*;
use stratalloc_instructions::{CASES, Case, Prepared, Rounds};

fn few(case: Case) -> Prepared {
    case.prepare(Rounds::Few)
}

fn many(case: Case) -> Prepared {
    case.prepare(Rounds::Many)
}

#[library_benchmark]
#[benches::few(iter = CASES, setup = few)]
#[benches::many(iter = CASES, setup = many)]
fn rounds(mut prepared: Prepared) -> Prepared {
    prepared.run();
    prepared
}

library_benchmark_group!(name = cases, benchmarks = rounds);
// Counts instructions only, because simulating caches would double the time.
main!(
    config = LibraryBenchmarkConfig::default().tool(Callgrind::with_args(["--cache-sim=no"])),
    library_benchmark_groups = cases
);
