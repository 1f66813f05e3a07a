"""Watches PyTorch's own allocator: records its history, and adds a report to each out-of-memory error."""

import collections
import contextlib
import importlib
import itertools
import json
import os
import re
import signal as signals
import sys
import threading
import time

from . import _account, _history, _platform, _torch, _watch_report
from ._errors import LibraryError
from ._watch_options import options as all_options

# Bytes of host memory for an entry of PyTorch's history, with its share of a Python stack of up to 60 frames.
# The entries of a block share one stack.
_BYTES_PER_ENTRY = 640

_active = None
# The maximum number of entries of the recording that was started here, or ``None``.
_recorded = None
# Paths of the snapshots that this process has written and not removed.
_files = collections.deque()
_numbers = itertools.count(1)
# Held while a report is written.
_busy = threading.Lock()
# The path of the newest snapshot of a failure, and when its report was complete.
_last = None


def watch(folder=None, files=None, ring=None, seconds=None, pause=None, every=None, signal=None):
    """Records the history of PyTorch's allocator from the first use of CUDA or ROCm on. When memory runs out, adds
    a report to the ``torch.cuda.OutOfMemoryError``: the code that holds most memory, why it is reserved,
    the setting with which the program would fit, and the paths of a snapshot and of a page about it. Works
    with PyTorch 2.1 and later, over its own allocator, for CUDA or ROCm, or over this library.

    An option that is ``None`` is read from the environment variable ``STRATALLOC_WATCH_`` and its name. An
    invalid variable is reported once on the standard error stream, and the default is used.

    ``folder``: for the snapshots and pages (``stratalloc-watch``); created when the first is written.
    ``files``: the number of snapshots kept, each with its page (3). The oldest that this process wrote is
    removed first.
    ``ring``: host memory for the history of each device, such as ``"64MiB"`` (the default).
    ``seconds``: the time limit of the analysis (20). The program waits for it.
    ``pause``: an error less than this many seconds after the last report gets no new report (60).
    ``every``: a snapshot is written after this many steps of optimizers, or calls of ``step`` (0: none).
    ``signal``: writes a report when this signal arrives, such as ``"USR1"``.

    Raises ``ValueError`` for an invalid argument and ``LibraryError`` without PyTorch. After that, no
    failure of the watcher reaches the program. A second call replaces the options.
    """
    global _active
    given = {"folder": folder, "files": files, "ring": ring, "seconds": seconds, "pause": pause}
    options = all_options({**given, "every": every, "signal": signal}, _print)
    try:
        import torch
    except ImportError as error:
        raise LibraryError(f"PyTorch cannot be imported: {error}") from error
    if _active is not None:
        _active._detach()
    _active = watcher = Watcher(torch, options)
    watcher._attach()
    return watcher


