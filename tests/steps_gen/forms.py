"""Pieces of an update that change nothing, or that change a value in a way of their own: gates, layouts, tails."""

from __future__ import annotations

import numpy as np

from steps_gen.tape import Tape


def unchanged(t: Tape, kind: str, name: str) -> str:
    """The same values, through nodes that change nothing."""
    shape, dtype = t.shape(name), t.dtype(name)
    op = t.op
    if kind == "identity":
        return op("Identity", name)
    if kind == "mul-one":
        return op("Mul", name, t.like(1.0, name))
    if kind == "div-one":
        return op("Div", name, t.like(1.0, name))
    if kind == "add-zero":
        return op("Add", name, t.like(0.0, name))
    if kind == "neg-neg":
        return op("Neg", op("Neg", name))
    if kind == "cast":
        return op("Cast", name, to=10 if dtype == "float16" else 1)
    if kind == "wide-pair":
        wide = op("Cast", name, to=1 if dtype == "float16" else 11)
        return op("Cast", wide, to=10 if dtype == "float16" else 1)
    if kind == "reshape":
        return op("Reshape", name, t.const(shape, "int64"))
    if kind == "flat-pair":
        flat = op("Reshape", name, t.const([-1], "int64"))
        return op("Reshape", flat, t.const(shape, "int64"))
    if kind == "transpose-pair":
        if len(shape) < 2:
            row = op("Unsqueeze", name, t.const([0], "int64"))
            return op("Squeeze", row, t.const([0], "int64"))
        turn = list(range(len(shape)))[::-1]
        return op("Transpose", op("Transpose", name, perm=turn), perm=turn)
    if kind == "expand":
        return op("Expand", name, t.const(shape, "int64"))
    assert kind == "none", kind
    return name


def tail(t: Tape, kind: str, name: str) -> str:
    """What stands between a new value and its output."""
    if kind == "clip":
        return t.op("Clip", name, t.like(-4.0, name), t.like(4.0, name))
    if kind == "project":
        wide = t.cast(name, "float32")
        length = t.op("Max", t.op("ReduceL2", wide, keepdims=0), t.const(1.0))
        return t.cast(t.op("Div", wide, length), t.dtype(name))
    return unchanged(t, kind, name)


def gated(t: Tape, form: str, flag: str, new: str, old: str) -> str:
    """``new`` where the flag is up, else ``old``."""
    if t.dtype(new) not in ("float32", "float16"):
        form = "where"
    if form == "where":
        return t.op("Where", flag, new, old)
    if form == "not-where":
        return t.op("Where", t.op("Not", flag), old, new)
    number = t.cast(flag, t.dtype(new))
    if form == "lerp":
        return t.op("Add", old, t.op("Mul", number, t.op("Sub", new, old)))
    if form == "mix":
        rest = t.op("Sub", t.like(1.0, new), number)
        return t.op("Add", t.op("Mul", number, new), t.op("Mul", rest, old))
    assert form == "step", form
    step = t.op("Sub", new, old)
    return t.op("Add", old, t.op("Where", flag, step, t.like(0.0, new)))


def stacked(t: Tape, parts: list[str]) -> str:
    """One-element values in a row."""
    one = t.const([1], "int64")
    return t.op("Concat", *(t.op("Reshape", part, one) for part in parts), axis=0)


def total(t: Tape, parts: list[str]) -> str:
    found = parts[0]
    for part in parts[1:]:
        found = t.op("Add", found, part)
    return found


def joined(t: Tape, names: list[str]) -> list[str]:
    """All values flattened into one row and cut up again."""
    flat = t.const([-1], "int64")
    row = t.op("Concat", *(t.op("Reshape", name, flat) for name in names), axis=0)
    return cut_up(t, row, names)


def cut_up(t: Tape, row: str, like: list[str]) -> list[str]:
    """A row as values of the shapes of others."""
    if len(like) == 1:
        return [t.op("Reshape", row, t.const(t.shape(like[0]), "int64"))]
    sizes = t.const([t.values[name].size for name in like], "int64")
    parts = t.op("Split", row, sizes, outputs=len(like), axis=0)
    return [t.op("Reshape", part, t.const(t.shape(name), "int64")) for part, name in zip(parts, like, strict=True)]


def wide(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """One rate per row."""
    rows = shape[:1] + (1,) * (len(shape) - 1)
    return generator.uniform(0.5, 1.5, rows).astype(np.float32)
