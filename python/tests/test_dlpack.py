"""Blocks as tensors of other libraries, and tensors of other libraries, through DLPack."""

import ctypes
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest
from ctypes import CFUNCTYPE, POINTER, Structure, c_void_p
from ctypes import c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from unittest import mock

import stratalloc
from stratalloc import Allocator, Error, _dlpack, from_dlpack


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Versioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", Tensor),
    ]


class Unversioned(Structure):
    _fields_ = [("tensor", Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


KINDS = {b"dltensor": Unversioned, b"dltensor_versioned": Versioned}
# Python keeps pointers to these names.
USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}
DELETER = CFUNCTYPE(None, c_void_p)


def opened(capsule, name):
    """Takes the tensor of a capsule, as a library does, and returns its structure."""
    managed = KINDS[name].from_address(_dlpack._pointer_of(capsule, name))
    assert _dlpack._rename(capsule, USED[name]) == 0
    return managed


def delete(managed):
    DELETER(managed.deleter)(ctypes.addressof(managed))


class Foreign:
    """A tensor of another library, of 2 x 3 floats on the host, that counts the calls of its deleter."""

    def __init__(self, name=b"dltensor_versioned", accepts_version=True):
        self.deleted, self.name, self.accepts_version, self.asked = 0, name, accepts_version, []
        self.bytes = ctypes.create_string_buffer(64)
        self.shape, self.strides = (c_int64 * 2)(2, 3), (c_int64 * 2)(3, 1)
        self.deleter = DELETER(self._delete)
        self.managed = KINDS[name]()
        if name == b"dltensor_versioned":
            self.managed.major, self.managed.minor = 1, 1
        self.managed.deleter = ctypes.cast(self.deleter, c_void_p).value
        self.tensor = self.managed.tensor
        self.tensor.data, self.tensor.ndim = ctypes.addressof(self.bytes), 2
        self.tensor.device_type, self.tensor.device_id = 1, 0
        self.tensor.code, self.tensor.bits, self.tensor.lanes = 2, 32, 1
        self.tensor.shape, self.tensor.strides = self.shape, self.strides

    def _delete(self, managed):
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.tensor.device_type, self.tensor.device_id

    def __dlpack__(self, **arguments):
        self.asked.append(arguments)
        if "max_version" in arguments and not self.accepts_version:
            raise TypeError("unexpected argument max_version")
        return _dlpack._new_capsule(ctypes.addressof(self.managed), self.name, None)


def live(allocator):
    return allocator.block_count()


class Blocks(unittest.TestCase):
    def setUp(self):
        self.allocator = Allocator("backend:native", "host")
        self.addCleanup(self.allocator.close)

    def test_a_block_is_freed_when_it_is_dropped_or_closed(self):
        block = self.allocator.block(4096, stream=0)
        self.assertEqual((block.size_bytes, block.dtype, block.shape), (4096, "uint8", (4096,)))
        self.assertEqual(block.device, (1, 0))
        ctypes.memset(block.address, 7, 4096)
        del block
        with self.allocator.block(100) as block:
            self.assertEqual(live(self.allocator), 1)
            parts = block.cast("float64", (3, 4)), block.cast("bfloat16")
        self.assertEqual(live(self.allocator), 0)
        described = [(part.dtype, part.shape) for part in parts]
        self.assertEqual(described, [("float64", (3, 4)), ("bfloat16", (50,))])
        block.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            parts[0].__dlpack__()
        empty = self.allocator.block(0)
        self.assertEqual((empty.address, empty.shape), (0, (0,)))
        self.assertEqual(from_dlpack(empty).size_bytes, 0)

    def test_a_block_that_cannot_be_is_refused(self):
        with self.assertRaisesRegex(Error, "the device sim has no memory"):
            Allocator("", "sim").block(512)
        for size_bytes in (1 << 62, 2**64 - 1):
            with self.assertRaises(stratalloc.OutOfMemoryError):
                self.allocator.block(size_bytes)
        block = self.allocator.block(24)
        for shape in ((7,), (2, 2, 2), (2**40, 2**40)):
            with self.assertRaisesRegex(ValueError, "more than 24 bytes"):
                block.cast("float32", shape)
        with self.assertRaisesRegex(ValueError, "at most 64 dimensions"):
            block.cast("float32", (1,) * 65)
        with self.assertRaisesRegex(ValueError, "float33"):
            block.cast("float33")

    def test_a_tensor_describes_the_block(self):
        block = self.allocator.block(64).cast("float32", (2, 3))
        for name, version in ((b"dltensor", None), (b"dltensor", (0, 8)), (b"dltensor_versioned", (1, 3))):
            managed = opened(block.__dlpack__(max_version=version), name)
            if name == b"dltensor_versioned":
                self.assertEqual((managed.major, managed.minor, managed.flags), (1, 0, 0))
            tensor = managed.tensor
            self.assertEqual((tensor.data, tensor.byte_offset), (block.address, 0))
            self.assertEqual((tensor.device_type, tensor.device_id), (1, 0))
            self.assertEqual((tensor.code, tensor.bits, tensor.lanes), (2, 32, 1))
            self.assertEqual((tensor.ndim, tensor.shape[:2], tensor.strides[:2]), (2, [2, 3], [3, 1]))
            delete(managed)

    def test_a_tensor_outlives_its_block_and_its_allocator(self):
        allocator = Allocator("backend:native", "host")
        other = allocator.block(512)
        block = allocator.block(1 << 20)
        address = block.address
        managed = [opened(block.__dlpack__(max_version=(1, 0)), b"dltensor_versioned") for _ in range(2)]
        block.close()
        self.assertEqual(live(allocator), 2)
        delete(managed.pop())
        self.assertEqual(live(allocator), 2)
        thread = threading.Thread(target=delete, args=managed)
        thread.start()
        thread.join()
        self.assertEqual(live(allocator), 1)
        last = opened(other.__dlpack__(), b"dltensor")
        allocator.close()
        del allocator, other
        gc.collect()
        ctypes.memset(last.tensor.data, 1, 512)
        self.assertNotEqual(last.tensor.data, address)
        delete(last)

    def test_a_capsule_that_no_library_takes_frees_its_tensor(self):
        for version in (None, (1, 0)):
            block = self.allocator.block(512)
            capsule = block.__dlpack__(max_version=version)
            block.close()
            self.assertEqual(live(self.allocator), 1)
            del capsule
            self.assertEqual(live(self.allocator), 0)

    def test_a_request_that_needs_a_copy_or_a_stream_is_refused(self):
        block = self.allocator.block(512)
        for arguments, error in (
            ({"copy": True}, BufferError),
            ({"dl_device": (2, 0)}, BufferError),
            ({"stream": 1}, ValueError),
        ):
            with self.assertRaises(error):
                block.__dlpack__(**arguments)
        block.__dlpack__(copy=False, dl_device=(1, 0), stream=-1)
        self.assertFalse(hasattr(block, "__cuda_array_interface__"))

    def test_streams_and_the_array_interface_of_cuda(self):
        block = self.allocator.block(512)
        # The same block, as if it were on a CUDA device.
        block._tensor.device_type = 2
        calls = []
        library = mock.Mock(wraps=block._owned._library)
        library.call.side_effect = lambda name, *arguments: calls.append(arguments)
        with mock.patch.object(block._owned, "_library", library), mock.patch.object(_dlpack, "_new_capsule"):
            with mock.patch.object(_dlpack, "_destructor"):
                for stream in (None, 1, 2, 0x7F0000, -1):
                    block.__dlpack__(stream=stream, max_version=(1, 0))
        self.assertEqual([call[2:4] for call in calls], [(2, 0), (2, 0), (2, 2), (2, 0x7F0000), (0, None)])
        with self.assertRaisesRegex(ValueError, "ambiguous"):
            block.__dlpack__(stream=0)
        for dtype, typestr, length in (("uint8", "|u1", 512), ("float32", "<f4", 128), ("bool", "|b1", 512)):
            interface = block.cast(dtype).__cuda_array_interface__
            self.assertEqual((interface["typestr"], interface["shape"]), (typestr, (length,)))
            self.assertEqual((interface["data"], interface["stream"]), ((block.address, False), 1))
        self.assertFalse(hasattr(block.cast("bfloat16"), "__cuda_array_interface__"))

    def test_the_stream_of_a_tensor_is_recorded_for_the_free_of_its_block(self):
        def export(allocator, stream):
            block, managed = allocator.block(512), c_void_p()
            arguments = ctypes.byref(block._tensor), 1 | 2, stream, ctypes.byref(managed)
            block._owned._library.call("tensor_export", block._owned.number, *arguments)
            delete(Unversioned.from_address(managed.value))

        export(self.allocator, 77)
        with Allocator("backend:cpu", "host") as allocator:
            export(allocator, 0)
            # This strategy cannot record a stream.
            with self.assertRaisesRegex(Error, "backend:cpu does not support other streams"):
                export(allocator, 77)
            self.assertEqual(live(allocator), 0)


class Imports(unittest.TestCase):
    def test_a_tensor_is_described_and_deleted_once(self):
        new = {"max_version": (1, 0)}
        for name, asked in ((b"dltensor", [new, {}]), (b"dltensor_versioned", [new])):
            foreign = Foreign(name, accepts_version=len(asked) == 1)
            foreign.tensor.byte_offset = 8
            with from_dlpack(foreign) as tensor:
                self.assertEqual((tensor.address, tensor.size_bytes), (foreign.tensor.data + 8, 24))
                self.assertEqual((tensor.dtype, tensor.shape, tensor.device), ("float32", (2, 3), (1, 0)))
                self.assertFalse(tensor.is_read_only)
                self.assertEqual(foreign.deleted, 0)
            self.assertEqual(foreign.deleted, 1)
            tensor.close()
            del tensor
            self.assertEqual((foreign.deleted, foreign.asked), (1, asked))
        foreign = Foreign()
        foreign.managed.flags = 1
        self.assertTrue(from_dlpack(foreign).is_read_only)

    def test_the_stream_is_passed_on_devices_with_streams(self):
        for given, passed in ((None, 1), (0, 1), (2, 2), (-1, -1)):
            foreign = Foreign()
            foreign.tensor.device_type, foreign.tensor.device_id = 2, 5
            self.assertEqual(from_dlpack(foreign, stream=given).device, (2, 5))
            self.assertEqual(foreign.asked, [{"max_version": (1, 0), "stream": passed}])

    def test_a_hostile_tensor_is_refused_and_deleted_once(self):
        def shape(*lengths):
            return lambda foreign: foreign.shape.__setitem__(slice(None), lengths)

        for bend, message in (
            (lambda f: setattr(f.managed, "major", 2), r"version 2\.1 of DLPack; expected version 1"),
            (lambda f: setattr(f.tensor, "ndim", -1), "-1 dimensions; expected 0 to 64"),
            (lambda f: setattr(f.tensor, "ndim", 2**31 - 1), "2147483647 dimensions; expected 0 to 64"),
            (lambda f: setattr(f.tensor, "shape", None), "2 dimensions, and its shape is null"),
            (lambda f: setattr(f.tensor, "data", None), "24 bytes, and its data is null"),
            (lambda f: setattr(f.tensor, "byte_offset", 2**64 - 1), "is not possible"),
            (lambda f: setattr(f.tensor, "bits", 4), "1 x 4 bits"),
            (lambda f: setattr(f.tensor, "lanes", 0), "0 x 32 bits"),
            (lambda f: f.strides.__setitem__(0, 4), "the stride of dimension 0 is 4 elements; only 3"),
            (shape(2, -3), r"shape \[2, -3\]"),
            (shape(2**62, 2**62), r"shape \[4611686018427387904, 4611686018427387904\]"),
        ):
            foreign = Foreign()
            bend(foreign)
            with self.assertRaisesRegex(Error, message):
                from_dlpack(foreign)
            self.assertEqual(foreign.deleted, 1, message)

    def test_a_capsule_without_an_unused_tensor_is_refused(self):
        class Returns:
            def __init__(self, capsule):
                self.capsule = capsule

            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                return self.capsule

        foreign = Foreign()
        capsule = foreign.__dlpack__()
        with from_dlpack(Returns(capsule)):
            with self.assertRaisesRegex(ValueError, "no capsule with an unused DLPack tensor"):
                from_dlpack(Returns(capsule))
        self.assertEqual(foreign.deleted, 1)
        other = _dlpack._new_capsule(ctypes.addressof(foreign.managed), b"another_name", None)
        for value in (None, 7, "dltensor", object(), other):
            with self.assertRaisesRegex(ValueError, "no capsule"):
                from_dlpack(Returns(value))
        with self.assertRaises(AttributeError):
            from_dlpack(7)
        self.assertEqual(foreign.deleted, 1)

    def test_numbers_of_other_objects_are_refused(self):
        library = stratalloc._library.load()
        with Allocator("", "host") as allocator:
            block = allocator.block(512)
            for call in ("tensor_release", "close_shared", "destroy"):
                with self.assertRaises(Error):
                    library.call(call, block._owned.number)
            with self.assertRaises(Error):
                library.call("owned_release", allocator._handle)
            self.assertEqual(live(allocator), 1)

    def test_a_block_is_imported_without_a_copy(self):
        with Allocator("", "host") as allocator:
            block = allocator.block(64).cast("int16", (4, 8))
            tensor = from_dlpack(block)
            block.close()
            self.assertEqual((tensor.address, tensor.dtype, tensor.shape), (block.address, "int16", (4, 8)))
            self.assertEqual(live(allocator), 1)
            tensor.close()
            self.assertEqual(live(allocator), 0)


class Exit(unittest.TestCase):
    def test_tensors_that_live_when_the_interpreter_exits_do_no_harm(self):
        code = """
            import stratalloc
            a = stratalloc.Allocator("backend:native", "host")
            block = a.block(512)
            capsule = block.__dlpack__()
            imported = stratalloc.from_dlpack(block)
            # They outlive the package's own modules.
            import builtins
            builtins.kept = block, capsule, imported
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_forked_child_does_not_free_the_blocks_of_its_parent(self):
        code = """
            import os, stratalloc
            a = stratalloc.Allocator("backend:native", "host")
            block = a.block(512)
            capsule = block.__dlpack__()
            if os.fork() == 0:
                del capsule
                block.close()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            block.close()
            assert a.block_count() == 1
            del capsule
            assert a.block_count() == 0
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        self.assertEqual((run.returncode, run.stderr), (0, ""))


# With NumPy and PyTorch themselves. scripts/class_tests.sh has both.
NUMPY = """
    import sys
    import numpy, stratalloc
    with stratalloc.Allocator("backend:native", "host") as a:
        block = a.block(48).cast("float32", (3, 4))
        array = numpy.from_dlpack(block)
        assert array.shape == (3, 4) and array.dtype == numpy.float32 and array.ctypes.data == block.address
        array[:] = numpy.arange(12).reshape(3, 4)
        again = numpy.from_dlpack(block)
        assert again[2, 3] == 11
        del block, array
        assert a.block_count() == 1
        del again
        assert a.block_count() == 0
    source = numpy.arange(6, dtype=numpy.int16)
    before = sys.getrefcount(source)
    tensor = stratalloc.from_dlpack(source)
    assert (tensor.address, tensor.shape, tensor.dtype) == (source.ctypes.data, (6,), "int16")
    assert sys.getrefcount(source) > before
    tensor.close()
    assert sys.getrefcount(source) == before
    try:
        stratalloc.from_dlpack(source[::2])
    except stratalloc.Error as error:
        assert "the stride of dimension 0 is 2 elements; only 1" in str(error), error
    else:
        raise AssertionError("a tensor with gaps was imported")
    source.flags.writeable = False
    assert stratalloc.from_dlpack(source).is_read_only
"""
TORCH = """
    import torch, stratalloc
    with stratalloc.Allocator("backend:native", "host") as a:
        block = a.block(64)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
            tensor = torch.from_dlpack(block.cast(dtype))
            assert tensor.dtype == dtype and tensor.data_ptr() == block.address, dtype
            assert tensor.numel() * tensor.element_size() == 64
        tensor.fill_(5)
        del block
        assert a.block_count() == 1 and tensor.sum() == 320
        del tensor
        assert a.block_count() == 0
    source = torch.ones(2, 3)
    with stratalloc.from_dlpack(source) as tensor:
        assert (tensor.address, tensor.shape, tensor.dtype) == (source.data_ptr(), (2, 3), "float32")
"""


class Class(unittest.TestCase):
    def run_with(self, library, code, **variables):
        home = os.environ.get("STRATALLOC_TORCH_FOLDER")
        path = [os.environ.get("PYTHONPATH", "")]
        if home:
            path.append(str(pathlib.Path(home).parent))
        elif importlib.util.find_spec(library) is None:
            print(f"skipped: no {library}", file=sys.stderr)
            self.skipTest(f"no {library}")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_numpy_shares_memory(self):
        self.run_with("numpy", NUMPY)

    def test_pytorch_shares_memory(self):
        home = os.environ.get("STRATALLOC_TORCH_FOLDER")
        if not home:
            self.run_with("torch", TORCH)
            return
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(__file__).parent / "pytorch" / "stand_ins.py"
            subprocess.run([sys.executable, script, home, folder], check=True, stdout=subprocess.DEVNULL)
            self.run_with("torch", TORCH, LD_LIBRARY_PATH=folder)


if __name__ == "__main__":
    unittest.main()
