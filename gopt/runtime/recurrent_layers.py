"""RNN, GRU and LSTM in NumPy, in the precision of their inputs: ONNX Runtime builds them in float64, and does not run
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from gopt.runtime.windows import Array

_ACTIVATIONS: Mapping[str, Callable[[Array], Any]] = MappingProxyType({
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0),
    "softsign": lambda x: x / (1 + np.abs(x)), "softplus": lambda x: np.logaddexp(x, 0),
})  # fmt: skip
Step = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]
"""(input of one time, states) -> new states, of which the first is the result."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Attributes and operands that all three have."""

    direction: str
    layout: int
    clip: float
    functions: Sequence[Callable[[Array], Any]]

    @classmethod
    def of(cls, defaults: Sequence[str], given: Mapping[str, Any]) -> _Layer:
        direction = str(given.get("direction") or "forward")
        names = given.get("activations") or [*defaults] * (1 + (direction == "bidirectional"))
        if given.get("activation_alpha") or given.get("activation_beta"):
            raise NotImplementedError("activations with alpha or beta")
        functions = [_ACTIVATIONS[str(name).lower()] for name in names]
        return cls(direction, int(given.get("layout") or 0), float(given.get("clip") or np.inf), functions)

    def own(self, way: int) -> list[Callable[[Array], Any]]:
        """The activations of one direction, of clipped operands."""
        count = len(self.functions) // (1 + (self.direction == "bidirectional"))
        clip = self.clip
        return [
            lambda x, function=function: function(np.clip(x, -clip, clip))  # type: ignore[misc]
            for function in self.functions[way * count : (way + 1) * count]
        ]

    def run(
        self, x: Array, lengths: Array | None, steps: Sequence[Step], first: Sequence[Array | None], hidden: int
    ) -> tuple[Array, ...]:
        """All results, and the last of each state. ``steps``: one for each direction; ``first``: first states."""
        x = x.swapaxes(0, 1) if self.layout else x
        times, count = x.shape[:2]
        most = np.full(count, times) if lengths is None else np.asarray(lengths, np.int64)
        result = np.zeros((times, len(steps), count, hidden), x.dtype)
        ends: list[list[Array]] = [[] for _ in first]
        for way, step in enumerate(steps):
            back = self.direction == "reverse" or way == 1
            begin = [each if each is None or not self.layout else each.swapaxes(0, 1) for each in first]
            held = tuple(np.zeros((count, hidden), x.dtype) if each is None else each[way] for each in begin)
            for time in range(times):
                alive = time < most
                place = np.where(alive, most - 1 - time if back else time, 0)
                made = step(x[place, np.arange(count)], held)
                held = tuple(np.where(alive[:, None], new, old) for new, old in zip(made, held))
                result[place[alive], way, np.flatnonzero(alive)] = held[0][alive]
            for end, each in zip(ends, held):
                end.append(each)
        last = [np.stack(each) for each in ends]
        if self.layout:
            return np.ascontiguousarray(result.transpose(2, 0, 1, 3)), *(each.swapaxes(0, 1) for each in last)
        return result, *last


def _biases(b: Array | None, way: int, rows: int, dtype: Any) -> tuple[Array, Array]:
    both = np.zeros(2 * rows, dtype) if b is None else b[way]
    return both[:rows], both[rows:]


def rnn(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None,
    **given: Any,
) -> tuple[Array, ...]:  # fmt: skip
    layer = _Layer.of(["Tanh"], given)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        (f,) = layer.own(way)
        bias = sum(_biases(b, way, hidden, x.dtype))
        return lambda each, held: (f(each @ w[way].T + held[0] @ r[way].T + bias),)

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h], hidden)


def gru(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None, *,
    linear_before_reset: int | None = None, **given: Any,
) -> tuple[Array, ...]:  # fmt: skip
    layer = _Layer.of(["Sigmoid", "Tanh"], given)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        f, g = layer.own(way)
        bias, inner = _biases(b, way, 3 * hidden, x.dtype)

        def step(each: Array, held: tuple[Array, ...]) -> tuple[Array, ...]:
            (old,) = held
            outer, sums = each @ w[way].T + bias, old @ r[way, : 2 * hidden].T + inner[: 2 * hidden]
            update, reset = np.split(f(outer[:, : 2 * hidden] + sums), 2, 1)
            kernel, rest = r[way, 2 * hidden :].T, inner[2 * hidden :]
            past = reset * (old @ kernel + rest) if linear_before_reset else (reset * old) @ kernel + rest
            return ((1 - update) * g(outer[:, 2 * hidden :] + past) + update * old,)

        return step

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h], hidden)


def lstm(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None,
    c: Array | None = None, p: Array | None = None, *, input_forget: int | None = None, **given: Any,
) -> tuple[Array, ...]:  # fmt: skip
    if input_forget:
        raise NotImplementedError("input_forget")
    layer = _Layer.of(["Sigmoid", "Tanh", "Tanh"], given)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        f, g, k = layer.own(way)
        bias = sum(_biases(b, way, 4 * hidden, x.dtype))
        peep = np.zeros((3, hidden), x.dtype) if p is None else p[way].reshape(3, hidden)

        def step(each: Array, held: tuple[Array, ...]) -> tuple[Array, ...]:
            old, cell = held
            enter, out, forget, new = np.split(each @ w[way].T + old @ r[way].T + bias, 4, 1)
            cell_new = f(forget + peep[2] * cell) * cell + f(enter + peep[0] * cell) * g(new)
            return f(out + peep[1] * cell_new) * k(cell_new), cell_new

        return step

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h, c], hidden)
