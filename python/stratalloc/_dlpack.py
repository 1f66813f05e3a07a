"""Blocks that other libraries use as tensors, and tensors of other libraries, through DLPack.

The C library creates and deletes the structures, and its functions are the deleters and the capsules'
destructor. So all of it works while the interpreter exits.
"""

import contextlib
import ctypes
import math
from ctypes import c_char_p, c_int, c_uint64, c_void_p, py_object

from ._calls import Tensor as _Tensor
from ._library import load, number

_MOST = 2**64 - 1
_CPU, _CUDA = 1, 2
# The devices whose memory is used on streams: CUDA, and CUDA's managed memory.
_WITH_STREAMS = (_CUDA, 13)
_UNVERSIONED, _ON_STREAM = 1, 2

_BITS = {
    "int": (0, (8, 16, 32, 64)),
    "uint": (1, (8, 16, 32, 64)),
    "float": (2, (16, 32, 64)),
    "bfloat": (4, (16,)),
    "complex": (5, (64, 128)),
}
_TYPES = {f"{kind}{n}": (code, n) for kind, (code, sizes) in _BITS.items() for n in sizes}
_TYPES["bool"] = (6, 8)
_NAMES = {(*type, 1): name for name, type in _TYPES.items()}
# The letters of NumPy's type strings. NumPy has no `bfloat16`.
_LETTERS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}

# The names of capsules. Python keeps pointers to them, so they are never freed.
_UNUSED = {_UNVERSIONED: b"dltensor", 0: b"dltensor_versioned"}
_USED = {_UNVERSIONED: b"used_dltensor", 0: b"used_dltensor_versioned"}


def _of_python(name, result, *arguments):
    """Returns a function of Python's C interface, with types that no other module changes."""
    function = ctypes.pythonapi[name]
    function.restype, function.argtypes = result, arguments
    return function


_new_capsule = _of_python("PyCapsule_New", py_object, c_void_p, c_char_p, c_void_p)
_is_valid = _of_python("PyCapsule_IsValid", c_int, py_object, c_char_p)
_pointer_of = _of_python("PyCapsule_GetPointer", c_void_p, py_object, c_char_p)
_rename = _of_python("PyCapsule_SetName", c_int, py_object, c_char_p)
_keep_forever = _of_python("Py_IncRef", None, py_object)
for _name in (*_UNUSED.values(), *_USED.values()):
    _keep_forever(_name)


class _Owned:
    """A number of the C library, which is released once."""

    def __init__(self, library, release, number):
        self._library, self._release, self.number = library, release, number

    def close(self):
        number, self.number = self.number, 0
        if number:
            self._library.call(self._release, number)

    def __del__(self):
        with contextlib.suppress(Exception):
            self.close()


