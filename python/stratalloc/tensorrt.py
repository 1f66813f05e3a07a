"""TensorRT's device memory from the process's allocator::

    import tensorrt
    import stratalloc.tensorrt

    allocator = stratalloc.tensorrt.Allocator()
    runtime.gpu_allocator = allocator  # or that of a builder

The allocator must live longer than the runtime or builder and the engines made with it. C++ programs include ``stratalloc_tensorrt.hpp``.
"""

import sys

import tensorrt

from . import _process
from ._errors import Error
from ._library import number


class Allocator(tensorrt.IGpuAsyncAllocator):
    """Allocates on ``device``, for the stream of each request. ``conf`` is a configuration string for the
    allocators of all devices."""

    def __init__(self, device=0, conf=None, library=None):
        tensorrt.IGpuAsyncAllocator.__init__(self)
        self._device = number(device, "device", 2**31 - 1)
        self._malloc, self._free = _process.functions(_process.use(conf, library), "TensorRT")

    # The order of the arguments is that of TensorRT's calls; its documentation has `flags` before `stream`.
    # TensorRT takes 0 for a failure, and prints an exception without its message.
    def allocate_async(self, size, alignment, stream, flags):
        """Returns the address of a block, or 0. Blocks are aligned to 512 bytes, which is more than TensorRT
        may ask for."""
        try:
            return self._malloc(size, self._device, stream)
        except (MemoryError, Error) as error:
            print(f"stratalloc: TensorRT's request failed: {error}", file=sys.stderr)
            return 0

    def deallocate_async(self, memory, stream):
        """Frees a block when the work on ``stream`` has finished. Returns whether that was possible."""
        try:
            self._free(memory, self._device, stream)
        except Error as error:
            print(f"stratalloc: TensorRT's block cannot be freed: {error}", file=sys.stderr)
            return False
        return True

    def reallocate(self, address, alignment, new_size):
        """Returns 0: blocks do not change their size. TensorRT then allocates another one."""
        return 0
