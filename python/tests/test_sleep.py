"""Tags under PyTorch, torch_memory_saver and vLLM over them, with a replacement of PyTorch and host memory.

Without the wheels of torch_memory_saver and vLLM, replacements with the same calls are used. The folder
``STRATALLOC_WHEELS`` has the wheels; only their Python files are used.
"""

import glob
import os
import unittest

from test_torch import ROOT, STAND_IN, run

TORCH = STAND_IN + '''
import contextlib, itertools
state.waits, state.capturing = [], False
numbers = itertools.count(1)

class MemPool:
    def __init__(self):
        self.id = (0, next(numbers))
        self.device = state.device
        stratalloc.allocator(self.device).ensure_pool(self.id)
    def __del__(self):
        stratalloc.allocator(self.device).release_pool(self.id)
        stratalloc.allocator(self.device).empty_pool(self.id)

@contextlib.contextmanager
def device(index):
    before, state.device = state.device, index
    yield
    state.device = before

@contextlib.contextmanager
def use_mem_pool(pool):
    with stratalloc.allocator(pool.device).pool_scope(pool.id): yield

class graph:
    def __init__(self, graph, pool, stream, capture_error_mode): graph.pool = pool
    def __enter__(self): pass
    def __exit__(self, *error): pass

cuda = torch.cuda
cuda.MemPool, cuda.device, cuda.use_mem_pool, cuda.graph = MemPool, device, use_mem_pool, graph
cuda.synchronize = state.waits.append
cuda.empty_cache = lambda: stratalloc.empty_cache()
cuda.is_current_stream_capturing = lambda: state.capturing
memory.MemPool = MemPool
torch.Tensor, torch.uint8 = object, "uint8"

class Tensor:
    """Bytes of the device, or of the host."""
    def __init__(self, address, size, index=0, held=None):
        self.address, self.nbytes, self.shape, self.dtype = address, size, (size,), "uint8"
        self.device, self.held = Device(index), held
    def data_ptr(self): return self.address
    def is_contiguous(self): return True
    def bytes(self): return ctypes.string_at(self.address, self.nbytes)
    def __getitem__(self, part): return Tensor(self.address, part.stop, self.device.index, self)
    def view(self, _): return self
    def clone(self):
        buffer = ctypes.create_string_buffer(self.bytes(), self.nbytes)
        return Tensor(ctypes.addressof(buffer), self.nbytes, self.device.index, buffer)

def empty(size, dtype):
    buffer = ctypes.create_string_buffer(size)
    return Tensor(ctypes.addressof(buffer), size, None, buffer)

torch.empty = empty

def filled(size, byte):
    tensor = Tensor(ours.alloc(size, state.device, None), size, state.device)
    assert tensor.address, stratalloc.last_error()
    ctypes.memset(tensor.address, byte, size)
    return tensor

def free(tensor): ours.free(tensor.address, tensor.nbytes, tensor.device.index, None)
def states(index=None): return {name: tag["state"] for name, tag in stratalloc.tags(index).items()}

ours = stratalloc.install(conf=CONF)
# The compiled class is not needed: the tests call the library as it does.
stratalloc._torch._installed = stratalloc._torch.CUDAAllocator("", None)
MIB = 1 << 20
'''
# torch_memory_saver's object: it calls an implementation that the first use creates.
SAVER = """
saver = types.ModuleType("torch_memory_saver")

class Saver:
    _impl = None
    def region(self, tag="default", enable_cpu_backup=False, **words):
        return self._impl.region(tag=tag, enable_cpu_backup=enable_cpu_backup, **words)
    def cuda_graph(self, cuda_graph, pool=None, tag="default", enable_cpu_backup=False):
        words = {"tag": tag, "enable_cpu_backup": enable_cpu_backup, "capture_error_mode": "global"}
        return self._impl.cuda_graph(cuda_graph=cuda_graph, pool=pool, stream=None, **words)
    def disable(self): return self._impl.disable()
    def pause(self, tag=None): self._impl.pause(tag=tag)
    def resume(self, tag=None): self._impl.resume(tag=tag)
    def set_disk_backup_dir(self, path):
        os.makedirs(path, exist_ok=True)
        self._impl._binary_wrapper.cdll.tms_set_disk_backup_dir(path.encode())
    def get_cpu_backup(self, x, zero_copy=False): return self._impl.get_cpu_backup(x, zero_copy=zero_copy)
    @property
    def retain_cpu_backup(self): return self._impl._binary_wrapper.cdll.tms_get_retain_cpu_backup()
    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value): self._impl._binary_wrapper.cdll.tms_set_retain_cpu_backup(value)

saver.torch_memory_saver = Saver()
sys.modules["torch_memory_saver"] = saver
"""
# What vLLM's modules about sleep mode import, and those modules.
VLLM = """
import logging
os.environ["VLLM_PLUGINS"] = "another,stratalloc"

def module(name, **names):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(names)
    return made

platform = types.SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False, is_rocm=lambda: False)
module("vllm", __path__=[WHEEL + "/vllm"] if WHEEL else [])
module("vllm.logger", init_logger=logging.getLogger)
module("vllm.platforms", current_platform=platform)
module("vllm.utils", __path__=[])
module("vllm.utils.system_utils", find_loaded_library=lambda name: name)
module("vllm.utils.torch_utils", PIN_MEMORY=True)
module("vllm.cumem_allocator", init_module=None, python_create_and_map=None, python_unmap_and_release=None)
module("vllm.distributed", __path__=[])
module("vllm.distributed.device_communicators", __path__=[])
module("vllm.distributed.device_communicators.cuda_wrapper", CudaRTLibrary=lambda: None)
if not WHEEL:
    class SleepModeBackend:
        def __init__(self): self._state = "RUNNING"
        def state(self): return self._state
    class Factory:
        known = {}
        def register_backend(name, path, of):
            if name in Factory.known: raise ValueError(name)
            Factory.known[name] = (path, of)
        def create_backend(config):
            path, of = Factory.known[config.sleep_mode_backend]
            return getattr(sys.modules[path], of)()
    class Cumem: instance = None
    allocators = "vllm.device_allocator"
    module(allocators, __path__=[], get_mem_allocator_instance=lambda: Cumem.instance)
    module(allocators + ".cumem", CuMemAllocator=Cumem)
    parts = {"SleepModeBackend": SleepModeBackend, "SleepModeBackendFactory": Factory}
    module(allocators + ".sleep_mode_backend", **parts)
"""


