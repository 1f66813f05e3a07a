#!/usr/bin/env bash
# Times the strategies of this library and other allocators on one CUDA machine, in one run.
#
#   scripts/side_by_side.sh STRATALLOC OUT [WHEELS [TORCH]]
#
# STRATALLOC is the program, which may have been built on another machine. OUT is a folder for the rows.
# WHEELS is a folder with the wheels of librmm and rapids-logger; without it, or if it is empty text, RMM
# is left out. TORCH is the folder `torch` of another version of PyTorch, as in its wheel, whose allocator
# is timed too, as `other torch`. Of it, include/, version.py, lib/libc10.so, lib/libc10_cuda.so and, in
# lib/, the libcudart.so.* of its CUDA version are used. Needs a CUDA toolkit, a C++ compiler and, for
# PyTorch's rows, PyTorch. If something is missing, fails or takes too long, it is left out with a message.
# `scripts/results.py OUT` prints the tables.
#
# In each of ROUNDS rounds (12), every case of one thread, or those in CASES, is timed with one allocator
# right after the other: see `turns.py`.
set -uo pipefail
program=$(realpath "$1")
out=$(realpath "$2")
wheels=${3:+$(realpath "$3")}
other=${4:+$(realpath "$4")}
here=$(dirname "$(realpath "$0")")
cuda=${CUDA_HOME:-/usr/local/cuda}
rounds=${ROUNDS:-12}
# Timeouts in seconds: for all rounds of `turns.py` together (27 minutes for twelve rounds), and for each
# other run of a program.
turns_deadline=$((300 + 110 * rounds))
deadline=300
work=$(mktemp -d)
trap 'for job in $(jobs -p); do kill -KILL -- "$job" "-$job" 2>/dev/null; done; rm -rf "$work"' EXIT
threads=$(nproc)
threads=$((threads > 16 ? 16 : threads))
native=backend:native
expandable=backend:native,expandable_segments:True
pools=backend:cudaMallocAsync

# The folders in the arguments come first, because RMM includes headers that are newer than the
# toolkit's.
build() {
    g++ -O2 -std=c++20 "$here/peers.cpp" "$@" -I"$cuda/include" -I"$cuda/include/cccl" \
        -L"$cuda/lib64" -lcudart -lpthread
}
left_out() { echo "left out: $1" | tee -a "$out/left_out.txt"; }
# Runs a command. Kills it and everything that it started after a timeout: within SECONDS COMMAND...
#
# `timeout` runs the command in its own process group, which Ctrl-C does not reach. So the command runs
# in the background: Ctrl-C interrupts `wait`, the script ends, and its trap kills the group.
within() { timeout --verbose --signal=KILL "$@" & wait $!; }
# Runs a peer's program, if it was built: peer NAME
peer() {
    [ ! -x "$work/$1" ] || within "$deadline" "$work/$1" >>"$out/$1.csv" </dev/null ||
        left_out "a part of $1 (${PYTORCH_CUDA_ALLOC_CONF:-})"
}
# Runs `stratalloc bench`: ours THREADS CASES CONF...
ours() {
    local threads=$1 cases=$2 confs=()
    shift 2
    for conf in "$@"; do confs+=(--conf "$conf"); done
    # shellcheck disable=SC2046,SC2086
    within "$deadline" "$program" bench --device cuda:0 --threads "$threads" "${confs[@]}" --json \
        $(printf -- '--case %s ' $cases) >>"$out/ours.json" || left_out "a part of ours ($*)"
}

rm -f "$out"/*.csv "$out/ours.json" "$out/turns.json"
: >"$out/left_out.txt"
{
    echo "date: $(date -u +%F)"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/device: /'
    echo "processor: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    python3 -c 'import torch; print("torch:", torch.__version__, "CUDA", torch.version.cuda)' 2>/dev/null
    [ -z "$other" ] || sed -n "s/^__version__ = '\(.*\)'/other torch: \1/p" "$other/version.py"
    ls "${wheels:-/nonexistent}" 2>/dev/null | sed -n 's/^librmm[^-]*-\([0-9.]*\)-.*/rmm: \1/p'
    echo "rounds: $rounds"
} >"$out/machine.txt"

build -o "$work/raw" || left_out "the raw driver"

torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null)
if [ -z "$torch" ] || ! build '-DPEER_TORCH="torch"' -I"$torch/include" -L"$torch/lib" -Wl,--no-as-needed \
    -lc10 -lc10_cuda -ltorch_cuda -ltorch_cpu -ltorch "-Wl,-rpath,$torch/lib" -o "$work/torch"; then
    left_out "PyTorch"
fi
# Only c10, which has the allocator: the other libraries of another version need its own NCCL and cuDNN.
if [ -n "$other" ] && ! build '-DPEER_TORCH="other torch"' -I"$other/include" -L"$other/lib" \
    -Wl,--no-as-needed -lc10 -lc10_cuda "-Wl,-rpath,$other/lib" -o "$work/other torch"; then
    left_out "the other version of PyTorch"
fi

if [ -n "$wheels" ]; then
    for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
    rmm=$work/site/librmm
    libs=$(dirname "$(find "$rmm" -name librmm.so | head -1)")
    logger=$(dirname "$(find "$work/site" -name 'librapids_logger.so' | head -1)")
    includes="-I$rmm/include -I$rmm/include/rapids -I$(dirname "$logger")/include"
    # shellcheck disable=SC2086
    build -DPEER_RMM $includes -L"$libs" -L"$logger" -lrmm \
        -lrapids_logger "-Wl,-rpath,$libs:$logger" -o "$work/rmm" || left_out "RMM"
else
    left_out "RMM (no wheels)"
fi

# The cases of one thread.
within "$turns_deadline" python3 "$here/turns.py" "$program" "$work" "$out" "$rounds" || left_out "a part of the turns"

# The cases of several threads. With empty input, the other allocators' programs time nothing else.
export PEER_THREADS=$threads
ours_at_once() { ours "$threads" 'floor: threads:own threads_raw' "$native" "$expandable" "$pools"; }
ours_at_once
for conf in '' expandable_segments:True backend:cudaMallocAsync; do
    PYTORCH_CUDA_ALLOC_CONF=$conf peer torch
    PYTORCH_CUDA_ALLOC_CONF=$conf peer 'other torch'
done
ours_at_once
peer raw
peer rmm
ours_at_once
cat "$out/left_out.txt"
