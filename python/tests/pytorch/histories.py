"""Records random histories of PyTorch's built-in allocator on a machine without a GPU, and verifies each with
``stratalloc replay --verify``: every address, every segment event and the final layout.

usage: histories.py SITE HEADERS STRATALLOC KEPT [--histories N] [--first SEED]
SITE contains the wheel's package ``torch``. HEADERS are folders with CUDA's headers, separated by colons. STRATALLOC
is the command line. Histories that are not exact are kept in the folder KEPT. Prints one line of a table; the exit
code is 1 if a history is not exact.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import warnings

MIB = 1 << 20
# Keys, each with the probability that a history has it, and its values. Keys that a version refuses are
# left out.
KEYS = {
    "expandable_segments": (0.35, lambda rng: "True"),
    "max_split_size_mb": (0.35, lambda rng: rng.choice([20, 32, 64, 128, 200])),
    "max_non_split_rounding_mb": (0.15, lambda rng: rng.choice([20, 64, 100])),
    "garbage_collection_threshold": (0.3, lambda rng: rng.choice([0.3, 0.5, 0.6, 0.8, 0.95])),
    "roundup_power2_divisions": (0.3, lambda rng: rng.choice([1, 2, 4, 8, 16, "[256:1,512:2,1024:4,>:8]"])),
    "large_segment_size_mb": (0.15, lambda rng: rng.choice([20, 30, 40, 100])),
    "throw_on_cudamalloc_oom": (0.1, lambda rng: "True"),
    "expandable_segments_reserve": (0.1, lambda rng: rng.choice([0.5, 1.0])),
    "per_process_memory_fraction": (0.1, lambda rng: rng.choice([0.5, 0.9])),
    "release_lock_on_cudamalloc": (0.1, lambda rng: "True"),
}
# A replacement of NVML: the functions that PyTorch's allocator looks up.
MANAGEMENT = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = (void *)8, 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { return *device = (void *)8, 0; }
/* Success, and a state of 0: the device has no fabric. 2.13 takes an error for its own. */
int nvmlDeviceGetGpuFabricInfoV(void) { return 0; }
/* Not supported. */
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count) { return *count = 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count) { return *count = 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
"""


def plan(seed, keys, records_pools):
    """Returns the settings of one random history."""
    rng = random.Random(f"plan {seed}")
    conf = {}
    for key in keys:
        chance, values = KEYS[key]
        if rng.random() < chance:
            conf[key] = values(rng)
    if "max_non_split_rounding_mb" in conf:
        conf.setdefault("max_split_size_mb", 64)
    # `max_split_size_mb` must not be less than the size of a large segment.
    if conf.get("max_split_size_mb", 1000) < conf.get("large_segment_size_mb", 0):
        conf["max_split_size_mb"] = 128
    expandable = "expandable_segments" in conf
    if not expandable:
        conf.pop("expandable_segments_reserve", None)
    memory_mib, fraction = rng.choice([1024, 2048, 4096, 8192, 81920]), rng.choice([1, 1, 0.3, 0.7])
    pools = rng.choice([0, 0, 0, 2, 3])
    if not records_pools and (expandable or memory_mib < 81920 or "per_process_memory_fraction" in conf):
        # Before 2.12 no entry has the pool of a request. The final segments show it only if no segment
        # was released and all segments are fixed.
        pools = 0
    return {
        "seed": seed,
        "conf": ",".join(f"{key}:{value}" for key, value in conf.items()),
        "memory_mib": memory_mib,
        "fraction": fraction,
        "streams": rng.choice([1, 1, 3, 5]),
        "late": rng.choice([0, 3]),
        "pools": pools,
        "new_addresses": rng.random() < 0.3,
        "steps": rng.randrange(300, 2500),
    }


