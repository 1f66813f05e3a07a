"""PyTorch's own allocator against ours, step by step, on a machine that others use, too:

    python train_pairs.py MODEL CONF LIBRARY [PAIRS] [STEPS]

CONF is `native` or `expandable`; with `-control` behind it PyTorch's own stands on both sides, which tells what the
machine makes of equals. Two processes live side by side, one under each allocator, and take turns: step number n, the
same work in both (same seeds, same shapes), is done by one and right after by the other, and every other time the other
way round. So whoever else uses the machine slows both alike, and a ratio of two steps is fair where a ratio of two
processes is not. Both are kept on the same two processors, the next pair on the next two and started the other way
round. STEPS are timed (40, an even number) after eight that warm up, by each of PAIRS pairs of processes (8): two equal
processes differ by a few parts in a hundred for as long as they live, so it takes several.

Who goes second in a turn finds the caches as the other left them, so each two turns, one of each order, make one ratio,
and a pair's is the median of these. Told are the geometric mean of the pairs' with its 95 % interval and each of them,
of the whole step and of the processors' time until its last call to the device has been made, and whether the losses
agree. What `train.py` needs is needed here; memory is told by `train.py` alone.
"""

import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

CONFS = {
    "native": ("torch", "ours:backend:native"),
    "native-control": ("torch", "torch"),
    "expandable": ("torch:expandable_segments:True", "ours:backend:native,expandable_segments:True"),
    "expandable-control": ("torch:expandable_segments:True",) * 2,
}
WARM_UP = 8
PROCESSORS = sorted(os.sched_getaffinity(0))
# Student's t for 95 %, by degrees of freedom.
STUDENT = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13]


class Trainer:
    """A process that makes a step when told."""

    def __init__(self, model, allocator, library):
        train = pathlib.Path(__file__).with_name("train.py")
        self.command = [sys.executable, str(train), model, allocator, library, "--turns"]
        pipe = subprocess.PIPE
        same = os.environ | {"PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, text=True, env=same)

    def step(self):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.failed()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return self.failed()

    def end(self):
        self.process.stdin.close()
        if self.process.wait() != 0:
            self.failed()

    def failed(self):
        sys.exit(f"{' '.join(self.command)} ended with {self.process.wait()}")


def turns(model, conf, library, steps, first):
    """The steps of one pair of processes: (PyTorch's, ours) of each."""
    os.sched_setaffinity(0, {PROCESSORS[(2 * first + one) % len(PROCESSORS)] for one in (0, 1)})
    orders = [(0, 1), (1, 0)]
    trainers = {side: Trainer(model, CONFS[conf][side], library) for side in orders[first % 2]}
    told = []
    for number in range(WARM_UP + steps):
        step = {side: trainers[side].step() for side in orders[(number + first) % 2]}
        told.append((step[0], step[1]))
    for trainer in trainers.values():
        trainer.end()
    return told[WARM_UP:]


def ratio(steps, key):
    """The median of the ratios of each two turns, one of each order."""
    ratios = [ours[key] / theirs[key] for theirs, ours in steps]
    return statistics.median(math.sqrt(one * next_one) for one, next_one in zip(ratios[::2], ratios[1::2]))


def interval(ratios):
    """The geometric mean, and within which factor of it the true one lies with 95 %."""
    logs = [math.log(ratio) for ratio in ratios]
    student = STUDENT[min(len(logs) - 1, len(STUDENT)) - 1] if len(logs) > 1 else math.inf
    spread = statistics.stdev(logs) if len(logs) > 1 else 1
    return math.exp(statistics.mean(logs)), math.exp(student * spread / math.sqrt(len(logs)))


def tell(what, key, pairs):
    def median(pair, side):
        return statistics.median(step[side][key] for step in pair)

    ratios = [ratio(pair, key) for pair in pairs]
    mean, factor = interval(ratios)
    theirs, ours = (statistics.median(median(pair, side) for pair in pairs) for side in (0, 1))
    print(f"  {what}: {mean:.3f} ({mean / factor:.3f} to {mean * factor:.3f}); "
          f"medians PyTorch {theirs:.2f} ms, ours {ours:.2f} ms; pairs {' '.join(f'{one:.3f}' for one in ratios)}")


def main():
    if not 4 <= len(sys.argv) <= 6 or sys.argv[2] not in CONFS:
        sys.exit(__doc__)
    model, conf, library = sys.argv[1:4]
    count, steps = (int(text) for text in (sys.argv[4:] + ["8", "40"][len(sys.argv) - 4:]))
    if count < 1 or steps < 2 or steps % 2 == 1:
        sys.exit(__doc__)
    pairs = [turns(model, conf, library, steps, first) for first in range(count)]
    print(f"{model}, {conf}: {count} pairs of processes, {steps} steps of each; ours against PyTorch's")
    tell("step", "ms", pairs)
    tell("processors' time", "cpu_ms", pairs)
    unequal = sum(theirs["loss"] != ours["loss"] for pair in pairs for theirs, ours in pair)
    last = pairs[-1][-1]
    print(f"  losses: {unequal} of {count * steps} differ, the last are {last[0]['loss']} and {last[1]['loss']}")


if __name__ == "__main__":
    main()
