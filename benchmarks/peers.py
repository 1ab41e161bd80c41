"""PyTorch on the same shapes, for ``benchmarks/train.py``: ``python peers.py mlp|gpt single|ddp|zero1|fsdp2 STEPS``;
``single+compile`` and the like go through torch.compile.

Runs in an interpreter of its own; prints one line of JSON. Times are of rank 0. Bytes are those that loopback sent
while the steps ran, which is all that gloo does; calls are those that the profiler saw in one more step.
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from counters import WARMUP, memory, wire
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        self.fc, self.out, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x):
        b, t, w = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.out(torch.tanh(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(1024, 256), nn.Parameter(torch.randn(128, 256) * 0.02)
        self.blocks, self.ln = nn.ModuleList(Block(256, 8) for _ in range(4)), nn.LayerNorm(256)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe
        for block in self.blocks:
            x = block(x)
        return self.ln(x) @ self.wte.weight.T


def mlp():
    layers = []
    for place in range(8):
        layers += [nn.Linear(2048, 2048)] + ([nn.Tanh()] if place < 7 else [])
    return nn.Sequential(*layers)


def build(name: str, mode: str):
    """The module to call and its optimizer."""
    net = mlp() if name == "mlp" else Gpt()
    rate = {"lr": 1e-4, "weight_decay": 0.01}
    if mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for each in net.blocks if name == "gpt" else [m for m in net if isinstance(m, nn.Linear)]:
            fully_shard(each)
        fully_shard(net)
    model = nn.parallel.DistributedDataParallel(net) if mode in ("ddp", "zero1") else net
    if mode != "zero1":
        return model, torch.optim.AdamW(net.parameters(), fused=True, **rate)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    update = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **rate
    )
    return model, update


def calls_of(step) -> int:
    """Collectives that a step starts: operators of torch.distributed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.name.startswith("c10d::") for event in profiler.events())


def work(rank: int, world: int, name: str, mode: str, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    imports = memory()[0]
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    mode, _, compiled = mode.partition("+")
    model, update = build(name, mode)
    model = torch.compile(model) if compiled else model
    x = torch.randn(32, 2048) if name == "mlp" else torch.randint(0, 1024, (4, 128))
    y = torch.randint(0, 1000, (32,) if name == "mlp" else (512,))

    def step() -> None:
        out = model(x)
        loss = nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y)
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        float(loss.detach())

    for _ in range(WARMUP):
        step()
    if world > 1:
        dist.barrier()
    seconds, before = [], wire()
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    if world > 1:
        dist.barrier()
    row = {"seconds": seconds, "imports": imports, "sent": 0.0, "calls": 0, "peak": [memory()[1]]}
    if world > 1:
        row["sent"] = (wire() - before) / steps / world
        peaks = [0] * world
        dist.all_gather_object(peaks, memory()[1])
        row |= {"peak": peaks, "calls": calls_of(step)}
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    name, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if mode.startswith("single"):
        work(0, 1, name, mode, steps, 0)
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.spawn(work, args=(2, name, mode, steps, port), nprocs=2)
