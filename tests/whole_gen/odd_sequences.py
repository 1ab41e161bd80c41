"""States that are positions and sequences: what was, what is averaged, what changes places."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.odd import float_, net, odd
from whole_gen.updates import small
from whole_gen.writer import Writer


@odd
def two_positions(w: Writer) -> None:
    """Momentum by the last two positions: the older one is the parameter as it was."""
    p, g = net(w)
    for name in p:
        before = w.state(name + ".before", p[name].held - 0.01)
        w.becomes(p[name], p[name] + (p[name] - before) * 0.9 - g[name] * 0.1)
        w.becomes(before, p[name])


@odd
def difference_of_gradients(w: Writer) -> None:
    """Adan: a moment of the difference to the last gradient, which is a state."""
    p, g = net(w)
    for name in p:
        shape = p[name].shape
        last, m, v = small(w, name + ".last", shape), small(w, name + ".m", shape), small(w, name + ".v", shape)
        change = g[name] - last
        first, second = m * 0.9 + g[name] * 0.1, v * 0.9 + change * 0.1
        w.becomes(last, g[name])
        w.becomes(m, first)
        w.becomes(v, second)
        w.becomes(p[name], p[name] - (first + second * 0.9) * 0.1)


@odd
def barzilai(w: Writer) -> None:
    """The rate is the quotient of inner products of the last steps; old position and gradient are states."""
    p, g = net(w)
    tops, downs = [], []
    for name in p:
        old_p, old_g = (
            w.state(name + ".p", p[name].held - 0.02),
            w.state(name + ".g", w.draw(name + "g", p[name].shape)),
        )
        s, y = p[name] - old_p, g[name] - old_g
        tops.append((s * s).sum())
        downs.append(w.op("Abs", (s * y).sum()))
        w.becomes(old_p, p[name])
        w.becomes(old_g, g[name])
    rate = w.op("Min", w.op("Sum", *tops) / (w.op("Sum", *downs) + 1e-3), float_(w, 0.5))
    for name in p:
        w.becomes(p[name], p[name] - g[name] * rate)


@odd
def delayed_average(w: Writer) -> None:
    """A chain of averages, each of the one before; the update pulls to the last."""
    p, g = net(w)
    for name in p:
        one, two = w.state(name + ".one", p[name].held * 0.9), w.state(name + ".two", p[name].held * 0.8)
        new = p[name] - g[name] * 0.1 - (p[name] - two) * 0.05
        w.becomes(two, two * 0.5 + one * 0.5)
        w.becomes(one, one * 0.5 + new * 0.5)
        w.becomes(p[name], new)


@odd
def double_buffer(w: Writer) -> None:
    """Weights in two buffers: the update of one is written to the other, which is then the first."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a, b = parameter(w, "a", 3, 2), w.state("b", w.draw("b", (3, 2)))
    loss = squares(w, x @ a, y)
    (g,) = gradients(loss, [a])
    w.out("loss", loss)
    w.becomes(a, b * 0.5 + a * 0.5 - g * 0.1)
    w.becomes(b, a - g * 0.2)


@odd
def nesterov_pair(w: Writer) -> None:
    """Nesterov's two sequences: the gradient is at y, and x follows."""
    p, g = net(w)
    for name in p:
        x = w.state(name + ".x", p[name].held * 0.95)
        new_x = p[name] - g[name] * 0.1
        w.becomes(p[name], new_x + (new_x - x) * 0.5)
        w.becomes(x, new_x)


@odd
def best_so_far(w: Writer) -> None:
    """The weights with the smallest gradient so far, and that norm."""
    p, g = net(w)
    norm = w.op("Sum", *((each * each).sum() for each in g.values())).sqrt()
    best = w.state("best", np.array(10.0, w.dtype))
    better = w.op("Less", norm, best)
    w.becomes(best, w.op("Where", better, norm, best))
    for name in p:
        kept = w.state(name + ".best", p[name].held * 0.0)
        w.becomes(kept, w.op("Where", better, p[name], kept))
        w.becomes(p[name], p[name] - g[name] * 0.1)


@odd
def momentum_reset(w: Writer) -> None:
    """Momentum is set to zero, and the parameter to an anchor that moves, every third step."""
    p, g = net(w)
    t = w.state("t", np.array(0, np.int64))
    new_t = w.op("Mod", t + 1, w.const(np.array(3)))
    w.becomes(t, new_t)
    due = w.op("Equal", new_t, w.const(np.array(0)))
    for name in p:
        m, anchor = small(w, name + ".m", p[name].shape), w.state(name + ".anchor", p[name].held + 0.05)
        new_m = m * 0.9 + g[name]
        new_p = p[name] - new_m * 0.1
        w.becomes(m, w.op("Where", due, new_m * 0.0, new_m))
        w.becomes(anchor, w.op("Where", due, new_p, anchor))
        w.becomes(p[name], w.op("Where", due, (new_p + anchor) * 0.5, new_p))
