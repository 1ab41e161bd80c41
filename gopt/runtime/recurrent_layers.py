"""RNN, GRU and LSTM in NumPy, in the precision of the inputs: ONNX Runtime builds these in float64, and does not run
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
"""(input of one time, states) -> new states; the first state is the result."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Attributes and operands common to all three."""

    direction: str
    layout: int
    clip: float
    functions: Sequence[Callable[[Array], Any]]

    @classmethod
    def of(cls, defaults: Sequence[str], attributes: Mapping[str, Any]) -> _Layer:
        direction = str(attributes.get("direction") or "forward")
        names = attributes.get("activations") or [*defaults] * (1 + (direction == "bidirectional"))
        if attributes.get("activation_alpha") or attributes.get("activation_beta"):
            raise NotImplementedError("activations with alpha or beta")
        functions = [_ACTIVATIONS[str(name).lower()] for name in names]
        return cls(direction, int(attributes.get("layout") or 0), float(attributes.get("clip") or np.inf), functions)

    def own(self, way: int) -> list[Callable[[Array], Any]]:
        """The activations of one direction, of clipped operands."""
        count = len(self.functions) // (1 + (self.direction == "bidirectional"))
        clip = self.clip
        return [
            lambda x, function=function: function(np.clip(x, -clip, clip))  # type: ignore[misc]
            for function in self.functions[way * count : (way + 1) * count]
        ]

    def run(
        self, x: Array, lengths: Array | None, steps: Sequence[Step], starts: Sequence[Array | None], hidden: int
    ) -> tuple[Array, ...]:
        """All results, and the last of each state. ``steps``: one for each direction; ``starts``: first states."""
        x = x.swapaxes(0, 1) if self.layout else x
        times, count = x.shape[:2]
        most = np.full(count, times) if lengths is None else np.asarray(lengths, np.int64)
        result = np.zeros((times, len(steps), count, hidden), x.dtype)
        ends: list[list[Array]] = [[] for _ in starts]
        for way, step in enumerate(steps):
            back = self.direction == "reverse" or way == 1
            begin = [start if start is None or not self.layout else start.swapaxes(0, 1) for start in starts]
            state = tuple(np.zeros((count, hidden), x.dtype) if start is None else start[way] for start in begin)
            for time in range(times):
                alive = time < most
                row = np.where(alive, most - 1 - time if back else time, 0)
                updated = step(x[row, np.arange(count)], state)
                state = tuple(np.where(alive[:, None], new, old) for new, old in zip(updated, state))
                result[row[alive], way, np.flatnonzero(alive)] = state[0][alive]
            for end, value in zip(ends, state):
                end.append(value)
        last = [np.stack(values) for values in ends]
        if self.layout:
            return np.ascontiguousarray(result.transpose(2, 0, 1, 3)), *(end.swapaxes(0, 1) for end in last)
        return result, *last


def _biases(b: Array | None, way: int, rows: int, dtype: Any) -> tuple[Array, Array]:
    halves = np.zeros(2 * rows, dtype) if b is None else b[way]
    return halves[:rows], halves[rows:]


def rnn(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None,
    **attributes: Any,
) -> tuple[Array, ...]:  # fmt: skip
    layer = _Layer.of(["Tanh"], attributes)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        (f,) = layer.own(way)
        bias = sum(_biases(b, way, hidden, x.dtype))
        return lambda row, state: (f(row @ w[way].T + state[0] @ r[way].T + bias),)

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h], hidden)


def gru(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None, *,
    linear_before_reset: int | None = None, **attributes: Any,
) -> tuple[Array, ...]:  # fmt: skip
    layer = _Layer.of(["Sigmoid", "Tanh"], attributes)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        f, g = layer.own(way)
        bias, inner = _biases(b, way, 3 * hidden, x.dtype)

        def step(row: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            (old,) = state
            outer, sums = row @ w[way].T + bias, old @ r[way, : 2 * hidden].T + inner[: 2 * hidden]
            update, reset = np.split(f(outer[:, : 2 * hidden] + sums), 2, 1)
            kernel, rest = r[way, 2 * hidden :].T, inner[2 * hidden :]
            past = reset * (old @ kernel + rest) if linear_before_reset else (reset * old) @ kernel + rest
            return ((1 - update) * g(outer[:, 2 * hidden :] + past) + update * old,)

        return step

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h], hidden)


def lstm(
    x: Array, w: Array, r: Array, b: Array | None = None, lengths: Array | None = None, h: Array | None = None,
    c: Array | None = None, p: Array | None = None, *, input_forget: int | None = None, **attributes: Any,
) -> tuple[Array, ...]:  # fmt: skip
    if input_forget:
        raise NotImplementedError("input_forget")
    layer = _Layer.of(["Sigmoid", "Tanh", "Tanh"], attributes)
    hidden = r.shape[-1]

    def step_of(way: int) -> Step:
        f, g, k = layer.own(way)
        bias = sum(_biases(b, way, 4 * hidden, x.dtype))
        peep = np.zeros((3, hidden), x.dtype) if p is None else p[way].reshape(3, hidden)

        def step(row: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            old, cell = state
            enter, out, forget, new = np.split(row @ w[way].T + old @ r[way].T + bias, 4, 1)
            cell_new = f(forget + peep[2] * cell) * cell + f(enter + peep[0] * cell) * g(new)
            return f(out + peep[1] * cell_new) * k(cell_new), cell_new

        return step

    return layer.run(x, lengths, [step_of(way) for way in range(len(w))], [h, c], hidden)
