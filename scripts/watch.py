"""Times the training steps of a Llama over PyTorch's own allocator, with `stratalloc.watch()` in turn with
none, and checks the reports of failures on a GPU:

    python scripts/watch.py [COMMAND]

COMMAND is the command-line program; without it, the package finds it. Needs one GPU with 80 GiB of free memory,
PyTorch and `transformers`. Takes at most four minutes. The parts, each in its own processes:

    turns       steps of 50 ms or more, in one process: the time with `watch` is at most 1.03 of that
                without (the median of rounds of 12 steps). Small steps, whose time is that of the processor, are timed for comparison.
    fragmented  a program that fails under PyTorch's defaults; it runs with the setting that the report names
    training    the Llama out of memory: the report names code

Prints a table last. The exit code is 0 if everything holds.
"""

import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "python" / "tests" / "pytorch")]
MOST_TIME = 1.03
LEAST_STEP_MS = 50
# With this batch, most steps wait for the GPU on an H100, and take more than 50 ms.
LARGE_SCALE = 56
ROUNDS, STEPS = 8, 12


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def step(scale):
        shape = (scale * random.choice([1, 2, 4]), random.randrange(64, 512))
        words = torch.randint(0, 32000, shape, device="cuda")
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def times_of(step, scale):
    """Returns the milliseconds of each of some steps, which have the same sizes at each call."""
    import torch

    random.seed(1)
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(scale)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def host_mib():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))


def turns(folder):
    """Prints the times of steps with and without `watch`."""
    import torch

    import stratalloc

    torch.manual_seed(0)
    step, rows = llama(), []
    requests = lambda: torch.cuda.memory_stats()["allocation.all.allocated"]  # noqa: E731
    for scale in (1, LARGE_SCALE):
        for _ in range(2):
            times_of(step, scale)
        # The sizes of a round are those of every other, so the n-th steps of both are compared.
        pairs, ratios, before, requests_before = [], [], host_mib(), requests()
        for turn in range(ROUNDS):
            both = {}
            for watched in ((True, False), (False, True))[turn % 2]:
                if watched:
                    # The ring is full after some steps, so old entries are dropped, as in a long run.
                    with stratalloc.watch(folder=folder, ring="16MiB"):
                        both[watched] = times_of(step, scale)
                else:
                    both[watched] = times_of(step, scale)
            pairs += zip(both[True], both[False])
            ratios.append(sum(both[True]) / sum(both[False]))
        rows.append({
            "scale": scale,
            "with_ms": statistics.median(one for one, _ in pairs),
            "without_ms": statistics.median(one for _, one in pairs),
            # A run is a round of steps, whose first ones begin the recording.
            "ratio": statistics.median(ratios),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "ratio_of_steps": statistics.median(one / other for one, other in pairs),
            "requests_a_step": (requests() - requests_before) // (2 * ROUNDS * STEPS),
            "host_mib": host_mib() - before,
        })
    print(json.dumps({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}))


def limit(mib):
    import torch

    torch.cuda.set_per_process_memory_fraction((mib << 20) / torch.cuda.get_device_properties(0).total_memory)


def fails(work, folder):
    """Prints the report of a failure."""
    import torch

    import stratalloc

    with stratalloc.watch(folder=folder, seconds=60):
        try:
            start = time.monotonic()
            work()
            error = None
        except torch.cuda.OutOfMemoryError as failure:
            error = failure
    note = "\n".join(getattr(error, "__notes__", [])) or str(error)
    print(json.dumps({"note": note, "seconds": time.monotonic() - start}))


def fragmented(folder):
    import watched

    limit(2048)
    fails(watched.fragmented, folder)


def fits():
    import watched

    limit(2048)
    watched.fragmented()


def training(folder):
    def work():
        step = llama()
        for scale in (1, 1, 2, 4, 8, 16, 32, 64):
            for _ in range(3):
                step(scale)

    limit(8192)
    fails(work, folder)


def child(part, *words, **more):
    done = subprocess.run(
        [sys.executable, __file__, "--part", part, *words], env={**os.environ, **more}, capture_output=True, text=True
    )
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return None
    return json.loads((done.stdout.splitlines() or ["{}"])[-1])


def main(command):
    if command:
        os.environ["STRATALLOC_COMMAND"] = os.path.abspath(command)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        found = child("turns", folder)
        for row in found["rows"] if found else []:
            print(json.dumps({**row, "torch": found["torch"], "device": found["device"]}))
            name = f"turns: a step of {row['without_ms']:.1f} ms"
            text = f"{row['ratio']:.4f} of the time, a step {row['ratio_of_steps']:.4f}"
            is_long = row["without_ms"] >= LEAST_STEP_MS
            holds = row["scale"] == 1 or (is_long and row["ratio"] <= MOST_TIME)
            table.append((name, f"{text}, {row['requests_a_step']} requests", holds))
        if not found:
            table.append(("turns", "failed", False))
        for part, words in (("fragmented", "watched.py:.*activations"), ("training", "held: .*\\.py:[0-9]+")):
            report = child(part, folder)
            note = report["note"] if report else ""
            print(note)
            seconds = f"{report['seconds'] if report else 0:.1f} s"
            table.append((f"{part}: a line of code", seconds, bool(re.search(words, note))))
            if part == "fragmented":
                setting = re.search("set: PYTORCH_CUDA_ALLOC_CONF=(.*)", note)
                runs = setting and child("fits", PYTORCH_CUDA_ALLOC_CONF=setting[1]) is not None
                table.append(("fragmented: runs with", setting[1] if setting else "no setting", bool(runs)))
                table.append(("fragmented: fails without", "", child("fits") is None))
    for name, text, holds in table:
        print(f"{'holds' if holds else 'FAILS':<6} {name:<34} {text}")
    return 0 if all(holds for _, _, holds in table) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        parts = {"turns": turns, "fragmented": fragmented, "training": training, "fits": fits}
        parts[sys.argv[2]](*sys.argv[3:])
    else:
        sys.exit(main(*(sys.argv[1:] or [""])))
