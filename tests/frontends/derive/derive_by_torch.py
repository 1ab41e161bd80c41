"""The same in PyTorch; ``python tests/frontends/derive/derive_by_torch.py`` records it for tests without PyTorch.

Recorded on 2026-11-23 with torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from derive_cases import CASES, COMBINATIONS, LR, MODELS, RECORDED, Case, batches, start_values
from torch import nn


class Lion(torch.optim.Optimizer):
    """Chen and others (2023), algorithm 2: PyTorch has none."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"]).sub_(lr * torch.sign(b1 * m + (1 - b1) * p.grad))
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def torch_run(case: Case) -> tuple[dict[str, np.ndarray], list[float]]:
    """Parameters behind five steps, and the loss of each."""
    values = {name: torch.tensor(value, requires_grad=True) for name, value in start_values().items()}
    kind, arguments = case.torch
    optimizer = (Lion if kind == "Lion" else getattr(torch.optim, kind))(list(values.values()), lr=LR, **arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=case.around["scale"]) if "scale" in case.around else None
    scheduler = None
    if "schedule" in case.around:
        name, given = case.around["schedule"]
        scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **given)
    losses = []
    for x, label in batches(case):
        optimizer.zero_grad()
        hidden = torch.tanh(torch.tensor(x) @ values["w1"] + values["b1"])
        loss = nn.functional.cross_entropy(hidden @ values["w2"] + values["b2"], torch.tensor(label))
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(optimizer)
        if "clip_norm" in case.around:
            nn.utils.clip_grad_norm_(values.values(), case.around["clip_norm"])
        if "clip_value" in case.around:
            nn.utils.clip_grad_value_(values.values(), case.around["clip_value"])
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(float(loss.detach()))
    return {name: value.detach().numpy() for name, value in values.items()}, losses


class Gpt(nn.Module):
    """Two blocks; the embedding is tied to the output."""

    def __init__(self, words: int = 24, width: int = 16, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.words, self.heads = nn.Embedding(words, width), heads
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "first": nn.LayerNorm(width), "qkv": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                    "second": nn.LayerNorm(width), "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(2)
        )  # fmt: skip
        self.last = nn.LayerNorm(width)
        self.register_buffer("mask", torch.triu(torch.full((length, length), -math.inf), 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        x = self.words(ids) + self.places
        for block in self.blocks:
            q, k, v = block["qkv"](block["first"](x)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.mask).softmax(-1)
            x = x + block["out"]((seen @ v).transpose(1, 2).reshape(batch, length, -1))
            x = x + block["down"](nn.functional.gelu(block["up"](block["second"](x))))
        return self.last(x) @ self.words.weight.T


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Last(nn.Module):
    """An LSTM's last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0][:, -1]


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A module and its input."""
    torch.manual_seed(3)
    if name == "mlp":
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(5, 6)
    if name == "cnn":
        layers = [
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
        ]  # fmt: skip
        return nn.Sequential(*layers), torch.randn(3, 2, 8, 8)
    if name == "embedding":
        return nn.Sequential(nn.Embedding(12, 6), Mean(), nn.Linear(6, 3)), torch.randint(0, 12, (5, 4))
    if name == "gpt":
        module = Gpt()
        for value in module.parameters():  # the exporter merges parameters of equal values, such as all scales
            value.data += torch.randn_like(value) * 0.1
        return module, torch.randint(0, 24, (2, 6))
    if name == "lstm":
        return nn.Sequential(Last(), nn.Linear(5, 3)), torch.randn(4, 3, 4)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    return nn.Sequential(*layers), torch.randn(4, 2, 4, 4)


def label_of(name: str, x: torch.Tensor) -> torch.Tensor:
    shape = (*x.shape, 24) if name == "gpt" else (len(x), 4 if name == "mlp" else 3)
    torch.manual_seed(4)
    return torch.randint(0, shape[-1], shape[:-1])


def export(name: str, path: Path) -> None:
    """Write the forward model; BatchNorm in inference form, not fused into the convolution; a tied weight, not
    folded."""
    module, x = model(name)
    module.eval()
    write_forward(module, x, path, optimize=name not in ("batchnorm", "gpt"))


def write_forward(module: nn.Module, x: torch.Tensor, path: Path, *, optimize: bool) -> None:
    """Export a module without what the exporter says of itself."""
    import onnx

    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(module, (x,), path, dynamo=True, verbose=False, opset_version=20, external_data=False,
                          optimize=optimize, input_names=["x"], output_names=["logits"])  # fmt: skip
    made = onnx.load(path)
    for each in [made, made.graph, *made.graph.node, *made.graph.input, *made.graph.output, *made.graph.initializer]:
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    del made.graph.value_info[:]
    onnx.save(made, path)


def torch_gradients(name: str) -> dict[str, np.ndarray]:
    """The input, label, loss and gradients of a model; running statistics behind a step for BatchNorm."""
    module, x = model(name)
    module.train(name == "batchnorm")
    label = label_of(name, x)
    logits = module(x)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), label.flatten())
    loss.backward()
    found = {f"grad.{key}": value.grad.numpy() for key, value in module.named_parameters()}
    if name == "batchnorm":
        found |= {f"after.{key}": value.numpy() for key, value in module.named_buffers() if "running" in key}
    return {"x": x.numpy(), "label": label.numpy(), "loss": loss.detach().numpy(), **found}


def record() -> None:
    """Write PyTorch's numbers, and the models."""
    record_optimizers()
    for name in MODELS:
        export(name, RECORDED / f"{name}.onnx")
        np.savez_compressed(RECORDED / f"{name}.npz", **torch_gradients(name))


def record_optimizers() -> None:
    kept = {}
    for name, case in {**CASES, **COMBINATIONS}.items():
        values, losses = torch_run(case)
        kept |= {f"{name}/{key}": value for key, value in values.items()}
        kept[f"{name}/losses"] = np.array(losses)
    np.savez_compressed(RECORDED / "optimizers.npz", **kept)


if __name__ == "__main__":
    record()
