"""One parameter's update as a function of short vectors instead of full-shaped values."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import numpy as np

from gopt.ir.graph import Node
from gopt.offline.optimizer.numpy_ops import Array, run
from gopt.offline.optimizer.probe_harness import ProbeHarness, Scalars, Values


class UpdateFunction:
    """Computes the full-shaped values ``wanted`` from the values ``given``."""

    def __init__(
        self, harness: ProbeHarness, given: Iterable[str], wanted: Iterable[str], small: Container[str] = ()
    ) -> None:  # fmt: skip
        """``small``: values that are taken from the scalars, whatever they are made of."""
        self.harness, self._given, self.wanted, self._small = harness, set(given), tuple(wanted), small
        self.nodes = self._needed()

    def _needed(self) -> list[Node]:
        """The nodes that compute the wanted values from the given ones, in order."""
        harness, found = self.harness, {}
        stack, seen = [name for name in self.wanted if name not in self._given], set(self._given)
        while stack:
            name = stack.pop()
            node = harness.producers.get(name)
            if name in seen or node is None or name in self._small:
                continue
            seen.add(name)
            if harness.owners.reduced.get(name) == "":  # of several: another parameter's values are behind it
                continue
            found[id(node)] = node
            stack.extend(node.reads)
        return sorted(found.values(), key=lambda node: harness.position[id(node)])

    @property
    def reduces(self) -> bool:
        """Whether a full-shaped value is reduced to one element on the way."""
        wide, single = self.harness.owners.full, self.harness.single
        return any(
            any(name in wide and not single(name) for name in node.reads)
            and all(single(name) for name in node.outputs if name)
            for node in self.nodes
        )

    def __call__(self, scalars: Scalars, given: Mapping[str, Array]) -> list[Array] | None:
        """The wanted values for vectors of one length; None where they cannot be computed."""
        values: Values = dict(given)
        for node in self.nodes:
            if not any(name in values for name in node.reads):
                continue
            operands = [self._operand(name, values, scalars) for name in node.inputs]
            for name in node.outputs[:1]:
                if name not in self._given:
                    values[name] = run(node, operands, self.harness.graph.type_of(name), flat=True)
        shape = next(iter(given.values())).shape
        result = [self._operand(name, values, scalars) for name in self.wanted]
        if any(value is None for value in result):
            return None
        return [np.broadcast_to(value, shape).astype(np.float64) for value in result if value is not None]

    def _operand(self, name: str, values: Values, scalars: Scalars) -> Array | None:
        if not name:
            return None
        if name in values:
            return values[name]
        value = scalars.get(name)
        if value is None or not value.size:
            return None if value is None else np.zeros(0, np.int64)
        alike = value.size == 1 or (value == value.flat[0]).all()
        return np.asarray(value.flat[0]) if alike else None
