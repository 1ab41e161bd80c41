"""A random forward model with its loss: ``make(seed)``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from . import control, elementwise, layers, layout
from .sketch import Rejected, Sketch

TABLES = ((elementwise.DRAWS, 1.0), (layout.DRAWS, 0.8), (layers.DRAWS, 1.0), (control.DRAWS, 0.7))
OLDEST, NEWEST = 13, 26
BATCH, STEPS = 3, 3
MOST_TRAINED = 90
"""Elements of all weights: each costs two runs of the forward for each step."""


@dataclass(frozen=True)
class Forward:
    """A model, and what a derivation of it is to find.

    ``weights``: parameters with their first values in float64. ``constants``: floating constants that are none.
    ``loss``: the name that ``--loss`` takes; ``batches``: inputs of each step, the target of the loss among them.
    """

    model: ModelProto
    weights: dict[str, np.ndarray]
    loss: str
    batches: list[dict[str, np.ndarray]]
    dims: dict[str, int]
    draws: tuple[str, ...]
    knobs: dict[str, Any] = field(default_factory=dict)


def make(seed: int, operators: int | None = None) -> Forward:
    random = np.random.default_rng([seed, 77])
    while True:
        try:
            return _made(random, operators)
        except Rejected:
            continue


POOLED = ((BATCH, 2, 7), (BATCH, 2, 4, 5), (BATCH, 1, 3, 4, 3), (BATCH, 1, 4, 4, 4))
"""Operands of pools over one, two and three dimensions."""


def pooled(seed: int) -> Forward:
    """A weight and one maximum pool, with its strides, pads, dilations and ceil mode drawn."""
    random = np.random.default_rng([seed, 5])
    while True:
        s = Sketch(random, int(random.integers(OLDEST, NEWEST + 1)), BATCH)
        shape = POOLED[seed % len(POOLED)]
        apart = random.permutation(np.linspace(-3, 3, int(np.prod(shape)))).reshape(shape)  # nothing nearly ties
        s.use(s.op("Add", [s.input(apart), s.weight(*shape[1:], scale=1e-3)]))
        try:
            s.use(layers.pool(s))
            loss, outputs, targets = _loss(s)
        except (Rejected, ValueError):
            continue
        if any(node.op_type == "MaxPool" for node in s.nodes):
            return _forward(s, loss, outputs, targets, ["pool"])


def _made(random: np.random.Generator, operators: int | None) -> Forward:
    s = Sketch(random, int(random.integers(OLDEST, NEWEST + 1)), BATCH)
    flat = ((BATCH, 4), (BATCH, 3, 4), (BATCH, 2, 5), (BATCH, 6))
    first = s.one_of(*flat, (BATCH, 2, 4, 4), (BATCH, 4, 3, 3), (BATCH, 1, 3, 3, 4))
    s.use(s.input(s.numbers(first, 0.9)))
    if s.chance(0.2):
        s.use(s.input(s.numbers(s.one_of(first, (BATCH, 4)), 0.9)))
    draws, weights = zip(*((draw, share * times) for table, times in TABLES for draw, share in table.items()))
    shares = np.array(weights) / sum(weights)
    told, wanted = [], operators or s.below(12, 2)
    for _ in range(60):
        if len(told) >= wanted:
            break
        draw, place = draws[random.choice(len(draws), p=shares)], s.place()
        try:
            name = draw(s)
        except (Rejected, ValueError):  # operands that do not fit
            s.back(place)
            continue
        s.use(name)
        told.append(draw.__name__)
    loss, outputs, targets = _loss(s)
    if sum(each.size for each in s.weights.values()) > MOST_TRAINED or not s.weights:
        raise Rejected
    return _forward(s, loss, outputs, targets, told)


def _loss(s: Sketch) -> tuple[str, list[str], dict[str, np.ndarray]]:
    """The loss, the outputs, and the target: of the last value, brought into the form that the loss takes."""
    last = s.floats[-1]
    kind = s.one_of("mse", "cross-entropy", "cross-entropy", "own", "own labels")
    if kind == "mse":
        return kind, [last], {"target": s.numbers(s.shape(last))}
    if kind == "own":
        squared = s.op("Mul", [last, s.op("Sigmoid", [last])])
        whole = s.op("ReduceMean" if s.chance(0.5) else "ReduceSum", [squared], keepdims=s.below(2))
        return whole, [whole], {}
    rows = s.op("Reshape", [last, s.ints([s.one_of(1, s.shape(last)[0] if s.shape(last) else 1), -1])])
    logits = s.op("MatMul", [rows, s.weight(s.shape(rows)[1], 3)]) if s.shape(rows)[1] < 2 or s.chance(0.4) else rows
    labels = s.random.integers(0, s.shape(logits)[1], s.shape(logits)[0])
    if kind == "cross-entropy":
        return kind, [logits], {"label": labels}
    name = s.input(labels.astype(np.int64))
    given = {"ignore_index": int(labels[0])} if len(set(labels.tolist())) > 1 and s.chance(0.4) else {}
    made = s.op("SoftmaxCrossEntropyLoss", [logits, name], reduction=s.one_of("mean", "sum"), **given)
    return made, [made], {}


def _forward(s: Sketch, loss: str, outputs: list[str], targets: dict[str, np.ndarray], told: list[str]) -> Forward:
    symbolic = s.chance(0.3)
    inputs, dims, batches = [], {}, [dict(s.fed), *({} for _ in range(STEPS - 1))]
    for name, value in s.fed.items():
        shape: list[Any] = list(value.shape)
        if symbolic and shape and shape[0] == BATCH:
            shape[0], dims = "batch", {"batch": BATCH}
        kind = TensorProto.INT64 if value.dtype.kind == "i" else TensorProto.FLOAT
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
        for later in batches[1:]:
            moved = shuffled(s, value)
            later[name] = moved if kind == TensorProto.INT64 else moved + s.numbers(value.shape, 0.01)
    for batch in batches:
        batch.update({name: shuffled(s, value) for name, value in targets.items()})
    if s.chance(0.15):
        unread = s.name("unread")
        s.stored[unread] = s.numbers((2, 3))
    stored = []
    for name, value in s.stored.items():
        kind = s.narrow.get(name, TensorProto.FLOAT)
        dtype = value.dtype if value.dtype.kind == "i" else helper.tensor_dtype_to_np_dtype(kind)
        stored.append(numpy_helper.from_array(value.astype(dtype), name))
    if s.chance(0.15):
        inputs += [helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in stored]
    shown = [helper.make_tensor_value_info(name, TensorProto.FLOAT, s.shape(name)) for name in outputs]
    graph = helper.make_graph(s.nodes, "forward", inputs, shown, stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", s.opset)], ir_version=10)
    weights = {name: value for name, value in s.weights.items() if value.ndim}
    return Forward(model, weights, loss, batches, dims, tuple(told))


def shuffled(s: Sketch, value: np.ndarray) -> np.ndarray:
    return s.random.permutation(value.reshape(-1)).reshape(value.shape)
