"""The modules for other libraries. Stand-ins call the library's functions as CuPy, RMM, Numba, ONNX Runtime and
TensorRT call them, so no GPU is needed. Each test is a process of its own, because the process's allocators are
created once."""

import os
import subprocess
import sys
import textwrap
import unittest

# The parts of the packages that `stratalloc` uses.
STAND_INS = {
    "cupy": '''
        import ctypes, sys, types
        P = ctypes.pythonapi
        current = {"stream": 0}

        @ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int)
        def get_stream_ptr(device):
            return current["stream"]

        new = P.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        KIND = b"intptr_t (int)"
        capsule = new(ctypes.cast(get_stream_ptr, ctypes.c_void_p), KIND, None)

        class OutOfMemoryError(MemoryError):
            def __init__(self, size, total, limit=0):
                super().__init__(f"{size} of {total}")

        class Pointer:
            """CuPy's CFunctionAllocatorMemory: calls with the interpreter's lock, then looks for an exception."""
            def __init__(self, size, param, malloc, free, owner):
                self.ptr = 0
                self.free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(free)
                self.param, self.owner = param, owner
                call = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(malloc)
                if size:
                    self.ptr = call(param, size, 0)
            def __del__(self):
                if self.ptr:
                    self.free(self.param, self.ptr, 0)

        class CFunctionAllocator:
            def __init__(self, param, malloc, free, owner):
                self.all = (param, malloc, free, owner)
            def malloc(self, size):
                return Pointer(size, *self.all)

        held = {"allocator": "the pool"}
        cupy = types.ModuleType("cupy")
        cupy.__version__ = "14.1.0rc1"
        cupy.cuda = types.ModuleType("cupy.cuda")
        cupy.cuda.memory = types.ModuleType("cupy.cuda.memory")
        cupy.cuda.memory.OutOfMemoryError = OutOfMemoryError
        cupy.cuda.CFunctionAllocator = CFunctionAllocator
        cupy.cuda.get_allocator = lambda: held["allocator"]
        cupy.cuda.set_allocator = lambda found: held.update(allocator=found)
        stream = types.ModuleType("cupy_backends.cuda.stream")
        stream.__pyx_capi__ = {"get_stream_ptr": capsule}
        backends = types.ModuleType("cupy_backends")
        backends.cuda = types.ModuleType("cupy_backends.cuda")
        backends.cuda.stream = stream
        sys.modules.update({
            "cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.memory": cupy.cuda.memory, "cupy_backends": backends,
            "cupy_backends.cuda": backends.cuda, "cupy_backends.cuda.stream": stream,
        })
        ''',
    "rmm": '''
        import sys, types

        class Stream:
            def __init__(self, number):
                self.number = number
            def __cuda_stream__(self):
                return 0, self.number

        class CallbackMemoryResource:
            def __init__(self, allocate, deallocate):
                self.functions = allocate, deallocate
            def allocate(self, size, stream=Stream(0)):
                return self.functions[0](size, stream)
            def deallocate(self, address, size, stream=Stream(0)):
                self.functions[1](address, size, stream)

        rmm, rmm.mr = types.ModuleType("rmm"), types.ModuleType("rmm.mr")
        rmm.mr.CallbackMemoryResource = CallbackMemoryResource
        rmm._cuda, rmm._cuda.gpu = types.ModuleType("rmm._cuda"), types.ModuleType("rmm._cuda.gpu")
        rmm._cuda.gpu.getDevice = lambda: 0
        for name in ("rmm", "rmm.mr", "rmm._cuda", "rmm._cuda.gpu"):
            sys.modules[name] = eval(name)
        ''',
    "numba": '''
        import sys, types, weakref

        class MemoryPointer:
            def __init__(self, context, pointer, size, owner=None, finalizer=None):
                self.address, self.size = pointer.value, size
                weakref.finalize(self, finalizer)

        class HostOnlyCUDAMemoryManager:
            def __init__(self, *args, **words):
                self.context = words.pop("context")
                self.allocations = {}
            def reset(self):
                self.allocations.clear()

        numba, cuda = types.ModuleType("numba"), types.ModuleType("numba.cuda")
        numba.cuda = cuda
        cuda.HostOnlyCUDAMemoryManager, cuda.MemoryPointer = HostOnlyCUDAMemoryManager, MemoryPointer
        cuda.GetIpcHandleMixin = type("GetIpcHandleMixin", (), {})
        cuda.MemoryInfo = lambda free, total: (free, total)
        driver = types.ModuleType("numba.cuda.cudadrv.driver")
        driver.driver = types.SimpleNamespace(cuMemGetInfo=lambda: (3, 4))
        cuda.cudadrv = types.ModuleType("numba.cuda.cudadrv")
        cuda.cudadrv.driver = driver
        sys.modules.update({
            "numba": numba, "numba.cuda": cuda, "numba.cuda.cudadrv": cuda.cudadrv,
            "numba.cuda.cudadrv.driver": driver,
        })
        context = types.SimpleNamespace(device=types.SimpleNamespace(id=0))
        ''',
    "tensorrt": '''
        import sys, types
        tensorrt = types.ModuleType("tensorrt")
        tensorrt.IGpuAsyncAllocator = type("IGpuAsyncAllocator", (), {})
        sys.modules["tensorrt"] = tensorrt
        ''',
}

