"""Updates that several gradients enter: sums, rows of all, products, each clipped by itself."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.odd import float_, net, odd, rest
from whole_gen.updates import small
from whole_gen.writer import Value, Writer


@odd
def one_gradient_for_two(w: Writer) -> None:
    """Two parameters are added before use: one gradient, two rules."""
    x, y = w.fed("x", [3]), w.fed("y", [3])
    a, b, c = parameter(w, "a", 3, 3), parameter(w, "b", 3, 3), parameter(w, "c", 3)
    loss = squares(w, x @ (a + b) + c, y)
    ga, gc = gradients(loss, [a, c])
    w.out("loss", loss)
    m = small(w, "a.m", (3, 3))
    new = m * 0.9 + ga
    w.becomes(m, new)
    w.becomes(a, a - new * 0.1)
    w.becomes(b, b - ga * 0.2)
    w.becomes(c, c - gc * 0.1)


@odd
def turned_pair(w: Writer) -> None:
    """One parameter's gradient is the other's, transposed."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    a, b = parameter(w, "a", 3, 2), parameter(w, "b", 2, 3)
    loss = squares(w, x @ (a + b.turn(1, 0)), y)
    ga, gb = gradients(loss, [a, b])
    w.out("loss", loss)
    for each, g in ((a, ga), (b, gb)):
        v = small(w, each.name + ".v", each.shape)
        new = v * 0.9 + g * g
        w.becomes(v, new)
        w.becomes(each, each - g / (new.sqrt() + 0.1))


@odd
def gauss_seidel(w: Writer) -> None:
    """An update reads another parameter's new value, and another's gradient."""
    p, g = net(w, 4, 4, 4)
    new = p["w0"] - g["w0"] * 0.1
    w.becomes(p["w0"], new)
    w.becomes(p["w1"], p["w1"] - (g["w1"] * 0.1 + (new - p["w0"]) * 0.3 + g["w0"] * 0.05))
    w.becomes(p["b0"], p["b0"] - g["b0"] * new.mean() - new.mean(0) * 0.01)


@odd
def one_row_of_all(w: Writer) -> None:
    """All gradients in one row: standardised by the mean and deviation of the row, and cut up again."""
    p, g = net(w)
    row = w.op("Concat", *(each.reshape(-1) for each in g.values()), axis=0)
    mean = row.mean()
    dev = ((row - mean) * (row - mean)).mean().sqrt()
    row = (row - mean) / (dev + 0.1)
    sizes = [each.held.size for each in g.values()]
    parts = w.op("Split", row, w.const(np.array(sizes)), out=3, axis=0)
    for part, name in zip(parts, p):
        w.becomes(p[name], p[name] - part.reshape(*p[name].shape) * 0.1)


@odd
def clipped_row(w: Writer) -> None:
    """All gradients in one row: clipped by its norm, which is shown, and cut up again, by one Split or by Slices; a
    momentum each."""
    p, g = net(w)
    row = w.op("Concat", *(each.reshape(-1) for each in g.values()), axis=0)
    norm = w.op("ReduceL2", row, keepdims=0) if w.pick(True, False) else (row * row).sum().sqrt()
    w.out("norm", norm)
    row = row * w.op("Min", 0.3 / (norm + 1e-6), w.const(np.array(1.0, w.dtype)))
    ends = np.cumsum([each.held.size for each in g.values()])
    if w.pick(True, False):
        parts = w.op("Split", row, w.const(np.diff(ends, prepend=0)), out=len(p), axis=0)
    else:
        parts = [
            w.op("Slice", row, w.const(np.array([end - each.held.size])), w.const(np.array([end])))
            for each, end in zip(g.values(), ends)
        ]
    for part, name in zip(parts, p):
        m = small(w, f"{name}.m", p[name].shape)
        moved = m * 0.9 + part.reshape(*p[name].shape)
        w.becomes(m, moved)
        w.becomes(p[name], p[name] - moved * 0.1)


@odd
def adam_over_row(w: Writer) -> None:
    """Moments of all parameters in one state each, a row."""
    p, g = net(w)
    row = w.op("Concat", *(each.reshape(-1) for each in g.values()), axis=0)
    m, v = small(w, "m", row.shape), small(w, "v", row.shape)
    new_m, new_v = m * 0.9 + row * 0.1, v * 0.99 + row * row * 0.01
    w.becomes(m, new_m)
    w.becomes(v, new_v)
    step = new_m / (new_v.sqrt() + 0.01) * 0.1
    at = 0
    for name in p:
        size = p[name].held.size
        part = w.op("Slice", step, w.const(np.array([at])), w.const(np.array([at + size])))
        at += size
        w.becomes(p[name], p[name] - part.reshape(*p[name].shape))


@odd
def product_of_gradients(w: Writer) -> None:
    """A weight follows the product of its gradient and another's."""
    p, g = net(w, 4, 4, 4)
    w.becomes(p["w1"], p["w1"] - g["w1"] * g["w0"] * 3.0)
    rest(w, p, g, "w0", "b0")


