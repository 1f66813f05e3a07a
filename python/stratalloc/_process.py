"""The process's allocators, one for each device, for the modules of other libraries."""

import atexit
import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_void_p

from . import _torch
from ._library import encoded, load


def use(conf=None, library=None):
    """Loads the library and applies a configuration string to the allocators of all devices. After this call
    ``memory_stats`` and the functions beside it also work without PyTorch."""
    loaded = load(library)
    if conf is not None:
        loaded.call("torch_set_conf", encoded(conf, "conf"))
    if not _torch.is_shared:
        _torch.is_shared = True
        atexit.register(_torch._drop_stacks, loaded)
    return loaded


def functions(loaded, name):
    """Returns two functions for a library's blocks. ``malloc(size_bytes, device, stream)`` returns an
    address, or 0 for zero bytes. It raises ``MemoryError`` if there is not enough memory, and
    :class:`stratalloc.Error` for other failures. ``free(address, device, stream)`` frees the block; it is
    reused when the work that ``stream`` has now is finished."""
    # Objects of their own, whose types are declared once. Calls through them are the fastest that ctypes has.
    malloc_type = ctypes.CFUNCTYPE(c_void_p, c_char_p, c_size_t, c_int, c_void_p)
    free_type = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_void_p)
    call_malloc = malloc_type(loaded.address("stratalloc_library_malloc"))
    call_free = free_type(loaded.address("stratalloc_library_free"))
    name = name.encode()

    def malloc(size_bytes, device, stream):
        address = call_malloc(name, size_bytes, device, stream)
        if address is None:
            if size_bytes:
                raise loaded.failure()
            return 0
        return address

    def free(address, device, stream):
        if call_free(address, device, stream):
            raise loaded.failure()

    return malloc, free