class Watcher:
    """The result of ``watch``. As a context manager, it stops at the end of the block."""

    def __init__(self, torch, options):
        self._torch, self._options = torch, options
        self._failures, self._steps, self._hook, self._former_handler = {}, 0, None, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Stops watching, and stops the recording if ``watch`` started it."""
        global _active, _recorded
        if _active is not self:
            return
        _active = None
        self._detach()
        with _reported("memory is still recorded"):
            if _recorded is not None:
                _recorded = None
                self._torch.cuda.memory._record_memory_history(None)

    def step(self):
        """Counts a step of the program, for ``every``. Steps of optimizers are no longer counted then."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._step()

    def snapshot(self, reason="snapshot"):
        """Writes a snapshot and returns its path, or ``None`` if that fails."""
        with _reported("no snapshot is written"):
            return self._snapshot(reason, None)

    def report(self, reason="report"):
        """Writes a snapshot and a page, and returns the report as text, or ``None`` if that fails. Waits for
        the analysis, at most the number of ``seconds``."""
        with _reported("no report is written"):
            if _busy.acquire(blocking=False):
                try:
                    return self._report(reason, None)[0]
                finally:
                    _busy.release()

    def _attach(self):
        with _reported("errors get no reports"):
            _extend(self._torch.cuda.OutOfMemoryError)
        with _reported("memory is not recorded"):
            # Recording initializes CUDA, which a process must not do before a fork. So it waits for the first
            # use.
            self._torch.cuda._lazy_call(self._record)
        # The account is made of calls of CUDA's driver.
        if _platform.hip_of(self._torch) is None:
            with _reported("the account cannot be read by other programs"):
                _account.serve()
        with _reported("steps are not counted"):
            if self._options["every"]:
                optimizer = importlib.import_module("torch.optim.optimizer")
                self._hook = optimizer.register_optimizer_step_post_hook(lambda *_: self._step())
        with _reported("the signal is not handled"):
            if self._options["signal"] is not None:
                self._former_handler = signals.signal(self._options["signal"], self._signalled)

    def _detach(self):
        with _reported("the signal is still handled"):
            if self._hook is not None:
                self._hook.remove()
            if self._former_handler is not None:
                signals.signal(self._options["signal"], self._former_handler)

    def _record(self):
        global _recorded
        if _active is not self:
            return
        with _reported("memory is not recorded"):
            self._failures = self._count_failures()
            is_recorded = self._torch._C._cuda_isHistoryEnabled()
            entries = max(self._options["ring"] // _BYTES_PER_ENTRY, 1)
            # A recording that the program started stays as it is.
            if is_recorded and _recorded in (None, entries):
                return
            # The stacks of frees are not needed. Stacks of C++ cost more, and seconds when they are read.
            memory = self._torch.cuda.memory
            memory._record_memory_history(context="alloc", stacks="python", max_entries=entries)
            _recorded = entries

    def _signalled(self, number, frame):
        if _active is self:
            _print(self.report("signal"))
        if callable(self._former_handler):
            self._former_handler(number, frame)

    def _step(self):
        self._steps += 1
        if self._options["every"] and self._steps % self._options["every"] == 0:
            self.snapshot(f"step{self._steps}")

    def _count_failures(self):
        """Returns how many requests have failed on each device. Opens no device."""
        memory = self._torch.cuda.memory
        numbers = range(self._torch.cuda.device_count())
        return {device: memory.memory_stats_as_nested_dict(device).get("num_ooms", 0) for device in numbers}

    def _failed(self):
        """Returns the text to add to an exception that is being created."""
        global _last
        failures = self._count_failures()
        device = next((at for at in failures if failures[at] != self._failures.get(at, 0)), None)
        if device is None:
            # A copy of an earlier exception, such as one from another process.
            return None
        self._failures = failures
        if not _busy.acquire(blocking=False):
            return "stratalloc: a report about another failure is being written"
        try:
            if _last is not None:
                path, ended = _last
                since = time.monotonic() - ended
                if since < self._options["pause"]:
                    return f"stratalloc: the last report was written {since:.0f} s ago: {path}"
            text, path = self._report("oom", device)
            _last = path and (path, time.monotonic())
            return text
        finally:
            _busy.release()

    def _snapshot(self, reason, failed):
        """Writes a snapshot. Of the requests that failed, only the last of each device in ``failed`` is kept,
        because a report is about the first one in a recording. ``None`` keeps all."""
        if not self._torch.cuda.is_initialized():
            raise LibraryError(f"{_platform.name_of(self._torch)} is not in use yet")
        snapshot = _torch._snapshot(None)
        if _platform.hip_of(self._torch) is None:
            with _reported("the snapshot has no account"):
                snapshot["account"] = json.dumps(_account.owners(self._torch, snapshot.get("segments")))
        if failed is not None:
            traces = snapshot["device_traces"]
            traces[:] = [_without_failures(trace, at in failed) for at, trace in enumerate(traces)]
        stamp = time.strftime("%Y%m%d-%H%M%S")
        parts = [reason, *_rank(self._torch), stamp, str(os.getpid())]
        folder = self._options["folder"]
        os.makedirs(folder, exist_ok=True)
        path = _history.write_first_free(
            snapshot, (os.path.join(folder, "-".join([*parts, str(number)]) + ".pickle") for number in _numbers)
        )
        _files.append(path)
        while len(_files) > self._options["files"]:
            oldest = _files.popleft()
            for file in (oldest, _watch_report.page_of(oldest)):
                with contextlib.suppress(OSError):
                    os.unlink(file)
        return path

    def _report(self, reason, device):
        """Returns a report as text, and the path of its snapshot."""
        try:
            path = self._snapshot(reason, {device})
        except Exception as error:
            return f"stratalloc: no report, because the snapshot cannot be written: {_one_line(error)}", None
        lines = []
        try:
            version = _platform.build_of(self._torch)
            lines.extend(_watch_report.analyse(path, device, version, self._options["seconds"]))
        except Exception as error:
            lines.append(f"not analysed: {_one_line(error)}")
        lines.append(f"snapshot: {path}")
        page = _watch_report.page_of(path)
        written = os.path.isfile(page)
        lines.append(f"page: {page}" if written else f"page: python -m stratalloc report {path} writes it")
        return "stratalloc: " + "\n  ".join(map(_one_line, lines)), path


def _extend(kind):
    """Lets exceptions of a class get a report when they are created, so that every handler finds it."""
    before = kind.__init__
    if getattr(before, "__module__", None) == __name__:
        return

    def __init__(self, *arguments):
        before(self, *arguments)
        watcher = _active
        if watcher is not None:
            with _reported("no report is added"):
                text = watcher._failed()
                if text and hasattr(self, "add_note"):
                    self.add_note(text)
                elif text:
                    self.args = ("\n".join([*map(str, self.args[:1]), text]), *self.args[1:])

    kind.__init__ = __init__


def _without_failures(entries, keeps_last):
    """Returns the entries of a device without requests that failed, or with the last of them."""
    failures = [at for at, entry in enumerate(entries) if entry.get("action") == "oom"]
    removed = set(failures[:-1] if keeps_last else failures)
    return [entry for at, entry in enumerate(entries) if at not in removed]


def _rank(torch):
    """Returns the part of a file name that names the rank of this process, if it has one."""
    with contextlib.suppress(Exception):
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return [f"rank{torch.distributed.get_rank()}"]
    rank = os.environ.get("RANK", "")
    return [f"rank{rank}"] if re.fullmatch("[0-9]{1,9}", rank) else []


@contextlib.contextmanager
def _reported(what):
    """Prints an error instead of raising it."""
    try:
        yield
    except Exception as error:
        _print(f"stratalloc: watch: {what}: {_one_line(error)}")


def _print(text):
    if text:
        # The stream may be closed.
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr, flush=True)


def _one_line(text):
    text = str(text) or type(text).__name__
    return "".join(letter if letter.isprintable() else " " for letter in text)
