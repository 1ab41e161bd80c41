"""The table of hand-written steps, and what they are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.writer import Value, Writer

Step = Callable[[Writer], None]
ODD: dict[str, Step] = {}


def odd(step: Step) -> Step:
    ODD[step.__name__.strip("_")] = step
    return step


def net(w: Writer, i: int = 3, h: int = 4, o: int = 3) -> tuple[dict[str, Value], dict[str, Value]]:
    """A perceptron: its parameters, their gradients; the loss is an output."""
    x, y = w.fed("x", [i]), w.fed("y", [o])
    p = {"w0": parameter(w, "w0", i, h), "b0": parameter(w, "b0", h), "w1": parameter(w, "w1", h, o)}
    loss = squares(w, w.op("Tanh", x @ p["w0"] + p["b0"]) @ p["w1"], y)
    found = gradients(loss, list(p.values()))
    w.out("loss", loss)
    return p, dict(zip(p, found))


def rest(w: Writer, p: dict[str, Value], g: dict[str, Value], *names: str) -> None:
    for name in names:
        w.becomes(p[name], p[name] - g[name] * 0.1)


def float_(w: Writer, value: float) -> Value:
    return w.const(np.array(value, w.dtype))


def load_all() -> dict[str, Step]:
    """The table with all steps in it."""
    from whole_gen import odd_bodies, odd_elements, odd_joint, odd_sequences, odd_states

    assert all((odd_bodies, odd_elements, odd_joint, odd_sequences, odd_states))
    return ODD
