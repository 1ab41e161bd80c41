"""An MLP whose forward runs under torch.autocast in bfloat16, on whatever device its batch is."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            hidden = self.body(x)
        logits = self.head(hidden.float())
        return logits


def make():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, nn.CrossEntropyLoss(), optimizer, (torch.randn(8, 16), torch.randint(0, 4, (8,)))
