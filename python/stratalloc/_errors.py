"""Exceptions."""

STATUS = {
    1: "invalid argument",
    2: "unknown handle",
    3: "bad configuration",
    4: "out of memory",
    5: "unknown address",
    6: "bad pool",
    7: "not supported",
    8: "driver failed",
    9: "buffer too small",
    10: "internal error",
    11: "asleep",
    12: "busy",
}
OUT_OF_MEMORY = 4


class Error(RuntimeError):
    """A call of the library that failed. ``status`` is its status number in ``stratalloc.h``."""

    def __init__(self, status, text):
        kind = STATUS.get(status, "unknown status")
        text = text.removeprefix(f"{kind.removeprefix('bad ')}: ")
        super().__init__(text if text.startswith(kind) else f"{kind}: {text}")
        self.status = status


class OutOfMemoryError(Error):
    """Neither the cache nor the device can serve the request."""


class LibraryError(RuntimeError):
    """The library is missing, has another version, or can no longer be installed in PyTorch."""
