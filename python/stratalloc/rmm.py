"""RMM's device memory from the process's allocator, and with it that of cuDF, cuML and other libraries that
use RMM::

    import rmm
    import stratalloc.rmm

    rmm.mr.set_current_device_resource(stratalloc.rmm.MemoryResource())

With several devices, each gets its own: ``rmm.mr.set_per_device_resource(1, stratalloc.rmm.MemoryResource(1))``.
C++ programs include ``stratalloc_rmm.hpp``, whose resource does not call Python (``stratalloc.rmm.include()``
returns its folder).
"""

import os

import rmm
import rmm.mr

from . import _process
from ._library import number


class MemoryResource(rmm.mr.CallbackMemoryResource):
    """Allocates on ``device``, by default the current one. ``conf`` is a configuration string for the
    allocators of all devices; without it they keep theirs, which is read from the environment when a device
    is first used. A block that is freed on another stream than it was requested for is reused when the work
    on both has finished.

    Raises ``MemoryError`` if there is not enough memory."""

    def __init__(self, device=None, conf=None, library=None):
        malloc, free = _process.functions(_process.use(conf, library), "RMM")
        device = rmm._cuda.gpu.getDevice() if device is None else number(device, "device", 2**31 - 1)

        def allocate(size_bytes, stream):
            return malloc(size_bytes, device, stream.__cuda_stream__()[1])

        def deallocate(address, size_bytes, stream):
            free(address, device, stream.__cuda_stream__()[1])

        super().__init__(allocate, deallocate)


def include():
    """Returns the folder of ``stratalloc_rmm.hpp`` and ``stratalloc.h``."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "csrc")
