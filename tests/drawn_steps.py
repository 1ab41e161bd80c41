"""A step that reads random numbers of every kind, with the metadata that says what they are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from helpers import Builder

from gopt.documents.draws import Distribution, Draw
from gopt.documents.roles import RolesRecord
from gopt.ir.graph import ROLES

BATCH, ROWS = 4, 1000
DRAWS = {
    "noise": Draw(Distribution.NORMAL, mean=0.5, std=2.0),
    "u": Draw(Distribution.UNIFORM),
    "t": Draw(Distribution.INTEGERS, low=100, high=ROWS),
    "other": Draw(Distribution.PERMUTATION),
    "told": Draw(Distribution.BERNOULLI, p=0.9),
}


def noisy_step(path: Path, draws: Mapping[str, Draw] = DRAWS) -> Path:
    """Dropout, noise, rows of timesteps, samples mixed with others, and timesteps that are left out; plain SGD."""
    b = Builder()
    x, noise, u = b.input("x", (BATCH, 6)), b.input("noise", (BATCH, 6)), b.input("u", (BATCH, 5))
    t, other = b.input("t", (BATCH,), "int64"), b.input("other", (BATCH,), "int64")
    told, lr = b.input("told", (BATCH, 1), "bool"), b.input("lr", ())
    table, w, v = b.parameter("table", (ROWS, 6)), b.parameter("w", (6, 5)), b.parameter("v", (5, 6))
    told = b.op("Cast", told, to=1)
    mixed = b.op("Add", x, b.op("Mul", b.op("Gather", x, other), b.const(0.25)))
    seen = b.op(
        "Add", b.op("Add", mixed, b.op("Mul", noise, b.const(0.3))), b.op("Mul", b.op("Gather", table, t), told)
    )
    mask = b.op("Mul", b.op("Cast", b.op("Less", u, b.const(0.75)), to=1), b.const(1 / 0.75))
    kept = b.op("Mul", b.op("MatMul", seen, w), mask)
    delta = b.op("Sub", b.op("MatMul", kept, v), noise)
    b.output("loss", b.op("Mul", b.op("ReduceSum", b.op("Mul", delta, delta), keepdims=0), b.const(0.5)), ())
    back = b.op("Mul", b.op("MatMul", delta, b.op("Transpose", v, perm=[1, 0])), mask)
    rows = b.op("Mul", b.op("MatMul", back, b.op("Transpose", w, perm=[1, 0])), told)
    places = b.op("Reshape", t, b.const([BATCH, 1], "int64"))
    gradients = {
        table: (b.op("ScatterND", b.const(np.zeros((ROWS, 6))), places, rows, reduction="add"), (ROWS, 6)),
        w: (b.op("MatMul", b.op("Transpose", seen, perm=[1, 0]), back), (6, 5)),
        v: (b.op("MatMul", b.op("Transpose", kept, perm=[1, 0]), delta), (5, 6)),
    }
    for name, (gradient, shape) in gradients.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", gradient, lr)), shape)
    model = b.model()
    record = RolesRecord(draws=draws, batch=("x", *DRAWS))
    onnx.helper.set_model_props(model, {ROLES: record.text()})
    onnx.save(model, path)
    return path


def samples(path: Path, count: int = 16) -> Path:
    """A file of samples without any of what is drawn."""
    x = np.random.default_rng(0).standard_normal((count, 6)).astype("f4")
    np.savez(path, x=x)
    return path
