"""Counters of steps: scalar states to which each step adds one. One without a stored value starts at zero."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.constant_folding import constant_array
from gopt.ir.graph import Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import numpy_dtype

_WORDS = frozenset(
    [
        "step", "steps", "t", "n", "iter", "iters", "iteration", "iterations", "count", "counts", "counter", "updates",
        "batches", "epoch", "epochs", "tick", "ticks", "time",
    ]
)  # fmt: skip
"""Words in the names of counters. The structure alone is not enough: what is fed, plus one, may be shown."""
_MOST = 16
"""Casts and copies between an input and what counts it on."""


def counts_steps(graph: Graph, producers: Mapping[str, Node], name: str, output: str) -> bool:
    """Return whether ``output`` is the one-element input ``name`` plus one, and the name says that it counts."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    return graph.types[name].elements == 1 and any(word.lower() in _WORDS for word in words) and (
        _plus_one(graph, producers, name, output)
    )  # fmt: skip


def start_counters(training: TrainingGraph) -> None:
    """Give counters without a stored value zero, with a note, where other states have stored values."""
    graph = training.graph
    held = graph.initializers
    open_ = [each for each in training.states if each.tensor not in held and graph.types[each.tensor].elements == 1]
    if not open_ or all(each.tensor not in held for each in training.states):
        return
    producers = graph.producers()
    for each in open_:
        name = each.tensor
        if counts_steps(graph, producers, name, each.updated):
            type = graph.types[name]
            held[name] = Tensor(type, array=np.zeros(type.dims, numpy_dtype(type.dtype)))
            training.notes.append(f"{name} counts steps and has no stored value: it starts at zero")


def _plus_one(graph: Graph, producers: Mapping[str, Node], name: str, output: str) -> bool:
    added = 0.0
    for _ in range(_MOST):
        if output == name:
            return added == 1
        node = producers.get(output)
        if node is None:
            return False
        if node.is_a("Add") and added == 0:
            ones = [each for each in node.inputs if _is_one(graph, producers, each)]
            rest = [each for each in node.inputs if each not in ones]
            if len(rest) != 1:
                return False
            added, output = 1.0, rest[0]
        elif node.is_a("Identity", "Cast"):
            output = node.inputs[0]
        else:
            return False
    return False


def _is_one(graph: Graph, producers: Mapping[str, Node], name: str) -> bool:
    node = producers.get(name)
    if node is not None:
        value = constant_array(node.attributes) if node.is_a("Constant") else None
    else:
        tensor = graph.initializers.get(name) if name not in graph.inputs else None
        value = tensor.numpy() if tensor is not None and tensor.type.elements == 1 else None
    return value is not None and value.size == 1 and bool((value == 1).all())
