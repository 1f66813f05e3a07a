#!/usr/bin/env bash
# Records random histories of several versions of PyTorch's own allocator without a GPU, and verifies
# each (python/tests/pytorch/histories.py). Prints a table. Histories that a replay does not repeat
# exactly are kept in the folder target/histories/VERSION; `stratalloc replay --verify` shows the first
# difference.
#
# usage: versions.sh [VERSION...] [--histories N]
#
# Has the same requirements as class_tests.sh. A version without a wheel is skipped, with one line of
# output.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=() histories=200
while [ $# -gt 0 ]; do
    case $1 in
        --histories) histories=$2 && shift 2 ;;
        *) versions+=("$1") && shift ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=(2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}

# STRATALLOC_COMMAND is the command-line program. Without it, the program is built.
command=${STRATALLOC_COMMAND:-$target/debug/stratalloc}
[ -n "${STRATALLOC_COMMAND:-}" ] || cargo build --quiet --all-features -p stratalloc-tools --bin stratalloc
printf '%-10s%10s%8s%12s\n' version histories exact 'not exact'
failed=
for version in "${versions[@]}"; do
    fetched=$(scripts/class_tests.sh --fetch "$version" | tail -n 1)
    if [ ! -d "$fetched/site/torch" ]; then
        echo "$version: ${fetched:-skipped}"
        continue
    fi
    kept=$target/histories/$version
    rm -rf "$kept"
    "$python" python/tests/pytorch/histories.py "$fetched/site" "$fetched/cuda/include" "$command" \
        "$kept" --histories "$histories" || failed=yes
done
[ -z "$failed" ] || { echo "histories that are not exact: $target/histories" && exit 1; }
