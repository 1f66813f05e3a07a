"""CuPy's device memory from the process's allocator. Needs CuPy 14.1 or later::

    import stratalloc.cupy

    stratalloc.cupy.enable()

CuPy then shares its cache with PyTorch, if ``stratalloc.install()`` was called, and with the other libraries
that use this allocator. A block is for work on CuPy's current stream at the time of the request, as in CuPy's
own pool.
"""

import ctypes
from ctypes import c_char_p, c_void_p

import cupy
from cupy.cuda.memory import OutOfMemoryError as _OutOfMemoryError
from cupy_backends.cuda import stream as _stream

from . import _process
from ._calls import Cupy
from ._errors import LibraryError

_before = None


class OutOfMemoryError(_OutOfMemoryError):
    """There is not enough memory. The message is the allocator's."""

    def __init__(self, message):
        MemoryError.__init__(self, message)

    def __reduce__(self):
        return type(self), self.args


def _stream_function():
    """Returns the address of CuPy's C function for the current stream of the calling thread."""
    capsule = getattr(_stream, "__pyx_capi__", {}).get("get_stream_ptr")
    python = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(c_char_p, ctypes.py_object)(("PyCapsule_GetName", python))
    pointer_of = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, c_char_p)(("PyCapsule_GetPointer", python))
    # The name of the capsule is the function's C type.
    if capsule is None or name_of(capsule) != b"intptr_t (int)":
        raise LibraryError(f"CuPy {cupy.__version__} has no function get_stream_ptr that returns a stream")
    return pointer_of(capsule, b"intptr_t (int)")


def allocator(conf=None, library=None):
    """Returns a ``cupy.cuda.CFunctionAllocator``. Its method ``malloc`` is for ``cupy.cuda.set_allocator``
    and ``cupy.cuda.using_allocator``. ``conf`` is a configuration string for the allocators of all devices;
    without it they keep theirs, which is read from the environment when a device is first used."""
    # Earlier versions do not look for an exception after a call of `malloc`.
    if [int(number) for number in cupy.__version__.split(".")[:2]] < [14, 1]:
        raise LibraryError(f"stratalloc.cupy needs CuPy 14.1 or later, and this is {cupy.__version__}")
    loaded = _process.use(conf, library)
    set_error = ctypes.cast(ctypes.pythonapi.PyErr_SetString, c_void_p).value
    types = dict(Cupy._fields_)
    functions = types["stream_of"](_stream_function()), types["set_error"](set_error)
    parameters = Cupy(*functions, id(OutOfMemoryError), id(LibraryError))
    malloc, free = map(loaded.address, ("stratalloc_cupy_malloc", "stratalloc_cupy_free"))
    # CuPy keeps the last argument alive for as long as a block exists.
    return cupy.cuda.CFunctionAllocator(ctypes.addressof(parameters), malloc, free, parameters)


def enable(conf=None, library=None):
    """Makes CuPy allocate device memory from the process's allocator, on all threads. The arguments are those
    of :func:`allocator`. Arrays that exist keep their memory."""
    global _before
    found, before = allocator(conf, library), cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(found.malloc)
    if _before is None:
        _before = before


def disable():
    """Restores the allocator that CuPy had before :func:`enable`. Arrays that exist keep their memory."""
    global _before
    if _before is not None:
        cupy.cuda.set_allocator(_before)
        _before = None
