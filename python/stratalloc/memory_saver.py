"""The library behind ``torch_memory_saver``, tried with its version 0.0.10.

After ``stratalloc.install()`` and ``enable()``, the calls of ``torch_memory_saver.torch_memory_saver`` use
tags of this library. No ``LD_PRELOAD`` is needed, both hook modes are the same, and expandable segments are
allowed. ``pause`` and ``resume`` act on all devices. Two things differ:

- ``get_cpu_backup`` returns a copy, also of a backup on disk. With ``zero_copy`` it returns the same memory at
  each call. With ``retain_cpu_backup``, a resume first copies the whole backup, unless it is on disk.
- The files of a backup on disk are removed by the resume.
"""

import contextlib
import itertools
import os
import sys
import threading
import weakref

from . import _sleep, _torch
from ._errors import Error, LibraryError
from ._library import load

# The status of an address that is in no backup.
_UNKNOWN_ADDRESS = 5
# The kind of memory of a backup on disk.
_DISK = "disk"
# The kind of memory of a backup that stays after a resume.
_PINNED = "pinned"


def enable():
    """Makes ``torch_memory_saver`` use the library. Call it after ``stratalloc.install()``, and before the
    first use of ``torch_memory_saver``. A second call changes nothing.

    With ``TMS_INIT_ENABLE=1`` in the environment, everything that PyTorch then allocates on the current
    device is in the tag ``default``, on this thread, and for other threads on the default stream."""
    if _torch._installed is None:
        raise LibraryError("the library is not installed under PyTorch; call install() first")
    from torch_memory_saver import torch_memory_saver as saver

    if isinstance(saver._impl, MemorySaver):
        return
    if saver._impl is not None:
        raise LibraryError("torch_memory_saver is in use already; enable() has to come before its first use")
    saver._impl = MemorySaver()


class _Settings:
    """The functions of torch_memory_saver's own library that report and change settings."""

    def __init__(self):
        self.cdll = self
        self._retains = _is_set("TMS_RETAIN_CPU_BACKUP")
        self.disk_directory = os.environ.get("TMS_DISK_BACKUP_DIR", "/tmp")
        backend = os.environ.get("TMS_INIT_CPU_BACKUP_BACKEND", "pinned")
        backup = _is_set("TMS_INIT_ENABLE_CPU_BACKUP")
        self._initial = (_is_set("TMS_INIT_ENABLE"), "default", backup, backend)
        # Each thread has its own region.
        self._local = threading.local()

    @property
    def region(self):
        """Whether the thread is in a region, and that region's tag, backup and kind of memory."""
        return getattr(self._local, "region", self._initial)

    @contextlib.contextmanager
    def inside(self, *region):
        before, self._local.region = self.region, region
        try:
            yield
        finally:
            self._local.region = before

    def tms_get_interesting_region(self):
        return self.region[0]

    def tms_get_current_tag(self):
        return self.region[1].encode()

    def tms_get_enable_cpu_backup(self):
        return self.region[2]

    def tms_get_cpu_backup_backend(self):
        return self.region[3].encode()

    def tms_get_retain_cpu_backup(self):
        return self._retains

    def tms_set_retain_cpu_backup(self, value):
        self._retains = value

    def tms_set_disk_backup_dir(self, path):
        self.disk_directory = os.fsdecode(path)

    def set_memory_margin_bytes(self, value):
        """Does nothing. A resume that finds too little memory fails and changes nothing."""


