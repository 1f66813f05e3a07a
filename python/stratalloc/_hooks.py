"""Python functions that an allocator calls, checkpoints, and blocks of other processes."""

import ctypes
import itertools
from ctypes import c_uint64, c_void_p

from ._calls import (
    BlockAllocated,
    BlockFreed,
    FreeMemoryCallback,
    OomObserver,
    Release,
    Tracker,
)
from ._library import at_exit, callable_for, visit

_ACTIONS = {
    0: "alloc",
    1: "free_requested",
    2: "free_completed",
    3: "segment_alloc",
    4: "segment_free",
    5: "segment_map",
    6: "segment_unmap",
    7: "snapshot",
    8: "oom",
    16: "tag_pause",
    17: "tag_resume",
}


# Functions that the library may call. The key is the number that the library passes as `user`. Removed
# when the library calls `_release`.
_held = {}
_numbers = itertools.count(1)
_release = Release(lambda number: _held.pop(number, None) and None)
at_exit(_release)


def _add(library, handle, kind, function):
    """Passes a function to the library. Returns the number with which it can be removed."""
    number, id = next(_numbers), c_uint64()
    _held[number] = function
    try:
        library.call(f"{kind}_add", handle, function, _release, number, ctypes.byref(id))
    except BaseException:
        del _held[number]
        raise
    return id.value


def add_tracker(library, handle, function):
    callable_for(function, "told")

    def call(_, entry):
        entry = entry.contents
        text = lambda raw: raw.decode(errors="replace") if raw is not None else ""  # noqa: E731
        function(
            {
                "action": _ACTIONS[entry.action],
                "addr": entry.address,
                "size": entry.size_bytes,
                "stream": entry.stream or 0,
                "segment_pool_id": (entry.pool.capture, entry.pool.user),
                "time_us": entry.time_us,
                "compile_context": text(entry.compile_context),
                "user_metadata": text(entry.user_metadata),
            }
        )

    return _add(library, handle, "tracker", Tracker(call))


def add_oom_observer(library, handle, function):
    callable_for(function, "told")

    def call(_, *numbers):
        function(*numbers)

    return _add(library, handle, "oom_observer", OomObserver(call))


def add_free_memory_callback(library, handle, function):
    callable_for(function, "asked")

    def call(_):
        return 1 if function() else 0

    return _add(library, handle, "free_memory_callback", FreeMemoryCallback(call))


class Checkpoint:
    """A checkpoint: a pool's blocks at one moment."""

    def __init__(self, library, handle, pool):
        self._library, self._handle, self._checkpoint = library, handle, c_void_p()
        library.call("checkpoint_take", handle, pool, ctypes.byref(self._checkpoint))

    def restore(self):
        """Restores the pool's blocks. Returns the addresses of the blocks that were freed, and of the
        blocks that are live again."""
        live, freed = [], []
        allocated_now = BlockAllocated(lambda _, address, size, stream: live.append(address))
        freed_now = BlockFreed(lambda _, address, size: freed.append(address))
        with visit():
            self._library.call(
                "checkpoint_restore", self._handle, self._checkpoint, allocated_now, freed_now, None
            )
        return freed, live

    def close(self):
        """Drops the checkpoint. The pool stays as it is."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint:
            self._library.call("checkpoint_drop", checkpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class SharedBlock:
    """A block of another process, mapped here until it is closed."""

    def __init__(self, library, handle, shared):
        # Checked, because ``bytes`` of an integer n would be n zero bytes.
        if not isinstance(shared, (bytes, bytearray, memoryview)):
            raise TypeError(f"shared: expected bytes, got {type(shared).__name__}")
        shared = bytes(shared)
        number, address, size = c_uint64(), c_void_p(), c_uint64()
        places = [ctypes.byref(place) for place in (number, address, size)]
        self._library, self._number = library, 0
        library.call("open_shared", handle, shared, len(shared), *places)
        self._number = number.value
        # : The start address in this process, and the size.
        self.address, self.size_bytes = address.value, size.value

    def close(self):
        """Closes the block. Its pages are unmapped when no other open block uses them."""
        number, self._number = self._number, 0
        if number:
            self._library.call("close_shared", number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def share(library, handle, address):
    """Returns the bytes with which another process can open a block."""
    needed = ctypes.c_size_t()
    library.call("share", handle, address, None, 0, ctypes.byref(needed), None)
    buffer = ctypes.create_string_buffer(needed.value)
    library.call("share", handle, address, buffer, needed.value, ctypes.byref(needed), None)
    return buffer.raw[: needed.value]