class Program:
    """Allocates and frees at random."""

    def __init__(self, of):
        import torch

        self.torch, self.of, self.rng, self.live = torch, of, random.Random(of["seed"]), []
        torch.cuda.init()
        if of["fraction"] < 1:
            torch.cuda.set_per_process_memory_fraction(of["fraction"])
        more = [torch.cuda.Stream() for _ in range(of["streams"] - 1)]
        self.streams = [torch.cuda.default_stream(), *more]
        self.pools = [torch.cuda.MemPool() for _ in range(of["pools"])]

    def run(self):
        memory = self.torch.cuda.memory
        memory._record_memory_history(max_entries=10_000_000, context=None, stacks="python")
        for _ in range(self.of["steps"]):
            chance = self.rng.random()
            if chance < 0.003:
                memory.empty_cache()
            elif self.live and chance < (0.55 if len(self.live) > 60 else 0.42):
                self.free()
            else:
                self.allocate()
        return memory._snapshot()

    def size(self):
        below = [MIB, 10 * MIB, 200 * MIB]
        special = [512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 64 * MIB, 200 * MIB]
        (kind,) = self.rng.choices(range(4), [50, 25, 22, 3])
        if kind == 0:
            return int(2 ** self.rng.uniform(0, 20))
        return self.rng.choice(special) if kind == 3 else self.rng.randrange(below[kind - 1], below[kind])

    def allocate(self):
        torch, rng = self.torch, self.rng
        pool = rng.choice(self.pools) if self.pools and rng.random() < 0.4 else None
        try:
            with contextlib.ExitStack() as inside:
                inside.enter_context(torch.cuda.stream(rng.choice(self.streams)))
                if pool is not None:
                    inside.enter_context(torch.cuda.use_mem_pool(pool))
                self.live.append(torch.empty(self.size(), dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            rng.shuffle(self.live)
            del self.live[len(self.live) // 2 :]

    def free(self):
        at = self.rng.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        block = self.live.pop()
        if len(self.streams) > 1 and self.rng.random() < 0.4:
            block.record_stream(self.rng.choice(self.streams))


def configure(conf):
    import torch

    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (newer or torch.cuda.memory._set_allocator_settings)(conf)


def in_child(work):
    """Runs ``work`` in a forked process; returns whether it ends without an exception."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            with open(os.devnull, "w") as quiet:
                os.dup2(quiet.fileno(), 2)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(process, 0)[1] == 0


def record(folder, first, count):
    """Records histories into a folder. PyTorch is imported once, and each history runs in a forked
    process."""
    warnings.simplefilter("ignore")
    import pickle

    import torch

    minor = int(torch.__version__.split(".")[1])
    # In a forked process, so that the settings do not change this one.
    some = {key: KEYS[key][1](random.Random(0)) for key in KEYS}
    keys = [key for key, value in some.items() if in_child(lambda: configure(f"{key}:{value}"))]
    for seed in range(first, first + count):
        of = plan(seed, keys, minor >= 12)

        def work():
            os.environ["STAND_IN_MEMORY_MIB"] = str(of["memory_mib"])
            os.environ["STAND_IN_LATE"] = str(of["late"])
            if of["new_addresses"]:
                os.environ["STAND_IN_NEW"] = "1"
            if of["conf"]:
                configure(of["conf"])
            with open(folder / f"{seed}.pickle", "wb") as file:
                pickle.dump(Program(of).run(), file)

        of["recorded"] = in_child(work)
        print(json.dumps(of), flush=True)


def prepare(work, site, headers):
    """Builds the replacements of CUDA into the folder ``work``. Returns the environment in which the wheel in
    ``site`` runs over them."""
    stand_ins = pathlib.Path(__file__).resolve().with_name("stand_ins.py")
    environment = dict(os.environ, C_INCLUDE_PATH=headers)
    command = [sys.executable, stand_ins, site / "torch", work, "history_device.c"]
    subprocess.run(command, env=environment, check=True)
    (work / "management.c").write_text(MANAGEMENT)
    command = ["cc", "-w", "-shared", "-fPIC", "-o", work / "libnvidia-ml.so.1", work / "management.c"]
    subprocess.run(command, check=True)
    environment.update(LD_LIBRARY_PATH=str(work), PYTHONPATH=str(site))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    return environment


def verify(stratalloc, file, of):
    """Returns why a history is not exact, or nothing."""
    command = [stratalloc, "replay", "--verify", "--json", str(file), "--total-memory", f"{of['memory_mib']}MiB"]
    if of["fraction"] < 1:
        command += ["--memory-fraction", str(of["fraction"])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    row = json.loads(done.stdout) if done.stdout.startswith("{") else {}
    return row.get("first_mismatch") or done.stderr.strip() or f"exit code {done.returncode}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("headers")
    parser.add_argument("stratalloc")
    parser.add_argument("kept", type=pathlib.Path)
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    args = parser.parse_args()
    here = pathlib.Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        environment = prepare(work, args.site, args.headers)
        command = [sys.executable, here, "--record", work, str(args.first), str(args.histories)]
        recorder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        differing = []
        done = 0
        for line in recorder.stdout:
            of, done = json.loads(line), done + 1
            file = work / f"{of['seed']}.pickle"
            why = verify(args.stratalloc, file, of) if of["recorded"] else "not recorded"
            if why:
                differing.append(of)
                args.kept.mkdir(parents=True, exist_ok=True)
                if file.exists():
                    (args.kept / file.name).write_bytes(file.read_bytes())
                (args.kept / f"{of['seed']}.json").write_text(json.dumps(dict(of, why=why), indent=1))
            file.unlink(missing_ok=True)
        failed = recorder.wait() != 0 or done < args.histories
    version = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; print(runpy.run_path(sys.argv[1])['__version__'])", args.site / "torch" / "version.py"],
        capture_output=True, text=True,
    ).stdout.split("+")[0].strip()
    print(f"{version:<10}{done:>10}{done - len(differing):>8}{len(differing):>12}", flush=True)
    sys.exit(bool(differing) or failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
