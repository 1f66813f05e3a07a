"""Tags under PyTorch: tensors that are paused and resumed at the same addresses."""

import os
import sys
import threading

from . import _tags, _torch
from ._calls import Pool
from ._errors import LibraryError
from ._library import encoded

# The tags by device and name, in the order of their creation.
_made = {}
_lock = threading.RLock()


class TorchTag(_tags.Tag):
    """A :class:`Tag` of PyTorch's allocator on one device. Made by :func:`tag`."""

    def __init__(self, device, name, options):
        if not isinstance(_torch._installed, _torch.CUDAAllocator):
            raise LibraryError("tags need the compiled class, and install() used a CUDAPluggableAllocator")
        torch = sys.modules["torch"]
        # A pool of PyTorch's, because PyTorch assigns the ids of its pools itself.
        with torch.cuda.device(device):
            self._mem_pool = torch.cuda.MemPool()
        super().__init__(_torch.allocator(device), Pool(*self._mem_pool.id), name)
        self.device = device
        self._allocator._call("tag_of_pool", self._pool, encoded(name, "name"), options)

    def pause(self, backup=..., synchronized=False):
        """Releases the memory of the tag and keeps its addresses. Waits for all work of the device, unless
        ``synchronized``. ``backup`` is ``"host"`` or ``None``; without it, the tag's own. Does nothing if
        the tag is asleep. Returns a dictionary of numbers."""
        _check_no_capture()
        if not synchronized:
            # Kernels on any stream, and graphs of other pools, may use the tensors.
            sys.modules["torch"].cuda.synchronize(self.device)
        return super().pause(backup, synchronized=True)

    def resume(self):
        """Maps memory at the addresses of the tag and restores its contents. Does nothing if the tag is
        awake. Returns a dictionary of numbers."""
        _check_no_capture()
        return super().resume()

    @property
    def is_open(self):
        """Whether :meth:`close` has not been called."""
        return self._mem_pool is not None

    def close(self):
        """Removes the tag. Its name can then be used again. Its tensors stay valid, but a tag that sleeps
        cannot be resumed any more."""
        with _lock:
            if _made.get((self.device, self.name)) is self:
                del _made[self.device, self.name]
        self._mem_pool = None


def tag(name, backup=..., keep=..., requests=..., directory=..., keep_free=..., device=None):
    """Returns the tag ``name`` of PyTorch's allocator on ``device``, and creates it if there is none.

    As a context manager, the tag gets all tensors that the thread allocates on the device. Contexts
    nest, on any number of threads. With ``backup="host"``, the default, a pause saves the contents of
    tensors in host memory, with ``None`` it drops them. ``keep=True`` keeps the pinned memory of the
    backup for the next pause. While the tag is not awake, requests in it fail, or wait with
    ``requests="wait"``. With a ``directory`` contents are saved in files there, in place of host memory.
    ``keep_free=True`` maps also the free memory of the tag's cache again at a resume. Options that are given must
    agree with those of an existing tag. Opens the device if it is unused.
    """
    device = _torch._ordinal(device)
    given = {"backup": backup, "keep": keep, "requests": requests, "keep_free": keep_free}
    given = {option: value for option, value in given.items() if value is not ...}
    options = _tags.options_of(**given)
    if directory is not ...:
        given["directory"] = None if directory is None else os.fspath(directory)
    with _lock:
        found = _made.get((device, name))
        if found is None:
            found = TorchTag(device, name, options)
            if given.get("directory") is not None:
                found.directory = directory
            _made[device, name] = found
        else:
            own = found.info()["options"]
            for option, value in given.items():
                if own[option] != value:
                    raise LibraryError(f"tag {name!r} exists with {option}={own[option]!r}, not {value!r}")
    return found


def tags(device=None):
    """Returns the tags of ``device`` by name. Each is a dictionary with the ``state``, and the bytes of
    live tensors, of mapped memory and of the backup. Does not wait for the device."""
    return {tag.name: tag.info() for tag in _of((), device)}


def pause(*names, backup=..., device=None):
    """Releases the memory of the tags ``names`` of ``device``, or of all its tags. Their addresses stay
    reserved. Waits for all work of the device. ``backup`` is ``"host"`` or ``None``; without it, each
    tag's own. Tags that are asleep stay so.

    If a tag cannot be paused, those before it in the order of the names stay paused. Returns the numbers of
    each tag by name.
    """
    return {tag.name: tag.pause(backup) for tag in _of(names, device)}


def resume(*names, device=None):
    """Maps memory at the addresses of the tags ``names`` of ``device``, or of all its tags, and restores
    their contents. Tags that are awake stay so.

    If memory is short, the tag stays asleep with its backup, and the error names what is missing. The
    tags before it in the order of the names stay resumed. Returns the numbers of each tag by name.
    """
    return {tag.name: tag.resume() for tag in _of(names, device)}


def _check_no_capture():
    # The waits of a pause or a resume would end the capture.
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        raise LibraryError("a tag can be neither paused nor resumed while a graph is captured")


def _of(names, device):
    """Returns the tags of a device with these names, or all of them if there are no names."""
    device = _torch._ordinal(device)
    with _lock:
        # A copy, because the collection of a graph removes its tag.
        known = {name: tag for (own, name), tag in _made.copy().items() if own == device}
    for name in names:
        if name not in known:
            exist = ", ".join(map(repr, known)) or "none"
            raise LibraryError(f"no tag is named {name!r} on device {device}; its tags: {exist}")
    return [known[name] for name in names or known]