BEGIN = """
    import stratalloc
    def live(device=0):
        return stratalloc.memory_stats(device)["allocation.all.current"]
    def actions():
        return [entry["action"] for entry in stratalloc.snapshot(0)["device_traces"][0]]
    def names(device=0):
        entries = stratalloc.snapshot(device)["device_traces"][device]
        return [entry["frames"][0]["name"] for entry in entries if entry["action"] == "alloc"]
    """


def run(library, body, conf=""):
    """Runs a program in which the stand-in of a library can be imported. Returns its output."""
    parts = (STAND_INS.get(library, ""), BEGIN, body)
    program = "\n".join(textwrap.dedent(part) for part in parts)
    variables = dict(os.environ, STRATALLOC_DEVICE="sim", ALLOC_CONF=conf)
    ended = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    if ended.returncode != 0:
        raise AssertionError(ended.stderr)
    return ended.stdout + ended.stderr


class CuPy(unittest.TestCase):
    def test_arrays_are_blocks_of_the_current_stream_and_carry_the_name(self):
        run(
            "cupy",
            """
            import stratalloc.cupy
            stratalloc.cupy.enable("max_split_size_mb:64")
            malloc = held["allocator"]
            stratalloc.record_memory_history("all", device=0)
            a = malloc(1000)
            current["stream"] = 7
            b = malloc(1000)
            assert live() == 2 and names() == ["CuPy", "CuPy"]
            taken = stratalloc.snapshot(0)
            assert sorted(entry["stream"] for entry in taken["segments"]) == [0, 7]
            assert malloc(0).ptr == 0
            first = a.ptr
            del a
            assert live() == 1
            assert malloc(1000).ptr != first, "the block belongs to the other stream"
            current["stream"] = 0
            assert malloc(1000).ptr == first
            stratalloc.cupy.disable()
            assert held["allocator"] == "the pool"
            """,
        )

    def test_a_request_that_fails_is_cupys_out_of_memory_error_with_the_message(self):
        run(
            "cupy",
            """
            import pickle
            import stratalloc.cupy
            stratalloc.cupy.enable()
            try:
                held["allocator"](1 << 45)
                assert False, "it fits"
            except OutOfMemoryError as error:
                assert "tried to allocate 32768.00 GiB" in str(error), str(error)
                assert str(pickle.loads(pickle.dumps(error))) == str(error)
            assert live() == 0
            """,
        )

    def test_another_failure_is_no_out_of_memory_error(self):
        run(
            "cupy",
            """
            import os
            import stratalloc.cupy
            stratalloc.cupy.enable()
            os.environ["ALLOC_CONF"] = "no_such_key:1"
            try:
                held["allocator"](1000)
                assert False
            except stratalloc.LibraryError as error:
                assert "no_such_key" in str(error)
            """,
        )

    def test_nothing_is_allocated_if_cupys_stream_function_fails(self):
        run(
            "cupy",
            """
            import stratalloc.cupy
            stratalloc.cupy.enable()
            current["stream"] = -1
            assert held["allocator"](1000).ptr is None and live() == 0
            """,
        )

    def test_another_cupy_is_refused(self):
        run(
            "cupy",
            """
            import stratalloc.cupy
            stream.__pyx_capi__["get_stream_ptr"] = new(ctypes.cast(get_stream_ptr, ctypes.c_void_p), b"int (int)", None)
            try:
                stratalloc.cupy.enable()
                assert False
            except stratalloc.LibraryError as error:
                assert "CuPy 14.1" in str(error)
            cupy.__version__ = "14.0.1"
            try:
                stratalloc.cupy.enable()
                assert False
            except stratalloc.LibraryError as error:
                assert "14.0.1" in str(error)
            """,
        )


class Rmm(unittest.TestCase):
    def test_blocks_of_streams_come_and_go(self):
        run(
            "rmm",
            """
            import stratalloc.rmm
            resource = stratalloc.rmm.MemoryResource()
            stratalloc.record_memory_history("all", device=0)
            a = resource.allocate(512, Stream(7))
            assert names() == ["RMM"]
            resource.deallocate(a, 512, Stream(7))
            assert resource.allocate(512, Stream(7)) == a
            assert actions()[-3:-1] == ["free_requested", "free_completed"]
            # Freed on another stream: the free waits for an event there.
            resource.deallocate(a, 512, Stream(9))
            assert actions()[-1] == "free_requested"
            assert resource.allocate(0) == 0 and live() == 0
            for kind, call in (
                (MemoryError, lambda: resource.allocate(1 << 45)),
                (stratalloc.Error, lambda: resource.deallocate(a + 1, 1)),
                (stratalloc.Error, lambda: stratalloc.rmm.MemoryResource(500).allocate(512)),
                (ValueError, lambda: stratalloc.rmm.MemoryResource(1 << 32)),
            ):
                try:
                    call()
                    assert False
                except kind as error:
                    assert str(error)
            """,
        )

    def test_the_folder_of_the_headers_has_them(self):
        run(
            "rmm",
            """
            import os
            import stratalloc.rmm
            assert {"stratalloc_rmm.hpp", "stratalloc.h"} <= set(os.listdir(stratalloc.rmm.include()))
            """,
        )


