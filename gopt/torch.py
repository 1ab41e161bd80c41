"""A rank in a training loop of your own, on ``torch.distributed``.

Started by ``torchrun --nproc-per-node N train.py``, or by Slurm:

    rank = gopt.torch.load("step.ranks")
    for batch in DataLoader(dataset, batch_size=32, sampler=rank.sampler(dataset), drop_last=True):
        out = rank.step(batch, lr=1e-3)
    rank.save("ckpt")

All ranks call ``step``, ``save``, ``load``, ``evaluate`` and the state dicts together, like any collective.
"""

from gopt.frontends.pytorch.loop_rank import Rank, load

__all__ = ["Rank", "load"]
