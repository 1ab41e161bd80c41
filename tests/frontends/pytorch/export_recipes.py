"""Factories of small training steps, as users write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

CLASSES = 4


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randint(0, CLASSES, (shape[0],))


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


def with_optimizer(make):
    def factory():
        net = _mlp()
        return net, F.cross_entropy, make(net.parameters()), batch(8, 6)

    return factory


def with_scheduler(make):
    def factory():
        net = nn.Linear(6, CLASSES)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        return net, F.cross_entropy, optimizer, batch(5, 6), make(optimizer)

    return factory


def convolution(dims: int, transposed: bool, groups: int = 1):
    kinds = ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d))
    kind = kinds[dims - 1][transposed]

    def factory():
        net = nn.Sequential(
            kind(4, 8, 3, stride=2, padding=1, groups=groups), nn.ReLU(),
            kind(8, 4, 3, padding=1, dilation=1, groups=groups), nn.Flatten(), nn.LazyLinear(CLASSES),
        )  # fmt: skip
        x, y = batch(3, 4, *([6] * dims))
        net(x)
        return net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), (x, y)

    return factory


def dropout():
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, CLASSES), nn.Dropout(0.1))
    return net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), batch(8, 6)


def batch_norm():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, CLASSES),
    )  # fmt: skip
    return net, F.cross_entropy, torch.optim.RMSprop(net.parameters(), 0.01), batch(4, 3, 8, 8)


class Checkpointed(nn.Module):
    """The first layer is computed again in the backward."""

    def __init__(self, reentrant: bool, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.reentrant, self.p = reentrant, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(value: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.inner(value)), self.p)

        return self.last(checkpoint(inner, self.first(x), use_reentrant=self.reentrant))


def checkpointed(reentrant: bool, p: float = 0.0):
    def factory():
        net = Checkpointed(reentrant, p)
        return net, F.cross_entropy, torch.optim.Adam(net.parameters(), 0.01), batch(5, 6)

    return factory


def groups():
    """Groups with other rates and decays, a frozen bias."""
    net = _mlp()
    net[0].bias.requires_grad_(False)
    wide = [each for each in net.parameters() if each.dim() > 1]
    flat = [each for each in net.parameters() if each.dim() == 1 and each.requires_grad]
    settings = [{"params": wide, "weight_decay": 0.1, "lr": 0.02}, {"params": flat, "weight_decay": 0.0}]
    return net, F.cross_entropy, torch.optim.AdamW(settings, lr=0.01), batch(5, 6)


def two_optimizers():
    net = _mlp()
    rest = [each for layer in net[1:] for each in layer.parameters()]
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.1, momentum=0.9), torch.optim.AdamW(rest, 0.01)]
    return net, F.cross_entropy, optimizers, batch(5, 6)


class Tied(nn.Module):
    """A language model whose head is its embedding; the module gives its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(self.layer(self.words(ids)))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)}


def tied():
    net = Tied()
    ids = torch.randint(0, 11, (3, 5))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    return net, None, torch.optim.Adam(net.parameters(), 0.01, eps=1e-6), {"ids": ids, "labels": labels}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


def lstm():
    net = Recurrent()
    return net, F.cross_entropy, torch.optim.Adam(net.parameters(), 0.01), batch(4, 3, 6)


class Recommender(nn.Module):
    """Bags of rows of tables, and dense features."""

    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(50, 8, mode=mode) for _ in range(3)])
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(14, 1)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        vectors = [torch.relu(self.dense(dense)), *(table(ids[:, place]) for place, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        crossed = (stacked @ stacked.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([vectors[0], crossed], 1)).squeeze(1)


def recommender(mode: str):
    def factory():
        net = Recommender(mode)
        batch = (torch.randn(6, 5), torch.randint(0, 50, (6, 3, 2)), torch.rand(6).round())
        return net, F.binary_cross_entropy_with_logits, torch.optim.Adagrad(net.parameters(), 0.05), batch

    return factory


optim = torch.optim
OPTIMIZERS = {
    "adadelta": lambda p: optim.Adadelta(p), "adafactor": lambda p: optim.Adafactor(p),
    "adagrad": lambda p: optim.Adagrad(p), "adam": lambda p: optim.Adam(p, 0.01, foreach=True),
    "amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True), "adamw": lambda p: optim.AdamW(p, 0.01),
    "adamax": lambda p: optim.Adamax(p, 0.01), "asgd": lambda p: optim.ASGD(p), "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p), "rprop": lambda p: optim.Rprop(p), "sgd": lambda p: optim.SGD(p, 0.1),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "nesterov": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "muon": lambda p: optim.Muon([each for each in p if each.dim() == 2]),
    "maximize": lambda p: optim.Adam(p, 0.01, maximize=True),
}  # fmt: skip
SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 2, 0.5), "linear": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9), "cosine": lambda o: schedulers.CosineAnnealingLR(o, 40),
    "polynomial": lambda o: schedulers.PolynomialLR(o, 10), "constant": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 4]),
}  # fmt: skip
STEPS = {
    **{f"optimizer {name}": with_optimizer(make) for name, make in OPTIMIZERS.items()},
    **{f"scheduler {name}": with_scheduler(make) for name, make in SCHEDULERS.items()},
    **{
        f"convolution {dims}d{' transposed' * transposed}": convolution(dims, transposed)
        for dims in (1, 2, 3)
        for transposed in (False, True)
    },
    "convolution in groups": convolution(2, False, 2), "transposed in groups": convolution(2, True, 2),
    "dropout": dropout, "batch norm": batch_norm, "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True), "groups": groups, "two optimizers": two_optimizers, "tied": tied,
    "lstm": lstm, "bags, sum": recommender("sum"), "bags, mean": recommender("mean"),
}  # fmt: skip


class Shaped(nn.Module):
    def __init__(self, reshape):
        super().__init__()
        self.layer, self.reshape = nn.Linear(4, 3), reshape

    def forward(self, x):
        return self.reshape(self.layer(x))


def reshaping(reshape):
    def factory():
        net = Shaped(reshape)
        return (
            net,
            nn.functional.mse_loss,
            torch.optim.Adam(net.parameters(), 0.1),
            (torch.randn(5, 4), torch.ones(5, 3)),
        )

    return factory
