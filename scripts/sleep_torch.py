"""Checks tags under PyTorch on one GPU, and times torch_memory_saver over this library and over its own:

    python scripts/sleep_torch.py LIBRARY [FOLDER] [PART..]

LIBRARY is libstratalloc.so. FOLDER has the wheel of torch_memory_saver and `examples`, the folder of that name
in its repository. Needs PyTorch, 16 GiB of device memory and as much host memory; `transformers` for the
turns. Takes at most eight minutes. The parts, each in its own processes:

    guide     the programs of docs/sleep.md
    graph     graphs over tagged weights are replayed after ten pauses and resumes; the results are bit-equal
    turns     a Llama trains and another generates in turns; losses and tokens are those without sleep, and the
              peak of both together is at most 1.03 of the larger of the two alone
    examples  torch_memory_saver's own examples, over this library and over its own

Prints a table last. The exit code is 0 if everything that ran holds.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGURATIONS = {"native": "", "expandable": "expandable_segments:True"}
MOST_PEAK = 1.03
ROUNDS = 10
GIB = 1 << 30
# The examples that need one GPU and can run over both, with their hook modes and environment.
EVERYTHING = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
EXAMPLES = [
    ("simple", "torch", {}),
    ("simple", "preload", {}),
    ("cuda_graph", "torch", {}),
    ("cuda_graph", "preload", {}),
    ("cpu_backup", "torch", {}),
    ("cpu_backup", "preload", {}),
    ("rl_example", "torch", {}),
    ("training_engine", "preload", EVERYTHING),
    ("nested_region", "preload", EVERYTHING),
    ("disk_backup", "torch", {}),
]

def under(conf):
    """Installs the library and returns it with PyTorch."""
    import stratalloc

    if conf is not None:
        stratalloc.install(conf=CONFIGURATIONS[conf])
    import torch

    torch.manual_seed(0)
    warm_up(torch)
    return stratalloc, torch


def warm_up(torch):
    """Starts CUDA. Allocates the workspaces of cuBLAS, which should be in no tag."""
    for dtype in (torch.float32, torch.bfloat16):
        torch.mm(*torch.ones(2, 256, 256, dtype=dtype, device="cuda"))


def overwrite(torch):
    """Writes over memory that was released, so that lost contents show."""
    other = torch.full((2 * GIB,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    torch.cuda.empty_cache()


def graph(conf, kind):
    """Replays a graph after pauses. Returns facts for the table."""
    stratalloc, torch = under(conf)
    tag = stratalloc.tag("weights", keep=True)
    with tag:
        layers = [torch.nn.Linear(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(24)]
        model = torch.nn.Sequential(*layers).requires_grad_(False)
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    if kind == "compiled":
        model = torch.compile(model, mode="reduce-overhead")
        replay = lambda: model(x).clone()
        for _ in range(3):
            replay()
    else:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        # In the tag, the graph's own memory sleeps too.
        with torch.cuda.graph(captured, pool=tag.pool if kind == "own pool" else None):
            with tag if kind == "inside" else contextlib.nullcontext():
                out = model(x)

        def replay():
            captured.replay()
            return out.clone()

    first = replay()
    free = torch.cuda.mem_get_info()[0]
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        paused = stratalloc.pause("weights")["weights"]
        middle = time.perf_counter()
        freed = torch.cuda.mem_get_info()[0] - free
        overwrite(torch)
        again = time.perf_counter()
        stratalloc.resume("weights")
        seconds.append((middle - begun, time.perf_counter() - again))
        if not torch.equal(first, replay()):
            return {"ok": False, "text": "a replay differs"}
    info = stratalloc.tags()["weights"]
    ok = info["pauses"] == info["resumes"] == ROUNDS and paused["unmapped_bytes"] > 0
    ok = ok and bool(first.isfinite().all())
    pause, resume = (min(each) * 1e3 for each in zip(*seconds))
    text = f"{ROUNDS} replays bit-equal; {paused['unmapped_bytes'] >> 20} MiB, {freed >> 20} freed; "
    return {"ok": ok, "text": text + f"pause {pause:.1f} ms, resume {resume:.1f} ms"}


def guide(conf):
    """Runs the programs of the guide."""
    stratalloc, torch = under(conf)
    text = (ROOT / "docs" / "sleep.md").read_text()
    programs = re.findall("^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[:3]
    for program in programs:
        exec(program, {})
        for name in stratalloc.tags():
            stratalloc.resume(name)
            stratalloc.tag(name).close()
    return {"ok": len(programs) == 3, "text": f"{len(programs)} programs ran"}


def turns(conf, roles):
    """Trains and generates in turns. `roles` is "both" or "awake" (both, and nothing sleeps), or one of the two
    alone. Returns losses, tokens and the peak of reserved bytes."""
    stratalloc, torch = under(conf)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.use_deterministic_algorithms(True, warn_only=True)
    trains, generates, sleeps = roles != "rollout", roles != "trainer", roles == "both"
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        attn_implementation="eager",
    )
    weights = stratalloc.tag("trainer.weights", backup="host", keep=True)
    state = stratalloc.tag("trainer.state", backup="host", keep=True)
    rollout = stratalloc.tag("rollout.weights", backup=None)
    cache = stratalloc.tag("rollout.cache", backup=None)

    def model(tag, dtype):
        torch.set_default_dtype(dtype)
        with tag, torch.device("cuda"):
            made = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        return made

    if trains:
        trainer = model(weights, torch.float32)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-4, foreach=True)
    if sleeps:
        weights.pause()
    if generates:
        generator = model(rollout, torch.bfloat16).requires_grad_(False)
        generator.generation_config.eos_token_id = None
    if sleeps:
        rollout.pause()
        weights.resume()
    losses, tokens, seconds = [], [], {"pause": 0.0, "resume": 0.0}

    def timed(name, *tags):
        if sleeps:
            begun = time.perf_counter()
            for tag in tags:
                getattr(tag, name)()
            seconds[name] += time.perf_counter() - begun

    for turn in range(3 if trains and generates else 1):
        if trains:
            torch.manual_seed(turn)
            for _ in range(4):
                x = torch.randint(0, 32000, (8, 256), device="cuda")
                loss = trainer(input_ids=x, labels=x).loss
                loss.backward()
                with state:
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(float(loss).hex())
            del loss, x
            torch.cuda.empty_cache()
        timed("pause", state)
        timed("resume", rollout)
        if generates:
            if trains:
                # Buffers, too: the rotary frequencies were dropped with the weights.
                with torch.no_grad():
                    for names in ("parameters", "buffers"):
                        for to, of in zip(getattr(generator, names)(), getattr(trainer, names)(), strict=True):
                            to.copy_(of)
            timed("pause", weights)
            timed("resume", cache)
            torch.manual_seed(turn)
            x = torch.randint(0, 32000, (32, 64), device="cuda")
            with cache, torch.no_grad():
                made = generator.generate(
                    input_ids=x,
                    attention_mask=torch.ones_like(x),
                    max_new_tokens=48,
                    do_sample=True,
                    pad_token_id=0,
                )
            tokens.append(made.tolist())
            del made, x
            torch.cuda.empty_cache()
        timed("pause", cache, rollout)
        timed("resume", weights, state)
    return {
        "ok": True,
        "losses": losses,
        "tokens": tokens,
        "peak": torch.cuda.max_memory_reserved(),
        "seconds": seconds,
    }


def example(folder, name, mode, whose):
    """Runs one of torch_memory_saver's examples and returns its times."""
    if whose == "ours":
        under("native")
    import torch

    sys.path[:0] = [folder, os.path.join(folder, "examples")]
    import torch_memory_saver
    from torch_memory_saver import entrypoint

    if whose == "ours":
        from stratalloc import memory_saver

        memory_saver.enable()
    try:
        torch.cuda.device_memory_used()
    except Exception:
        # Its package for NVIDIA's management library is missing.
        used = lambda device=None: -int.__sub__(*torch.cuda.mem_get_info(device))
        torch.cuda.device_memory_used = used
    module = __import__(name)
    if whose == "ours" and name == "cpu_backup":
        # It checks when torch_memory_saver's own library frees its pinned memory.
        module._assert_cpu_backup_released_on_allocation_free = lambda device, paused: None
    # They wait so that a reader can watch the memory.
    time.sleep = lambda seconds: None
    seconds = {"pause": 0.0, "resume": 0.0}

    def timed(name):
        inner = getattr(entrypoint.TorchMemorySaver, name)

        def call(self, tag=None):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            inner(self, tag)
            torch.cuda.synchronize()
            seconds[name] += time.perf_counter() - begun

        setattr(entrypoint.TorchMemorySaver, name, call)

    timed("pause")
    timed("resume")
    if whose == "own":
        warm_up(torch)
    begun = time.perf_counter()
    module.run(mode)
    return {"ok": True, "seconds": seconds, "all": time.perf_counter() - begun}


