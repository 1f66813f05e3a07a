#!/usr/bin/env bash
# Tests a wheel in an empty virtual environment, where neither Rust nor a C++ compiler is on the path: pip installs
# it, the command line reads a recording, and the programs of python/README.md run under PyTorch 2.11.0 over
# stand-ins for CUDA's libraries (as class_tests.sh).
#
# usage: wheel_tests.sh [WHEEL]
#
# Without WHEEL, packs the libraries and the program that `cargo test --all-features` builds. Has the same requirements
# as class_tests.sh and, without WHEEL, those of wheels.py. Without PyTorch's wheel or g++-12, it prints one line;
# with WHEEL that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3} version=2.11.0
fetched=$(scripts/class_tests.sh --fetch $version | tail -n 1)
# A wheel that is named is going to be shipped, so its test must not be skipped.
[ -d "$fetched/site/torch" ] || { echo "${fetched:-skipped}" && exit $(($# > 0)); }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ $# -gt 0 ]; then
    wheel=$1
elif ! command -v g++-12 >/dev/null; then
    echo "skipped: the wheel: no g++-12" && exit 0
else
    cargo build --quiet --profile test --lib --bin stratalloc --test descriptors --test ffi --all-features
    "$python" scripts/wheels.py --arch x86_64 --torch $version --output "$work" \
        --built "${CARGO_TARGET_DIR:-target}/debug"
    wheel=$(echo "$work"/*.whl)
fi
mkdir "$work/stand_ins"
"$python" python/tests/pytorch/stand_ins.py "$fetched/site/torch" "$work/stand_ins"
"$python" -m venv "$work/empty"

# Runs a program of the environment, after assignments of variables. Nothing else is on the path.
installed() {
    env -i HOME="$work" PATH="$work/empty/bin" PYTHONPYCACHEPREFIX="$fetched/compiled" "$@"
}
for tool in cc c++ g++ clang++ nvcc cargo rustc; do
    ! installed "$work/empty/bin/python" -c "import shutil; exit(shutil.which('$tool') is None)" || exit 1
done
installed pip install --quiet --disable-pip-version-check --no-index "$wheel"
recording=tests/traces/serve.default.pickle.xz
installed stratalloc advise --quick $recording >"$work/advice"
grep -q '^Set max_split_size_mb:' "$work/advice"
head -n 2 "$work/advice"
installed stratalloc report --quick $recording --output "$work/page.html"
[ -s "$work/page.html" ]
installed python -m stratalloc preload
installed PYTHONPATH="$fetched/site" LD_LIBRARY_PATH="$work/stand_ins" STRATALLOC_DEVICE=host \
    python -W ignore python/tests/pytorch/installed.py python/README.md
