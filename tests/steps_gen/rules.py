"""Update rules: from a parameter's gradient to where it is to go. Each keeps its states through ``Hold.keep``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from steps_gen.tape import Tape


@dataclass
class Hold:
    """One parameter at its update: its name, its wide value, and the states that its rule made."""

    tape: Tape
    name: str
    value: str
    states: list[tuple[str, str]] = field(default_factory=list)
    """Input and new value, before any gate."""

    def small(self, what: str, shape: tuple[int, ...] | None = None, low: float = 1e-3, high: float = 1e-2) -> str:
        shape = self.tape.shape(self.value) if shape is None else shape
        drawn = self.tape.generator.uniform(low, high, shape).astype(np.float32)
        return self.tape.state(f"{self.name}.{what}", drawn)

    def keep(self, state: str, new: str) -> str:
        self.states.append((state, new))
        return new

    def mixed(self, state: str, value: str, keep: float) -> str:
        return mixed(self.tape, state, value, keep)

    def root(self, value: str, floor: float = 1e-2) -> str:
        t = self.tape
        return t.op("Add", t.op("Sqrt", value), t.const(floor))


def mixed(t: Tape, old: str, new: str, keep: float) -> str:
    """keep·old + (1 − keep)·new"""
    return t.op("Add", t.op("Mul", old, t.const(keep)), t.op("Mul", new, t.const(1 - keep)))


def _sgd(h: Hold, g: str) -> str:
    return g


def _momentum(h: Hold, g: str) -> str:
    m = h.small("m")
    return h.keep(m, h.tape.op("Add", h.tape.op("Mul", m, h.tape.const(0.9)), g))


def _nesterov(h: Hold, g: str) -> str:
    new = _momentum(h, g)
    return h.tape.op("Add", g, h.tape.op("Mul", new, h.tape.const(0.9)))


def _adam(h: Hold, g: str) -> str:
    m, v = h.small("m"), h.small("v")
    first = h.keep(m, h.mixed(m, g, 0.9))
    second = h.keep(v, h.mixed(v, h.tape.op("Mul", g, g), 0.95))
    return h.tape.op("Div", first, h.root(second))


def _amsgrad(h: Hold, g: str) -> str:
    m, v, top = h.small("m"), h.small("v"), h.small("top")
    first = h.keep(m, h.mixed(m, g, 0.9))
    second = h.keep(v, h.mixed(v, h.tape.op("Mul", g, g), 0.95))
    highest = h.keep(top, h.tape.op("Max", top, second))
    return h.tape.op("Div", first, h.root(highest))


def _soft_sign(h: Hold, g: str) -> str:
    t, m = h.tape, h.small("m")
    first = h.keep(m, h.mixed(m, g, 0.9))
    return t.op("Div", first, t.op("Add", t.op("Abs", first), t.const(1e-2)))


def _lion(h: Hold, g: str) -> str:
    t, m = h.tape, h.small("m")
    way = t.op("Sign", h.mixed(m, g, 0.9))
    h.keep(m, h.mixed(m, g, 0.99))
    return way


def _adagrad(h: Hold, g: str) -> str:
    t, s = h.tape, h.small("sum")
    new = h.keep(s, t.op("Add", s, t.op("Mul", g, g)))
    return t.op("Div", g, h.root(new))


def _rms(h: Hold, g: str) -> str:
    t, v, m = h.tape, h.small("v"), h.small("m")
    second = h.keep(v, h.mixed(v, t.op("Mul", g, g), 0.95))
    step = t.op("Div", g, h.root(second))
    return h.keep(m, t.op("Add", t.op("Mul", m, t.const(0.9)), step))


def _adamax(h: Hold, g: str) -> str:
    t, m, u = h.tape, h.small("m"), h.small("u")
    first = h.keep(m, h.mixed(m, g, 0.9))
    top = h.keep(u, t.op("Max", t.op("Mul", u, t.const(0.99)), t.op("Abs", g)))
    return t.op("Div", first, t.op("Add", top, t.const(1e-2)))


def _rows(h: Hold, g: str) -> str:
    """A second moment per row, as Adafactor has."""
    t, shape = h.tape, h.tape.shape(g)
    if len(shape) != 2:
        return _adagrad(h, g)
    row = h.small("row", (shape[0], 1))
    square = t.op("ReduceMean", t.op("Mul", g, g), t.const([1], "int64"), keepdims=1)
    new = h.keep(row, h.mixed(row, square, 0.9))
    return t.op("Div", g, h.root(new))


def _centred(h: Hold, g: str) -> str:
    """The gradient less its mean over each column: linear, and not elementwise."""
    t = h.tape
    if len(t.shape(g)) == 2 and t.shape(g)[0] > 1:
        g = t.op("Sub", g, t.op("ReduceMean", g, t.const([0], "int64"), keepdims=1))
    return _momentum(h, g)


def _trust(h: Hold, g: str) -> str:
    t, way = h.tape, _adam(h, g)
    ratio = t.op("Div", t.op("ReduceL2", h.value, keepdims=0), t.op("Add", _length(t, way), t.const(1e-2)))
    return t.op("Mul", way, ratio)


def _normalised(h: Hold, g: str) -> str:
    t = h.tape
    return t.op("Div", g, t.op("Add", _length(t, g), t.const(1e-2)))


def _cautious(h: Hold, g: str) -> str:
    """Momentum, where it agrees with the gradient."""
    t, new = h.tape, _momentum(h, g)
    agrees = t.op("Greater", t.op("Mul", new, g), t.const(0.0))
    return t.op("Where", agrees, new, t.op("Mul", new, t.const(0.5)))


def _kept(h: Hold, g: str) -> str:
    """The last gradient is a state; the step extrapolates."""
    t = h.tape
    if t.values[g].size == 1:
        return g  # an output of one element that no flow leads to is a metric
    last = h.small("last")
    way = t.op("Sub", t.op("Mul", g, t.const(1.5)), t.op("Mul", last, t.const(0.5)))
    h.keep(last, g)
    return way


def _delayed(h: Hold, g: str) -> str:
    """The step follows the mean of the moments, old and new."""
    t, m = h.tape, h.small("m")
    new = h.keep(m, h.mixed(m, g, 0.5))
    return t.op("Mul", t.op("Add", m, new), t.const(0.5))


def _dual(h: Hold, g: str) -> str:
    """The step leads to where the sum of all gradients points, from zero."""
    t, s = h.tape, h.small("sum")
    new = h.keep(s, t.op("Add", s, g))
    return t.op("Add", h.value, t.op("Mul", new, t.const(0.3)))


def _rprop(h: Hold, g: str) -> str:
    """Signs alone; the size of a step grows while the sign stays."""
    t, size, last = h.tape, h.small("size"), h.small("sign")
    product = t.op("Mul", g, last)
    zero, one = t.const(0.0), t.const(1.0)
    down = t.op("Where", t.op("Less", product, zero), t.const(0.5), one)
    new = h.keep(size, t.op("Mul", size, t.op("Where", t.op("Greater", product, zero), t.const(1.2), down)))
    way = h.keep(last, t.op("Where", t.op("Less", product, zero), zero, t.op("Sign", g)))
    return t.op("Mul", way, new)


def _muon(h: Hold, g: str) -> str:
    """The momentum of a matrix, made orthogonal by one round of Newton and Schulz."""
    t, new = h.tape, _momentum(h, g)
    if len(t.shape(g)) != 2:
        return new
    x = t.op("Div", new, t.op("Add", _length(t, new), t.const(1e-2)))
    cube = t.op("MatMul", t.op("MatMul", x, t.op("Transpose", x, perm=[1, 0])), x)
    return t.op("Sub", t.op("Mul", x, t.const(1.5)), t.op("Mul", cube, t.const(0.5)))


def _muon_half(h: Hold, g: str) -> str:
    """The same in halves, on the shorter side, by five rounds of a quintic: as Muon's own code has it."""
    t, m = h.tape, h.small("m", low=1e-8, high=1e-7)
    new = h.keep(m, t.op("Add", t.op("Mul", m, t.const(0.9)), g))
    if len(t.shape(g)) != 2:
        return new
    tall = t.shape(g)[0] > t.shape(g)[1]
    half = t.cast(t.op("Transpose", new, perm=[1, 0]) if tall else new, "float16")
    length = t.op("ReduceL2", half, t.const([-2, -1], "int64"), keepdims=1)
    x = t.op("Div", half, t.op("Max", length, t.const(1e-2, "float16")))
    for _ in range(5):
        square = t.op("MatMul", x, t.op("Transpose", x, perm=[1, 0]))
        fourth = t.op("Gemm", square, square, square, alpha=2.0315, beta=-4.775)
        x = t.op("Gemm", fourth, x, x, alpha=1.0, beta=3.4445)
    wide = t.cast(x, "float32")
    return t.op("Transpose", wide, perm=[1, 0]) if tall else wide


