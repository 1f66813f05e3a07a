"""Tags: memory that is paused and resumed at the same addresses."""

import contextlib
import ctypes
import os
import threading

from ._calls import Paused, Pool, Resumed, TagInfo
from ._library import encoded, number

_MOST = 2**64 - 1
_STATES = ("awake", "pausing", "asleep", "resuming")
_BACKUP, _KEEP, _WAIT, _KEEP_FREE = 1, 2, 4, 8
_SYNCHRONIZED = 4


def _values(structure):
    """Returns the fields of a C structure as a dictionary."""
    return {name: getattr(structure, name) for name, _ in structure._fields_}


class Tag:
    """A pool that can be paused and resumed. Made by :meth:`Allocator.tag`.

    As a context manager it routes the requests of this thread to the tag. Contexts may nest.
    """

    def __init__(self, allocator, pool, name):
        self._allocator = allocator
        self._pool = pool
        self._open = threading.local()
        self._directory = None
        self.name = name

    @property
    def pool(self):
        """The id of the pool, two integers."""
        return (self._pool.capture, self._pool.user)

    @property
    def directory(self):
        """The directory of files in which pauses save contents. ``None``: host memory. It can be changed at any
        time, for the next pause, and must exist then. The files are removed by the resume."""
        return self._directory

    @directory.setter
    def directory(self, path):
        path = None if path is None else os.fspath(path)
        self._allocator._call("tag_set_directory", self._pool, path and encoded(path, "directory"))
        self._directory = path

    def __enter__(self):
        scope = self._allocator.pool_scope(self.pool)
        scope.__enter__()
        if not hasattr(self._open, "scopes"):
            self._open.scopes = []
        self._open.scopes.append(scope)
        return self

    def __exit__(self, *error):
        return self._open.scopes.pop().__exit__(*error)

    def pause(self, backup=..., streams=(), synchronized=False):
        """Releases the memory of the tag and keeps its addresses. Waits for the streams of the tag, of its
        blocks, and for ``streams``, unless ``synchronized``. ``backup`` is ``"host"`` or ``None``; without
        it, the tag's own. Returns a dictionary of numbers."""
        options = _SYNCHRONIZED if synchronized else 0
        if backup is not ...:
            options |= 1 if _has_backup(backup) else 2
        streams = [number(stream, "stream", _MOST) for stream in streams]
        array = (ctypes.c_void_p * len(streams))(*streams)
        paused = Paused()
        out = ctypes.byref(paused)
        self._allocator._call("tag_pause", self._pool, options, array, len(streams), out)
        return _values(paused)

    def resume(self):
        """Maps memory at the addresses of the tag and restores its contents. Returns a dictionary of
        numbers."""
        resumed = Resumed()
        self._allocator._call("tag_resume", self._pool, ctypes.byref(resumed))
        return _values(resumed)

    def info(self):
        """Returns the name, the options and the state of the tag and its numbers of bytes as a dictionary."""
        info = TagInfo()
        self._allocator._call("tag_info", self._pool, ctypes.byref(info))
        options = info.options
        return {
            **_values(info),
            "options": {
                "backup": "host" if options & _BACKUP else None,
                "keep": bool(options & _KEEP),
                "requests": "wait" if options & _WAIT else "fail",
                "directory": self._directory,
                "keep_free": bool(options & _KEEP_FREE),
            },
            "state": _STATES[info.state],
            "name": self.name,
        }

    @property
    def state(self):
        """``"awake"``, ``"pausing"``, ``"asleep"`` or ``"resuming"``."""
        return self.info()["state"]

    @property
    def live_bytes(self):
        """The bytes of its live blocks."""
        return self.info()["live_bytes"]

    @property
    def backed_bytes(self):
        """The bytes of its blocks in the backup."""
        return self.info()["backed_bytes"]

    def read_backup(self, address, size_bytes):
        """Returns bytes of a live block of the paused tag."""
        buffer = ctypes.create_string_buffer(number(size_bytes, "size_bytes", 2**62))
        address = number(address, "address", _MOST)
        self._allocator._call("tag_read_backup", address, buffer, size_bytes)
        return buffer.raw

    def close(self):
        """Removes the user of the tag. Its blocks can still be freed, but it cannot be resumed."""
        self._allocator._call("pool_release", self._pool)
        with contextlib.suppress(Exception):
            self._allocator._call("pool_empty", self._pool)


def _has_backup(backup):
    if backup not in ("host", None):
        raise ValueError(f'backup is {backup!r}: expected "host" or None')
    return backup == "host"


def options_of(backup="host", keep=False, requests="fail", keep_free=False):
    """Returns the options of a tag as a number."""
    if requests not in ("fail", "wait"):
        raise ValueError(f'requests is {requests!r}: expected "fail" or "wait"')
    options = (_BACKUP if _has_backup(backup) else 0) | (_KEEP if keep else 0)
    return options | (_WAIT if requests == "wait" else 0) | (_KEEP_FREE if keep_free else 0)


def create(allocator, name, directory, **options):
    """Creates a tag: see :meth:`Allocator.tag`."""
    options, pool = options_of(**options), Pool()
    allocator._call("tag_create", encoded(name, "name"), options, ctypes.byref(pool))
    made = Tag(allocator, pool, name)
    if directory is not None:
        made.directory = directory
    return made
