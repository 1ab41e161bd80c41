"""Losses and backwards that are reduced over samples independently of one another: means, sums, quotients by counts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import act, classes, ids, one_hot, parameter, squares
from whole_gen.kinds import kind
from whole_gen.updates import small
from whole_gen.writer import Value, Writer

Params = dict[str, Value]
MEANS = ("ReduceMean", "Div", "Mul", "each", "size", "means")
"""Ways to write a mean over samples: one operator, a division by a constant or a product with one, in each sample's
term, a division by a size read from a shape, a mean of means."""


def elements(w: Writer, value: Value) -> Value:
    """The number of elements of a value, read from its shape."""
    if w.pick("size", "shape") == "size":
        return w.op("Size", value).to(w.dtype)
    shape = w.op("Shape", value)
    if w.pick("product", "places") == "product":
        return w.op("ReduceProd", shape, keepdims=0).to(w.dtype)
    total: Value | None = None
    for place in range(len(value.shape)):
        size = w.op("Gather", shape, w.const(np.array(place)), axis=0).to(w.dtype)
        total = size if total is None else total * size
    assert total is not None
    return total


def mean_of(w: Writer, each: Value, like: Value, how: str) -> Value:
    """The mean of the losses of samples, written in one of six ways; ``like``: an input of the same shape."""
    count = float(each.held.size)
    if how == "ReduceMean":
        return each.mean()
    if how == "Div":
        return each.sum() / count
    if how == "Mul":
        return each.sum() * (1.0 / count)
    if how == "each":
        return (each * (1.0 / count)).sum()
    if how == "size":
        return each.sum() / elements(w, like)
    return each.mean(*range(1, len(each.shape))).mean(0) if len(each.shape) > 1 else each.mean(0)


def reduced(w: Writer, each: Value, mask: Value, how: str) -> Value:
    """The losses of samples as one number: a mean, a sum, a sum by a constant, a quotient by a count."""
    if how == "mean":
        return mean_of(w, each, mask, w.pick(*MEANS))
    if how == "sum":
        return each.sum()
    if how == "part":
        return each.sum() * 0.3
    count = mask.sum()
    guarded = w.op("Max", count, w.const(np.array(1.0, w.dtype))) if w.pick(True, False) else count
    if w.pick("sums", "means") == "means":
        return (each * mask).mean() / mask.mean()
    return (each * mask).sum() / guarded


def drawn_mask(w: Writer) -> Callable[..., np.ndarray]:
    """Ones and zeros; at least one of a rank's samples counts."""

    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        mask = (generator.random(shape) < generator.uniform(0.5, 0.9)).astype(w.dtype)
        mask.reshape(-1)[0] = 1.0
        return mask

    return draw


def net(w: Writer, tokens: int) -> tuple[Params, Value, Value]:
    """A perceptron on tokens, the squared errors of all tokens, and a mask of tokens."""
    i, h, o = w.pick(3, 5), w.pick(4, 6), w.pick(2, 3)
    inner = [tokens] if tokens else []
    x, y = w.fed("x", [*inner, i]), w.fed("y", [*inner, o])
    mask = w.fed("mask", inner, drawn_mask(w))
    p = {"w0": parameter(w, "w0", i, h), "b0": parameter(w, "b0", h), "w1": parameter(w, "w1", h, o)}
    d = act(w, x @ p["w0"] + p["b0"]) @ p["w1"] - y
    each = (d * d).mean(-1) if w.pick(True, False) else (d * d).sum(-1)
    return p, each, mask


def updated(w: Writer, p: Params, g: Params) -> None:
    """Descent with a rate or with momentum: neither forgets the size of a gradient."""
    rate = w.setting("lr", 0.07) if w.pick(True, False) else w.const(np.array(0.07, w.dtype))
    momentum = w.pick(True, False)
    for name, value in p.items():
        step = g[name]
        if momentum:
            held = small(w, f"{name}.m", value.shape)
            step = held * 0.9 + step
            w.becomes(held, step)
        w.becomes(value, value - step * rate)


def of_scale(w: Writer, loss: Value, p: Params) -> Params:
    """Gradients of a loss, with or without a loss scale that is taken out again."""
    how = w.pick("none", "none", "fed")
    if how == "none":
        return dict(zip(p, gradients(loss, list(p.values()))))
    scale = w.setting("scale", 16.0)
    found = gradients(loss, list(p.values()), scale if w.pick(True, False) else None)
    return dict(zip(p, found))


@kind
def shown_apart(w: Writer) -> None:
    """What is shown is reduced in one way, and what the backward starts from in another."""
    p, each, mask = net(w, w.pick(0, 3, 4))
    shown, back = w.pick("mean", "sum", "counted"), w.pick("mean", "sum", "counted")
    loss = reduced(w, each, mask, back)
    g = dict(zip(p, gradients(loss, list(p.values()))))
    w.out("loss", loss if shown == back and w.pick(True, False) else reduced(w, each, mask, shown))
    updated(w, p, g)
    if shown == "counted" != back:
        w.refusal = "name parameters with --params"  # a gradient of what is shown would read the mask
    elif back == "mean":
        w.refusal = "--batch mask"  # whose size alone is read


