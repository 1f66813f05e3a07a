#!/usr/bin/env python3
"""Makes recordings of many ranks, and measures `stratalloc sweep` on them.

    scripts/ranks.py make FOLDER [--ranks 1024] [--groups 16] [--recording TRACE]
    scripts/ranks.py measure FOLDER [--jobs N] [--command target/release/stratalloc]

`make` writes copies of a recording. The ranks of a group differ in addresses, times and stream handles. The
groups differ in the sizes of their large requests, and the first group has all ranks that are left over.

`measure` compares the time of `sweep --quick` with the time to read each file once (`examples/read_files`) plus
the time to analyse one file of each group alone, and prints the peak of resident memory of each.
First `cargo build --release -p stratalloc-cli -p stratalloc-recording --bin stratalloc --example read_files`.
"""

import argparse
import json
import lzma
import os
import pathlib
import pickle
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LARGE = 1 << 20
# Settings to try on all groups, besides the best ones.
CONFS = ["expandable_segments:True", "max_split_size_mb:64"]


def changed(size, group):
    """Returns the size of a request in a group. It becomes smaller, so that blocks keep their places."""
    return size - 512 * group if size > 2 * LARGE else size


def as_rank(snapshot, rank, group):
    """Changes a snapshot in place to that of a rank."""
    base, later = (rank + 1) << 36, rank * 1_000_003

    def stream(handle):
        return handle + (rank << 12) if handle else 0

    for entries in snapshot["device_traces"]:
        for entry in entries:
            is_block = entry["action"] in ("alloc", "free_requested", "free_completed")
            if entry["action"] != "oom":
                entry["addr"] += base
            entry["stream"] = stream(entry["stream"])
            entry["time_us"] = entry.get("time_us", 0) + later
            entry["size"] = changed(entry["size"], group) if is_block else entry["size"]
    for segment in snapshot["segments"]:
        segment["address"] += base
        segment["stream"] = stream(segment["stream"])
        for block in segment["blocks"]:
            block["address"] += base
            if "requested_size" in block:
                block["requested_size"] = changed(block["requested_size"], group)


def make(folder, ranks, groups, recording):
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = lzma.open(recording).read()
    for rank in range(ranks):
        mine = pickle.loads(snapshot)
        as_rank(mine, rank, rank % groups)
        (folder / f"rank{rank:05}.pickle").write_bytes(pickle.dumps(mine))
    paths = [folder / f"rank{rank:05}.pickle" for rank in range(ranks)]
    print(f"{ranks} files, {sum(path.stat().st_size for path in paths) / 1e6:,.0f} MB")


def timed(*words):
    """Runs a command. Returns its seconds, those of all its threads together, and its peak of resident memory
    in MiB as text; then the seconds and its last line."""
    begun = time.perf_counter()
    process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
    lines = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(map(str, words[:6]))}")
    seconds, busy = time.perf_counter() - begun, usage.ru_utime + usage.ru_stime
    text = f"{seconds:7.2f} s, {busy:7.2f} s of processors, {usage.ru_maxrss / 1024:6.0f} MiB"
    return text, seconds, lines[-1]


def measure(folder, jobs, command):
    paths = sorted(folder.glob("*.pickle"))
    sweep = [command, "sweep", "--quick", "--json", "--jobs", jobs]
    # Twice, so that the files are in the system's cache before the measurement that counts.
    for _ in range(2):
        read_text, read, _ = timed(command.parent / "examples/read_files", jobs, *paths)
    more = [word for conf in CONFS for word in ("--conf", conf)]
    text, whole, last = timed(*sweep, *more, *paths)
    result = json.loads(last)
    groups = [group["recordings"] for group in result["groups"]]
    firsts = [group[0] for group in groups]
    confs = sorted({*CONFS, *(row["best_conf"] for row in result["rows"])})
    confs = [word for conf in confs for word in ("--conf", conf)]
    advice_text, advice, _ = timed(*sweep, "--part", "groups", *firsts)
    needs_text, needs, _ = timed(*sweep, "--part", "needs", *confs, *firsts)
    one_text, _, _ = timed(*sweep, "--part", "groups", firsts[0])
    print(f"{len(paths)} files in {len(groups)} groups, {jobs} jobs, advice {result['advice']}")
    print(f"sweep            {text}")
    print(f"read each once   {read_text}")
    print(f"advice, groups   {advice_text}")
    print(f"settings on all  {needs_text}")
    print(f"advice for one   {one_text}")
    print(f"ratio {whole / (read + advice + needs):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="what")
    maker = commands.add_parser("make")
    maker.add_argument("--ranks", type=int, default=1024)
    maker.add_argument("--groups", type=int, default=16)
    recording = ROOT / "tests/traces/llama_var.default.pickle.xz"
    maker.add_argument("--recording", type=pathlib.Path, default=recording)
    measurer = commands.add_parser("measure")
    measurer.add_argument("--jobs", type=int, default=os.cpu_count())
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    measurer.add_argument("--command", type=pathlib.Path, default=target / "release/stratalloc")
    for each in (maker, measurer):
        each.add_argument("folder", type=pathlib.Path)
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder, given.ranks, given.groups, given.recording)
    else:
        measure(given.folder, given.jobs, given.command)


main()
