"""Calls PyTorch's memory functions, implemented by the library, each in a separate process; no kernel
runs.

usage: calls.py [CONFIGURATION]    (STRATALLOC_LIBRARY and, if need be, STRATALLOC_TORCH_EXTENSION are
set)
"""

import ctypes
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap

# Calls that some strategies do not support, as the page "Under PyTorch" lists.
NOT_BY_THE_DRIVERS_POOLS = {
    "a_checkpoint",
    "another_process",
    "a_pools_options",
    "nccl_registers_a_pool",
    "without_the_cache",
    "frames_of_segments",
    "rejections",
    "bytes_of_pools",
    "tags",
    "tags_in_a_history",
    "tags_of_torch_memory_saver",
    "programs_of_the_guide",
}
NOT_BY_PAGES = {"a_pools_options", "frames_of_segments"}
# Calls with the library as PyTorch's host allocator.
PINNED = {
    "pinned_tensors": True,
    "pinned_batches": True,
    "pinned_settings": "pinned_max_cached_size_mb:1",
    "pinned_memory_after_a_fork": True,
}
# The first version of PyTorch that has the call.
SINCE = {
    "rejections": (2, 12),
    "the_stack_of_a_tensor": (2, 12),
    "bytes_of_pools": (2, 13),
    "annotated_tensors": (2, 14),
    "pinned_memory_in_a_snapshot": (2, 14),
    "pinned_settings": (2, 13),
}


def statistics():
    x = empty(1 << 20)
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.current"] == 1 and torch.cuda.memory_allocated() >= 4 << 20
    del x
    assert torch.cuda.max_memory_allocated() >= 4 << 20 and torch.cuda.memory_allocated() == 0
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert "Allocated" in torch.cuda.memory_summary()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
    assert torch.accelerator.memory_stats()["num_device_free"] >= 0


def history():
    memory = torch.cuda.memory
    memory._record_memory_history()
    x = empty(1 << 20)
    trace = memory._snapshot()["device_traces"][0]
    assert trace[-1]["action"] == "alloc" and len(trace[-1]["frames"]) > 3
    del x
    actions = [entry["action"] for entry in memory._snapshot()["device_traces"][0]]
    assert actions[-2:] == ["free_requested", "free_completed"], actions
    memory._set_memory_metadata("abc")
    y = empty(10)
    assert memory._get_memory_metadata() == "abc"
    assert memory._snapshot()["device_traces"][0][-1]["user_metadata"] == "abc"
    memory._record_memory_history(max_entries=2, clear_history=True, stacks="python")
    assert len(memory._snapshot()["device_traces"][0]) <= 2
    memory._record_memory_history(None)
    assert not memory._snapshot()["device_traces"][0]
    del y


def metadata_of_threads():
    import threading

    memory = torch.cuda.memory
    memory._record_memory_history()
    memory._set_memory_metadata("main")
    seen = []

    def other():
        seen.append(memory._get_memory_metadata())
        empty(700)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    empty(800)
    trace = memory._snapshot()["device_traces"][0]
    words = {entry["size"]: entry["user_metadata"] for entry in trace if entry["action"] == "alloc"}
    assert seen == [""] and words == {2800: "", 3200: "main"}, (seen, words)


def annotated_tensors():
    memory = torch.cuda.memory
    assert memory._memory_metadata_supported()
    memory._record_memory_history()
    x = empty(1000)
    memory._annotate_tensor(x, "weights")
    y = empty(1000)
    trace = memory._snapshot()["device_traces"][0]
    annotated = [entry for entry in trace if entry["action"] == "annotate"]
    assert [entry["user_metadata"] for entry in annotated] == ["weights"]
    assert (annotated[0]["addr"], annotated[0]["size"]) == (x.data_ptr(), 4000)
    # The annotation has its place by time.
    at = trace.index(annotated[0])
    assert trace[at - 1]["addr"] == x.data_ptr() and trace[at + 1]["action"] in ("alloc", "segment_alloc"), trace
    del y


def the_stack_of_a_tensor():
    torch.cuda.memory._record_memory_history()

    def allocates():
        return empty(1 << 20)

    x = allocates()
    of = torch._C._cuda_allocationTraceback
    assert "allocates" in str(of(x.data_ptr())) and of(x.data_ptr() + 512) is None
    address = x.data_ptr()
    del x
    assert of(address) is None


