"""Five models whose gradients are recorded by name; ``python tests/frontends/derive/models_by_torch.py`` records them.

Recorded on 2026-11-23 with torch 2.13.0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from derive_by_torch import write_forward
from derive_cases import RECORDED
from torch import Tensor, nn


class Depthwise(nn.Module):
    """Depthwise and grouped convolutions, as MobileNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1)
        self.depthwise = nn.Conv2d(8, 8, 3, 2, 1, groups=8)
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.grouped = nn.Conv2d(12, 12, 3, 1, 2, dilation=2, groups=3)
        self.norm, self.head = nn.GroupNorm(3, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.depthwise(F.silu(self.first(x))))
        return self.head(self.norm(self.grouped(F.gelu(self.pointwise(x)))).mean((2, 3)))


class UNet(nn.Module):
    """Transposed convolutions, also in groups, and a bilinear resize."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.lower = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1)
        self.grouped, self.out = nn.ConvTranspose2d(6, 6, 2, groups=2), nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.relu(self.down(x))
        up = self.grouped(self.up(torch.tanh(self.lower(skip))))[..., :-1, :-1]
        return F.interpolate(self.out(torch.cat([skip, up], 1)), scale_factor=2, mode="bilinear", align_corners=False)


class Wave(nn.Module):
    """Convolutions of one and three dimensions, reflected pads, a slice in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv1d(2, 8, 5, 3, dilation=2, groups=2), nn.ConvTranspose1d(8, 4, 4, 2, groups=4)
        self.volume, self.head = nn.Conv3d(1, 3, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        wave = self.up(torch.sigmoid(self.down(F.pad(x, (2, 1), mode="reflect"))))
        volume = self.volume(x[:, None, :, :, None].expand(-1, -1, -1, -1, 2))
        return self.head(wave[:, :, ::2].mean(2)) + volume.square().mean((2, 3, 4))


class Recurrent(nn.Module):
    """A GRU in both directions, and attention over its states."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(20, 8), nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.words(x))
        seen, _ = self.attention(states, states, states, need_weights=False)
        return self.head(self.norm(states + seen)[:, -1])


class Rotary(nn.Module):
    """A block of Llama: rotary positions, grouped attention, RMSNorm, a gated MLP, a tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 8), nn.RMSNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, width, bias=False) for width in (8, 4, 4))
        self.out, self.down = nn.Linear(8, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.up, self.gate = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        angle = torch.arange(6.0)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x)
        q, k, v = (each(self.norm(hidden)).view(2, 6, -1, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = self.rotate(q) @ self.rotate(k).expand(-1, 2, -1, -1).transpose(-1, -2) / 2
        weights = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9).softmax(-1)
        hidden = hidden + self.out((weights @ v.expand(-1, 2, -1, -1)).transpose(1, 2).reshape(2, 6, -1))
        rest = self.norm(hidden)
        return (hidden + self.down(F.silu(self.gate(rest)) * self.up(rest))).mean(1) @ self.words.weight.T


def example(name: str) -> tuple[nn.Module, Tensor, int]:
    """A module, its input, and the number of classes."""
    torch.manual_seed(11)
    module, x, classes = {
        "depthwise": lambda: (Depthwise(), torch.randn(3, 3, 16, 16), 4),
        "unet": lambda: (UNet(), torch.randn(2, 2, 8, 8), 3),
        "wave": lambda: (Wave(), torch.randn(3, 2, 20), 3),
        "recurrent": lambda: (Recurrent(), torch.randint(0, 20, (3, 6)), 5),
        "rotary": lambda: (Rotary(), torch.randint(0, 20, (2, 6)), 20),
    }[name]()
    for value in module.parameters():
        value.data += torch.randn_like(value) * 0.1
    return module.eval(), x, classes


def gradients(name: str) -> dict[str, np.ndarray]:
    """The input, label, loss and gradients by the parameter's name."""
    module, x, classes = example(name)
    logits = module(x)
    label = torch.randint(0, classes, (logits.shape[0], *logits.shape[2:]))
    loss = F.cross_entropy(logits, label)
    loss.backward()
    found = {f"grad.{key}": value.grad.numpy() for key, value in module.named_parameters()}
    return {"x": x.numpy(), "label": label.numpy(), "loss": loss.detach().numpy(), **found}


def export(name: str, path: Path) -> None:
    module, x, _ = example(name)
    write_forward(module, x, path, optimize=False)


if __name__ == "__main__":
    from derive_cases import NAMED_MODELS

    for model in NAMED_MODELS:
        export(model, RECORDED / f"{model}.onnx")
        np.savez_compressed(RECORDED / f"{model}.npz", **gradients(model))
