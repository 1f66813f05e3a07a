#!/usr/bin/env bash
# Instructions an operation of each case of benches/instructions, against the figures that are kept there.
# Needs valgrind; installs the runner of the benchmarks if it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v valgrind >/dev/null || { echo "valgrind is missing: apt-get install valgrind" >&2; exit 1; }
summaries=$(mktemp)
trap 'rm -f "$summaries"' EXIT
version=$(sed -n 's/^gungraun = .*"=\([0-9.]*\)".*/\1/p' benches/instructions/Cargo.toml)
# The runner of this very version; it only starts valgrind, so it is built the quick way.
cargo install --quiet --locked --debug gungraun-runner --version "$version"
export GUNGRAUN_RUNNER=${CARGO_HOME:-$HOME/.cargo}/bin/gungraun-runner

CARGO_PROFILE_DIST_DEBUG=false cargo bench --profile "${PROFILE:-dist}" -p stratalloc-instructions --features count --bench instructions -- --output-format=json \
    >"$summaries"
cargo run --quiet -p stratalloc-instructions --features compare --bin compare -- benches/instructions/figures.json <"$summaries"
