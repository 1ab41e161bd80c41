"""Losses of a stream, with masks, counts of the batch, and classes that do not count."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mesh_gen.streams import Stream

Loss = Callable[[Stream, str], tuple[str, str, str]]
"""Stream, value -> the loss, the value where the backward starts, what flows back to it."""


def squares(s: Stream, h: str) -> tuple[str, str, str]:
    t, shape = s.t, s.t.shape(h)
    off = t.op("Sub", h, s.feed("y", shape))
    size = 1.0
    for each in shape:
        size *= each
    return t.op("ReduceMean", t.op("Mul", off, off), keepdims=0), h, t.op("Mul", off, t.const(2.0 / size))


def pooled(s: Stream, h: str) -> tuple[str, str, str]:
    """One prediction for a sample: the mean of its tokens, their sum, or its first or last token."""
    t, (b, n, d) = s.t, s.t.shape(h)
    kind = s.r.choice(["mean", "sum", "first", "last"])
    if kind in ("mean", "sum"):
        one = t.op("ReduceMean" if kind == "mean" else "ReduceSum", h, s.ints(1), keepdims=0)
    else:
        at = 0 if kind == "first" else n - 1
        one = t.op("Reshape", s.cut(h, at, at + 1, 1), s.ints(b, d))
    return squares(s, s.dense(one, s.r.choice([2, 3, 4])))


def masked(s: Stream, h: str) -> tuple[str, str, str]:
    """Squares of the tokens that count, over how many do."""
    t, shape = s.t, s.t.shape(h)
    mask = s.feed("mask", (*shape[:2], 1)[: s.r.choice([3, 3, 2])])
    seen = t.op("Mul", mask, mask)
    count = t.op("Add", t.op("ReduceSum", seen, keepdims=0), t.const(1.0))
    if len(t.shape(seen)) == 2:
        seen = t.op("Unsqueeze", seen, s.ints(2))
    off = t.op("Sub", h, s.feed("y", shape))
    loss = t.op("Div", t.op("ReduceSum", t.op("Mul", t.op("Mul", off, off), seen), keepdims=0), count)
    return loss, h, t.op("Div", t.op("Mul", t.op("Mul", off, seen), t.const(2.0)), count)


def classes(s: Stream, h: str) -> tuple[str, str, str]:
    """Cross-entropy by token, written out; class 0 may not count, and the rest is a mean over what does."""
    t, (b, n, _) = s.t, s.t.shape(h)
    width = s.r.choice([2, 3, 4, 5, 6])
    logits = s.dense(h, width, s.r.random() < 0.5)
    labels = s.feed("labels", (b, n), "int64", width)
    hot = t.op("OneHot", labels, t.const(width, "int64"), t.const([0.0, 1.0]))
    shifted = t.op("Softmax", logits, axis=-1)
    picked = t.op("ReduceSum", t.op("Mul", hot, t.op("Log", shifted)), s.ints(-1), keepdims=0)
    if s.r.random() < 0.6:
        valid = t.op("Cast", t.op("Not", t.op("Equal", labels, t.const(0, "int64"))), to=1)
        count = t.op("Max", t.op("ReduceSum", valid, keepdims=0), t.const(1.0))
        loss = t.op("Neg", t.op("Div", t.op("ReduceSum", t.op("Mul", picked, valid), keepdims=0), count))
        weight = t.op("Unsqueeze", t.op("Div", valid, count), s.ints(2))
    else:
        loss = t.op("Neg", t.op("ReduceMean", picked, keepdims=0))
        weight = t.const(1.0 / (b * n))
    return loss, logits, t.op("Mul", t.op("Sub", shifted, hot), weight)


def weighted(s: Stream, h: str) -> tuple[str, str, str]:
    """A weight for every sample, as an input of one dimension, or for every token, as a constant."""
    t, shape = s.t, s.t.shape(h)
    off = t.op("Sub", h, s.feed("y", shape))
    if s.r.random() < 0.5:
        weight = t.op("Reshape", s.feed("weight", (shape[0],)), s.ints(shape[0], 1, 1))
    else:
        weight = t.const(s.t.generator.uniform(0.5, 1.5, (shape[1], 1)))
    share = 1.0 / (shape[0] * shape[1])
    each = t.op("Mul", t.op("Mul", off, off), t.op("Mul", weight, t.const(share)))
    return t.op("ReduceSum", each, keepdims=0), h, t.op("Mul", t.op("Mul", off, weight), t.const(2.0 * share))


def next_tokens(s: Stream, h: str) -> tuple[str, str, str]:
    """Cross-entropy of all tokens but the last with the token behind each, as PyTorch's step has it."""
    t, (b, n, _) = s.t, s.t.shape(h)
    width = s.r.choice([4, 5, 6, 8])
    logits = s.dense(h, width)
    labels = t.op("Reshape", s.cut(s.feed("labels", (b, n), "int64", width), 1, n, 1), s.ints(-1, 1))
    logs = t.op("LogSoftmax", t.op("Reshape", s.cut(logits, 0, n - 1, 1), s.ints(-1, width)), axis=-1)
    share = 1.0 / (b * (n - 1))
    loss = t.op("Neg", t.op("ReduceMean", t.op("GatherElements", logs, labels, axis=1), keepdims=0))
    zeros = t.op("ConstantOfShape", t.const([b * (n - 1), width], "int64"))
    hot = t.op("ScatterElements", zeros, labels, t.op("Expand", t.const(-share), s.ints(b * (n - 1), 1)), axis=1)
    sums = t.op("Mul", t.op("Exp", logs), t.op("ReduceSum", hot, s.ints(1), keepdims=1))
    flows = t.op("Reshape", t.op("Sub", hot, sums), s.ints(b, n - 1, width))
    return loss, logits, t.op("Concat", flows, t.const(np.zeros((b, 1, width))), axis=1)


def other_rows(s: Stream, h: str) -> tuple[str, str, str]:
    """Squares of a part of the elements in other rows, as attention with relative places has it."""
    b, n, d = s.t.shape(h)
    return squares(s, s.cut(s.t.op("Reshape", h, s.ints(b, d, n)), 1, d, 1))


LOSSES: dict[str, Loss] = {
    "squares": squares, "pooled": pooled, "masked": masked, "classes": classes, "weighted": weighted,
}  # fmt: skip
"""What recipes are drawn from."""
ALL = LOSSES | {"next tokens": next_tokens, "other rows": other_rows}
