"""Finds the shared library, checks its version and says what its functions take."""

import atexit
import contextlib
import ctypes
import ctypes.util
import enum
import os
import pathlib
import sys
import threading
import time
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from ._errors import OUT_OF_MEMORY, Error, LibraryError, OutOfMemoryError

__version__ = "0.1.0"

VARIABLE = "STRATALLOC_LIBRARY"
_NAME = {"darwin": "libstratalloc.dylib", "win32": "stratalloc.dll"}.get(
    sys.platform, "libstratalloc.so"
)


class Pool(ctypes.Structure):
    """``stratalloc_pool``."""

    _fields_ = [("capture", c_uint64), ("user", c_uint64)]


class CacheInfo(ctypes.Structure):
    """``stratalloc_cache_info_t``."""

    _fields_ = [
        ("device_free_bytes", c_uint64),
        ("device_total_bytes", c_uint64),
        ("largest_cached_bytes", c_uint64),
        ("free_blocks", c_uint64),
    ]


class TEXT(enum.IntEnum):
    """``stratalloc_text``."""

    STATISTICS, SUMMARY, LAYOUT, NAME, METADATA, CONF = range(6)
    TORCH_STATISTICS, TORCH_SUMMARY, TORCH_NAME, METRICS, CONF_KEYS = range(6, 11)


# Arguments of the calls that return a status.
_CALLS = {
    "stratalloc_annotate": [c_uint64, POINTER(c_char_p), c_size_t],
    "stratalloc_create": [c_char_p, c_char_p, POINTER(c_uint64)],
    "stratalloc_check_conf": [c_char_p],
    "stratalloc_destroy": [c_uint64],
    "stratalloc_allocate": [c_uint64, c_uint64, c_void_p, POINTER(c_void_p)],
    "stratalloc_free": [c_uint64, c_void_p],
    "stratalloc_record_stream": [c_uint64, c_void_p, c_void_p],
    "stratalloc_empty_cache": [c_uint64],
    "stratalloc_set_memory_fraction": [c_uint64, c_double],
    "stratalloc_set_conf": [c_uint64, c_char_p],
    "stratalloc_switch": [c_uint64, c_char_p],
    "stratalloc_text_write": [c_uint64, c_uint32, c_char_p, c_size_t, POINTER(c_size_t)],
    "stratalloc_pool_create": [c_uint64, c_uint32, POINTER(Pool)],
    "stratalloc_pool_retain": [c_uint64, Pool],
    "stratalloc_pool_release": [c_uint64, Pool],
    "stratalloc_pool_scope_open_thread": [c_uint64, Pool],
    "stratalloc_pool_scope_open_stream": [c_uint64, Pool, c_void_p],
    "stratalloc_pool_scope_close": [c_uint64, Pool],
    "stratalloc_history_start": [c_uint64, c_uint32, c_uint64, c_char_p, c_int],
    "stratalloc_history_stop": [c_uint64],
    "stratalloc_history_clear": [c_uint64],
    "stratalloc_history_set_stack_source": [c_uint64, c_void_p],
    "stratalloc_history_drop_stack_source": [c_uint64],
    "stratalloc_torch_drop_stack_sources": [],
    "stratalloc_history_set_metadata": [c_uint64, c_char_p],
    "stratalloc_context_push": [c_char_p],
    "stratalloc_context_pop": [],
    "stratalloc_snapshot_save": [c_uint64, c_char_p],
    "stratalloc_snapshot_write": [c_uint64, c_uint32, c_void_p, c_void_p],
    "stratalloc_reset_peaks": [c_uint64],
    "stratalloc_reset_accumulated": [c_uint64],
    "stratalloc_memory_fraction": [c_uint64, POINTER(c_double)],
    "stratalloc_memory_info": [c_uint64, POINTER(c_uint64), POINTER(c_uint64)],
    "stratalloc_cache_info": [c_uint64, POINTER(CacheInfo)],
    "stratalloc_base_allocation": [c_uint64, c_void_p, POINTER(c_void_p), POINTER(c_uint64)],
    "stratalloc_usage": [c_uint64] + [POINTER(c_uint64)] * 4,
    "stratalloc_block_count": [c_uint64, POINTER(c_uint64)],
    "stratalloc_fragmentation": [c_uint64, POINTER(c_double)],
    "stratalloc_device_count": [POINTER(c_int)],
    "stratalloc_record_free": [c_uint64, c_void_p],
    "stratalloc_set_caching": [c_uint64, c_int],
    "stratalloc_caching": [c_uint64, POINTER(c_int)],
    "stratalloc_pool_ensure": [c_uint64, Pool, c_uint32, c_void_p],
    "stratalloc_pool_set_options": [c_uint64, Pool, c_uint32],
    "stratalloc_pool_users": [c_uint64, Pool, POINTER(c_uint32)],
    "stratalloc_pool_live": [c_uint64, Pool, POINTER(c_void_p), c_size_t, POINTER(c_size_t)],
    "stratalloc_pool_empty": [c_uint64, Pool],
    "stratalloc_checkpoint_take": [c_uint64, Pool, POINTER(c_void_p)],
    "stratalloc_checkpoint_restore": [c_uint64] + [c_void_p] * 4,
    "stratalloc_checkpoint_drop": [c_void_p],
    "stratalloc_share": [c_uint64, c_void_p, c_void_p, c_size_t, POINTER(c_size_t), c_void_p],
    "stratalloc_open_shared": [c_uint64, c_char_p, c_size_t]
    + [POINTER(c_uint64), POINTER(c_void_p), POINTER(c_uint64)],
    "stratalloc_close_shared": [c_uint64],
    "stratalloc_enable_peer": [c_uint64, c_int],
    "stratalloc_expandable_segments": [c_uint64, c_void_p, c_void_p],
    "stratalloc_set_reserve_class": [c_uint64, c_void_p, c_char_p],
    "stratalloc_tracker_add": [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)],
    "stratalloc_tracker_remove": [c_uint64, c_uint64],
    "stratalloc_oom_observer_add": [c_uint64, c_void_p, c_void_p, c_void_p, POINTER(c_uint64)],
    "stratalloc_hook_remove": [c_uint64, c_uint64],
    "stratalloc_free_memory_callback_add": [c_uint64, c_void_p, c_void_p, c_void_p]
    + [POINTER(c_uint64)],
    "stratalloc_callbacks_end": [c_void_p, c_uint64, POINTER(c_uint64)],
    "stratalloc_history_is_on": [c_uint64, POINTER(c_int)],
    "stratalloc_compile_context_push": [c_char_p],
    "stratalloc_compile_context_pop": [],
    "stratalloc_torch_empty_cache": [],
    "stratalloc_torch_handle": [c_int, POINTER(c_uint64)],
}

