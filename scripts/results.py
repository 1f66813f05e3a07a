"""Converts the rows of side_by_side.sh to the tables of docs/measurements.md. Prints them on standard output.

A cell that was timed in several rounds shows the minimum, because other load on the machine only adds time. A
comparison is the median of the rounds' ratios, with its 95 % interval (of a sign test) in brackets. The two cells of a
round were timed on one processor, within a second or two of each other. Cells of several threads have one round of the
other allocators and a few of ours, each of which is compared with that one.
"""

import csv
import json
import math
import pathlib
import statistics
import sys

CASES = [
    ("pair:512B", 1), ("pair:64KiB", 1), ("pair:2MiB", 1), ("pair:64MiB", 1),
    ("streams:2", 1), ("streams:8", 1), ("streams:128", 1), ("serve:1", 1), ("serve:8", 1), ("serve:128", 1),
    ("mix:4096live", 1),
    ("holes:4096", 1), ("holes:65536", 1), ("record_stream:64KiB", 1),
    ("threads:own_stream", 1), ("threads:own_stream", 4), ("threads:own_stream", 16),
]
FLOOR_IN_TURN = "floor:lock_pair"
OURS = {
    "backend:native": "native",
    "backend:native,expandable_segments:True": "expandable",
    "backend:cudaMallocAsync": "cudaMallocAsync",
    "driver": "driver alone",
}
# The reference column, whether the ratio is a speed-up (otherwise a cost), and the columns to compare
# with it.
REFERENCES = [
    ("torch native", True, ("ours: native", "ours: expandable")),
    ("torch expandable", True, ("ours: expandable",)),
    ("other torch native", True, ("ours: native", "torch native")),
    ("other torch expandable", True, ("ours: expandable",)),
    ("rmm arena", True, ("ours: native",)),
    ("raw cudaMallocAsync", False, ("ours: cudaMallocAsync", "ours: driver alone")),
    ("ours: driver alone", False, ("ours: cudaMallocAsync",)),
]


def read(folder):
    """Returns the cells as (column, case, threads) -> {round: nanoseconds}, and the times of the floors."""
    cells, floors = {}, {}

    def put(column, case, threads, ns, number=None):
        table = floors if case.startswith("floor:") else cells
        rounds = table.setdefault((column, case, int(threads)), {})
        rounds[len(rounds) if number is None else number] = float(ns)

    def lines(name):
        path = folder / name
        return path.read_text().splitlines() if path.exists() else []

    for row in map(json.loads, lines("turns.json")):
        put(row["column"], row["case"], 1, row["ns_per_op"], row["round"])
    for row in map(json.loads, lines("ours.json")):
        column, case = "ours: " + OURS.get(row["conf"], row["conf"]), row["case"]
        if "_raw" in case:
            column, case = column + ", by address", case.replace("_raw", "")
        put(column, case, row["threads"], row["ns_per_op"])
    for source in ("torch", "other torch", "rmm", "raw"):
        for row in csv.reader(lines(f"{source}.csv")):
            put(row[0], row[1], row[2], row[3])
    return cells, floors


def against(own, other, faster):
    """Returns how many times as fast `own` is as `other` if `faster`; otherwise how many times as much it costs."""
    ratios = sorted(other[n] / own[n] if faster else own[n] / other[n] for n in own.keys() & other.keys())
    if not ratios:
        return None
    # The number of ratios outside the interval at each end. Fewer than six rounds give no 95 % interval.
    beyond = [2 * sum(math.comb(len(ratios), k) for k in range(n + 1)) / 2 ** len(ratios) for n in range(len(ratios))]
    outside = sum(part <= 0.05 for part in beyond) - 1
    within = f" ({ratios[outside]:.2f} to {ratios[-1 - outside]:.2f})" if outside >= 0 else ""
    return f"{statistics.median(ratios):.2f}{within}"


def main():
    folder = pathlib.Path(sys.argv[1])
    cells, floors = read(folder)
    columns = sorted(dict.fromkeys(column for column, _, _ in cells), key=lambda c: not c.startswith("ours"))
    cases = [c for c in CASES if any((column, *c) in cells for column in columns)]

    def show(column, case):
        rounds = cells.get((column, *case))
        if not rounds:
            return ""
        ns = min(rounds.values())
        return f"{ns:,.0f}" if ns >= 100 else f"{ns:.1f}"

    print("| ns an operation | " + " | ".join(f"{c} x{t}" if t > 1 else c for c, t in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for column in columns:
        print(f"| {column} | " + " | ".join(show(column, case) for case in cases) + " |")
    print()
    for (column, name, threads), rounds in sorted(floors.items()):
        rounds, when = rounds.values(), "in turn" if column == FLOOR_IN_TURN else "with the threads"
        print(f"{name} x{threads}, {when}: {min(rounds):,.1f} to {max(rounds):,.1f}, median {statistics.median(rounds):,.1f}")
    for column in columns:
        for reference, faster, whose in REFERENCES:
            if not column.startswith(whose) or column == reference:
                continue
            print(f"\n{column}, {'times as fast as' if faster else 'times the cost of'} {reference}:")
            for case in cases:
                own, other = cells.get((column, *case)), cells.get((reference, *case))
                if own and other:
                    if case[0].startswith("threads:") and len(other) == 1:
                        other = dict.fromkeys(own, *other.values())
                    print(f"  {case[0]} x{case[1]}: {against(own, other, faster)}")
        alone = cells.get((column, "threads:own_stream", 1))
        crowd = cells.get((column, "threads:own_stream", 16))
        if column.startswith("ours:") and alone and crowd:
            print(f"  scaling to 16 threads (1 is perfect): {against(crowd, alone, True)}")
    print()
    for line in (folder / "machine.txt", folder / "left_out.txt"):
        if line.exists():
            print(line.read_text().rstrip())


if __name__ == "__main__":
    main()
