"""Device-memory allocators, chosen at run time by one string: under PyTorch, or alone.

``install`` puts the library under PyTorch before CUDA starts; ``memory_stats`` and the rest then
speak about PyTorch's memory. ``Allocator`` is an allocator of one's own and needs no PyTorch.
"""

from ._advice import advise, sweep
from ._allocator import Allocator, device_count
from ._errors import Error, LibraryError, OutOfMemoryError
from ._library import __version__, last_error
from ._torch import (
    allocator,
    dump_snapshot,
    empty_cache,
    install,
    memory_stats,
    memory_summary,
    metrics,
    record_memory_history,
    set_conf,
    snapshot,
    switch,
)

__all__ = [
    "Allocator",
    "Error",
    "LibraryError",
    "OutOfMemoryError",
    "__version__",
    "advise",
    "allocator",
    "device_count",
    "dump_snapshot",
    "empty_cache",
    "install",
    "last_error",
    "memory_stats",
    "memory_summary",
    "metrics",
    "record_memory_history",
    "set_conf",
    "snapshot",
    "sweep",
    "switch",
]
