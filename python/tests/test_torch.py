"""The library as PyTorch's allocator: with a replacement of PyTorch that makes the same calls, and with
PyTorch itself if it is installed.

Each test runs in a separate process, because PyTorch can change its allocator only once.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).parents[2]
STAND_IN = """
import ctypes, sys, types

class Inner:
    def __init__(self): self.set = {}
    def __getattr__(self, name):
        if not name.startswith("set_"): raise AttributeError(name)
        if name in MISSING: raise AttributeError(name)
        return lambda address: self.set.__setitem__(name, address)

class Pluggable:
    def __init__(self, path, alloc, free):
        library = ctypes.CDLL(path)
        self.alloc, self.free = getattr(library, alloc), getattr(library, free)
        self.alloc.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self.alloc.restype = ctypes.c_void_p
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        self._allocator = Inner()
    def allocator(self): return self._allocator

class Device:
    def __init__(self, index, type="cuda"): self.index, self.type = index, type

MISSING = set()
state = types.SimpleNamespace(initialized=False, current=None, device=0)

def current_device():
    # The real one starts CUDA.
    state.initialized = True
    return state.device

def change(allocator):
    if state.current is not None: raise RuntimeError("Can't swap an already initialized allocator")
    state.current = allocator

torch = types.ModuleType("torch")
torch.__version__ = "0.0"
torch.device = Device
memory = types.SimpleNamespace(CUDAPluggableAllocator=Pluggable, change_current_allocator=change)
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: state.initialized, current_device=current_device, memory=memory
)
sys.modules["torch"] = torch
import os, stratalloc

def refused(words, call):
    try: call()
    except stratalloc.LibraryError as error: assert words in str(error), error
    else: raise AssertionError(f"expected {words}")
"""


# A device without memory, and PyTorch's pluggable allocator: the replacement has no headers to compile
# with.
PLAIN = {"STRATALLOC_DEVICE": "sim", "STRATALLOC_TORCH_EXTENSION": "none"}


def run(code, **environment):
    environment = {**os.environ, **PLAIN, **environment}
    environment.pop("ALLOC_CONF", None)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


class StandIn(unittest.TestCase):
    def good(self, code):
        done = run(STAND_IN + code)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_pages_can_be_shared_after_a_switch_as_before_it(self):
        done = run(
            STAND_IN
            + """
ctypes.CDLL(os.environ["STRATALLOC_LIBRARY"]).stratalloc_torch_share_pages(1)
ours = stratalloc.install(conf="expandable_segments:True")
for conf in ("backend:native,expandable_segments:True", "expandable_segments:True,max_split_size_mb:64"):
    assert len(stratalloc.allocator(0).share(ours.alloc(1 << 20, 0, None))) > 9
    stratalloc.switch(conf, device=0)
assert len(stratalloc.allocator(0).share(ours.alloc(1 << 20, 0, None))) > 9
stratalloc.switch("expandable_segments:True,expandable_segments_ipc:False", device=0)
try: stratalloc.allocator(0).share(ours.alloc(1 << 20, 0, None))
except stratalloc.Error as error: assert "expandable_segments_ipc" in str(error), error
else: raise AssertionError
""",
            STRATALLOC_DEVICE="host",
        )
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_library_serves(self):
        self.good("""
refused("not installed", stratalloc.memory_stats)
stratalloc.empty_cache()
ours = stratalloc.install(conf="max_split_size_mb:64")
assert state.current is ours and stratalloc.install() is ours
assert len(ours.allocator().set) == 8 and all(ours.allocator().set.values())
block = ours.alloc(1 << 20, 1, None)
assert block
stats = stratalloc.memory_stats(1)
assert stats["allocation.all.current"] == 1 and stats["max_split_size"] == 64 << 20, stats
with stratalloc.allocator(1) as whole:
    assert whole.name == "native" and whole.base_allocation(block) == (block, 2 << 20)
assert stratalloc.memory_stats(1) == stats
assert stratalloc.memory_stats(Device(1)) == stats
assert stratalloc.memory_stats()["allocation.all.current"] == 0
assert "allocated_bytes" in stratalloc.memory_summary(1)
ours.free(block, 1 << 20, 1, None)
reset = ctypes.CFUNCTYPE(None)(ours.allocator().set["set_reset_fn"])
assert stratalloc.memory_stats(1)["reserved_bytes.all.current"] > 0
reset()
assert stratalloc.memory_stats(1)["reserved_bytes.all.current"] == 0
stratalloc.empty_cache()
stratalloc.set_conf("roundup_power2_divisions:4", device=1)
old = ours.alloc(1 << 20, 1, None)
stratalloc.switch("backend:native,expandable_segments:True", device=1)
new = ours.alloc(1 << 20, 1, None)
stratalloc.set_conf("backend:cudaMallocAsync", device=1)
newest = ours.alloc(1 << 20, 1, None)
assert len({old, new, newest}) == 3
assert stratalloc.memory_stats(1)["allocation.all.current"] == 3
try:
    stratalloc.switch("backend:no_such", device=1)
    raise AssertionError("it switched to nothing")