def _flat_state(h: Hold, g: str) -> str:
    """Momentum that is held as a row."""
    t, shape = h.tape, h.tape.shape(g)
    m = h.small("m", (int(t.values[g].size),))
    row = t.op("Reshape", g, t.const([-1], "int64"))
    new = h.keep(m, t.op("Add", t.op("Mul", m, t.const(0.9)), row))
    return t.op("Reshape", new, t.const(shape, "int64"))


def _turned_state(h: Hold, g: str) -> str:
    """Adam's second moment is held transposed."""
    t, shape = h.tape, h.tape.shape(g)
    if len(shape) != 2:
        return _rms(h, g)
    v, turned = h.small("v", shape[::-1]), t.op("Transpose", g, perm=[1, 0])
    second = h.keep(v, h.mixed(v, t.op("Mul", turned, turned), 0.95))
    return t.op("Transpose", t.op("Div", turned, h.root(second)), perm=[1, 0])


def _schedule_free(h: Hold, g: str) -> str:
    """The parameter follows the mean of a second sequence, which alone follows the gradient."""
    t, z = h.tape, h.small("z")
    new = h.keep(z, t.op("Sub", z, t.op("Mul", g, t.const(0.1))))
    return t.op("Mul", t.op("Sub", h.value, new), t.const(0.3))


def _length(t: Tape, name: str) -> str:
    return t.op("ReduceL2", name, keepdims=0)


RULES: dict[str, Callable[[Hold, str], str]] = {
    "sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "adam": _adam, "amsgrad": _amsgrad,
    "soft-sign": _soft_sign, "lion": _lion, "adagrad": _adagrad, "rms": _rms, "adamax": _adamax, "rows": _rows,
    "centred": _centred, "trust": _trust, "normalised": _normalised, "cautious": _cautious, "kept": _kept,
    "delayed": _delayed, "dual": _dual, "rprop": _rprop, "muon": _muon, "flat-state": _flat_state,
    "turned-state": _turned_state, "schedule-free": _schedule_free, "muon-half": _muon_half,
}  # fmt: skip
