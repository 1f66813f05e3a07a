"""The account of a device: the owners of its used memory."""

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import queue
import socket
import struct
import subprocess
import sys
import threading
import time

from . import _command, _library, _sleep, _torch
from ._errors import LibraryError

# The library that measures the calls of the driver, if the linker loads it before all others.
_PRELOADED = "libstratalloc_account.so"
_SECONDS_FOR_PROCESSES = 60
# A reader of the account that is slower loses the connection.
_SECONDS_FOR_READERS = 5
# The most readers that wait for an account. Others are refused.
_READERS = 16
_ROOT = 0
_DEFAULT_POOL = (0, 0)
_PYTORCH = "PyTorch"
_ALLOCATIONS, _GRAPHS = "allocations", "graphs"

# Owners of libraries, by the beginnings of their file names.
_OWNERS = {
    "libcublas": "cuBLAS",
    "libcudnn": "cuDNN",
    "libcufft": "cuFFT",
    "libcurand": "cuRAND",
    "libcusolver": "cuSOLVER",
    "libcusparse": "cuSPARSE",
    "libcupti": "CUPTI",
    "libnccl": "NCCL",
    "libnvshmem": "NVSHMEM",
    "libc10": _PYTORCH,
    "libtorch": _PYTORCH,
    "libstratalloc": _PYTORCH,
}

Row = collections.namedtuple("Row", "owner kind bytes found_by")

_UNKNOWN_PROCESSES = {"context": None, "own": None, "others": {}}
# The bytes of each device that ``measure`` has found, by name.
_measured = collections.defaultdict(collections.Counter)
# The bytes of a context on each device, once they are known.
_contexts = {}
_serving = None


def account(device=None):
    """Returns the owners of the used memory of ``device``, over PyTorch's own allocator or over this library.
    CUDA must be in use.

    Returns a dictionary. ``rows`` has the parts of the used memory: the ``owner``, the ``kind``, the ``bytes``
    and ``found_by``, the way in which they were found. They add up to ``used_bytes``, the bytes of all
    processes. The last row has the bytes of an unknown owner, which are negative if other rows overlap.
    ``table`` is the account as text.

    Libraries of this process are told apart if ``LD_PRELOAD`` names the library whose path ``python -m
    stratalloc preload`` prints, or where :func:`measure` is used. The bytes of a context and of other
    processes come from the command line. It is run for this, which takes about a second, and as much memory
    of the device as a context. Where that fails, these bytes have an unknown owner.
    """
    torch, device = _device(device)
    used, total, rows = _rows(torch, device, _processes(device))
    result = {"process": os.getpid(), "device": device, "used_bytes": used, "total_bytes": total}
    result["rows"] = [row._asdict() for row in rows]
    result["table"] = _table(result, rows)
    return result


def owners(torch, segments):
    """Returns the rows of the accounts of all devices in use, for a snapshot with these segments. Does not run
    the command line, because that would need device memory."""
    rows = []
    for device in _in_use(torch):
        processes = {**_UNKNOWN_PROCESSES, "context": _contexts.get(device)}
        _, _, found = _rows(torch, device, processes, segments)
        rows += [{"device": device, **row._asdict()} for row in found]
    return rows


def _rows(torch, device, processes, segments=None):
    """Returns the used and the total bytes of a device, and the rows of its account."""
    # These are read one after the other, because other threads may allocate at the same time.
    pools = _pools(torch, device, _segments(torch) if segments is None else segments)
    tags, calls = _tags(device), _calls(device)
    for tag in tags.values():
        # The segments of a tag that sleeps are in the snapshot, and have no memory.
        pools[tag["pool"]] = (tag["mapped_bytes"], tag["live_bytes"])
    free, total = torch.cuda.mem_get_info(device)
    measured = dict(_measured[device])
    return total - free, total, rows_of(total - free, pools, tags, calls, measured, **processes)


@contextlib.contextmanager
def measure(name, device=None):
    """Adds to the :func:`account`, under ``name``, the used memory of ``device`` that a block of code adds
    outside the allocator, such as the creation of a communicator. Growth caused by other processes during the
    block is included. Not used where the calls of the driver are measured."""
    torch, device = _device(device)
    measured = _measured[device]
    # What blocks inside this one measure is theirs.
    before = _outside(torch, device) - sum(measured.values())
    try:
        yield
    finally:
        measured[str(name)] += _outside(torch, device) - sum(measured.values()) - before


