"""JAX beside the library. JAX does not accept an allocator of another library, so it keeps allocating by
itself. Two things are possible:

- ``stratalloc.jax.enable()`` makes JAX allocate from the device's default memory pool, from which
  ``backend:cudaMallocAsync`` allocates too. Memory that one of them has freed then serves the other. The
  limit, the history and the statistics of the library do not cover JAX's memory.
- Tensors are shared without a copy by DLPack:
  ``jax.dlpack.from_dlpack(allocator.block(size_bytes).cast("float32"))``, and
  ``stratalloc.from_dlpack(array)``.
"""

import os
import sys

from ._errors import LibraryError

# XLA's client for GPUs reads these variables when JAX creates it. `cuda_async` is XLA's allocator over the
# default pool. Without the second variable, JAX first allocates three quarters of the device.
VARIABLES = {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def enable():
    """Sets the environment variables with which JAX allocates from the device's default memory pool. Call
    it before JAX uses a device. The variables also apply to processes that this one starts.

    Raises :class:`stratalloc.LibraryError` if JAX has used a device already, or if a variable has another
    value. Nothing has changed then.
    """
    # A private function. If this JAX lacks it, one that was imported is taken for one in use.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if "jax" in sys.modules and getattr(bridge, "backends_are_initialized", lambda: True)():
        raise LibraryError("JAX uses its devices already: call stratalloc.jax.enable() before")
    for name, value in VARIABLES.items():
        found = os.environ.get(name, value)
        # JAX takes 0 for false.
        if found.lower() != value and (found, value) != ("0", "false"):
            raise LibraryError(f"{name} is {found!r}, and stratalloc.jax.enable() needs {value!r}")
    os.environ.update(VARIABLES)
