"""Sleep mode of vLLM over the library, written for vLLM 0.33.0.

vLLM allocates weights and caches through one allocator object, and sleeps through a backend that it selects
by name. With ``VLLM_PLUGINS=stratalloc`` in the environment, ``register``, which vLLM calls in each of its
processes, provides both; ``sleep_mode_backend="stratalloc"`` selects the backend. Without the variable,
only the name is registered.
"""

import contextlib
import gc
import os
import sys

from . import _sleep, _torch
from ._errors import LibraryError

try:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
except ImportError:
    # An older vLLM. `register` reports it.
    SleepModeBackend = object

NAME = "stratalloc"
# Tags whose contents each sleep saves, at level 1 and at both levels.
_SAVED_AT_1 = ("weights",)
_SAVED = ("runtime", "cudagraph")
# Tags that a resume of other tags leaves asleep.
_DEFERRABLE = ("weights", "kv_cache")


def register():
    """Registers the backend with vLLM. vLLM calls it, as the plugin ``stratalloc``."""
    named = NAME in os.environ.get("VLLM_PLUGINS", "").split(",")
    if SleepModeBackend is object:
        if named:
            raise LibraryError("this vLLM has no sleep-mode backends: 0.33.0 has")
        return
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    # Fails if another plugin has the name, and if this one is loaded again.
    with contextlib.suppress(ValueError):
        SleepModeBackendFactory.register_backend(NAME, __name__, "SleepBackend")
    if named:
        use()


def use():
    """Installs the library under PyTorch, unless that is done, and makes vLLM allocate in tags."""
    from vllm.device_allocator.cumem import CuMemAllocator

    _torch.install()
    if not isinstance(CuMemAllocator.instance, Tags):
        if CuMemAllocator.instance is not None:
            raise LibraryError("vLLM has allocated already; use() has to come before")
        CuMemAllocator.instance = Tags()


class Tags:
    """The allocator object of vLLM: each of its tags is a tag of the library, on the current device."""

    def __init__(self):
        self._made = {}

    def _tag(self, name):
        # vLLM states at each sleep what is saved. Pinned memory is only used for contents that are.
        return self._made.setdefault(name, _sleep.tag(name, backup="host", keep=True))

    def use_memory_pool(self, tag=None):
        """Returns a context manager, in which the tensors of this thread are allocated in a tag."""
        return self._tag(tag or "default")

    @contextlib.contextmanager
    def cudagraph_pool(self):
        """Returns the id of the pool that graphs are captured in."""
        yield self._tag("cudagraph").pool

    def sleep(self, offload_tags=None):
        """Pauses all tags. Saves the contents of ``offload_tags`` and drops all others."""
        saved = ("default",) if offload_tags is None else _tuple(offload_tags)
        for name, tag in self._made.items():
            tag.pause("host" if name in saved else None)
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()

    def discard(self, tags):
        """Pauses the tags ``tags`` and drops their contents. Tags that are asleep keep their backup."""
        for name in _tuple(tags):
            if name in self._made:
                self._made[name].pause(None)

    def wake_up(self, tags=None):
        """Resumes ``tags``, and all others but ``weights`` and ``kv_cache``. Resumes all without
        ``tags``."""
        for name, tag in self._made.items():
            if tags is None or name in tags or name not in _DEFERRABLE:
                tag.resume()

    def get_current_usage(self):
        """Returns the bytes of memory of all tags, including that of tags that are asleep."""
        infos = [tag.info() for tag in self._made.values()]
        return sum(info["mapped_bytes"] + info["asleep_bytes"] for info in infos)

    def is_awake(self):
        """Returns true if no tag is asleep."""
        return all(tag.state == "awake" for tag in self._made.values())

    def release_pools(self):
        """Removes all tags. Their tensors stay valid."""
        while self._made:
            self._made.popitem()[1].close()

    close = release_pools


def _tuple(tags):
    return (tags,) if isinstance(tags, str) else tuple(tags)


class SleepBackend(SleepModeBackend):
    """vLLM's sleep-mode backend ``stratalloc``."""

    def __init__(self):
        super().__init__()
        from vllm.device_allocator import get_mem_allocator_instance

        self._tags = get_mem_allocator_instance()
        if not isinstance(self._tags, Tags):
            raise LibraryError("vLLM allocates elsewhere: set VLLM_PLUGINS=stratalloc before it starts")

    def suspend(self, level=1):
        """Pauses all tags. Saves the weights at level 1, and runtime data and graphs at both levels."""
        self._state = "SUSPENDED"
        self._tags.sleep(_SAVED if level == 2 else _SAVED_AT_1 + _SAVED)

    def resume(self, tags=None):
        """Resumes tags as :meth:`Tags.wake_up` does. The state is ``RUNNING`` when no tag is asleep."""
        self._state = "RESUMING"
        try:
            self._tags.wake_up(tags)
        finally:
            self._state = "RUNNING" if self._tags.is_awake() else "SUSPENDED"

    def discard(self, tags):
        """Pauses tags and drops their contents."""
        self._state = "SUSPENDED"
        self._tags.discard(tags)

    @classmethod
    def is_supported(cls):
        """Returns true. A device without virtual memory is reported when a tag is created."""
        return True

    @classmethod
    def preserves_communicators(cls):
        """Returns true: communicators allocate outside of the tags."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls):
        """Returns true: the process lives on, and all addresses stay the same."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls):
        """Returns false: a communicator may have registered memory that a pause releases."""
        return False

    @classmethod
    def supports_durable_storage(cls):
        """Returns false: backups are in the memory of the process."""
        return False
