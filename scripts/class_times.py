"""Times PyTorch's calls over its own allocator and over this library, in turn:

    python class_times.py LIBRARY [ROUNDS]

LIBRARY is libstratalloc.so. Needs PyTorch with a CUDA device, and a C++ compiler. Prints nanoseconds for one block of
512 bytes on one stream, medians of ROUNDS rounds (15), and their ratio:

- `empty`: `torch.empty` and `del`, in a loop in Python;
- `raw`: `raw_alloc` and `raw_delete` of the caching allocator, in a loop in C++.

Each configuration has two processes on the same processor, of which only one works at a time; the order changes from
round to round.
"""

import ctypes
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

CONFS = ("", "expandable_segments:True")
SOURCE = """
#include <c10/cuda/CUDACachingAllocator.h>
extern "C" void pairs(long count) {
  for (long n = 0; n < count; ++n)
    c10::cuda::CUDACachingAllocator::raw_delete(c10::cuda::CUDACachingAllocator::raw_alloc(512));
}
"""
PAIRS = 200_000
TENSORS = 50_000


def build(folder):
    """Compiles the loop; returns its path."""
    import torch
    from torch.utils import cpp_extension

    source, built = folder / "pairs.cpp", folder / "pairs.so"
    source.write_text(SOURCE)
    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), *cuda_headers())]
    libraries = f"{pathlib.Path(torch.__file__).parent}/lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [os.environ.get("CXX", "g++"), "-O2", "-std=c++20", "-shared", "-fPIC", abi, *includes, str(source)]
    command += ["-o", str(built), f"-L{libraries}", "-lc10_cuda", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run(command, check=True)
    return built


def cuda_headers():
    """Returns the folders of CUDA's headers that exist."""
    home = pathlib.Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    folders = [home / "include", *home.glob("targets/*/include")]
    return [str(folder) for folder in folders if (folder / "cuda_runtime_api.h").exists()]


def child(built):
    """Times what each line of the input names, and prints nanoseconds."""
    if os.environ.get("STRATALLOC_LIBRARY"):
        import stratalloc

        stratalloc.install()
    import torch

    torch.cuda.init()
    torch.empty(512, dtype=torch.uint8, device="cuda")
    loop = ctypes.CDLL(built).pairs
    loop.argtypes = [ctypes.c_long]

    def tensors(count):
        for _ in range(count):
            block = torch.empty(512, dtype=torch.uint8, device="cuda")
            del block

    for line in sys.stdin:
        what, count = {"empty": (tensors, TENSORS), "raw": (loop, PAIRS)}[line.strip()]
        what(count // 10)
        begin = time.perf_counter_ns()
        what(count)
        print((time.perf_counter_ns() - begin) / count, flush=True)


class Timed:
    """A process that times calls over one allocator."""

    def __init__(self, built, conf, library, processor):
        pipe = subprocess.PIPE
        left_out = ("STRATALLOC_LIBRARY", "ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        environment = {name: text for name, text in os.environ.items() if name not in left_out}
        package = pathlib.Path(__file__).resolve().parent.parent / "python"
        environment["PYTHONPATH"] = f"{package}:{environment.get('PYTHONPATH', '')}"
        if conf:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = conf
        if library:
            environment["STRATALLOC_LIBRARY"] = library
        command = [sys.executable, __file__, "--child", str(built)]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.time("empty")
        os.sched_setaffinity(self.process.pid, {processor})

    def time(self, what):
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a process ended with {self.process.wait()}")
        return float(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        return child(sys.argv[2])
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    library, rounds = str(pathlib.Path(sys.argv[1]).resolve()), int([*sys.argv, 15][2])
    processor = sorted(os.sched_getaffinity(0))[-1]
    print("configuration, call: built-in ns, this library ns, ratio of medians (range of the rounds' ratios)")
    with tempfile.TemporaryDirectory() as folder:
        built = build(pathlib.Path(folder))
        for conf in CONFS:
            sides = [Timed(built, conf, None, processor), Timed(built, conf, library, processor)]
            for what in ("empty", "raw"):
                times = ([], [])
                for number in range(rounds):
                    for side in (0, 1) if number % 2 == 0 else (1, 0):
                        times[side].append(sides[side].time(what))
                own, ours = map(statistics.median, times)
                ratios = [two / one for one, two in zip(*times)]
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                print(f"{conf or 'default'}, {what}: {own:.0f}, {ours:.0f}, {ours / own:.3f} ({spread})", flush=True)
            for side in sides:
                side.end()
    return None


if __name__ == "__main__":
    main()
