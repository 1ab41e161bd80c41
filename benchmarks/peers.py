"""PyTorch on the same shapes, for ``benchmarks/train.py``: ``python peers.py mlp|gpt single|ddp|zero1|fsdp2 STEPS``.

Runs in an interpreter of its own; prints one line of JSON: the median step in milliseconds on rank 0.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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


def work(rank: int, world: int, name: str, mode: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=rank, world_size=world)
    net = mlp() if name == "mlp" else Gpt()
    rate = {"lr": 1e-4, "weight_decay": 0.01}
    if mode == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for each in net.blocks if name == "gpt" else [m for m in net if isinstance(m, nn.Linear)]:
            fully_shard(each)
        fully_shard(net)
    model = nn.parallel.DistributedDataParallel(net) if mode in ("ddp", "zero1") else net
    if mode == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        update = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, fused=True, **rate
        )
    else:
        update = torch.optim.AdamW(net.parameters(), fused=True, **rate)
    x = torch.randn(32, 2048) if name == "mlp" else torch.randint(0, 1024, (4, 128))
    y = torch.randint(0, 1000, (32,) if name == "mlp" else (512,))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        out = model(x)
        loss = nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), y)
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        float(loss.detach())
        times.append(time.perf_counter() - begin)
    if rank == 0:
        print(json.dumps({"ms": 1000 * statistics.median(times[5:]), "sent": 0, "calls": 0}), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    name, mode, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if mode == "single":
        work(0, 1, name, mode, steps)
    else:
        mp.spawn(work, args=(2, name, mode, steps), nprocs=2)
