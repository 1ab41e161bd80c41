"""Small forwards, each written for any number of samples, so that one large batch can be held against the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from helpers import Builder, run_graph

from gopt.analysis.coupling.step_couplings import CouplingSummary, analyse_couplings
from gopt.analysis.training import Phase, State, StateKind, TrainingGraph
from gopt.ir.graph import Graph
from gopt.ir.load import load

WIDTH, TOKENS, CLASSES = 4, 3, 5
Forward = Callable[[Builder, int], str]
"""Adds a forward for so many samples; returns the loss."""


@dataclass(frozen=True)
class Case:
    """A forward; ``rule`` gives the large batch's loss from the ranks' (None: nothing does), ``kinds`` what is told."""

    name: str
    forward: Forward
    rule: str | None = "mean"
    kinds: tuple[str, ...] = ()


def graph_of(forward: Forward, batch: int, folder: Path) -> tuple[Graph, str]:
    b = Builder(3)
    loss = forward(b, batch)
    b.output("loss", loss, ())
    return load(b.save(folder / f"{batch}.onnx")), "loss"


def reading(graph: Graph) -> CouplingSummary:
    """What is told of a graph that is a forward alone: inputs without a value are the batch."""
    batch = [name for name in graph.inputs if name not in graph.initializers]
    states = [State(name, name, StateKind.PARAMETER) for name in graph.inputs if name in graph.initializers]
    for node in graph.nodes:
        node.phase = Phase.FORWARD
    return analyse_couplings(TrainingGraph(graph, ("loss",), states, {}, batch, [], [], []))


def draw(graph: Graph, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """A batch: labels below the number of classes, a mask that leaves something out."""
    found = {}
    for name, type in graph.inputs.items():
        if name in graph.initializers:
            continue
        if type.dtype == "int64":
            found[name] = generator.integers(0, CLASSES, type.dims)
        elif name == "mask":
            found[name] = (generator.random(type.dims) < generator.uniform(0.3, 0.9)).astype(np.float32)
            found[name].reshape(-1)[0] = 1.0
        else:
            found[name] = generator.standard_normal(type.dims).astype(np.float32)
    return found


def joined(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([each[name] for each in batches]) for name in batches[0]}


def follows(case_graph: Graph, large: Graph, rule: str, by: str, seed: int, ranks: int = 3) -> bool:
    """Whether the loss of one large batch follows from the ranks' by a rule, for drawn parameters and batches."""
    generator = np.random.default_rng(seed)
    states = {
        name: generator.standard_normal(type.dims).astype(np.float32)
        for name, type in case_graph.inputs.items() if name in case_graph.initializers
    }  # fmt: skip
    batches = [draw(case_graph, generator) for _ in range(ranks)]
    whole = float(run_graph(large, {**states, **joined(batches)})["loss"])
    shown = case_graph
    if by:
        outputs = {**case_graph.outputs, by: case_graph.types[by]}
        shown = replace(case_graph, outputs=outputs)
    runs = [run_graph(shown, {**states, **batch}) for batch in batches]
    losses = np.array([float(run["loss"]) for run in runs])
    weights = np.array([float(run[by]) for run in runs]) if by else np.ones(ranks)
    made = {"mean": losses.mean(), "sum": losses.sum(), "weighted": (losses * weights).sum() / weights.sum()}[rule]
    return bool(np.isclose(made, whole, rtol=2e-4, atol=1e-5))


# --- parts ----------------------------------------------------------------------------------------------------------


def rows(b: Builder, n: int) -> str:
    return b.op("MatMul", b.input("x", (n, WIDTH)), b.parameter("w", (WIDTH, CLASSES)))


def tokens(b: Builder, n: int) -> str:
    return b.op("MatMul", b.input("x", (n, TOKENS, WIDTH)), b.parameter("w", (WIDTH, CLASSES)))


def mean(b: Builder, x: str) -> str:
    return b.op("ReduceMean", x, keepdims=0)


def total(b: Builder, x: str) -> str:
    return b.op("ReduceSum", x, keepdims=0)


def axes(b: Builder, *given: int) -> str:
    return b.const(list(given), "int64")


def squared(b: Builder, x: str) -> str:
    return b.op("Mul", x, x)


def masked(b: Builder, n: int) -> tuple[str, str]:
    """Losses of tokens with padding at zero, and the mask."""
    each = b.op("ReduceMean", squared(b, tokens(b, n)), axes(b, 2), keepdims=0)
    mask = b.input("mask", (n, TOKENS))
    return b.op("Mul", each, mask), mask


def batch_norm(b: Builder, x: str, n: int, *, divide: bool = False) -> str:
    """Rows normalised by their mean and variance over the samples."""
    over = axes(b, 0)

    def average(value: str) -> str:
        if divide:
            return b.op("Div", b.op("ReduceSum", value, over, keepdims=1), b.const(float(n)))
        return b.op("ReduceMean", value, over, keepdims=1)

    centred = b.op("Sub", x, average(x))
    deviation = b.op("Sqrt", b.op("Add", average(squared(b, centred)), b.const(1e-5)))
    return b.op("Div", centred, deviation)


def cross_entropy(b: Builder, logits: str, n: int) -> str:
    labels = b.op("Unsqueeze", b.input("y", (n,), "int64"), axes(b, 1))
    picked = b.op("GatherElements", b.op("LogSoftmax", logits, axis=1), labels, axis=1)
    return b.op("Neg", b.op("Squeeze", picked, axes(b, 1)))
