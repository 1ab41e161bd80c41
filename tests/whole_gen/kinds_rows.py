"""States that keep rows of samples: queues in several layouts, rings with a pointer, tables written by sample."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer

ROWS = 240
"""A multiple of the rows that the ranks of every mesh bring, and more than them."""


def _keys(w: Writer, labels: object = None) -> tuple[Value, Value, Value, Value]:
    """A parameter, labels, a query and a key of each sample; the key's weights are fixed, or follow the parameter."""
    w.options["accumulate"] = 1
    w.told = True
    x, other = w.fed("x", [3]), w.fed("other", [3])
    w0 = parameter(w, "w0", 3, 2)
    query, y = w.op("Tanh", x @ w0), x
    if labels is not None:
        y = w.fed("y", [], lambda generator, size: generator.integers(0, 9, size).astype(labels))
        query = query * (y.to(w.dtype).reshape(-1, 1) * 0.1)
    if w.pick("own", "momentum") == "own":
        return w0, y, query, w.op("Tanh", w.op("MatMul", other, w.const(w.draw("k", (3, 2)))))
    slow = w.state("slow", w.draw("slow", (3, 2)))
    w.becomes(slow, slow * 0.9 + w0 * 0.1)
    return w0, y, query, w.op("Tanh", other @ slow)


def _trained(w: Writer, w0: Value, query: Value, key: Value, seen: Value) -> None:
    """``seen``: old rows, along the first dimension."""
    near = query @ seen.turn(1, 0)
    loss = (near * near).mean() - (query * key).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)


def _stop(w: Writer, value: Value) -> Value:
    made = w.op("Identity", value)
    w.tape.pop()
    return made


def _cut(w: Writer, value: Value, start: int, stop: int, axis: int) -> Value:
    return w.op("Slice", value, *(w.const(np.array([each])) for each in (start, stop, axis)))


def _enqueued(w: Writer, old: Value, rows: list[Value], axis: int) -> Value:
    """The newest rows in front or behind; the oldest are dropped, before or after."""
    size, count = old.shape[axis], sum(each.shape[axis] for each in rows)
    front, way = w.pick(True, False), w.pick("before", "after", "end", "split")
    far = w.pick(2**31, 2**63 - 1)
    if w.pick(*[False] * 3, True):
        old = old * 0.9
    if way == "split" and w.pick(True, False):
        way = "before"
    if way == "before":
        kept = _cut(w, old, 0, -count if w.pick(True, False) else size - count, axis)
        kept = kept if front else _cut(w, old, count, far, axis)
    elif way == "split":
        ends = w.const(np.array([size - count, count] if front else [count, size - count]))
        kept = w.op("Split", old, ends, out=2, axis=axis)[0 if front else 1]
    else:
        kept = old
    joined = w.op("Concat", *([*rows, kept] if front else [kept, *rows]), axis=axis)
    if way == "after":
        joined = _cut(w, joined, 0, size, axis) if front else _cut(w, joined, count, far, axis)
    elif way == "end":
        joined = _cut(w, joined, 0, -count, axis) if front else _cut(w, joined, -size, far, axis)
    return w.op("Clip", joined, w.const(np.array(-0.9, w.dtype)), w.const(np.array(0.9, w.dtype))) if w.pick(
        *[False] * 3, True
    ) else joined  # fmt: skip


@kind
def queue_gathered(w: Writer) -> None:
    """The last keys, in rows or columns, with their labels beside them or not, one view or two."""
    labels = w.pick(None, None, np.int64, np.int32, np.float32)
    w0, y, query, key = _keys(w, labels)
    layout, views = w.pick("rows", "columns", "front"), w.pick(1, 1, 2)
    held = w.draw("queue", (ROWS, 2))
    queue = w.state("queue", {"rows": held, "columns": held.T, "front": held[None]}[layout])
    w.stated = {"queue": "gather"}
    if not w.pick(*[True] * 7, False):
        w.stated, w.refusal = {}, "--statistics queue=gather(,names=gather)?: ranks gather the rows of all"
    flat = {"rows": lambda: queue, "columns": lambda: queue.turn(1, 0), "front": lambda: queue.reshape(ROWS, 2)}
    _trained(w, w0, query, _stop(w, key), flat[layout]())
    rows = [_stop(w, key), *([_stop(w, query)] if views == 2 else [])]
    if layout == "columns" and w.pick(True, False):
        new = _enqueued(w, queue.turn(1, 0), rows, 0).turn(1, 0)
    elif layout == "columns":
        new = _enqueued(w, queue, [each.turn(1, 0) for each in rows], 1)
    elif layout == "front":
        new = _enqueued(w, queue, [each.reshape(1, -1, 2) for each in rows], 1)
    else:
        new = _enqueued(w, queue, rows, 0)
    w.becomes(queue, new)
    if labels is not None:
        names = w.state("names", np.arange(ROWS, dtype=labels))
        w.stated |= {"names": "gather"} if w.stated else {}
        kept = _cut(w, names, 0, ROWS - w.samples, 0)
        w.becomes(names, w.op("Concat", y, kept, axis=0))