class _Described:
    """The properties that a block and an imported tensor have."""

    def __init__(self, owned, tensor):
        self._owned, self._tensor = owned, tensor

    @property
    def address(self):
        """The address of the first element. 0 if there are no bytes."""
        return self._tensor.address

    @property
    def size_bytes(self):
        """The size in bytes."""
        return self._tensor.size_bytes

    @property
    def shape(self):
        """The length of each dimension."""
        return tuple(self._tensor.shape[: self._tensor.dimensions])

    @property
    def dtype(self):
        """The name of the element type, such as ``float32``, or DLPack's code, bits and lanes."""
        type = self._tensor.type_code, self._tensor.type_bits, self._tensor.type_lanes
        return _NAMES.get(type, type)

    @property
    def device(self):
        """DLPack's type of the device, and its ordinal: ``(1, 0)`` is the host, ``(2, N)`` is ``cuda:N``."""
        return self._tensor.device_type, self._tensor.device_id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Block(_Described):
    """A block of device memory that other libraries use as a tensor without a copy:
    ``torch.from_dlpack(block)``.

    The block is freed on its stream when this object was closed or dropped and no tensor uses the memory
    any more. It must not be freed by address.
    """

    def __init__(self, owned, tensor, stream):
        super().__init__(owned, tensor)
        #: The stream of the block.
        self.stream = stream

    @classmethod
    def _allocate(cls, library, handle, size_bytes, stream):
        size_bytes, stream = number(size_bytes, "size_bytes", _MOST), number(stream, "stream", _MOST)
        block, tensor = c_uint64(), _Tensor()
        places = ctypes.byref(block), ctypes.byref(tensor)
        library.call("owned_allocate", handle, size_bytes, stream, *places)
        return cls(_Owned(library, "owned_release", block.value), tensor, stream)

    def cast(self, dtype, shape=None):
        """Returns the same block with another element type, such as ``"float32"`` or ``torch.float32``.
        Without a ``shape`` it has one dimension with as many elements as fit. Both objects own the block."""
        # The types of NumPy and JAX are classes. The names of PyTorch's types begin with `torch.`.
        name = getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[-1]
        if name not in _TYPES:
            raise ValueError(f"dtype: {dtype!r} is none of {', '.join(_TYPES)}")
        code, bits = _TYPES[name]
        size_bytes = self._tensor.size_bytes
        if shape is None:
            shape = size_bytes * 8 // bits
        if hasattr(shape, "__index__"):
            shape = (shape,)
        shape = [number(length, "shape", 2**63 - 1) for length in shape]
        if len(shape) > 64:
            raise ValueError(f"shape: expected at most 64 dimensions, got {len(shape)}")
        if math.prod(shape) * bits > 8 * size_bytes:
            text = f"{math.prod(shape)} elements of {bits} bits need more than {size_bytes} bytes"
            raise ValueError(f"shape: {text}")
        tensor = _Tensor.from_buffer_copy(self._tensor)
        tensor.type_code, tensor.type_bits, tensor.dimensions = code, bits, len(shape)
        tensor.shape[: len(shape)] = shape
        return Block(self._owned, tensor, self.stream)

    def close(self):
        """Frees the block, now or when the last tensor of it is deleted. Applies to all objects that
        ``cast`` returned."""
        self._owned.close()

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Returns a capsule, as the Python array API standard describes it.

        On CUDA, ``stream`` is the stream on which the tensor will be used: ``None`` and 1 are the default
        stream, 2 is the per-thread default stream, -1 leaves all ordering to the caller. That stream waits
        for the block's stream, and the free of the block waits for that stream. On the host the call waits
        for the block's stream.
        """
        if dl_device is not None and tuple(dl_device) != self.device:
            raise BufferError(f"the block is on the device {self.device}, not on {tuple(dl_device)}")
        if copy:
            raise BufferError("a block is exported without a copy only")
        if not self._owned.number:
            raise ValueError("the block was closed")
        flags = 0 if max_version is not None and max_version[0] >= 1 else _UNVERSIONED
        name = _UNUSED[flags]
        if self.device[0] in _WITH_STREAMS:
            if stream is not None and stream == 0:
                raise ValueError("stream: 0 is ambiguous; 1 is the default stream, 2 that of each thread")
            if stream != -1:
                flags |= _ON_STREAM
                # Stream 1 of the standard is CUDA's default stream, which has the handle 0.
                stream = 0 if stream is None else number(stream, "stream", _MOST)
                stream = 0 if stream == 1 else stream
        elif stream not in (None, -1):
            raise ValueError(f"stream: the host has no streams, got {stream}")
        library = self._owned._library
        managed = c_void_p()
        stream = None if stream in (None, -1) else stream
        arguments = ctypes.byref(self._tensor), flags, stream, ctypes.byref(managed)
        library.call("tensor_export", self._owned.number, *arguments)
        return _new_capsule(managed, name, _destructor(library))

    @property
    def __cuda_array_interface__(self):
        """The memory for libraries that read this interface instead of DLPack. They do not report their
        stream, so they must be done with the memory on other streams when the block is freed."""
        letter = _LETTERS.get(self._tensor.type_code)
        if self.device[0] != _CUDA or letter is None:
            raise AttributeError(f"no array interface for {self.dtype} on the device {self.device}")
        item_bytes = self._tensor.type_bits // 8
        return {
            "shape": self.shape,
            "typestr": f"{'|' if item_bytes == 1 else '<'}{letter}{item_bytes}",
            "data": (self.address, False),
            "strides": None,
            # 0 is not allowed here, and 1 is the default stream.
            "stream": self.stream or 1,
            "version": 3,
        }


class ImportedTensor(_Described):
    """A tensor of another library. Its memory stays valid until this object is closed or dropped."""

    @property
    def is_read_only(self):
        """Whether the memory must not be written."""
        return self._tensor.is_read_only != 0

    def close(self):
        """Releases the tensor to its library. Work that uses it must have been submitted to the stream that
        ``from_dlpack`` got."""
        self._owned.close()


def from_dlpack(tensor, stream=None, library=None):
    """Returns a tensor of another library as an :class:`ImportedTensor`, without a copy: its address, size,
    type and shape, for calls of C functions. The tensor must be contiguous.

    On CUDA, ``stream`` is the stream on which the memory will be used. ``None`` is the default stream, -1
    leaves all ordering to the caller. The other library orders it after its own work.
    """
    arguments = {}
    if tensor.__dlpack_device__()[0] in _WITH_STREAMS:
        # The standard has 1 for the default stream, and does not allow 0.
        arguments["stream"] = 1 if stream in (None, 0) else stream
    try:
        capsule = tensor.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError as error:
        # Libraries from before DLPack 1.0 do not have this argument.
        if "max_version" not in str(error):
            raise
        capsule = tensor.__dlpack__(**arguments)
    return _take(capsule, load(library))


def _take(capsule, library):
    for flags, name in _UNUSED.items():
        if not _is_valid(capsule, name):
            continue
        managed = _pointer_of(capsule, name)
        # The tensor belongs to this library from here on, also if it is refused.
        _rename(capsule, _USED[flags])
        imported, tensor = c_uint64(), _Tensor()
        places = ctypes.byref(imported), ctypes.byref(tensor)
        library.call("tensor_import", managed, flags, *places)
        return ImportedTensor(_Owned(library, "tensor_release", imported.value), tensor)
    raise ValueError(f"{capsule!r} is no capsule with an unused DLPack tensor")


def _destructor(library):
    destructor = c_void_p()
    functions = (ctypes.cast(function, c_void_p) for function in (_is_valid, _pointer_of))
    library.call("tensor_capsule_destructor", *functions, ctypes.byref(destructor))
    return destructor
