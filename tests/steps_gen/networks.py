"""Small networks of many kinds; each is a function that writes its forward and names its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from steps_gen.tape import Tape

Batch = dict[str, tuple[tuple[int, ...], str, int]]
"""Input -> shape, dtype, and the number of things it may point at."""


@dataclass
class Net:
    """A forward as written: parameters by name, inputs of the batch, and statistics (state -> new value)."""

    tape: Tape
    compute: str = "float32"
    """What the forward runs in."""
    stored: str = "float32"
    """What parameters are held in."""
    activation: str = "Tanh"
    mask: str = "none"
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    batch: Batch = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)

    def param(self, shape: tuple[int, ...], around: float = 0.0) -> str:
        """A new parameter as the forward reads it: cast, and pruned."""
        return self.read(self.fresh(shape, around))

    def fresh(self, shape: tuple[int, ...], around: float = 0.0) -> str:
        name = f"p{len(self.params)}"
        value = around + 0.4 * self.tape.generator.standard_normal(shape)
        self.tape.state(name, np.asarray(value, self.stored))
        self.params[name] = shape
        return name

    def read(self, name: str) -> str:
        used = self.tape.cast(name, self.compute)
        if self.mask != "none" and len(self.params[name]) == 2:
            if name not in self.masks:
                drawn = (self.tape.generator.random(self.params[name]) < 0.7).astype(np.float32)
                drawn.flat[0] = 1
                if self.mask == "input":
                    self.masks[name] = self.tape.input(f"{name}.mask", drawn.shape, value=drawn)
                else:
                    self.masks[name] = self.tape.const(drawn)
            if self.mask in ("forward", "input"):
                used = self.tape.op("Mul", used, self.tape.cast(self.masks[name], self.compute))
        return used

    def feed(self, name: str, shape: tuple[int, ...], dtype: str = "float32", bound: int = 0) -> str:
        value: Any = None if dtype == "float32" else self.tape.generator.integers(0, bound, shape)
        self.tape.input(name, shape, dtype, value)
        self.batch[name] = (shape, dtype, bound)
        return self.tape.cast(name, self.compute) if dtype == "float32" else name

    def act(self, name: str) -> str:
        made: str = self.tape.op(self.activation, name)
        return made

    def dense(self, h: str, width: int, bias: bool = True) -> str:
        t = self.tape
        z = t.op("MatMul", h, self.param((t.shape(h)[1], width)))
        return t.op("Add", z, self.param((width,))) if bias else z


Network = Callable[[Net, tuple[int, ...], int, bool], str]
"""Net, widths, batch, bias -> the prediction, of shape (batch, widths[-1])."""


def mlp(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    h = net.feed("x", (batch, widths[0]))
    for place, width in enumerate(widths[1:]):
        h = net.dense(h, width, bias)
        h = net.act(h) if place < len(widths) - 2 else h
    return h


def tied(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """One square weight, read by three layers."""
    width = widths[0]
    h = net.feed("x", (batch, width))
    weight = net.param((width, width))
    for _ in range(2):
        h = net.act(net.tape.op("MatMul", h, weight))
    h = net.tape.op("MatMul", h, net.tape.op("Transpose", weight, perm=[1, 0]))
    return net.dense(h, widths[-1], bias)


def elementwise(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """Scales and offsets that no product of matrices reads."""
    t = net.tape
    h = net.feed("x", (batch, widths[-1]))
    for _ in range(len(widths) - 1):
        h = t.op("Mul", h, net.param((widths[-1],), 1.0))
        h = net.act(t.op("Add", h, net.param((1, widths[-1]))) if bias else h)
    return h


def embedding(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    t = net.tape
    ids = net.feed("ids", (batch,), "int64", 5)
    h = t.op("Gather", net.param((5, widths[0])), ids)
    return net.dense(net.act(h), widths[-1], bias)


def embedding_tied(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """A table that the output reads too."""
    t = net.tape
    ids = net.feed("ids", (batch,), "int64", widths[-1])
    table = net.param((widths[-1], widths[0]))
    h = net.act(t.op("Gather", table, ids))
    h = net.dense(h, widths[0], bias)
    return t.op("MatMul", h, t.op("Transpose", table, perm=[1, 0]))


def _normalised(net: Net, h: str, axis: int) -> str:
    t = net.tape
    axes = t.const([axis], "int64")
    centred = t.op("Sub", h, t.op("ReduceMean", h, axes, keepdims=1))
    spread = t.op("ReduceMean", t.op("Mul", centred, centred), axes, keepdims=1)
    return t.op("Div", centred, t.op("Sqrt", t.op("Add", spread, t.like(1e-2, h))))


def layer_norm(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    t = net.tape
    h = net.dense(net.feed("x", (batch, widths[0])), widths[1], bias)
    h = _normalised(net, h, 1)
    h = t.op("Add", t.op("Mul", h, net.param((widths[1],), 1.0)), net.param((widths[1],)))
    return net.dense(net.act(h), widths[-1], bias)


def batch_norm(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """The bias in front of it has no gradient but rounding; running statistics follow the batch."""
    t = net.tape
    h = net.dense(net.feed("x", (batch, widths[0])), widths[1], bias)
    mean = t.op("ReduceMean", h, t.const([0], "int64"), keepdims=0)
    running = t.state("running_mean", np.zeros(widths[1], np.float32))
    kept, fresh = t.op("Mul", running, t.const(0.9)), t.op("Mul", t.cast(mean, "float32"), t.const(0.1))
    net.statistics[running] = t.op("Add", kept, fresh)
    h = _normalised(net, h, 0)
    h = t.op("Add", t.op("Mul", h, net.param((widths[1],), 1.0)), net.param((widths[1],)))
    return net.dense(net.act(h), widths[-1], bias)


def weight_norm(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    t = net.tape
    h = net.feed("x", (batch, widths[0]))
    direction, size = net.param((widths[0], widths[1])), net.param((1, widths[1]), 1.0)
    length = t.op("ReduceSum", t.op("Mul", direction, direction), t.const([0], "int64"), keepdims=1)
    length = t.op("Sqrt", t.op("Add", length, t.like(1e-3, length)))
    h = t.op("MatMul", h, t.op("Mul", direction, t.op("Div", size, length)))
    return net.dense(net.act(h), widths[-1], bias)


def reparametrised(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """Weights behind a softplus, scales behind an exponential."""
    t = net.tape
    h = net.feed("x", (batch, widths[0]))
    h = t.op("MatMul", h, t.op("Softplus", net.param((widths[0], widths[1]))))
    h = t.op("Mul", net.act(h), t.op("Exp", net.param((widths[1],))))
    return net.dense(h, widths[-1], bias)


def singles(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """Parameters of one element, of rank 0, 1 and 2, beside a wider one."""
    t = net.tape
    h = net.feed("x", (batch, widths[0]))
    h = t.op("Mul", h, net.param((), 1.0))
    h = net.act(t.op("Add", h, net.param((1,))))
    h = net.dense(h, widths[-1], bias)
    return t.op("Mul", h, net.param((1, 1), 1.0))


def all_scalar(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """y = a·tanh(b·x + c): every parameter has rank 0."""
    t = net.tape
    h = net.feed("x", (batch, widths[-1]))
    h = t.op("Mul", h, net.param((), 1.0))
    h = net.act(t.op("Add", h, net.param(())) if bias else h)
    return t.op("Mul", h, net.param((), 1.0))


def attention(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """One head over the batch's rows as tokens; the key's bias has no gradient but rounding."""
    t = net.tape
    x = net.feed("x", (batch, widths[0]))
    query, key, value = (net.dense(x, widths[1], bias) for _ in range(3))
    scores = t.op("Softmax", t.op("MatMul", query, t.op("Transpose", key, perm=[1, 0])), axis=-1)
    return net.dense(t.op("MatMul", scores, value), widths[-1], bias)


def convolution(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    t, width = net.tape, widths[1]
    h = t.op("Conv", net.feed("x", (batch, 2, 3, 3)), net.param((width, 2, 2, 2)))
    h = net.act(t.op("Add", h, net.param((width, 1, 1))) if bias else h)
    return net.dense(t.op("Reshape", h, t.const([batch, -1], "int64")), widths[-1], bias)


def flat_buffer(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """All weights are ranges of one row."""
    t = net.tape
    shapes = [(widths[0], widths[1]), (widths[1],), (widths[1], widths[-1])]
    sizes = [int(np.prod(shape)) for shape in shapes]
    row, start, parts = net.param((sum(sizes),)), 0, []
    for shape, size in zip(shapes, sizes):
        part = t.op("Slice", row, t.const([start], "int64"), t.const([start + size], "int64"), t.const([0], "int64"))
        parts.append(t.op("Reshape", part, t.const(shape, "int64")))
        start += size
    h = t.op("Add", t.op("MatMul", net.feed("x", (batch, widths[0])), parts[0]), parts[1])
    return t.op("MatMul", net.act(h), parts[2])


def twins(net: Net, widths: tuple[int, ...], batch: int, bias: bool) -> str:
    """Two parameters of one gradient, and one that is as large as the batch."""
    t = net.tape
    h = net.dense(net.feed("x", (batch, widths[0])), widths[1], bias)
    for _ in range(2):
        h = t.op("Add", h, net.param((batch, widths[1])))
    return net.dense(net.act(h), widths[-1], bias)


NETWORKS: dict[str, Network] = {
    "mlp": mlp, "tied": tied, "elementwise": elementwise, "embedding": embedding, "embedding-tied": embedding_tied,
    "layer-norm": layer_norm, "batch-norm": batch_norm, "weight-norm": weight_norm, "reparametrised": reparametrised,
    "singles": singles, "all-scalar": all_scalar, "attention": attention, "convolution": convolution,
    "flat-buffer": flat_buffer, "twins": twins,
}  # fmt: skip


def losses(net: Net, kind: str, prediction: str) -> tuple[str, str, float]:
    """The loss, the value whose adjoint starts the backward, and what that adjoint is times (it is ready-made)."""
    t = net.tape
    batch, width = t.shape(prediction)
    if kind == "cross-entropy":
        labels = net.feed("labels", (batch,), "int64", width)
        ends = t.const([0.0, 1.0])
        hot = t.cast(t.op("OneHot", labels, t.const(width, "int64"), ends), net.compute)
        chance = t.op("Softmax", prediction, axis=-1)
        picked = t.op("ReduceSum", t.op("Mul", hot, t.op("Log", chance)), t.const([-1], "int64"), keepdims=0)
        loss = t.op("Neg", t.op("ReduceMean", picked, keepdims=0))
        rest, factor = t.op("Sub", chance, hot), 1.0 / batch
    else:
        wanted = net.feed("y", (batch, width))
        difference = t.op("Sub", prediction, wanted)
        square = t.op("Mul", difference, difference)
        loss = t.op("ReduceSum" if kind == "sum" else "ReduceMean", square, keepdims=0)
        rest, factor = difference, 2.0 if kind == "sum" else 2.0 / (batch * width)
    return loss, rest, factor
