"""Records random histories of PyTorch's built-in allocator on a machine without a GPU, and verifies each with
``stratalloc replay --verify`` under its true limit: every address, every segment event and the final layout. If a
request of a history failed or was retried, its limit is also inferred, without the true one.

usage: histories.py SITE HEADERS STRATALLOC KEPT [--histories N] [--seed SEED] [--only NAME[,NAME]]
SITE contains the wheel's package ``torch``. HEADERS are folders with CUDA's headers, separated by colons.
STRATALLOC is the command line. N histories are recorded under each configuration of ``CONFIGURATIONS``, with the
seeds from SEED on; SEED may be ``random``. Histories that are not exact are kept in the folder KEPT. Prints one line
of a table for each configuration; the exit code is 1 if a history is not exact.

Before 2.12 no entry has the pool of a request. So inexact histories with pools or captures of these versions are
expected, and counted apart.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import warnings

MIB = 1 << 20
# Keys, each with the probability that a history of the configuration `random` has it, and its values. Keys that a
# version refuses are left out.
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """The device, the settings and the kinds of calls of a history."""

    conf: str = ""
    memory_mib: int = 81920
    # The share of the device's memory that the program may reserve.
    fraction: float = 1
    streams: int = 1
    # The share of frees that wait for another stream.
    waits: float = 0
    # How many queries find an event not ready.
    late: int = 0
    pools: int = 0
    # Whether pools end, and others take their place.
    pools_end: bool = False
    # "own": graphs are captured into pools of their own. "handle": several share a pool.
    captures: str = ""
    new_addresses: bool = False
    steps: int = 4000

    @property
    def limit_mib(self):
        return self.fraction * self.memory_mib


EXPANDABLE, SPLIT = "expandable_segments:True", "max_split_size_mb:64"
LARGE = "large_segment_size_mb:64,max_split_size_mb:64"
SMALL = Plan(memory_mib=8192)


def collects(threshold):
    return f"garbage_collection_threshold:{threshold}"


def several(count, late=0):
    """Returns the fields of a program whose streams use each other's blocks."""
    return {"streams": count, "waits": 0.4, "late": late}


def on(plan=SMALL, **fields):
    return dataclasses.replace(plan, **fields)