def pinned_memory_in_a_snapshot():
    torch.cuda.memory._record_memory_history()
    held = torch.empty(1 << 20, pin_memory=True)
    shot = torch.cuda.memory._snapshot()
    # PyTorch manages pinned memory itself and adds it to snapshots.
    assert {"host_segments", "host_traces"} <= shot.keys()
    del held


def pinned_tensors():
    torch.cuda.init()
    stats = torch.cuda.host_memory_stats
    held = torch.empty(1 << 20, pin_memory=True)
    write(held, 5)
    assert stats()["active_requests.current"] == 1 and stats()["active_bytes.current"] == 4 << 20, stats()
    on_the_device = held.to("cuda", non_blocking=True)
    assert read(on_the_device) == {5}
    address = held.data_ptr()
    del held
    again = torch.empty(1 << 20, pin_memory=True)
    assert again.data_ptr() == address and stats()["num_host_alloc"] == 1, stats()
    copy = torch.ones(100).pin_memory()
    assert copy.sum() == 100 and stats()["active_requests.current"] == 2
    del again, copy
    assert stats()["active_requests.current"] == 0 < stats()["allocated_bytes.current"]
    torch._C._host_emptyCache()
    assert stats()["allocated_bytes.current"] == 0 and stats()["num_host_free"] == 2, stats()
    torch.cuda.reset_peak_host_memory_stats()
    torch.cuda.reset_accumulated_host_memory_stats()
    assert stats()["allocated_bytes.peak"] == stats()["active_requests.allocated"] == 0


def pinned_batches():
    numbers = torch.utils.data.TensorDataset(torch.arange(64.0))
    batches = torch.utils.data.DataLoader(numbers, batch_size=8, num_workers=1, pin_memory=True)
    assert sum(batch.to("cuda", non_blocking=True).numel() for (batch,) in batches) == 64
    assert torch.cuda.host_memory_stats()["active_requests.allocated"] >= 8


def pinned_settings():
    torch.cuda.init()
    stats, change = torch.cuda.host_memory_stats, torch.cuda.memory._set_allocator_settings
    torch.empty(4 << 20, pin_memory=True)
    assert stats()["allocated_bytes.current"] == 0, stats()
    change("pinned_max_cached_size_mb:64")
    torch.empty(4 << 20, pin_memory=True)
    assert stats()["allocated_bytes.current"] >= 16 << 20, stats()
    for wrong in ("pinned_num_register_threads:3", "pinned_nothing:1"):
        try:
            change(wrong)
            raise AssertionError(wrong)
        except ValueError as error:
            assert wrong.split(":")[0] in str(error), error
    assert stratalloc.install(pinned="pinned_max_cached_size_mb:1") is stratalloc.install()
    try:
        stratalloc.install(pinned=False)
        raise AssertionError
    except stratalloc.LibraryError as error:
        assert "first call" in str(error), error


def pinned_memory_after_a_fork():
    held = torch.empty(1000, pin_memory=True)
    write(held, 5)
    child = os.fork()
    if child == 0:
        del held
        own = torch.empty(1000, pin_memory=True)
        live = torch._C._cuda_hostMemoryStats()["active_requests"]["current"]
        sys.stderr.flush()
        os._exit(own.data_ptr() == 0 or live != 1)
    assert os.waitpid(child, 0)[1] == 0 and read(held) == {5}


def frames_of_segments():
    torch.cuda.memory._record_memory_history()

    def allocates(mib):
        return empty(mib << 18)

    whole, part = allocates(30), allocates(3)
    segments = {segment["address"]: segment for segment in torch.cuda.memory._snapshot()["segments"]}
    assert "allocates" in str(segments[whole.data_ptr()]["frames"])
    assert not segments[part.data_ptr()]["frames"]


def rejections():
    torch.cuda.memory._set_allocator_settings("throw_on_cudamalloc_oom:True")
    try:
        empty(1 << 42)
        raise AssertionError
    except torch.cuda.OutOfMemoryError:
        pass
    stats = torch.cuda.memory_stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"]) == (1, 0), stats


