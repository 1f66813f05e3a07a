#!/usr/bin/env bash
# Records random histories of several versions of PyTorch's own allocator without a GPU, and verifies
# each under its true limit (python/tests/pytorch/histories.py, which lists the configurations). Prints a table:
# histories of each configuration, how many are exact, and of those that met a limit, for how many the limit that
# the recording alone shows is within 1 % of the true one. Histories that a replay does not repeat exactly are
# kept in the folder target/histories/VERSION; `stratalloc replay --verify` shows the first difference.
#
# usage: versions.sh [VERSION...] [--histories N] [--seed SEED|random] [--only CONFIGURATION[,CONFIGURATION]]
#
# N histories are recorded under each configuration, by default 20, with the seeds from SEED on (1). Before 2.12 no
# entry has the pool of a request; inexact histories with pools or captures of these versions are expected and
# counted in a column of their own.
#
# Has the same requirements as class_tests.sh. A version without a wheel is skipped, with one line of
# output.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=() options=()
while [ $# -gt 0 ]; do
    case $1 in
        --histories | --seed | --only) options+=("$1" "$2") && shift 2 ;;
        --*) echo "unknown option: $1" >&2 && exit 2 ;;
        *) versions+=("$1") && shift ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || versions=(2.10.0 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0)
python=${PYTHON:-python3}
target=${CARGO_TARGET_DIR:-target}

# STRATALLOC_COMMAND is the command-line program. Without it, the program is built.
command=${STRATALLOC_COMMAND:-$target/debug/stratalloc}
[ -n "${STRATALLOC_COMMAND:-}" ] || cargo build --quiet --profile test --all-features -p stratalloc-cli --bin stratalloc
"$python" python/tests/pytorch/histories.py --headings
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
        "$kept" "${options[@]}" || failed=yes
done
[ -z "$failed" ] || { echo "histories that are not exact: $target/histories" && exit 1; }