class MemorySaver:
    """The implementation object that ``torch_memory_saver`` calls."""

    _is_xpu = False

    def __init__(self):
        self._settings = self._binary_wrapper = _Settings()
        # Tags of the library, each with torch_memory_saver's tag and the kind of backup. Several of one tag
        # differ in the backup, the device or the graph.
        self._tags = {}
        self._graphs = itertools.count()
        self._lock = threading.Lock()
        # Contents that were read with `zero_copy` or are retained after a resume, by device and address.
        self._kept = {}
        interesting, *region = self._settings.region
        if interesting:
            tag = self._tag(*region)
            self._everything = contextlib.ExitStack()
            self._everything.enter_context(tag._allocator.pool_scope(tag.pool, stream=0))
            self._everything.enter_context(tag)

    @contextlib.contextmanager
    def region(self, tag, enable_cpu_backup, enable_disk_backup=False, cpu_backup_backend=None):
        backend = cpu_backup_backend or self._settings.region[3]
        if enable_disk_backup:
            own = self._tag(tag, True, _DISK)
        else:
            own = self._tag(tag, enable_cpu_backup, backend)
        with own, self._settings.inside(True, tag, enable_cpu_backup, backend):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph,
        pool,
        stream,
        capture_error_mode,
        tag,
        enable_cpu_backup,
        cpu_backup_backend=None,
    ):
        backend = cpu_backup_backend or self._settings.region[3]
        # Graphs share memory only if the caller gives them one pool.
        graph = f" of graphs in {pool}" if pool is not None else f" of graph {next(self._graphs)}"
        own = self._tag(tag, enable_cpu_backup, backend, graph)
        if pool is None:
            weakref.finalize(cuda_graph, own.close)
        capture = sys.modules["torch"].cuda.graph(
            cuda_graph, pool=own.pool, stream=stream, capture_error_mode=capture_error_mode
        )
        with capture, self._settings.inside(True, tag, enable_cpu_backup, backend):
            yield

    @contextlib.contextmanager
    def disable(self):
        torch = sys.modules["torch"]
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool), self._settings.inside(False, *self._settings.region[1:]):
            yield

    def pause(self, tag):
        for each, backend in self._of(tag):
            if backend == _DISK:
                directory = self._settings.disk_directory
                os.makedirs(directory, exist_ok=True)
                each.directory = directory
            each.pause()

    def resume(self, tag):
        for each, backend in self._of(tag):
            if each.state == "asleep":
                if backend != _DISK:
                    self._keep(each)
                each.resume()

    def get_cpu_backup(self, x, zero_copy=False):
        if not x.is_contiguous():
            raise ValueError("a backup can only be read for a contiguous tensor")
        device, address, size = x.device.index, x.data_ptr(), x.nbytes
        torch, kept = sys.modules["torch"], self._kept.get((device, address))
        if kept is not None and kept.nbytes < size:
            kept = None
        saved = torch.empty(size, dtype=torch.uint8) if kept is None else kept
        if not _read(device, address, saved, size):
            if kept is None:
                return None
        elif zero_copy:
            self._kept[device, address] = saved
        saved = saved[:size].view(x.dtype).view(x.shape)
        return saved if zero_copy else saved.clone()

    def _tag(self, tag, backup, backend, graph=""):
        """Returns a tag, and creates it if there is none."""
        backend = backend if backup else "dropped"
        # Its own library maps free memory again as well.
        options = {"backup": "host" if backup else None, "keep": backend == _PINNED, "keep_free": True}
        made = _sleep.tag(f"{tag}{graph}, {backend}", **options)
        with self._lock:
            self._tags[made] = (tag, backend)
        return made

    def _of(self, tag):
        """Returns the tags of the library for one of torch_memory_saver's, or all, each with its kind of
        backup."""
        with self._lock:
            # Those of graphs that are gone are closed.
            self._tags = {each: of for each, of in self._tags.items() if each.is_open}
            return [(each, backend) for each, (of, backend) in self._tags.items() if not tag or tag == of]

    def _keep(self, tag):
        """Reads the backup of a tag, if backups are retained. Otherwise drops what was read of it before."""
        if not self._settings.tms_get_retain_cpu_backup() and not self._kept:
            return
        for segment in tag._allocator.layout():
            if tuple(segment["segment_pool_id"]) != tag.pool:
                continue
            range_of = range(segment["address"], segment["address"] + segment["total_size"])
            inside = [key for key in self._kept if key[0] == tag.device and key[1] in range_of]
            old = {key: self._kept.pop(key) for key in inside}
            if not self._settings.tms_get_retain_cpu_backup():
                continue
            for block in segment["blocks"]:
                key, size = (tag.device, block["address"]), block["requested_size"]
                saved = old.get(key)
                if saved is None or saved.nbytes < size:
                    torch = sys.modules["torch"]
                    saved = torch.empty(size, dtype=torch.uint8)
                if block["state"] == "active_allocated" and _read(*key, saved, size):
                    self._kept[key] = saved


def _read(device, address, into, size):
    """Reads bytes from a backup. Returns false if they are in none."""
    try:
        load().call("tag_read_backup", _torch._handle(device), address, into.data_ptr(), size)
    except Error as error:
        if error.status != _UNKNOWN_ADDRESS:
            raise
        return False
    return True


def _is_set(variable):
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")
