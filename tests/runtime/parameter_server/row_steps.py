"""A step of two tables and nothing else, and its batches: sums of rows of both, multiplied, against a target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from helpers import ROOT, script_of

from gopt.runtime.session import Array

sys.path.insert(0, str(ROOT / "fixtures/sparse"))
from writer import Writer

sparse_steps = script_of("fixtures/sparse/steps.py")
update = sparse_steps.update

BATCH, LOOKED_UP = 4, 3
ROWS = {"user": 12, "item": 10}
"""Of each table; two servers have equal parts, three and five do not."""
WIDTH = 5
PADDING = {"item": 0}
"""Table -> the id whose row gets no gradient."""
ROUNDS = 3


def lookups(path: Path, rule: str) -> Path:
    """Writes the step. ``rule``: sgd, adagrad, adam."""
    w = Writer(seed=5)
    ids = {name: w.input(f"{name}_ids", (BATCH, LOOKED_UP), "int64") for name in ROWS}
    target = w.input("target", (BATCH,))
    w.padding.update(PADDING)
    sums = [w.sum(w.lookup(w.parameter(name, (rows, WIDTH)), ids[name]), 1) for name, rows in ROWS.items()]
    scores = w.sum(w.mul(*sums), 1)
    off = w.op("Sub", scores, target, shape=(BATCH,))
    loss = w.op("ReduceMean", w.op("Mul", off, off, shape=(BATCH,)), shape=(), keepdims=0)
    update(w, w.backward(scores, w.op("Mul", off, w.const(2.0 / BATCH), shape=(BATCH,))), loss, rule)
    onnx.save(w.model("lookups"), path)
    return path


def batch(seed: int, trainer: int, number: int) -> dict[str, Array]:
    """What a trainer computes in a round: ids that repeat, paddings, and sometimes no row of a small part."""
    random = np.random.default_rng([seed, trainer, number])
    found: dict[str, Array] = {}
    for name, rows in ROWS.items():
        ids = random.integers(0, rows, (BATCH, LOOKED_UP))
        ids[:, 0] = ids[0, 0]
        if name in PADDING:
            ids[1:, 1] = PADDING[name]
        found[f"{name}_ids"] = ids
    return found | {"target": random.normal(size=BATCH).astype("f4")}


def dealt(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """The batches of a trainer: ``--data row_steps:dealt``."""
    for number in range(ROUNDS):
        yield batch(SEED, part, number)


SEED = 0
"""Of the batches of a run."""
