"""An allocator of one's own, without PyTorch."""

import contextlib
import ctypes
import json
import sys

from . import _history, _hooks
from ._calls import CacheInfo, ExpandableVisitor, Pool, Text
from ._errors import Error
from ._library import encoded, load, number
from ._library import visit as _visit

_MOST = 2**64 - 1


def device_count(library=None):
    """How many CUDA devices there are; 0 without a CUDA driver."""
    count = ctypes.c_int()
    load(library).call("device_count", ctypes.byref(count))
    return count.value


class Allocator:
    """An allocator on ``device``: ``sim``, ``host`` or ``cuda:N``.

    ``conf`` is a configuration string, or ``None`` for what the environment says. Addresses and
    streams are whole numbers. Every method raises :class:`stratalloc.Error` when it is refused.
    """

    # False for one that is PyTorch's: it cannot be ended.
    _is_own = True

    def __init__(self, conf=None, device="sim", library=None):
        self._handle = 0
        self._library = load(library)
        handle = ctypes.c_uint64()
        text = None if conf is None else encoded(conf, "conf")
        self._library.call("create", text, encoded(device, "device"), ctypes.byref(handle))
        self._handle = handle.value
        _history.provide(self._library, self._handle)

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
        return json.loads(self._library.text(Text.STATISTICS, self._handle))

    def memory_summary(self):
        """The counters as a table."""
        return self._library.text(Text.SUMMARY, self._handle)

    def usage(self):
        """Bytes in callers' hands and held from the device, each now and at its peak."""
        names = ("allocated", "allocated_peak", "reserved", "reserved_peak")
        places = [ctypes.c_uint64() for _ in names]
        self._call("usage", *map(ctypes.byref, places))
        return {name: place.value for name, place in zip(names, places)}

    def block_count(self):
        """How many blocks are in callers' hands."""
        count = ctypes.c_uint64()
        self._call("block_count", ctypes.byref(count))
        return count.value

    def fragmentation(self):
        """External fragmentation of the segments: 1 - largest free block / sum of all free blocks, from 0 to
        1; 0 if nothing is free. ``cudaMallocAsync`` does not see its free ranges: always 0."""
        fragmentation = ctypes.c_double()
        self._call("fragmentation", ctypes.byref(fragmentation))
        return fragmentation.value

    def record_free(self, address):
        """Forgets a live block of ``backend:cpu``, because the caller will free its memory: with the C
        library's ``free`` below 1 MiB, with ``munmap`` from 1 MiB on."""
        self._call("record_free", number(address, "address", _MOST))

    def reset_peaks(self):
        """Sets every peak to its current value."""
        self._call("reset_peaks")

    def reset_accumulated(self):
        """Sets everything that was summed up since the start to zero."""
        self._call("reset_accumulated")

    def memory_info(self):
        """Free and all bytes of the device, as its driver says: what is cached is not free."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("memory_info", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def cache_info(self):
        """What the device and the cache have, in bytes, and how many free blocks there are."""
        info = CacheInfo()
        self._call("cache_info", ctypes.byref(info))
        return {name: getattr(info, name) for name, _ in CacheInfo._fields_}

    def layout(self):
        """Every segment with its blocks, in address order, with the keys of PyTorch's snapshots."""
        return json.loads(self._library.text(Text.LAYOUT, self._handle))

    def base_allocation(self, address):
        """Start and size of the segment that an address lies in."""
        base, size = ctypes.c_void_p(), ctypes.c_uint64()
        address = number(address, "address", _MOST)
        self._call("base_allocation", address, ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    @property
    def name(self):
        """The strategy in force."""
        return self._library.text(Text.NAME, self._handle)

    @property
    def memory_fraction(self):
        """Which part of the device's memory the allocator may hold; 1 if nothing limits it."""
        fraction = ctypes.c_double()
        self._call("memory_fraction", ctypes.byref(fraction))
        return fraction.value

    @property
    def caching(self):
        """Whether the cache is on. Off, each request is its own call of the driver."""
        on = ctypes.c_int()
        self._call("caching", ctypes.byref(on))
        return on.value != 0

    @caching.setter
    def caching(self, on):
        self._call("set_caching", 1 if on else 0)

    def enable_peer(self, device):
        """Lets ``device`` access this allocator's memory: all there is and all that will be. For the other
        direction, call it on the allocator of ``device``."""
        self._call("enable_peer", number(device, "device", 2**31 - 1))

    def expandable_segments(self):
        """The stream, the kind and the mapped bytes of every expandable segment, in address order."""
        found = []

        def visit(_, stream, is_small, mapped_bytes):
            found.append((stream or 0, "small" if is_small else "large", mapped_bytes))

        with _visit():
            self._call("expandable_segments", ExpandableVisitor(visit), None)
        return found

    def set_reserve_class(self, stream, name):
        """Puts a stream into a class of ``expandable_segments_reserve_by_class``, or with ``None`` into
        none."""
        text = None if name is None else encoded(name, "name")
        self._call("set_reserve_class", number(stream, "stream", _MOST), text)

    @contextlib.contextmanager
    def pool(self, stream=None, use_on_oom=False, no_split=False):
        """A pool of its own for the requests of this thread, or of ``stream``, while it is open."""
        pool = Pool()
        self._call("pool_create", _options(use_on_oom, no_split), ctypes.byref(pool))
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

    def ensure_pool(self, pool, use_on_oom=False, no_split=False):
        """Makes a pool with one user, or adds a user to the one that is there. ``pool`` is a name of the
        caller's: two whole numbers, as PyTorch's."""
        self._call("pool_ensure", _pool(pool), _options(use_on_oom, no_split), None)

    def set_pool_options(self, pool, use_on_oom=False, no_split=False):
        """Changes a pool that has users; ``no_split`` only before it is used."""
        self._call("pool_set_options", _pool(pool), _options(use_on_oom, no_split))

    def release_pool(self, pool):
        """Removes a user. With the last one the pool's idle memory goes back to the device."""
        self._call("pool_release", _pool(pool))

    def empty_pool(self, pool):
        """Gives the idle memory of a pool without users back."""
        self._call("pool_empty", _pool(pool))

    def pool_users(self, pool):
        """How many users a pool has; 0 if it is unknown."""
        users = ctypes.c_uint32()
        self._call("pool_users", _pool(pool), ctypes.byref(users))
        return users.value

    def pool_live(self, pool):
        """The addresses of a pool's live blocks, ascending."""
        pool, count, room = _pool(pool), ctypes.c_size_t(), 0
        while True:
            addresses = (ctypes.c_void_p * room)()
            try:
                self._call("pool_live", pool, addresses if room else None, room, ctypes.byref(count))
            except Error:
                if count.value <= room:
                    raise
            if count.value <= room:
                return list(addresses[: count.value])
            room = count.value

    @contextlib.contextmanager
    def pool_scope(self, pool, stream=None):
        """Routes the requests of this thread, or of ``stream``, to a pool that is there."""
        pool = _pool(pool)
        if stream is None:
            self._call("pool_scope_open_thread", pool)
        else:
            self._call("pool_scope_open_stream", pool, number(stream, "stream", _MOST))
        try:
            yield
        finally:
            if self._handle:
                self._call("pool_scope_close", pool)

    def checkpoint(self, pool):
        """The blocks of a pool now, to go back to: a :class:`Checkpoint`."""
        return _hooks.Checkpoint(self._library, self._handle, _pool(pool))

    def share(self, address):
        """The bytes with which another process opens the block. They carry a secret."""
        return _hooks.share(self._library, self._handle, number(address, "address", _MOST))

    def open_shared(self, shared):
        """Maps a block of another process: a :class:`SharedBlock`."""
        return _hooks.SharedBlock(self._library, self._handle, shared)

    def add_tracker(self, told):
        """Calls ``told(entry)`` with every entry of the history while it is recorded; an entry is a
        dictionary. Memory of the device is announced before any block of it is handed out, and before
        it goes back. Returns a number for ``remove_tracker``."""
        return _hooks.add_tracker(self._library, self._handle, told)

    def remove_tracker(self, id):
        """Tells it no more."""
        self._call("tracker_remove", number(id, "id", _MOST))

    def add_oom_observer(self, told):
        """Lets ``told(device, requested_bytes, device_total_bytes, device_free_bytes)`` know of every request
        that fails. Returns a number for ``remove_oom_observer``."""
        return _hooks.add_oom_observer(self._library, self._handle, told)

    def remove_oom_observer(self, id):
        """Tells it no more."""
        self._call("hook_remove", number(id, "id", _MOST))

    def add_free_memory_callback(self, asked):
        """Lets ``asked()`` free something before memory is taken from the device, and say whether it did.
        Returns a number for ``remove_free_memory_callback``."""
        return _hooks.add_free_memory_callback(self._library, self._handle, asked)

    def remove_free_memory_callback(self, id):
        """Asks it no more."""
        self._call("hook_remove", number(id, "id", _MOST))

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

    @property
    def recording(self):
        """Whether it is recorded what the allocator does."""
        on = ctypes.c_int()
        self._call("history_is_on", ctypes.byref(on))
        return on.value != 0

    def set_metadata(self, metadata):
        """Gives entries from now on these words, or with ``None`` none."""
        text = None if metadata is None else encoded(metadata, "metadata")
        self._call("history_set_metadata", text)

    def metadata(self):
        """What was set last."""
        return self._library.text(Text.METADATA, self._handle)

    @contextlib.contextmanager
    def compile_context(self, name):
        """Says which compiled region runs on this thread meanwhile."""
        self._library.call("compile_context_push", encoded(name, "name"))
        try:
            yield
        finally:
            self._library.call("compile_context_pop")

    @contextlib.contextmanager
    def scope(self, name):
        """Names what this thread does meanwhile: entries have the name as their innermost frame."""
        self._library.call("context_push", encoded(name, "name"))
        try:
            yield
        finally:
            self._library.call("context_pop")

    @contextlib.contextmanager
    def annotate(self, name):
        """Says where something begins and ends, a step for example: snapshots have both under
        ``external_annotations``, as those of ``record_function`` under PyTorch."""
        _history.annotate(self._library, self._handle, encoded(name, "name"), b"START")
        try:
            yield
        finally:
            _history.annotate(self._library, self._handle, encoded(name, "name"), b"END")

    def snapshot(self):
        """Segments, blocks and history as of now, as ``torch.cuda.memory._snapshot()`` gives them."""
        return _history.snapshot(self._library, self._handle)

    def dump_snapshot(self, filename="dump_snapshot.pickle"):
        """Writes the same to a file for PyTorch's viewers and ``stratalloc report``; JSON if its name
        ends in ``.json``, compressed if it ends in ``.gz``."""
        _history.dump(self._library, self._handle, filename)

    def close(self):
        """Ends the allocator and gives all its memory back, also blocks that are still live. Only blocks
        of ``backend:cpu`` live on: any other ``backend:cpu`` of the process takes them back."""
        handle, self._handle = self._handle, 0
        if handle and self._is_own:
            _history.forget(handle)
            self._library.call("destroy", handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        with contextlib.suppress(Exception):
            self.close()

    @classmethod
    def _of(cls, library, handle):
        """PyTorch's."""
        allocator = cls.__new__(cls)
        allocator._library, allocator._handle, allocator._is_own = library, handle, False
        return allocator

    def _call(self, name, *arguments):
        self._library.call(name, self._handle, *arguments)


def _options(use_on_oom, no_split):
    return (1 if use_on_oom else 0) | (2 if no_split else 0)


def _pool(name):
    """A pool's name for C."""
    capture, user = name
    return Pool(number(capture, "pool", _MOST), number(user, "pool", _MOST))