def bytes_of_pools():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = empty(1 << 20)
    key = "reserved_bytes_by_private_pools.{}_{}.all.current".format(*pool.id)
    assert torch.cuda.memory_stats()[key] == 20 << 20
    del x, pool
    assert torch.cuda.memory_stats()[key] == 0


def history_of_what_is_allocated_alone():
    torch.cuda.memory._record_memory_history(context="state")

    def allocates():
        return empty(12)

    allocates()
    assert "allocates" not in str(torch.cuda.memory._snapshot())
    x = allocates()
    assert "allocates" in str(torch.cuda.memory._snapshot())
    del x
    assert "allocates" not in str(torch.cuda.memory._snapshot())


def annotations():
    torch.cuda.memory._record_memory_history(global_record_annotations=True, compile_context=True)
    with torch.profiler.record_function("hello"):
        empty(10)
    assert torch.cuda.memory._snapshot()["external_annotations"][0]["name"] == "hello"


def no_memory():
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *words: seen.append(words))
    try:
        empty(1 << 42)
        raise AssertionError
    except torch.cuda.OutOfMemoryError as error:
        assert "CUDA out of memory. Tried to allocate 16384.00 GiB" in str(error), error
    assert len(seen) == 1 and seen[0][0] == 0
    torch.cuda.set_per_process_memory_fraction(0.001)
    assert abs(torch.cuda.get_per_process_memory_fraction() - 0.001) < 1e-6
    try:
        empty(1 << 33)
        raise AssertionError
    except torch.cuda.OutOfMemoryError:
        pass
    empty(4)


def a_pool():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = empty(1 << 20)
        assert pool.use_count() == 2
    assert pool.use_count() == 1 and pool.snapshot()[0]["segment_pool_id"] == pool.id
    y = empty(1 << 20)
    assert len(torch.cuda.memory_snapshot()) == 2
    del x, pool
    assert len(torch.cuda.memory_snapshot()) == 1
    del y


def nccl_registers_a_pool():
    from torch import distributed

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        held = [empty(5 << 20) for _ in range(3)]
    assert pool.snapshot()
    backend = distributed.ProcessGroupNCCL(distributed.HashStore(), 0, 1, distributed.ProcessGroupNCCL.Options())
    backend.eager_connect_single_device(torch.device("cuda:0"))
    # NCCL is a replacement here; PyTorch checks the order of the segments before it calls NCCL.
    backend.register_mem_pool(pool)
    del held
    sys.stdout.flush()
    os._exit(0)


def a_pools_options():
    pool = torch.cuda.MemPool(use_on_oom=True, no_split=True)
    with torch.cuda.use_mem_pool(pool):
        held = [empty(1 << 20), empty(1 << 20)]
    assert [len(segment["blocks"]) for segment in pool.snapshot()] == [1, 1]
    del held


def a_checkpoint():
    c, pool = torch._C, torch.cuda.graph_pool_handle()
    c._cuda_beginAllocateCurrentThreadToPool(0, pool)
    a = empty(1000)
    state = c._cuda_getCheckpointState(0, pool)
    b = empty(1000)
    c._cuda_endAllocateToPool(0, pool)
    stale = [tensor.untyped_storage()._cdata for tensor in (a, b)]
    assert c._cuda_checkPoolLiveAllocations(0, pool, {a.data_ptr(), b.data_ptr()})
    again = c._construct_storage_from_data_pointer(a.data_ptr(), torch.device("cuda:0"), 4000)
    c._cuda_setCheckpointPoolState(0, state, stale, [again._cdata])
    assert c._cuda_checkPoolLiveAllocations(0, pool, {a.data_ptr()})
    assert c._has_Standard_Deleter(again._cdata) and not c._has_Standard_Deleter(stale[1])
    c._free_And_Remove_DeleterFn(again._cdata)
    assert c._cuda_checkPoolLiveAllocations(0, pool, set())
    c._cuda_releasePool(0, pool)


def bare_pointers_and_streams():
    pointer = torch.cuda.caching_allocator_alloc(1 << 20)
    torch.cuda.caching_allocator_delete(pointer)
    try:
        torch.cuda.caching_allocator_delete(pointer)
        raise AssertionError
    except RuntimeError as error:
        assert "invalid device pointer" in str(error), error
    x = empty(1 << 20)
    x.record_stream(torch.cuda.Stream())
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0


