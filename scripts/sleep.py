"""Times a pause and a resume of a tag beside raw CUDA calls on the same bytes:

    python scripts/sleep.py LIBRARY [GIB]

LIBRARY is libstratalloc.so. GIB (20) are live in 300 blocks, and every second of 600 blocks was freed before. Needs a
CUDA device with twice that memory and three times as much host memory. For fixed and expandable segments, with and
without a kept backup, prints the seconds of the first pause, of later ones and of resumes, each as a multiple of what raw
calls take: cuMemHostAlloc, cuMemcpyAsync of the live blocks, and cuMemCreate, cuMemMap and cuMemSetAccess of as many
pages. Also prints

- the bytes of device memory that a pause frees, compared with the mapped bytes of the tag;
- the parts of a resume: one of a tag whose contents were dropped, and raw calls in the order of a resume, which copy to
  each page as soon as it is mapped. Copies use two host buffers, pinned before and after the backup, because their
  speed depends on where the system provides the memory.
"""

import collections
import ctypes
import statistics
import sys
import time

import stratalloc

MIB = 1 << 20
BLOCKS = 600
ROUNDS = 3
# The driver clears released memory in the background. Until it is done, copies take up to a tenth longer.
SECONDS_TO_CLEAR = 0.5
cuda = ctypes.CDLL("libcuda.so.1")
u64, size_t, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p


class PageProperties(ctypes.Structure):
    """CUmemAllocationProp of memory of device 0."""

    _fields_ = [(name, ctypes.c_int) for name in ("type", "handles", "place", "device")]
    _fields_ += [("windows", pointer), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [(name, ctypes.c_int) for name in ("place", "device", "flags")]


def call(name, *arguments):
    """Calls the driver, and ends the program if it fails."""
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name} failed: code {code}")


def open_device():
    """Makes the primary context of device 0 current and returns a stream."""
    device, context, stream = ctypes.c_int(), pointer(), pointer()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuStreamCreate", ctypes.byref(stream), 1)
    return stream


def timed(work):
    """Returns the result of `work` and the seconds that it took. Waits before, until no released memory is cleared."""
    time.sleep(SECONDS_TO_CLEAR)
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def copy(runs, host, stream, is_back):
    """Copies ranges of device memory to host memory, or back."""
    at = host
    for address, size in runs:
        if is_back:
            call("cuMemcpyHtoDAsync_v2", u64(address), pointer(at), size_t(size), stream)
        else:
            call("cuMemcpyDtoHAsync_v2", pointer(at), u64(address), size_t(size), stream)
        at += size
    call("cuStreamSynchronize", stream)


def map_pages(base, page_bytes, count, host=None, live_bytes=0, stream=None):
    """Creates `count` pages and maps them from `base` on. With `host`, copies `live_bytes` to them, to each page as soon
    as it is mapped."""
    properties, access, pages = PageProperties(1, 0, 1, 0), Access(1, 0, 3), []
    for at in range(base, base + count * page_bytes, page_bytes):
        page = u64()
        call("cuMemCreate", ctypes.byref(page), size_t(page_bytes), ctypes.byref(properties), u64(0))
        call("cuMemMap", u64(at), size_t(page_bytes), size_t(0), page, u64(0))
        call("cuMemSetAccess", u64(at), size_t(page_bytes), ctypes.byref(access), size_t(1))
        pages.append(page)
        size = min(page_bytes, live_bytes - (at - base))
        if host and size > 0:
            call("cuMemcpyHtoDAsync_v2", u64(at), pointer(host + at - base), size_t(size), stream)
    if host:
        call("cuStreamSynchronize", stream)
    return pages


