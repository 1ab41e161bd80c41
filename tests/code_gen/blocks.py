"""Pieces of modules: each takes rows of WIDTH numbers and gives rows of WIDTH numbers, ``(N, WIDTH) -> (N, WIDTH)``."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8
ACTIVATIONS = (
    torch.tanh, F.gelu, F.softplus, F.silu, F.leaky_relu, F.elu, F.mish, torch.sigmoid, F.hardswish, F.selu, F.relu,
    F.softsign, F.logsigmoid, F.celu, torch.sin, torch.atan, torch.erf,
)  # fmt: skip


class Block(nn.Module):
    """A piece with settings drawn by ``draw``."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.act = draw.choice(ACTIVATIONS)


class Dense(Block):
    def __init__(self, draw):
        super().__init__(draw)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.8)
        self.residual = draw.random() < 0.5

    def forward(self, x):
        found = self.act(self.layer(x))
        return x + found if self.residual else found


class Norm(Block):
    def __init__(self, draw):
        super().__init__(draw)
        kinds = (
            lambda: nn.LayerNorm(WIDTH), lambda: nn.BatchNorm1d(WIDTH, momentum=draw.choice([0.1, 0.3])),
            lambda: nn.GroupNorm(2, WIDTH), lambda: nn.RMSNorm(WIDTH), lambda: nn.BatchNorm1d(WIDTH, affine=False),
            lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
        )  # fmt: skip
        self.norm = draw.choice(kinds)()

    def forward(self, x):
        return self.norm(x * 1.5 + 0.1)


class Views(Block):
    """Writes in place, through views."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), draw.randrange(6)

    def forward(self, x):
        h = self.layer(x)
        if self.kind == 0:
            h[:, ::2].mul_(1.5)
            h[0] += 0.1
        elif self.kind == 1:
            v = h.view(-1, 2, WIDTH // 2)
            v[:, 1] = v[:, 0].detach() ** 2
        elif self.kind == 2:
            h = h.clone()
            h.t()[1].copy_(x[:, 0])
            h.clamp_(-2, 2)
        elif self.kind == 3:
            left, right = h.chunk(2, -1)
            left.tanh_()
            h = torch.cat([right, left + 0.5 * right], -1)
        elif self.kind == 4:
            h = h.masked_fill(h.detach() > 1, 0.3).index_fill(1, torch.tensor([2]), 0.1)
            h.diagonal()[:2].add_(0.2)
        else:
            made = torch.empty_like(h)
            made[:, :3] = h[:, 5:]
            made[:, 3:] = h[:, :5] * 2
            h = made
        return self.act(h)


class Gate(Block):
    def __init__(self, draw):
        super().__init__(draw)
        self.layer = nn.Linear(WIDTH, 2 * WIDTH)
        self.glu, self.cut = draw.random() < 0.5, draw.random() < 0.4

    def forward(self, x):
        if self.glu:
            return F.glu(self.layer(x), -1)
        a, b = self.layer(x).chunk(2, -1)
        return (a.detach() if self.cut else a) * torch.sigmoid(b) + x


class Average(Block):
    """A buffer that the forward moves, and one that counts."""

    def __init__(self, draw):
        super().__init__(draw)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.layer, self.replace = nn.Linear(WIDTH, WIDTH), draw.random() < 0.5
        self.scales = draw.random() < 0.5

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            if self.replace:
                self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
            else:
                self.mean.lerp_(h.detach().mean(0), 0.2)
            self.calls += 1
        h = h - self.mean
        return h / (1 + 0.1 * self.calls) if self.scales else h


class Shared(Block):
    """One layer twice, and a weight that is used as it stands and transposed."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = draw.random() < 0.5
        if self.tied:
            self.other.weight = self.layer.weight

    def forward(self, x):
        return F.linear(self.act(self.other(self.act(self.layer(self.layer(x))))), self.layer.weight.t())