_lock = threading.Lock()
_loaded = None

# How long the end of the interpreter waits for threads inside callbacks.
_SECONDS_AT_EXIT = 5
# What runs before the callbacks end, and the release functions whose callbacks end.
_before_exit, _releases = [], []
# One object for each call that calls functions of its own caller.
_visits = set()
_exiting = False


def at_exit(release, function=None):
    """Ends the callbacks of a release function when the interpreter exits; calls ``function`` before that."""
    _releases.append(release)
    if function is not None:
        _before_exit.append(function)


@atexit.register
def _end_callbacks():
    """Before 3.14 a daemon thread ends where it next needs the interpreter. Inside a callback that would end the
    process, so no callback is left when the interpreter exits."""
    global _exiting
    _exiting = True
    if _loaded is None:
        return
    for function in _before_exit:
        function()
    deadline = time.monotonic() + _SECONDS_AT_EXIT
    inside = c_uint64()
    for release in _releases:
        left_ms = max(0, int((deadline - time.monotonic()) * 1000))
        _loaded.call("callbacks_end", ctypes.cast(release, c_void_p), left_ms, ctypes.byref(inside))
    while _visits and time.monotonic() < deadline:
        time.sleep(0.001)


@contextlib.contextmanager
def visit():
    """Around a call that calls a function of Python before it returns."""
    if _exiting and threading.current_thread() is not threading.main_thread():
        raise LibraryError("the interpreter exits")
    inside = object()
    _visits.add(inside)
    try:
        yield
    finally:
        _visits.discard(inside)


