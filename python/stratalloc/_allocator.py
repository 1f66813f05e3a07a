"""An allocator of one's own, without PyTorch."""

import contextlib
import ctypes
import json
import sys

from . import _history
from ._library import Pool, encoded, load, number

_MOST = 2**64 - 1


class Allocator:
    """An allocator on ``device``: ``sim``, ``host`` or ``cuda:N``.

    ``conf`` is a configuration string, or ``None`` for what the environment says. Addresses and
    streams are whole numbers. Every method raises :class:`stratalloc.Error` when it is refused.
    """

    def __init__(self, conf=None, device="sim", library=None):
        self._handle = 0
        self._library = load(library)
        handle = ctypes.c_uint64()
        text = None if conf is None else encoded(conf, "conf")
        self._library.call("create", text, encoded(device, "device"), ctypes.byref(handle))
        self._handle = handle.value

    def allocate(self, size_bytes, stream=0):
        """The address of a block; 0 for zero bytes."""
        pointer = ctypes.c_void_p()
        size_bytes = number(size_bytes, "size_bytes", _MOST)
        stream = number(stream, "stream", _MOST)
        self._call("allocate", size_bytes, stream, ctypes.byref(pointer))
        return pointer.value or 0

    def free(self, address):
        """Takes a block back; address 0 is ignored."""
        self._call("free", number(address, "address", _MOST))

    def record_stream(self, address, stream):
        """Announces that work on ``stream`` uses the block."""
        stream = number(stream, "stream", _MOST)
        self._call("record_stream", number(address, "address", _MOST), stream)

    def empty_cache(self):
        """Gives everything that is idle back to the device."""
        self._call("empty_cache")

    def set_memory_fraction(self, fraction):
        """Limits the allocator to a part of the device's memory; 1 removes the limit."""
        self._call("set_memory_fraction", float(fraction))

    def set_conf(self, conf):
        """Puts a further configuration string in force on top of those before. One that changes the
        backend, the layers or another key that is read only when an allocator is built switches."""
        self._call("set_conf", encoded(conf, "conf"))

    def switch(self, conf):
        """Puts the allocator that a complete configuration string names in force. Blocks from before
        stay valid and are freed as ever; if it fails, everything is as it was."""
        self._call("switch", encoded(conf, "conf"))

    def memory_stats(self):
        """Every counter, with the keys of ``torch.cuda.memory_stats()`` and, behind them, those of the
        strategy's own counters: ``malloc_async.deferred_frees`` and so on."""
        return json.loads(self._library.text("statistics_json", self._handle))

    def memory_summary(self):
        """The counters as a table."""
        return self._library.text("summary", self._handle)

    @contextlib.contextmanager
    def pool(self, stream=None, use_on_oom=False, no_split=False):
        """A pool of its own for the requests of this thread, or of ``stream``, while it is open."""
        pool = Pool()
        options = (1 if use_on_oom else 0) | (2 if no_split else 0)
        self._call("pool_create", options, ctypes.byref(pool))
        try:
            if stream is None:
                self._call("pool_scope_open_thread", pool)
            else:
                self._call("pool_scope_open_stream", pool, number(stream, "stream", _MOST))
            try:
                yield (pool.capture, pool.user)
            finally:
                if self._handle:
                    self._call("pool_scope_close", pool)
        finally:
            if self._handle:
                self._call("pool_release", pool)

    def record_memory_history(
        self,
        enabled="all",
        context="all",
        stacks="all",
        max_entries=sys.maxsize,
        clear_history=False,
        skip_actions=None,
    ):
        """Records what the allocator does, and who asked: as ``torch.cuda.memory._record_memory_history``.

        ``enabled`` is ``None`` (stop, and forget), ``"state"`` (live blocks) or ``"all"``; ``context``
        whose stacks are gathered: ``None``, ``"state"``, ``"alloc"`` or ``"all"``. Stacks are Python's.
        """
        _history.record(
            self._library,
            self._handle,
            enabled,
            context,
            stacks,
            max_entries,
            clear_history,
            skip_actions,
        )

    def set_metadata(self, metadata):
        """Gives entries from now on these words, or with ``None`` none."""
        text = None if metadata is None else encoded(metadata, "metadata")
        self._call("history_set_metadata", text)

    @contextlib.contextmanager
    def scope(self, name):
        """Names what this thread does meanwhile: entries have the name as their innermost frame."""
        self._library.call("context_push", encoded(name, "name"))
        try:
            yield
        finally:
            self._library.call("context_pop")

    def snapshot(self):
        """Segments, blocks and history as of now, as ``torch.cuda.memory._snapshot()`` gives them."""
        return _history.snapshot(self._library, self._handle)

    def dump_snapshot(self, filename="dump_snapshot.pickle"):
        """Writes the same to a file for PyTorch's viewers and ``stratalloc report``; JSON if its name
        ends in ``.json``."""
        _history.dump(self._library, self._handle, filename)

    def close(self):
        """Ends the allocator and gives all its memory back, also blocks that are still live. Only blocks
        of ``backend:cpu`` live on: any other ``backend:cpu`` of the process takes them back."""
        handle, self._handle = self._handle, 0
        if handle:
            _history.forget(handle)
            self._library.call("destroy", handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        with contextlib.suppress(Exception):
            self.close()

    def _call(self, name, *arguments):
        self._library.call(name, self._handle, *arguments)
