#!/bin/sh
# Builds the extension and the test of PyTorch's allocator class, and runs the test on host memory.
# Needs PyTorch's wheel unpacked (no GPU, and no Python that can import it) and CUDA's headers.
# usage: run.sh TORCH_FOLDER CUDA_INCLUDES LIBSTRATALLOC [EXTENSION]
# CUDA_INCLUDES: folders separated by colons. EXTENSION: an extension that is already built.
set -e
torch=$1 library=$3 extension=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
minor=$(sed -n 's/^#define TORCH_VERSION_MINOR //p' "$torch/include/torch/headeronly/version.h")
if [ "$minor" -ge 14 ]; then standard=c++20; else standard=c++17; fi
flags="-std=$standard -O1 -fPIC -isystem $torch/include $(echo ":$2" | sed 's/:/ -isystem /g')"
if [ -z "$extension" ]; then
    extension=$work/extension.so
    c++ $flags -fvisibility=hidden -shared -o "$extension" "$here"/../../stratalloc/csrc/*.cpp \
        -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda -ldl
fi
needed() {
    readelf -d "$torch/lib/$1" | sed -n "s/.*NEEDED.*\[\($2.*\)\]/\1/p"
}
cudart=$(needed libc10_cuda.so libcudart.so)
printf '%s { *; };' "$cudart" > "$work/versions"
cc -shared -fPIC -o "$work/$cudart" -Wl,-soname,"$cudart" \
    -Wl,--version-script="$work/versions" "$here/cudart_stub.c"
# PyTorch's operator library is linked against the profiler's libraries, but the test calls none of their
# functions.
cupti=$(needed libtorch_cpu.so libcupti.so)
cc -shared -o "$work/$cupti" -Wl,-soname,"$cupti" -x c /dev/null
c++ $flags -Wall -o "$work/test" "$here/class_virtuals.cpp" "$here/class_versions.cpp" "$here/class_host.cpp" \
    -L"$torch/lib" -ltorch_cpu -lc10 -lc10_cuda -L"$work" -l:"$cudart" -ldl -lpthread \
    -Wl,--allow-shlib-undefined
LD_LIBRARY_PATH=$work:$torch/lib STRATALLOC_DEVICE=host ${DEBUGGER:-} "$work/test" "$extension" "$library"
