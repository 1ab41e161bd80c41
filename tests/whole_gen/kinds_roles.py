"""States that the batch writes without a gradient: read by the forward or not, in sums, means and extremes."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import detached, gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.updates import small
from whole_gen.writer import Value, Writer


def _average(w: Writer, old: Value, new: Value, rate: float) -> Value:
    """A moving average, in one of the ways to write it."""
    way = w.pick("weighted", "step", "folded", "lerp")
    if way == "weighted":
        return old * (1 - rate) + new * rate
    if way == "step":
        return old + (new - old) * rate
    if way == "folded":
        return old - old * rate + new * rate
    return w.op("Sum", old * (1 - rate), rate * new)


def _of_batch(w: Writer, h: Value, what: str) -> Value:
    """One number for each feature, of all samples."""
    if what == "mean":
        how = w.pick("mean", "divided", "contracted")
        if how == "mean":
            return h.mean(0)
        if how == "divided":
            return h.sum(0) * (1.0 / w.samples) if w.pick(True, False) else h.sum(0) / float(w.samples)
        ones = h * 0.0 + 1.0
        return w.op("Einsum", h, ones, equation="bi,bi->i") / float(w.samples)
    if what == "square":
        return (h * h).mean(0)
    if what == "sum":
        return h.sum(0)
    if what == "max":
        return w.reduced("ReduceMax", w.op("Abs", h) if w.pick(True, False) else h, [0], False)
    if what == "min":
        return w.reduced("ReduceMin", h, [0], False)
    return w.op("Cast", w.op("Greater", h, w.const(np.array(0.1, w.dtype))), to=11).sum(0)  # a count


def _new(w: Writer, old: Value, value: Value, what: str) -> Value:
    way = w.pick("average", "replace", "extreme" if what in ("max", "min") else "add")
    if way == "average":
        return _average(w, old, value, w.pick(0.1, 0.03, 0.3))
    if way == "replace":
        return w.op("Max", value, w.const(np.array(0.05, w.dtype))) if what != "min" else value * 1.0
    if way == "extreme":
        return w.op("Max" if what == "max" else "Min", old * w.pick(1.0, 0.9), value)
    return old + value * (w.pick(1.0, 0.5) if what in ("sum", "count") else 0.25)


def _loss(w: Writer, z: Value, y: Value) -> Value:
    d = z - y
    if w.pick("mean", "mean", "sum") == "sum":
        w.options["loss_reduction"] = "sum"
        return (d * d).sum()
    return (d * d).mean()


def _alone(w: Writer) -> None:
    """One micro-step: several move a statistic several times, and the whole batch once."""
    w.options["accumulate"] = 1


def _finish(w: Writer, p: list[Value], loss: Value) -> list[Value]:
    found = gradients(loss, p)
    w.out("loss", loss)
    for each, g in zip(p, found):
        if w.pick("sgd", "momentum") == "momentum":
            m = small(w, each.name + ".m", each.shape)
            g = m * 0.9 + g
            w.becomes(m, g)
        w.becomes(each, each - g * 0.1)
    return found


@kind
def running_read(w: Writer) -> None:
    """The forward reads a running statistic of hidden values."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    what = w.pick("mean", "square", "sum", "max", "min", "count")
    s = w.state("running", w.draw("running", (4,), 0.5, 1.5))
    h = w.op("Tanh", x @ w0)
    late = w.pick(True, False)
    new = None if late else _new(w, s, _of_batch(w, h, what), what)
    use = w.pick("shift", "scale", "divide")
    seen = h - s if use == "shift" else h * s if use == "scale" else h / (s * s + 0.5)
    loss = _loss(w, seen @ w1, y)
    _finish(w, [w0, w1], loss)
    w.becomes(s, _new(w, s, _of_batch(w, h, what), what) if new is None else new)


@kind
def running_unread(w: Writer) -> None:
    """A running statistic that only the outside reads."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    what = w.pick("mean", "square", "sum", "max", "min", "count")
    s = w.state("running", w.draw("running", (4,), 0.5, 1.5))
    h = w.op("Tanh", x @ w0)
    loss = _loss(w, h @ w1, y)
    _finish(w, [w0, w1], loss)
    w.becomes(s, _new(w, s, _of_batch(w, h, what), what))


@kind
def quantised(w: Writer) -> None:
    """Inputs are rounded on a scale that follows their largest values; gradients pass straight through."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    amax = w.state("amax", w.draw("amax", (3,), 1.0, 2.0) if w.pick(True, False) else np.array(1.5, w.dtype))
    scale = 7.0 / amax
    q = w.op("Round", w.op("Clip", x * scale, w.const(np.array(-7, w.dtype)), w.const(np.array(7, w.dtype)))) / scale
    loss = _loss(w, q @ w0, y)
    _finish(w, [w0], loss)
    seen = w.op("Abs", x)
    top = w.reduced("ReduceMax", seen, [0], False) if amax.shape else w.reduced("ReduceMax", seen, [], False)
    w.becomes(amax, _average(w, amax, top, 0.1) if w.pick(True, False) else w.op("Max", amax * 0.95, top))


