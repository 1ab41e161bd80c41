"""What the step must do, by means that share nothing with gopt: losses by NumPy over onnx's evaluator in float64,
gradients by central differences, updates by formulas of the papers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from .kernels import KERNELS
from .make import Forward
from .sketch import wide

STEP = 1e-5
Arrays = dict[str, np.ndarray]


class Unsteady(Exception):
    """Two differences disagree: a kink is near."""


class Loss:
    """The loss of a forward model as a function of weights and batch."""

    def __init__(self, forward: Forward) -> None:
        self.forward, model = forward, wide(forward.model)
        kept = [
            node for node in model.graph.node if not (node.op_type == "Constant" and node.output[0] in forward.weights)
        ]
        del model.graph.node[:]
        model.graph.node.extend(kept)
        stored = [each for each in model.graph.initializer if each.name not in forward.weights]
        del model.graph.initializer[:]
        model.graph.initializer.extend(stored)
        names = {each.name for each in model.graph.input}
        for name, value in forward.weights.items():
            if name not in names:
                model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.DOUBLE, value.shape))
        self.evaluator = ReferenceEvaluator(model, new_ops=KERNELS)
        self.fed = {each.name for each in forward.model.graph.input}

    def forward_result(self, batch: Arrays, weights: Arrays | None = None) -> np.ndarray:
        fed = {name: value for name, value in batch.items() if name in self.fed}
        with np.errstate(all="ignore"):
            (made,) = self.evaluator.run(None, {**fed, **(self.forward.weights if weights is None else weights)})
        return np.asarray(made, np.float64)

    def __call__(self, weights: Arrays, batch: Arrays) -> float:
        made = self.forward_result(batch, weights)
        if self.forward.loss == "mse":
            return float(((made - batch["target"]) ** 2).mean())
        if self.forward.loss == "cross-entropy":
            moved = made - made.max(1, keepdims=True)
            chosen = moved[np.arange(len(made)), batch["label"]]
            return float((np.log(np.exp(moved).sum(1)) - chosen).mean())
        return float(made.reshape(()))


def gradients(loss: Loss, weights: Arrays, batch: Arrays) -> Arrays:
    """By central differences; raises Unsteady near a kink."""
    found: Arrays = {}
    for name, value in weights.items():
        slopes = np.zeros(value.shape)
        for place in range(value.size):
            slopes.flat[place] = _slope(loss, weights, batch, name, place, STEP)
        found[name] = slopes
        rough = np.random.default_rng(0).standard_normal(value.shape)
        along = (slopes * rough).sum()
        for length in (STEP, 300 * STEP):
            ends = [loss({**weights, name: value + sign * length * rough}, batch) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * length)
            bound = 1e-4 if length == STEP else 0.05
            if not abs(slope - along) <= bound * (abs(slope) + np.abs(slopes).sum()) + 1e-7:
                raise Unsteady(name)
    return found


def _slope(loss: Loss, weights: Arrays, batch: Arrays, name: str, place: int, step: float) -> float:
    ends = []
    for sign in (1, -1):
        moved = weights[name].copy()
        moved.flat[place] += sign * step
        ends.append(loss({**weights, name: moved}, batch))
    return (ends[0] - ends[1]) / (2 * step)


# --- updates --------------------------------------------------------------------------------------------------------

Rule = Callable[[np.ndarray, np.ndarray, Arrays, float, int], np.ndarray]


def _adam(p: np.ndarray, g: np.ndarray, s: Arrays, lr: float, t: int) -> np.ndarray:
    s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.999 * s.get("v", 0) + 0.001 * g * g
    return p - lr * (s["m"] / (1 - 0.9**t)) / (np.sqrt(s["v"] / (1 - 0.999**t)) + EPS)


def _nesterov(p: np.ndarray, g: np.ndarray, s: Arrays, lr: float, t: int) -> np.ndarray:
    s["b"] = 0.9 * s.get("b", 0) + g
    return p - lr * (g + 0.9 * s["b"])


def _momentum(p: np.ndarray, g: np.ndarray, s: Arrays, lr: float, t: int) -> np.ndarray:
    s["b"] = 0.9 * s.get("b", 0) + g
    return p - lr * s["b"]


def _adagrad(p: np.ndarray, g: np.ndarray, s: Arrays, lr: float, t: int) -> np.ndarray:
    s["h"] = s.get("h", 0) + g * g
    return p - lr * g / (np.sqrt(s["h"]) + EPS)


def _rmsprop(p: np.ndarray, g: np.ndarray, s: Arrays, lr: float, t: int) -> np.ndarray:
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g * g
    return p - lr * g / (np.sqrt(s["v"]) + EPS)


EPS = 0.05
"""Large, for a quotient of two tiny numbers is rounding."""
RULES: dict[str, tuple[Rule, dict[str, float]]] = {
    "sgd": (lambda p, g, s, lr, t: p - lr * g, {}),
    "momentum": (_momentum, {}),
    "nesterov": (_nesterov, {}),
    "adam": (_adam, {"eps": EPS}),
    "adamw": (lambda p, g, s, lr, t: _adam(p * (1 - lr * 0.01), g, s, lr, t), {"eps": EPS}),
    "adagrad": (_adagrad, {"eps": EPS}),
    "rmsprop": (_rmsprop, {"eps": EPS}),
}
"""By the name that ``--optimizer`` takes: the update, and the knobs of the command."""
LR = 0.05


def trained(forward: Forward, loss: Loss, optimizer: str, names: list[str]) -> tuple[Arrays, Arrays, list[float]]:
    """The weights behind all steps, their first gradients, and the loss of each step. ``names``: what is trained."""
    rule, weights = RULES[optimizer][0], dict(forward.weights)
    states: dict[str, Arrays] = {name: {} for name in weights}
    first: Arrays = {}
    losses = []
    for place, batch in enumerate(forward.batches):
        losses.append(loss(weights, batch))
        slopes = gradients(loss, weights, batch)
        first = first or slopes
        weights = {
            name: rule(value, slopes[name], states[name], LR, place + 1) if name in names else value
            for name, value in weights.items()
        }
    return weights, first, losses
