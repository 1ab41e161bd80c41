"""Structures of training codes that people publish, each with its usual choices."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import detached, gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.updates import Shared, adam, heavy, sgd
from whole_gen.writer import Value, Writer


def _net(w: Writer, x: Value, out: int, name: str = "w") -> tuple[Value, list[Value]]:
    p = [parameter(w, f"{name}0", x.shape[-1], 4), parameter(w, f"{name}1", 4, out)]
    return w.op("Tanh", x @ p[0]) @ p[1], p


def _trained(w: Writer, loss: Value, p: list[Value], shown: Value | None = None) -> list[Value]:
    found = gradients(loss, p)
    w.out("loss", loss if shown is None else shown)
    rule = w.pick(sgd, heavy, adam)
    rate = Shared(w.setting("lr", 0.1))
    return [w.becomes(each, rule(w, each, g, rate)) or g for each, g in zip(p, found)]


def _squares(w: Writer) -> tuple[list[Value], list[Value]]:
    """The parameters of a net and their gradients, by the mean of squares, which is shown."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    out, p = _net(w, x, 2)
    d = out - y
    loss = (d * d).mean()
    w.out("loss", loss)
    return p, gradients(loss, p)


@kind
def observation_normaliser(w: Writer) -> None:
    """Inputs are normalised by a running mean and variance that are merged with those of the batch by counts."""
    w.options["accumulate"] = 1
    w.told = True
    x, y = w.fed("x", [3]), w.fed("y", [2])
    mean, var, count = (
        w.state("mean", w.draw("mean", (3,))),
        w.state("var", w.draw("var", (3,), 0.5, 1.5)),
        w.state("count", np.array(9.0, w.dtype)),
    )
    seen = (x - mean) / (var + 1e-3).sqrt()
    out, p = _net(w, seen, 2)
    d = out - y
    _trained(w, (d * d).mean(), p)
    n = w.op("Size", x).to(w.dtype) / 3.0 if w.pick(True, False) else w.const(np.array(float(w.samples), w.dtype))
    total = count + n
    how = w.pick("merged", "sums", "mean alone")
    own = x.mean(0)
    move = own - mean
    if how == "merged":
        spread = x - own
        m2 = var * count + (spread * spread).sum(0) + move * move * count * n / total
        w.becomes(var, m2 / total)
    elif how == "sums":
        w.becomes(var, (var * count + ((x - mean) * (x - mean)).sum(0)) / total)
    else:
        w.becomes(var, var * 1.0)
    w.becomes(mean, mean + move * n / total if how != "sums" else (mean * count + x.sum(0)) / total)
    w.becomes(count, total)
    w.refusal = "statistic|which is the size of a batch"


@kind
def spectral_norm(w: Writer) -> None:
    """A weight is divided by its largest singular value, which a state follows by one iteration a step."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    u = w.state("u", w.draw("u", (3, 1), 0.2, 0.9))
    v = w.op("Transpose", w0, perm=[1, 0]) @ u
    v = v / ((v * v).sum().sqrt() + 1e-6)
    new = w0 @ v
    new = new / ((new * new).sum().sqrt() + 1e-6)
    read = new if w.pick(True, False) else u
    sigma = (detached(w, read).turn(1, 0) @ w0 @ detached(w, v)).reshape()
    h = w.op("Tanh", x @ (w0 / sigma)) @ w1
    d = h - y
    w.becomes(u, new)
    _trained(w, (d * d).mean(), [w0, w1])


@kind
def mean_teacher(w: Writer) -> None:
    """A student is drawn to a teacher that averages its weights; the teacher sees other noise, and no gradient."""
    x, y, z = w.fed("x", [3]), w.fed("y", [2]), w.fed("z", [3])
    out, p = _net(w, x, 2)
    t = [w.state(f"t{n}", each.held) for n, each in enumerate(p)]
    aim = w.op("Tanh", (x + z * 0.1) @ t[0]) @ t[1]
    d, c = out - y, out - detached(w, aim)
    _trained(w, (d * d).mean() + (c * c).mean() * w.pick(0.5, 0.25), p)
    for old, each in zip(t, p):
        new = w.outputs[w.states[each.name]] if w.pick(True, False) else each
        w.becomes(old, old * 0.9 + new * 0.1)


@kind
def policy_gradient(w: Writer) -> None:
    """Returns less a running baseline weigh the choices' logarithms; advantages may be normalised over the batch."""
    w.options["accumulate"] = 1
    x, r = w.fed("x", [3]), w.fed("r", [1])
    hot = w.fed("hot", [4], lambda generator, s: np.eye(s[1])[generator.integers(0, s[1], s[0])])
    out, p = _net(w, x, 4)
    b = w.state("baseline", np.array(0.3, w.dtype))
    logs = w.op("LogSoftmax", out, axis=1)
    gain = r - b
    way = w.pick("plain", "plain", "normalised", "clipped")
    if way == "normalised":
        spread = gain - gain.mean()
        gain = spread / ((spread * spread).mean().sqrt() + 1e-3)
    chosen = (hot * logs).sum(1, keep=True)
    if way == "clipped":
        old = w.fed("old", [1])
        ratio = w.op("Exp", chosen - old * 0.1 + 1.2)
        near = w.op("Less", w.op("Abs", ratio - 1.0), w.const(np.array(0.2, w.dtype)))
        chosen = w.op("Where", near, ratio, detached(w, ratio))
    odds = w.op("Softmax", out, axis=1)
    entropy = -(odds * logs).sum(1).mean()
    _trained(w, -(gain * chosen).mean() - entropy * 0.01, p)
    w.becomes(b, b * 0.9 + r.mean() * 0.1)


