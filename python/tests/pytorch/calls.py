"""PyTorch's own calls about memory, over the library, each in a process of its own; no kernel runs.

usage: calls.py [CONFIGURATION]    (STRATALLOC_LIBRARY and, if need be, STRATALLOC_TORCH_EXTENSION are set)
"""

import os
import subprocess
import sys
import textwrap

# What some strategies cannot do is refused, as the page "Under PyTorch" says.
NOT_BY_THE_DRIVERS_POOLS = {"a_checkpoint", "another_process", "a_pools_options", "without_the_cache"}
NOT_BY_PAGES = {"a_pools_options"}


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


def history_of_what_is_allocated_alone():
    torch.cuda.memory._record_memory_history(context="state")

    def asks():
        return empty(12)

    asks()
    assert "asks" not in str(torch.cuda.memory._snapshot())
    x = asks()
    assert "asks" in str(torch.cuda.memory._snapshot())
    del x
    assert "asks" not in str(torch.cuda.memory._snapshot())


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


def another_process():
    import torch.multiprocessing
    from multiprocessing.reduction import ForkingPickler

    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    x = empty(1 << 20)
    assert len(ForkingPickler.dumps(x)) > 100
    # Nobody takes the tensor, so PyTorch holds it to the very end, when the stand-ins have gone already.
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
    # Stacks of another source mean nothing to PyTorch, and do no harm.
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
    history_of_what_is_allocated_alone,
    annotations,
    no_memory,
    a_pool,
    a_pools_options,
    a_checkpoint,
    bare_pointers_and_streams,
    settings,
    another_process,
    without_the_cache,
    a_profile,
    the_packages_own_calls,
]


def main(conf):
    left_out = {"backend:cudaMallocAsync": NOT_BY_THE_DRIVERS_POOLS, "expandable_segments:True": NOT_BY_PAGES}
    names = [call.__name__ for call in CALLS if call.__name__ not in left_out.get(conf, ())]
    failed = 0
    for name in names:
        command = [sys.executable, "-W", "ignore", __file__, "--one", name, conf]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            failed += 1
            print(f"{name}:\n{textwrap.indent(done.stderr[-1500:], '    ')}", file=sys.stderr)
    print(f"{len(names) - failed} of {len(names)} calls did what they say under {conf or 'the defaults'}")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        import stratalloc

        stratalloc.install(conf=sys.argv[3] or None)
        import torch

        def empty(count):
            return torch.empty(count, device="cuda")

        globals()[sys.argv[2]]()
    else:
        sys.exit(main(*(sys.argv[1:] or [""])))
