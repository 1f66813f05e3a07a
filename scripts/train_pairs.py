"""PyTorch's own allocator against ours, on a machine that others use, too:

    python train_pairs.py MODEL CONF LIBRARY [PROCESSES]

CONF is `native` or `expandable`, PROCESSES how many there are of each (4). They run in turn, and every other
pair the other way round. Step number n is the same work in each process (same seeds, same shapes), so each step is
represented by its least time in all processes of its allocator: others who use the machine only make it more. Told
are the ratio of the sums of these, the median of their ratios, the ratio of the processes' medians, and whether
losses and memory agree. What `train.py` needs is needed here.
"""

import json
import pathlib
import statistics
import subprocess
import sys

CONFS = {
    "native": ("torch", "ours:backend:native"),
    "expandable": ("torch:expandable_segments:True", "ours:backend:native,expandable_segments:True"),
}


def run(model, allocator, library):
    """What one process says."""
    train = pathlib.Path(__file__).with_name("train.py")
    command = [sys.executable, str(train), model, allocator, library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    if len(sys.argv) not in (4, 5) or sys.argv[2] not in CONFS:
        sys.exit(__doc__)
    model, conf, library = sys.argv[1:4]
    count = int(sys.argv[4]) if len(sys.argv) == 5 else 4
    theirs, ours = [], []
    for pair in range(count):
        sides = [(CONFS[conf][0], theirs), (CONFS[conf][1], ours)]
        for allocator, side in sides if pair % 2 == 0 else sides[::-1]:
            side.append(run(model, allocator, library))

    def least(side):
        return [min(times) for times in zip(*(one["steps_ms"] for one in side))]

    def medians(side):
        return [one["step_ms"] for one in side]

    their_steps, our_steps = least(theirs), least(ours)
    ratios = [a / b for a, b in zip(our_steps, their_steps)]
    print(f"{model}, {conf}: {count} processes each, {len(ratios)} steps")
    print(f"  a step, ms: PyTorch {medians(theirs)}, ours {medians(ours)}")
    print(f"  least of each step, ours against PyTorch's: {sum(our_steps) / sum(their_steps):.3f} in sum, "
          f"{statistics.median(ratios):.3f} in the median")
    print(f"  medians of the processes: {statistics.mean(medians(ours)) / statistics.mean(medians(theirs)):.3f}")
    for what in ("loss", "used_mib"):
        print(f"  {what}: PyTorch {sorted({one[what] for one in theirs})}, ours {sorted({one[what] for one in ours})}")


if __name__ == "__main__":
    main()