@kind
def norm_watched(w: Writer) -> None:
    """Gradients are scaled down where their norm exceeds a running mean of earlier norms, which is a state."""
    p, found = _squares(w)
    norm = (
        sum((g * g).sum() for g in found[1:])
        if len(found) > 9
        else ((found[0] * found[0]).sum() + (found[1] * found[1]).sum()).sqrt()
    )
    usual = w.state("usual", np.array(w.pick(0.05, 0.4), w.dtype))
    most = usual * 1.2
    scale = w.op("Min", most / (norm + 1e-6), w.const(np.array(1.0, w.dtype)))
    for each, g in zip(p, found):
        w.becomes(each, each - g * scale * 0.1)
    w.becomes(usual, usual * 0.9 + (w.op("Min", norm, most) if w.pick(True, False) else norm) * 0.1)


@kind
def slow_weights(w: Writer) -> None:
    """Every third step the weights go halfway back to slow ones (Lookahead), or are averaged into others (SWA)."""
    p, found = _squares(w)
    t = w.state("t", np.array(1, np.int64))
    w.becomes(t, t + w.const(np.array(1, np.int64)))
    due = w.op("Equal", w.op("Mod", t, w.const(np.array(3, np.int64))), w.const(np.array(0, np.int64)))
    how = w.pick("lookahead", "averaged")
    n = w.state("n", np.array(2.0, w.dtype)) if how == "averaged" else None
    for each, g in zip(p, found):
        slow = w.state(f"{each.name}.slow", w.draw(f"{each.name}.slow", each.shape))
        new = each - g * 0.1
        if n is None:
            back = slow + (new - slow) * 0.5
            w.becomes(slow, w.op("Where", due, back, slow))
            w.becomes(each, w.op("Where", due, back, new))
        else:
            w.becomes(slow, w.op("Where", due, slow + (new - slow) / (n + 1.0), slow))
            w.becomes(each, new)
    if n is not None:
        w.becomes(n, n + due.to(w.dtype))
    w.told = True


@kind
def class_frequencies(w: Writer) -> None:
    """Choices are corrected by running frequencies of the classes, which the batch's labels move."""
    w.options["accumulate"] = 1
    x = w.fed("x", [3])
    hot = w.fed("hot", [4], lambda generator, s: np.eye(s[1])[generator.integers(0, s[1], s[0])])
    out, p = _net(w, x, 4)
    f = w.state("frequency", w.draw("frequency", (4,), 0.1, 0.4))
    logs = w.op("LogSoftmax", out + w.op("Log", w.op("Abs", f) + 1e-3), axis=1)
    _trained(w, -(hot * logs).sum(1).mean(), p)
    how = w.pick("mean", "sum", "share")
    own = hot.mean(0) if how == "mean" else hot.sum(0)
    w.becomes(f, f * 0.9 + own * 0.1 if how != "share" else f * 0.9 + own / (own.sum() + 1e-9) * 0.1)


