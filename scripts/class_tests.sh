#!/usr/bin/env bash
# Tests the class that implements PyTorch's allocator, and PyTorch's own calls of it, without a GPU:
# PyTorch's wheel runs on stubs of CUDA's libraries. The unpacked wheel is kept in the user's cache
# folder (1.2 GB per version).
#
# usage: class_tests.sh [--fetch] [VERSION]     --fetch: only downloads and unpacks, and prints the folder
#
# Needs Linux, pip, binutils and a C++ compiler. Without the wheel, the tests are skipped with one line.
# Tests the library that STRATALLOC_LIBRARY names. Without it, builds one as `cargo test --all-features`
# does.
set -euo pipefail
cd "$(dirname "$0")/.."

fetch_only=
if [ "${1:-}" = --fetch ]; then fetch_only=yes && shift; fi
version=${1:-2.11.0}
python=${PYTHON:-python3}
# The packages that the wheel imports, without NVIDIA's libraries.
imports=(typing_extensions sympy networkx jinja2 fsspec filelock numpy setuptools)
seconds_for_the_wheel=90

skip() {
    echo "skipped: the class of PyTorch $version: $1"
    exit 0
}
pip() {
    timeout "$1" "$python" -m pip --quiet --disable-pip-version-check --no-cache-dir "${@:2}" 2>&1 | tail -n 1
}

# Prints the CUDA version that the wheel in a folder was built for.
cuda_of() {
    sed -n "s/^cuda[: ].*'\([0-9]*\.[0-9]*\)'.*/\1/p" "$1/site/torch/version.py"
}

# Unpacks the wheel, the packages that it imports and the headers of its CUDA version into a folder.
unpack() {
    local folder=$1 said cuda packages include
    local -x TMPDIR=$folder/temporary
    mkdir -p "$TMPDIR"
    said=$(pip $seconds_for_the_wheel download --no-deps --dest "$folder/wheel" "torch==$version") \
        || skip "no wheel within $seconds_for_the_wheel s${said:+ ($said)}"
    said=$(pip 300 install --no-compile --no-deps --target "$folder/site" "$folder"/wheel/*.whl) \
        || skip "the wheel cannot be unpacked${said:+ ($said)}"
    said=$(pip 90 install --no-compile --target "$folder/site" "${imports[@]}") \
        || skip "a package that it imports is missing${said:+ ($said)}"
    cuda=$(cuda_of "$folder")
    [ -n "$cuda" ] || skip "the wheel is not built for CUDA"
    # Since CUDA 13 the packages have no suffix, and the compiler's headers have their own package.
    if [ "${cuda%%.*}" -ge 13 ]; then
        packages=("nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*")
    else
        packages=("nvidia-cuda-runtime-cu${cuda%%.*}==$cuda.*" "nvidia-cuda-nvcc-cu${cuda%%.*}==$cuda.*")
    fi
    said=$(pip 90 install --no-compile --no-deps --target "$folder/headers" "${packages[@]}") \
        || skip "no headers of CUDA $cuda${said:+ ($said)}"
    # Headers only: the wheel would load CUDA's own libraries instead of the stubs if they were in the
    # folder.
    mkdir -p "$folder/cuda/include"
    for include in "$folder"/headers/nvidia/*/include; do cp -r "$include/." "$folder/cuda/include"; done
    rm -rf "$folder/wheel" "$folder/headers" "$folder/temporary"
}

[ "$(uname -s)" = Linux ] || skip "only on Linux"
"$python" -m pip --version >/dev/null 2>&1 || skip "no pip"
command -v c++ >/dev/null && command -v readelf >/dev/null || skip "no C++ compiler or no binutils"

tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-$(uname -m)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/stratalloc
key=$(printf '%s\n' "${imports[@]}" "$(declare -f unpack)" | sha256sum | cut -c 1-8)
folder=$cache/wheels/torch-$version-$tag-$key
mkdir -p "$cache/wheels"
if [ ! -d "$folder" ]; then
    # Only one process unpacks at a time. It renames the folder when the folder is complete.
    exec 9>"$folder.lock"
    flock 9
    if [ ! -d "$folder" ]; then
        rm -rf "$folder.part"
        trap 'rm -rf "$folder.part"' EXIT
        unpack "$folder.part"
        mv "$folder.part" "$folder"
    fi
    exec 9>&-
fi
if [ -n "$fetch_only" ]; then echo "$folder" && exit 0; fi

if [ -z "${STRATALLOC_LIBRARY:-}" ]; then
    cargo build --quiet --profile test --lib --test descriptors --test ffi --all-features
    STRATALLOC_LIBRARY=${CARGO_TARGET_DIR:-target}/debug/libstratalloc.so
fi
STRATALLOC_LIBRARY=$(realpath "$STRATALLOC_LIBRARY")
export STRATALLOC_LIBRARY CUDA_HOME=$folder/cuda PYTHONPATH=$PWD/python
export STRATALLOC_TORCH_FOLDER=$folder/site/torch STRATALLOC_TORCH_PYTHON=$python
# Lets Python keep the compiled modules of PyTorch for the next run.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$folder/compiled
"$python" -m unittest discover -v -s python/tests -k Class.