class Functional(Block):
    """Raw parameters, constants, and operators without a layer."""

    def __init__(self, draw):
        super().__init__(draw)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))
        self.kind = draw.randrange(14)

    def forward(self, x):
        h = torch.einsum("ni,ij->nj", x, self.w) * self.scale
        kind = self.kind
        if kind == 0:
            return torch.where(h > 0, h, 0.1 * x) + self.table
        if kind == 1:
            values, places = h.topk(3, -1)
            return x + torch.zeros_like(h).scatter(-1, places, values.softmax(-1))
        if kind == 2:
            return h.sort(-1).values * 0.5 + x.cumsum(-1) * 0.1
        if kind == 3:
            return torch.zeros_like(h).index_add(1, torch.tensor([0, 0, 3, 5, 1, 7, 7, 2]), h)
        if kind == 4:
            return h.roll(1, -1) + h.flip(-1) * 0.3 + F.pad(h[:, 2:], (1, 1))
        if kind == 5:
            return h.gather(1, torch.argsort(x, -1)) + h.amax(-1, keepdim=True) - h.mean(0)
        if kind == 6:
            return F.normalize(h, dim=-1) + torch.logsumexp(h, -1, keepdim=True) * 0.1
        if kind == 7:
            return torch.stack([h, x], 1).prod(1) + h.clamp(-1, 0.5)
        if kind == 8:
            return torch.bmm(h.view(-1, 2, 4), h.view(-1, 4, 2)).flatten(1).repeat(1, 2) * 0.5 + x
        if kind == 9:
            return (h.softmax(-1) @ self.w + h.std(-1, keepdim=True)).exp().log1p()
        if kind == 10:
            return h.abs().add(0.1).pow(1.5).sqrt() * torch.sign(h.detach()) + torch.maximum(h, x)
        if kind == 11:
            return torch.addmm(x, h, self.w, beta=0.5, alpha=0.3) + F.softmin(h, -1)
        if kind == 12:
            return torch.cdist(h, self.w) * 0.3 + F.cosine_similarity(h, x).unsqueeze(1)
        return (
            x + F.bilinear(h, x, self.w.view(2, 4, WIDTH).reshape(1, WIDTH, WIDTH)) + h.unfold(1, 3, 1).mean(-1)[:, :1]
        )


class Attention(Block):
    def __init__(self, draw):
        super().__init__(draw)
        self.kind = draw.randrange(3)
        if self.kind == 0:
            self.layer = nn.MultiheadAttention(4, 2, batch_first=True)
        else:
            self.qkv = nn.Linear(4, 12)
        self.causal = draw.random() < 0.5

    def forward(self, x):
        h = x.view(-1, 2, 4)
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1) if self.causal else None
        if self.kind == 0:
            return (h + self.layer(h, h, h, attn_mask=mask, need_weights=False)[0]).flatten(1)
        q, k, v = self.qkv(h).view(-1, 2, 3, 2, 2).permute(2, 0, 3, 1, 4)
        if self.kind == 1:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / 2**0.5
            scores = scores if mask is None else scores.masked_fill(mask, float("-inf"))
            found = scores.softmax(-1) @ v
        return (h + found.transpose(1, 2).reshape(-1, 2, 4)).flatten(1)


class Space(Block):
    """Convolutions, pooling and interpolation over WIDTH as one or two axes."""

    def __init__(self, draw):
        super().__init__(draw)
        self.kind = draw.randrange(7)
        layers = (
            lambda: nn.Conv1d(1, 2, 3, stride=2, padding=1), lambda: nn.ConvTranspose1d(2, 2, 2, stride=2, groups=2),
            lambda: nn.Conv2d(1, 4, (1, 3), padding=(0, 1), padding_mode=draw.choice(["zeros", "circular"])),
            lambda: nn.Conv1d(4, 8, 2, groups=2), lambda: nn.Conv3d(1, 1, 3, padding=1), lambda: nn.Conv1d(2, 2, 3),
            lambda: nn.ConvTranspose2d(1, 1, (2, 3), stride=1, padding=(0, 1)),
        )  # fmt: skip
        self.layer = layers[self.kind]()

    def forward(self, x):
        kind = self.kind
        if kind == 0:
            return self.layer(x.unsqueeze(1)).flatten(1)
        if kind == 1:
            return self.layer(F.avg_pool1d(x.view(-1, 2, 4), 2)).flatten(1)
        if kind == 2:
            return F.max_pool2d(self.layer(x.view(-1, 1, 2, 4)), 2).flatten(1)
        if kind == 3:
            return self.layer(x.view(-1, 4, 2)).flatten(1)
        if kind == 4:
            return self.layer(x.view(-1, 1, 2, 2, 2)).flatten(1)
        if kind == 5:
            return F.interpolate(self.layer(x.view(-1, 2, 4)), size=4, mode="linear").flatten(1)
        return F.adaptive_avg_pool2d(self.layer(x.view(-1, 1, 2, 4)), (2, 4)).flatten(1)