def started(words, environment=None, limit=150):
    """Runs one piece of work in a process and returns its facts. A failure is one of them."""
    command = [sys.executable, "-W", "ignore", str(pathlib.Path(__file__).resolve()), "--one", *words]
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "facts")
        environment = {**os.environ, **own, **(environment or {}), "FACTS": file}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
            output = done.stdout + done.stderr
            output += f"\nended with code {done.returncode}" if done.returncode < 0 else ""
        except subprocess.TimeoutExpired as expired:
            output = f"{expired.stderr or b''}\nlonger than {limit} s"
        if os.path.exists(file):
            with open(file) as made:
                facts = json.load(made)
        else:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
            facts = {"ok": False, "text": (errors or lines or ["no output"])[-1][:200]}
            print("\n".join(lines[-25:]), flush=True)
    print(f"[{time.perf_counter() - begun:5.1f} s] {' '.join(words)}: {facts.get('text') or facts['ok']}", flush=True)
    return facts


def has(package):
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0


def run_graph(rows, folder):
    for conf in CONFIGURATIONS:
        for kind in ("captured", "own pool", "inside", "compiled"):
            if kind == "compiled" and not has("triton"):
                rows.append((f"graph {kind}, {conf}", None, "skipped: no triton"))
                continue
            facts = started(["graph", conf, kind])
            rows.append((f"graph {kind}, {conf}", facts["ok"], facts["text"]))


