"""What a program knows about its own memory: labels of tensors, resolved to the blocks of its recording.

A program labels tensors while it runs (`Truth.label`, `Truth.graph`). At the end the blocks that live at the moment
that counts (the first failed request, else the peak of live bytes) are found in the snapshot alone, by undoing its
events from the final layout backwards, and each gets the label of the tensors in it. Stacks are not used.
"""

import collections
import inspect
import json
import pickle

import torch

# If tensors of several labels share a block, the first of these counts; other labels follow in the order of use.
ORDER = ["parameters", "gradients", "optimizer state", "KV cache", "input", "copies of autocast", "kept for backward"]
TEMPORARY = "temporary"
VIEWS = {"TBackward0", "TransposeBackward0", "ViewBackward0", "UnsafeViewBackward0"}


def tensors(thing):
    """Yields the CUDA tensors of tensors, modules, optimizers, caches and containers of them."""
    if isinstance(thing, torch.Tensor):
        if thing.is_cuda:
            yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from tensors([*thing.parameters(), *thing.buffers()])
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors([list(state.values()) for state in thing.state.values()])
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, (list, tuple, collections.deque)):
        for part in thing:
            yield from tensors(part)


def lines_marked(*objects):
    """Returns `file:line` of every line of these functions or classes that ends with the comment `culprit`."""
    found = []
    for thing in objects:
        lines, first = inspect.getsourcelines(thing)
        name = inspect.getsourcefile(thing).rsplit("/", 1)[-1]
        found += [f"{name}:{first + at}" for at, line in enumerate(lines) if line.rstrip().endswith("# culprit")]
    return found


class Truth:
    def __init__(self, max_entries=1_000_000):
        self.devices = range(torch.cuda.device_count())
        self.labels = []
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(max_entries=max_entries)

    @staticmethod
    def allocations(device):
        """Returns the number of requests so far, which dates a label."""
        return torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)

    def label(self, category, *things):
        now = {device: self.allocations(device) for device in self.devices}
        for tensor in tensors(things):
            device = tensor.device.index
            self.labels.append((category, device, tensor.untyped_storage().data_ptr(), now[device]))

    def graph(self, *outputs, kept="kept for backward"):
        """Labels what the graph behind these outputs has saved for the backward pass."""
        todo, seen = [output.grad_fn for output in outputs if output.grad_fn], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions if parent]
            saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            saved += getattr(node, "saved_tensors", ())
            for tensor in tensors(saved):
                maker = tensor.grad_fn
                while maker and maker.name() in VIEWS:
                    maker = maker.next_functions[0][0]
                is_copy = maker and maker.name() == "ToCopyBackward0" and tensor.dtype != torch.float32
                self.label("copies of autocast" if is_copy else kept, tensor)

    def gradients(self, model):
        self.label("gradients", [parameter.grad for parameter in model.parameters()])

    def finish(self, path, about):
        """Writes `path`.pickle and `path`.json."""
        total = [self.allocations(device) for device in self.devices]
        snapshot = torch.cuda.memory._snapshot()
        with open(f"{path}.pickle", "wb") as file:
            pickle.dump(snapshot, file)
        # cuBLAS keeps its workspaces until they are cleared: those freed now are the ones.
        last = [max((event["time_us"] for event in trace), default=0) for trace in snapshot["device_traces"]]
        torch._C._cuda_clearCublasWorkspaces()
        later = torch.cuda.memory._snapshot()["device_traces"]
        for device in self.devices:
            for event in later[device]:
                if event["action"] == "free_requested" and event["time_us"] > last[device]:
                    self.labels.append(("workspace", device, event["addr"], total[device]))
        about["torch"] = torch.__version__
        about["devices"] = {
            device: self.of_device(snapshot, device, total[device]) for device in self.devices if last[device]
        }
        with open(f"{path}.json", "w") as file:
            json.dump(about, file, indent=1)

    def of_device(self, snapshot, device, total):
        """Returns the moment of a device and its live bytes, as requested, by label."""
        trace = snapshot["device_traces"][device]
        live = {
            block["address"]: Block(block["requested_size"])
            for segment in snapshot["segments"] if segment["device"] == device
            for block in segment["blocks"] if block["state"] == "active_allocated"
        }
        of_event, count = {}, total
        for at in range(len(trace) - 1, -1, -1):
            address, size = trace[at].get("addr"), trace[at]["size"]
            if trace[at]["action"] == "free_requested":
                of_event[at] = live[address] = Block(size, freed=count)
            elif trace[at]["action"] == "alloc":
                of_event[at] = live.pop(address)
                of_event[at].size, of_event[at].born = size, count
                count -= 1
        at_start, moment = set(live.items()), None
        live_bytes = peak_bytes = sum(block.size for block in live.values())
        peak = 0
        for at, event in enumerate(trace):
            if event["action"] == "oom":
                moment, peak = "first failure", at
                break
            live_bytes += {"alloc": 1, "free_requested": -1}.get(event["action"], 0) * event["size"]
            if live_bytes > peak_bytes:
                peak_bytes, peak = live_bytes, at + 1
        live = at_start
        for at in range(peak):
            pair = (trace[at].get("addr"), of_event.get(at))
            if trace[at]["action"] == "alloc":
                live.add(pair)
            elif trace[at]["action"] == "free_requested":
                live.discard(pair)
        labels = collections.defaultdict(list)
        for category, of, address, when in self.labels:
            if of == device:
                labels[address].append((when, category))
        categories = collections.Counter()
        for address, block in live:
            found = [category for when, category in labels[address] if block.born <= when <= block.freed]
            known = [category for category in ORDER if category in found]
            categories[(known + found + [TEMPORARY])[0]] += block.size
        return {
            "moment": moment or "peak of live bytes", "events": peak,
            "failed_bytes": trace[peak]["size"] if moment else None,
            "live_bytes": sum(categories.values()), "categories": dict(categories.most_common()),
        }


class Block:
    """A block, and the numbers of requests between which it lived."""

    def __init__(self, size, freed=float("inf")):
        self.size, self.born, self.freed = size, 0, freed
