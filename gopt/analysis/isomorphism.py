"""Groups updates of equal structure, dtypes and scalar operands, and orders their states."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from gopt.analysis.state_order import StateOrder
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import control_flow, record_of


def assign_classes(training: TrainingGraph, updates: Updates, unowned: Sequence[Node] = ()) -> None:
    """Bring the states of every subgraph in order, and give every split subgraph an equivalence class. ``unowned``:
    known nodes of the update outside of every subgraph."""
    numbers, order = _ValueNumbering(training, updates, unowned), StateOrder(training.graph)
    classes: dict[Hashable, tuple[list[int], int]] = {}
    """Structure of an update with its states as listed -> their order, by their places, and its class."""
    for subgraph in updates.subgraphs.values():
        if subgraph.mode is not UpdateMode.SPLIT:
            order.sort(subgraph)
            continue
        keys, outside = numbers.structure(subgraph)
        structure, listed = (keys, *map(order.leaf, outside)), subgraph.states
        if structure not in classes:
            order.sort(subgraph)
            permutation = [next(at for at, old in enumerate(listed) if old is state) for state in subgraph.states]
            classes[structure] = permutation, numbers.number(numbers.structure(subgraph)[0])
        permutation, subgraph.equivalence_class = classes[structure]
        subgraph.states = [listed[position] for position in permutation]


class _ValueNumbering:
    """Numbers for values and subgraphs: equal numbers mean equal by structure."""

    def __init__(self, training: TrainingGraph, updates: Updates, unowned: Sequence[Node]) -> None:
        self.graph = training.graph
        self.updates = updates
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[str, int] = {}
        leaves = {leaf for reduction in updates.scalar_reductions.values() for leaf in reduction.leaves}
        self._opaque = leaves | set(training.gradients.values())

        self._outside = {name: node for node in unowned for name in node.outputs}
        self._given = self.graph.inputs.keys() | self.graph.initializers.keys()

    @cached_property
    def _inside(self) -> dict[str, Node]:
        """The producers of values of the update: scalars seldom depend on such a value."""
        nodes = self.graph.nodes
        return {name: node for node in nodes if node.phase is Phase.UPDATE for name in node.outputs}

    def _producer(self, name: str) -> Node | None:
        """The node of the update that makes a value."""
        node = self._outside.get(name)
        return node if node is not None or name in self._given else self._inside.get(name)

    def number(self, key: Hashable) -> int:
        """A number for all values with an equal ``key``."""
        return self._numbers.setdefault(key, len(self._numbers))

    def scalar(self, name: str) -> int:
        """A number for a one-element value: equal for the same pure function of the same inputs."""
        stack = [name]
        while stack:
            top = stack[-1]
            if top in self._values:
                stack.pop()
                continue
            node = None if top in self._opaque else self._producer(top)
            if node is None or control_flow(node):
                self._values[top] = self.number(self._leaf(top))
                continue
            missing = [x for x in node.reads if x not in self._values]
            if missing:
                stack.extend(missing)
                continue
            operands = tuple(self._values[x] if x else -1 for x in node.inputs)
            self._values[top] = self.number((signature(node), operands, node.outputs.index(top)))
        return self._values[name]

    def _leaf(self, name: str) -> Hashable:
        tensor = self.graph.initializers.get(name)
        if tensor is not None and name not in self.graph.inputs and tensor.nbytes <= 64 and not tensor.external:
            return ("constant", str(tensor.type), tensor.numpy().tobytes())
        return ("value", name)

    def structure(self, subgraph: UpdateSubgraph) -> tuple[Hashable, list[str]]:
        """A key of a split subgraph: nodes, dtypes, scalar operands, and targets of reductions; and the outside
        operands of more than one element."""
        types, reduction_of = self.graph.types, self.updates.reduction_of
        local: dict[str, Hashable] = {"": "", subgraph.gradient: "gradient"}
        """Value of the subgraph -> its number in it."""
        local.update((state.tensor, position) for position, state in enumerate(subgraph.states))
        keys: list[Hashable] = [str(types[subgraph.gradient].dtype)]
        keys += [(state.kind, types[state.tensor].dtype) for state in subgraph.states]
        count, outside = len(subgraph.states), list[str]()
        for node in subgraph.nodes:
            keys.append(signature(node))
            for name in node.inputs:
                keys.append(local[name] if name in local else self._operand(name, outside))
            if record_of(node).pieces == "mean":
                keys.append(("elements", types[node.inputs[0]].elements))  # each divides by a count of its own
            if len(node.outputs) != 1:
                keys.append(("outputs", len(node.outputs)))
            if reduction_of:
                keys.append(("into", *(reduction_of.get(name, "") for name in node.outputs)))
            for name in node.outputs:
                local[name] = count
                count += 1
        keys.append(tuple(local.get(state.updated) for state in subgraph.states))
        return tuple(keys), outside

    def _operand(self, name: str, outside: list[str]) -> Hashable:
        """A number for a value from outside of a subgraph; a value of more than one element is added to ``outside``."""
        type = self.graph.type_of(name)
        if type.static and type.elements == 1:
            return ("scalar", self.scalar(name))
        outside.append(name)
        return ("outside", type.dtype)


def signature(node: Node) -> Hashable:
    """Operator and attributes of a node, for comparing."""
    if node.encoded is not None:
        attributes: Hashable = node.attribute_bytes()
    else:
        attributes = tuple(sorted((key, repr(value)) for key, value in node.attributes.items()))
    return (node.domain, node.op_type, attributes)
