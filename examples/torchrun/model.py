"""The training step of ``train.py``: module, loss, optimizer and the shapes of a batch."""

import torch
from torch import nn


def make():
    """A factory for ``gopt export model.py:make``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    batch = (torch.randn(16, 32), torch.randint(0, 10, (16,)))
    return net, nn.functional.cross_entropy, optimizer, batch