def rows_of(used, pools, tags, calls, measured, context, own, others):
    """Returns the rows of an account.

    ``pools``: the reserved and the live bytes of each of the allocator's pools, by id. ``tags``: the pool, the
    state and the bytes of each tag, by name. ``calls``: the bytes used before the first measured call, and
    those of each library and kind; or ``None``. ``measured``: bytes by name. ``context``: the bytes of a bare
    process. ``own`` and ``others``: the bytes of this and of the other processes; ``None`` if unknown.
    """
    rows = _allocator_rows(pools, tags)
    if context is not None:
        rows.append(Row("context", "of a process that does nothing", context, "a bare process"))
    if calls is not None:
        first, of_libraries = calls
        rows += _library_rows(of_libraries, sum(reserved for reserved, _ in pools.values()))
    else:
        rows += [Row(name, "growth", size, "measure()") for name, size in measured.items() if size]
        if own is not None:
            rest = own - sum(row.bytes for row in rows)
            rows.append(Row("this process", "other libraries and kernels", rest, "process list"))
    of_others = [
        Row(f"process {process}", "all of it", size, "process list")
        for process, size in sorted(others.items(), key=lambda one: -one[1])
    ]
    rows += of_others
    unknown = used - sum(row.bytes for row in rows)
    if calls is not None:
        # Processes whose memory was used before may have ended.
        before = min(first - (context or 0) - sum(row.bytes for row in of_others), unknown)
        owner = "driver" if context is not None else "context, driver and other processes"
        if before > 0:
            rows.append(Row(owner, "used before the first measured call", before, "driver calls"))
            unknown -= before
    is_all = calls is None and own is None
    kind = "context, libraries, other processes" if is_all else ""
    return [*rows, Row("unknown", kind, unknown, "remainder")]


def _allocator_rows(pools, tags):
    rows, of_tags = [], {tag["pool"] for tag in tags.values()}

    def add(kind, size):
        if size:
            rows.append(Row("allocator", kind, size, "allocator"))

    reserved, live = pools.get(_DEFAULT_POOL, (0, 0))
    add("live tensors", live)
    add("idle cache", reserved - live)
    private = [sizes for pool, sizes in pools.items() if pool != _DEFAULT_POOL and pool not in of_tags]
    name = "private pool" if len(private) == 1 else f"{len(private)} private pools"
    add(f"live in {name}", sum(live for _, live in private))
    add(f"idle in {name}", sum(reserved - live for reserved, live in private))
    for name, tag in tags.items():
        size = pools.get(tag["pool"], (0, 0))[0]
        state = f"tag {name}, {tag['state']}"
        if tag["backed_bytes"]:
            state += f", {tag['backed_bytes'] / 2**20:,.1f} MiB in its backup"
        rows.append(Row("allocator", state, size, "allocator"))
    return rows


def _library_rows(of_libraries, reserved):
    sizes, owners = collections.Counter(), dict(_OWNERS)
    if _library._loaded is not None:
        # Its file may have any name.
        owners[os.path.basename(_library._loaded.path)] = _PYTORCH
    for library, kind, size in of_libraries:
        owner = next((name for start, name in owners.items() if library.startswith(start)), library)
        sizes["CUDA graphs" if kind == _GRAPHS else owner, kind] += size
    # Those of the allocator have rows of their own. A pool may get its memory from another library.
    sizes[_PYTORCH, _ALLOCATIONS] -= min(reserved, sizes[_PYTORCH, _ALLOCATIONS])
    ordered = sorted(sizes.items(), key=lambda one: -one[1])
    return [Row(owner, kind, size, "driver calls") for (owner, kind), size in ordered if size]


def _table(account, rows):
    used, total = account["used_bytes"], account["total_bytes"]
    lines = [f"device {account['device']}: {_mib(used)} of {_mib(total)} MiB used", ""]
    width = max(len(row.owner) for row in rows)
    kinds = max(len(row.kind) for row in rows)
    lines.append(f"{'MiB':>10} {'%':>6}  {'owner':{width}}  {'kind':{kinds}}  found by")
    for row in rows:
        share = 100 * row.bytes / used if used else 0
        line = f"{_mib(row.bytes):>10} {share:6.1f}  {row.owner:{width}}  {row.kind:{kinds}}  {row.found_by}"
        lines.append(line)
    return "\n".join(lines)


def _mib(size):
    return f"{size / 2**20:,.1f}"


def _device(device):
    """Returns PyTorch and the ordinal of a device. ``None`` is the current one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise LibraryError("PyTorch does not use CUDA yet")
    index = device.index if isinstance(device, torch.device) else device
    index = torch.cuda.current_device() if index is None else index
    return torch, _library.number(index, "device", torch.cuda.device_count() - 1)


def _outside(torch, device):
    """Returns the used bytes of a device that are not the allocator's."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - _statistics(torch, device)["reserved_bytes.all.current"]


def _statistics(torch, device):
    try:
        return torch.cuda.memory_stats(device)
    except RuntimeError:
        # Functions that are installed with CUDAPluggableAllocator have no statistics there.
        return _torch.memory_stats(device)


def _segments(torch):
    """Returns the segments of all devices, or ``None`` if the allocator has none: the driver's pools, and
    functions that are installed with CUDAPluggableAllocator."""
    try:
        try:
            # The history would be converted, too.
            return torch.cuda.memory_snapshot(include_traces=False)
        except TypeError:
            return torch.cuda.memory_snapshot()
    except (RuntimeError, NotImplementedError):
        return None


