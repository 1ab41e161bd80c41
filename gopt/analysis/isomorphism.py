"""Groups updates that are equal in structure and dtypes and read the same scalar operands."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

from gopt.analysis.operators import control_flow
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import Mode, Updates, UpdateSubgraph
from gopt.ir.graph import Node


def assign_classes(training: TrainingGraph, updates: Updates) -> None:
    """Give every split subgraph its equivalence class."""
    numbers = _ValueNumbering(training, updates)
    for subgraph in updates.subgraphs.values():
        if subgraph.mode is Mode.SPLIT:
            subgraph.equivalence_class = numbers.subgraph(subgraph)


class _ValueNumbering:
    """Numbers for values and subgraphs: equal numbers mean equal by structure."""

    def __init__(self, training: TrainingGraph, updates: Updates) -> None:
        self.graph = training.graph
        self.updates = updates
        self.producers = training.graph.producers()
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[str, int] = {}
        self._operands: dict[str, Hashable] = {"": ""}
        """Operand of a subgraph that it does not make -> what stands for it."""
        leaves = {leaf for reduction in updates.scalar_reductions.values() for leaf in reduction.leaves}
        self._opaque = leaves | set(training.gradients.values())

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def scalar(self, name: str) -> int:
        """A number for a one-element value: equal for the same pure function of the same inputs."""
        stack = [] if name in self._values else [name]
        while stack:
            top = stack[-1]
            if top in self._values:
                stack.pop()
                continue
            node = self.producers.get(top)
            if node is None or node.phase is not Phase.UPDATE or top in self._opaque or control_flow(node):
                self._values[top] = self._number(self._leaf(top))
                continue
            missing = [x for x in node.reads if x not in self._values]
            if missing:
                stack.extend(missing)
                continue
            operands = tuple(self._values[x] if x else -1 for x in node.inputs)
            self._values[top] = self._number((signature(node), operands, node.outputs.index(top)))
        return self._values[name]

    def _leaf(self, name: str) -> Hashable:
        tensor = self.graph.initializers.get(name)
        if tensor is not None and name not in self.graph.inputs and tensor.nbytes <= 64 and not tensor.external:
            return ("constant", str(tensor.type), tensor.numpy().tobytes())
        return ("value", name)

    def subgraph(self, subgraph: UpdateSubgraph) -> int:
        """A number for a split subgraph: its nodes, dtypes and scalar operands, and what its reductions feed."""
        types, into = self.graph.types, self.updates.reduction_of
        number = count()
        local = {name: next(number) for name in (subgraph.gradient, *(state.tensor for state in subgraph.states))}
        """Gradient, states and values of the subgraph, numbered in order."""
        keys: list[Hashable] = [types[subgraph.gradient].dtype, tuple(local.values())]
        keys += [(state.kind, types[state.tensor].dtype) for state in subgraph.states]
        for node in subgraph.nodes:
            operands = [local[name] if name in local else self._outer(name) for name in node.inputs]
            for name in node.outputs:
                local[name] = next(number)
            if node.is_a("ReduceMean"):
                operands.append(types[node.inputs[0]].elements)  # each divides by a count of its own
            feeds = () if into.keys().isdisjoint(node.outputs) else tuple([into.get(name, "") for name in node.outputs])
            keys.append((signature(node), len(node.outputs), feeds, *operands))
        keys.append(tuple([local.get(state.updated) for state in subgraph.states]))
        return self._number(tuple(keys))

    def _outer(self, name: str) -> Hashable:
        """What stands for an operand that the subgraph does not make."""
        found = self._operands.get(name)
        if found is None:
            type = self.graph.type_of(name)
            single = type.static and type.elements == 1
            found = self._operands[name] = ("scalar", self.scalar(name)) if single else ("outside", type.dtype)
        return found


def signature(node: Node) -> Hashable:
    """Operator and attributes of a node, for comparing."""
    if node.encoded is not None:
        attributes: Hashable = node.attribute_bytes()
    else:
        attributes = tuple(sorted((key, repr(value)) for key, value in node.attributes.items()))
    return (node.domain, node.op_type, attributes)
