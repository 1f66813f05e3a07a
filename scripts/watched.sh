#!/usr/bin/env bash
# Runs several versions of PyTorch's own allocator out of memory under `stratalloc.watch`, without a GPU, and
# checks the reports (python/tests/pytorch/watched.py). The versions run at the same time. Prints a line for
# each: the version, the seconds that the first report takes, and the setting that it names.
#
# usage: watched.sh [VERSION...]
#
# Has the same requirements as class_tests.sh. A version without a wheel is skipped, with one line of
# output.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(2.6.0 2.11.0 2.15.0)
# STRATALLOC_COMMAND is the command-line program. Without it, the program is built.
command=${STRATALLOC_COMMAND:-${CARGO_TARGET_DIR:-target}/debug/stratalloc}
[ -n "${STRATALLOC_COMMAND:-}" ] || cargo build --quiet --profile test --all-features -p stratalloc-cli --bin stratalloc
command=$(realpath "$command")
running=()
for version in "${versions[@]}"; do
    fetched=$(scripts/class_tests.sh --fetch "$version" | tail -n 1)
    if [ ! -d "$fetched/site/torch" ]; then
        echo "$version: ${fetched:-skipped}"
        continue
    fi
    PYTHONPYCACHEPREFIX=$fetched/compiled "${PYTHON:-python3}" python/tests/pytorch/watched.py \
        "$fetched/site" "$fetched/cuda/include" "$command" &
    running+=($!)
done
failed=
for process in "${running[@]}"; do wait "$process" || failed=yes; done
[ -z "$failed" ]
