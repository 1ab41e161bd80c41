"""A piece of training code drawn from a seed: module, loss, optimizers, schedule, batches, options of an export."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from code_gen.blocks import BLOCKS, WIDTH
from code_gen.optimizers import draw_optimizer, draw_schedule
from gopt.frontends.pytorch.options import ExportOptions

ROWS, CLASSES, WORDS = 5, 4, 11


class Net(nn.Module):
    """Words or numbers, blocks, and a head. ``teacher``: a part that follows the blocks, and gets no gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(f"net {seed}")
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=draw.choice([None, 0])) if draw.random() < 0.4 else None
        self.kinds = [draw.choice(BLOCKS) for _ in range(draw.randint(1, 4))]
        self.blocks = nn.Sequential(*(kind(draw) for kind in self.kinds))
        self.head = nn.Linear(WIDTH, CLASSES)
        if draw.random() < 0.2:
            self.blocks[0].requires_grad_(False)
        self.teacher = None
        if draw.random() < 0.2:
            self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks(self.features(x))
        if self.teacher is not None:
            with torch.no_grad():
                for mine, theirs in zip(self.head.parameters(), self.teacher.parameters()):
                    theirs.mul_(0.7).add_(mine, alpha=0.3)
                aim = self.teacher(h)
            return self.head(h) - 0.1 * aim
        return self.head(h)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.words is None else self.words(x).mean(1)


def _classes(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(module(batch["x"]), batch["y"], ignore_index=-100, label_smoothing=0.1)


def _weighted(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=module.head.weight.dtype)
    return F.cross_entropy(module(batch["x"]), batch["y"], weight=weight)


def _numbers(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    aim = F.one_hot(batch["y"].clamp(min=0), CLASSES).to(module.head.weight.dtype)
    valid = (batch["y"] >= 0).to(aim.dtype)
    return (F.smooth_l1_loss(module(batch["x"]), aim, reduction="none").mean(1) * valid).sum() / valid.sum()


def _binary(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    aim = (batch["y"] % 2).to(module.head.weight.dtype)
    return F.binary_cross_entropy_with_logits(module(batch["x"])[:, 0], aim) + module(batch["x"]).square().mean() * 0.01


def _with_decay(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return _classes(module, batch) + 1e-2 * sum(each.square().sum() for each in module.parameters())


def _contrast(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    h = F.normalize(module(batch["x"]), dim=-1)
    same = (batch["y"][:, None] == batch["y"][None]).to(h.dtype)
    return F.kl_div((h @ h.T / 0.3).log_softmax(-1), same / same.sum(-1, keepdim=True), reduction="batchmean")


def _in_parts(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Gradients are accumulated by hand."""
    (_classes(module, {"x": batch["x"][:3], "y": batch["y"][:3].clamp(min=0)}) / 2).backward()
    return _classes(module, {"x": batch["x"][2:], "y": batch["y"][2:].clamp(min=0)}) / 2


def _two_sides(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """As a GAN: the head is frozen for one loss, and its input detached for the other."""
    h = module.blocks(module.features(batch["x"]))
    for each in module.head.parameters():
        each.requires_grad_(False)
    first = F.softplus(-module.head(h)).mean()
    for each in module.head.parameters():
        each.requires_grad_(True)
    return first + F.softplus(module.head(h.detach())).mean()


def _slope(module: Net, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """With a penalty on the gradient of an input."""
    h = module.features(batch["x"]).detach().requires_grad_(True)
    inner = torch.tanh(module.head(h) @ module.head.weight)
    (slope,) = torch.autograd.grad(module.head(inner).sum(), h, create_graph=True)
    return _classes(module, batch) + (slope.norm(dim=1) - 1).square().mean()


LOSSES: tuple[Callable[[Net, dict[str, torch.Tensor]], torch.Tensor], ...] = (
    _classes, _classes, _weighted, _numbers, _binary, _with_decay, _contrast, _in_parts, _two_sides, _slope,
)  # fmt: skip


@dataclass(slots=True)
class Code:
    """Training code. ``make``: a fresh ``(module, loss, optimizers, batch[, schedule])``, always the same one;
    ``batch``: a fresh batch; ``told``: what was drawn, in words."""

    seed: int
    double: bool
    options: ExportOptions
    told: str = ""
    words: bool = False
    ignores: bool = False
    make: Callable[[], tuple[Any, ...]] = field(default=lambda: ())

    @property
    def draws(self) -> bool:
        return "Noise" in self.told

    def batch(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        if self.ignores:
            y[1:] = y[1:].masked_fill(torch.rand(ROWS - 1, generator=generator) < 0.3, -100)
        if self.words:
            return {"x": torch.randint(0, WORDS, (ROWS, 3), generator=generator), "y": y}
        x = torch.randn(ROWS, WIDTH, generator=generator)
        return {"x": x.double() if self.double else x, "y": y}


def draw_code(seed: int, double: bool | None = None) -> Code:
    """The code of a seed."""
    draw = random.Random(f"code {seed}")
    kind = draw.random() < 0.5
    loss = draw.choice(LOSSES)
    code = Code(seed, kind if double is None else double, _options(draw))
    torch.manual_seed(seed)
    net = Net(seed)
    code.words, code.ignores = net.words is not None, loss in (_classes, _numbers)
    name, optimizer = draw_optimizer(draw)
    other_name, other = draw_optimizer(draw)
    groups, two = draw.random() < 0.3, draw.random() < 0.2
    schedule_name, schedule = draw_schedule(draw)
    code.told = (
        f"seed {seed}: {'double' if code.double else 'float'} {[each.__name__ for each in net.kinds]} "
        f"{'words ' * code.words}{'teacher ' * (net.teacher is not None)}{loss.__name__}, {name}"
        f"{f', {other_name}' * two}{', groups' * groups} {schedule_name} {_said(code.options)}"
    )

    def make() -> tuple[Any, ...]:
        torch.manual_seed(seed)
        module = Net(seed)
        module = module.double() if code.double else module
        own = [each for each in module.parameters() if each.requires_grad]
        if two and len(own) > 2:
            optimizers = [optimizer(own[:-2]), other(own[-2:])]
        elif groups and len(own) > 2:
            optimizers = [optimizer([{"params": own[:2]}, {"params": own[2:], "lr": 0.02}])]
        else:
            optimizers = [optimizer(own)]
        rest = [] if schedule is None else [schedule(optimizers[0])]
        return module, loss, optimizers, code.batch(torch.Generator().manual_seed(seed)), *rest

    code.make = make
    return code


def _options(draw: random.Random) -> ExportOptions:
    some: dict[str, Any] = {}
    if draw.random() < 0.2:
        some["clip_norm"] = draw.choice([0.1, 1.0])
    elif draw.random() < 0.15:
        some["clip_value"] = 0.05
    if draw.random() < 0.15:
        some["ema"] = 0.9
    if draw.random() < 0.15:
        some["loss_scale"] = draw.choice(["dynamic", 128.0])
    return ExportOptions(check=draw.choice([2, 3]), **some)


def _said(options: ExportOptions) -> str:
    plain = ExportOptions()
    names = ("clip_norm", "clip_value", "ema", "loss_scale", "check")
    mine = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(plain, name)}
    return " ".join(f"{name}={value}" for name, value in mine.items())
