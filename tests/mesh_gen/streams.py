"""Blocks of a stream of tokens, drawn one after the other: samples by tokens by features, sizes that coincide."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from steps_gen.tape import Tape

Batch = dict[str, tuple[tuple[int, ...], str, int]]


@dataclass
class Stream:
    """A forward as written so far; every block takes a value of (samples, tokens, features) and makes one."""

    t: Tape
    r: random.Random
    heads: int
    params: dict[str, tuple[int, ...]] = field(default_factory=dict)
    batch: Batch = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)
    """State -> its new value, which follows the batch and no gradient."""

    def param(self, *shape: int, around: float = 0.0) -> str:
        name = f"p{len(self.params)}"
        value = around + 0.5 * self.t.generator.standard_normal(shape)
        self.t.state(name, value.astype(np.float32))
        self.params[name] = shape
        return name

    def feed(self, name: str, shape: tuple[int, ...], dtype: str = "float32", bound: int = 0) -> str:
        value: Any = None if dtype == "float32" else self.t.generator.integers(0, bound, shape)
        self.batch[name] = (shape, dtype, bound)
        return self.t.input(name, shape, dtype, value)

    def dense(self, h: str, width: int, bias: bool = True) -> str:
        z = self.t.op("MatMul", h, self.param(self.t.shape(h)[-1], width))
        return self.t.op("Add", z, self.param(width)) if bias else z

    def ints(self, *values: int) -> str:
        return self.t.const(values, "int64")

    def cut(self, h: str, start: int, stop: int, axis: int) -> str:
        made: str = self.t.op("Slice", h, self.ints(start), self.ints(stop), self.ints(axis))
        return made

    def mean(self, h: str, *axes: int) -> str:
        made: str = self.t.op("ReduceMean", h, self.ints(*axes), keepdims=1)
        return made


Block = Callable[[Stream, str], str]


def dense(s: Stream, h: str) -> str:
    return s.t.op("Tanh", s.dense(h, s.t.shape(h)[-1], s.r.random() < 0.5))


def mlp(s: Stream, h: str) -> str:
    wide = s.dense(h, s.r.choice([2, 3, 4, 6, 8]))
    if s.r.random() < 0.3:
        gate = s.t.op("Sigmoid", s.dense(h, s.t.shape(wide)[-1], False))
        wide = s.t.op("Mul", wide, gate)
    return s.t.op("Add", h, s.dense(s.t.op("Tanh", wide), s.t.shape(h)[-1]))


def attention(s: Stream, h: str) -> str:
    """Heads as a dimension, or folded into samples; fused or separate; sometimes causal."""
    t, (b, n, d) = s.t, s.t.shape(h)
    heads, each = s.heads, s.r.choice([1, 2, 3])
    if s.r.random() < 0.4:
        fused = s.dense(h, 3 * heads * each)
        parts = [s.cut(fused, k * heads * each, (k + 1) * heads * each, 2) for k in range(3)]
    else:
        parts = [s.dense(h, heads * each, s.r.random() < 0.5) for _ in range(3)]
    folded = s.r.random() < 0.3

    def split(name: str) -> str:
        four = t.op("Transpose", t.op("Reshape", name, s.ints(b, n, heads, each)), perm=[0, 2, 1, 3])
        return t.op("Reshape", four, s.ints(b * heads, n, each)) if folded else four

    q, k, v = map(split, parts)
    turn = [0, 2, 1] if folded else [0, 1, 3, 2]
    scores = t.op("Mul", t.op("MatMul", q, t.op("Transpose", k, perm=turn)), t.const(0.7))
    if s.r.random() < 0.5:
        scores = t.op("Add", scores, t.const(np.triu(np.full((n, n), -1e4), 1)))
    mixed = t.op("MatMul", t.op("Softmax", scores, axis=-1), v)
    if folded:
        mixed = t.op("Reshape", mixed, s.ints(b, heads, n, each))
    joined = t.op("Reshape", t.op("Transpose", mixed, perm=[0, 2, 1, 3]), s.ints(b, n, heads * each))
    return t.op("Add", h, s.dense(joined, d))


def norm(s: Stream, h: str) -> str:
    t, d = s.t, s.t.shape(h)[-1]
    centred = t.op("Sub", h, s.mean(h, -1)) if s.r.random() < 0.6 else h
    spread = t.op("Sqrt", t.op("Add", s.mean(t.op("Mul", centred, centred), -1), t.const(0.1)))
    return t.op("Add", t.op("Mul", t.op("Div", centred, spread), s.param(d, around=1.0)), s.param(d))


def fold(s: Stream, h: str) -> str:
    """Samples and tokens as one dimension."""
    t, (b, n, d) = s.t, s.t.shape(h)
    flat = t.op("Reshape", h, s.ints(-1, d))
    return t.op("Reshape", t.op("Tanh", s.dense(flat, d)), s.ints(b, n, d))


def merge_tokens(s: Stream, h: str) -> str:
    """Neighbouring tokens side by side, or features as tokens."""
    t, (b, n, d) = s.t, s.t.shape(h)
    if n % 2 == 0 and s.r.random() < 0.6:
        pairs = t.op("Reshape", h, s.ints(b, n // 2, 2 * d))
        return t.op("Reshape", t.op("Tanh", s.dense(pairs, 2 * d)), s.ints(b, n, d))
    odd = t.op("Reshape", h, s.ints(*s.r.choice([(n, b, d), (b, d, n), (d, n, b), (n * b * d, 1, 1), (1, b * d, n)])))
    odd = t.op("Mul", t.op("Tanh", odd), s.param(t.shape(odd)[-1], around=1.0))
    return t.op("Reshape", odd, s.ints(b, n, d))


def class_token(s: Stream, h: str) -> str:
    """A learned token in front, or behind."""
    t, (b, _, d) = s.t, s.t.shape(h)
    token = t.op("Expand", s.param(1, 1, d), s.ints(b, 1, d))
    pair = [token, h] if s.r.random() < 0.5 else [h, token]
    return t.op("Concat", *pair, axis=1)


def drop_token(s: Stream, h: str) -> str:
    n = s.t.shape(h)[1]
    if n < 2:
        return h
    return s.cut(h, 1, n, 1) if s.r.random() < 0.5 else s.cut(h, 0, n - 1, 1)


def running(s: Stream, h: str) -> str:
    made = s.t.op("CumSum", h, s.t.const(s.r.choice([1, 1, -2, 2, 0]), "int64"), reverse=s.r.randint(0, 1))
    return s.t.op("Tanh", s.t.op("Mul", made, s.t.const(0.5)))


def pooled(s: Stream, h: str) -> str:
    """Less its mean over tokens, samples, or both."""
    over = s.r.choice([(1,), (0,), (0, 1), (1, 2), (0, 1, 2)])
    about = s.mean(h, *over)
    if s.r.random() < 0.5 and over == (1,):
        about = s.dense(about, s.t.shape(h)[-1])
    return s.t.op(s.r.choice(["Sub", "Add", "Mul"]), h, about)


def mixed_tokens(s: Stream, h: str) -> str:
    """A product over tokens, as of a mixer; or with a weight in front."""
    t, (_, n, _) = s.t, s.t.shape(h)
    if s.r.random() < 0.5:
        return t.op("Add", h, t.op("MatMul", s.param(n, n), h))
    turned = t.op("Transpose", h, perm=[0, 2, 1])
    return t.op("Add", h, t.op("Transpose", t.op("Tanh", s.dense(turned, n)), perm=[0, 2, 1]))


def rolled(s: Stream, h: str) -> str:
    n = s.t.shape(h)[1]
    at = max(1, n // 2)
    if n < 2:
        return h
    return s.t.op("Add", h, s.t.op("Concat", s.cut(h, at, n, 1), s.cut(h, 0, at, 1), axis=1))


def chosen(s: Stream, h: str) -> str:
    """Tokens in another order, by positions that may be negative; and as many again."""
    n = s.t.shape(h)[1]
    places = [s.r.randint(-n, n - 1) for _ in range(n)]
    return s.t.op("Add", h, s.t.op("Gather", h, s.ints(*places), axis=1))


def positions(s: Stream, h: str) -> str:
    t, (b, n, d) = s.t, s.t.shape(h)
    shape = s.r.choice([(n, d), (1, n, d), (n, 1), (b, n, d), (b, 1, 1), (1,), ()])
    return t.op(s.r.choice(["Add", "Mul"]), h, s.param(*shape, around=1.0))


def soft(s: Stream, h: str) -> str:
    return s.t.op("Mul", h, s.t.op("Softmax", h, axis=s.r.choice([1, 2, 0, -1])))


def turned(s: Stream, h: str) -> str:
    """Tokens before samples, for a while."""
    made = s.t.op("Transpose", h, perm=[1, 0, 2])
    made = s.t.op("Tanh", s.dense(made, s.t.shape(h)[-1]))
    if s.r.random() < 0.5:
        made = s.t.op("Mul", made, s.param(s.t.shape(made)[0], 1, 1, around=1.0))
    return s.t.op("Transpose", made, perm=[1, 0, 2])


def gram(s: Stream, h: str) -> str:
    """Tokens against tokens without a softmax, or features against features."""
    t = s.t
    other = t.op("Transpose", h, perm=[0, 2, 1])
    if s.r.random() < 0.5:
        return t.op("Tanh", t.op("MatMul", t.op("MatMul", h, other), h))
    return t.op("Tanh", t.op("MatMul", h, t.op("MatMul", other, h)))


def unchanged(s: Stream, h: str) -> str:
    if s.r.random() < 0.5:
        return s.t.op("Identity", h)
    return s.t.op("Reshape", h, s.ints(*s.t.shape(h)))


def experts(s: Stream, h: str) -> str:
    """Every token through every expert, weighed by a router: a product with as many matrices as experts."""
    t, (b, n, d) = s.t, s.t.shape(h)
    count, wide = s.r.choice([2, 4, 4, b]), s.r.choice([2, 3, 4])
    gates = t.op("Softmax", s.dense(t.op("Reshape", h, s.ints(b * n, d)), count, False), axis=-1)
    flat = t.op("Reshape", h, s.ints(1, b * n, d))
    inner = t.op("Tanh", t.op("MatMul", flat, s.param(count, d, wide)))
    if s.r.random() < 0.5:
        inner = t.op("Add", inner, s.param(count, 1, wide))
    made = t.op("MatMul", inner, s.param(count, wide, d))
    weight = t.op("Unsqueeze", t.op("Transpose", gates, perm=[1, 0]), s.ints(2))
    total = t.op("ReduceSum", t.op("Mul", made, weight), s.ints(0), keepdims=0)
    return t.op("Add", h, t.op("Reshape", total, s.ints(b, n, d)))


def batch_norm(s: Stream, h: str) -> str:
    """Over samples and tokens, with a running mean."""
    t, d = s.t, s.t.shape(h)[-1]
    mean = s.mean(h, 0, 1)
    running = t.state(f"running{len(s.statistics)}", np.zeros((1, 1, d), np.float32))
    s.statistics[running] = t.op("Add", t.op("Mul", running, t.const(0.9)), t.op("Mul", mean, t.const(0.1)))
    centred = t.op("Sub", h, mean)
    spread = t.op("Sqrt", t.op("Add", s.mean(t.op("Mul", centred, centred), 0, 1), t.const(0.1)))
    return t.op("Mul", t.op("Div", centred, spread), s.param(d, around=1.0))


def shared(s: Stream, h: str) -> str:
    """A weight that another block has, as it is or transposed."""
    d = s.t.shape(h)[-1]
    same = [name for name, shape in s.params.items() if len(shape) == 2 and d in shape]
    if not same:
        return dense(s, h)
    name = s.r.choice(same)
    turned = s.params[name][0] != d or (s.params[name][1] == d and s.r.random() < 0.5)
    weight = s.t.op("Transpose", name, perm=[1, 0]) if turned else name
    made = s.t.op("Tanh", s.t.op("MatMul", h, weight))
    return made if s.t.shape(made)[-1] == d else s.dense(made, d)


def padding(s: Stream, h: str) -> str:
    """Tokens that do not count are zero, and the rest is over how many a sample has."""
    t, (b, n, _) = s.t, s.t.shape(h)
    if "ids" not in s.batch or s.batch["ids"][0] != (b, n):
        return h
    seen = t.op("Unsqueeze", t.op("Cast", t.op("Greater", "ids", t.const(0, "int64")), to=1), s.ints(2))
    count = t.op("Max", t.op("ReduceSum", seen, s.ints(1), keepdims=1), t.const(1.0))
    kept = t.op("Mul", h, seen)
    if s.r.random() < 0.5:
        return t.op("Sub", kept, t.op("Div", t.op("ReduceSum", kept, s.ints(1), keepdims=1), count))
    return t.op("Div", kept, count)


def grouped(s: Stream, h: str) -> str:
    """Attention with fewer heads of keys and values than of queries: each is repeated, beside itself or behind all."""
    t, (b, n, d) = s.t, s.t.shape(h)
    few = s.r.choice([few for few in range(1, s.heads) if s.heads % few == 0] or [1])
    times, each = s.heads // few, s.r.choice([1, 2, 4])

    def split(heads: int) -> str:
        made = s.dense(h, heads * each, s.r.random() < 0.5)
        return t.op("Transpose", t.op("Reshape", made, s.ints(b, n, heads, each)), perm=[0, 2, 1, 3])

    q, k, v = map(split, (s.heads, few, few))
    behind = s.r.random() < 0.2

    def repeated(heads: str) -> str:
        rest, front = t.shape(heads)[2:], (times, few) if behind else (few, times)
        spread = t.op("Expand", t.op("Unsqueeze", heads, s.ints(1 if behind else 2)), s.ints(b, *front, *rest))
        return t.op("Reshape", spread, s.ints(b, s.heads, *rest))

    turned = t.op("Transpose", repeated(k), perm=[0, 1, 3, 2])
    if s.r.random() < 0.5:
        turned = repeated(t.op("Transpose", k, perm=[0, 1, 3, 2]))
    scores = t.op("Mul", t.op("MatMul", q, turned), t.const(0.7))
    mixed = t.op("MatMul", t.op("Softmax", scores, axis=-1), repeated(v))
    joined = t.op("Reshape", t.op("Transpose", mixed, perm=[0, 2, 1, 3]), s.ints(b, n, s.heads * each))
    return t.op("Add", h, s.dense(joined, d))


def recurrent(s: Stream, h: str) -> str:
    """A state that goes from token to token: with a gate, or a mean whose weights are exponentials."""
    t, (b, n, d) = s.t, s.t.shape(h)
    flat = s.r.random() < 0.5
    shifted = t.op("Concat", t.const(np.zeros((b, 1, d))), s.cut(h, 0, n - 1, 1), axis=1) if n > 1 else h
    value = t.op("Add", t.op("Mul", h, s.param(d)), t.op("Mul", shifted, s.param(d)))

    def tokens(name: str) -> list[str]:
        if len(t.shape(name)) < 3:
            return [name] * n
        rows = [s.cut(name, at, at + 1, 1) for at in range(n)]
        return [t.op("Squeeze", row, s.ints(1)) for row in rows] if flat else rows

    rows = (
        _weighed(s, tokens(s.dense(h, d)), tokens(value))
        if s.r.random() < 0.5
        else _gated(s, tokens(t.op("Sigmoid", s.dense(h, d) if s.r.random() < 0.7 else s.param(d))), tokens(value))
    )
    joined = t.op("Concat", *(t.op("Unsqueeze", row, s.ints(1)) if flat else row for row in rows), axis=1)
    return t.op("Add", h, s.dense(joined, d, False))


def _gated(s: Stream, gates: list[str], values: list[str]) -> list[str]:
    rows = values[:1]
    for gate, value in zip(gates[1:], values[1:]):
        rows.append(s.t.op("Add", s.t.op("Mul", gate, rows[-1]), value))
    return rows


def _weighed(s: Stream, keys: list[str], values: list[str]) -> list[str]:
    t, decay = s.t, s.param(s.t.shape(keys[0])[-1])
    largest, above, below, rows = keys[0], values[0], t.like(1.0, keys[0]), values[:1]
    for key, value in zip(keys[1:], values[1:]):
        before = t.op("Add", largest, decay)
        largest = t.op("Max", before, key)
        old, new = t.op("Exp", t.op("Sub", before, largest)), t.op("Exp", t.op("Sub", key, largest))
        above = t.op("Add", t.op("Mul", old, above), t.op("Mul", new, value))
        below = t.op("Add", t.op("Mul", old, below), new)
        rows.append(t.op("Div", above, below))
    return rows


def tiled(s: Stream, h: str) -> str:
    """Attention whose heads are in halves: both have each half of the values, one less a share of the other."""
    t, (b, n, d) = s.t, s.t.shape(h)
    each, heads = s.r.choice([1, 2]), 2 * max(1, s.heads // 2)

    def split(name: str) -> str:
        return t.op("Transpose", t.op("Reshape", name, s.ints(b, n, heads, each)), perm=[0, 2, 1, 3])

    q, k, v = (split(s.dense(h, heads * each, False)) for _ in range(3))
    halves = [s.cut(v, 0, heads // 2, 1), s.cut(v, heads // 2, heads, 1)]
    v = t.op("Concat", *(t.op("Tile", half, s.ints(1, 2, 1, 1)) for half in halves), axis=3)
    scores = t.op("Softmax", t.op("MatMul", q, t.op("Transpose", k, perm=[0, 1, 3, 2])), axis=-1)
    mixed = t.op("MatMul", scores, v)
    first, second = s.cut(mixed, 0, heads // 2, 1), s.cut(mixed, heads // 2, heads, 1)
    mixed = t.op("Sub", first, t.op("Mul", second, t.op("Sigmoid", s.param(1))))
    return t.op("Add", h, s.dense(t.op("Reshape", t.op("Transpose", mixed, perm=[0, 2, 1, 3]), s.ints(b, n, -1)), d))


BLOCKS: dict[str, Block] = {
    "dense": dense, "mlp": mlp, "attention": attention, "norm": norm, "fold": fold, "merge": merge_tokens,
    "class": class_token, "drop": drop_token, "cumsum": running, "pooled": pooled, "mixer": mixed_tokens,
    "rolled": rolled, "chosen": chosen, "positions": positions, "soft": soft, "turned": turned, "gram": gram,
    "same": unchanged, "experts": experts, "batch-norm": batch_norm, "shared": shared, "padding": padding,
}  # fmt: skip
"""What recipes are drawn from."""
ALL = BLOCKS | {"grouped": grouped, "recurrent": recurrent, "tiled": tiled}
