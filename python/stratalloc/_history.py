"""Records an allocator's history with Python stacks, and takes snapshots."""

import contextlib
import ctypes
import gzip
import io
import itertools
import json
import os
import pickle
import sys
import threading
from ctypes import c_char_p

from . import _files
from ._calls import SnapshotWriter, StackFrame, StackSource
from ._library import at_exit, encoded, visit

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LEVELS = {None: 0, "state": 1, "alloc": 2, "all": 3}
_MOST = 2**64 - 1
# The number of different stacks that are kept, so that an equal new stack can share their object.
_STACKS_KNOWN = 1 << 14


class _Stack:
    """The code and the lines of a stack. ``texts`` has the names of its frames after the library has read
    them."""

    __slots__ = ("frames", "texts")

    def __init__(self, frames):
        self.frames, self.texts = frames, []


class _Stacks:
    """Python stacks, each identified by a number that the library keeps.

    A signal handler or a finalizer may call any function here while another call on the same thread runs.
    A lock would then deadlock, so there is none. Instead, each step is one atomic operation of a
    dictionary or a list.
    """

    def __init__(self):
        self._held = {}
        # Equal stacks share one object as long as it is in this dictionary.
        self._known = {}
        self._numbers = itertools.count(1)
        kinds = dict(StackSource._fields_)
        functions = (("gather", self._gather), ("release", self._release), ("frames", self._frames))
        self.source = StackSource(*(kinds[name](function) for name, function in functions), None)

    def _gather(self, _):
        frame, frames = sys._getframe(1), []
        while frame is not None:
            if not frame.f_code.co_filename.startswith(_HERE):
                frames.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        if len(self._known) >= _STACKS_KNOWN:
            self._known.clear()
        frames, number = tuple(frames), next(self._numbers)
        self._held[number] = self._known.get(frames) or self._known.setdefault(frames, _Stack(frames))
        return number

    def _release(self, _, number):
        del self._held[number]
        if not self._held:
            self._known.clear()

    def _frames(self, _, number, places, room):
        stack = self._held[number]
        if not stack.texts:
            names = [(code.co_name, code.co_filename) for code, _ in stack.frames]
            encode = lambda text: text.encode(errors="replace")  # noqa: E731
            stack.texts.append([(encode(function), encode(file)) for function, file in names])
        # The library reads the texts of the first list, which is not freed before the stack is
        # released.
        count = min(room, len(stack.frames))
        for at in range(count):
            places[at] = StackFrame(*stack.texts[0][at], stack.frames[at][1] or 0)
        return count


_stacks = None
_provided = {}


def provide(library, handle):
    """Makes Python the source of an allocator's stacks. The source is called only if stacks are gathered."""
    global _stacks
    if _stacks is None:
        _stacks = _Stacks()
        at_exit(_stacks.source.release, _drop_all)
    library.call("history_set_stack_source", handle, ctypes.byref(_stacks.source))
    _provided[handle] = library


def record(library, handle, enabled, context, stacks, max_entries, clear_history, skip_actions):
    """Starts, changes or stops the recording of one allocator."""
    if enabled not in (None, "state", "all"):
        raise ValueError(f"expected state to be 'state', 'all', or None, got {enabled!r}")
    if context not in _LEVELS:
        raise ValueError(f"expected context to be 'state', 'alloc', 'all', or None, got {context!r}")
    if stacks not in ("python", "all"):
        raise ValueError(f"expected stacks to be 'python', or 'all', got {stacks!r}")
    if enabled is None:
        library.call("history_stop", handle)
        return
    provide(library, handle)
    most = 1 if enabled == "state" else min(max(int(max_entries), 1), _MOST)
    skip = encoded(",".join(skip_actions or ()), "skip_actions")
    library.call(
        "history_start", handle, _LEVELS[context], most, skip, 1 if clear_history else 0
    )


def forget(handle):
    """Removes an allocator that is about to be destroyed."""
    _provided.pop(handle, None)


def _drop_all():
    """Removes the source of stacks from all allocators, because no Python function can run after the
    interpreter exits."""
    for handle, library in list(_provided.items()):
        # An error cannot be reported while the interpreter exits.
        with contextlib.suppress(Exception):
            library.call("history_drop_stack_source", handle)
    _provided.clear()


def annotate(library, handle, name, stage):
    words = (c_char_p * 4)(b"name", name, b"stage", stage)
    library.call("annotate", handle, words, 2)


def snapshot(library, handle):
    """Returns segments, blocks and history, with the keys of ``torch.cuda.memory._snapshot()``."""
    pieces = []

    def write(_, start, size):
        pieces.append(ctypes.string_at(start, size))
        return 0

    with visit():
        library.call("snapshot_write", handle, 0, SnapshotWriter(write), None)
    return pickle.loads(b"".join(pieces))


def dump(library, handle, filename):
    """Writes a snapshot to a file."""
    library.call("snapshot_save", handle, encoded(os.fspath(filename), "filename"))


def write(snapshot, filename):
    """Writes a snapshot that PyTorch took. If the call fails, the file keeps its old content."""
    filename = os.fspath(filename)
    with _files.replacing(filename) as file:
        _put(snapshot, filename, file)


def write_first_free(snapshot, filenames):
    """Writes a snapshot to the first of these paths where no file is, and returns it. All are in one folder."""
    filenames = iter(filenames)
    first = next(filenames)
    with _files.temporary(os.path.dirname(first)) as file:
        _put(snapshot, first, file)
        file.flush()
        return _files.move_to_first_free(file.name, itertools.chain([first], filenames))


def _put(snapshot, filename, file):
    with gzip.open(file, "wb") if filename.endswith(".gz") else contextlib.nullcontext(file) as file:
        if filename.removesuffix(".gz").endswith(".json"):
            text = io.TextIOWrapper(file, encoding="utf-8")
            json.dump(snapshot, text)
            # Flushes, and leaves the file open.
            text.detach()
        else:
            pickle.dump(snapshot, file)
