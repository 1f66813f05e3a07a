"""Checks the account of a process on a GPU: the program uses a model, a captured graph, cuBLAS and NCCL.

usage: account.py [--library PATH]    (with --library, PyTorch uses the library; STRATALLOC_COMMAND and
LD_PRELOAD are set: LD_PRELOAD=$(python -m stratalloc preload) python scripts/account.py)
"""

import argparse
import os
import subprocess
import sys

import stratalloc

# The share of the bytes since the start that must have an owner.
OWNED = 0.97


def used_before():
    """Returns the used bytes of the device before this process uses it."""
    program = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # That process uses as many bytes as this one after its first call.
    return int(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True).stdout)


def work(torch):
    """Allocates as a training program does, and returns what must stay."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    wide = 2048
    layers = [torch.nn.Linear(wide, wide, device="cuda") for _ in range(24)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, wide, device="cuda")
    convolution = torch.nn.Conv2d(3, 64, 3, device="cuda")
    convolution(torch.randn(8, 3, 64, 64, device="cuda")).sum().backward()
    for _ in range(3):
        loss = model(data).square().mean()
        loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        model(data)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        result = model(data)
    graph.replay()
    torch.cuda.synchronize()
    return model, optimizer, graph, result, convolution


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library")
    options = parser.parse_args()
    before = used_before()
    if options.library:
        stratalloc.install(options.library)
    import torch

    stratalloc.watch(folder="/tmp/stratalloc-account")
    kept = work(torch)
    found = stratalloc.account()
    print(found["table"])
    context = next((row["bytes"] for row in found["rows"] if row["owner"] == "context"), 0)
    own = found["used_bytes"] - (before - context)
    unknown = sum(row["bytes"] for row in found["rows"] if row["owner"] in ("unknown", "this process"))
    print(f"of {own / 2**20:,.1f} MiB since the start, {100 * (1 - abs(unknown) / own):.2f} % have an owner")
    asked = [os.environ["STRATALLOC_COMMAND"], "info", "--pid", str(os.getpid())]
    print(subprocess.run(asked, capture_output=True, text=True).stdout)
    del kept
    torch.distributed.destroy_process_group()
    return 0 if context and abs(unknown) <= (1 - OWNED) * own else 1


if __name__ == "__main__":
    sys.exit(main())