@kind
def ring_gathered(w: Writer) -> None:
    """Keys are written where a pointer stands; the pointer walks round."""
    labels = w.pick(None, None, np.int64)
    w0, y, query, key = _keys(w, labels)
    count = w.samples
    columns = w.pick(*[False] * 3, True)
    held = w.draw("ring", (ROWS, 2))
    ring = w.state("ring", held.T if columns else held)
    w.stated = {"ring": "gather"}
    type_, shape = w.pick(np.int64, np.int64, np.int32), w.pick((), (1,))
    begin = w.pick(0, 0, 120, 7)
    pointer = w.state("pointer", np.full(shape, begin, type_))
    _trained(w, w0, query, _stop(w, key), ring.turn(1, 0) if columns else ring)
    rows, size = _stop(w, key), w.const(np.array(ROWS, type_))
    turns = w.pick("places", "pointer", "both")
    if turns == "pointer" and begin:
        w.refusal = "some would lie across the end"
    many: Value
    if w.pick(True, False):
        many = w.const(np.array(count, type_))
    else:
        sizes = w.op("Shape", rows)
        many = w.op("Gather", sizes, w.const(np.array(0)), axis=0).to(type_)
    one = pointer.reshape(1) if shape == () else pointer
    iota = w.const(np.arange(count, dtype=type_))
    places = one + iota if w.pick(True, False) else iota + one
    if turns != "pointer":
        places = w.op("Mod", places, size)
    if type_ != np.int64:
        places = places.to(np.int64)
    way = w.pick("nd", "elements")
    base = ring.turn(1, 0) if columns else ring
    if way == "nd":
        new = w.op("ScatterND", base, places.reshape(-1, 1), rows)
    else:
        wide = w.op("Expand", places.reshape(-1, 1), w.const(np.array([count, 2])))
        new = w.op("ScatterElements", base, wide, rows, axis=0)
    w.becomes(ring, new.turn(1, 0) if columns else new)
    if labels is not None:
        names = w.state("names", np.arange(ROWS))
        w.stated["names"] = "gather"
        w.becomes(names, w.op("ScatterND", names, places.reshape(-1, 1), y))
    moved = pointer + many if w.pick(True, False) else many + pointer
    moved = moved.reshape(*shape) if moved.shape != shape else moved
    w.becomes(pointer, w.op("Mod", moved, size) if turns != "places" else moved)


@kind
def bank_gathered(w: Writer) -> None:
    """Every sample has a row of its own, which follows what the forward makes of the sample."""
    w.options["accumulate"] = 1
    w.told = True
    # each sample once in a batch: which of two rows of one sample stays is not defined
    taken = iter(range(10**6))
    ids = w.fed("ids", [], lambda generator, size: np.array([next(taken) % ROWS for _ in range(int(np.prod(size)))]))
    x = w.fed("x", [3])
    w0 = parameter(w, "w0", 3, 2)
    bank = w.state("bank", w.draw("bank", (ROWS, 2)))
    w.stated = {"bank": "gather"}
    h = w.op("Tanh", x @ w0)
    old = w.op("Gather", bank, ids, axis=0)
    d = h - old
    loss = (d * d).mean()
    (g,) = gradients(loss, [w0])
    w.out("loss", loss)
    w.becomes(w0, w0 - g * 0.1)
    rows = old * 0.5 + h * 0.5 if w.pick(True, False) else h
    how = w.pick("none", "none", "add")
    if w.pick("nd", "elements") == "nd":
        new = w.op("ScatterND", bank, ids.reshape(-1, 1), rows, reduction=how)
    else:
        wide = w.op("Expand", ids.reshape(-1, 1), w.const(np.array([w.samples, 2])))
        new = w.op("ScatterElements", bank, wide, rows, axis=0, reduction=how)
    w.becomes(bank, new)