class Recurrent(Block):
    def __init__(self, draw):
        super().__init__(draw)
        kind = draw.choice([nn.GRU, nn.LSTM, nn.RNN])
        self.layer = kind(4, 4, num_layers=draw.choice([1, 2]), batch_first=True, bidirectional=draw.random() < 0.3)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 4))[0][..., :4].flatten(1)


class Experts(Block):
    """A mixture of experts in batched form."""

    def __init__(self, draw):
        super().__init__(draw)
        self.route = nn.Linear(WIDTH, 3)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)
        self.hard = draw.random() < 0.5

    def forward(self, x):
        chance = self.route(x).softmax(-1)
        self.balance = (chance.mean(0) ** 2).sum()
        if self.hard:
            best = F.one_hot(chance.argmax(-1), 3).to(x.dtype)
            chance = best * chance
        return torch.einsum("ne,nei->ni", chance, self.act(torch.einsum("ni,eij->nej", x, self.weights)))


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of a clip."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return slope * (x.abs() < ctx.bound), None


class Rounded(Block):
    def __init__(self, draw):
        super().__init__(draw)
        self.layer, self.trick = nn.Linear(WIDTH, WIDTH), draw.random() < 0.5

    def forward(self, x):
        h = self.layer(x)
        return h + (torch.round(h) - h).detach() if self.trick else Straight.apply(h, 1.5) + 0.1 * x


class Hooked(Block):
    """Hooks of a parameter, of a result, and of a module's backward."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layer, self.kind = nn.Linear(WIDTH, WIDTH), draw.randrange(5)
        if self.kind == 0:
            self.layer.weight.register_hook(lambda slope: slope * 0.5)
        elif self.kind == 1:
            self.layer.bias.register_post_accumulate_grad_hook(_halve)
        elif self.kind == 2:
            self.layer.register_full_backward_hook(lambda module, inner, outer: tuple(each * 0.7 for each in inner))
        elif self.kind == 3:
            self.layer.register_forward_hook(lambda module, given, found: found * 1.1)

    def forward(self, x):
        h = self.layer(self.act(x))
        if self.kind == 4:
            h.register_hook(lambda slope: slope.clamp(-0.01, 0.01))
        return h


def _halve(parameter):
    parameter.grad.mul_(0.5)


class Again(Block):
    """Computed again in the backward."""

    def __init__(self, draw):
        super().__init__(draw)
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), draw.random() < 0.5

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Parametrized(Block):
    def __init__(self, draw):
        super().__init__(draw)
        self.layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.act(self.layer(x))


class Quiet(Block):
    """Without a gradient in part, and a parameter that is used only there."""

    def __init__(self, draw):
        super().__init__(draw)
        self.layer, self.probe, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.toggles = draw.random() < 0.4

    def forward(self, x):
        with torch.no_grad():
            aim = self.probe(x).sigmoid()
        if self.toggles:
            self.layer.bias.requires_grad_(False)
        found = self.layer(x) * aim
        self.layer.bias.requires_grad_(True)
        return found


class Noise(Block):
    """Random numbers of each kind; the draws of a step are inputs."""

    def __init__(self, draw):
        super().__init__(draw)
        self.kind = draw.randrange(8)

    def forward(self, x):
        kind = self.kind
        if kind == 0:
            return F.dropout(x, 0.3)
        if kind == 1:
            return x + 0.1 * torch.randn_like(x)
        if kind == 2:
            return x * (torch.rand(x.shape[0], 1) < 0.8) / 0.8
        if kind == 3:
            return torch.distributions.Normal(x, x.detach().abs() * 0.1 + 0.1).rsample()
        if kind == 4:
            return x + F.gumbel_softmax(x) * 0.5
        if kind == 5:
            return x[torch.randperm(x.shape[0])] * 0.5 + x * 0.5
        if kind == 6:
            return F.alpha_dropout(x, 0.2, training=True)
        return x + torch.empty_like(x).uniform_(-0.1, 0.1) + torch.normal(torch.zeros_like(x), 0.1)


BLOCKS = (
    Dense, Dense, Norm, Views, Gate, Average, Shared, Functional, Functional, Functional, Attention, Space, Space,
    Recurrent, Experts, Rounded, Hooked, Again, Parametrized, Quiet, Noise,
)  # fmt: skip
