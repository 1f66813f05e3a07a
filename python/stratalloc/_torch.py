"""The library under PyTorch."""

import ctypes
import json
import os
import sys

from ._errors import LibraryError
from ._library import encoded, load, number

# The variable that the library reads first.
_CONF = "ALLOC_CONF"

# PyTorch's setters and what each is given.
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

# Without these a program's data or its graphs would be lost, so an older PyTorch is refused.
_NEEDED = {
    "set_record_stream_fn",
    "set_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn",
    "set_release_pool",
}

_installed = None


def install(library=None, conf=None):
    """Puts the library under PyTorch; must come before CUDA is used.

    ``library`` is a path (see the package's README for where it is looked for otherwise), ``conf`` a
    configuration string; without it the environment decides. Returns PyTorch's allocator object. A
    second call with nothing new is allowed.
    """
    global _installed
    loaded = load(library)
    if _installed is not None:
        if conf is not None:
            raise LibraryError("the library is installed already; set_conf changes its configuration")
        return _installed
    text = None if conf is None else encoded(conf, "conf")
    if text is not None:
        # Said now, and not in the middle of the program. What only the device refuses shows there.
        loaded.call("check_conf", text)
    try:
        import torch
    except ImportError as error:
        raise LibraryError(f"PyTorch cannot be imported: {error}") from error
    if torch.cuda.is_initialized():
        raise LibraryError("CUDA is in use already; install() has to come before its first use")
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
    before = os.environ.get(_CONF)
    if text is not None:
        # The library reads the environment when a device is used first.
        os.environ[_CONF] = conf
    try:
        torch.cuda.memory.change_current_allocator(allocator)
    except BaseException as error:
        if text is not None:
            _put_back(before)
        if isinstance(error, RuntimeError):
            raise LibraryError(f"PyTorch refuses another allocator: {error}") from error
        raise
    _installed = allocator
    return allocator


def _put_back(before):
    if before is None:
        del os.environ[_CONF]
    else:
        os.environ[_CONF] = before


def memory_stats(device=0):
    """Every counter of PyTorch's memory on ``device``, with the keys of
    ``torch.cuda.memory_stats()``."""
    return json.loads(load().text("statistics_json", _handle(device)))


def memory_summary(device=0):
    """The counters of ``device`` as a table."""
    return load().text("summary", _handle(device))


def empty_cache():
    """Gives everything that is idle on any device back. Does nothing before ``install``."""
    if _installed is not None:
        load().dll.stratalloc_torch_reset()


def set_conf(conf, device=0):
    """Puts a further configuration string in force on ``device``, on top of those before. One that
    changes the backend, the layers or another key that is read only when an allocator is built
    switches, as ``switch`` does."""
    load().call("set_conf", _handle(device), encoded(conf, "conf"))


def switch(conf, device=0):
    """Puts the allocator that a complete configuration string names under PyTorch on ``device``.
    Tensors from before stay valid; if it fails, everything is as it was."""
    load().call("switch", _handle(device), encoded(conf, "conf"))


def _handle(device):
    """The allocator that PyTorch has on a device."""
    if _installed is None:
        raise LibraryError("the library is not installed under PyTorch; call install() first")
    torch = sys.modules["torch"]
    if isinstance(device, torch.device):
        device = device.index or 0
    handle = ctypes.c_uint64()
    load().call("torch_handle", number(device, "device", 2**31 - 1), ctypes.byref(handle))
    return handle.value
