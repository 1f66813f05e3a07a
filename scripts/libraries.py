"""Measures CuPy, RMM and Numba over this allocator beside their own, on a GPU.

usage: libraries.py [pairs] [pipeline] [tests]        (all of them without arguments)

STRATALLOC_COMMAND is the command-line program. CUPY_TESTS is the folder `tests` of CuPy's source package, RMM_TESTS
that of RMM's Python package. RMM_PAIR is the program built from rmm.cpp. Missing parts are skipped, with one line.
"""

import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

PAIRS, ROUNDS = 50_000, 9
MIB = 1 << 20


def row(name, value, limit=""):
    print(f"{name:<58}{value:>16}{limit:>14}", flush=True)


def missing(*packages):
    """Returns the first package that is not installed."""
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def in_turn(ours, theirs):
    """Times two functions in turn. Returns the median of each, in nanoseconds, and that of the rounds' ratios."""
    def time_of(work):
        start = time.perf_counter_ns()
        work(PAIRS)
        return (time.perf_counter_ns() - start) / PAIRS

    for work in (ours, theirs):
        work(PAIRS // 10)
    rounds = []
    for number in range(ROUNDS):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        times = {work: time_of(work) for work in order}
        rounds.append((times[ours], times[theirs]))
    medians = [statistics.median(column) for column in zip(*rounds)]
    return (*medians, statistics.median(a / b for a, b in rounds))


def show(name, times, limit):
    ours, theirs, ratio = times
    row(f"{name}: {ours:.0f} ns, the library's pool {theirs:.0f} ns", f"{ratio:.2f}", f"at most {limit}")


def pairs():
    """Times an allocation and a free of 512 bytes."""
    if missing("cupy"):
        row("CuPy", "not installed")
    else:
        import cupy

        import stratalloc.cupy

        def loop(malloc):
            def work(count):
                for _ in range(count):
                    malloc(512)

            return work

        own = stratalloc.cupy.allocator().malloc
        for name, stream in (("default stream", cupy.cuda.Stream.null), ("a stream", cupy.cuda.Stream())):
            with stream:
                times = in_turn(loop(own), loop(cupy.cuda.MemoryPool().malloc))
            show(f"CuPy, {name}", times, "1.0")
    if missing("rmm"):
        row("RMM", "not installed")
    else:
        import rmm

        import stratalloc.rmm

        def through(resource):
            def work(count):
                allocate, deallocate = resource.allocate, resource.deallocate
                for _ in range(count):
                    deallocate(allocate(512), 512)

            return work

        def buffers(resource):
            def work(count):
                for _ in range(count):
                    rmm.DeviceBuffer(size=512, mr=resource)

            return work

        own = stratalloc.rmm.MemoryResource()
        pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=MIB)
        show("RMM, Python resource", in_turn(through(own), through(pool)), "1.5")
        show("RMM, Python DeviceBuffer", in_turn(buffers(own), buffers(pool)), "1.5")
    program = os.environ.get("RMM_PAIR")
    row("RMM, C++", subprocess.run([program], capture_output=True, text=True).stdout.strip() if program else "no RMM_PAIR")
    if missing("numba_cuda"):
        row("Numba", "not installed")
    else:
        rounds = [[numba_pair(manager) for manager in ("stratalloc.numba", "default")] for _ in range(3)]
        medians = [statistics.median(column) for column in zip(*rounds)]
        show("Numba", (*medians, statistics.median(a / b for a, b in rounds)), "1.5")


def numba_pair(manager):
    """Returns the time of a pair in a process of its own, because Numba's manager is set once."""
    program = f"""
import time
from numba import cuda
context = cuda.current_context()
def work(count):
    for _ in range(count):
        context.memalloc(512)
work(1000)
start = time.perf_counter_ns()
work({PAIRS // 5})
print((time.perf_counter_ns() - start) / {PAIRS // 5})
"""
    environment = dict(os.environ, NUMBA_CUDA_MEMORY_MANAGER=manager)
    output = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return float(output.stdout) if output.returncode == 0 else sys.exit(output.stderr[-2000:])