def settings():
    change = torch.cuda.memory._set_allocator_settings
    change("max_split_size_mb:64")
    change("peers:none,layers:[statistics]")
    for wrong in ("nothing:1", "backend:nothing"):
        try:
            change(wrong)
            raise AssertionError(wrong)
        except ValueError as error:
            assert "nothing" in str(error), error
    x = empty(9)
    change("backend:cudaMallocAsync")
    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    y = empty(9)
    assert torch.cuda.memory_stats()["allocation.all.current"] == 2
    del x, y
    assert torch.cuda.memory_stats()["allocation.all.current"] == 0


def settings_of_a_snapshot():
    def settings():
        return torch.cuda.memory._snapshot()["allocator_settings"]

    x = empty(9)
    change = torch.cuda.memory._set_allocator_settings
    change("max_split_size_mb:100")
    assert settings()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:100"
    assert settings()["max_split_size"] == 100 << 20
    stratalloc.switch("backend:native,max_split_size_mb:64")
    assert settings()["max_split_size"] == 64 << 20
    assert settings()["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        y = empty(9)
        before = settings()
        try:
            change("backend:cudaMallocAsync,max_split_size_mb:200,pinned_num_register_threads:8")
            raise AssertionError
        except RuntimeError as error:
            assert "is open" in str(error), error
        assert settings() == before
    assert torch.cuda.memory_stats()["max_split_size"] == 64 << 20
    del x, y


def write(tensor, byte):
    ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)


def read(tensor):
    """Returns the bytes of a tensor: all memory is host memory."""
    return set(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))


def tags():
    from concurrent.futures import ThreadPoolExecutor

    pool, other = torch.cuda.MemPool(), torch.cuda.Stream()

    def in_a_thread():
        with stratalloc.tag("weights"):
            return empty(1000)

    with stratalloc.tag("weights") as weights:
        a = empty(1 << 20)
        with torch.cuda.use_mem_pool(pool):
            b = empty(1 << 20)
            with stratalloc.tag("cache", backup=None):
                c = empty(1 << 20)
        with torch.cuda.stream(other):
            d = empty(1 << 20)
        d.record_stream(torch.cuda.current_stream())
    with ThreadPoolExecutor() as threads:
        e = threads.submit(in_a_thread).result()
    assert len({pool.id, weights.pool, stratalloc.tag("cache").pool}) == 3
    addresses = [x.data_ptr() for x in (a, b, c, d, e)]
    for byte, x in enumerate((a, b, c, d, e), 1):
        write(x, byte)
    paused = stratalloc.pause()
    assert paused["weights"]["copied_bytes"] == 2 * (4 << 20) + 4096, paused
    assert paused["cache"]["dropped_bytes"] == 4 << 20 and read(b) == {2}
    assert {tag["state"] for tag in stratalloc.tags().values()} == {"asleep"}
    stratalloc.resume()
    assert [x.data_ptr() for x in (a, b, c, d, e)] == addresses
    assert (read(a), read(b), read(d), read(e)) == ({1}, {2}, {4}, {5}) and read(c) != {3}
    del a, d, e
    weights.close()
    assert list(stratalloc.tags()) == ["cache"]
    del b, c, pool


def tags_in_a_history():
    torch.cuda.memory._record_memory_history()
    with stratalloc.tag("weights"):
        x = empty(1 << 20)
    stratalloc.pause()
    stratalloc.resume()

    def actions(taken):
        inside = range(x.data_ptr(), x.data_ptr() + (20 << 20))
        return [entry["action"] for entry in taken["device_traces"][0] if entry["addr"] in inside]

    # PyTorch has no names for pauses and resumes.
    names = ["segment_map", "alloc", "segment_unmap", "segment_map"]
    assert actions(torch.cuda.memory._snapshot()) == names, actions(torch.cuda.memory._snapshot())
    assert actions(stratalloc.snapshot())[-2:] == ["tag_pause", "tag_resume"]


def tags_of_torch_memory_saver():
    from stratalloc import memory_saver

    saver = memory_saver.MemorySaver()
    with saver.region("weights", True):
        a = empty(12, 5)
    with saver.region("weights", False):
        b = empty(1000)
    write(a, 1)
    saver.pause(None)
    saved = saver.get_cpu_backup(a)
    assert saved.shape == a.shape and saved.dtype == a.dtype and read(saved) == {1}
    assert saver.get_cpu_backup(b) is None
    saver.resume("weights")
    assert read(a) == {1} and saver.get_cpu_backup(a) is None


