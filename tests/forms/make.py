"""Writes one run of PyTorch's allocator in every form that PyTorch has for it. Needs PyTorch 2.15; runs on any
device, also on a stand-in for CUDA, because no kernel is launched."""

import gzip
import json
import os
import pickle
import threading

PROGRAM = '''
import torch

MIB = 1 << 20

def empty(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")

class Cache:
    def __init__(self):
        self.kept = []

    def update(self):
        self.kept.append(empty(40))

def attention():
    weights = empty(180)
    scores = empty(160)
    return weights

def step(cache, log):
    cache.update()
    out = attention()
    mask = empty(24)
    log.append(torch.empty(3 * MIB + 100, dtype=torch.uint8, device="cuda"))
    host = torch.zeros(1000)
    loader.append(empty(8))
    del out

def load():
    return [empty(96) for _ in range(4)]

def in_thread(count):
    def work():
        for _ in range(count):
            loader.append(empty(12))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

loader = []
'''

import torch
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile

space = {"threading": threading}
exec(compile(PROGRAM, "train.py", "exec"), space)
MAIN = '''
def run(weights):
    weights.pop(0)
    cache, log = Cache(), []
    for _ in range(6):
        step(cache, log)
    in_thread(3)
    weights.pop()
    late = empty(30)
    return cache, log, late
'''
exec(compile(MAIN, "main.py", "exec"), space)
weights = space["load"]()
torch.cuda.memory._record_memory_history(stacks="python")
with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True, record_shapes=True) as run:
    kept = space["run"](weights)
torch.cuda.memory._dump_snapshot("run.pickle")
with open("run.pickle", "rb") as file:
    snapshot = pickle.load(file)
def neutral(value):
    """Returns a value with file names that do not depend on the machine."""
    if isinstance(value, dict):
        return {key: neutral(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(neutral(one) for one in value)
    if isinstance(value, str) and value.startswith("/"):
        name = os.path.basename(value)
        return name if value == os.path.abspath(__file__) else "/usr/lib/python3/" + name
    return value


snapshot = neutral(snapshot)
with gzip.open("run.pickle.gz", "wb") as file:
    pickle.dump(snapshot, file)
os.remove("run.pickle")
with gzip.open("run.html.gz", "wt") as file:
    file.write(_memory_viz.trace_plot(snapshot))
with open("run.stats.json", "w") as file:
    json.dump(torch.cuda.memory_stats(), file)
run.export_chrome_trace("run.trace.json")
with open("run.trace.json") as file:
    trace = json.load(file)
os.remove("run.trace.json")
for name in ["host_name", "trace_id"]:
    trace.pop(name, None)
with gzip.open("run.trace.json.gz", "wt") as file:
    json.dump(trace, file)
for name in ["run.timeline.json.gz", "run.timeline.raw.json.gz"]:
    run.export_memory_timeline(name, device="cuda:0")
