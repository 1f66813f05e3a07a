"""Compares PyTorch's pinned memory over this library with PyTorch's own host allocator, on one GPU:

    python scripts/pinned.py LIBRARY [TEST_CUDA] [PART..]

LIBRARY is libstratalloc.so. TEST_CUDA is `test/test_cuda.py` of PyTorch's sources; of another version than the
installed one, tests that need names that are missing fail over both. Needs PyTorch with its test requirements
(`expecttest`), and 40 GiB of free host memory. Takes about five minutes. The parts, each in its own processes:

    tests    PyTorch's own tests of pinned memory have the same results over both. With exact sizes, the test that
             expects powers of two may fail; with `pinned_rounding:power_of_two` none may.
    graphs   blocks that are allocated during a capture are reused if, and only if, no captured copy uses them
    loader   a `DataLoader` with `pin_memory=True`, equal and varied batches: the time is at most that over PyTorch's
             own. Two processes take turns, median of 7 rounds. Also one tensor that is allocated and dropped.
    buffers  68 buffers of 307 MiB hold at most 20.5 GiB

Prints a table last. The exit code is 0 if everything that ran holds.
"""

import ast
import gc
import importlib
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
PARTS = ("tests", "graphs", "loader", "buffers")
ABOUT_PINNED_MEMORY = re.compile(r"pin_?(ned_)?memory|pinned|host_memory|host_allocator|CachingHostAllocator", re.I)
# The test that expects powers of two.
EXPECTS_POWERS_OF_TWO = "test_host_memory_stats"
OWN, EXACT, POWERS = "own", "exact", "pinned_rounding:power_of_two"
ROUNDS, MOST_TIME = 7, 1.0
MIB, GIB = 1 << 20, 1 << 30
BUFFERS, BUFFER_BYTES, MOST_BYTES = 68, 307 * MIB, 20.5 * GIB


def under(mode, library):
    """Returns PyTorch, with the library as host allocator unless `mode` is that of PyTorch's own."""
    if mode != OWN:
        import stratalloc

        stratalloc.install(library, pinned=True if mode == EXACT else mode)
    import torch

    torch.ones(1, device="cuda")
    return torch


