"""Counters of steps: scalar states to which each step adds one. A counter without a stored value starts at zero."""

from __future__ import annotations

import re

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph_index import GraphIndex
from gopt.ir.node_kinds import record_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import numpy_dtype
from gopt.operators.kinds import UNMOVED

_WORDS = frozenset(
    [
        "step", "steps", "t", "n", "iter", "iters", "iteration", "iterations", "count", "counts", "counter", "updates",
        "batches", "epoch", "epochs", "tick", "ticks", "time",
    ]
)  # fmt: skip
"""Words in the names of counters. The structure alone is not enough: what is fed, plus one, may be shown."""
_MOST = 16
"""Casts and copies between an input and what counts it on."""


def counts_steps(index: GraphIndex, name: str, output: str) -> bool:
    """Return whether ``output`` is the one-element input ``name`` plus 1, and the name denotes a counter."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    named = index.one_element(name) and any(word.lower() in _WORDS for word in words)
    return named and _plus_one(index, name, output)


def start_counters(training: TrainingGraph) -> None:
    """Give counters without a stored value zero, with a note, where other states have stored values."""
    graph, stored = training.graph, training.graph.initializers
    unset = (state for state in training.states if state.tensor not in stored)
    open_ = [state for state in unset if graph.types[state.tensor].elements == 1]
    if not open_ or all(state.tensor not in stored for state in training.states):
        return
    index = GraphIndex(graph)
    for counter in open_:
        name = counter.tensor
        if counts_steps(index, name, counter.updated):
            type = graph.types[name]
            stored[name] = Tensor(type, array=np.zeros(type.dims, numpy_dtype(type.dtype)))
            training.notes.append(f"{name} counts steps and has no stored value: it starts at zero")


def added_constant(index: GraphIndex, old: str, new: str) -> str:
    """The constant that a new value adds to the old value, which may be cast and decayed; '' for any other form."""
    added, value = "", new
    for _ in range(_MOST):
        if value == old:
            return added
        node = index.producers.get(value)
        if node is None:
            return ""
        record = record_of(node)
        adds, scales = record.adds, record.multiplies
        if not (node.is_in(UNMOVED) or adds or scales):
            return ""
        fixed = [name for name in node.inputs if name != old and index.constants.value(name) is not None]
        if (adds or scales) and (bool(added) is adds or len(fixed) != 1):
            return ""
        added = fixed[0] if adds else added
        value = next((name for name in node.inputs if name not in fixed), "")
    return ""


def _plus_one(index: GraphIndex, name: str, output: str) -> bool:
    added = added_constant(index, name, output)
    return bool(added) and index.constants.number(added) == 1
