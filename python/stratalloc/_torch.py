"""The library as PyTorch's allocator."""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import re
import sys
import warnings

from . import _extension, _history, _platform
from ._allocator import Allocator
from ._calls import Text
from ._errors import LibraryError
from ._library import encoded, load, number

# The variable with a configuration string that the library reads first.
_CONF = "ALLOC_CONF"

# The variable that decides about pinned memory if `install` is called without `pinned`.
_PINNED = "STRATALLOC_PINNED"

# PyTorch's setters for callbacks, and the functions that are passed to them.
_CALLBACKS = {
    "set_init_fn": "stratalloc_torch_init",
    "set_reset_fn": "stratalloc_torch_reset",
    "set_memory_fraction_fn": "stratalloc_torch_memory_fraction",
    "set_base_alloc_fn": "stratalloc_torch_base_allocation",
    "set_record_stream_fn": "stratalloc_torch_record_stream",
    "set_begin_allocate_to_pool": "stratalloc_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "stratalloc_torch_end_allocate_to_pool",
    "set_release_pool": "stratalloc_torch_release_pool",
}

# Without these setters a program's data or graphs would be corrupted, so a PyTorch that lacks one is
# refused.
_NEEDED = {
    "set_record_stream_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
}

_installed = None
# True if another library's memory comes from the process's allocators.
is_shared = False


class CUDAAllocator:
    """The library, installed as PyTorch's own allocator. The memory functions of ``torch.cuda`` call it."""

    def __init__(self, extension, dll, pinned=None):
        self.extension = extension
        self.pinned = pinned
        self._dll = dll

    def __repr__(self):
        return f"<stratalloc under PyTorch, by {self.extension}>"


def install(library=None, conf=None, pinned=None):
    """Makes PyTorch use the library. Must be called before CUDA is used.

    ``library`` is a path. Without it, the places that the package's README lists are searched. ``conf``
    is a configuration string. Without it, the configuration is read from the environment. A second call
    without ``conf`` is allowed and changes nothing.

    With ``pinned=True`` the library also allocates PyTorch's pinned host memory, with ``backend:pinned``.
    A string adds keys of the configuration to that. Without ``pinned``, the environment variable
    ``STRATALLOC_PINNED`` decides: 1 is ``True``, 0 is ``False``, any other value is the string. If it is
    not set, PyTorch's own host allocator stays. Needs the shared object described below.

    After the call all memory functions of ``torch.cuda`` use the library. They reach it through a shared
    object, which the first call compiles for this version of PyTorch. If it cannot be compiled, a
    warning names the missing part, and the library is installed as a ``CUDAPluggableAllocator``. With
    that, programs run, but most memory functions of ``torch.cuda`` fail. Returns a
    :class:`CUDAAllocator`, or PyTorch's ``CUDAPluggableAllocator``.
    """
    global _installed
    loaded = load(library)
    if _installed is not None:
        if conf is not None:
            raise LibraryError("the library is installed already; set_conf changes its configuration")
        if pinned is not None and _pinned_conf(pinned) != getattr(_installed, "pinned", None):
            raise LibraryError("the library is installed already; pinned memory is decided by the first call")
        return _installed
    text = None if conf is None else encoded(conf, "conf")
    if text is not None:
        # Reports an invalid string now rather than in the middle of the program. Errors of the device
        # can only be reported later.
        loaded.call("check_conf", text)
    pinned = _pinned_conf(pinned)
    if pinned is not None:
        loaded.call("check_conf", encoded(pinned, "pinned"))
    try:
        import torch
    except ImportError as error:
        raise LibraryError(f"PyTorch cannot be imported: {error}") from error
    hip = _platform.hip_of(torch)
    if hip is not None:
        raise LibraryError(
            f"PyTorch is built for ROCm (HIP {hip}), and the library allocates memory of CUDA devices only; watch() "
            "works with PyTorch's own allocator"
        )
    if torch.cuda.is_initialized():
        raise LibraryError("CUDA is in use already; install() has to come before its first use")
    extension = _extension_for(torch)
    if extension is None and pinned is not None:
        raise LibraryError("pinned memory: the library allocates it only through the compiled object, and there is none")
    before = os.environ.get(_CONF)
    if text is not None:
        # The library reads the environment when a device is first used.
        os.environ[_CONF] = conf
    try:
        if extension is None:
            _installed = _as_pluggable(loaded, torch)
        else:
            _installed = _as_class(loaded, extension, torch.__version__, pinned)
    except BaseException:
        if text is not None:
            _put_back(before)
        raise
    if text is not None and is_shared:
        # Devices that another library uses already have been opened with another configuration.
        loaded.call("torch_set_conf", text)
    atexit.register(_drop_stacks, loaded)
    return _installed


