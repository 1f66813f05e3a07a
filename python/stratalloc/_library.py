"""Finds the shared library, checks its version and declares its functions."""

import atexit
import contextlib
import ctypes
import ctypes.util
import os
import pathlib
import sys
import threading
import time
from ctypes import c_char_p, c_size_t, c_uint64, c_void_p

from ._calls import CALLS
from ._errors import OUT_OF_MEMORY, Error, LibraryError, OutOfMemoryError

__version__ = "0.1.0"

VARIABLE = "STRATALLOC_LIBRARY"
_NAME = {"darwin": "libstratalloc.dylib", "win32": "stratalloc.dll"}.get(
    sys.platform, "libstratalloc.so"
)

_lock = threading.Lock()
_loaded = None

# How long the interpreter waits at its exit for threads that run callbacks.
_SECONDS_AT_EXIT = 5
# Functions that are called at exit before callbacks are stopped, and the release functions whose
# callbacks are stopped.
_before_exit, _releases = [], []
# One object for each running call of the library that calls Python functions before it returns.
_visits = set()
_exiting = False


def at_exit(release, function=None):
    """Registers a release function, whose callbacks are stopped when the interpreter exits. Before that,
    ``function`` is called."""
    _releases.append(release)
    if function is not None:
        _before_exit.append(function)


@atexit.register
def _end_callbacks():
    """Stops all callbacks when the interpreter exits. In Python before 3.14, a daemon thread is
    terminated when it next needs the interpreter after that. Inside a callback this would end the
    process."""
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
    """Surrounds a call of the library that calls Python functions before it returns."""
    if _exiting and threading.current_thread() is not threading.main_thread():
        raise LibraryError("the interpreter exits")
    inside = object()
    _visits.add(inside)
    try:
        yield
    finally:
        _visits.discard(inside)


def load(path=None):
    """Returns the library. Loads it at the first call. A later path must name the same file."""
    global _loaded
    with _lock:
        if _loaded is not None:
            if path is not None and not _same(path, _loaded.path):
                raise LibraryError(f"{_loaded.path} is loaded already, not {path}")
            return _loaded
        _loaded = Library(_find(path))
        return _loaded


def last_error():
    """Returns the message of the calling thread's last failed call. Empty if no call has failed."""
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
    path = os.environ.get(VARIABLE)
    if path:
        if not os.path.isfile(path):
            raise LibraryError(f"{VARIABLE}: there is no library {path}")
        return os.path.abspath(path)
    beside = pathlib.Path(__file__).with_name(_NAME)
    if beside.is_file():
        return str(beside)
    found = ctypes.util.find_library("stratalloc")
    if found:
        return found
    raise LibraryError(
        f"{_NAME} is not found: build it with 'cargo build --release -p stratalloc-ffi --features advise,stacks' "
        f"and name it with library=... or {VARIABLE}"
    )


class Library:
    """The loaded library. Its method ``call`` raises an exception for a status other than success."""

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
        version.restype = c_char_p
        self.version = version().decode()
        if _series(self.version) != _series(__version__):
            raise LibraryError(
                f"{self.path} is version {self.version}, and this package is {__version__}"
            )
        for name, (result, arguments) in CALLS.items():
            function = getattr(self.dll, name)
            function.argtypes, function.restype = arguments, result

    def last_error(self):
        """Returns the calling thread's last error message."""
        size = 1024
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = self.dll.stratalloc_last_error(buffer, size)
            if needed <= size:
                return buffer.value.decode()
            size = needed

    def call(self, name, *arguments):
        """Calls ``stratalloc_<name>``. Raises :class:`Error` if it fails."""
        status = getattr(self.dll, f"stratalloc_{name}")(*arguments)
        if status == OUT_OF_MEMORY:
            raise OutOfMemoryError(status, self.last_error())
        if status != 0:
            raise Error(status, self.last_error())

    def failure(self):
        """Returns the exception for the calling thread's last failed call: a ``MemoryError`` if there was not
        enough memory, otherwise an :class:`Error`. For functions that return no status."""
        status = self.dll.stratalloc_last_status()
        return MemoryError(self.last_error()) if status == OUT_OF_MEMORY else Error(status, self.last_error())

    def text(self, kind, of=0):
        """Returns the text of a kind about ``of``: a handle, a device, or 0 for all allocators."""
        needed = c_size_t()
        self.call("text_write", of, kind, None, 0, ctypes.byref(needed))
        while True:
            # The text may grow between two calls, because counters grow.
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
        """Returns the address of a function of the library."""
        return ctypes.cast(getattr(self.dll, name), c_void_p).value


def _series(version):
    """Returns the part of a version that package and library must share: the first two numbers if the
    first is 0, otherwise the first number."""
    parts = version.split(".")
    return parts[:2] if parts[0] == "0" else parts[:1]


def encoded(text, what):
    """Encodes a text for C. Refuses a zero character, because a C string ends at the first zero."""
    if not isinstance(text, str):
        raise TypeError(f"{what}: expected a string, got {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what}: a zero character inside")
    return text.encode()


def callable_for(function, what):
    """Checks that a value is callable. It is called later, when an error can no longer be raised to the
    caller."""
    if not callable(function):
        raise TypeError(f"{what}: expected a function, got {type(function).__name__}")
    return function


def number(value, what, most):
    """Checks that an integer fits the C type. ``ctypes`` would truncate it without an error."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: expected a whole number, got {type(value).__name__}")
    value = value.__index__()
    if not 0 <= value <= most:
        raise ValueError(f"{what}: expected a number from 0 to {most}, got {value}")
    return value
