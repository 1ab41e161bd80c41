"""Look through sequences of tensors that are both built and indexed in a graph."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from gopt.ir.constant_folding import constant_array
from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor


def constant_index(name: str, producers: Mapping[str, Node], stored: Mapping[str, Tensor]) -> int | None:
    """The number of a single-element constant; None for a value that is not a constant."""
    if name in stored:
        return int(np.asarray(stored[name].numpy()).reshape(-1)[0]) if stored[name].type.elements == 1 else None
    producer = producers.get(name)
    array = constant_array(producer.attributes) if producer is not None and not producer.reads else None
    return int(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def look_through_sequences(
    nodes: Iterable[Node], producers: Mapping[str, Node], stored: Mapping[str, Tensor]
) -> dict[str, str]:
    """Return output of a SequenceAt -> the value at this place of the SequenceConstruct."""
    element_of: dict[str, str] = {}
    for node in nodes:
        if not node.is_a("SequenceAt"):
            continue
        source = producers.get(node.inputs[0])
        position = constant_index(node.inputs[1], producers, stored)
        if source is None or not source.is_a("SequenceConstruct") or position is None:
            continue
        if -len(source.inputs) <= position < len(source.inputs):
            element_of[node.outputs[0]] = source.inputs[position]
    return {name: _last(element_of, name) for name in element_of}


def _last(element_of: Mapping[str, str], name: str) -> str:
    while name in element_of:
        name = element_of[name]
    return name
