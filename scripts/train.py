"""Times training steps under one allocator: python train.py MODE MODEL -> one line of JSON.

MODE is `native`, a value of PYTORCH_CUDA_ALLOC_CONF, or `ours:LIBRARY`. The last installs libstratalloc.so in PyTorch
with the package of `python/`, which must be on PYTHONPATH; ALLOC_CONF has the configuration. MODEL is llama or resnet.
`in_turn.py` compares two modes.
"""

import json
import os
import random
import sys
import time

mode, model_name = sys.argv[1:]
if mode != "native" and not mode.startswith("ours:"):
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = mode

import torch  # noqa: E402  (PyTorch reads the variable when it is imported)

if mode.startswith("ours:"):
    import stratalloc

    stratalloc.install(mode.removeprefix("ours:"))

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
    value = loss()
    value.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return value


for _ in range(8):
    step()
torch.cuda.synchronize()
times = []
for _ in range(40):
    start = time.perf_counter()
    value = step()
    torch.cuda.synchronize()
    times.append((time.perf_counter() - start) * 1e3)
free, total = torch.cuda.mem_get_info()
print(json.dumps({
    "mode": mode,
    "model": model_name,
    "step_ms_median": round(sorted(times)[len(times) // 2], 2),
    "loss": round(value.item(), 4),
    "used_mib": (total - free) >> 20,
}))