def seconds_of_pages(total_bytes, page_bytes, *copies):
    """Returns the seconds that the bare driver calls take for so many pages, with copies to them if `copies` are given."""
    count, base = -(-total_bytes // page_bytes), u64()
    call("cuMemAddressReserve", ctypes.byref(base), size_t(count * page_bytes), size_t(0), u64(0), u64(0))
    pages, seconds = timed(lambda: map_pages(base.value, page_bytes, count, *copies))
    for n, page in enumerate(pages):
        call("cuMemUnmap", u64(base.value + n * page_bytes), size_t(page_bytes))
        call("cuMemRelease", page)
    call("cuMemAddressFree", base, size_t(count * page_bytes))
    return seconds


def free_bytes():
    """Returns the free memory of the device."""
    free, total = size_t(), size_t()
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def pinned(size):
    """Returns the address of new pinned memory."""
    host = pointer()
    call("cuMemHostAlloc", ctypes.byref(host), size_t(size), 0)
    return host.value


def pattern(n):
    return n * 2654435761 % 2**32


def is_intact(blocks, size):
    """Returns true if each live block still has its pattern at its start, middle and end."""
    word, intact = ctypes.c_uint(), True
    for n in range(1, BLOCKS, 2):
        for offset in (0, size // 2, size - 4):
            call("cuMemcpyDtoH_v2", ctypes.byref(word), u64(blocks[n] + offset), size_t(4))
            intact &= word.value == pattern(n)
    return intact


def measure(library, conf, keep, size, stream):
    """Times one configuration and prints a line."""
    allocator = stratalloc.Allocator(conf, device="cuda:0", library=library)
    tag = allocator.tag("weights", keep=keep)
    with tag:
        blocks = [allocator.allocate(size) for _ in range(BLOCKS)]
    for n, block in enumerate(blocks):
        call("cuMemsetD32_v2", u64(block), ctypes.c_uint(pattern(n)), size_t(size // 4))
    call("cuCtxSynchronize")
    for block in blocks[::2]:
        allocator.free(block)
    runs = [(block, size) for block in sorted(blocks[1::2])]
    live_bytes = size * len(runs)

    host, pinning = timed(lambda: pinned(live_bytes))
    copy(runs, host, stream, False)
    paused, first = timed(tag.pause)
    later = pinned(live_bytes)
    resumed = tag.resume()
    mapped_bytes = resumed["mapped_bytes"]
    page_bytes = 20 * MIB if "expandable" in conf else mapped_bytes // len(runs)
    seconds = collections.defaultdict(list)
    note = lambda name, work: seconds[name].append(timed(work)[1])
    surplus = set()
    for _ in range(ROUNDS):
        note("save", lambda: copy(runs, host, stream, False))
        note("later save", lambda: copy(runs, later, stream, False))
        free, held = free_bytes(), tag.info()["mapped_bytes"]
        note("pause", tag.pause)
        surplus.add(free_bytes() - free - held)
        seconds["pages"].append(seconds_of_pages(mapped_bytes, page_bytes))
        note("resume", tag.resume)
        note("load", lambda: copy(runs, host, stream, True))
        note("later load", lambda: copy(runs, later, stream, True))
    intact = is_intact(blocks, size)
    for _ in range(ROUNDS):
        tag.pause(backup=None)
        seconds["raw resume"].append(seconds_of_pages(mapped_bytes, page_bytes, later, live_bytes, stream))
        note("calls", tag.resume)
    of = {name: statistics.median(each) for name, each in seconds.items()}
    save, load = (statistics.mean((of[name], of["later " + name])) for name in ("save", "load"))
    limit = load + 1.2 * of["pages"]
    freed = "to the byte" if surplus == {0} else f"NOT: {sorted(surplus)} bytes more"
    print(
        f"{conf}, {'kept backup' if keep else 'backup not kept'}: {live_bytes / 2**30:.1f} GiB live, "
        f"{paused['copied_bytes'] / 2**30:.1f} GiB copied, contents {'intact' if intact else 'LOST'}\n"
        f"  first pause {first:.3f} s, {first / (pinning + save):.2f} x (cuMemHostAlloc {pinning:.3f} s + copy)\n"
        f"  pause {of['pause']:.3f} s, {of['pause'] / save:.2f} x copy ({save:.3f} s)\n"
        f"  resume {of['resume']:.3f} s, {of['resume'] / limit:.2f} x (copy {load:.3f} s + 1.2 x pages {of['pages']:.3f} s)\n"
        f"  a pause frees the {mapped_bytes / MIB:.0f} mapped MiB {freed}\n"
        f"  parts: a resume without copies {of['calls']:.3f} s; raw calls and copies {of['raw resume']:.3f} s; copies with "
        f"the buffer pinned before the backup {of['save']:.3f} out, {of['load']:.3f} in, after it "
        f"{of['later save']:.3f} out, {of['later load']:.3f} in; all resumes {[round(s, 3) for s in seconds['resume']]}",
        flush=True,
    )
    for block in blocks[1::2]:
        allocator.free(block)
    tag.close()
    allocator.close()
    for buffer in (host, later):
        call("cuMemFreeHost", pointer(buffer))


def main(library, gib="20"):
    stream = open_device()
    size = int(float(gib) * 1024 / (BLOCKS // 2)) * MIB
    # A virtual machine provides host memory when it is first used. Both raw calls and pauses find it provided.
    call("cuMemFreeHost", pointer(pinned(size * BLOCKS // 2 * 3)))
    for conf in ("backend:native", "backend:native,expandable_segments:True"):
        for keep in (True, False):
            measure(library, conf, keep, size, stream)


if __name__ == "__main__":
    main(*sys.argv[1:])
