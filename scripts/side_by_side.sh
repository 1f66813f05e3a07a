#!/usr/bin/env bash
# Times our strategies and other allocators on one CUDA machine, in one run.
#
#   scripts/side_by_side.sh STRATALLOC OUT [WHEELS]
#
# STRATALLOC is the program, built anywhere; OUT a folder for the rows; WHEELS a folder with the wheels of
# librmm and rapids-logger, without which RMM is left out. Needs a CUDA toolkit, a C++ compiler and, for
# PyTorch's rows, PyTorch. What is missing is said and left out. `scripts/results.py OUT` makes the table.
set -uo pipefail
program=$(realpath "$1")
out=$(realpath "$2")
wheels=${3:+$(realpath "$3")}
here=$(dirname "$(realpath "$0")")
cuda=${CUDA_HOME:-/usr/local/cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
threads=$(nproc)
threads=$((threads > 16 ? 16 : threads))
export PEER_THREADS=$threads

# The caller's folders come first: RMM brings headers that are newer than the toolkit's.
build() { g++ -O2 -std=c++20 "$here/peers.cpp" "$@" -I"$cuda/include" -I"$cuda/include/cccl" -L"$cuda/lib64" -lcudart -lpthread; }
left_out() { echo "left out: $1" | tee -a "$out/left_out.txt"; }

: >"$out/left_out.txt"
{
    echo "date: $(date -u +%F)"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/device: /'
    echo "processor: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -1), $(nproc) cores"
    python3 -c 'import torch; print("torch:", torch.__version__, "CUDA", torch.version.cuda)' 2>/dev/null
    ls "${wheels:-/nonexistent}" 2>/dev/null | sed -n 's/^librmm[^-]*-\([0-9.]*\)-.*/rmm: \1/p'
} >"$out/machine.txt"

build -o "$work/raw" && "$work/raw" >"$out/raw.csv" || left_out "the raw driver"

torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))' 2>/dev/null)
if [ -n "$torch" ] && build -DPEER_TORCH -I"$torch/include" -L"$torch/lib" -Wl,--no-as-needed \
    -lc10 -lc10_cuda -ltorch_cuda -ltorch_cpu -ltorch "-Wl,-rpath,$torch/lib" -o "$work/torch"; then
    for conf in "" expandable_segments:True backend:cudaMallocAsync; do
        PYTORCH_CUDA_ALLOC_CONF=$conf "$work/torch" >>"$out/torch.csv" || left_out "a part of PyTorch ($conf)"
    done
else
    left_out "PyTorch"
fi

if [ -n "$wheels" ]; then
    for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
    rmm=$work/site/librmm
    libs=$(dirname "$(find "$rmm" -name librmm.so | head -1)")
    logger=$(dirname "$(find "$work/site" -name 'librapids_logger.so' | head -1)")
    includes="-I$rmm/include -I$rmm/include/rapids -I$(dirname "$logger")/include"
    # shellcheck disable=SC2086
    if build -DPEER_RMM $includes -L"$libs" -L"$logger" -lrmm \
        -lrapids_logger "-Wl,-rpath,$libs:$logger" -o "$work/rmm"; then
        "$work/rmm" >"$out/rmm.csv" || left_out "a part of RMM"
    else
        left_out "RMM"
    fi
else
    left_out "RMM (no wheels)"
fi

for conf in backend:native backend:native,expandable_segments:True backend:cudaMallocAsync; do
    "$program" bench --device cuda:0 --threads "$threads" --conf "$conf" --json \
        $(printf -- '--case %s ' floor: pair mix holes threads record_stream) >>"$out/ours.json" ||
        left_out "a part of ours ($conf)"
done
cat "$out/left_out.txt"