@kind
def expert_bias(w: Writer) -> None:
    """A bias of the router follows the load of the experts, through a sign or in proportion."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    router, experts = parameter(w, "router", 3, 4), parameter(w, "experts", 4, 2)
    bias = w.state("bias", w.draw("bias", (4,), -0.05, 0.05))
    score = w.op("Sigmoid", x @ router)
    best = w.op("ArgMax", score + bias, axis=1, keepdims=1)
    chosen = detached(w, w.op("Equal", best, w.const(np.arange(4)[None])).to(w.dtype))
    loss = _loss(w, (score * chosen) @ experts, y)
    _finish(w, [router, experts], loss)
    load = chosen.sum(0) if w.pick(True, False) else chosen.mean(0)
    off = load.mean(0, keep=True) - load
    # a sign of what is zero but for rounding is any: loads are multiples of one over the experts' samples
    w.becomes(bias, bias + (w.op("Sign", off + 0.003) if w.pick(True, False) else off) * 0.01)


@kind
def codebook(w: Writer) -> None:
    """Codes follow moving averages of what is nearest to them; straight through, with a commitment term."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 3), parameter(w, "w1", 3, 2)
    codes = w.state("codes", w.draw("codes", (5, 3)))
    count, total = w.state("count", np.ones((5, 1), w.dtype)), w.state("total", w.draw("total", (5, 3)))
    h = w.op("Tanh", x @ w0)
    far = h.reshape(-1, 1, 3) - codes
    near = w.op("ArgMin", (far * far).sum(2), axis=1, keepdims=1)
    hot = detached(w, w.op("Equal", near, w.const(np.arange(5)[None])).to(w.dtype))
    q = hot @ codes
    d = (h + detached(w, q - h)) @ w1 - y
    c = h - q
    loss = (d * d).mean() + (c * c).mean() * 0.2
    _finish(w, [w0, w1], loss)
    n, t = _average(w, count, hot.sum(0).reshape(5, 1), 0.1), _average(w, total, hot.turn(1, 0) @ h, 0.1)
    w.becomes(count, n)
    w.becomes(total, t)
    w.becomes(codes, t / (n + 1e-3))
    w.told = True


@kind
def centres(w: Writer) -> None:
    """Centres of classes move to the mean of their samples."""
    _alone(w)
    x = w.fed("x", [3])
    y = w.fed("y", [], lambda generator, size: generator.integers(0, 4, size))
    w0, w1 = parameter(w, "w0", 3, 3), parameter(w, "w1", 3, 4)
    held = w.state("centres", w.draw("centres", (4, 3)))
    w.stated = {"centres": "sum"}
    h = w.op("Tanh", x @ w0)
    hot = detached(w, w.op("Equal", y.reshape(-1, 1), w.const(np.arange(4)[None])).to(w.dtype))
    own = hot @ held
    d = h - own
    s = w.op("LogSoftmax", h @ w1, axis=-1)
    loss = -(s * hot).mean() + (d * d).mean() * 0.1
    _finish(w, [w0, w1], loss)
    off = hot.turn(1, 0) @ (own - h)
    w.becomes(held, held - off / (hot.sum(0).reshape(4, 1) + 1.0) * 0.5)


@kind
def hebbian(w: Writer) -> None:
    """A weight that learns by products of what it reads and makes, under a head that is trained."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = w.state("w0", w.draw("w0", (3, 4))), parameter(w, "w1", 4, 2)
    h = w.op("Tanh", x @ w0)
    loss = _loss(w, h @ w1, y)
    _finish(w, [w1], loss)
    w.becomes(w0, w0 + x.turn(1, 0) @ h * (0.1 / w.samples if w.pick(True, False) else 0.1))
    w.refusal = r"--statistics w0=mean, where"  # 0.1 / 4 may be a rate


@kind
def linear_loss(w: Writer) -> None:
    """The gradient of a critic's last weight is a mean of features: a value of the forward."""
    x = w.fed("x", [3])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 1)
    h = w.op(w.pick("Tanh", "Sigmoid"), x @ w0)
    loss = (h @ w1).mean()
    _finish(w, [w0, w1], loss)


@kind
def preconditioned(w: Writer) -> None:
    """The update reads a statistic as it was before the step."""
    _alone(w)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    h = w.op("Tanh", x @ w0)
    loss = _loss(w, h @ w1, y)
    g0, g1 = gradients(loss, [w0, w1])
    w.out("loss", loss)
    a = w.state("cov", np.eye(4, dtype=w.dtype))
    w.becomes(w0, w0 - g0 * 0.1)
    w.becomes(w1, w1 - (a @ g1) * 0.1)
    cov = h.turn(1, 0) @ h
    w.becomes(a, _average(w, a, cov * (1.0 / w.samples) if w.pick(True, False) else cov, 0.1))


@kind
def fed_noise(w: Writer) -> None:
    """A fed noise of the parameter's shape enters the update: all ranks get the same."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0 = parameter(w, "w0", 3, 2)
    loss = _loss(w, w.op("Tanh", x @ w0), y)
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.hyper["noise"] = w.inputs["noise"] = w.draw("noise", (3, 2))
    noise = Value(w, "noise", w.inputs["noise"])
    new = w0 - g * 0.1
    way = w.pick("plain", "scaled", "rounded", "gradient")
    if way == "rounded":
        new = w.op("Floor", new * 256.0 + noise) * (1 / 256)
    elif way == "gradient":
        new = w0 - (g + noise * 0.01) * 0.1
    else:
        new = new + (noise * 0.01 if way == "scaled" else noise)
    w.becomes(w0, new)