except stratalloc.Error as error:
    assert "no_such" in str(error)
for block in (old, new, newest):
    ours.free(block, 1 << 20, 1, None)
assert stratalloc.memory_stats(1)["allocation.all.current"] == 0
refused("installed already", lambda: stratalloc.install(conf=""))
""")

    def test_the_default_is_the_current_device(self):
        self.good("""
ours = stratalloc.install()
assert stratalloc.memory_stats()["allocation.all.current"] == 0 and not state.initialized
blocks = [ours.alloc(1 << 20, 1, None), ours.alloc(1 << 20, 1, None), ours.alloc(1 << 20, 0, None)]
state.initialized, state.device = True, 1
for device in (None, Device(None), 1, Device(1)):
    assert stratalloc.memory_stats(device)["allocation.all.current"] == 2, device
assert stratalloc.memory_stats()["allocation.all.current"] == 2
assert stratalloc.memory_summary() == stratalloc.memory_summary(1) != stratalloc.memory_summary(0)
stratalloc.set_conf("max_split_size_mb:64")
stratalloc.switch("max_split_size_mb:64")
assert stratalloc.memory_stats(1)["max_split_size"] == 64 << 20
assert stratalloc.memory_stats(0)["max_split_size"] == -1
for bad, kind in ((Device(0, "cpu"), ValueError), (-1, ValueError), ("cuda", TypeError)):
    try: stratalloc.memory_stats(bad)
    except kind: pass
    else: raise AssertionError(bad)
try: stratalloc.memory_stats(1000)
except stratalloc.Error as error: assert error.status == 1, error
else: raise AssertionError
""")

    def test_to_ask_opens_no_device(self):
        # A kind of device that cannot be opened.
        done = run(STAND_IN + """
stratalloc.install()
stats = stratalloc.memory_stats(1)
assert len(stats) == 127 and stats.pop("max_split_size") == -1 and not any(stats.values()), stats
assert "allocated_bytes" in stratalloc.memory_summary(1)
stratalloc.empty_cache()
try: stratalloc.set_conf("", device=1)
except stratalloc.Error as error: assert "is no device" in str(error), error
else: raise AssertionError
""", STRATALLOC_DEVICE="gpu")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_an_empty_cache_that_fails_raises(self):
        self.good("""
stratalloc.install()
stratalloc._library.load().dll.stratalloc_torch_empty_cache = lambda: 8
try: stratalloc.empty_cache()
except stratalloc.Error as error: assert error.status == 8, error
else: raise AssertionError
""")

    def test_a_strategys_own_counters_are_shown(self):
        done = self.good("""
ours = stratalloc.install(conf="backend:cudaMallocAsync,backend:cudaMallocAsync")
block = ours.alloc(1 << 20, 0, 7)
record = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
record(ours.allocator().set["set_record_stream_fn"])(block, 7)
assert stratalloc.memory_stats()["malloc_async.own_stream_recorded"] == 1
assert "malloc_async.own_stream_recorded 1" in stratalloc.memory_summary()
""")
        self.assertEqual(done.stderr.count("stratalloc: warning: backend is set at byte 0 and"), 1)

    def test_null_comes_with_a_reason(self):
        done = self.good("""
ours = stratalloc.install()
assert ours.alloc(1 << 50, 0, None) is None
assert "out of memory on device 0" in stratalloc.last_error()
""")
        self.assertIn("stratalloc: out of memory on device 0", done.stderr)

    def test_too_late_is_reported(self):
        self.good("""
state.initialized = True
refused("CUDA is in use already", stratalloc.install)
""")

    def test_a_second_allocator_is_refused(self):
        self.good("""
state.current = object()
refused("Can't swap", lambda: stratalloc.install(conf="max_split_size_mb:64"))
assert "ALLOC_CONF" not in os.environ
""")

    def test_an_old_pytorch_is_refused(self):
        self.good("""
MISSING.add("set_begin_allocate_to_pool")
refused("too old", stratalloc.install)
MISSING.clear(); MISSING.add("set_base_alloc_fn")
stratalloc.install()
""")

    def test_a_pytorch_without_cuda_is_refused(self):
        self.good("""
