"""Recurrent layers by PyTorch, time by time: with any activations, lengths and peepholes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gopt.operators.torch_call import NodeSettings

Step = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Products of a time's input with the weights, states -> new states, the result among them."""


def _hard_sigmoid(t: Any, x: Any, alpha: float = 0.2, beta: float = 0.5) -> Any:
    return (alpha * x + beta).clamp(0, 1)


_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "affine": lambda t, x, alpha=1.0, beta=0.0: alpha * x + beta,
    "elu": lambda t, x, alpha=1.0: t.nn.functional.elu(x, alpha),
    "hardsigmoid": _hard_sigmoid,
    "leakyrelu": lambda t, x, alpha=0.01: t.nn.functional.leaky_relu(x, alpha),
    "relu": lambda t, x: x.relu(),
    "scaledtanh": lambda t, x, alpha=1.0, beta=1.0: alpha * (beta * x).tanh(),
    "sigmoid": lambda t, x: x.sigmoid(),
    "softplus": lambda t, x: t.nn.functional.softplus(x, 1, 40),
    "softsign": lambda t, x: t.nn.functional.softsign(x),
    "tanh": lambda t, x: x.tanh(),
    "thresholdedrelu": lambda t, x, alpha=1.0: t.where(x > alpha, x, 0),
}
_PARAMETERS = {"affine": 2, "elu": 1, "hardsigmoid": 2, "leakyrelu": 1, "scaledtanh": 2, "thresholdedrelu": 1}
"""Activation -> how many of alpha and beta it takes."""


def _functions(t: Any, a: NodeSettings, defaults: Sequence[str]) -> list[Callable[[Any], Any]]:
    """The activations of all directions, of clipped operands. Alphas and betas stand in the order of the activations
    with some."""
    names = a.get("activations") or [*defaults] * (1 + (a.get("direction") == "bidirectional"))
    alphas, betas, clip = list(a.get("activation_alpha") or []), list(a.get("activation_beta") or []), a.get("clip")
    functions = []
    for name in names:
        count = _PARAMETERS.get(name.lower(), 0)
        numbers = [numbers.pop(0) for numbers in (alphas, betas)[:count] if numbers]
        functions.append(_clipped(t, _ACTIVATIONS[name.lower()], numbers, clip))
    return functions


def _clipped(
    t: Any, function: Callable[..., Any], numbers: Sequence[float], clip: float | None
) -> Callable[[Any], Any]:  # fmt: skip
    return lambda x: function(t, x if clip is None else x.clamp(-clip, clip), *numbers)


@dataclass(frozen=True, slots=True)
class _Direction:
    """Weights of a direction, transposed, with biases or zero."""

    weights: Any
    past: Any
    bias: Any
    past_bias: Any


def _layer(
    t: Any, a: NodeSettings, defaults: Sequence[str], operands: Sequence[Any],
    step_of: Callable[[int, _Direction, Sequence[Callable[[Any], Any]]], Step],
) -> tuple[Any, ...]:  # fmt: skip
    """All results, and the end of the states; the ``operands`` in the order of the node."""
    x, w, r, b, lengths, *starts = operands
    turned, ways, rows = a.get("layout", 0), w.shape[0], w.shape[1]
    functions = _functions(t, a, defaults)
    x = x.transpose(0, 1) if turned else x
    times, count, hidden = x.shape[0], x.shape[1], r.shape[-1]
    starts = [start if start is None or not turned else start.transpose(0, 1) for start in starts]
    results, ends = [], []
    for way in range(ways):
        few = len(functions) // ways
        back = a.get("direction") == "reverse" or way == 1
        halves = t.zeros(2 * rows, dtype=x.dtype, device=x.device) if b is None else b[way]
        direction = _Direction(w[way].mT, r[way].mT, halves[:rows], halves[rows:])
        step = step_of(way, direction, functions[way * few : (way + 1) * few])
        at = _order(t, x, times, lengths) if back else None
        inputs = (x if at is None else x.gather(0, at.expand(x.shape))) @ direction.weights + direction.bias
        none = t.zeros(count, hidden, dtype=x.dtype, device=x.device)
        states, lines = [none if start is None else start[way] for start in starts], []
        for time in range(times):
            new = step(inputs[time], states)
            alive = None if lengths is None else (lengths > time).unsqueeze(1)
            states = [*new] if alive is None else [t.where(alive, now, old) for now, old in zip(new, states)]
            lines.append(states[0] if alive is None else t.where(alive, states[0], 0))
        y = t.stack(lines)
        results.append(y if at is None else y.gather(0, at.expand(y.shape)))
        ends.append(states)
    y, last = t.stack(results, 1), [t.stack(states) for states in zip(*ends)]
    return (y.permute(2, 0, 1, 3), *(end.transpose(0, 1) for end in last)) if turned else (y, *last)


def _order(t: Any, x: Any, times: int, lengths: Any) -> Any:
    """The times of each sequence from the end; the times behind the end stay."""
    steps = t.arange(times, device=x.device).reshape(-1, 1, 1)
    ends = times if lengths is None else lengths.to(t.int64).reshape(1, -1, 1)
    return t.where(steps < ends, ends - 1 - steps, steps).expand(-1, x.shape[1], 1)


def rnn(
    t: Any, a: NodeSettings, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> tuple[Any, ...]:  # fmt: skip
    def step_of(way: int, direction: _Direction, functions: Sequence[Callable[[Any], Any]]) -> Step:
        return lambda row, states: [functions[0](row + states[0] @ direction.past + direction.past_bias)]

    return _layer(t, a, ["Tanh"], (x, w, r, b, lengths, h), step_of)


def gru(
    t: Any, a: NodeSettings, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> tuple[Any, ...]:  # fmt: skip
    hidden, late = r.shape[-1], a.get("linear_before_reset", 0)

    def step_of(way: int, direction: _Direction, functions: Sequence[Callable[[Any], Any]]) -> Step:
        gates, kernel = direction.past[:, : 2 * hidden], direction.past[:, 2 * hidden :]
        shift, rest = direction.past_bias[: 2 * hidden], direction.past_bias[2 * hidden :]
        enter, new = functions

        def step(row: Any, states: Sequence[Any]) -> Sequence[Any]:
            (old,) = states
            update, reset = enter(row[:, : 2 * hidden] + old @ gates + shift).chunk(2, 1)
            past = reset * (old @ kernel + rest) if late else (reset * old) @ kernel + rest
            return [(1 - update) * new(row[:, 2 * hidden :] + past) + update * old]

        return step

    return _layer(t, a, ["Sigmoid", "Tanh"], (x, w, r, b, lengths, h), step_of)


def lstm(
    t: Any, a: NodeSettings, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, c: Any = None,
    p: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    def step_of(way: int, direction: _Direction, functions: Sequence[Callable[[Any], Any]]) -> Step:
        enter, new, out = functions
        peep_in, peep_out, peep_keep = [0, 0, 0] if p is None else p[way].chunk(3)

        def step(row: Any, states: Sequence[Any]) -> Sequence[Any]:
            old, cell = states
            sums = row + old @ direction.past + direction.past_bias
            i, o, f, g = sums.chunk(4, 1)
            gain = enter(i + peep_in * cell)
            keep = 1 - gain if a.get("input_forget", 0) else enter(f + peep_keep * cell)
            cell = keep * cell + gain * new(g)
            return [enter(o + peep_out * cell) * out(cell), cell]

        return step

    return _layer(t, a, ["Sigmoid", "Tanh", "Tanh"], (x, w, r, b, lengths, h, c), step_of)
