"""Rules of update. Each takes the writer, a parameter, its gradient, and what all share; it returns the new value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from whole_gen.writer import Value, Writer


@dataclass
class Shared:
    """What the update of every parameter reads."""

    rate: Value
    count: Value | None = None
    """The number of this step, from 1, as a float."""
    powers: tuple[Value, Value] | None = None
    """1 - beta1^t and 1 - beta2^t."""


def small(w: Writer, name: str, shape: tuple[int, ...], low: float = 1e-3, high: float = 1e-2) -> Value:
    return w.state(name, w.draw(name, shape, low, high))


def kept(w: Writer, state: Value, new: Value, keep: float) -> Value:
    how = w.random.choice(["sum", "sum", "lerp", "ema"])
    if how == "sum":
        found = state * keep + new * (1 - keep)
    elif how == "lerp":
        found = state + (new - state) * (1 - keep)
    else:
        found = new - (new - state) * keep
    w.becomes(state, found)
    return found


def sgd(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    return p - g * s.rate


def heavy(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    m = small(w, p.name + ".m", p.shape)
    new = m * 0.9 + (g if w.pick(True, False) else g * 0.5)
    w.becomes(m, new)
    if w.pick("plain", "nesterov") == "nesterov":
        new = g + new * 0.9
    return p - new * s.rate


def velocity(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Momentum that holds the step itself, negative."""
    m = small(w, p.name + ".m", p.shape)
    new = m * 0.9 - g * s.rate
    w.becomes(m, new)
    return p + new


