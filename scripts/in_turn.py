"""A program that times training steps, unchanged, under PyTorch's own allocator and ours, step by step in turn:

    python in_turn.py PROGRAM MODEL CONF PLUG [PAIRS]

PROGRAM is any Python program that is called as `PROGRAM MODE MODEL`, times each step between two calls of
`time.perf_counter` of its own and prints, last, a line of JSON with `step_ms_median` and `loss`. MODE is `native` or
what is to stand in PYTORCH_CUDA_ALLOC_CONF, or PLUG: `plug:LIBRARY:MALLOC:FREE`, as PyTorch loads a pluggable
allocator; ours finds its configuration in ALLOC_CONF. CONF is `native` or `expandable`, on both sides; with `-control`
behind it PyTorch's own stands on both.

Two such processes live side by side on the same two processors. The first of the two calls of a step waits for its
turn, the second passes it on, and neither's wait is inside of what is timed; nobody's step is timed while the other
runs. Who goes first changes from step to step and from pair to pair, and the next pair gets the next two processors. A
ratio is that of the medians that the two programs print, PAIRS times (8); told are their geometric mean with its 95 %
interval and each of them, and the losses. See `train_pairs.py` for why. Memory that such a program reads from the
device is that of both, so it is told by the program alone.
"""

import json
import os
import runpy
import subprocess
import sys
import time

from train_pairs import PROCESSORS, interval

CONFS = {"native": ("native", "backend:native"),
         "expandable": ("expandable_segments:True", "backend:native,expandable_segments:True")}


def take_turns(asked, told):
    """Lets the program's every second call of the clock wait for its turn, and the others pass it on."""
    clock, calls = time.perf_counter, 0

    def perf_counter():
        nonlocal calls
        if sys._getframe(1).f_globals.get("__name__") != "__main__":
            return clock()
        calls += 1
        if calls % 2 == 1:
            os.write(told, b"r")
            if not os.read(asked, 1):
                sys.exit("the other program ended")
            return clock()
        now = clock()
        os.write(told, b"d")
        return now

    time.perf_counter = perf_counter


class Program:
    """The program under one allocator."""

    def __init__(self, program, mode, model, conf):
        (asked, self.ask), (self.told, told) = os.pipe(), os.pipe()
        self.command = [sys.executable, __file__, "--in-turn", str(asked), str(told), program, mode, model]
        variables = os.environ | {"ALLOC_CONF": conf, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            self.command, pass_fds=(asked, told), stdout=subprocess.PIPE, text=True, env=variables)
        os.close(asked)
        os.close(told)

    def hear(self, what):
        """Waits for a word of the program; False once it has closed its end."""
        word = os.read(self.told, 1)
        if word and word != what:
            sys.exit(f"{' '.join(self.command)} calls its clock in another order")
        return word == what

    def step(self):
        os.write(self.ask, b"g")
        return self.hear(b"d")

    def end(self):
        os.close(self.ask)
        printed = self.process.stdout.read().splitlines()
        if self.process.wait() != 0 or not printed:
            sys.exit(f"{' '.join(self.command)} ended with {self.process.returncode}")
        return json.loads(printed[-1])


def pair(sides, model, first):
    """What the two programs of a pair print, and how many steps were taken in turn."""
    os.sched_setaffinity(0, {PROCESSORS[(2 * first + one) % len(PROCESSORS)] for one in (0, 1)})
    orders = [(0, 1), (1, 0)]
    programs = {side: Program(*sides[side][:2], model, sides[side][2]) for side in orders[first % 2]}
    steps = 0
    # Both are asked before the first step: neither starts up while the other is timed.
    while all([programs[side].hear(b"r") for side in (0, 1)]):
        if not all([programs[side].step() for side in orders[(steps + first) % 2]]):
            break
        steps += 1
    return programs[0].end(), programs[1].end(), steps


def main():
    if sys.argv[1:2] == ["--in-turn"]:
        take_turns(int(sys.argv[2]), int(sys.argv[3]))
        sys.argv = sys.argv[4:]
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    conf = sys.argv[3].removesuffix("-control") if 5 <= len(sys.argv) <= 6 else None
    count = int((sys.argv[5:] + ["8"])[0])
    if conf not in CONFS or count < 1:
        sys.exit(__doc__)
    program, model, _, plug = sys.argv[1:5]
    theirs = (program, CONFS[conf][0], "")
    ours = theirs if sys.argv[3].endswith("-control") else (program, plug, CONFS[conf][1])
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
