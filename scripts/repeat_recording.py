#!/usr/bin/env python3
"""Repeats a recording of PyTorch until it has a number of events, to measure tools on long recordings.

    python3 scripts/repeat_recording.py IN OUT EVENTS
    python3 scripts/repeat_recording.py tests/traces/llama_var.default.pickle.xz /tmp/million.pickle 1_050_000

IN is a snapshot that begins with an empty device: .pickle, or .pickle.xz. Between two passes the blocks that still
live are freed and the segments are released, in the order of `empty_cache`, as if the program had ended and begun
again. So every pass is a legal continuation, and `replay --verify` repeats the whole. Times go on from pass to pass,
and so do the annotations (steps of optimizers).

Each device gets its last EVENTS events, as `_record_memory_history(max_entries=EVENTS)` keeps them; with --whole the
first pass is not cut, so that the recording begins with an empty device and has up to one pass more than EVENTS.

OUT is a pickle of protocol 2, as PyTorch's own C++ code writes. It is written pass by pass: 5,250,000 events without
stacks are about 340 MB, and need no more memory than one pass.
"""

import argparse
import lzma
import pathlib
import pickle

# A pass begins this many microseconds after the last event of the one before.
GAP_US = 1000
PROTOCOL = 2


def read(path):
    is_packed = path.suffix == ".xz"
    with lzma.open(path) if is_packed else open(path, "rb") as file:
        return pickle.load(file)


def release(snapshot, device, time_us):
    """Returns the events that free the live blocks of a snapshot's end and release its segments."""
    events = []
    segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]

    def add(action, address, size, segment):
        known = {"action": action, "addr": address, "size": size, "stream": segment["stream"], "time_us": time_us}
        events.append(known if "frames" not in segment else known | {"frames": []})

    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            address, size = block.get("address", address), block.get("requested_size", block["size"])
            if block["state"] == "active_allocated":
                add("free_requested", address, size, segment)
            if block["state"].startswith("active"):
                add("free_completed", address, size, segment)
            address += block["size"]
    # The order of `empty_cache`: the pool of large blocks first, each ordered by stream and size.
    segments.sort(key=lambda one: (one["segment_type"] != "large", one["stream"], one["total_size"], one["address"]))
    for segment in segments:
        action = "segment_unmap" if segment.get("is_expandable") else "segment_free"
        add(action, segment["address"], segment["total_size"], segment)
    return events


def moved(rows, by_us):
    return [row | {"time_us": row["time_us"] + by_us} if "time_us" in row else row for row in rows]


def pickled(value):
    """Returns the pickle of a value without its header and its end. Each part numbers its memo from 0 and reads only
    what it has written itself, so that parts can follow each other."""
    return pickle.dumps(value, PROTOCOL)[2:-1]


def items(rows):
    """Returns the pickle that appends rows to the list on the stack."""
    # `]q\0` makes the list.
    return pickled(rows)[3:] if rows else b""


def write(path, snapshot, events, whole):
    traces = snapshot["device_traces"]
    times = [event["time_us"] for trace in traces for event in trace if "time_us" in event]
    last_us = max(times, default=0)
    period_us = last_us - min(times, default=0) + 2 * GAP_US
    release_us = last_us + GAP_US
    cycles = [trace + release(snapshot, device, release_us) if trace else [] for device, trace in enumerate(traces)]
    # The last pass of a device has no release at its end.
    wanted = [max(events - len(trace), 0) for trace in traces]
    before = [-(-more // len(cycle)) if cycle else 0 for more, cycle in zip(wanted, cycles)]
    passes = max(before) + 1
    begins_us = min(times, default=0)
    with lzma.open(path, "wb") if path.suffix == ".xz" else open(path, "wb") as file:
        file.write(pickle.PROTO + bytes([PROTOCOL]) + pickle.EMPTY_DICT)

        def put(key, value):
            file.write(pickled(key) + value + pickle.SETITEM)

        for key, value in snapshot.items():
            if key not in ("device_traces", "external_annotations"):
                put(key, pickled(value))
        file.write(pickled("device_traces") + pickle.EMPTY_LIST)
        counts = []
        for trace, cycle, more, mine in zip(traces, cycles, wanted, before):
            file.write(pickle.EMPTY_LIST)
            skipped = mine * len(cycle) - more if mine and not whole else 0
            for number in range(passes - 1 - mine, passes - 1):
                part = moved(cycle[skipped:], number * period_us)
                file.write(items(part))
                if skipped:
                    begins_us = part[0].get("time_us", 0)
                skipped = 0
            last = trace if mine or whole else trace[max(len(trace) - events, 0):]
            file.write(items(moved(last, (passes - 1) * period_us)) + pickle.APPEND)
            counts.append(mine * len(cycle) + len(trace) if whole else min(events, mine * len(cycle) + len(trace)))
        file.write(pickle.SETITEM)
        if "external_annotations" in snapshot:
            file.write(pickled("external_annotations") + pickle.EMPTY_LIST)
            for number in range(passes):
                rows = moved(snapshot["external_annotations"], number * period_us)
                file.write(items([row for row in rows if row.get("time_us", begins_us) >= begins_us]))
            file.write(pickle.SETITEM)
        file.write(pickle.STOP)
    return passes, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", metavar="IN", type=pathlib.Path)
    parser.add_argument("out", metavar="OUT", type=pathlib.Path)
    parser.add_argument("events", metavar="EVENTS", type=int)
    parser.add_argument("--whole", action="store_true", help="do not cut the first pass")
    given = parser.parse_args()
    snapshot = read(given.recording)
    for trace in snapshot["device_traces"]:
        if trace and trace[0]["action"] not in ("segment_alloc", "segment_map"):
            raise SystemExit(f"{given.recording}: it does not begin with an empty device")
    passes, counts = write(given.out, snapshot, given.events, given.whole)
    size = given.out.stat().st_size / 1e6
    print(f"{given.out}: {passes} passes, {' + '.join(f'{count:,}' for count in counts)} events, {size:,.0f} MB")


main()