@odd
def two_products(w: Writer) -> None:
    """Two weights follow one product of both gradients."""
    p, g = net(w, 4, 4, 4)
    both = g["w1"] * g["w0"]
    w.becomes(p["w1"], p["w1"] - both * 3.0)
    w.becomes(p["w0"], p["w0"] - both * 2.0)
    rest(w, p, g, "b0")


@odd
def matrix_of_gradients(w: Writer) -> None:
    """A weight follows the matrix product of its gradient with another's."""
    p, g = net(w, 4, 4, 4)
    w.becomes(p["w1"], p["w1"] - g["w1"] @ g["w0"] * 3.0)
    w.becomes(p["w0"], p["w0"] - g["w0"] @ g["w1"].turn(1, 0) * 3.0)
    rest(w, p, g, "b0")


@odd
def whitened(w: Writer) -> None:
    """A weight follows g (gᵀ g + 1)⁻¹, roughly: products of a gradient with itself alone."""
    p, g = net(w, 4, 4, 4)
    for name in ("w0", "w1"):
        w.becomes(p[name], p[name] - g[name] @ (g[name].turn(1, 0) @ g[name]) * 3.0)
    rest(w, p, g, "b0")


@odd
def signs_agree(w: Writer) -> None:
    """Two heads on one trunk of one shape: a step is taken where the signs of both gradients agree."""
    x, y, z = w.fed("x", [3]), w.fed("y", [2]), w.fed("z", [2])
    a, b = parameter(w, "a", 3, 2), parameter(w, "b", 3, 2)
    one, two = squares(w, x @ a, y), squares(w, x @ b, z)
    ga, gb = gradients(one, [a])[0], gradients(two, [b])[0]
    w.out("loss", one + two)
    agree = w.op("Greater", ga * gb, float_(w, 0.0))
    w.becomes(a, a - w.op("Where", agree, ga, ga * 0.1) * 0.1)
    w.becomes(b, b - w.op("Where", agree, gb, gb * 0.1) * 0.1)


def _two_losses(w: Writer) -> tuple[Value, Value, Value]:
    """Two losses on one weight, and nothing of it updated: the weight, and the gradient of each loss."""
    x, y, z = w.fed("x", [3]), w.fed("y", [2]), w.fed("z", [2])
    a = parameter(w, "a", 3, 2)
    one, two = squares(w, w.op("Tanh", x @ a), y), squares(w, x @ a, z)
    g, h = gradients(one, [a])[0], gradients(two, [a])[0]
    w.out("loss", one + two)
    return a, g, h


@odd
def surgery(w: Writer) -> None:
    """PCGrad: two losses on one weight; a gradient loses its part against the other."""
    a, g, h = _two_losses(w)
    dot = w.op("Min", (g * h).sum(), float_(w, 0.0))
    g2 = g - h * (dot / ((h * h).sum() + 1e-3))
    h2 = h - g * (dot / ((g * g).sum() + 1e-3))
    w.becomes(a, a - (g2 + h2) * 0.1)


@odd
def clipped_each(w: Writer) -> None:
    """Two losses on one weight, each gradient clipped by itself before they are added."""
    a, g, h = _two_losses(w)
    low, high = float_(w, -0.05), float_(w, 0.05)
    w.becomes(a, a - (w.op("Clip", g, low, high) + w.op("Clip", h, low, high)) * 0.1)


@odd
def normed_each(w: Writer) -> None:
    """The same, each divided by its norm (GradNorm)."""
    a, g, h = _two_losses(w)
    g, h = (each / (w.op("ReduceL2", each, keepdims=0) + 0.1) for each in (g, h))
    w.becomes(a, a - (g + h) * 0.1)


@odd
def standardised(w: Writer) -> None:
    """Each gradient less its mean, over its deviation."""
    p, g = net(w)
    for name in p:
        mean = g[name].mean()
        c = g[name] - mean
        w.becomes(p[name], p[name] - c / ((c * c).mean().sqrt() + 0.1) * 0.1)


@odd
def row_of_two(w: Writer) -> None:
    """Two gradients in a matrix of two rows: each is divided by the norm of its column."""
    x, y = w.fed("x", [3]), w.fed("y", [3])
    a, b = parameter(w, "a", 3), parameter(w, "b", 3)
    loss = squares(w, w.op("Tanh", x * a) + b, y)
    ga, gb = gradients(loss, [a, b])
    w.out("loss", loss)
    both = w.op("Concat", ga.reshape(1, 3), gb.reshape(1, 3), axis=0)
    both = both / (w.op("ReduceL2", both, w.const(np.array([0])), keepdims=1) + 0.1)
    one, two = w.op("Split", both, w.const(np.array([1, 1])), out=2, axis=0)
    w.becomes(a, a - one.reshape(3) * 0.1)
    w.becomes(b, b - two.reshape(3) * 0.1)