@kind
def folded_start(w: Writer) -> None:
    """The derivative of the loss by each sample is one constant, or a quotient that stands alone."""
    p, each, mask = net(w, w.pick(0, 3))
    total, count = each.sum(), float(each.held.size)
    how = w.pick("constant", "quotient", "size", "one", "behind", "count")
    start = {
        "constant": lambda: w.const(np.array(1.0 / count, w.dtype)),
        "quotient": lambda: w.const(np.array(1.0, w.dtype)) / count,
        "size": lambda: 1.0 / elements(w, mask),
        "count": lambda: 1.0 / mask.sum(),
    }.get(how, lambda: None)()
    g = dict(zip(p, gradients(total, list(p.values()), start)))
    w.out("loss", reduced(w, each, mask, w.pick("mean", "sum")))
    if how == "behind":
        size = w.const(np.array(count, w.dtype)) if w.pick(True, False) else elements(w, mask)
        g = {name: value / size for name, value in g.items()}
    updated(w, p, g)
    w.refusal = "--batch mask"  # whose size alone is read


@kind
def folded_by_hand(w: Writer) -> None:
    """The backward of a linear layer with its constants multiplied out: 2 / N (p - y), or (softmax - labels) / N."""
    i, o = w.pick(3, 5), w.pick(2, 3)
    x = w.fed("x", [i])
    a = parameter(w, "a", i, o)
    out, n = x @ a, float(w.samples)
    shown = w.pick("mean", "sum")
    if w.pick("squares", "classes") == "squares":
        d = out - w.fed("y", [o])
        each = (d * d).sum(-1) if w.pick(True, False) else (d * d).mean(-1)
        own = 2.0 if each.w.nodes[-1].op_type == "ReduceSum" else 2.0 / o
    else:
        y = w.fed("y", [], ids(o))
        hot = one_hot(w, y, o)
        d, own = w.op("Softmax", out, axis=-1) - hot, 1.0
        each = -(hot * w.op("LogSoftmax", out, axis=-1)).sum(-1)
    back = w.pick("mean", "sum", "ReduceMean", "behind")
    if back == "mean":
        g = x.turn(1, 0) @ (d * (own / n) if w.pick(True, False) else d / (n / own))
    elif back == "sum":
        g = x.turn(1, 0) @ (d * own)
    elif back == "ReduceMean":
        wide = w.op("Unsqueeze", x, w.const(np.array([2]))) * w.op("Unsqueeze", d * own, w.const(np.array([1])))
        g = wide.mean(0)
    else:
        g = (x.turn(1, 0) @ (d * own)) * (1.0 / n)
    w.gradients["a"] = g
    w.out(
        "loss",
        mean_of(w, each, w.op("ReduceSum", x, w.const(np.array([1])), keepdims=0), w.pick(*MEANS))
        if shown == "mean"
        else each.sum(),
    )
    updated(w, {"a": a}, {"a": g})


@kind
def two_terms(w: Writer) -> None:
    """A loss of two terms, each reduced in its own way, on parts of their own or with a part in common."""
    p, each, mask = net(w, w.pick(0, 3))
    v = p["v"] = parameter(w, "v", p["w0"].shape[0], 2)
    x = next(Value(w, name, w.inputs[name]) for name in w.batch if name == "x")
    inner = each.shape[1:]
    e = x @ v - w.fed("z", [*inner, 2])
    if w.pick(False, False, True):
        e = e + (x @ p["w0"]).mean(-1, keep=True)
    other = (e * e).sum(-1)
    how = w.pick("mean", "sum"), w.pick("mean", "sum", "counted")
    loss = reduced(w, each, mask, how[0]) + reduced(w, other, mask, how[1]) * w.pick(1.0, 0.4)
    g = dict(zip(p, gradients(loss, list(p.values()))))
    w.out("loss", loss)
    updated(w, p, g)


@kind
def balanced(w: Writer) -> None:
    """A term that is no mean over samples: a product of means, a root, a square of a mean."""
    i, e = 4, w.pick(3, 4)
    x, y = w.fed("x", [i]), w.fed("y", [e])
    p = {"gate": parameter(w, "gate", i, e), "out": parameter(w, "out", e, e)}
    gates = w.op("Softmax", x @ p["gate"], axis=-1)
    loss = squares(w, gates @ p["out"], y)
    how = w.pick("product", "root", "square", "none")
    if how == "product":
        loss = loss + (gates.mean(0) * w.op("Sigmoid", x @ p["gate"]).mean(0)).sum() * 0.4
    elif how == "root":
        loss = loss.sqrt()
    elif how == "square":
        share = gates.mean(0)
        loss = loss + (share * share).sum() * w.pick(1.0, 0.25)
    g = dict(zip(p, gradients(loss, list(p.values()))))
    w.out("loss", loss)
    updated(w, p, g)