def programs_of_the_guide():
    """Runs the programs of docs/sleep.md, with tensors of the CPU."""
    text = (pathlib.Path(__file__).parents[3] / "docs" / "sleep.md").read_text()
    programs = re.findall("^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    *programs, with_torch_memory_saver = programs
    assert len(programs) == 3 and "memory_saver" in with_torch_memory_saver
    for program in programs:
        exec(program.replace('"cuda"', '"cpu"'), {})


def another_process():
    import torch.multiprocessing
    from multiprocessing.reduction import ForkingPickler

    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    x = empty(1 << 20)
    assert len(ForkingPickler.dumps(x)) > 100
    # No process receives the tensor, so PyTorch holds it until the replacements of CUDA's libraries are
    # unloaded.
    os._exit(0)


def without_the_cache():
    x = empty(1)
    torch.cuda.memory.caching_allocator_enable(False)
    y = empty(1 << 20)
    assert torch.cuda.memory_stats()["allocation.all.current"] == 1
    torch.cuda.memory.caching_allocator_enable(True)
    del x, y


def a_profile():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        empty(1 << 20)
    assert any(event.self_device_memory_usage for event in seen.events())


def the_packages_own_calls():
    import tempfile

    stratalloc.record_memory_history()
    x = empty(1 << 20)
    assert stratalloc.snapshot()["device_traces"][0]
    with tempfile.TemporaryDirectory() as folder:
        stratalloc.dump_snapshot(os.path.join(folder, "run.json"))
        torch.cuda.memory._dump_snapshot(os.path.join(folder, "run.pickle"))
    # PyTorch cannot read stacks of another source, and ignores them.
    stratalloc.allocator().record_memory_history()
    y = empty(1000)
    assert len(torch.cuda.memory._snapshot()["segments"]) >= 1
    stratalloc.switch("backend:native,max_split_size_mb:64")
    assert stratalloc.memory_stats()["max_split_size"] == 64 << 20
    del x, y
    stratalloc.empty_cache()


CALLS = [
    statistics,
    history,
    metadata_of_threads,
    annotated_tensors,
    the_stack_of_a_tensor,
    pinned_memory_in_a_snapshot,
    pinned_tensors,
    pinned_batches,
    pinned_settings,
    pinned_memory_after_a_fork,
    frames_of_segments,
    history_of_what_is_allocated_alone,
    annotations,
    no_memory,
    a_pool,
    nccl_registers_a_pool,
    a_pools_options,
    a_checkpoint,
    bare_pointers_and_streams,
    settings,
    settings_of_a_snapshot,
    rejections,
    bytes_of_pools,
    tags,
    tags_in_a_history,
    tags_of_torch_memory_saver,
    programs_of_the_guide,
    another_process,
    without_the_cache,
    a_profile,
    the_packages_own_calls,
]


def version():
    """Returns PyTorch's version without importing it."""
    folder = importlib.util.find_spec("torch").submodule_search_locations[0]
    with open(os.path.join(folder, "version.py")) as file:
        return tuple(map(int, re.search(r"__version__ = '(\d+)\.(\d+)", file.read()).groups()))


def main(conf):
    left_out = {"backend:cudaMallocAsync": NOT_BY_THE_DRIVERS_POOLS, "expandable_segments:True": NOT_BY_PAGES}
    names = [call.__name__ for call in CALLS if call.__name__ not in left_out.get(conf, ())]
    here = version()
    names = [name for name in names if SINCE.get(name, here) <= here]
    failed = 0
    for name in names:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, conf]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            failed += 1
            print(f"{name}:\n{textwrap.indent(done.stderr[-1500:], '    ')}", file=sys.stderr)
    print(f"{len(names) - failed} of {len(names)} calls worked under {conf or 'the defaults'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        import stratalloc

        stratalloc.install(conf=sys.argv[3] or None, pinned=PINNED.get(sys.argv[2]))
        import torch

        def empty(*shape):
            return torch.empty(shape, device="cuda")

        globals()[sys.argv[2]]()
    else:
        sys.exit(main(*(sys.argv[1:] or [""])))
