"""Steps whose parameters have types of their own: each is cast for the forward, and updated in its type, in a wider
one, or as the cast of a master."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from whole_gen import forwards
from whole_gen.derivatives import gradients
from whole_gen.steps import total_norm
from whole_gen.writer import Value, Writer

KINDS = ("own", "own", "wide", "master", "wide-momentum", "twice")


def written_mixed(seed: int, samples: int, scale: int = 1, narrow: Sequence[Any] = (np.float32, np.float64)) -> Writer:
    """The step of a seed for so many samples; ``narrow``: types of parameters, beside the forward's float64."""
    w = Writer(seed, samples, scale, np.float64)
    held: dict[str, tuple[Value, Value | None, str]] = {}

    def parameter(w: Writer, name: str, *shape: int) -> Value:
        dtype, kind = w.pick(*narrow), w.pick(*KINDS)
        start = w.draw(name, shape)
        master = w.state(f"{name}.master", start) if kind == "master" and dtype != np.float64 else None
        state = w.state(name, start.astype(dtype))
        held[name] = state, master, kind
        return state if dtype == np.float64 else state.to(np.float64)

    old, forwards.parameter = forwards.parameter, parameter
    try:
        loss, params = w.pick(*forwards.FORWARDS)(w)
    finally:
        forwards.parameter = old
    factor = w.pick(None, None, 8.0)
    found = gradients(loss * factor if factor else loss, list(params.values()))
    grads = dict(zip(params, found))
    early = {name: g.to(held[name][0].held.dtype) if w.pick(True, False) else g for name, g in grads.items()}
    if factor:
        early = {name: g * (1.0 / factor) for name, g in early.items()}
    if w.pick(True, False, False):
        norm = total_norm(w, [g.to(np.float64) for g in early.values()])
        ratio = w.op("Min", 0.1 / (norm + 1e-6), w.const(np.array(1.0)))
        early = {name: g * ratio.to(g.held.dtype) for name, g in early.items()}
    for name, g in early.items():
        _update(w, name, g, *held[name])
    w.gradients.clear()
    w.out("loss", loss)
    return w


def _update(w: Writer, name: str, g: Value, state: Value, master: Value | None, kind: str) -> None:
    own, wide = state.held.dtype, np.float64
    if w.pick(*[False] * 3, True):
        g = g + (state * 0.01).to(g.held.dtype)
    if master is not None:
        new = master - _momentum(w, name, g.to(wide), wide) * 0.1
        w.becomes(master, new)
        final = new.to(own)
    elif kind == "wide":
        final = (state.to(wide) - g.to(wide) * 0.1).to(own)
    elif kind == "wide-momentum":
        final = (state.to(wide) - _momentum(w, name, g.to(wide), wide) * 0.1).to(own)
    elif kind == "twice":
        final = state - _momentum(w, name, g.to(np.float32).to(own), own) * 0.1
    else:
        final = state - _momentum(w, name, g.to(own), own) * 0.1
    w.becomes(state, final)


def _momentum(w: Writer, name: str, g: Value, dtype: Any) -> Value:
    if w.pick(True, False):
        return g
    held = w.state(f"{name}.m", w.draw(f"{name}.m", g.shape, 1e-3, 1e-2).astype(dtype))
    new = held * 0.9 + g
    w.becomes(held, new)
    return new