def load(path=None):
    """The library, loaded once. A second path has to name the same file."""
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and not _same(path, _loaded.path):
                raise LibraryError(f"{_loaded.path} is loaded already, not {path}")
            return _loaded
        _loaded = Library(_find(path))
        return _loaded


def last_error():
    """What the calling thread's last failed call said; empty if none has failed."""
    return load().last_error()


def _same(a, b):
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _find(path):
    if path is not None:
        path = os.fspath(path)
        if not os.path.isfile(path):
            raise LibraryError(f"there is no library {path}")
        return os.path.abspath(path)
    said = os.environ.get(VARIABLE)
    if said:
        if not os.path.isfile(said):
            raise LibraryError(f"{VARIABLE}: there is no library {said}")
        return os.path.abspath(said)
    beside = pathlib.Path(__file__).with_name(_NAME)
    if beside.is_file():
        return str(beside)
    found = ctypes.util.find_library("stratalloc")
    if found:
        return found
    raise LibraryError(
        f"{_NAME} is not found: build it with 'cargo build --release --lib --features ffi' and name "
        f"it with library=... or {VARIABLE}"
    )


class Library:
    """The loaded library. ``call`` turns a status into an exception."""

    def __init__(self, path):
        self.path = path
        try:
            self.dll = ctypes.CDLL(path)
        except OSError as error:
            raise LibraryError(f"{path} cannot be loaded: {error}") from error
        try:
            self._declare()
        except AttributeError as error:
            raise LibraryError(
                f"{path} is no stratalloc library, or was built without the feature ffi: {error}"
            ) from error

    def _declare(self):
        version = self.dll.stratalloc_version
        version.argtypes, version.restype = [], c_char_p
        self.version = version().decode()
        if _series(self.version) != _series(__version__):
            raise LibraryError(
                f"{self.path} is version {self.version}, and this package is {__version__}"
            )
        for name, arguments in _CALLS.items():
            function = getattr(self.dll, name)
            function.argtypes, function.restype = arguments, c_int
        error = self.dll.stratalloc_last_error
        error.argtypes, error.restype = [c_char_p, c_size_t], c_size_t

    def last_error(self):
        """The calling thread's last error."""
        size = 1024
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = self.dll.stratalloc_last_error(buffer, size)
            if needed <= size:
                return buffer.value.decode()
            size = needed

    def call(self, name, *arguments):
        """Calls ``stratalloc_<name>``; raises :class:`Error` when it is refused."""
        status = getattr(self.dll, f"stratalloc_{name}")(*arguments)
        if status == OUT_OF_MEMORY:
            raise OutOfMemoryError(status, self.last_error())
        if status != 0:
            raise Error(status, self.last_error())

    def text(self, kind, of=0):
        """A text about a handle, a device or all."""
        needed = c_size_t()
        self.call("text_write", of, kind, None, 0, ctypes.byref(needed))
        while True:
            # Counters grow between two calls, and with them the text.
            size = needed.value + 256
            buffer = ctypes.create_string_buffer(size)
            try:
                self.call("text_write", of, kind, buffer, size, ctypes.byref(needed))
            except Error:
                if needed.value <= size:
                    raise
                continue
            return buffer.value.decode()

    def address(self, name):
        """Where a function is."""
        return ctypes.cast(getattr(self.dll, name), c_void_p).value


def _series(version):
    """What has to agree: the first two numbers as long as the first is 0, then the first."""
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


def encoded(text, what):
    """Text for C, which ends at a zero."""
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected a string, got {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what}: a zero character inside")
    return text.encode()


def callable_for(function, what):
    """A function that will be called later, when its caller cannot be told of a wrong type."""
    if not callable(function):
        raise TypeError(f"{what}: expected a function, got {type(function).__name__}")
    return function


def number(value, what, most):
    """A whole number that C can hold. ``ctypes`` would cut it silently."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected a whole number, got {type(value).__name__}")
    value = value.__index__()
    if not 0 <= value <= most:
        raise ValueError(f"{what}: expected a number from 0 to {most}, got {value}")
    return value