def adam(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    m, v = small(w, p.name + ".m", p.shape), small(w, p.name + ".v", p.shape)
    first, second = kept(w, m, g, 0.9), kept(w, v, g * g, 0.99)
    kind = w.pick("adam", "amsgrad", "belief", "corrected", "yogi")
    if kind == "amsgrad":
        top = small(w, p.name + ".top", p.shape)
        second = w.op("Max", top, second)
        w.becomes(top, second)
    if kind == "corrected" and s.powers is not None:
        return p - s.rate * (first / s.powers[0]) / ((second / s.powers[1]).sqrt() + 1e-3)
    return p - s.rate * first / (second.sqrt() + 1e-2)


def packed(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Both moments in one state, one after the other."""
    state = small(w, p.name + ".mv", (2, *p.shape))
    one = w.const(np.array([1, 1], np.int64))
    m, v = w.op("Split", state, one, out=2, axis=0)
    m, v = m.reshape(*p.shape), v.reshape(*p.shape)
    m, v = m * 0.9 + g * 0.1, v * 0.99 + g * g * 0.01
    w.becomes(state, w.op("Concat", *(each.reshape(1, *p.shape) for each in (m, v)), axis=0))
    return p - s.rate * m / (v.sqrt() + 1e-2)


def factored(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Adafactor: second moments by rows and columns; the update is clipped by its root mean square."""
    if len(p.shape) != 2 or 1 in p.shape:
        v = small(w, p.name + ".v", p.shape)
        return p - s.rate * g / (kept(w, v, g * g + 1e-6, 0.9).sqrt() + 1e-3)
    r, c = small(w, p.name + ".row", p.shape[:1]), small(w, p.name + ".col", p.shape[1:])
    square = g * g + 1e-6
    row, column = kept(w, r, square.mean(1), 0.9), kept(w, c, square.mean(0), 0.9)
    v = (row / row.mean()).reshape(-1, 1) * column.reshape(1, -1)
    step = g / (v.sqrt() + 1e-3)
    rms = (step * step).mean().sqrt()
    step = step / w.op("Max", rms, w.const(np.array(1.0, w.dtype)))
    return p - s.rate * step


def covers(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """SM3: one accumulator for each row and one for each column."""
    if len(p.shape) != 2 or 1 in p.shape:
        v = small(w, p.name + ".v", p.shape)
        new = v + g * g
        w.becomes(v, new)
        return p - s.rate * g / (new.sqrt() + 1e-2)
    r, c = small(w, p.name + ".row", (p.shape[0], 1)), small(w, p.name + ".col", (1, p.shape[1]))
    v = w.op("Min", r, c) + g * g
    w.becomes(r, w.op("ReduceMax", v, w.const(np.array([1])), keepdims=1))
    w.becomes(c, w.op("ReduceMax", v, w.const(np.array([0])), keepdims=1))
    return p - s.rate * g / (v.sqrt() + 1e-2)


def shampoo(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """A matrix of statistics on the left; its inverse by two rounds of Newton."""
    if len(p.shape) != 2:
        return heavy(w, p, g, s)
    n = p.shape[0]
    left = w.state(p.name + ".left", np.eye(n).astype(w.dtype) * 0.5)
    new = left * 0.9 + g @ g.turn(1, 0) * 0.1
    w.becomes(left, new)
    eye = w.const(np.eye(n).astype(w.dtype))
    x = eye / ((new * eye).sum() + 0.1)
    for _ in range(2):
        x = x @ (eye * 2.0 - new @ x)
    return p - s.rate * (x @ g)


def layerwise(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """LARS: the rate follows the ratio of norms."""
    m = small(w, p.name + ".m", p.shape)
    norms = [(each * each).sum().sqrt() for each in (p, g)]
    ratio = norms[0] / (norms[1] + 0.05 * norms[0] + 1e-3)
    if w.pick(True, False):
        zero = w.like(0.0, ratio)
        good = w.op("And", w.op("Greater", norms[0], zero), w.op("Greater", norms[1], zero))
        ratio = w.op("Where", good, ratio, w.like(1.0, ratio))
    new = m * 0.9 + (g + p * 0.05) * (s.rate * ratio)
    w.becomes(m, new)
    return p - new


def delta(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Adadelta."""
    a, b = small(w, p.name + ".a", p.shape), small(w, p.name + ".b", p.shape)
    square = kept(w, a, g * g, 0.9)
    step = g * ((b + 1e-3).sqrt() / (square + 1e-3).sqrt())
    kept(w, b, step * step, 0.9)
    return p - s.rate * step


def centred(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """RMSprop about the mean, gradients less their mean over each column."""
    if len(p.shape) > 1 and w.pick(True, False):
        g = g - g.mean(*range(1, len(p.shape)), keep=True)
    a, b = small(w, p.name + ".avg", p.shape, -1e-3, 1e-3), w.state(p.name + ".sq", w.draw("sq", p.shape, 0.01, 0.02))
    mean, square = kept(w, a, g, 0.9), kept(w, b, g * g, 0.9)
    return p - s.rate * g / ((square - mean * mean + 1e-2).sqrt() + 1e-3)


def counted(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """A counter of its own: int64 in one element."""
    shape = w.pick((), (1,))
    t = w.state(p.name + ".t", np.zeros(shape, w.pick(np.int64, np.int32, np.float32)))
    new = t + 1
    w.becomes(t, new)
    m = small(w, p.name + ".m", p.shape)
    first = kept(w, m, g, 0.9)
    power = w.op("Pow", w.const(np.array(0.9, w.dtype)), new.to(w.dtype))
    fixed = first / (1.0 - power)
    return p - s.rate * (fixed.reshape(*p.shape) if not p.shape else fixed)


def eighth(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Momentum in eight bits, with the largest magnitude as its scale."""
    q, a = w.state(p.name + ".q", np.zeros(p.shape, np.int8)), w.state(p.name + ".scale", np.array(0.01, w.dtype))
    m = q.to(w.dtype) * a * 0.9 + g
    top = w.op("ReduceMax", w.op("Abs", m), keepdims=0) / 127.0 + 1e-9
    new = w.op("Round", m / top)
    w.becomes(q, new.to(np.int8))
    w.becomes(a, top)
    return p - s.rate * (new * top)


def flat(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Momentum that is held as a row, and one that is held transposed."""
    size = p.held.size
    m = small(w, p.name + ".m", (size,))
    new = m * 0.9 + g.reshape(size)
    w.becomes(m, new)
    v = small(w, p.name + ".v", p.shape[::-1])
    square = v * 0.9 + (g.turn() * g.turn() if len(p.shape) > 1 else g * g) * 0.1
    w.becomes(v, square)
    down = square.turn() if len(p.shape) > 1 else square
    return p - s.rate * new.reshape(*p.shape) / (down.sqrt() + 1e-2)


def blocks(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Columns in two halves with rates of their own."""
    if len(p.shape) != 2 or p.shape[1] < 2:
        return sgd(w, p, g, s)
    first = p.shape[1] // 2
    cut = w.const(np.array([first, p.shape[1] - first]))
    parts = list(zip(w.op("Split", p, cut, out=2, axis=1), w.op("Split", g, cut, out=2, axis=1)))
    new = [a - b * s.rate * rate for (a, b), rate in zip(parts, (1.0, 0.3))]
    return w.op("Concat", *new, axis=1)


def agc(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Each row's gradient is bounded by a part of the row's norm."""
    axes = [*range(1, len(p.shape))]
    if not axes:
        return sgd(w, p, g, s)
    a, b = ((each * each).sum(*axes, keep=True).sqrt() for each in (p, g))
    bound = w.op("Max", a, w.like(1e-2, a)) * 0.3
    factor = w.op("Min", bound / w.op("Max", b, w.like(1e-6, b)), w.like(1.0, a))
    return heavy(w, p, g * factor, s)


def averaged(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """A moving average of the parameter, of its new value or its old one."""
    new = adam(w, p, g, s) if w.pick(True, False) else sgd(w, p, g, s)
    ema = w.state(p.name + ".ema", p.held * 0.5)
    w.becomes(ema, ema * 0.9 + (new if w.pick(True, False) else p) * 0.1)
    return new


def anchored(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """A pull to the start value, and a window of past gradients."""
    past = [small(w, f"{p.name}.past{k}", p.shape, -1e-2, 1e-2) for k in range(2)]
    w.becomes(past[0], past[1])
    w.becomes(past[1], g)
    anchor = w.const(p.held + 0.1, w.pick("stored", "node"))
    return p - s.rate * (g * 0.5 + past[0] * 0.3 + past[1] * 0.2) - (p - anchor) * 0.01


def bits(w: Writer, p: Value, g: Value, s: Shared) -> Value:
    """Only elements whose gradient kept its sign move; the signs are a state of booleans."""
    last = w.state(p.name + ".up", np.asarray(w.draw(p.name + "up", p.shape) > 0))
    up = w.op("Greater", g, w.like(0.0, g))
    w.becomes(last, up)
    same = w.op("Equal", up, last)
    return w.op("Where", same, p - g * s.rate, p)


UPDATES: list[Callable[[Writer, Value, Value, Shared], Value]] = [
    sgd, heavy, velocity, adam, packed, factored, covers, shampoo, layerwise, delta, centred, counted, eighth, flat,
    blocks, agc, averaged, anchored, bits,
]  # fmt: skip
