"""Numba's device memory from the process's allocator. Set ``NUMBA_CUDA_MEMORY_MANAGER=stratalloc.numba``, or
call this before Numba uses CUDA::

    from numba import cuda
    import stratalloc.numba

    cuda.set_memory_manager(stratalloc.numba.Manager)

Numba has no current stream. Its blocks are for the default stream. Work on a non-blocking stream
(``cuda.external_stream``) must be ordered after the default stream before it uses a new block. A freed block
is reused when the work on the default stream and on all streams that wait for it (those of ``cuda.stream()``)
has finished.
"""

import ctypes

from numba import cuda
from numba.cuda.cudadrv import driver

from . import _process

# `CU_STREAM_LEGACY`. It is the default stream by another name: an event on it waits for all blocking streams.
_LEGACY = 1


class Manager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):
    """Numba's interface for external memory managers."""

    def __init__(self, *args, **words):
        super().__init__(*args, **words)
        self._library = _process.use()
        self._malloc, self._free = _process.functions(self._library, "Numba")
        # The number of resets of the context, shared with finalizers.
        self._resets = [0]

    def initialize(self):
        """Does nothing: the allocator of the device is created at the first request."""

    def memalloc(self, size):
        """Allocates on the device of the context. Raises ``MemoryError`` if there is not enough memory."""
        device, free, resets = self.context.device.id, self._free, self._resets
        address, own = self._malloc(size, device, 0), resets[0]

        def finalizer():
            # A reset of the context has destroyed the memory, so it must not be reused.
            if resets[0] == own:
                free(address, device, _LEGACY)

        return cuda.MemoryPointer(self.context, ctypes.c_void_p(address), size, finalizer=finalizer)

    def reset(self):
        """Releases the cached memory of all devices, because Numba resets the context afterwards. That
        destroys all memory of the device, also blocks of other libraries. They must be freed before."""
        super().reset()
        self._resets[0] += 1
        self._library.call("torch_empty_cache")

    def get_memory_info(self):
        """Returns the free and the total bytes of the device. Cached memory does not count as free."""
        free, total = driver.driver.cuMemGetInfo()
        return cuda.MemoryInfo(free=free, total=total)

    @property
    def interface_version(self):
        """The version of Numba's interface."""
        return 1


_numba_memory_manager = Manager