@kind
def sharpness(w: Writer) -> None:
    """The gradient at a point that a first gradient leads to, on the same batch; or at the parameters themselves."""
    i, o = 4, w.pick(2, 3)
    x, y = w.fed("x", [i]), w.fed("y", [o])
    p = {"a": parameter(w, "a", i, 3), "b": parameter(w, "b", 3, o)}

    kind_of = w.pick("Tanh", "Sigmoid", "Relu")

    def loss_of(q: Params) -> Value:
        return squares(w, w.op(kind_of, x @ q["a"]) @ q["b"], y)

    loss = loss_of(p)
    first = dict(zip(p, gradients(loss, list(p.values()))))
    how = w.pick("normed", "plain", "none")
    if how != "none":
        norm = None
        for each in first.values():
            part = (each * each).sum()
            norm = part if norm is None else norm + part
        assert norm is not None
        far = 0.05 / (norm.sqrt() + 1e-12) if how == "normed" else w.const(np.array(0.05, w.dtype))
        moved = {name: p[name] + first[name] * far for name in p}
        first = dict(zip(p, gradients(loss_of(moved), list(moved.values()))))
        w.gradients.clear()
        w.gradients.update(first)
    w.out("loss", loss)
    updated(w, p, first)


@kind
def normalised(w: Writer) -> None:
    """Rows standardised over the batch, under a mean or a sum."""
    i, o = 3, w.pick(2, 3)
    x, y = w.fed("x", [i]), w.fed("y", [o])
    p = {"a": parameter(w, "a", i, 4), "b": parameter(w, "b", 4, o)}
    h = x @ p["a"]
    if w.pick(True, False):
        h = h - h.mean(0, keep=True)
        h = h / ((h * h).mean(0, keep=True) + 0.1).sqrt()
    d = act(w, h) @ p["b"] - y
    each = (d * d).sum(-1)
    loss = reduced(w, each, y.sum(-1), w.pick("mean", "sum"))
    g = dict(zip(p, gradients(loss, list(p.values()))))
    w.out("loss", each.mean() if w.pick(True, False) else loss)
    updated(w, p, g)


@kind
def labels(w: Writer) -> None:
    """Cross-entropy over tokens by the operators of a model, its classes as many as the samples now and then."""
    o = w.pick(3, 4, 5)
    x, y = w.fed("x", [2, 3]), w.fed("y", [2], ids(o))
    p = {"a": parameter(w, "a", 3, 4), "b": parameter(w, "b", 4, o)}
    loss = classes(w, act(w, x @ p["a"]) @ p["b"], y)
    w.out("loss", loss)
    updated(w, p, of_scale(w, loss, p))


@kind
def batch_norm(w: Writer) -> None:
    """Batch normalisation with the backward that exporters write, under a mean, a sum or a quotient by a count."""
    t, c = w.pick(2, 3), w.pick(3, 4)
    x, y, mask = w.fed("x", [t, 3]), w.fed("y", [t, 2]), w.fed("mask", [t], drawn_mask(w))
    p = {"a": parameter(w, "a", 3, c), "gamma": parameter(w, "gamma", c), "beta": parameter(w, "beta", c)}
    p["b"] = parameter(w, "b", c, 2)
    h, count = x @ p["a"], float(w.samples * t)
    mean = h.mean(0, 1, keep=True)
    var = ((h - mean) * (h - mean)).mean(0, 1, keep=True)
    back = 1.0 / (var + 0.1).sqrt()
    out = (h - mean) * back * p["gamma"] + p["beta"]
    d = act(w, out) @ p["b"] - y
    each = (d * d).sum(-1)
    shown = w.pick("same", "mean", "sum")
    if shown != "same":
        w.refusal = "say so: --batch mask"  # the loss that is shown does not read it
    loss = reduced(w, each, mask, w.pick("mean", "sum", "counted"))
    up, g = gradients(loss, [out, p["b"]])
    w.gradients.clear()
    found = {"b": g}
    if w.pick("pytorch", "mean") == "pytorch":  # sums of the gradient times 1 / N
        total, dot = up.sum(0, 1), (up * (h - mean)).sum(0, 1)
        found["beta"], r = total, back.reshape(c)
        found["gamma"] = dot * r
        scale = (dot * (1.0 / count)) * (r * r)
        inner = up - (h - mean) * scale.reshape(1, 1, c) - (total * (1.0 / count)).reshape(1, 1, c)
        down = inner * (r * p["gamma"]).reshape(1, 1, c)
    else:
        unit = (h - mean) * back
        found["beta"], found["gamma"] = up.sum(0, 1), (up * unit).sum(0, 1)
        into = up * p["gamma"]
        down = (into - into.mean(0, 1, keep=True) - unit * (into * unit).mean(0, 1, keep=True)) * back
    found["a"] = x.reshape(-1, 3).turn(1, 0) @ down.reshape(-1, c)
    w.gradients.update(found)
    w.out("loss", loss if shown == "same" else reduced(w, each, mask, shown))
    updated(w, p, found)
