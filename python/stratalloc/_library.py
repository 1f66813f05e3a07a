"""Finds the shared library, checks its version and says what its functions take."""

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
