"""Numba's device memory from the process's allocator. Set ``NUMBA_CUDA_MEMORY_MANAGER=stratalloc.numba``, or
call this before Numba uses CUDA::

    from numba import cuda
    import stratalloc.numba

    cuda.set_memory_manager(stratalloc.numba.Manager)

Numba has no current stream. Its blocks are for the default stream, and a freed block is reused when the work
on the default stream and on all streams that wait for it (those of ``cuda.stream()``) has finished.
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
        self._malloc, self._free = _process.functions(_process.use(), "Numba")

    def initialize(self):
        """Does nothing: the allocator of the device is created at the first request."""

    def memalloc(self, size):
        """Allocates on the device of the context. Raises ``MemoryError`` if there is not enough memory."""
        device = self.context.device.id
        address = self._malloc(size, device, 0)
        allocations, free = self.allocations, self._free

        def finalizer():
            # A reset of the context has removed all blocks already.
            if allocations.pop(address, None):
                free(address, device, _LEGACY)

        allocations[address] = True
        return cuda.MemoryPointer(self.context, ctypes.c_void_p(address), size, finalizer=finalizer)

    def reset(self):
        """Frees all blocks of the context."""
        for address in list(self.allocations):
            if self.allocations.pop(address, None) is True:
                self._free(address, self.context.device.id, _LEGACY)
        super().reset()

    def get_memory_info(self):
        """Returns the free and the total bytes of the device. Cached memory does not count as free."""
        free, total = driver.driver.cuMemGetInfo()
        return cuda.MemoryInfo(free=free, total=total)

    @property
    def interface_version(self):
        """The version of Numba's interface."""
        return 1


_numba_memory_manager = Manager
