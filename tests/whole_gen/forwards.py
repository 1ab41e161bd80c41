"""Forward parts of steps. Each returns the loss, what its gradient starts from, and the parameters by name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whole_gen.writer import Value, Writer

Params = dict[str, Value]


def parameter(w: Writer, name: str, *shape: int) -> Value:
    return w.state(name, w.draw(name, shape))


def squares(w: Writer, out: Value, y: Value) -> Value:
    d = out - y
    return (d * d).mean() if w.pick(True, False) else (d * d).sum() / float(np.prod(out.shape))


def classes(w: Writer, out: Value, y: Value) -> Value:
    """Mean cross-entropy over all but the last dimension."""
    logs = w.op("LogSoftmax", out, axis=-1)
    how = w.pick("gather", "onehot")
    if how == "gather":
        picked = w.op("GatherElements", logs, w.op("Unsqueeze", y, w.const(np.array([-1]))), axis=len(y.shape))
        return -picked.mean()
    hot = one_hot(w, y, out.shape[-1])
    return -((hot * logs).sum(-1).mean())


def one_hot(w: Writer, y: Value, size: int) -> Value:
    """With a last dimension of ``size``; ONNX Runtime has no OneHot of doubles."""
    if w.pick(True, False):
        pair = w.const(np.array([0, 1], np.float32))
        return w.op("OneHot", y, w.const(np.array(size)), pair).to(w.dtype)
    return w.op("Equal", w.op("Unsqueeze", y, w.const(np.array([-1]))), w.const(np.arange(size))).to(w.dtype)


def act(w: Writer, x: Value) -> Value:
    return w.op(w.pick("Tanh", "Relu", "Sigmoid"), x)


def ids(size: int) -> Callable[..., np.ndarray]:
    return lambda generator, shape: generator.integers(0, size, shape)


def mlp(w: Writer) -> tuple[Value, Params]:
    i, h, o = w.pick(3, 5, 1), w.pick(7, 4, 3, 1), w.pick(3, 2, 1)
    x, y = w.fed("x", [i]), w.fed("y", [o])
    p = {"w0": parameter(w, "w0", i, h), "b0": parameter(w, "b0", h), "w1": parameter(w, "w1", h, o)}
    z = act(w, x @ p["w0"] + p["b0"]) @ p["w1"]
    extra = w.pick("none", "gain0", "gain1", "row", "negative")
    if extra != "none":
        shape = {"gain0": [], "gain1": [1], "row": [1, o], "negative": [1, 1]}[extra]
        p["gain"] = parameter(w, "gain", *shape)
        z = z * p["gain"] if w.pick(True, False) else p["gain"] + z
    return squares(w, z, y), p


def turned(w: Writer) -> tuple[Value, Params]:
    """A weight used as it is and transposed, and once more as a row."""
    n, h = w.pick(5, 3, 4), w.pick(3, 4, 2)
    x = w.fed("x", [n])
    p = {"w": parameter(w, "w", n, h), "b": parameter(w, "b", h), "c": parameter(w, "c", n)}
    z = act(w, x @ p["w"] + p["b"]) @ p["w"].turn(1, 0) + p["c"]
    loss = squares(w, z, x)
    if w.pick(True, False):
        row = p["w"].reshape(-1)
        loss = loss + (row * row).sum() * 0.01
    return loss, p


def tied(w: Writer) -> tuple[Value, Params]:
    rows, width, length = w.pick(7, 5, 11), w.pick(3, 4), w.pick(2, 3)
    x, y = w.fed("x", [length], ids(rows)), w.fed("y", [length], ids(rows))
    p = {"e": parameter(w, "e", rows, width), "w": parameter(w, "w", width, width)}
    z = act(w, w.op("Gather", p["e"], x, axis=0) @ p["w"]) @ p["e"].turn(1, 0)
    return classes(w, z, y), p


def bag(w: Writer) -> tuple[Value, Params]:
    """A mean of looked-up rows, weighted by a vector of positions."""
    rows, width, length = w.pick(7, 5), w.pick(3, 1), w.pick(2, 3)
    x, y = w.fed("x", [length], ids(rows)), w.fed("y", [width])
    p = {"e": parameter(w, "e", rows, width), "pos": parameter(w, "pos", length, 1)}
    z = (w.op("Gather", p["e"], x, axis=0) * p["pos"]).mean(1)
    return squares(w, z, y), p


def attention(w: Writer) -> tuple[Value, Params]:
    """Two heads of queries on one head of keys and values; one packed weight."""
    t, d = w.pick(2, 3), w.pick(4, 6)
    x, y = w.fed("x", [t, d]), w.fed("y", [t, d])
    h = d // 2
    p = {"qkv": parameter(w, "qkv", d, d + 2 * h), "o": parameter(w, "o", d, d)}
    n = x.shape[0]
    if w.pick(True, False):
        q, k, v = w.op("Split", x @ p["qkv"], w.const(np.array([d, h, h])), out=3, axis=-1)
    else:
        parts = w.op("Split", p["qkv"], w.const(np.array([d, h, h])), out=3, axis=1)
        q, k, v = (x @ part for part in parts)
    q = q.reshape(n, t, 2, h).turn(0, 2, 1, 3)
    k = w.op("Expand", k.reshape(n, 1, t, h), w.const(np.array([n, 2, t, h])))
    v = w.op("Expand", v.reshape(n, 1, t, h), w.const(np.array([n, 2, t, h])))
    s = w.op("Softmax", q @ k.turn(0, 1, 3, 2) * float(h) ** -0.5, axis=-1)
    z = (s @ v).turn(0, 2, 1, 3).reshape(n, t, d) @ p["o"]
    return squares(w, x + z, y), p


def experts(w: Writer) -> tuple[Value, Params]:
    """The best of three experts, by its gate."""
    d, e = w.pick(3, 4), 3
    x, y = w.fed("x", [d]), w.fed("y", [d])
    p = {"gate": parameter(w, "gate", d, e), "up": parameter(w, "up", e, d, d)}
    gates = w.op("Softmax", x @ p["gate"], axis=-1)
    top = w.op("ReduceMax", gates, w.const(np.array([-1])), keepdims=1)
    mask = w.op("Equal", gates, top)
    zero = w.like(0.0, gates)
    kept = w.op("Where", mask, gates, zero)  # [n, e]
    each = w.op("Unsqueeze", x, w.const(np.array([0]))) @ p["up"]  # [e, n, d]
    z = (act(w, each) * w.op("Unsqueeze", kept.turn(1, 0), w.const(np.array([-1])))).sum(0)
    loss = squares(w, z, y)
    return loss, p


def unrolled(w: Writer) -> tuple[Value, Params]:
    """A recurrent net over three steps of time."""
    t, d, h = 3, w.pick(2, 3), w.pick(3, 4)
    x, y = w.fed("x", [t, d]), w.fed("y", [h])
    p = {"wx": parameter(w, "wx", d, h), "wh": parameter(w, "wh", h, h), "b": parameter(w, "b", h)}
    state = None
    for at in range(t):
        z = w.op("Gather", x, w.const(np.array(at)), axis=1) @ p["wx"] + p["b"]
        state = w.op("Tanh", z if state is None else z + state @ p["wh"])
    assert state is not None
    return squares(w, state, y), p


def adapters(w: Writer) -> tuple[Value, Params]:
    """A frozen weight with a trained pair of low rank, and a trained scalar."""
    d, r = w.pick(4, 5), w.pick(1, 2)
    x, y = w.fed("x", [d]), w.fed("y", [d])
    frozen = w.const(w.draw("frozen", (d, d)), w.pick("stored", "node"))
    p = {"a": parameter(w, "a", d, r), "b": parameter(w, "b", r, d), "s": parameter(w, "s")}
    how = w.pick("weight", "path")
    z = x @ (frozen + p["a"] @ p["b"] * p["s"]) if how == "weight" else x @ frozen + (x @ p["a"]) @ p["b"] * p["s"]
    return squares(w, z, y), p


def normed(w: Writer) -> tuple[Value, Params]:
    """Layer norm by hand, RMS norm, and a skip connection."""
    d = w.pick(4, 5, 3)
    x, y = w.fed("x", [d]), w.fed("y", [d])
    p = {"w": parameter(w, "w", d, d), "g": parameter(w, "g", d), "b": parameter(w, "b", d)}
    z = x @ p["w"]
    if w.pick(True, False):
        z = z - z.mean(-1, keep=True)
    z = z / ((z * z).mean(-1, keep=True) + 0.1).sqrt() * p["g"] + p["b"]
    return squares(w, z + x, y), p


def pruned(w: Writer) -> tuple[Value, Params]:
    """Weights behind a mask of booleans; another weight normalised before use."""
    i, o = w.pick(4, 5), w.pick(3, 4)
    x, y = w.fed("x", [i]), w.fed("y", [o])
    p = {"w": parameter(w, "w", i, o), "v": parameter(w, "v", i, o)}
    mask = w.const(w.draw("mask", (i, o)) > 0, w.pick("stored", "node"))
    kept = w.op("Where", mask, p["w"], w.const(np.array(0.0, w.dtype)))
    v = p["v"] / ((p["v"] * p["v"]).sum(0, keep=True) + 0.1).sqrt()
    return squares(w, act(w, x @ kept) + x @ v, y), p


FORWARDS = [mlp, turned, tied, bag, attention, experts, unrolled, adapters, normed, pruned]
