"""A frozen encoder with low-rank adapters: adapters and head are trained, the base is constant."""

import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH, LENGTH, CLASSES = 50, 16, 8, 3


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8, dropout=0.05):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.dropout(x) @ self.lora_a.t() @ self.lora_b.t() * self.scale


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        logits = self.head(self.layers(self.embedding(ids)).mean(1))
        return logits


def make():
    model = Encoder().requires_grad_(False)
    for layer in model.layers.layers:
        layer.linear1, layer.linear2 = LoRALinear(layer.linear1), LoRALinear(layer.linear2)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
    return model, F.cross_entropy, optimizer, (torch.randint(0, WORDS, (8, LENGTH)), torch.randint(0, CLASSES, (8,)))
