"""Turns the rows of side_by_side.sh into the table of benches/RESULTS.md, on the standard output."""

import csv
import json
import pathlib
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
    """(column, case, threads) -> nanoseconds, and the floors."""
    cells, columns, floors = {}, [], {}

    def put(column, case, threads, ns):
        if column not in columns:
            columns.append(column)
        cells.setdefault((column, case, int(threads)), float(ns))

    ours = folder / "ours.json"
    for line in ours.read_text().splitlines() if ours.exists() else []:
        row = json.loads(line)
        if row["case"].startswith("floor:"):
            floors.setdefault((row["case"], row["threads"]), row["ns_per_op"])
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


def main():
    folder = pathlib.Path(sys.argv[1])
    cells, columns, floors = read(folder)
    cases = [c for c in CASES if any((column, *c) in cells for column in columns)]

    def show(column, case):
        ns = cells.get((column, *case))
        return "" if ns is None else f"{ns:,.0f}" if ns >= 100 else f"{ns:.1f}"

    print("| ns an operation | " + " | ".join(f"{c} x{t}" if t > 1 else c for c, t in cases) + " |")
    print("|---" * (len(cases) + 1) + "|")
    for column in columns:
        print(f"| {column} | " + " | ".join(show(column, case) for case in cases) + " |")
    print()
    for (name, threads), ns in sorted(floors.items()):
        print(f"{name} x{threads}: {ns:,.1f}")
    print()
    reference = "torch native"
    for column in [c for c in columns if c.startswith("ours: native") or c.startswith("ours: expand")]:
        ratios = []
        for case in cases:
            pair = cells.get((column, *case)), cells.get((reference, *case))
            if all(pair):
                ratios.append(f"{case[0]} x{case[1]} {pair[1] / pair[0]:.1f}")
        print(f"{column}, times as fast as {reference}: " + ", ".join(ratios))
    for line in (folder / "machine.txt", folder / "left_out.txt"):
        if line.exists():
            print(line.read_text().rstrip())


if __name__ == "__main__":
    main()
