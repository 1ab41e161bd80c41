"""The same code by a training loop as a user writes it, and the exported file by ONNX Runtime, on batches that the
export did not see."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from code_gen.codes import Code
from gopt.frontends.pytorch.randomness import ReplayedDraws

STEPS = 6
NOISE = 64.0
"""Allowed: this many times what a disturbance of all parameters in the last place does."""
SHARE = {True: 3e-7, False: 1e-5}
"""And this share of a value, in float64, where rates and numbers of Python are float32 in a file, and in float32."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of each step, states behind the last by name, the rate of each group in each step, and that of the first
    before its schedule."""

    losses: list[float]
    states: Arrays
    rates: list[list[float]]
    base: float


def trained(
    code: Code, batches: Sequence[Sequence[Mapping[str, torch.Tensor]]], draws: Sequence[Sequence[torch.Tensor]] = (),
    shake: int | None = None,
) -> Trained:  # fmt: skip
    """Train by PyTorch. ``batches``: one for each rank in each step; gradients and losses are averaged.

    ``draws``: the random numbers of each step. ``shake``: the seed of a disturbance in the last place.
    """
    made = code.make()
    module, loss, optimizers = made[:3]
    schedule = made[4] if len(made) > 4 else None
    if shake is not None:
        _disturb(module, code, shake)
    own = [each for one in optimizers for group in one.param_groups for each in group["params"]]
    options = code.options
    average = {name: each.detach().clone() for name, each in module.named_parameters()}
    scaler = torch.amp.GradScaler("cpu", enabled=options.loss_scale is not None)
    if isinstance(options.loss_scale, float):
        scaler = torch.amp.GradScaler("cpu", init_scale=options.loss_scale, growth_interval=10**6)
    losses, rates = [], []
    for step, ranks in enumerate(batches):
        rates.append([float(group["lr"]) for one in optimizers for group in one.param_groups])
        for one in optimizers:
            one.zero_grad()
        mean = 0.0
        with sdpa_kernel(SDPBackend.MATH), ReplayedDraws(draws[step] if draws else ()):
            for batch in ranks:
                found = loss(module, dict(batch)) / len(ranks)
                mean += float(found.detach())
                scaler.scale(found).backward()
        for one in optimizers:
            scaler.unscale_(one)
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(own, options.clip_norm)
        if options.clip_value is not None:
            torch.nn.utils.clip_grad_value_(own, options.clip_value)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        if schedule is not None:
            schedule.step()
        with torch.no_grad():
            for name, each in module.named_parameters():
                average[name] = average[name] * (options.ema or 0) + each * (1 - (options.ema or 0))
        losses.append(mean)
    base = float(optimizers[0].param_groups[0].get("initial_lr", rates[0][0]))
    return Trained(losses, _states(module, optimizers, average), rates, base)


def _disturb(module: torch.nn.Module, code: Code, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    unit = 2.0**-52 if code.double else 2.0**-23
    with torch.no_grad():
        for each in module.parameters():
            each.mul_(1 + unit * torch.randn(each.shape, generator=generator).to(each.dtype))


def _states(module: Any, optimizers: Any, average: Mapping[str, torch.Tensor]) -> Arrays:
    names = {id(each): name for name, each in module.named_parameters()}
    found = dict((*module.named_parameters(), *module.named_buffers()))
    found |= {f"ema.{name}": each for name, each in average.items()}
    for one in optimizers:
        for parameter, state in one.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor | int | float):
                    found[f"{names[id(parameter)]}.{key}"] = torch.as_tensor(value)
    return {name: each.detach().numpy().copy() for name, each in found.items()}


class Exported:
    """An exported step in ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        model = onnx.load(path)
        entry = next(each for each in model.metadata_props if each.key == "gopt.roles")
        self.pairs: dict[str, str] = json.loads(entry.value)["states"]
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self._session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.held = {
            each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer if each.name in self.pairs
        }
        self.inputs = {each.name: each for each in self._session.get_inputs()}
        self.constants = {
            each.name: onnx.numpy_helper.to_array(each)
            for each in model.graph.initializer
            if each.name not in self.pairs
        }

    def draws(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Fresh random numbers for a step, uniform or normal alike: they are uniform, which both may be."""
        names = sorted((name for name in self.inputs if name.startswith("draw_")), key=lambda name: int(name[5:]))
        return {name: torch.rand(self.inputs[name].shape, generator=generator) for name in names}

    def step(self, feeds: Mapping[str, np.ndarray]) -> float:
        names = [each.name for each in self._session.get_outputs()]
        given = {**{name: value for name, value in feeds.items() if name in self.inputs}, **self.held}
        results = dict(zip(names, self._session.run(names, given)))
        self.held = {name: results[new] for name, new in self.pairs.items()}
        return float(results["loss"])


def differences(code: Code, path: Path) -> list[str]:
    """What differs between the file and PyTorch over STEPS fresh batches, in words."""
    generator = torch.Generator().manual_seed(code.seed + 1000)
    batches = [[code.batch(generator)] for _ in range(STEPS)]
    step = Exported(path)
    numbers = [step.draws(generator) for _ in batches]
    draws = [list(each.values()) for each in numbers]
    eager = trained(code, batches, draws)
    shaken = [trained(code, batches, draws, shake=place) for place in range(3)]
    losses = []
    for place, ((batch,), drawn) in enumerate(zip(batches, numbers)):
        feeds = {name: each.numpy() for name, each in {**batch, **drawn}.items()}
        losses.append(step.step(feeds | rates_of(step.pairs, eager, place)))
    others = [each.losses for each in shaken]
    return [
        *losses_apart(losses, eager.losses, others, code),
        *states_apart(step.held, eager.states, [each.states for each in shaken], code),
        *_lost(step, code, eager),
    ]


def rates_of(states: Iterable[str], eager: Trained, place: int) -> Arrays:
    """The inputs that are rates in a step: of the first group, and of the last. With a schedule in the graph it is the
    rate before the schedule."""
    rates = eager.rates[place]
    first = eager.base if "scheduler.step" in states else rates[0]
    return {"lr": np.asarray(first, np.float32), "lr.1": np.asarray(rates[-1], np.float32)}


def losses_apart(mine: Sequence[float], theirs: Sequence[float], others: Sequence[Sequence[float]], code: Code) -> Any:
    for place, (a, b) in enumerate(zip(mine, theirs)):
        noise = max(abs(other[place] - b) for other in others)
        if not abs(a - b) <= SHARE[code.double] * (1 + abs(b)) + NOISE * noise:
            yield f"loss of step {place + 1}: {a!r}, PyTorch {b!r}"


def states_apart(mine: Arrays, theirs: Arrays, others: Sequence[Arrays], code: Code) -> Any:
    for name, value in mine.items():
        if name not in theirs:
            if not name.startswith(("optimizer", "scheduler.", "loss_scale")):
                yield f"{name} is no state of PyTorch"
            continue
        other = theirs[name]
        noise = max(_norm(each[name], other) for each in others)
        allowed = NOISE * noise + SHARE[code.double] * (_norm(other, 0 * other) + 1e-3)
        if not _norm(value, other) <= allowed:
            yield f"{name}: {_norm(value, other):.3g} away, allowed {allowed:.3g}"


def _lost(step: Exported, code: Code, eager: Trained) -> Any:
    """Values that PyTorch changed and the file does not carry."""
    before = code.make()[0].state_dict()
    for name, value in eager.states.items():
        if name in before and name not in step.held and not np.array_equal(before[name].numpy(), value):
            yield f"{name} changes in PyTorch, and is no state of the file"


def _norm(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm((a.astype(np.float64) - b.astype(np.float64)).ravel()))
