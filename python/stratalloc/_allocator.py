"""Allocators without PyTorch."""

import contextlib
import ctypes
import json
import sys

from . import _dlpack, _history, _hooks, _tags
from ._calls import CacheInfo, ExpandableVisitor, Pool, Text
from ._errors import Error
from ._library import encoded, load, number
from ._library import visit as _visit

_MOST = 2**64 - 1


def device_count(library=None):
    """Returns the number of CUDA devices. Returns 0 without a CUDA driver."""
    count = ctypes.c_int()
    load(library).call("device_count", ctypes.byref(count))
    return count.value


class Allocator:
    """An allocator on ``device``: ``sim``, ``host`` or ``cuda:N``.

    ``conf`` is a configuration string, or ``None`` to read the environment. Addresses and streams are
    integers. A call that fails raises :class:`stratalloc.Error`.
    """

    # False for allocators of PyTorch, which cannot be destroyed.
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
        """Allocates a block and returns its address. Returns 0 for zero bytes."""
        pointer = ctypes.c_void_p()
        size_bytes = number(size_bytes, "size_bytes", _MOST)
        stream = number(stream, "stream", _MOST)
        self._call("allocate", size_bytes, stream, ctypes.byref(pointer))
        return pointer.value or 0

    def block(self, size_bytes, stream=0):
        """Allocates a :class:`stratalloc.Block`, which other libraries use as a tensor through DLPack. It is
        freed when it is dropped, and keeps the memory of a closed allocator until then. Fails on the device
        ``sim``, which has no memory."""
        return _dlpack.Block._allocate(self._library, self._handle, size_bytes, stream)

    def free(self, address):
        """Frees the block at an address. Address 0 is ignored."""
        self._call("free", number(address, "address", _MOST))

    def record_stream(self, address, stream):
        """Announces that work on ``stream`` uses the block at an address."""
        stream = number(stream, "stream", _MOST)
        self._call("record_stream", number(address, "address", _MOST), stream)

    def empty_cache(self):
        """Releases all free memory to the device."""
        self._call("empty_cache")

    def set_memory_fraction(self, fraction):
        """Limits the allocator to a fraction of the device's memory, or of this machine's with
        ``backend:cpu`` and ``backend:pinned``. 1 removes the limit."""
        self._call("set_memory_fraction", float(fraction))

    def set_conf(self, conf):
        """Applies a configuration string on top of the current settings. If the string changes a key
        that is read only when an allocator is built (such as the backend or the layers), the call
        switches as ``switch`` does."""
        self._call("set_conf", encoded(conf, "conf"))

    def switch(self, conf):
        """Switches to an allocator with this configuration. The string is complete: a key that it omits
        has its default value. Existing blocks stay valid and are freed as before. If the call fails,
        nothing has changed."""
        self._call("switch", encoded(conf, "conf"))

    def memory_stats(self):
        """Returns all counters, with the keys of ``torch.cuda.memory_stats()``. They are followed by
        those that only this strategy has, such as ``malloc_async.deferred_frees``."""
        return json.loads(self._library.text(Text.STATISTICS, self._handle))

    def memory_summary(self):
        """Returns the counters as a table."""
        return self._library.text(Text.SUMMARY, self._handle)

    def usage(self):
        """Returns the allocated and the reserved bytes, and the peak of each."""
        names = ("allocated", "allocated_peak", "reserved", "reserved_peak")
        places = [ctypes.c_uint64() for _ in names]
        self._call("usage", *map(ctypes.byref, places))
        return {name: place.value for name, place in zip(names, places)}

    def block_count(self):
        """Returns the number of live blocks."""
        count = ctypes.c_uint64()
        self._call("block_count", ctypes.byref(count))
        return count.value

    def fragmentation(self):
        """Returns the external fragmentation of the segments, from 0 to 1: 1 - largest free block / sum
        of all free blocks. Returns 0 if nothing is free, and always with ``cudaMallocAsync``, because
        the driver does not report its free ranges."""
        fragmentation = ctypes.c_double()
        self._call("fragmentation", ctypes.byref(fragmentation))
        return fragmentation.value

    def record_free(self, address):
        """Removes a live block of ``backend:cpu`` from the allocator. The caller then frees its memory:
        with the C library's ``free`` if the block is below 1 MiB, otherwise with ``munmap``."""
        self._call("record_free", number(address, "address", _MOST))

    def reset_peaks(self):
        """Sets every peak to its current value."""
        self._call("reset_peaks")

    def reset_accumulated(self):
        """Sets all accumulated counters to zero."""
        self._call("reset_accumulated")

    def memory_info(self):
        """Returns the free and the total bytes of the device, as its driver reports them. Cached memory
        does not count as free."""
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        self._call("memory_info", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def cache_info(self):
        """Returns the memory of the device and of the cache, in bytes, and the number of free blocks."""
        info = CacheInfo()
        self._call("cache_info", ctypes.byref(info))
        return {name: getattr(info, name) for name, _ in CacheInfo._fields_}

    def layout(self):
        """Returns every segment with its blocks, in address order, with the keys of PyTorch's snapshots."""
        return json.loads(self._library.text(Text.LAYOUT, self._handle))

    def base_allocation(self, address):
        """Returns the start and the size of the segment that contains an address."""
        base, size = ctypes.c_void_p(), ctypes.c_uint64()
        address = number(address, "address", _MOST)
        self._call("base_allocation", address, ctypes.byref(base), ctypes.byref(size))
        return base.value, size.value

    @property
    def name(self):
        """The current strategy."""
        return self._library.text(Text.NAME, self._handle)

    @property
    def memory_fraction(self):
        """The fraction of the device's memory that the allocator may reserve, or of this machine's with
        ``backend:cpu`` and ``backend:pinned``. 1 if there is no limit."""
        fraction = ctypes.c_double()
        self._call("memory_fraction", ctypes.byref(fraction))
        return fraction.value

    @property
    def caching(self):
        """Whether the cache is on. If it is off, each request is a call of the driver."""
        on = ctypes.c_int()
        self._call("caching", ctypes.byref(on))
        return on.value != 0

    @caching.setter
    def caching(self, on):
        self._call("set_caching", 1 if on else 0)

    def enable_peer(self, device):
        """Gives ``device`` access to this allocator's memory, present and future. For the other
        direction, call this on the allocator of ``device``."""
        self._call("enable_peer", number(device, "device", 2**31 - 1))

    def expandable_segments(self):
        """Returns the stream, the kind and the mapped bytes of every expandable segment, in address
        order."""
        found = []

        def visit(_, stream, is_small, mapped_bytes):
            found.append((stream or 0, "small" if is_small else "large", mapped_bytes))

        with _visit():
            self._call("expandable_segments", ExpandableVisitor(visit), None)
        return found

    def set_reserve_class(self, stream, name):
        """Assigns a stream to a class of ``expandable_segments_reserve_by_class``. ``None`` removes it
        from its class."""
        text = None if name is None else encoded(name, "name")
        self._call("set_reserve_class", number(stream, "stream", _MOST), text)

    @contextlib.contextmanager
    def pool(self, stream=None, use_on_oom=False, no_split=False):
        """Creates a pool for the requests of this thread, or of ``stream``, until the context exits."""
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

    def tag(self, name, backup="host", keep=False, requests="fail", directory=None, keep_free=False):
        """Creates a :class:`stratalloc.Tag`: a pool that can be paused and resumed at the same addresses.

        With ``backup="host"`` a pause saves the contents of live blocks in host memory, with
        ``None`` it drops them. ``keep`` keeps the backup's pinned memory for the next pause. While the tag
        is not awake, requests in it fail, or wait with ``requests="wait"``. With a ``directory`` the contents
        are saved in files there. ``keep_free`` maps also the free memory of the tag's cache again at a resume.
        """
        options = {"backup": backup, "keep": keep, "requests": requests, "keep_free": keep_free}
        return _tags.create(self, name, directory, **options)

    def ensure_pool(self, pool, use_on_oom=False, no_split=False):
        """Creates a pool with one user, or adds a user if the pool exists. ``pool`` is an id that the
        caller chooses: two integers, as in PyTorch."""
        self._call("pool_ensure", _pool(pool), _options(use_on_oom, no_split), None)

    def set_pool_options(self, pool, use_on_oom=False, no_split=False):
        """Changes the options of a pool. ``no_split`` can only be set before the pool is used."""
        self._call("pool_set_options", _pool(pool), _options(use_on_oom, no_split))

    def release_pool(self, pool):
        """Removes a user from a pool. The free memory of a pool without users is released."""
        self._call("pool_release", _pool(pool))

    def empty_pool(self, pool):
        """Releases the free memory of a pool without users."""
        self._call("pool_empty", _pool(pool))

    def pool_users(self, pool):
        """Returns the number of a pool's users. Returns 0 if the pool is unknown."""
        users = ctypes.c_uint32()
        self._call("pool_users", _pool(pool), ctypes.byref(users))
        return users.value

    def pool_live(self, pool):
        """Returns the addresses of a pool's live blocks in ascending order."""
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
        """Routes the requests of this thread, or of ``stream``, to an existing pool, until the context
        exits."""
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
        """Takes a :class:`Checkpoint` of a pool's current blocks."""
        return _hooks.Checkpoint(self._library, self._handle, _pool(pool))

    def share(self, address):
        """Returns the bytes with which another process can open the block. They contain a secret."""
        return _hooks.share(self._library, self._handle, number(address, "address", _MOST))

    def open_shared(self, shared):
        """Maps a block of another process and returns a :class:`SharedBlock`."""
        return _hooks.SharedBlock(self._library, self._handle, shared)

    def add_tracker(self, told):
        """Adds a tracker: a function that is called with every entry of the history while recording is
        on. An entry is a dictionary. The entry for new device memory comes before a block in it is
        allocated. The entry for memory to be released comes before the release. Returns a number for
        ``remove_tracker``."""
        return _hooks.add_tracker(self._library, self._handle, told)

    def remove_tracker(self, id):
        """Removes a tracker by its number."""
        self._call("tracker_remove", number(id, "id", _MOST))

    def add_oom_observer(self, told):
        """Adds a function that is called for every failed request, with the arguments ``device,
        requested_bytes, device_total_bytes, device_free_bytes``. Returns a number for
        ``remove_oom_observer``."""
        return _hooks.add_oom_observer(self._library, self._handle, told)

    def remove_oom_observer(self, id):
        """Removes an observer by its number."""
        self._call("hook_remove", number(id, "id", _MOST))

    def add_free_memory_callback(self, asked):
        """Adds a function that is called before memory is acquired from the device, so that it can free
        memory instead. The function returns whether it freed any. Returns a number for
        ``remove_free_memory_callback``."""
        return _hooks.add_free_memory_callback(self._library, self._handle, asked)

    def remove_free_memory_callback(self, id):
        """Removes a callback by its number."""
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
        """Records the allocator's actions and the stacks of requests, as
        ``torch.cuda.memory._record_memory_history`` does.

        ``enabled`` is ``None`` (stops recording and drops all entries), ``"state"`` (records live blocks
        only) or ``"all"``. ``context`` selects the stacks that are gathered: ``None``, ``"state"`` (those
        of live blocks), ``"alloc"`` (also those of allocations) or ``"all"`` (also those of frees).
        Stacks have Python frames only.
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
        """Whether recording is on."""
        on = ctypes.c_int()
        self._call("history_is_on", ctypes.byref(on))
        return on.value != 0

    def set_metadata(self, metadata):
        """Sets the metadata of entries that are recorded from now on. ``None`` removes it."""
        text = None if metadata is None else encoded(metadata, "metadata")
        self._call("history_set_metadata", text)

    def metadata(self):
        """Returns the metadata that was set last."""
        return self._library.text(Text.METADATA, self._handle)

    @contextlib.contextmanager
    def compile_context(self, name):
        """Sets the name of the compiled region that this thread runs, until the context exits."""
        self._library.call("compile_context_push", encoded(name, "name"))
        try:
            yield
        finally:
            self._library.call("compile_context_pop")

    @contextlib.contextmanager
    def scope(self, name):
        """Adds a frame to the stacks of this thread's entries, until the context exits. ``name`` is the
        innermost frame."""
        self._library.call("context_push", encoded(name, "name"))
        try:
            yield
        finally:
            self._library.call("context_pop")

    @contextlib.contextmanager
    def annotate(self, name):
        """Records an annotation START now and an annotation END when the context exits. For example, the
        context is a training step. Snapshots list annotations under ``external_annotations``, as they do
        those of ``record_function`` in PyTorch."""
        _history.annotate(self._library, self._handle, encoded(name, "name"), b"START")
        try:
            yield
        finally:
            _history.annotate(self._library, self._handle, encoded(name, "name"), b"END")

    def snapshot(self):
        """Returns the current segments, blocks and history, as ``torch.cuda.memory._snapshot()`` does."""
        return _history.snapshot(self._library, self._handle)

    def dump_snapshot(self, filename="dump_snapshot.pickle"):
        """Writes a snapshot to a file for PyTorch's viewers and ``stratalloc report``. The file is JSON if
        its name ends in ``.json``, otherwise a pickle. It is compressed if its name ends in ``.gz``."""
        _history.dump(self._library, self._handle, filename)

    def close(self):
        """Destroys the allocator and releases all its memory, including live blocks. Blocks of
        ``backend:cpu`` are the exception: they stay valid, and any other ``backend:cpu`` allocator of
        the process can free them."""
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
        """Returns an object for the allocator of PyTorch that has this handle."""
        allocator = cls.__new__(cls)
        allocator._library, allocator._handle, allocator._is_own = library, handle, False
        return allocator

    def _call(self, name, *arguments):
        self._library.call(name, self._handle, *arguments)


def _options(use_on_oom, no_split):
    return (1 if use_on_oom else 0) | (2 if no_split else 0)


def _pool(name):
    """Converts a pool's id to the C structure."""
    capture, user = name
    return Pool(number(capture, "pool", _MOST), number(user, "pool", _MOST))
