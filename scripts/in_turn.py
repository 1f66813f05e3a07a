"""Runs an unchanged training program under PyTorch's own allocator and ours, step by step in turn:

    python in_turn.py PROGRAM MODEL CONF OURS [PAIRS]

PROGRAM is `train.py`, or any Python program that is called as `PROGRAM MODE MODEL`, measures each step between two
calls of `time.perf_counter`, calls that for nothing else and prints, last, a line of JSON with `step_ms_median` and
`loss`. CONF is `native` or `expandable`, on both sides. With `-control` appended, both sides use PyTorch's own
allocator, which shows the ratio of equal programs on this machine. For PyTorch's allocator MODE is `native` or the
value of PYTORCH_CUDA_ALLOC_CONF; for ours it is OURS, from which the program finds the library: `ours:LIBRARY` for
`train.py`. ALLOC_CONF has the configuration of ours.

Two such processes run at the same time on the same two processors, but only one of them works at a time. The first of
the two clock calls of a step waits for the program's turn. The turn ends when the program waits for its next turn or
ends. So no step is timed while the other program works, no wait is part of a step, and other load on the machine slows
both alike. (Two processes run one after the other could not be compared on a shared machine.) The order changes from
step to step and from pair to pair, and the next pair runs on the next two processors.

The ratio of a pair is that of the medians that its two programs print. The script prints the ratios and losses of PAIRS
pairs of processes (8), and the geometric mean of the ratios with its 95 % interval. Several pairs are needed, because
two equal processes differ by a few per cent as long as they live. Used memory that a program reads from the device
includes that of the other process. The script ends with an error if a program prints another median than the one of
the times between its clock calls, or if the two programs take different numbers of steps.
"""

import atexit
import json
import math
import os
import runpy
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

CONFS = {"native": ("native", "backend:native"),
         "expandable": ("expandable_segments:True", "backend:native,expandable_segments:True")}
PROCESSORS = sorted(os.sched_getaffinity(0))
# Student's t for 95 %, by degrees of freedom.
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13]
# Environment variables that would override MODE.
SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# A message from a program: true if it waits for its turn and false when it ends, and the milliseconds of
# the previous step, which are NaN before the first step.
WORD = struct.Struct("?d")


def take_turns(asked, told):
    """Makes the first clock call of each step wait for the program's turn and send the time of the previous step."""
    clock, calls, start, last_ms = time.perf_counter, 0, 0.0, math.nan

    def perf_counter():
        nonlocal calls, start, last_ms
        if sys._getframe(1).f_globals.get("__name__") != "__main__":
            return clock()
        calls += 1
        if calls % 2 == 1:
            os.write(told, WORD.pack(True, last_ms))
            if not os.read(asked, 1):
                # Ends the process instead of raising an exception, which the program could catch.
                os._exit(1)
            start = clock()
            return start
        now = clock()
        last_ms = (now - start) * 1e3
        return now

    def tell_last():
        os.write(told, WORD.pack(False, last_ms))

    time.perf_counter = perf_counter
    atexit.register(tell_last)