@kind
def worst_group(w: Writer) -> None:
    """Weights of groups grow with the groups' losses, and weigh these (group DRO)."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    group = w.fed("group", [3], lambda generator, s: np.eye(s[1])[generator.integers(0, s[1], s[0])])
    out, p = _net(w, x, 2)
    d = out - y
    each = (d * d).sum(1, keep=True)
    q = w.state("q", w.draw("q", (3,), 0.2, 0.5))
    counted = w.pick(True, False)
    own = (group * each).sum(0) / (group.sum(0) + 1e-6) if counted else (group * each).mean(0)
    new = q * w.op("Exp", detached(w, own) * 0.1)
    new = new / new.sum()
    _trained(w, ((new if w.pick(True, False) else q) * own).sum(), p)
    w.becomes(q, new)
    w.refusal = "statistic|gradient"


@kind
def elastic_penalty(w: Writer) -> None:
    """A penalty draws weights to old ones, each by its own importance; it stands in the loss or in the gradient."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    out, p = _net(w, x, 2)
    d = out - y
    loss = (d * d).mean()
    old = [w.const(w.draw(f"old{n}", each.shape), "stored") for n, each in enumerate(p)]
    weight = [w.const(w.draw(f"f{n}", each.shape, 0.1, 2.0), "stored") for n, each in enumerate(p)]
    if w.pick(True, False):
        for each, o, f in zip(p, old, weight):
            loss = loss + (f * (each - o) * (each - o)).sum() * 0.2
        _trained(w, loss, p)
        return
    w.out("loss", loss)
    for each, g, o, f in zip(p, gradients(loss, p), old, weight):
        w.becomes(each, each - (g + f * (each - o) * 0.4) * 0.1)


@kind
def redundancy_reduced(w: Writer) -> None:
    """Two views' features are to correlate one by one over the batch (Barlow Twins)."""
    w.options["accumulate"] = 1
    x, z = w.fed("x", [3]), w.fed("z", [3])
    p = [parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)]
    a, b = (w.op("Tanh", each @ p[0]) @ p[1] for each in (x, z))
    corr = a.turn(1, 0) @ b * (1.0 / w.samples)
    d = corr - w.const(np.eye(2, dtype=w.dtype))
    _trained(w, (d * d).sum(), p)


@kind
def focal(w: Writer) -> None:
    """Hard samples weigh more; the sum is divided by the number of positive ones, which is kept from zero."""
    w.options["accumulate"] = 1
    x = w.fed("x", [3])
    y = w.fed("y", [1], lambda generator, s: (generator.random(s) < 0.4).astype(float))
    out, p = _net(w, x, 1)
    odds = w.op("Sigmoid", out)
    right = odds * y + (1.0 - odds) * (1.0 - y)
    hard = (1.0 - right) * (1.0 - right)
    each = -(hard * w.op("Log", right + 1e-6))
    how = w.pick("mean", "positives", "kept")
    if how == "mean":
        loss = each.mean()
    else:
        count = y.sum()
        loss = each.sum() / (w.op("Max", count, w.const(np.array(1.0, w.dtype))) if how == "kept" else count + 1.0)
    _trained(w, loss, p)


@kind
def tuned_temperature(w: Writer) -> None:
    """A learned number weighs the entropy, and follows its distance from a target (SAC)."""
    x, r = w.fed("x", [3]), w.fed("r", [4])
    out, p = _net(w, x, 4)
    logs, odds = w.op("LogSoftmax", out, axis=1), w.op("Softmax", out, axis=1)
    a = parameter(w, "log_alpha")
    alpha = w.op("Exp", a)
    actor = (odds * (logs * detached(w, alpha) - r)).sum(1).mean()
    gap = (detached(w, odds) * (detached(w, logs) * -1.0 - 0.7)).sum(1).mean()
    own = alpha * gap if w.pick(True, False) else a * gap
    found = [*gradients(actor, p), *gradients(own, [a])]
    w.out("actor", actor)
    w.out("temperature", own)
    for each, g in zip([*p, a], found):
        w.becomes(each, each - g * 0.1)
