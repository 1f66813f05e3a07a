"""Device-memory allocators, selected at run time by a configuration string: for PyTorch, or without it.

``install`` makes PyTorch use the library. Call it before CUDA is used. ``memory_stats`` and the other
functions then report the memory of PyTorch. ``Allocator`` is a separate allocator and needs no PyTorch.
"""

from ._account import account, measure
from ._advice import advise
from ._allocator import Allocator, device_count
from ._dlpack import Block, ImportedTensor, from_dlpack
from ._errors import Error, LibraryError, OutOfMemoryError
from ._library import __version__, last_error
from ._sleep import pause, resume, tag, tags
from ._sweep import RayExecutor, sweep
from ._tags import Tag
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
from ._watch import watch

__all__ = [
    "Allocator",
    "Block",
    "Error",
    "ImportedTensor",
    "LibraryError",
    "OutOfMemoryError",
    "RayExecutor",
    "Tag",
    "__version__",
    "account",
    "advise",
    "allocator",
    "device_count",
    "dump_snapshot",
    "empty_cache",
    "from_dlpack",
    "install",
    "last_error",
    "measure",
    "memory_stats",
    "memory_summary",
    "metrics",
    "pause",
    "record_memory_history",
    "resume",
    "set_conf",
    "snapshot",
    "sweep",
    "switch",
    "tag",
    "tags",
    "watch",
]
