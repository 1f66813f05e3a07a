#!/usr/bin/env bash
# Counts instructions per operation of each case in benches/instructions and compares them with the
# figures stored there. Needs valgrind. Installs the runner of the benchmarks if it is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 1; }
summaries=$(mktemp)
trap 'rm -f "$summaries"' EXIT
version=$(sed -n 's/^gungraun = .*"=\([0-9.]*\)".*/\1/p' benches/instructions/Cargo.toml)
# The runner must have the version of the library. It only starts valgrind, so a debug build suffices.
cargo install --quiet --locked --debug gungraun-runner --version "$version"
export GUNGRAUN_RUNNER=${CARGO_HOME:-$HOME/.cargo}/bin/gungraun-runner

profile=${PROFILE:-dist}
# The tools only load the recordings and repeat their requests. With these settings they compile in half of the
# time, and the figures are the same.
tools=profile.$profile.package.stratalloc-recording
CARGO_PROFILE_DIST_DEBUG=false cargo bench --profile "$profile" \
    --config "$tools.opt-level=2" --config "$tools.codegen-units=16" \
    -p stratalloc-instructions --features count --bench instructions -- --output-format=json >"$summaries"
cargo run --quiet -p stratalloc-instructions --features compare --bin compare -- benches/instructions/figures.json <"$summaries"