def wheel(name):
    """Returns the path of a package's wheel, or an empty text."""
    found = glob.glob(os.path.join(os.environ.get("STRATALLOC_WHEELS", "/nowhere"), f"{name}-*.whl"))
    return found[0] if found else ""


class Sleep(unittest.TestCase):
    def good(self, code, conf="", **environment):
        environment = {"STRATALLOC_DEVICE": "host", **environment}
        done = run(f"CONF = {conf!r}\n{TORCH}{code}", **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done

    def test_tensors_sleep_and_wake(self):
        for conf in ("", "expandable_segments:True"):
            self.good(
                """
with stratalloc.tag("weights", backup="host") as weights:
    a = filled(MIB, 1)
    with stratalloc.tag("cache", backup=None):
        b = filled(MIB, 2)
        with stratalloc.tag("weights"): c = filled(3 * MIB, 3)
    d = filled(MIB, 4)
e = filled(MIB, 5)
tags = stratalloc.tags()
assert list(tags) == ["weights", "cache"] and states() == {"weights": "awake", "cache": "awake"}
assert [tags[name]["live_bytes"] // MIB for name in tags] == [5, 1]
options = {"backup": None, "keep": False, "requests": "fail", "directory": None, "keep_free": False}
assert tags["cache"]["options"] == options
paused = stratalloc.pause()
assert paused["weights"]["copied_bytes"] == 5 * MIB and paused["cache"]["dropped_bytes"] == MIB
assert states() == {"weights": "asleep", "cache": "asleep"} and state.waits == [0, 0]
assert weights.read_backup(c.address, 2) == bytes([3, 3])
free(d)
assert stratalloc.tags()["weights"]["backed_bytes"] == 4 * MIB
# Nothing happens to tags that are asleep, and requests in them fail.
assert stratalloc.pause("weights")["weights"]["copied_bytes"] == 0
with weights: assert ours.alloc(MIB, 0, None) is None and "asleep" in stratalloc.last_error()
assert stratalloc.resume("cache") and states() == {"weights": "asleep", "cache": "awake"}
stratalloc.resume()
assert all(tensor.bytes() == bytes([byte]) * tensor.nbytes for byte, tensor in ((1, a), (3, c), (5, e)))
assert b.bytes() != bytes([2]) * MIB
assert stratalloc.pause("cache", backup="host")["cache"]["copied_bytes"] == MIB
assert stratalloc.pause("weights", backup=None)["weights"]["dropped_bytes"] == 4 * MIB
""",
                conf,
            )

    def test_a_tag_with_a_directory_saves_in_files(self):
        self.good("""
import pathlib, tempfile
folder = tempfile.TemporaryDirectory()
with stratalloc.tag("weights", directory=pathlib.Path(folder.name), keep_free=True) as tag: a = filled(MIB, 1)
assert tag is stratalloc.tag("weights", directory=folder.name, keep_free=True)
refused("exists with directory=", lambda: stratalloc.tag("weights", directory=None))
refused("exists with keep_free=True", lambda: stratalloc.tag("weights", keep_free=False))
stratalloc.pause()
assert [os.path.getsize(os.path.join(folder.name, name)) for name in os.listdir(folder.name)] == [MIB]
stratalloc.resume()
assert a.bytes() == bytes([1]) * MIB and os.listdir(folder.name) == []
tag.directory = os.path.join(folder.name, "missing")
try: stratalloc.pause()
except stratalloc.Error as error: assert "a backup of 1048576 bytes in files in" in str(error), error
else: raise AssertionError
assert states() == {"weights": "awake"} and a.bytes() == bytes([1]) * MIB
tag.directory = None
assert stratalloc.pause()["weights"]["copied_bytes"] == MIB
""")

    def test_threads_use_one_tag_at_once(self):
        self.good("""
import threading
made, both = [], threading.Barrier(2)
def work():
    with stratalloc.tag("weights"):
        both.wait()
        made.append(filled(MIB, 1))
        both.wait()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
filled(MIB, 2)
assert len(made) == 2 and stratalloc.tags()["weights"]["live_bytes"] == 2 * MIB
""")

    def test_each_device_has_its_own_names(self):
        self.good("""
with stratalloc.tag("weights"): a = filled(MIB, 1)
with stratalloc.tag("weights", backup=None, device=1), device(1): b = filled(MIB, 2)
state.initialized = True
assert states() == states(1) == {"weights": "awake"}
assert stratalloc.pause(device=Device(1))["weights"]["dropped_blocks"] == 1
assert states() == {"weights": "awake"} and states(1) == {"weights": "asleep"} and state.waits == [1]
state.device = 1
assert stratalloc.resume("weights") and states(1) == {"weights": "awake"}
""")

    def test_what_cannot_be_done_is_refused(self):
        self.good("""
tag = stratalloc.tag("weights", requests="wait")
assert tag is stratalloc.tag("weights") is stratalloc.tag("weights", backup="host", keep=False)
refused("'weights' exists with backup='host', not None", lambda: stratalloc.tag("weights", backup=None))
refused("exists with requests='wait', not 'fail'", lambda: stratalloc.tag("weights", requests="fail"))
refused("no tag is named 'weight' on device 0; its tags: 'weights'", lambda: stratalloc.pause("weight"))
refused("no tag is named 'weights' on device 1; its tags: none", lambda: stratalloc.resume("weights", device=1))
for wrong in ({"backup": "disk"}, {"requests": "never"}):
    try: stratalloc.tag("other", **wrong)
    except ValueError as error: assert "expected" in str(error), error
    else: raise AssertionError(wrong)
state.capturing = True
for call in (tag.pause, tag.resume): refused("while a graph is captured", call)
assert states() == {"weights": "awake"} and state.waits == []
state.capturing = False
try: stratalloc.switch("expandable_segments:True")
except stratalloc.Error as error: assert "pool" in str(error), error
else: raise AssertionError
tag.close()
assert states() == {}
stratalloc.switch("backend:cudaMallocAsync")
try: stratalloc.tag("weights")
except stratalloc.Error as error: assert error.status == 7, error
else: raise AssertionError
assert states() == {}
stratalloc._torch._installed = ours
refused("tags need the compiled class", lambda: stratalloc.tag("weights"))
stratalloc._torch._installed = None
for call in (lambda: stratalloc.tag("weights"), stratalloc.tags, stratalloc.pause, stratalloc.resume):
    refused("not installed", call)
""")

    def test_a_closed_tag_leaves_its_tensors(self):
        self.good("""
with stratalloc.tag("weights") as tag: a = filled(MIB, 1)
tag.close(); tag.close()
assert states() == {} and a.bytes() == bytes([1]) * MIB
with stratalloc.tag("weights", backup=None) as other: b = filled(MIB, 2)
assert other.pool != tag.pool
stratalloc.pause()
assert a.bytes() == bytes([1]) * MIB
free(a); free(b)
stratalloc.empty_cache()
assert stratalloc.memory_stats()["reserved_bytes.all.current"] == 0
""")

    def test_a_resume_without_memory_names_what_is_missing(self):
        self.good("""
whole = stratalloc.allocator()
whole.set_memory_fraction(64 * MIB / whole.memory_info()[1])
with stratalloc.tag("weights") as tag: a = filled(40 * MIB, 1)
tag.pause()
b = filled(40 * MIB, 2)
try: stratalloc.resume()
except stratalloc.OutOfMemoryError as error: assert 'tag "weights" stays asleep' in str(error), error
else: raise AssertionError
assert states() == {"weights": "asleep"}
free(b)
stratalloc.resume()
assert a.bytes() == bytes([1]) * 40 * MIB
""")


class MemorySaver(unittest.TestCase):
    good = Sleep.good

    def saver(self, code, **environment):
        # The real one needs NumPy.
        found = wheel("torch_memory_saver")
        real = f"sys.path.insert(0, {found!r})\ntorch.version = types.SimpleNamespace(hip=None)\n"
        saver = real if found else SAVER
        use = "from torch_memory_saver import torch_memory_saver as saver\nfrom stratalloc import memory_saver\n"
        self.good(saver + use + code, **environment)

    def test_its_calls_use_tags(self):
        self.saver("""
memory_saver.enable(); memory_saver.enable()
with saver.region("weights", enable_cpu_backup=True): a = filled(MIB, 1)
with saver.region("weights"): b = filled(MIB, 2)
with saver.region("cache"):
    with saver.region("mapped", enable_cpu_backup=True, cpu_backup_backend="mmap"): c = filled(MIB, 3)
assert list(states()) == ["weights, pinned", "weights, dropped", "cache, dropped", "mapped, mmap"]
saver.pause("weights")
assert list(states().values()) == ["asleep", "asleep", "awake", "awake"]
read = saver._impl.get_cpu_backup
assert read(a).bytes() == bytes([1]) * MIB and read(b) is read(c) is None
saver.pause()
saver.resume()
assert a.bytes() == bytes([1]) * MIB and b.bytes() != bytes([2]) * MIB and c.bytes() == bytes([3]) * MIB
assert read(a) is None
""")

    def test_a_backup_on_disk_is_in_files(self):
        # The steps of torch_memory_saver's example `disk_backup`.
        self.saver("""
import tempfile
memory_saver.enable()
folder = tempfile.TemporaryDirectory()
directory = os.path.join(folder.name, "backups")
saver.set_disk_backup_dir(directory)
with saver.region(enable_disk_backup=True): large, small = filled(13 * MIB + 12345, 1), filled(7, 2)
with saver.region(enable_disk_backup=False): dropped = filled(20 * MIB, 3)
totals = set()
for _ in range(3):
    saver.pause()
    files = os.listdir(directory)
    assert len(files) >= 2, files
    totals.add(sum(os.path.getsize(os.path.join(directory, name)) for name in files))
    assert saver._impl.get_cpu_backup(small).bytes() == bytes([2]) * 7
    saver.resume()
    assert large.bytes() == bytes([1]) * large.nbytes and small.bytes() == bytes([2]) * 7
    assert dropped.bytes()[:3] != bytes([3]) * 3
assert len(totals) == 1 and min(totals) >= large.nbytes
assert os.listdir(directory) == [] and list(states()) == ["default, disk", "default, dropped"]
saver.set_disk_backup_dir(os.path.join(folder.name, "others"))
saver.retain_cpu_backup = True
saver.pause()
assert len(os.listdir(os.path.join(folder.name, "others"))) >= 2
saver.resume()
assert not saver._impl._kept and small.bytes() == bytes([2]) * 7
""")

    def test_free_memory_is_mapped_again(self):
        # The steps of torch_memory_saver's example `training_engine`.
        self.saver(
            """
memory_saver.enable()
def used(): return stratalloc.memory_stats()["reserved_bytes.all.current"]
def forward(): free(filled(64 * MIB, 9))
first = filled(MIB, 1)
initial = used()
weights = [filled(size, 2) for size in (16 * MIB, 1 * MIB, 1024, 42)]
forward()
after_forward = used()
assert after_forward >= initial + 80 * MIB
saver.pause()
after_pause = used()
assert after_pause == 0
with saver.disable():
    other = filled(20 * MIB, 3)
    assert used() >= after_pause + 20 * MIB
    free(other)
assert used() == after_pause
saver.resume()
assert used() == after_forward
forward()
assert used() == after_forward
assert all(of.bytes() == bytes([2]) * of.nbytes for of in weights)
""",
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )

    def test_a_retained_backup_can_be_read_after_the_resume(self):
        self.saver("""
memory_saver.enable()
with saver.region("weights", enable_cpu_backup=True): a, b = filled(MIB, 1), filled(MIB, 2)
read = saver._impl.get_cpu_backup
saver.pause()
first = read(a, zero_copy=True)
assert saver.retain_cpu_backup is False
saver.retain_cpu_backup = True
saver.resume()
ctypes.memset(a.address, 9, MIB)
again = read(a, zero_copy=True)
assert again.address == first.address and again.bytes() == bytes([1]) * MIB == read(a).bytes()
assert read(b).bytes() == bytes([2]) * MIB
saver.pause()
assert read(a, zero_copy=True).address == first.address and first.bytes() == bytes([9]) * MIB
saver.retain_cpu_backup = False
saver.resume()
assert read(a) is read(b) is None and a.bytes() == bytes([9]) * MIB
""")

    def test_graphs_have_pools_of_their_own_unless_they_share_one(self):
        self.saver("""
memory_saver.enable()
class Graph: pass
graphs = [Graph() for _ in range(4)]
for each in graphs[:2]:
    with saver.cuda_graph(each, tag="graph"): pass
for each in graphs[2:]:
    with saver.cuda_graph(each, pool=(7, 0), tag="graph"): pass
pools = [each.pool for each in graphs]
assert len(set(pools)) == 3 and pools[2] == pools[3]
saver.pause("graph")
assert list(states().values()) == ["asleep"] * 3
saver.resume("graph")
del graphs[0], each
saver.pause()
assert list(states()) == ["graph of graph 1, dropped", "graph of graphs in (7, 0), dropped"], states()
""")

    def test_everything_is_in_a_tag_if_the_environment_says_so(self):
        self.saver(
            """
import threading
memory_saver.enable()
cdll = saver._impl._binary_wrapper.cdll
def settings():
    names = ("current_tag", "enable_cpu_backup", "cpu_backup_backend", "interesting_region")
    return [getattr(cdll, "tms_get_" + name)() for name in names]
assert settings() == [b"default", True, b"pinned", True]
a = filled(MIB, 1)
thread = threading.Thread(target=lambda: filled(MIB, 2))
thread.start(); thread.join()
with saver.region("grads"):
    assert settings() == [b"grads", False, b"pinned", True]
    b = filled(MIB, 3)
assert settings() == [b"default", True, b"pinned", True]
assert stratalloc.tags()["default, pinned"]["live_bytes"] == 2 * MIB
saver.pause()
with saver.disable():
    assert settings()[3] is False
    c = filled(MIB, 4)
    assert c.bytes() == bytes([4]) * MIB
    free(c)
saver.resume()
assert a.bytes() == bytes([1]) * MIB
""",
            TMS_INIT_ENABLE="1",
            TMS_INIT_ENABLE_CPU_BACKUP="1",
        )

    def test_it_is_enabled_before_its_first_use(self):
        self.saver("""
saver._impl = object()
refused("in use already", memory_saver.enable)
saver._impl = stratalloc._torch._installed = None
refused("not installed", memory_saver.enable)
""")


class Vllm(unittest.TestCase):
    good = Sleep.good

    def vllm(self, code, variable="another,stratalloc"):
        start = f"WHEEL = {wheel('vllm')!r}\n{VLLM}\nos.environ['VLLM_PLUGINS'] = {variable!r}\n"
        self.good(start + "import stratalloc.vllm\n" + code)

    def test_its_backend_uses_tags(self):
        self.vllm("""
stratalloc.vllm.register(); stratalloc.vllm.register()
from vllm.device_allocator import get_mem_allocator_instance, sleep_mode_backend as interface
config = types.SimpleNamespace(sleep_mode_backend="stratalloc")
backend, pools = interface.SleepModeBackendFactory.create_backend(config), get_mem_allocator_instance()
assert isinstance(backend, interface.SleepModeBackend) and backend.state() == "RUNNING"
assert pools.get_current_usage() == 0
kept = {}
for byte, name in enumerate(("weights", "kv_cache", "runtime", None), 1):
    with pools.use_memory_pool(tag=name): kept[name or "default"] = filled(MIB, byte)
def intact(): return [name for byte, (name, tensor) in enumerate(kept.items(), 1) if tensor.bytes()[0] == byte]
assert pools.get_current_usage() >= 4 * MIB
backend.suspend(level=1)
usage = pools.get_current_usage()
assert backend.state() == "SUSPENDED" and set(states().values()) == {"asleep"} and usage >= 4 * MIB
backend.resume(["weights"])
assert backend.state() == "SUSPENDED" and [name for name, of in states().items() if of == "asleep"] == ["kv_cache"]
backend.resume(["kv_cache"])
assert backend.state() == "RUNNING" and intact() == ["weights", "runtime"], intact()
backend.suspend(level=2)
backend.resume()
assert backend.state() == "RUNNING" and intact() == ["runtime"], intact()
backend.discard(("runtime", "unknown"))
assert backend.state() == "SUSPENDED" and states()["runtime"] == "asleep" and states()["weights"] == "awake"
backend.resume(None)
assert intact() == []
flags = ("is_supported", "preserves_communicators", "preserves_compiled_artifacts",
         "preserves_graphs_with_communicators", "supports_durable_storage")
assert [getattr(type(backend), flag)() for flag in flags] == [True, True, True, False, False]
with pools.cudagraph_pool() as id: assert id == stratalloc.tag("cudagraph").pool
pools.release_pools()
assert states() == {}
""")

    def test_without_the_variable_only_the_name_is_known(self):
        self.vllm(
            """
stratalloc.vllm.register()
from vllm.device_allocator import cumem, sleep_mode_backend as interface
assert cumem.CuMemAllocator.instance is None
cumem.CuMemAllocator.instance = object()
config = types.SimpleNamespace(sleep_mode_backend="stratalloc")
refused("set VLLM_PLUGINS", lambda: interface.SleepModeBackendFactory.create_backend(config))
refused("has allocated already", stratalloc.vllm.use)
""",
            variable="",
        )

    def test_an_older_vllm_is_refused_if_it_is_named(self):
        self.good("""
import stratalloc.vllm
stratalloc.vllm.register()
os.environ["VLLM_PLUGINS"] = "stratalloc"
refused("no sleep-mode backends", stratalloc.vllm.register)
""")

    def test_the_package_names_the_plugin(self):
        text = (ROOT / "python" / "pyproject.toml").read_text()
        self.assertIn('[project.entry-points."vllm.general_plugins"]\nstratalloc = "stratalloc.vllm:register"\n', text)


if __name__ == "__main__":
    unittest.main()
