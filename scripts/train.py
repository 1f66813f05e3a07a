"""Times training steps under one allocator: python train.py MODEL ALLOCATOR [LIBRARY] -> one line of JSON.

With `--turns` behind it, it makes a step for each line on its input and answers each with a line of JSON.

MODEL is llama or resnet. ALLOCATOR is `torch` or `ours`, with the configuration behind a colon:
`torch`, `torch:expandable_segments:True`, `ours:backend:native,expandable_segments:True`. For `ours`, LIBRARY is
libstratalloc.so, and the package of `python/` lies on PYTHONPATH.
"""

import json
import os
import random
import sys
import time

model_name, (kind, _, conf) = sys.argv[1], sys.argv[2].partition(":")
if kind == "torch" and conf:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = conf

import torch  # noqa: E402  (PyTorch reads the variable when it is imported)

if kind == "ours":
    import stratalloc

    stratalloc.install(sys.argv[3], conf=conf or "backend:native")

torch.manual_seed(0)
random.seed(0)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408,
        num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)

    def loss():
        shape = (random.choice([1, 2, 4]), random.randrange(64, 512))
        words = torch.randint(0, 32000, shape, device="cuda")
        return model(input_ids=words, labels=words).loss

    return optimizer, loss


def resnet():
    import torchvision

    model = torchvision.models.resnet50().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss():
        count = random.choice([8, 16, 24])
        images = torch.randn(count, 3, 160, 160, device="cuda")
        classes = torch.randint(0, 1000, (count,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return torch.nn.functional.cross_entropy(model(images), classes)

    return optimizer, loss


optimizer, loss = {"llama": llama, "resnet": resnet}[model_name]()


def step():
    """One step: its milliseconds, the processors' until its last call was made, and its loss."""
    start, busy = time.perf_counter(), time.process_time()
    value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    busy = time.process_time() - busy
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, busy * 1e3, round(value.item(), 4)


if sys.argv[-1] == "--turns":
    for _ in sys.stdin:
        ms, cpu_ms, value = step()
        print(json.dumps({"ms": ms, "cpu_ms": cpu_ms, "loss": value}), flush=True)
    sys.exit()

for _ in range(8):
    step()
times = []
for _ in range(40):
    ms, _, value = step()
    times.append(ms)
free, total = torch.cuda.mem_get_info()
print(json.dumps({
    "model": model_name,
    "allocator": sys.argv[2],
    "step_ms": round(sorted(times)[len(times) // 2], 2),
    "loss": value,
    "used_mib": (total - free) >> 20,
}))
