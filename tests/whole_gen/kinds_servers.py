"""States that no gradient updates, wherever the step reads them: frozen, targets, averages, schedules, moments."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import act, parameter, squares
from whole_gen.kinds import kind
from whole_gen.odd import float_
from whole_gen.updates import small
from whole_gen.writer import Value, Writer


def _due(w: Writer) -> Value:
    """Whether it is time for a copy: every second or third step, by a counter."""
    count = w.state("count", np.array(w.pick(0, 1), np.int64))
    more = count + 1
    w.becomes(count, more)
    every = w.const(np.array(w.pick(2, 3)))
    return w.op("Equal", w.op("Mod", more, every), w.const(np.array(0)))


def _updated(w: Writer, p: Value, g: Value) -> Value:
    """The new value of a parameter, which replaces it."""
    if w.pick(True, False):
        m = small(w, f"{p.name}.m", p.shape)
        moved = m * 0.9 + g
        w.becomes(m, moved)
        new = p - moved * 0.1
    else:
        new = p - g * w.pick(0.1, 0.05)
    w.becomes(p, new)
    return new


def _stays(w: Writer, frozen: Value) -> None:
    name = frozen
    for _ in range(w.pick(0, 1, 2)):
        name = w.op("Identity", name)
    w.becomes(frozen, name)


@kind
def frozen_base(w: Writer) -> None:
    """Low-rank adapters beside a frozen weight; the weight may be cut, scaled, or an anchor of the update too."""
    i, o, rank = w.pick(4, 5), w.pick(3, 6), w.pick(1, 2)
    x, y = w.fed("x", [i]), w.fed("y", [o])
    base = w.state("base", w.draw("base", (i, o)))
    p = [parameter(w, "a", i, rank), parameter(w, "b", rank, o)]
    if bias := w.pick(True, False):
        p.append(parameter(w, "c", o))
    whole = base + (p[0] @ p[1]) * w.pick(2.0, 0.5)
    how = w.pick("plain", "normed", "scaled")
    if how == "normed":
        whole = whole / ((base * base).sum().sqrt() + 1.0)
    if how == "scaled":
        scale = w.state("scale", w.draw("scale", (o,), 0.5, 1.5))
        whole = whole * scale
        _stays(w, scale)
    z = x @ whole
    loss = squares(w, z + p[2] if bias else z, y)
    found = gradients(loss, p)
    w.out("loss", loss)
    anchor = (base * base).sum() * 0.01 if w.pick(True, False, False) else None
    for each, g in zip(p, found):
        _updated(w, each, g if anchor is None else g + each * anchor)
    _stays(w, base)


@kind
def target_network(w: Writer) -> None:
    """A target follows the weights: a copy every few steps, or a moving average; of all of them or of one."""
    x, y = w.fed("x", [w.pick(3, 5)]), w.fed("y", [2])
    i, h = x.shape[-1], w.pick(4, 3)
    p = [parameter(w, "w0", i, h), parameter(w, "w1", h, 2)]
    t = [w.state(f"t{place}", w.draw(f"t{place}", each.shape)) for place, each in enumerate(p)]
    goal = w.op("Tanh", x @ t[0]) @ t[1]
    if w.pick(True, False):
        goal = w.op("ReduceMax", goal, w.const(np.array([1])), keepdims=1) * 0.9
    loss = squares(w, act(w, x @ p[0]) @ p[1], y + goal)
    found = gradients(loss, p)
    w.out("loss", loss)
    how = w.pick("copy", "average", "both")
    due = _due(w) if how != "average" else None
    for place, (each, g) in enumerate(zip(p, found)):
        before = each
        new = _updated(w, each, g)
        source = new if w.pick(True, False) else before
        moved = t[place] * 0.9 + source * 0.1 if how != "copy" else source
        w.becomes(t[place], moved if due is None else w.op("Where", due, moved, t[place]))


@kind
def read_moment(w: Writer) -> None:
    """The forward reads a moment of the update: it looks ahead, or shows its size."""
    x, y = w.fed("x", [3]), w.fed("y", [w.pick(2, 4)])
    a = parameter(w, "a", 3, y.shape[-1])
    b = parameter(w, "b", y.shape[-1])
    m = small(w, "a.m", a.shape)
    ahead = a - m * 0.1 if w.pick(True, False) else a * (float_(w, 1.0) - (m * m).sum() * 0.1)
    loss = squares(w, x @ ahead + b, y)
    ga, gb = gradients(loss, [a, b])
    w.out("loss", loss)
    moved = m * 0.9 + ga
    w.becomes(m, moved)
    w.becomes(a, a - moved * 0.1)
    _updated(w, b, gb)


@kind
def read_average(w: Writer) -> None:
    """An average of the weights scales the loss, as a whole or by its norm; another is kept and not read."""
    x, y = w.fed("x", [4]), w.fed("y", [3])
    a, b = parameter(w, "a", 4, 3), parameter(w, "b", 3)
    mean, idle = w.state("mean", w.draw("mean", (4, 3))), w.state("idle", w.draw("idle", (3,)))
    z = x @ (a + mean * 0.5) + b
    if w.pick(True, False):
        z = (x @ a + b) / ((mean * mean).sum().sqrt() + 1.0)
    loss = squares(w, z, y)
    ga, gb = gradients(loss, [a, b])
    w.out("loss", loss)
    new = _updated(w, a, ga)
    w.becomes(mean, mean * 0.9 + new * 0.1)
    w.becomes(idle, idle * 0.5 + _updated(w, b, gb) * 0.5)


@kind
def schedule_of_many(w: Writer) -> None:
    """Numbers that no gradient and no batch moves: a schedule of a temperature for each column, counters of both."""
    x, y = w.fed("x", [3]), w.fed("y", [4])
    a = parameter(w, "a", 3, 4)
    heat = w.state("heat", w.draw("heat", (4,), 0.5, 1.5))
    z = x @ a * heat
    counts = None
    if w.pick(True, False):
        counts = w.state("counts", np.array([0, 3, 1, 2], np.int64))
        z = z / (counts.to(w.dtype) + 2.0)
    loss = squares(w, z, y)
    (g,) = gradients(loss, [a])
    w.out("loss", loss)
    _updated(w, a, g * heat if w.pick(True, False) else g)
    w.becomes(heat, heat * 0.9 + 0.05)
    if counts is not None:
        w.becomes(counts, counts + 1)


def _two_layers(w: Writer) -> tuple[Value, Value, list[Value], list[Value]]:
    x, y = w.fed("x", [3]), w.fed("y", [2])
    p = [parameter(w, "a", 3, 2), parameter(w, "b", 2)]
    loss = squares(w, act(w, x @ p[0]) + p[1], y)
    found = gradients(loss, p)
    w.out("loss", loss)
    return x, y, p, found


@kind
def metric_of_another_loss(w: Writer) -> None:
    """An output that no gradient of the step belongs to: of these weights, of frozen ones, of constants, averaged."""
    x, y, p, found = _two_layers(w)
    of = w.pick("weights", "frozen", "constant")
    c = p[0] if of == "weights" else w.const(w.draw("c", (3, 2)))
    if of == "frozen":
        c = w.state("c", w.draw("c", (3, 2)))
        _stays(w, c)
    how = w.pick("Abs", "Tanh", "product")
    d = x @ c - y
    other = (d * w.op("Tanh", d)).mean() if how == "product" else w.op(how, d).mean()
    if w.pick(True, False):
        seen = w.state("seen", np.array(0.5, w.dtype))
        w.becomes(seen, seen * 0.9 + other * 0.1)
        w.apart.append("seen")
    if w.pick(True, False):
        w.out("rows", (d * d).sum(1))
    w.out("other", other)
    for each, g in zip(p, found):
        _updated(w, each, g)


@kind
def metric_of_new_weights(w: Writer) -> None:
    """The loss on the same samples behind the update; trainers that pull at the start do not have it."""
    x, y, p, found = _two_layers(w)
    new = [_updated(w, each, g) for each, g in zip(p, found)]
    z = x @ (new[0] if w.pick(True, False) else p[0]) + new[1]
    w.out("later", w.op("Abs", z - y).mean())
    w.refusal = "take --pull end|leave out --accumulate"