def _pools(torch, device, segments):
    """Returns the reserved and the live bytes of each pool of the allocator, by id."""
    if segments is None:
        stats = _statistics(torch, device)
        return {_DEFAULT_POOL: (stats["reserved_bytes.all.current"], stats["active_bytes.all.current"])}
    pools = collections.defaultdict(lambda: (0, 0))
    for segment in segments:
        if segment["device"] == device:
            pool = tuple(segment.get("segment_pool_id", _DEFAULT_POOL))
            reserved, live = pools[pool]
            pools[pool] = (reserved + segment["total_size"], live + segment["active_size"])
    return dict(pools)


def _tags(device):
    with contextlib.suppress(LibraryError):
        return {tag.name: {**tag.info(), "pool": tag.pool} for tag in _sleep._of((), device)}
    return {}


def _calls(device):
    """Returns what the measured calls of the driver added, or ``None`` if they are not measured."""
    try:
        write = ctypes.CDLL(None).stratalloc_account_json
    except (AttributeError, OSError):
        return None
    write.restype, write.argtypes = ctypes.c_size_t, [ctypes.c_char_p, ctypes.c_size_t]
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = write(buffer, size)
        if needed <= size:
            break
        size = 2 * needed
    for found in json.loads(buffer.value)["devices"]:
        if found["device"] == device:
            return found["first_used_bytes"], [
                (row["library"], row["kind"], row["bytes"]) for row in found["rows"]
            ]
    return None


def _processes(device):
    """Returns the bytes of a context and of all processes. The command line lists them, and is itself a process
    that has nothing but a context."""
    try:
        command = [_command.find(), "info", "--json", "--device", f"cuda:{device}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            try:
                output, _ = child.communicate(timeout=_SECONDS_FOR_PROCESSES)
            finally:
                child.kill()
        (found,) = json.loads(output)["devices"]
        sizes = {one["process"]: one["bytes"] for one in found["processes"]}
    except (LibraryError, OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        sizes = {}
    else:
        context, own = sizes.pop(child.pid, None), sizes.pop(os.getpid(), None)
        # In a container the list may have the numbers that processes have outside.
        if context is not None and own is not None:
            _contexts[device] = context
            return {"context": context, "own": own, "others": sizes}
    return _UNKNOWN_PROCESSES


def preloaded():
    """Returns the path of the library that measures the calls of the driver."""
    folders = [pathlib.Path(__file__).parent]
    library = os.environ.get(_library.VARIABLE)
    if library:
        folders.append(pathlib.Path(library).resolve().parent)
    for folder in folders:
        if (folder / _PRELOADED).is_file():
            return str(folder / _PRELOADED)
    raise LibraryError(f"{_PRELOADED} is not found: build it with 'cargo build --release -p stratalloc-account'")


def serve():
    """Lets ``stratalloc info --pid`` read the account of this process, on Linux. Only programs of the same user
    and of root can read it."""
    global _serving
    if _serving == os.getpid() or not sys.platform.startswith("linux"):
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_name())
    listener.listen(_READERS)
    # Otherwise a child that outlives this process would keep readers waiting.
    os.register_at_fork(after_in_child=listener.close)
    readers = queue.Queue(_READERS)
    for name, work in (("stratalloc-account", _accept), ("stratalloc-answer", _answer)):
        threading.Thread(target=work, args=(readers, listener), name=name, daemon=True).start()
    _serving = os.getpid()


def socket_name():
    """Returns the name of this process's socket, in the abstract namespace. Processes of several containers may
    have equal ids and one network namespace, so the name has the pid namespace."""
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"\0stratalloc-account-{namespace}-{os.getpid()}"


def _accept(readers, listener):
    """Accepts readers of the same user and of root. Closes other connections at once, and makes no account, so
    that no user can keep others from being accepted."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            # The program has too many open files. A reader waits until it has fewer.
            time.sleep(1)
            continue
        try:
            connection.settimeout(_SECONDS_FOR_READERS)
            size = struct.calcsize("3i")
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
            if user not in (_ROOT, os.getuid()):
                connection.close()
                continue
            readers.put_nowait(connection)
        except queue.Full:
            _send(connection, {"error": "too many programs read its account"})
        except OSError:
            connection.close()


def _answer(readers, _):
    """Makes one account for all readers that wait."""
    while True:
        waiting = [readers.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                waiting.append(readers.get_nowait())
        accounts = _accounts()
        for connection in waiting:
            _send(connection, accounts)


def _send(connection, accounts):
    with connection, contextlib.suppress(OSError):
        connection.sendall(json.dumps(accounts).encode())
        # A child of a fork may have the connection too. The reader sees the end all the same.
        connection.shutdown(socket.SHUT_RDWR)


def _accounts():
    """Returns the accounts of all devices that this process uses, or an error."""
    try:
        return {"accounts": [account(device) for device in _in_use(sys.modules.get("torch"))]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _in_use(torch):
    """Returns the ordinals of the devices on which this process has a context."""
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [device for device in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(device)]
