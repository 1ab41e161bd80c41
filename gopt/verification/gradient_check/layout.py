"""Brings a gradient into the layout of the parameter, if the update transposes the gradient first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import order_of
from gopt.operators.kinds import CARRIES
from gopt.verification.gradient_check.difference_quotients import Candidate

DEPTH = 8


class Layouts:
    """Lays gradients out as the parameters."""

    def __init__(self, training: TrainingGraph) -> None:
        self._training = training
        self._readers: Mapping[str, list[Node]] = training.graph.users()
        self._turns: dict[str, list[Node]] = {}

    def of(self, name: str, gradient: np.ndarray, like: np.ndarray) -> np.ndarray:
        """Return the gradient of parameter ``name`` in the layout of ``like``, with as many elements."""
        if name not in self._turns:
            self._turns[name] = self._chain(self._training.gradients[name], like.shape)
        types = self._training.graph.types
        for node in self._turns[name]:
            order = order_of(node, gradient.ndim)
            gradient = gradient.reshape(types[node.outputs[0]].dims) if order is None else gradient.transpose(order)
        return with_layout(gradient, like)

    def _chain(self, start: str, dims: tuple[int, ...]) -> list[Node]:
        """The nodes that turn a gradient and end in the parameter's dims; empty for an unturned gradient."""
        chains: list[tuple[str, list[Node]]] = [(start, [])]
        for _ in range(DEPTH):
            longer = []
            for name, chain in chains:
                for node in self._readers.get(name, ()):
                    if not node.is_in(CARRIES) or node.inputs[0] != name:
                        continue
                    type = self._training.graph.type_of(node.outputs[0])
                    if not type.static:
                        continue
                    longer.append((node.outputs[0], [*chain, node]))
                    if type.dims == dims and any(order_of(node, 0) is not None for node in longer[-1][1]):
                        return longer[-1][1]
            chains = longer
        return []


def with_layout(gradient: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A gradient in the layout of the moved value: reshaped, or turned where only a turn fits."""
    if gradient.shape == like.shape:
        return gradient
    orders = permutations(range(gradient.ndim)) if 1 < gradient.ndim <= 4 else ()
    fits = (gradient.transpose(order) for order in orders)
    return next((fit for fit in fits if fit.shape == like.shape), gradient.reshape(like.shape))


def turned(part: Candidate) -> Iterator[Candidate]:
    """The same value with axes of equal lengths exchanged."""
    dims = part.origin.shape
    for order in permutations(range(len(dims))) if 1 < len(dims) <= 4 else ():
        if tuple(dims[axis] for axis in order) == dims and order != tuple(range(len(dims))):
            yield replace(part, at=tuple(array.transpose(order) for array in part.at))
