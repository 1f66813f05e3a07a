"""Turns the rows of side_by_side.sh into the tables of benches/RESULTS.md, on the standard output.

A cell that was timed in several rounds shows the least: others who use the machine only make it more. A
comparison is the ratio of these and, in brackets, of the medians.
"""

import csv
import json
import pathlib
import statistics
import sys

CASES = [
    ("pair:512B", 1), ("pair:64KiB", 1), ("pair:2MiB", 1), ("pair:64MiB", 1), ("mix:4096live", 1),
    ("holes:4096", 1), ("holes:65536", 1), ("record_stream:64KiB", 1),
    ("threads:own_stream", 1), ("threads:own_stream", 4), ("threads:own_stream", 16),
]
OURS = {
    "backend:native": "native",
    "backend:native,expandable_segments:True": "expandable",
    "backend:cudaMallocAsync": "cudaMallocAsync",
    "driver": "driver alone",
}


def read(folder):
    """(column, case, threads) -> nanoseconds of each round, and the floors."""
    cells, columns, floors = {}, [], {}

    def put(column, case, threads, ns):
        if column not in columns:
            columns.append(column)
        cells.setdefault((column, case, int(threads)), []).append(float(ns))

    ours = folder / "ours.json"
    for line in ours.read_text().splitlines() if ours.exists() else []:
        row = json.loads(line)
        if row["case"].startswith("floor:"):
            floors.setdefault((row["case"], row["threads"]), []).append(row["ns_per_op"])
            continue
        name = OURS[row["conf"]]
        case = row["case"]
        if "_raw" in case:
            name, case = name + ", by address", case.replace("_raw", "")
        put("ours: " + name, case, row["threads"], row["ns_per_op"])
    for source in ("torch", "rmm", "raw"):
        path = folder / f"{source}.csv"
        for row in csv.reader(path.open()) if path.exists() else []:
            put(row[0], row[1], row[2], row[3])
    return cells, columns, floors


def against(cells, column, reference, case, faster):
    """How many times as fast as the reference, or how many times its cost; None if one is missing."""
    own, other = cells.get((column, *case)), cells.get((reference, *case))
    if not own or not other:
        return None
    ratio = (lambda a, b: b / a) if faster else (lambda a, b: a / b)
    text = f"{ratio(min(own), min(other)):.2f}"
    if len(own) > 1 and len(other) > 1:
        text += f" ({ratio(statistics.median(own), statistics.median(other)):.2f})"
    return text


def main():
    folder = pathlib.Path(sys.argv[1])
    cells, columns, floors = read(folder)
    cases = [c for c in CASES if any((column, *c) in cells for column in columns)]

    def show(column, case):
        rounds = cells.get((column, *case))
        if not rounds:
            return ""
        ns = min(rounds)
        return f"{ns:,.0f}" if ns >= 100 else f"{ns:.1f}"

    print("| ns an operation | " + " | ".join(f"{c} x{t}" if t > 1 else c for c, t in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for column in columns:
        print(f"| {column} | " + " | ".join(show(column, case) for case in cases) + " |")
    print()
    for (name, threads), rounds in sorted(floors.items()):
        print(f"{name} x{threads}: {min(rounds):,.1f} ({statistics.median(rounds):,.1f}, at most {max(rounds):,.1f})")
    for column in columns:
        for reference, faster in (("torch native", True), ("raw cudaMallocAsync", False)):
            pools = column.startswith("ours: cudaMallocAsync") or column == "ours: driver alone"
            if not column.startswith("ours:") or pools == faster:
                continue
            print(f"\n{column}, {'times as fast as' if faster else 'times the cost of'} {reference}:")
            for case in cases:
                ratio = against(cells, column, reference, case, faster)
                if ratio:
                    print(f"  {case[0]} x{case[1]}: {ratio}")
        alone = cells.get((column, "threads:own_stream", 1))
        crowd = cells.get((column, "threads:own_stream", 16))
        if column.startswith("ours:") and alone and crowd:
            print(f"  scaling to 16 threads (1 is perfect): {alone[-1] / crowd[-1]:.2f}")
    print()
    for line in (folder / "machine.txt", folder / "left_out.txt"):
        if line.exists():
            print(line.read_text().rstrip())


if __name__ == "__main__":
    main()
