# Sourced on a GPU machine: makes `python3` import the PyTorch that `torch_parts.py` packed, over the CUDA libraries of
# the PyTorch that is installed there.
#
#   . scripts/torch_from_parts.sh PARTS FOLDER CUDART
#
# PARTS is the folder with the parts, FOLDER the place to unpack them, CUDART the libcudart.so.* of the CUDA version that
# the wheel was built for (package nvidia-cuda-runtime), which has to travel too. Python and the C library must be those
# of the wheel. Needs a C compiler.
#
# A newer PyTorch calls functions that the installed NCCL, NVSHMEM and cuDNN do not have. Stubs that return an error take
# their place, so collectives and the newest parts of cuDNN cannot be tested in this way. The allocators use none of
# them. Run with 2.15.0 (CUDA 13.2) over the libraries of 2.11.0 (CUDA 13.0).
parts=$1 folder=$2 cudart=$(realpath "$3")
site=$(env -u PYTHONPATH python3 -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
if [ ! -d "$folder/torch" ]; then
    mkdir -p "$folder"
    cat "$parts"/part.* | tar -xJ -C "$folder"
fi
# PyTorch looks for CUDA's libraries in the folder nvidia beside its own, and in its own.
ln -sfn "$site/nvidia" "$folder/nvidia"
ln -sf "$cudart" "$folder/torch/lib/"
LD_LIBRARY_PATH=$(printf '%s:' "$site"/nvidia/*/lib)
export LD_LIBRARY_PATH LD_PRELOAD=$cudart

# Functions and data that no library defines. Names of C++ and Python belong to PyTorch and to the interpreter.
for library in torch_cuda torch_cpu torch_nvshmem c10_cuda; do
    ldd -r "$folder/torch/lib/lib$library.so" 2>&1
done | grep 'undefined symbol' | sort -u >"$folder/undefined"
grep -v ', version' "$folder/undefined" | awk '{ print $3 }' | grep -v '^_Z\|^Py\|^_Py' | sort -u |
    awk '{ print "int " $1 "(void) { return 1; }" }' >"$folder/calls.c"
grep ', version NVSHMEM' "$folder/undefined" | awk '{ print $3 }' | tr -d , | sort -u |
    awk '{ print "int " $1 "[64];" }' >"$folder/data.c"
echo 'NVSHMEM { global: *; };' >"$folder/data.map"
cc -shared -fPIC -w -o "$folder/calls.so" "$folder/calls.c"
cc -shared -fPIC -w "-Wl,--version-script=$folder/data.map" -o "$folder/data.so" "$folder/data.c"

# The installed torchvision is built for the installed PyTorch.
mkdir -p "$folder/hidden/torchvision"
echo 'raise ImportError("built for another PyTorch")' >"$folder/hidden/torchvision/__init__.py"
export LD_PRELOAD=$cudart:$folder/calls.so:$folder/data.so
export PYTHONPATH=$folder/hidden:$folder${PYTHONPATH:+:$PYTHONPATH}
export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