class Numba(unittest.TestCase):
    def test_blocks_are_freed_by_their_finalizers_or_by_a_reset(self):
        run(
            "numba",
            """
            import stratalloc.numba
            manager = stratalloc.numba._numba_memory_manager(context=context)
            manager.initialize()
            assert manager.interface_version == 1 and manager.get_memory_info() == (3, 4)
            stratalloc.record_memory_history("all", device=0)
            a, b = manager.memalloc(1000), manager.memalloc(2000)
            assert a.address and b.size == 2000 and live() == 2 and names() == ["Numba", "Numba"]
            del a
            # The free waits for an event of the default stream.
            assert live() == 1 and actions()[-1] == "free_requested"
            c = manager.memalloc(1000)
            manager.reset()
            # The context's memory is destroyed, so the blocks that were live are not reused.
            del b, c
            assert live() == 2
            d = manager.memalloc(1000)
            assert live() == 3
            del d
            assert live() == 2
            try:
                manager.memalloc(1 << 45)
                assert False
            except MemoryError:
                pass
            """,
        )


class OnnxRuntime(unittest.TestCase):
    def test_the_options_name_functions_that_serve_one_device(self):
        run(
            "",
            """
            import ctypes
            import stratalloc.onnxruntime
            options = stratalloc.onnxruntime.provider_options(device=1)
            # ONNX Runtime refuses the option `user_compute_stream` beside an external allocator.
            assert set(options) == {"device_id", *(f"gpu_external_{f}" for f in ("alloc", "free", "empty_cache"))}
            assert options["device_id"] == "1"
            assert options == stratalloc.onnxruntime.provider_options(device=1)
            alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(int(options["gpu_external_alloc"]))
            free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(int(options["gpu_external_free"]))
            empty = ctypes.CFUNCTYPE(None)(int(options["gpu_external_empty_cache"]))
            stratalloc.record_memory_history("all", device=1)
            a = alloc(1000)
            assert live(1) == 1 and names(1) == ["ONNX Runtime"]
            assert [entry["stream"] for entry in stratalloc.snapshot(1)["segments"]] == [0]
            free(a), free(None), free(64)
            assert live(1) == 0 and alloc(1 << 45) is None
            assert stratalloc.memory_stats(1)["reserved_bytes.all.current"] > 0
            empty()
            assert stratalloc.memory_stats(1)["reserved_bytes.all.current"] == 0
            try:
                stratalloc.onnxruntime.provider_options(device=0)
                assert False
            except stratalloc.Error as error:
                assert "device 1" in str(error) and "device 0" in str(error)
            """,
        )


class TensorRT(unittest.TestCase):
    def test_the_three_functions(self):
        output = run(
            "tensorrt",
            """
            import stratalloc.tensorrt
            allocator = stratalloc.tensorrt.Allocator()
            a = allocator.allocate_async(1000, 256, 7, 0)
            assert a % 512 == 0 and live() == 1
            assert [entry["stream"] for entry in stratalloc.snapshot(0)["segments"]] == [7]
            assert allocator.reallocate(a, 256, 2000) == 0
            assert allocator.deallocate_async(a, 7) and not allocator.deallocate_async(a + 1, 7)
            assert allocator.allocate_async(1 << 45, 0, 0, 0) == 0
            assert allocator.allocate_async(0, 0, 0, 0) == 0 and allocator.deallocate_async(0, 0)
            """,
        )
        self.assertIn("TensorRT's request failed", output)
        self.assertIn("cannot be freed", output)


class Process(unittest.TestCase):
    def test_all_libraries_share_one_cache(self):
        run(
            "rmm",
            """
            import stratalloc.onnxruntime, stratalloc.rmm, ctypes
            resource = stratalloc.rmm.MemoryResource()
            alloc = int(stratalloc.onnxruntime.provider_options()["gpu_external_alloc"])
            a = resource.allocate(5 << 20)
            resource.deallocate(a, 5 << 20)
            assert ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(alloc)(5 << 20) == a
            """,
        )

    def test_an_invalid_configuration_is_refused(self):
        run(
            "rmm",
            """
            import stratalloc.rmm
            try:
                stratalloc.rmm.MemoryResource(conf="no_such_key:1")
                assert False
            except stratalloc.Error as error:
                assert "no_such_key" in str(error)
            """,
        )


if __name__ == "__main__":
    unittest.main()
