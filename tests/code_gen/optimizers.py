"""Optimizers with options drawn at random, and schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim import lr_scheduler as schedules


class Clipping(optim.SGD):
    """Clips by hand, in its step."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_value_([each for group in self.param_groups for each in group["params"]], 0.02)
        return super().step(closure)


class Written(optim.Optimizer):
    """Written by hand, on ``data``; its state is made in its first step, with a count in Python."""

    def __init__(self, parameters: Any, lr: float = 0.05, assigns: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "beta": 0.8})
        self.assigns = assigns

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                if not state:
                    state["sum"], state["count"] = torch.zeros_like(each.data), 0
                state["count"] += 1
                state["sum"].mul_(group["beta"]).add_(each.grad.data, alpha=1 - group["beta"])
                move = state["sum"] / (1 - group["beta"] ** state["count"])
                if self.assigns:
                    each.data = each.data - group["lr"] * move.sign()
                else:
                    each.data.add_(move, alpha=-group["lr"])


def draw_optimizer(draw: random.Random) -> tuple[str, Callable[[Any], optim.Optimizer]]:
    """Its name with its options, and a function of parameters."""
    kind = draw.choice(
        [
            "SGD", "SGD", "Adam", "AdamW", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam",
            "RAdam", "ASGD", "Rprop", "Adafactor", "Clipping", "Written",
        ]
    )  # fmt: skip
    some: dict[str, Any] = {"lr": draw.choice([2.0**-3, 2.0**-5, 2.0**-7, 2.0**-10])}
    maybe = lambda name, *values: some.update({name: draw.choice(values)}) if draw.random() < 0.5 else None  # noqa: E731
    if kind == "Written":
        maybe("assigns", True)
        return f"{kind} {some}", lambda parameters: Written(parameters, **some)
    maybe("weight_decay", 0.01, 0.2)
    if kind in ("SGD", "Clipping"):
        maybe("momentum", 0.9, 0.5)
        if some.get("momentum"):
            maybe("nesterov", True) if draw.random() < 0.5 else maybe("dampening", 0.3)
    if kind in ("Adam", "AdamW", "Adamax", "NAdam", "RAdam"):
        maybe("betas", (0.8, 0.95), (0.5, 0.999))
    if kind in ("Adam", "AdamW"):
        maybe("amsgrad", True)
    if kind == "RMSprop":
        maybe("centered", True)
        maybe("momentum", 0.9)
        maybe("alpha", 0.9)
    if kind == "Adagrad":
        maybe("lr_decay", 0.1)
        maybe("initial_accumulator_value", 0.1)
    if kind in ("NAdam", "RAdam"):
        maybe("decoupled_weight_decay", True)
    if kind == "Rprop":
        some.pop("weight_decay", None)
    if kind in ("Adam", "AdamW", "SGD", "Adagrad") and draw.random() < 0.3:
        some["fused"] = True
    elif kind not in ("Adafactor", "Clipping"):
        maybe("foreach", True, False)
    maybe("maximize", True) if draw.random() < 0.4 else None
    if draw.random() < 0.15 and not some.get("foreach") and kind != "Adafactor":
        some["lr"] = torch.tensor(some["lr"])
    made = Clipping if kind == "Clipping" else getattr(optim, kind)
    return f"{kind} {some}", lambda parameters: made(parameters, **some)


def draw_schedule(draw: random.Random) -> tuple[str, Callable[[optim.Optimizer], Any] | None]:
    """Its name, and a function of the optimizer; None for no schedule."""
    if draw.random() < 0.6:
        return "", None
    kinds: dict[str, Callable[[optim.Optimizer], Any]] = {
        "step": lambda o: schedules.StepLR(o, 2, 0.5),
        "cosine": lambda o: schedules.CosineAnnealingLR(o, 9, eta_min=1e-4),
        "linear": lambda o: schedules.LinearLR(o, 0.2, total_iters=4),
        "sequence": lambda o: schedules.SequentialLR(
            o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 9)], [2]
        ),
        "warm-up": lambda o: schedules.LambdaLR(o, lambda step: min(1.0, step / 3)),
        "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.8**step),
        "chained": lambda o: schedules.ChainedScheduler(
            [schedules.ConstantLR(o, 0.3, 2), schedules.ExponentialLR(o, 0.9)]
        ),
        "each its own": lambda o: schedules.LambdaLR(
            o, [(lambda step, place=place: 0.5 ** (place * (step > 3))) for place in range(len(o.param_groups))]
        ),
        "milestones": lambda o: schedules.MultiStepLR(o, [2, 4]),
    }
    name = draw.choice(list(kinds))
    return name, kinds[name]
