"""Learned weights of several losses: the gradient of a weight is the value of a loss."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.steps import clipped, finite
from whole_gen.updates import UPDATES, Shared
from whole_gen.writer import Value, Writer


def _weighed(w: Writer, losses: list[Value]) -> tuple[Value, list[Value]]:
    """A loss of losses, and the weights: numbers of their own or one vector."""
    how = w.pick("exp", "linear", "square", "sigmoid", "vector", "softmax", "stack")
    if how in ("vector", "softmax", "stack"):
        s = w.state("s", w.draw("s", (len(losses),), 0.1, 0.4))
        parts = [w.op("Gather", s, w.const(np.array(at)), axis=0) for at in range(len(losses))]
        row = w.op("Concat", *(each.reshape(1) for each in losses), axis=0) if how != "vector" else s
        if how == "softmax":
            return (w.op("Softmax", s, axis=0) * row).sum(), [s]
        if how == "stack":
            return (w.op("Exp", -s) * row + s).sum(), [s]
        held = [s]
    else:
        shape = w.pick((), (1,))
        held = parts = [w.state(f"s{at}", w.draw(f"s{at}", shape, 0.1, 0.4)) for at in range(len(losses))]
    total: Value | None = None
    for s, loss in zip(parts, losses):
        if how in ("exp", "vector"):
            term = w.op("Exp", -s) * loss + s
        elif how == "square":
            term = loss / (s * s) + w.op("Log", s * s)
        else:
            term = (s if how == "linear" else w.op("Sigmoid", s)) * loss
        total = term if total is None else total + term
    assert total is not None
    return total.sum() if total.shape else total, held


def _learned(w: Writer) -> tuple[Value, list[Value]]:
    """A trained loss of two losses with weights that are trained too; and the two."""
    w.told = True
    x, y, t = w.fed("x", [3]), w.fed("y", [2]), w.fed("t", [1])
    params = [parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2), parameter(w, "w2", 4, 1)]
    h = w.op("Tanh", x @ params[0])
    d, e = h @ params[1] - y, h @ params[2] - t
    losses = [(d * d).mean(), (e * e).mean() if w.pick(True, False) else (e * e + 0.1).sqrt().mean()]
    loss, weights = _weighed(w, losses)
    params += weights
    scaled = w.pick("none", "none", "fixed", "fed", "state")
    made = {"fixed": lambda: w.const(np.array(8.0, w.dtype)), "fed": lambda: w.setting("scale", 8.0),
            "state": lambda: w.state("scale", np.array(8.0, w.dtype))}  # fmt: skip
    factor = made[scaled]() if scaled in made else None
    found = dict(zip((p.name for p in params), gradients(loss if factor is None else loss * factor, params)))
    found = found if factor is None else {name: g / factor for name, g in found.items()}
    good = finite(w, list(found.values())) if scaled == "state" else None
    found = clipped(w, found)
    shared = Shared(w.setting("lr", 0.1))
    rule = w.pick(*UPDATES)
    for p in params:
        new = rule(w, p, found[p.name], shared)
        new = new if new.shape == p.shape else new.reshape(*p.shape)
        w.becomes(p, new if good is None else w.op("Where", good, new, p))
    if good is not None and factor is not None:
        w.becomes(factor, w.op("Where", good, factor * 1.5, factor * 0.5))
    return loss, losses


@kind
def learned_weights(w: Writer) -> None:
    """Two losses with weights that are trained too, under clips, loss scales and all updates."""
    loss, _ = _learned(w)
    w.out("loss", loss)


@kind
def learned_weights_shown(w: Writer) -> None:
    """The same, and the two losses are shown as well."""
    loss, losses = _learned(w)
    named = [("loss", loss), *((f"l{at}", each) for at, each in enumerate(losses, 1))]
    for name, value in named if w.pick(True, False) else named[::-1]:
        w.out(name, value)
