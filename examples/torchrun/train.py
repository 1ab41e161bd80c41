"""Trains sharded ranks in a loop of PyTorch: ``torchrun --nproc-per-node 2 train.py step.ranks``."""

import sys
from pathlib import Path

import torch
from model import make
from torch.utils.data import DataLoader, TensorDataset

import gopt.torch

EPOCHS, STEPS = 5, 100


def dataset() -> TensorDataset:
    """Points of ten clouds."""
    random = torch.Generator().manual_seed(1)
    centres, labels = torch.randn(10, 32, generator=random), torch.randint(0, 10, (2048,), generator=random)
    return TensorDataset(centres[labels] + torch.randn(2048, 32, generator=random), labels)


def main() -> None:
    folder, checkpoints = sys.argv[1], Path("ckpt")
    rank = gopt.torch.load(folder)
    if checkpoints.is_dir():
        rank.load(checkpoints)  # goes on where an earlier run of these ranks ended
    samples = dataset()
    sampler = rank.sampler(samples, seed=0)
    loader = DataLoader(samples, batch_size=16, sampler=sampler)
    for epoch in range(rank.steps // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            out = rank.step(batch, lr=1e-3 * (1 - rank.steps / (EPOCHS * len(loader))))
        if rank.number == 0:
            print(f"epoch {epoch + 1}: loss {out['loss']:.4f}", flush=True)
        rank.save(checkpoints)
    trained = rank.full_state_dict()
    if rank.number == 0:
        net = make()[0]
        net.load_state_dict(trained)
        x, y = samples.tensors
        print(f"the module reads {(net(x).argmax(1) == y).float().mean():.1%} of the points")


if __name__ == "__main__":
    main()