def _drop_stacks(library):
    """Removes the sources of stacks, because no Python function can run after the interpreter exits."""
    with contextlib.suppress(Exception):
        library.call("torch_drop_stack_sources")


def _extension_for(torch):
    """Returns the path of the compiled object for this PyTorch, or ``None`` if there is none."""
    try:
        return _extension.find(torch)
    except _extension.Unavailable as missing:
        warnings.warn(
            f"torch.cuda's memory functions will not see this allocator, because the object for them "
            f"cannot be compiled; missing: {missing}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def _pinned_conf(pinned):
    """Returns the configuration string for pinned memory. ``None`` if PyTorch's own host allocator stays."""
    if pinned is None:
        value = os.environ.get(_PINNED, "")
        pinned = {"": False, "0": False, "1": True}.get(value, value)
    if isinstance(pinned, str):
        # Behind the keys, so that no other backend replaces it.
        return f"{pinned},backend:pinned"
    return "backend:pinned" if pinned else None


def _as_class(loaded, extension, version, pinned):
    try:
        dll = ctypes.CDLL(extension)
        function, built_for = dll.stratalloc_torch_install, dll.stratalloc_torch_built_for
        function_for_pinned = None if pinned is None else dll.stratalloc_torch_install_pinned
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{extension} is not for this PyTorch: {error}") from error
    built_for.argtypes, built_for.restype = [], ctypes.c_char_p
    numbers = re.match(r"[0-9.]*[0-9]", version)
    if numbers is None or numbers.group() != built_for().decode():
        # The class of another version may have other virtual functions. Calls would then reach the
        # wrong functions.
        raise LibraryError(f"{extension} is not for this PyTorch: it is for {built_for().decode()}, not {version}")
    message = ctypes.create_string_buffer(4096)
    for call, text in ((function, os.fsencode(loaded.path)), (function_for_pinned, (pinned or "").encode())):
        if call is None:
            continue
        call.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        if call(text, message, len(message)) != 0:
            raise LibraryError(f"PyTorch refuses another allocator: {message.value.decode(errors='replace')}")
    return CUDAAllocator(extension, dll, pinned)


def _as_pluggable(loaded, torch):
    try:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            loaded.path, "stratalloc_torch_malloc", "stratalloc_torch_free"
        )
    except AttributeError as error:
        raise LibraryError(f"PyTorch {torch.__version__} takes no allocator: {error}") from error
    inner = allocator.allocator()
    for setter, name in _CALLBACKS.items():
        function = getattr(inner, setter, None)
        if function is not None:
            function(loaded.address(name))
        elif setter in _NEEDED:
            raise LibraryError(f"PyTorch {torch.__version__} is too old: it has no {setter}")
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except RuntimeError as error:
        raise LibraryError(f"PyTorch refuses another allocator: {error}") from error
    return allocator


def _put_back(before):
    if before is None:
        del os.environ[_CONF]
    else:
        os.environ[_CONF] = before


def memory_stats(device=None):
    """Returns all counters of PyTorch's memory on ``device``, with the keys of
    ``torch.cuda.memory_stats()``. They are followed by those that only this strategy has. Opens no
    device. The counters of an unused device are zeros."""
    return json.loads(load().text(Text.TORCH_STATISTICS, _ordinal(device)))


def memory_summary(device=None):
    """Returns the counters of ``device`` as a table. Opens no device."""
    return load().text(Text.TORCH_SUMMARY, _ordinal(device))


def metrics():
    """Returns the counters of all allocators of this process, including PyTorch's, as text for
    Prometheus (in the OpenMetrics format)."""
    return load().text(Text.METRICS)