class Program:
    """A process of the program under one allocator."""

    def __init__(self, program, mode, model, conf):
        (asked, self.ask), (self.told, told) = os.pipe(), os.pipe()
        self.command = [sys.executable, __file__, "--in-turn", str(asked), str(told), program, mode, model]
        variables = {name: text for name, text in os.environ.items() if name not in SETTINGS}
        variables |= {"ALLOC_CONF": conf, "PYTHONHASHSEED": "0"}
        # Output goes to a file, because a pipe that is not read would block the program.
        self.printed = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.command, pass_fds=(asked, told), stdout=self.printed, env=variables)
        os.close(asked)
        os.close(told)
        self.ms = []

    def wait(self):
        """Returns when the program waits for its turn; returns False if the program has ended."""
        while word := os.read(self.told, WORD.size):
            waits, ms = WORD.unpack(word)
            if not math.isnan(ms):
                self.ms.append(ms)
            if waits:
                return True
        return False

    def step(self):
        os.write(self.ask, b"g")
        return self.wait()

    def end(self):
        """Returns the last line that the program printed, and the number of steps it took."""
        if self.process.wait() != 0:
            self.failed(f"ended with {self.process.returncode}")
        steps = sorted(self.ms)
        self.printed.seek(0)
        try:
            told = json.loads(self.printed.read().splitlines()[-1])
            printed, _ = told["step_ms_median"], told["loss"]
        except (IndexError, KeyError, TypeError, ValueError):
            self.failed("did not print its figures last")
        if not steps:
            self.failed("timed no step between two calls of time.perf_counter")
        low, high = steps[(len(steps) - 1) // 2], steps[len(steps) // 2]
        if not low * 0.99 - 0.02 < printed < high * 1.01 + 0.02:
            self.failed(f"printed {printed} ms as the median, but {high:.2f} passed between its calls")
        return told, len(steps)

    def stop(self):
        os.close(self.ask)
        os.close(self.told)
        self.process.kill()
        self.process.wait()

    def failed(self, how):
        sys.exit(f"{' '.join(self.command)} {how}")


def pair(sides, model, first):
    """Runs a pair of programs. Returns their last lines, and how many steps each took."""
    os.sched_setaffinity(0, {PROCESSORS[(2 * first + one) % len(PROCESSORS)] for one in (0, 1)})
    orders = [(0, 1), (1, 0)]
    programs = {}
    try:
        for side in orders[first % 2]:
            programs[side] = Program(*sides[side][:2], model, sides[side][2])
        # Both programs wait before their first step, so that neither starts up while the other is timed.
        live, turns = [programs[side].wait() for side in (0, 1)], 0
        while any(live):
            for side in orders[(turns + first) % 2]:
                live[side] = live[side] and programs[side].step()
            turns += 1
        (one, steps), (two, others) = programs[0].end(), programs[1].end()
        if steps != others:
            programs[1].failed(f"took {others} steps, PyTorch's {steps}")
        return one, two, steps
    finally:
        for program in programs.values():
            program.stop()


def interval(ratios):
    """Returns the geometric mean, and the factor by which its 95 % interval extends below and above it."""
    logs = [math.log(ratio) for ratio in ratios]
    student = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1] if len(logs) > 1 else math.inf
    spread = statistics.stdev(logs) if len(logs) > 1 else 1
    return math.exp(statistics.mean(logs)), math.exp(student * spread / math.sqrt(len(logs)))


def main():
    if sys.argv[1:2] == ["--in-turn"]:
        ends = [int(text) for text in sys.argv[2:4]]
        for end in ends:
            # Otherwise processes that the program starts would keep the pipes open after the program's
            # end.
            os.set_inheritable(end, False)
        take_turns(*ends)
        sys.argv = sys.argv[4:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    conf = sys.argv[3].removesuffix("-control") if 5 <= len(sys.argv) <= 6 else None
    count = int((sys.argv[5:] + ["8"])[0])
    if conf not in CONFS or count < 1:
        sys.exit(__doc__)
    program, model, _, library = sys.argv[1:5]
    # Raises an exception, so that the programs are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    theirs = (program, CONFS[conf][0], "")
    ours = theirs if sys.argv[3].endswith("-control") else (program, library, CONFS[conf][1])
    ratios = []
    for number in range(count):
        one, two, steps = pair((theirs, ours), model, number)
        ratios.append(two["step_ms_median"] / one["step_ms_median"])
        print(f"  PyTorch {one['step_ms_median']} ms, ours {two['step_ms_median']} ms, {ratios[-1]:.3f}; {steps} steps "
              f"of each, losses {one['loss']} and {two['loss']}", flush=True)
    mean, factor = interval(ratios)
    print(f"{model}, {sys.argv[3]}: a step, ours against PyTorch's: {mean:.3f} ({mean / factor:.3f} to "
          f"{mean * factor:.3f}), {len(ratios)} pairs of processes", flush=True)


if __name__ == "__main__":
    main()