# Each needs rules of its own in a replay. A number at the end is the percentage of the device that may be reserved.
CONFIGURATIONS = {
    "default": Plan(),
    "streams": Plan(**several(3)),
    "streams.late": Plan(**several(3, late=3)),
    "pools": Plan(pools=2),
    "pools.end": Plan(pools=3, pools_end=True),
    "round4": Plan("roundup_power2_divisions:4"),
    "full": Plan(memory_mib=3000),
    "small": Plan(memory_mib=2048),
    "small.split": Plan(SPLIT, memory_mib=2048, streams=2),
    "small.exp": Plan(EXPANDABLE, memory_mib=2048),
    "large.split": Plan(LARGE, memory_mib=4096),
    "large.split.25": on(conf=LARGE, fraction=0.25, streams=2),
    "40": on(fraction=0.4),
    "40.streams.late": on(fraction=0.4, **several(3, late=3)),
    "10": on(fraction=0.1),
    "15.streams.late": on(fraction=0.15, **several(3, late=3)),
    "15.split.streams.late": on(conf=SPLIT, fraction=0.15, **several(3, late=3)),
    "round4.25": on(conf="roundup_power2_divisions:4", fraction=0.25, streams=3),
    "split.25": on(conf=SPLIT, fraction=0.25),
    "split.25.new": on(conf=SPLIT, fraction=0.25, streams=3, new_addresses=True),
    "gc.30": on(conf=collects(0.6), fraction=0.3),
    "gc.60": on(conf=collects(0.5), fraction=0.6),
    "gc.60.never": on(conf=collects(0.95), fraction=0.6),
    "gc.split.30": on(conf=f"{collects(0.6)},{SPLIT}", fraction=0.3),
    "gc.split.10": on(conf=f"{collects(0.8)},{SPLIT}", fraction=0.1),
    "exp.40.streams.late": on(conf=EXPANDABLE, fraction=0.4, **several(3, late=3)),
    "exp.15.streams": on(conf=EXPANDABLE, fraction=0.15, **several(3)),
    "exp.gc.split.25": on(conf=f"{EXPANDABLE},{collects(0.6)},{SPLIT}", fraction=0.25),
    "pools.30": on(pools=2, fraction=0.3),
    "pools.end.30": on(pools=3, pools_end=True, fraction=0.3),
    "pools.end.streams.late.30": on(pools=3, pools_end=True, fraction=0.3, **several(3, late=3)),
    "pools.end.exp.30": on(conf=EXPANDABLE, pools=3, pools_end=True, fraction=0.3),
    "pools.split.20": on(conf=SPLIT, pools=2, fraction=0.2),
    "pools.gc.split.30": on(conf=f"{collects(0.6)},{SPLIT}", pools=2, fraction=0.3),
    "pools.exp.30": on(conf=EXPANDABLE, pools=2, fraction=0.3),
    "captures": Plan(captures="own"),
    "captures.streams.late": Plan(captures="own", **several(3, late=3)),
    "captures.handle": Plan(captures="handle"),
    "captures.handle.25": on(captures="handle", fraction=0.25),
    "captures.exp": Plan(EXPANDABLE, captures="own"),
    "captures.exp.25": on(conf=EXPANDABLE, captures="own", fraction=0.25),
    "captures.streams.late.25": on(captures="own", fraction=0.25, **several(3, late=3)),
    "captures.split.30": on(conf=SPLIT, captures="own", fraction=0.3),
    "captures.split.15": on(conf=SPLIT, captures="own", fraction=0.15),
    "captures.gc.25": on(conf=collects(0.6), captures="own", fraction=0.25),
    # Settings, device and calls are drawn too.
    "random": None,
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


def drawn(seed, keys, records_pools):
    """Returns a random plan. ``keys`` are those that the version accepts."""
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
    return Plan(
        conf=",".join(f"{key}:{value}" for key, value in conf.items()),
        memory_mib=memory_mib,
        fraction=fraction,
        streams=rng.choice([1, 1, 3, 5]),
        late=rng.choice([0, 3]),
        waits=0.4,
        pools=pools,
        new_addresses=rng.random() < 0.3,
        steps=rng.randrange(300, 2500),
        pools_end=records_pools and rng.random() < 0.5,
        captures=rng.choice(["", "", "own", "handle"]) if records_pools else "",
    )


class Program:
    """Allocates and frees at random."""

    def __init__(self, plan, seed):
        import torch

        self.torch, self.plan, self.rng = torch, plan, random.Random(seed)
        torch.cuda.init()
        if plan.fraction < 1:
            torch.cuda.set_per_process_memory_fraction(plan.fraction)
        more = [torch.cuda.Stream() for _ in range(plan.streams - 1)]
        self.streams = [torch.cuda.default_stream(), *more]
        # Live blocks with the number of their pool, -1 without one; pools with their numbers.
        self.live, self.pools = [], [(number, torch.cuda.MemPool()) for number in range(plan.pools)]
        # Graphs, each with the blocks that were allocated in its capture.
        self.graphs, self.handle = [], None

    def run(self):
        memory = self.torch.cuda.memory
        memory._record_memory_history(max_entries=10_000_000, context=None, stacks="python")
        for _ in range(self.plan.steps):
            chance = self.rng.random()
            if chance < 0.002:
                memory.empty_cache()
            elif self.plan.captures and chance < 0.004:
                self.capture()
            elif self.plan.pools_end and self.pools and chance < 0.006:
                self.end_pool()
            elif self.live and self.rng.random() < (0.52 if len(self.live) > 60 else 0.4):
                self.free()
            else:
                self.allocate()
        return memory._snapshot()

    def size(self):
        below = [MIB, 10 * MIB, 200 * MIB]
        special = [512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 64 * MIB, 128 * MIB]
        (kind,) = self.rng.choices(range(4), [50, 25, 22, 3])
        if kind == 0:
            return int(2 ** self.rng.uniform(0, 20))
        return self.rng.choice(special) if kind == 3 else self.rng.randrange(below[kind - 1], below[kind])

    def empty(self):
        return self.torch.empty(self.size(), dtype=self.torch.uint8, device="cuda")

    def allocate(self):
        torch, rng = self.torch, self.rng
        number, pool = rng.choice(self.pools) if self.pools and rng.random() < 0.4 else (-1, None)
        try:
            with contextlib.ExitStack() as inside:
                inside.enter_context(torch.cuda.stream(rng.choice(self.streams)))
                if pool is not None:
                    inside.enter_context(torch.cuda.use_mem_pool(pool))
                self.live.append((self.empty(), number))
        except torch.cuda.OutOfMemoryError:
            rng.shuffle(self.live)
            del self.live[len(self.live) // 2 :]

    def free(self):
        at = self.rng.randrange(len(self.live))
        self.live[at], self.live[-1] = self.live[-1], self.live[at]
        block, _ = self.live.pop()
        if len(self.streams) > 1 and self.rng.random() < self.plan.waits:
            block.record_stream(self.rng.choice(self.streams))

    def end_pool(self):
        """Replaces a pool by a new one."""
        number, _ = self.pools.pop(self.rng.randrange(len(self.pools)))
        if "expandable_segments" in self.plan.conf:
            # PyTorch deletes such a pool even if blocks of it are live, and uses it when they are freed.
            self.live = [(block, of) for block, of in self.live if of != number]
        newest = max((number for number, _ in self.pools), default=number)
        self.pools.append((max(number, newest) + 1, self.torch.cuda.MemPool()))

    def capture(self):
        """Captures a graph, and drops another if there are more than four."""
        torch, rng = self.torch, self.rng
        torch.cuda.synchronize()
        graph, blocks = torch.cuda.CUDAGraph(), []
        if self.plan.captures == "handle" and not self.graphs:
            # A handle must not be used after all its graphs were dropped.
            self.handle = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self.handle):
            for _ in range(rng.randrange(1, 30)):
                if self.live and rng.random() < 0.05:
                    del self.live[rng.randrange(len(self.live))]
                elif blocks and rng.random() < 0.4:
                    del blocks[rng.randrange(len(blocks))]
                else:
                    with contextlib.suppress(torch.cuda.OutOfMemoryError):
                        blocks.append(self.empty())
        self.graphs.append((graph, blocks))
        if len(self.graphs) > 4 or rng.random() < 0.1:
            del self.graphs[rng.randrange(len(self.graphs))]


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


def record(folder, first, count, names):
    """Records histories into a folder. PyTorch is imported once, and each history runs in a forked
    process."""
    warnings.simplefilter("ignore")
    import pickle

    import torch

    minor = int(torch.__version__.split(".")[1])
    # In a forked process, so that the settings do not change this one.
    some = {key: KEYS[key][1](random.Random(0)) for key in KEYS}
    keys = [key for key, value in some.items() if in_child(lambda: configure(f"{key}:{value}"))]
    refused = [name for name in names if not in_child(lambda: configure((CONFIGURATIONS[name] or Plan()).conf))]
    print(json.dumps(refused), flush=True)
    for name in names:
        for seed in range(first, first + count) if name not in refused else ():
            plan = CONFIGURATIONS[name] or drawn(seed, keys, minor >= 12)
            file, figures = folder / f"{name}.{seed}.pickle", folder / f"{name}.{seed}.stats"

            def work():
                os.environ["STAND_IN_MEMORY_MIB"] = str(plan.memory_mib)
                os.environ["STAND_IN_LATE"] = str(plan.late)
                if plan.new_addresses:
                    os.environ["STAND_IN_NEW"] = "1"
                if plan.conf:
                    configure(plan.conf)
                file.write_bytes(pickle.dumps(Program(plan, seed).run()))
                figures.write_text(json.dumps(torch.cuda.memory_stats()))

            row = dict(name=name, seed=seed, plan=dataclasses.asdict(plan), recorded=in_child(work))
            if row["recorded"]:
                stats = json.loads(figures.read_text())
                row.update(failed=stats["num_ooms"], retried=stats["num_alloc_retries"])
                row["names_pools"] = minor >= 12 or not (plan.pools or plan.captures)
            print(json.dumps(row), flush=True)


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


class Checked:
    """A history, why it is not exact, and whether its limit is found."""

    def __init__(self, stratalloc, folder, row):
        self.row, self.plan = row, Plan(**row["plan"])
        self.file = folder / f"{row['name']}.{row['seed']}.pickle"
        self.why = self.verify(stratalloc) if row["recorded"] else "not recorded"
        # Only programs that met their limit show it.
        self.met_limit = row["recorded"] and row["failed"] + row["retried"] > 0
        self.limit_mib = self.inferred_mib(stratalloc) if self.met_limit else None

    @property
    def is_expected(self):
        return bool(self.why and self.row["recorded"] and not self.row["names_pools"])

    @property
    def finds_limit(self):
        true_mib = self.plan.limit_mib
        return self.limit_mib is not None and abs(self.limit_mib - true_mib) <= true_mib / 100

    def verify(self, stratalloc):
        command = [stratalloc, "replay", "--verify", self.file, "--total-memory", f"{self.plan.memory_mib}MiB"]
        if self.plan.fraction < 1:
            command += ["--memory-fraction", str(self.plan.fraction)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return None
        first = re.findall(r"^  first: (at event .*)", done.stdout, re.MULTILINE)
        return first[0] if first else done.stderr.strip() or f"exit code {done.returncode}"

    def inferred_mib(self, stratalloc):
        """Returns the limit that the recording alone shows."""
        done = subprocess.run([stratalloc, "replay", "--json", self.file], capture_output=True, text=True)
        row = json.loads(done.stdout) if done.returncode == 0 else {}
        return row["limit_bytes"] / MIB if row.get("limit_inferred") else None

    def keep(self, kept):
        """Removes the files of a history. Copies one that is not exact to the folder ``kept`` first."""
        if self.file.exists() and self.why and not self.is_expected:
            kept.mkdir(parents=True, exist_ok=True)
            (kept / self.file.name).write_bytes(self.file.read_bytes())
            row = dict(self.row, why=self.why, limit_mib=self.limit_mib)
            (kept / self.file.with_suffix(".json").name).write_text(json.dumps(row, indent=1))
        self.file.unlink(missing_ok=True)
        self.file.with_suffix(".stats").unlink(missing_ok=True)


TABLE = "{:<10}{:<27}{:>10}{:>8}{:>11}{:>16}{:>12}{:>13}"
HEADINGS = "version", "configuration", "histories", "exact", "not exact", "pools unknown", "met a limit", "limit found"


def summary(version, name, checked):
    """Returns a line of the table."""
    exact = sum(not one.why for one in checked)
    expected = sum(one.is_expected for one in checked)
    met = [one for one in checked if one.met_limit]
    found = f"{sum(one.finds_limit for one in met)} of {len(met)}" if met else "-"
    wrong = len(checked) - exact - expected
    return TABLE.format(version, name, len(checked), exact, wrong, expected or "-", len(met), found)


def checks(recorder, stratalloc, folder, kept):
    """Yields the histories of a recorder, checked on all processors."""
    workers = os.cpu_count() or 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        pending = []
        for line in recorder.stdout:
            pending.append(pool.submit(Checked, stratalloc, folder, json.loads(line)))
            # The recorder waits while its output is not read, so that few files exist at a time.
            while len(pending) > 2 * workers:
                checked = pending.pop(0).result()
                checked.keep(kept)
                yield checked
        for one in pending:
            checked = one.result()
            checked.keep(kept)
            yield checked
        if recorder.wait() != 0:
            sys.exit(f"the recorder ended with {recorder.returncode}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("headers")
    parser.add_argument("stratalloc")
    parser.add_argument("kept", type=pathlib.Path)
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", default=",".join(CONFIGURATIONS))
    args = parser.parse_args()
    first = random.randrange(1, 1 << 31) if args.seed == "random" else int(args.seed)
    names = args.only.split(",")
    if unknown := set(names) - set(CONFIGURATIONS):
        parser.error(f"no such configuration: {', '.join(sorted(unknown))}; there are {', '.join(CONFIGURATIONS)}")
    here = pathlib.Path(__file__).resolve()
    print_version = "import runpy, sys; print(runpy.run_path(sys.argv[1])['__version__'])"
    command = [sys.executable, "-c", print_version, args.site / "torch" / "version.py"]
    version = subprocess.run(command, capture_output=True, text=True).stdout.split("+")[0].strip()
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        environment = prepare(work, args.site, args.headers)
        command = [sys.executable, here, "--record", work, str(first), str(args.histories), *names]
        recorder = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for name in json.loads(recorder.stdout.readline()):
            print(f"{version:<10}{name:<27}this version refuses the settings", flush=True)
            names.remove(name)
        of = {name: [] for name in names}
        for checked in checks(recorder, args.stratalloc, work, args.kept):
            of[checked.row["name"]].append(checked)
            if len(of[checked.row["name"]]) == args.histories:
                print(summary(version, checked.row["name"], of[checked.row["name"]]), flush=True)
    everything = [one for some in of.values() for one in some]
    if len(names) > 1:
        print(summary(version, "all", everything), flush=True)
    if args.seed == "random":
        print(f"{version}: seeds from {first} on")
    wrong = [one for one in everything if one.why and not one.is_expected]
    sys.exit(bool(wrong) or len(everything) < args.histories * len(names))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    elif sys.argv[1:2] == ["--headings"]:
        print(TABLE.format(*HEADINGS))
    else:
        main()
