"""Groups updates of equal structure, dtypes and scalar operands, and orders their states."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

from gopt.analysis.state_order import StateOrder
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import control_flow, record_of


def assign_classes(training: TrainingGraph, updates: Updates, unowned: Sequence[Node] = ()) -> None:
    """Bring the states of every subgraph in order, and give every split subgraph an equivalence class. ``unowned``:
    known nodes of the update outside of every subgraph."""
    numbering, order = _ValueNumbering(training, updates, unowned), StateOrder(training.graph)
    classes: dict[Hashable, tuple[list[int], int]] = {}
    """Structure of an update with its states as listed -> their order, by their places, and its class."""
    for subgraph in updates.subgraphs.values():
        if subgraph.mode is not UpdateMode.SPLIT:
            order.sort(subgraph)
            continue
        keys, outside = numbering.structure(subgraph)
        structure, listed = (keys, *map(order.leaf, outside)), subgraph.states
        if structure not in classes:
            order.sort(subgraph)
            permutation = [next(at for at, old in enumerate(listed) if old is state) for state in subgraph.states]
            classes[structure] = permutation, numbering.numbers.of_key(numbering.structure(subgraph)[0])
        permutation, subgraph.equivalence_class = classes[structure]
        subgraph.states = [listed[position] for position in permutation]


class ValueNumbers:
    """Numbers values: equal numbers for the same function of the same leaves. ``maker``: the producer of a value, None
    for a leaf; ``leaf``: the key of a leaf; ``root``: an equal value, for each value; ``numbers``: the numbers of keys,
    for several readings of leaves."""

    def __init__(
        self, maker: Callable[[str], Node | None], leaf: Callable[[str], Hashable], root: Callable[[str], str] = str,
        numbers: dict[Hashable, int] | None = None,
    ) -> None:  # fmt: skip
        self._maker, self._leaf, self._root = maker, leaf, root
        self._numbers = {} if numbers is None else numbers
        self._values = {"": -1}

    def of_key(self, key: Hashable) -> int:
        """The number of all values with an equal key."""
        return self._numbers.setdefault(key, len(self._numbers))

    def of_value(self, name: str) -> int:
        stack = [self._root(name)]
        while stack:
            top = stack[-1]
            if top in self._values:
                stack.pop()
                continue
            node = self._maker(top)
            if node is None or control_flow(node):
                self._values[top] = self.of_key(self._leaf(top))
                continue
            operands = [self._root(operand) for operand in node.inputs]
            missing = [operand for operand in operands if operand not in self._values]
            if missing:
                stack.extend(missing)
                continue
            key = signature(node), tuple(self._values[operand] for operand in operands), node.outputs.index(top)
            self._values[top] = self.of_key(key)
        return self._values[self._root(name)]


class _ValueNumbering:
    """Numbers for values and subgraphs: equal numbers mean equal by structure."""

    def __init__(self, training: TrainingGraph, updates: Updates, unowned: Sequence[Node]) -> None:
        self.graph = training.graph
        self.updates = updates
        self.numbers = ValueNumbers(self._producer, self._leaf)
        self._signs = dict(
            leaf for reduction in updates.scalar_reductions.values() for leaf in reduction.leaves.items()
        )
        """Reduction output -> its sign in a sum."""
        self._opaque = self._signs.keys() | set(training.gradients.values())

        self._outside = {name: node for node in unowned for name in node.outputs}
        self._given = self.graph.inputs.keys() | self.graph.initializers.keys()

    @cached_property
    def _inside(self) -> dict[str, Node]:
        """The producers of values of the update: scalars seldom depend on such a value."""
        nodes = self.graph.nodes
        return {name: node for node in nodes if node.phase is Phase.UPDATE for name in node.outputs}

    def _producer(self, name: str) -> Node | None:
        """The node of the update that makes a value; None of a gradient, and of a partial value to be reduced."""
        if name in self._opaque:
            return None
        node = self._outside.get(name)
        return node if node is not None or name in self._given else self._inside.get(name)

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
                keys.append(("into", *((reduction_of.get(name), self._signs.get(name)) for name in node.outputs)))
            for name in node.outputs:
                local[name] = count
                count += 1
        keys.append(tuple(local.get(state.updated) for state in subgraph.states))
        return tuple(keys), outside

    def _operand(self, name: str, outside: list[str]) -> Hashable:
        """A number for a value from outside of a subgraph; a value of more than one element is added to ``outside``."""
        type = self.graph.type_of(name)
        if type.static and type.elements == 1:
            return ("scalar", self.numbers.of_value(name))
        outside.append(name)
        return ("outside", type.dtype)


def signature(node: Node) -> Hashable:
    """Operator and attributes of a node, for comparing."""
    if node.encoded is not None:
        attributes: Hashable = node.attribute_bytes()
    else:
        attributes = tuple(sorted((key, repr(value)) for key, value in node.attributes.items()))
    return (node.domain, node.op_type, attributes)