def empty_cache():
    """Releases all free memory of all devices. Does nothing before the library is used. If a device fails,
    the caches of the others are emptied all the same, and the call raises :class:`stratalloc.Error`."""
    if _installed is not None or is_shared:
        load().call("torch_empty_cache")


def set_conf(conf, device=None):
    """Applies a configuration string to ``device``, on top of the current settings. If the string changes
    a key that is read only when an allocator is built (such as the backend or the layers), the call
    switches as ``switch`` does. Opens the device if it is unused."""
    conf = encoded(conf, "conf")
    load().call("set_conf", _handle(device), conf)


def switch(conf, device=None):
    """Switches PyTorch's allocator on ``device`` to an allocator with this configuration. The string is
    complete: a key that it omits has its default value. Existing tensors stay valid. If the call fails,
    nothing has changed. Opens the device if it is unused."""
    conf = encoded(conf, "conf")
    load().call("switch", _handle(device), conf)


def record_memory_history(
    enabled="all",
    context="all",
    stacks="all",
    max_entries=sys.maxsize,
    device=None,
    clear_history=False,
    skip_actions=None,
):
    """Records the actions of PyTorch's allocator on ``device``, and the stacks of requests. Calls
    ``torch.cuda.memory._record_memory_history``, or does the same itself if the library is installed as a
    ``CUDAPluggableAllocator``. Opens the device if it is unused."""
    if isinstance(_installed, CUDAAllocator):
        words = {"max_entries": max_entries, "device": device, "clear_history": clear_history}
        if skip_actions is not None:
            words["skip_actions"] = list(skip_actions)
        _memory()._record_memory_history(enabled, context, stacks, **words)
        return
    handle = _handle(device)
    _history.record(
        load(), handle, enabled, context, stacks, max_entries, clear_history, skip_actions
    )


def snapshot(device=None):
    """Returns segments, blocks and history of ``device``, as ``torch.cuda.memory._snapshot()`` does.
    Opens the device if it is unused."""
    if isinstance(_installed, CUDAAllocator):
        return _snapshot(device)
    return _history.snapshot(load(), _handle(device))


def dump_snapshot(filename="dump_snapshot.pickle", device=None):
    """Writes a snapshot to a file for PyTorch's viewers and ``stratalloc report``. The file is JSON if its
    name ends in ``.json``, otherwise a pickle. It is compressed if its name ends in ``.gz``."""
    if isinstance(_installed, CUDAAllocator):
        _history.write(_snapshot(device), filename)
        return
    _history.dump(load(), _handle(device), filename)


def _snapshot(device):
    """Returns PyTorch's snapshot. Names the actions of tags, which are entries for mapped and unmapped memory
    with the name as metadata there, because PyTorch does not know them."""
    taken = _memory()._snapshot(device)
    for entry in itertools.chain.from_iterable(taken.get("device_traces", ())):
        if entry.get("user_metadata") in ("tag_pause", "tag_resume"):
            entry["action"] = entry["user_metadata"]
    return taken


def allocator(device=None):
    """Returns PyTorch's allocator on ``device``, with all methods of :class:`Allocator`, such as
    those for pools, checkpoints and trackers. The allocator stays when the returned object is dropped.
    Opens the device if it is unused."""
    return Allocator._of(load(), _handle(device))


def _memory():
    """Returns PyTorch's module of memory functions, which now call the library. Snapshots are taken
    through it, because only PyTorch can read the stacks that it has gathered."""
    return sys.modules["torch"].cuda.memory


def _ordinal(device):
    """Returns a device's ordinal from a ``torch.device``, an integer or ``None``. ``None`` means
    PyTorch's current device, or 0 before CUDA is used and without PyTorch, because reading the current
    device would initialize CUDA."""
    if _installed is None and not is_shared:
        raise LibraryError("the library is not installed under PyTorch; call install() first, or use another module")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(device, torch.device):
        if device.type != "cuda":
            raise ValueError(f"device: expected one of CUDA, got {device}")
        device = device.index
    if device is None:
        return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
    return number(device, "device", 2**31 - 1)


def _handle(device):
    """Returns the handle of PyTorch's allocator on a device. Creates the allocator if there is none yet."""
    handle = ctypes.c_uint64()
    load().call("torch_handle", _ordinal(device), ctypes.byref(handle))
    return handle.value