def inert(*arguments, **_):
    """Replaces a decorator that this version of PyTorch lacks."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def load_tests_of(path):
    """Imports PyTorch's file of tests. Names that it imports and that are missing are replaced."""
    for node in ast.walk(ast.parse(pathlib.Path(path).read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        try:
            module = importlib.import_module(node.module)
        except ImportError:
            continue
        for name in [alias.name for alias in node.names if not hasattr(module, alias.name)]:
            try:
                importlib.import_module(f"{node.module}.{name}")
            except ImportError:
                setattr(module, name, inert if name[:1].islower() else False)
    sys.path.insert(0, str(pathlib.Path(path).parent))
    return importlib.import_module(pathlib.Path(path).stem)


def each_test(suite):
    for test in suite:
        yield from each_test(test) if isinstance(test, unittest.TestSuite) else [test]


def tests(mode, library, path):
    """Returns the result of each of PyTorch's tests."""
    under(mode, library)
    found = each_test(unittest.defaultTestLoader.loadTestsFromModule(load_tests_of(path)))
    results = {}
    for test in found:
        name = ".".join(test.id().split(".")[-2:])
        if ABOUT_PINNED_MEMORY.search(name):
            gc.collect()
            result = unittest.TestResult()
            unittest.TestSuite([test]).run(result)
            bad = result.errors + result.failures
            reason = bad[0][1].strip().splitlines()[-1][:160] if bad else ""
            results[name] = "skipped" if result.skipped else f"failed: {reason}" if bad else "passed"
    return results


def graphs(mode, library):
    """Returns for each case whether the block of a captured graph is reused."""
    torch = under(mode, library)
    reused = {}

    def block(is_used, is_dropped):
        data = torch.randn(8).pin_memory()
        if is_used:
            torch.empty(8, device="cuda").copy_(data, non_blocking=True)
        address = data.data_ptr()
        if not is_dropped:
            held.append(data)
        return address

    for is_used in (False, True):
        for is_dropped in (False, True):
            held, graph = [], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                first = block(is_used, is_dropped)
                reused[f"one graph, used {is_used}, dropped {is_dropped}"] = block(False, True) == first
            held, pool = [], torch.cuda.graph_pool_handle()
            pair = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
            addresses = []
            for each in pair:
                with torch.cuda.graph(each, pool=pool, capture_error_mode="thread_local"):
                    addresses.append(block(is_used, is_dropped))
                    torch.ones(1, device="cuda")
            reused[f"two graphs, used {is_used}, dropped {is_dropped}"] = addresses[0] == addresses[1]
    # A replay copies what the graph's block has, whatever was allocated since.
    source, target = torch.full((1024,), 7.0).pin_memory(), torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        target.copy_(source, non_blocking=True)
    del source
    others = [torch.full((1024,), 9.0).pin_memory() for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    reused["a replay copies other contents"] = bool((target != 7).any())
    del graph, others
    torch._C._host_emptyCache()
    return reused


class Batches:
    """An iterable data set whose items are batches. No work but copies is left to the loader."""

    def __init__(self, torch, count, is_varied):
        random.seed(1)
        longest = 4 * MIB
        self.lengths = [random.randrange(longest // 4, longest) if is_varied else longest // 2 for _ in range(count)]
        self.numbers = torch.ones(longest)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.numbers[: self.lengths[index]].clone()


def loader(mode, library):
    """Times one round at each line of the standard input, and prints the seconds."""
    torch = under(mode, library)

    def batches(is_varied):
        return torch.utils.data.DataLoader(
            Batches(torch, 120, is_varied), batch_size=None, num_workers=4, pin_memory=True, persistent_workers=True
        )

    def load(of):
        for batch in of:
            batch.to("cuda", non_blocking=True)
        torch.cuda.synchronize()

    def pairs(_):
        for _ in range(20_000):
            torch.empty(64 * 1024, dtype=torch.uint8, pin_memory=True)

    cases = {"equal": (load, batches(False)), "varied": (load, batches(True)), "pairs": (pairs, None)}
    for line in sys.stdin:
        work, of = cases[line.strip()]
        start = time.perf_counter()
        work(of)
        print(time.perf_counter() - start, flush=True)


def buffers(mode, library):
    """Returns the bytes that the allocator holds, and by how much the free memory of the system shrank."""
    torch = under(mode, library)
    before = available_bytes()
    held = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
    taken = before - available_bytes()
    stats = torch.cuda.host_memory_stats()
    seconds = stats["host_alloc_time.total"] / 1e6
    assert all(one.is_pinned() for one in held)
    return {"held": stats["allocated_bytes.current"], "taken": taken, "seconds": seconds}


def available_bytes():
    text = pathlib.Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable: *(\d+)", text)[1]) << 10


def command(part, mode, *words):
    return [sys.executable, __file__, "--part", part, mode, *words]


def child(part, mode, *words):
    """Returns what a part prints in its own process, or `None` if it fails."""
    done = subprocess.run(command(part, mode, *words), capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{part} {mode}: exit status {done.returncode}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def compare_tests(library, path):
    of = {mode: child("tests", mode, library, path) for mode in (OWN, EXACT, POWERS)}
    if None in of.values():
        return [("tests", "a process failed", False)]
    rows = []
    for mode in (EXACT, POWERS):
        differ = [name for name, result in of[OWN].items() if of[mode].get(name, "")[:6] != result[:6]]
        for name in differ:
            print(f"{name}: own {of[OWN][name]}; {mode} {of[mode].get(name)}")
        allowed = {EXPECTS_POWERS_OF_TWO} if mode == EXACT else set()
        passed = sum(result == "passed" for result in of[mode].values())
        own = sum(result == "passed" for result in of[OWN].values())
        text = f"{passed} of {len(of[mode])} passed, own {own}" + "".join(f", not {name}" for name in differ)
        holds = passed > 0 and {name.split(".")[-1] for name in differ} <= allowed
        rows.append((f"tests: {'exact sizes' if mode == EXACT else 'powers of two'}", text, holds))
    return rows


def compare_graphs(library):
    own, ours = child("graphs", OWN, library), child("graphs", EXACT, library)
    if not ours:
        return [("graphs", "a process failed", False)]
    expected = {name: "used False, dropped True" in name for name in ours}
    differ = [name for name in ours if ours[name] != expected[name]]
    others = [name for name in ours if (own or {}).get(name) != ours[name]]
    as_own = "PyTorch's own fails" if not own else "PyTorch's own differs: " + ("; ".join(others) or "nowhere")
    return [("graphs: blocks reused", f"{len(ours)} cases, {as_own}" + "".join(f"; not {name}" for name in differ), not differ)]


def take_turns(library):
    rows, pipe = [], subprocess.PIPE
    both = {mode: subprocess.Popen(command("loader", mode, library), stdin=pipe, stdout=pipe, text=True) for mode in (OWN, EXACT)}

    def seconds(mode, case):
        print(case, file=both[mode].stdin, flush=True)
        return float(both[mode].stdout.readline())

    for case in ("equal", "varied", "pairs"):
        rounds = []
        for number in range(-2, ROUNDS):
            order = (OWN, EXACT) if number % 2 else (EXACT, OWN)
            rounds.append({mode: seconds(mode, case) for mode in order})
        rounds = rounds[2:]
        ratios = [of[EXACT] / of[OWN] for of in rounds]
        own, ours = (statistics.median(of[mode] for of in rounds) for mode in (OWN, EXACT))
        ratio = statistics.median(ratios)
        text = f"{ratio:.3f} of the time ({min(ratios):.3f} to {max(ratios):.3f})"
        if case == "pairs":
            rows.append(("loader: allocate, drop 64 KiB", f"{text}; {ours / 20e-6:.0f} ns, own {own / 20e-6:.0f} ns", True))
        else:
            rows.append((f"loader: {case} batches", f"{text}; {ours:.3f} s, own {own:.3f} s", round(ratio, 2) <= MOST_TIME))
    for process in both.values():
        process.stdin.close()
        process.wait()
    return rows


def compare_buffers(library):
    rows = []
    for mode in (EXACT, OWN):
        found = child("buffers", mode, library)
        if not found:
            rows.append((f"buffers: {mode}", "the process failed", mode == OWN))
            continue
        held, taken = (found[name] / GIB for name in ("held", "taken"))
        text = f"{held:.2f} GiB held, {taken:.2f} GiB of the system's; {found['seconds']:.1f} s in the driver"
        rows.append((f"buffers: {'own' if mode == OWN else 'ours'}", text, mode == OWN or found["held"] <= MOST_BYTES))
    return rows


def main(library, *words):
    library = os.path.abspath(library)
    paths = [word for word in words if word.endswith(".py")]
    parts = [word for word in words if word in PARTS] or PARTS
    rows = []
    if "tests" in parts:
        rows += compare_tests(library, os.path.abspath(paths[0])) if paths else [("tests", "left out: no TEST_CUDA", True)]
    if "graphs" in parts:
        rows += compare_graphs(library)
    if "loader" in parts:
        rows += take_turns(library)
    if "buffers" in parts:
        rows += compare_buffers(library)
    for name, text, holds in rows:
        print(f"{'holds' if holds else 'FAILS':<6} {name:<32} {text}")
    return 0 if all(holds for _, _, holds in rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        part, *rest = sys.argv[2:]
        found = {"tests": tests, "graphs": graphs, "loader": loader, "buffers": buffers}[part](*rest)
        print(json.dumps(found))
    elif len(sys.argv) < 2:
        sys.exit(__doc__)
    else:
        sys.exit(main(*sys.argv[1:]))
