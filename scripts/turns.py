"""Times the benchmark cases of one thread in several programs, which take turns case by case:

    python turns.py STRATALLOC PEERS OUT ROUNDS

STRATALLOC is the program, PEERS a folder with the programs built from peers.cpp (`torch`, `other torch`, `raw`, `rmm`;
missing ones are left out). All programs run at the same time. In each round every case is timed briefly with one allocator right
after the other; every other round in reverse order. All programs run on one processor, and each round uses the next
processor. So the times of a round are comparable even on a machine with other load. A line for each case and allocator
(a cell) is written to OUT/turns.json; `results.py` compares them round by round. The variable CASES selects cases, such as
`pair:512B mix:4096live`.
"""

import json
import os
import pathlib
import subprocess
import sys

NATIVE, EXPANDABLE = "backend:native", "backend:native,expandable_segments:True"
POOLS = "backend:cudaMallocAsync"

# Column, program, and the allocator in that program. Columns that are compared with each other are
# adjacent, so that they are timed right after each other.
COLUMNS = [
    ("other torch native", "other torch", "other torch native"),
    ("torch native", "torch", "torch native"),
    ("ours: native", "ours", NATIVE),
    ("ours: native, by address", "ours", NATIVE),
    ("ours: expandable", "ours", EXPANDABLE),
    ("ours: expandable, by address", "ours", EXPANDABLE),
    ("torch expandable", "torch expandable", "torch expandable"),
    ("other torch expandable", "other torch expandable", "other torch expandable"),
    ("ours: cudaMallocAsync", "ours", POOLS),
    ("raw cudaMallocAsync", "raw", "raw cudaMallocAsync"),
    ("ours: cudaMallocAsync, by address", "ours", POOLS),
    ("ours: driver alone", "ours", "driver"),
    ("torch cudaMallocAsync", "torch cudaMallocAsync", "torch cudaMallocAsync"),
    ("rmm pool", "rmm", "rmm pool"),
    ("rmm arena", "rmm", "rmm arena"),
    ("rmm async", "rmm", "rmm async"),
    ("raw cudaMalloc", "raw", "raw cudaMalloc"),
]
BY_ADDRESS = [
    "pair:512B", "pair:64KiB", "pair:2MiB", "pair:64MiB", "streams:2", "streams:8", "streams:128",
    "serve:1", "serve:8", "serve:128", "mix:4096live",
]
ALL_CASES = [*BY_ADDRESS, "holes:4096", "holes:65536", "record_stream:64KiB"]
CASES = os.environ.get("CASES", "").split() or ALL_CASES
FLOOR = "floor:lock_pair"


def programs(stratalloc, peers):
    """Returns the programs that exist: name -> command and PyTorch's configuration."""
    ours = [stratalloc, "bench", "--device", "cuda:0", "--threads", "1", "--json", "--turns"]
    all_of_them = {
        "ours": (ours, ""),
        "torch": ([str(peers / "torch")], ""),
        "torch expandable": ([str(peers / "torch")], "expandable_segments:True"),
        "other torch": ([str(peers / "other torch")], ""),
        "other torch expandable": ([str(peers / "other torch")], "expandable_segments:True"),
        "torch cudaMallocAsync": ([str(peers / "torch")], "backend:cudaMallocAsync"),
        "raw": ([str(peers / "raw")], ""),
        "rmm": ([str(peers / "rmm")], ""),
    }
    return {name: said for name, said in all_of_them.items() if os.access(said[0][0], os.X_OK)}


class Program:
    """A running program that prints one line for each line that it reads."""

    def __init__(self, command, conf):
        pipe = subprocess.PIPE
        said = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": conf, "PEER_THREADS": "0"}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=said)

    def time(self, case, who):
        """Returns nanoseconds per operation; None if there is no such case."""
        try:
            self.process.stdin.write(f"{case} {who}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        answer = self.process.stdout.readline()
        if not answer:
            raise EOFError
        answer = answer.strip()
        if answer.startswith("{"):
            return json.loads(answer)["ns_per_op"]
        return None if answer in ("", "null") else float(answer.split(",")[3])

    def end(self):
        self.process.stdin.close()
        return self.process.wait()


class Run:
    """Programs that run side by side, and which of them failed."""

    def __init__(self, commands):
        self.commands = commands
        self.processors = sorted(os.sched_getaffinity(0))
        self.number = 0
        self.there = {}
        # The programs that failed, and the pairs of column and case that do not exist.
        self.failed, self.nothing = set(), set()
        for name in commands:
            self.start(name)
            if name not in self.there:
                self.failed.add(name)

    def start(self, name):
        # Wait for one answer: then the program has started up and does not disturb the timing of others.
        self.there[name] = Program(*self.commands[name])
        self.answer(name, FLOOR, "")

    def bind(self, name):
        """Makes a program, if it is running, run on the round's processor only."""
        if name in self.there:
            processor = self.processors[self.number % len(self.processors)]
            os.sched_setaffinity(self.there[name].process.pid, {processor})

    def answer(self, name, case, who):
        """Returns nanoseconds per operation, or None. A program that ends is left out from then on."""
        try:
            return self.there[name].time(case, who)
        except EOFError:
            code = self.there.pop(name).process.wait()
            print(f"{name} ended with {code} at {case} {who}", file=sys.stderr)
            return None

    def answer_or_again(self, name, case, who):
        """Does the same as `answer`. A program that ends is restarted once, for the other cells."""
        ns = self.answer(name, case, who)
        if name not in self.there and name not in self.failed:
            self.failed.add(name)
            self.start(name)
            self.bind(name)
        return ns

    def cell(self, column, program, case, who):
        """Returns nanoseconds per operation; None if the program does not have the case. It is not tried again then."""
        by_address = column.endswith("by address")
        if program not in self.there or (column, case) in self.nothing or (by_address and case not in BY_ADDRESS):
            return None
        asked = case.replace(":", "_raw:", 1) if by_address else case
        ns = self.answer_or_again(program, asked, who)
        if ns is None:
            self.nothing.add((column, case))
        return ns

    def round(self, number):
        """Times one cell after the other; yields a row for each cell that exists."""
        self.number = number
        for name in self.there:
            self.bind(name)
        columns = COLUMNS if number % 2 == 0 else COLUMNS[::-1]
        cells = [(column, program, case, who) for case in CASES for column, program, who in columns]
        for column, program, case, who in [(FLOOR, "ours", FLOOR, ""), *cells]:
            ns = self.cell(column, program, case, who)
            if ns is not None:
                yield {"round": number, "column": column, "case": case, "ns_per_op": ns}

    def end(self):
        """Ends the programs; returns the names of the programs that failed."""
        for name, program in self.there.items():
            if program.end() != 0:
                self.failed.add(name)
        return sorted(self.failed)


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    peers, rounds = pathlib.Path(sys.argv[2]), int(sys.argv[4])
    run = Run(programs(sys.argv[1], peers))
    with (pathlib.Path(sys.argv[3]) / "turns.json").open("w") as out:
        for number in range(rounds):
            for row in run.round(number):
                print(json.dumps(row), file=out, flush=True)
    failed = run.end()
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
