"""A denoising diffusion model: a U-Net, random timesteps and noise in the loss, moving averages of weights (--ema)."""

import math

import torch
from torch import nn
from torch.nn import functional as F

STEPS, SIDE, WIDTH = 50, 8, 8


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(WIDTH, outputs)

    def forward(self, x, time):
        return self.conv(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 1, 3, padding=1)
        self.down, self.middle, self.up = Block(WIDTH, 16), Block(16, 16), Block(16 + WIDTH, WIDTH)
        frequencies = torch.exp(-math.log(1000.0) * torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x, t):
        angles = t[:, None].float() * self.frequencies
        time = torch.cat([angles.sin(), angles.cos()], 1)
        skip = self.first(x)
        h = F.avg_pool2d(self.down(skip, time), 2)
        h = F.interpolate(self.middle(h, time), scale_factor=2, mode="nearest")
        noise = self.last(F.silu(self.up(torch.cat([h, skip], 1), time)))
        return noise


ALPHAS = torch.cumprod(1 - torch.linspace(1e-3, 0.1, STEPS), 0)


def loss(model, batch):
    image = batch["image"]
    t = torch.randint(0, STEPS, (image.shape[0],))
    noise = torch.randn_like(image)
    kept = ALPHAS[t][:, None, None, None]
    return F.mse_loss(model(kept.sqrt() * image + (1 - kept).sqrt() * noise, t), noise)


def make():
    model = UNet()
    return model, loss, torch.optim.Adam(model.parameters(), lr=2e-3), {"image": torch.rand(4, 1, SIDE, SIDE)}
