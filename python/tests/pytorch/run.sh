#!/bin/sh
# Builds the extension and the test of PyTorch's allocator class, and runs it on memory of this machine.
# Needs PyTorch's wheel unpacked (no GPU, no Python that can import it) and CUDA's headers.
# usage: run.sh TORCH_FOLDER CUDA_INCLUDE LIBSTRATALLOC [EXTENSION]   EXTENSION: one that is built already
set -e
torch=$1 cuda=$2 library=$3 extension=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-std=c++17 -O1 -fPIC -isystem $torch/include -isystem $cuda"
if [ -z "$extension" ]; then
    extension=$work/extension.so
    c++ $flags -fvisibility=hidden -shared -o "$extension" "$here"/../../stratalloc/csrc/*.cpp \
        -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda -ldl
fi
printf 'libcudart.so.13 { *; };' > "$work/versions"
cc -shared -fPIC -o "$work/libcudart.so.13" -Wl,-soname,libcudart.so.13 \
    -Wl,--version-script="$work/versions" "$here/cudart_stub.c"
# PyTorch's library of operators wants the profiler's, of which nothing is called.
cc -shared -o "$work/libcupti.so.13" -Wl,-soname,libcupti.so.13 -x c /dev/null
c++ $flags -Wall -o "$work/test" "$here/class_virtuals.cpp" \
    -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda -L"$work" -l:libcudart.so.13 -ldl -lpthread \
    -Wl,--allow-shlib-undefined
LD_LIBRARY_PATH=$work:$torch/lib STRATALLOC_DEVICE=host ${DEBUGGER:-} "$work/test" "$extension" "$library"