def nothing(*_): raise AttributeError("_cuda_customAllocator")
memory.CUDAPluggableAllocator = nothing
refused("takes no allocator", stratalloc.install)
""")

    def test_a_pytorch_for_rocm_is_refused_with_the_reason(self):
        self.good("""
torch.version = types.SimpleNamespace(hip="6.4.43482", cuda=None)
refused("built for ROCm (HIP 6.4.43482)", stratalloc.install)
torch.version.hip = None
stratalloc.install()
""")

    def test_a_bad_configuration_changes_nothing(self):
        self.good("""
try: stratalloc.install(conf="max_split_size:1")
except stratalloc.Error as error: assert "did you mean" in str(error), error
else: raise AssertionError
assert state.current is None and "ALLOC_CONF" not in os.environ
""")


class Readmes(unittest.TestCase):
    """Runs the examples of the READMEs, unchanged but for the library's path."""

    STAND_IN = STAND_IN + """
def ones(count, device):
    assert device == "cuda"
    state.initialized = True
    return state.current.alloc(4 * count, state.device, None)
torch.ones = ones
# A reader's program starts without it.
del torch, stratalloc
"""

    def examples(self, file):
        text = (ROOT / file).read_text()
        blocks = re.findall("^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        # Other blocks show PyTorch's own functions.
        blocks = [block for block in blocks if "stratalloc." in block]
        path = repr(os.environ["STRATALLOC_LIBRARY"])
        return [block.replace('"target/dist/libstratalloc.so"', path) for block in blocks]

    def run_all(self, code):
        done = run(self.STAND_IN + code)
        self.assertEqual((done.returncode, done.stderr), (0, ""), code)
        return done.stdout

    def test_the_packages_own(self):
        under, whole, alone = self.examples("python/README.md")
        output = self.run_all(under + whole)
        self.assertIn("native (", output)
        self.assertEqual(output.splitlines()[0], str(4 << 20))
        self.assertIn("allocated_bytes", output)
        self.run_all("import stratalloc\n" + alone)

    def test_the_projects(self):
        (block,) = self.examples("README.md")
        self.run_all(block)

    def test_the_guides(self):
        install, calls, advice = self.examples("docs/pytorch.md")
        recording = str(ROOT / "tests/traces/cudagraph.default.pickle.xz")
        use = "import torch\nblock = torch.ones(1 << 20, device='cuda')\n"
        names = f"paths, executor = [{recording!r}], None\n"
        output = self.run_all(
            install + "stratalloc.record_memory_history()\n" + use + calls + names + advice
        )
        self.assertIn("cudagraph.default", output)

    def test_the_history(self):
        (record,) = self.examples("docs/history.md")
        with tempfile.TemporaryDirectory() as folder:
            code = f"import os, stratalloc\nos.chdir({folder!r})\n"
            code += "allocator = stratalloc.Allocator('backend:native', device='sim')\n"
            self.run_all(code + record.replace("...", "allocator.allocate(512)"))
            self.assertGreater((pathlib.Path(folder) / "run.pickle").stat().st_size, 100)


class Real(unittest.TestCase):
    def setUp(self):
        if run("import torch; assert torch.version.cuda").returncode != 0:
            print("skipped: no torch", file=sys.stderr)
            self.skipTest("no torch with CUDA")

    def test_pytorch_takes_the_library(self):
        done = run("import stratalloc; stratalloc.install(); print('good')")
        self.assertEqual((done.returncode, done.stdout), (0, "good\n"), done.stderr)

    def test_tensors_live_in_it(self):
        if run("import torch; assert torch.cuda.is_available()").returncode != 0:
            print("skipped: no GPU", file=sys.stderr)
            self.skipTest("no GPU")
        done = run(
            """
import stratalloc, torch
stratalloc.install()
x = torch.ones(1 << 20, device="cuda")
assert stratalloc.memory_stats()["allocation.all.current"] == 1
assert float(x.sum()) == 1 << 20
del x
torch.cuda.empty_cache()
assert stratalloc.memory_stats()["reserved_bytes.all.current"] == 0
""",
            STRATALLOC_DEVICE="cuda",
        )
        self.assertEqual(done.returncode, 0, done.stderr)


class NoPyTorch(unittest.TestCase):
    def test_its_absence_is_reported(self):
        done = run("import sys; sys.modules['torch'] = None\nimport stratalloc; stratalloc.install()")
        self.assertIn("LibraryError: PyTorch cannot be imported", done.stderr)


if __name__ == "__main__":
    unittest.main()
