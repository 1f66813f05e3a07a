"""Small programs whose cause of memory use is known, each recorded by PyTorch with what it knows about itself.

usage: programs.py FOLDER [NAME...]    writes NAME.pickle (the snapshot) and NAME.json (the truth) for each program

Each program runs in a process of its own. They run on a GPU, and over stand-ins for CUDA's libraries, where kernels do
nothing: no program depends on a value. The lines that cause the memory use end with the comment `culprit`.
"""

import collections
import os
import subprocess
import sys
import warnings

warnings.simplefilter("ignore")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from truth import Truth, lines_marked

MIB = 1 << 20
GPU = "cuda:0"
PROGRAMS = {}


def program(cause, *accepted, culprits=(), limit_mib=None, needs_devices=1, max_entries=1_000_000):
    """Registers a program. The headline is right if it contains all words of one of `accepted`; `{culprit}` stands for
    the file and line of any culprit."""

    def register(run):
        about = {"program": run.__name__, "cause": cause, "accepted": accepted}
        about["culprits"] = lines_marked(run, *culprits)
        PROGRAMS[run.__name__] = (run, about, limit_mib, needs_devices, max_entries)
        return run

    return register


class Mlp(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mlps(layers, width, hidden):
    return nn.Sequential(*[Mlp(width, hidden) for _ in range(layers)])


def batch(truth, *shape):
    x = torch.randn(*shape, device=GPU)
    truth.label("input", x)
    return x


def train_step(truth, model, optimizer, x):
    loss = model(x).square().mean()
    truth.graph(loss)
    loss.backward()
    truth.gradients(model)
    optimizer.step()
    truth.label("optimizer state", optimizer)
    optimizer.zero_grad()


def on_gpu(truth, model, device=GPU):
    model.to(device)
    truth.label("parameters", model)
    return model


@program(
    "each step's validation loss is kept in a list with its graph, so its activations stay live",
    ["grow", "{culprit}"],
)
def leak_of_a_list(truth):
    model = on_gpu(truth, mlps(4, 256, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    val_losses = []
    for _ in range(8):
        train_step(truth, model, optimizer, batch(truth, 1024, 256))
        val_losses.append(model(batch(truth, 512, 256)).mean())  # culprit
        truth.graph(val_losses[-1])
    return model, optimizer, val_losses


@program(
    "a cache of features is concatenated in each step and never cut",
    ["grow", "{culprit}"],
)
def features_cache(truth):
    model = on_gpu(truth, mlps(2, 512, 1024))
    cache = torch.zeros(0, 512, device=GPU)
    for _ in range(24):
        with torch.no_grad():
            features = model(batch(truth, 4096, 512))
        cache = torch.cat([cache, features])  # culprit
        truth.label("cache", cache)
    return model, cache


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a, self.b, self.c, self.d = [nn.Linear(width, width // 4) for _ in range(4)]
        self.out = nn.Linear(width, width)

    def forward(self, x):
        h = self.norm(x)
        a = self.a(h)  # culprit
        b = self.b(h)  # culprit
        c = self.c(h)  # culprit
        d = self.d(h)  # culprit
        return x + self.out(torch.cat([a, b, c, d], -1))


@program(
    "autocast copies the float32 output of the norm to bfloat16 for each of four projections, and all copies are kept",
    ["autocast", "{culprit}"],
    ["copies made by autocast"],
    culprits=[Gated],
)
def mixed_precision(truth):
    model = on_gpu(truth, nn.Sequential(*[Gated(512) for _ in range(6)]))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = batch(truth, 16384, 512)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(x).square().mean()
        truth.graph(loss)
        loss.backward()
        truth.gradients(model)
        optimizer.step()
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
    return model, optimizer


class Kept(Mlp):
    """A block that labels its activations itself, because a recomputed graph cannot be read from outside."""

    def forward(self, x):
        normed = self.norm(x)
        up = self.up(normed)  # culprit
        act = F.gelu(up)  # culprit
        self.truth.label("kept for backward", x, normed, up, act)
        return x + self.down(act)


@program(
    "all layers are one checkpointed segment, so the backward pass recomputes and keeps all activations at once",
    ["{culprit}", "activations"],
    ["{culprit}", "recomput"],
    culprits=[Kept],
)
def checkpointing(truth):
    model = on_gpu(truth, nn.Sequential(*[Kept(512, 2048) for _ in range(8)]))
    for part in model:
        part.truth = truth
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = batch(truth, 8192, 512).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).square().mean()  # culprit
        loss.backward()
        truth.gradients(model)
        truth.label("gradients", x.grad)
        optimizer.step()
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
    return model, optimizer


class ShardedAdam(torch.optim.Optimizer):
    """Stage 1 of ZeRO for one of four ranks: flat gradients, a shard of the state, and the gathered parameters."""

    def __init__(self, truth, parameters, ranks=4):
        super().__init__(parameters, {})
        self.truth, self.all = truth, self.param_groups[0]["params"]
        self.total = sum(parameter.numel() for parameter in self.all)
        shard = self.total // ranks
        self.master, self.mean, self.square = [torch.zeros(shard, device=GPU) for _ in range(3)]
        truth.label("optimizer state", self.master, self.mean, self.square)

    def step(self):
        flat = torch.cat([parameter.grad.flatten().float() for parameter in self.all])  # culprit
        self.truth.label("communication", flat)
        mine = flat[: self.master.numel()]
        self.mean.lerp_(mine, 0.1)
        self.square.lerp_(mine * mine, 0.01)
        self.master.sub_(self.mean / (self.square.sqrt() + 1e-8))
        gathered = torch.empty(self.total, device=GPU)  # culprit
        self.truth.label("communication", gathered)
        for parameter, part in zip(self.all, gathered.split([one.numel() for one in self.all])):
            parameter.data.copy_(part.view_as(parameter))


@program(
    "the sharded optimizer copies all gradients into one flat float32 buffer and gathers all parameters into another",
    ["{culprit}"],
    culprits=[ShardedAdam],
)
def zero_like_optimizer(truth):
    model = on_gpu(truth, mlps(8, 512, 4096).bfloat16())
    optimizer = ShardedAdam(truth, model.parameters())
    for _ in range(3):
        x = torch.randn(256, 512, device=GPU, dtype=torch.bfloat16)
        truth.label("input", x)
        loss = model(x).float().square().mean()
        truth.graph(loss)
        loss.backward()
        truth.gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@program(
    "each captured batch size has a private pool of its own, and the idle memory of all pools stays reserved",
    ["private pool"],
)
def captured_shapes(truth):
    model = on_gpu(truth, mlps(4, 512, 2048)).requires_grad_(False)
    graphs = []
    warm = torch.cuda.Stream()
    for rows in [16384, 14336, 12288, 10240, 8192, 6144, 4096, 2048]:
        x = batch(truth, rows, 512)
        with torch.cuda.stream(warm):
            model(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # culprit
            y = model(x)
        graphs.append((graph, x, y))
    return model, graphs


@program(
    "the keys and values of each generated token are appended to the cache of the model",
    ["cache_utils.py"],
    ["KV cache"],
)
def kv_cache(truth):
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, attn_implementation="eager",
    )
    model = on_gpu(truth, LlamaForCausalLM(config).bfloat16().eval())
    cache = DynamicCache(config=config)
    ids = torch.zeros(32, 64, dtype=torch.long, device=GPU)
    with torch.no_grad():
        for _ in range(12):
            model(ids, past_key_values=cache, use_cache=True)  # culprit
            truth.label("KV cache", [[layer.keys, layer.values] for layer in cache.layers])
    return model, cache


class StaticCache(nn.Module):
    def __init__(self, rows, layers, heads, length, width):
        super().__init__()
        shape = (layers, rows, heads, length, width)
        self.register_buffer("keys", torch.zeros(shape, device=GPU, dtype=torch.bfloat16))  # culprit
        self.register_buffer("values", torch.zeros(shape, device=GPU, dtype=torch.bfloat16))  # culprit


@program(
    "a static cache of keys and values is allocated for 8192 tokens, of which 32 are generated",
    ["{culprit}"],
    culprits=[StaticCache],
)
def static_kv_cache(truth):
    model = on_gpu(truth, mlps(4, 512, 2048).bfloat16()).requires_grad_(False)
    cache = StaticCache(8, 4, 8, 8192, 64)
    truth.label("KV cache", cache)
    for token in range(32):
        x = torch.randn(8, 1, 512, device=GPU, dtype=torch.bfloat16)
        cache.keys[:, :, :, token] = model(x).view(8, 8, 64)
    return model, cache


@program(
    "the second device fails: its half of the model gets all micro-batches at once; the first one has more live bytes",
    ["{culprit}"],
    needs_devices=2,
)
def two_devices(truth):
    first = on_gpu(truth, mlps(6, 1024, 8192))
    embeddings = torch.zeros(800 * MIB, dtype=torch.uint8, device=GPU)
    truth.label("parameters", embeddings)
    second = on_gpu(truth, mlps(2, 1024, 4096), "cuda:1")
    limit(600, "cuda:1")
    with torch.no_grad():
        parts = [first(batch(truth, 512, 1024)) for _ in range(48)]
        moved = [part.to("cuda:1") for part in parts]  # culprit
        truth.label("micro-batches", moved)
        second(torch.cat(moved))  # culprit
    return first, second, parts


@program(
    "the losses of all micro-batches are summed before one backward pass, so all their activations are live together",
    ["{culprit}", "activations"],
)
def gradient_accumulation(truth):
    model = on_gpu(truth, mlps(4, 512, 2048))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        total = 0
        for _ in range(8):
            total = total + model(batch(truth, 2048, 512)).square().mean() / 8  # culprit
        truth.graph(total)
        total.backward()
        truth.gradients(model)
        optimizer.step()
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
        del total
    return model, optimizer


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(1024, 1024)


@program(
    "a queue prefetches 24 batches of the data loader to the device",
    ["{culprit}"],
)
def dataloader_prefetch(truth):
    model = on_gpu(truth, mlps(2, 1024, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(Images(), batch_size=1, num_workers=2, pin_memory=True)
    queue = collections.deque()
    for images in loader:
        queue.append(images.to(GPU, non_blocking=True))  # culprit
        truth.label("input", queue[-1])
        if len(queue) == 24:
            train_step(truth, model, optimizer, queue.popleft().flatten(0, 1))
    return model, optimizer, queue


class Lora(nn.Module):
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.zeros(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


@program(
    "the frozen base weights are loaded in float32 and are the largest part",
    ["{culprit}", "parameters"],
)
def lora(truth):
    model = nn.Sequential(*[Lora(nn.Linear(2048, 2048)) for _ in range(16)])
    model.to(GPU)  # culprit
    truth.label("parameters", model)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    for _ in range(3):
        train_step(truth, model, optimizer, batch(truth, 256, 2048))
    return model, optimizer


@program(
    "the activations that the compiled model keeps for its backward pass are the largest part",
    ["{culprit}", "activations"],
)
def compiled(truth):
    # Inductor's kernels need a GPU. AOTAutograd, which decides what is kept, is the same in both.
    backend = "inductor" if torch.cuda.get_device_name() != "Fake GPU" else "aot_eager"
    model = on_gpu(truth, mlps(6, 512, 2048))
    fast = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = batch(truth, 8192, 512)
        loss = fast(x).square().mean()  # culprit
        truth.graph(loss)
        loss.backward()
        truth.gradients(model)
        optimizer.step()
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
    return model, optimizer


@program(
    "batches of varied lengths leave free pieces between kept results, and no piece is large enough",
    ["expandable_segments:True"],
    limit_mib=1400,
)
def variable_lengths(truth):
    kept = []
    for step in range(15):
        length = 96 + step * 37 % 32
        hidden = torch.randn(length, 256, 1024, device=GPU)  # culprit
        pooled = hidden.mean(1, keepdim=True)
        del hidden
        kept.append(pooled.expand(-1, 150, -1).contiguous())  # culprit
        truth.label("results", kept[-1])
    return kept


@program(
    "the attention scores of a long input are one request that is larger than the device",
    ["{culprit}", "request alone"],
)
def attention_scores(truth):
    rows = int((torch.cuda.get_device_properties(0).total_memory / 4 * 1.5 / 16) ** 0.5)
    project = on_gpu(truth, nn.Linear(256, 256)).requires_grad_(False)
    x = batch(truth, 16, rows, 256)
    q, k = project(x), project(x)
    scores = q @ k.transpose(1, 2)  # culprit
    return scores.softmax(-1)


@program(
    "copies of the weights after the last three steps are kept on the device",
    ["{culprit}"],
)
def weights_kept_twice(truth):
    model = on_gpu(truth, mlps(6, 512, 4096))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = collections.deque(maxlen=3)
    for _ in range(5):
        train_step(truth, model, optimizer, batch(truth, 256, 512))
        states.append({name: value.clone() for name, value in model.state_dict().items()})  # culprit
        truth.label("copies of weights", list(states[-1].values()))
    return model, optimizer, states


@program(
    "the first step of AdamW allocates two states for each parameter while all gradients are live",
    ["{culprit}", "optimizer state"],
)
def first_optimizer_step(truth):
    model = on_gpu(truth, mlps(8, 1024, 4096))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(batch(truth, 64, 1024)).square().mean()
    truth.graph(loss)
    loss.backward()
    truth.gradients(model)
    optimizer.step()  # culprit
    truth.label("optimizer state", optimizer)
    optimizer.zero_grad()
    return model, optimizer


@program(
    "the evaluation runs without no_grad, so all activations are kept for a backward pass that never runs",
    ["{culprit}", "no_grad"],
    ["{culprit}", "inference_mode"],
)
def evaluation_keeps_graph(truth):
    model = on_gpu(truth, mlps(12, 512, 2048).eval())
    for _ in range(4):
        y = model(batch(truth, 8192, 512))  # culprit
        truth.graph(y)
        del y
    return model


@program(
    "the hidden state is not detached between steps and retain_graph keeps the graph of all earlier steps",
    ["grow", "{culprit}"],
)
def retained_graph(truth):
    model = on_gpu(truth, mlps(2, 512, 2048))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = batch(truth, 2048, 512)
    for _ in range(10):
        hidden = model(hidden + batch(truth, 2048, 512))  # culprit
        loss = hidden.square().mean()
        truth.graph(loss)
        loss.backward(retain_graph=True)  # culprit
        truth.gradients(model)
        optimizer.zero_grad()
    return model, optimizer, hidden


@program(
    "the batch is too large: its activations are most of the memory when a request fails under a fraction of the device",
    ["{culprit}", "activations"],
    limit_mib=1500,
)
def batch_too_large(truth):
    model = on_gpu(truth, mlps(8, 512, 2048))
    optimizer = torch.optim.AdamW(model.parameters())
    for rows in (4096, 16384):
        x = batch(truth, rows, 512)
        for block in model:
            x = block(x)  # culprit
            truth.graph(x)
        loss = x.square().mean()
        loss.backward()
        truth.gradients(model)
        optimizer.step()
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
        del loss
    return model, optimizer


@program(
    "the logits of a large vocabulary are kept in float32 with their softmax and gradient",
    ["{culprit}"],
)
def large_vocabulary(truth):
    embed, body = on_gpu(truth, nn.Embedding(64000, 256)), on_gpu(truth, mlps(2, 256, 1024))
    for _ in range(3):
        ids = torch.zeros(2048, dtype=torch.long, device=GPU)
        logits = F.linear(body(embed(ids)), embed.weight)  # culprit
        loss = F.cross_entropy(logits, ids)  # culprit
        truth.label("input", ids)
        truth.graph(loss)
        truth.label("logits", logits)
        loss.backward()
        truth.gradients(nn.ModuleList([embed, body]))
        embed.zero_grad()
        body.zero_grad()
        del logits, loss
    return embed, body


@program(
    "the weights and their optimizer state, allocated before the ring of entries turned, are the largest part",
    ["{culprit}", "optimizer state"],
    max_entries=600,
)
def ring_turned(truth):
    model = on_gpu(truth, mlps(4, 1024, 4096))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(12):
        x = batch(truth, 64, 1024)
        model(x).square().mean().backward()
        truth.gradients(model)
        optimizer.step()  # culprit
        truth.label("optimizer state", optimizer)
        optimizer.zero_grad()
    return model, optimizer


def limit(mib, device=GPU):
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(mib * MIB / total, device)


def record(name, folder):
    run, about, limit_mib, needs_devices, max_entries = PROGRAMS[name]
    if torch.cuda.device_count() < needs_devices:
        print(f"{name}: skipped: fewer than {needs_devices} CUDA devices")
        return
    if limit_mib:
        limit(limit_mib)
    truth = Truth(max_entries)
    path = os.path.join(folder, name)
    try:
        kept = run(truth)  # noqa: F841, alive until the snapshot is written
        truth.finish(path, about)
    except torch.OutOfMemoryError:
        truth.finish(path, about)
    print(f"{name}: {about['devices']}", flush=True)


def main():
    folder, *names = sys.argv[1:]
    if names and names[0] == "--one":
        return record(names[1], folder)
    os.makedirs(folder, exist_ok=True)
    failed = [
        name for name in names or PROGRAMS
        if subprocess.run([sys.executable, __file__, folder, "--one", name]).returncode
    ]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