# Stages of PyTorch, CuPy and RMM take turns. Each takes 85 % of the device in blocks of several sizes, and hands 5 %
# over to the next.
PIPELINE = """
import os, sys, time
how, snapshot = sys.argv[1:]
import torch
if how == "ours":
    import stratalloc, stratalloc.cupy
    stratalloc.install(conf="expandable_segments:True")
import cupy
HAS_RMM = os.environ.get("HAS_RMM") == "1"
if HAS_RMM:
    import rmm
if how == "ours":
    stratalloc.cupy.enable()
    if HAS_RMM:
        import stratalloc.rmm
        resource = stratalloc.rmm.MemoryResource()
    torch.cuda.memory._record_memory_history(max_entries=100000)
elif HAS_RMM:
    # RMM's pool has no function that releases its memory, so with emptied caches RMM has no pool.
    resource = rmm.mr.CudaMemoryResource()
    if how == "own":
        resource = rmm.mr.PoolMemoryResource(resource, initial_pool_size=1 << 20)
total = torch.cuda.mem_get_info()[1]

def of_torch(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def of_cupy(size):
    return cupy.empty(size, dtype=cupy.uint8)

def of_rmm(size):
    return rmm.DeviceBuffer(size=size, mr=resource)

def empty_caches():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()

stages = [of_torch, of_cupy] + [of_rmm] * HAS_RMM
sizes = [total // 10, total // 17, total // 23, total // 40]
start, carried = time.perf_counter(), None
for turn in range(3):
    for number, stage in enumerate(stages):
        held, used = [], 0
        while True:
            size = sizes[len(held) % len(sizes)] + (turn * 3 + number) * (7 << 20)
            used += size
            if used > 0.85 * total:
                break
            held.append(stage(size))
        if turn == 2 and snapshot:
            # The time of the snapshot does not count.
            before = time.perf_counter()
            torch.cuda.memory._dump_snapshot(snapshot.format(number))
            start += time.perf_counter() - before
        held.clear()
        if how == "emptied":
            empty_caches()
        carried = stage(total // 20)
torch.cuda.synchronize()
print(f"{time.perf_counter() - start:.2f} s")
"""


def pipeline():
    """Runs the libraries in turns at 90 % of the device."""
    if missing("cupy"):
        return row("pipeline", "no CuPy")
    has_rmm = missing("rmm") is None
    environment = dict(os.environ, HAS_RMM="1" if has_rmm else "0")
    names = "PyTorch, CuPy" + ", RMM" * has_rmm
    with tempfile.TemporaryDirectory() as folder:
        snapshot = os.path.join(folder, "{}.pickle")
        for how, meaning in (
            ("ours", "one cache"),
            ("own", "three caches"),
            ("emptied", "three caches, emptied after each stage"),
        ):
            command = [sys.executable, "-c", PIPELINE, how, snapshot if how == "ours" else ""]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            words = (ended.stderr.strip().splitlines() or [""])[-1][:90]
            row(f"{names} at 90 %: {meaning}", ended.stdout.strip() or "fails")
            if ended.returncode != 0:
                print("    " + words)
        for path in sorted(pathlib.Path(folder).glob("*.pickle")):
            for name, held in by_library(path).items():
                row(f"  the page of stage {path.stem} lists {name}", f"{held / 2**30:.1f} GiB")


def by_library(path):
    """Returns the bytes of each library as the page of `stratalloc report` lists them."""
    page = path.with_suffix(".html")
    command = os.environ.get("STRATALLOC_COMMAND", "stratalloc")
    subprocess.run([command, "report", "--quick", path, "-o", page], check=True, capture_output=True)
    found = re.findall(r'\["(CuPy|RMM|unknown)",(\d+),\d+\]', page.read_text())
    return {name: max(int(held) for other, held in found if other == name) for name, _ in found}


def outcomes(command, environment, folder=None):
    """Runs pytest. Returns the outcome of each test."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as log:
        options = ["-q", "-x", "--maxfail=100000", "-p", "no:cacheprovider", f"--junitxml={log.name}"]
        subprocess.run([*command, *options], env=environment, cwd=folder, capture_output=True)
        text = pathlib.Path(log.name).read_text()
    found = {}
    for case in re.findall(r"<testcase .*?(?:/>|</testcase>)", text, re.S):
        name = re.search(r'classname="([^"]*)" name="([^"]*)"', case)
        failed = "<failure" in case or "<error" in case
        found[name.groups()] = "failed" if failed else "skipped" if "<skipped" in case else "passed"
    return found


def compare(name, of):
    """Prints how many tests pass over this allocator as over the library's own, and names the others."""
    ours, theirs = of("ours"), of("own")
    same = sum(ours.get(test) == outcome for test, outcome in theirs.items())
    passed = sum(outcome == "passed" for outcome in theirs.values())
    if passed == 0:
        sys.exit(f"{name}'s tests do not run")
    row(f"{name}: tests with the same outcome (own: {passed} passed)", f"{same} of {len(theirs)}")
    others = [(test, outcome) for test, outcome in theirs.items() if ours.get(test) != outcome]
    for test, outcome in others[:20]:
        print(f"    {'.'.join(test)}: own {outcome}, over this allocator {ours.get(test)}")