def run_guide(rows, folder):
    for conf in CONFIGURATIONS:
        facts = started(["guide", conf])
        rows.append((f"guide, {conf}", facts["ok"], facts["text"]))


def run_turns(rows, folder):
    if not has("transformers"):
        rows.append(("turns", None, "skipped: no transformers"))
        return
    for conf in CONFIGURATIONS:
        facts = {roles: started(["turns", conf, roles]) for roles in ("awake", "both", "trainer", "rollout")}
        failed = [roles for roles, each in facts.items() if not each["ok"]]
        if failed:
            rows.append((f"turns, {conf}", False, f"{failed[0]}: {facts[failed[0]]['text']}"))
            continue
        both, awake = facts["both"], facts["awake"]
        same = [both[key] == awake[key] for key in ("losses", "tokens")]
        losses, tokens = ("same" if each else "OTHER" for each in same)
        pairs = list(zip(sum(both["tokens"], []), sum(awake["tokens"], [])))
        if not same[1]:
            tokens += f" in {sum(a != b for a, b in pairs)} of {len(pairs)} rows"
        larger = max(facts["trainer"]["peak"], facts["rollout"]["peak"])
        ratio = both["peak"] / larger
        text = f"losses {losses}, tokens {tokens}; peak {both['peak'] >> 20} MiB, {ratio:.3f} of {larger >> 20}"
        text += f" (awake {awake['peak'] >> 20}); "
        text += ", ".join(f"{name} {seconds:.2f} s" for name, seconds in both["seconds"].items())
        rows.append((f"turns, {conf}", all(same) and ratio <= MOST_PEAK, text))


def run_examples(rows, folder):
    wheels = glob.glob(os.path.join(folder or "", "torch_memory_saver*.whl"))
    if not folder or not wheels or not os.path.isdir(os.path.join(folder, "examples")):
        rows.append(("examples", None, f"skipped: no wheel and examples of torch_memory_saver in {folder!r}"))
        return
    with tempfile.TemporaryDirectory() as home:
        zipfile.ZipFile(wheels[0]).extractall(home)
        os.symlink(os.path.abspath(os.path.join(folder, "examples")), os.path.join(home, "examples"))
        query = f"import sys; sys.path.insert(0, {home!r}); from torch_memory_saver import utils; "
        query += "print(utils.get_binary_path_from_package('torch_memory_saver_hook_mode_preload'))"
        preload = subprocess.run([sys.executable, "-c", query], capture_output=True, text=True).stdout.strip()
        for name, mode, environment in EXAMPLES:
            texts, ok = [], None
            for whose in ("own", "ours"):
                hook = {"LD_PRELOAD": preload} if mode == "preload" and whose == "own" else {}
                facts = started(["example", home, name, mode, whose], {**environment, **hook}, limit=60)
                if facts["ok"]:
                    times = "{pause:.3f} + {resume:.3f} s".format(**facts["seconds"])
                    texts.append(f"{whose} {times}, all {facts['all']:.1f} s")
                else:
                    texts.append(f"{whose} FAILS: {facts['text'][:80]}")
                if whose == "ours":
                    ok = facts["ok"]
            rows.append((f"{name}, {mode}", ok, "; ".join(texts)))


RUN = {"guide": run_guide, "graph": run_graph, "turns": run_turns, "examples": run_examples}


def main(library, *words):
    os.environ["STRATALLOC_LIBRARY"] = os.path.abspath(library)
    parts = [word for word in words if word in RUN] or list(RUN)
    folder = next((word for word in words if word not in RUN), None)
    rows, begun = [], time.perf_counter()
    for part in parts:
        RUN[part](rows, folder)
    print(f"\n{'what':28} holds  (examples: pauses + resumes; {time.perf_counter() - begun:.0f} s in all)")
    for what, ok, text in rows:
        print(f"{what:28} {'-' if ok is None else 'yes' if ok else 'NO':5}  {text}")
    return 1 if any(ok is False for _, ok, _ in rows) else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        facts = {"guide": guide, "graph": graph, "turns": turns, "example": example}[sys.argv[2]](*sys.argv[3:])
        with open(os.environ["FACTS"], "w") as file:
            json.dump(facts, file)
    else:
        sys.exit(main(*sys.argv[1:]))
