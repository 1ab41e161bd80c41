"""The order of an update's states: by structure, so that equal updates have equal orders."""

from __future__ import annotations

import zlib

from gopt.analysis.training import State
from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.graph import Graph

SMALL = 64
"""Bytes of constants that count by value."""


class StateOrder:
    """Orders the states of an update, after the parameter, by the way each is updated, not by the file's order.

    Equal updates thus have equal orders of states, and form one class. States whose updates look alike are ordered by
    the update's first read of each. Each distinct look is computed once for all updates."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._leaves: dict[str, int] = {}
        """Value that no update makes, and that is no state of it -> a checksum of what is stored, if that is small."""
        self._kinds: dict[tuple[str, str], int] = {}
        self._checksums: dict[tuple[str, tuple[int, ...]], int] = {}
        """Operator and checksums of its operands -> checksum of its first result."""

    def sort(self, subgraph: UpdateSubgraph) -> None:
        """Bring the states of an update in order."""
        if len(subgraph.states) < 3:
            return
        kinds = {state.tensor: self._kind(state) for state in subgraph.states}
        looks: dict[str, tuple[int, int]] = {}
        """Value -> depth of what makes it from gradient and states, and a checksum of its structure."""
        read: dict[str, int] = {}
        for position, node in enumerate(subgraph.nodes):
            depth = 0
            operands: list[int] = []
            for name in node.reads:
                look = looks.get(name)
                if look is not None:
                    operands.append(look[1])
                    if look[0] > depth:
                        depth = look[0]
                elif name in kinds:
                    operands.append(kinds[name])
                    read.setdefault(name, position)
                else:
                    operands.append(self.leaf(name))
            checksum = self._checksum(node.op_type, operands)
            for slot, name in enumerate(node.outputs):
                looks[name] = depth + 1, checksum + slot
        rest = sorted(
            subgraph.states[1:],
            key=lambda state: (*looks.get(state.updated, (0, 0)), read.get(state.tensor, len(subgraph.nodes))),
        )
        subgraph.states = [subgraph.states[0], *rest]

    def _checksum(self, op_type: str, operands: list[int]) -> int:
        key = op_type, tuple(operands)
        checksum = self._checksums.get(key)
        if checksum is None:
            checksum = self._checksums[key] = zlib.crc32(f"{op_type} {operands}".encode())
        return checksum

    def _kind(self, state: State) -> int:
        key = state.kind.value, self.graph.types[state.tensor].dtype
        checksum = self._kinds.get(key)
        if checksum is None:
            checksum = self._kinds[key] = zlib.crc32(" ".join(key).encode())
        return checksum

    def leaf(self, name: str) -> int:
        """A checksum of a value from outside of the update: of a small stored value, else 0."""
        checksum = self._leaves.get(name)
        if checksum is None:
            tensor = self.graph.initializers.get(name)
            if tensor is None or tensor.nbytes > SMALL or tensor.external:
                checksum = 0
            else:
                checksum = zlib.crc32(tensor.numpy().tobytes())
            self._leaves[name] = checksum
        return checksum