def tests():
    """Runs the libraries' own tests of memory over their own allocator and over this one."""
    with tempfile.TemporaryDirectory() as folder:
        # A plug-in of pytest that enables this allocator before the tests.
        plugin = pathlib.Path(folder) / "over_stratalloc.py"
        served = pathlib.Path(folder) / "served"
        plugin.write_text(CUPY_PLUGIN.format(served))
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        environment = dict(os.environ, PYTHONPATH=path)
        source = os.environ.get("CUPY_TESTS")
        if missing("cupy") or not source:
            row("CuPy's tests", "no CUPY_TESTS")
        else:
            files = ["cuda_tests/test_memory.py", "cuda_tests/test_memory_hook.py", "cuda_tests/test_stream.py",
                     "core_tests/test_ndarray.py", "creation_tests/test_basic.py", "core_tests/test_dlpack.py"]
            paths = [path for path in (f"cupy_tests/{file}" for file in files) if (pathlib.Path(source) / path).exists()]

            def of(how):
                command = [sys.executable, "-m", "pytest", *(["-p", "over_stratalloc"] if how == "ours" else []), *paths]
                return outcomes(command, environment, source)

            compare("CuPy", of)
            row("  requests of these tests that this allocator served", served.read_text())
        source = os.environ.get("RMM_TESTS")
        if missing("rmm") or not source:
            row("RMM's tests", "no RMM_TESTS")
        else:
            (pathlib.Path(folder) / "rmm_over_stratalloc.py").write_text(RMM_PLUGIN)

            def of_rmm(how):
                plugin = ["-p", "rmm_over_stratalloc"] if how == "ours" else []
                files = ["test_allocations.py", "test_device_buffer.py", "test_callback_memory_resource.py",
                         "test_limiting_resource_adaptor.py", "test_tracking_resource_adaptor.py",
                         "test_statistics.py", "test_failure_callback_resource_adaptor.py", "test_lifecycle.py"]
                return outcomes([sys.executable, "-m", "pytest", *plugin, *files], environment, source)

            compare("RMM", of_rmm)
        if missing("numba_cuda"):
            row("Numba's tests", "not installed")
        else:
            modules = ["test_cuda_memory", "test_emm_plugins", "test_managed_alloc", "test_cuda_ndarray",
                       "test_reset_device", "test_context_stack", "test_pinned", "test_ipc"]

            def of_numba(how):
                manager = "stratalloc.numba" if how == "ours" else "default"
                command = [sys.executable, "-c", NUMBA_TESTS, *modules]
                own = dict(environment, NUMBA_CUDA_MEMORY_MANAGER=manager)
                ended = subprocess.run(command, env=own, capture_output=True, text=True)
                if ended.returncode != 0:
                    print(ended.stderr[-2000:])
                    return {}
                return {tuple(name): outcome for name, outcome in json.loads(ended.stdout.splitlines()[-1])}

            compare("Numba", of_numba)


# A plug-in of pytest: each test begins with this allocator as CuPy's. Some use pools of their own.
CUPY_PLUGIN = """
import atexit, pathlib, pytest, cupy, stratalloc.cupy
allocator = stratalloc.cupy.allocator()
@pytest.fixture(autouse=True)
def over_stratalloc():
    cupy.cuda.set_allocator(allocator.malloc)
    yield
@atexit.register
def served():
    pathlib.Path("{}").write_text(str(stratalloc.memory_stats(0)["allocation.all.allocated"]))
"""

# A plug-in of pytest: each test begins with this allocator as RMM's resource of the device.
RMM_PLUGIN = """
import pytest, rmm, stratalloc.rmm
resource = stratalloc.rmm.MemoryResource()
@pytest.fixture(autouse=True)
def over_stratalloc():
    rmm.mr.set_current_device_resource(resource)
    yield
"""

# Runs modules of Numba's tests, wherever this version has them.
NUMBA_TESTS = """
import importlib, json, sys, unittest
found, suite = [], unittest.TestSuite()
for name in sys.argv[1:]:
    for place in ("cudadrv", "cudapy"):
        try:
            module = importlib.import_module(f"numba.cuda.tests.{place}.{name}")
        except ImportError:
            continue
        suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
class Result(unittest.TestResult):
    def addSuccess(self, test): found.append((test, "passed"))
    def addFailure(self, test, error): found.append((test, "failed"))
    def addError(self, test, error): found.append((test, "failed"))
    def addSkip(self, test, why): found.append((test, "skipped"))
suite.run(Result())
print(json.dumps([(str(test).split(" (")[::-1], outcome) for test, outcome in found]))
"""


if __name__ == "__main__":
    parts = {"pairs": pairs, "pipeline": pipeline, "tests": tests}
    for name in sys.argv[1:] or parts:
        parts[name]()
