"""Facts about a step before its gradients are found: states, losses, forward, batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from gopt.analysis.gradient_needs import multiplied, without_needs
from gopt.analysis.role_map import RoleMap
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, copy_chain, descendants
from gopt.ir.node_kinds import elementwise, random
from gopt.operators.kinds import CASTS, MASKS, MAY_DRAW, RELAYS, SCALES, SIZES, SUMS

_LINEAR = RELAYS | SUMS | {"Neg"}
_NEAR = 16


class StepSkeleton:
    """A candidate interpretation of a step with fixed state pairs and ends of the forward.

    ``roots``: the scalars computed by the forward, losses and shown scalars.

    ``updated``: state -> new value, in the order of the inputs; ``replaces``: the inverse; ``forward``: nodes by id,
    and ``forward_values`` all values that the forward reads; ``batch``: inputs, and ``tainted`` values that
    depend on the batch or a random node. ``reach``: output -> inputs of the same type read element by element, with
    distances, where outputs were paired with inputs by distance."""

    def __init__(
        self,
        index: GraphIndex,
        pairs: Mapping[str, str],
        roots: tuple[str, ...],
        roles: RoleMap,
        reach: Mapping[str, Mapping[str, int]],
    ) -> None:
        self.index, self.roots, self.roles, self.reach = index, roots, roles, reach
        graph = index.graph
        order = {name: position for position, name in enumerate([*graph.inputs, *graph.initializers])}
        self.updated = dict(sorted(((name, output) for output, name in pairs.items()), key=lambda p: order[p[0]]))
        self.replaces = {output: name for name, output in self.updated.items()}
        self.forward, self.forward_values = ancestors(index, roots)
        self.random = [node for node in graph.nodes if node.op_type in MAY_DRAW and random(node)]
        self.batch = [name for name in graph.inputs if self._is_batch(name)]
        beside = self._beside_samples()
        self.batch = [name for name in graph.inputs if name in beside or name in self.batch] if beside else self.batch
        sources = [*self.batch, *(name for node in self.random for name in node.outputs)]
        self.tainted = descendants(index, sources)

    @cached_property
    def sizes(self) -> set[str]:
        """Values of ``tainted`` that are made of sizes of the batch alone, which are alike on all ranks."""
        found: set[str] = set()
        for node in self.index.graph.nodes:
            read = self.tainted.intersection(node.reads)
            if read and (node.is_in(SIZES) or read <= found):
                found.update(node.outputs)
        return found

    @cached_property
    def lacking(self) -> dict[str, str]:
        """States that follow the batch and hold no gradient of a loss -> an input upstream of every gradient."""
        return self.lacking_of(self.roots)

    def lacking_of(self, losses: Iterable[str]) -> dict[str, str]:
        """``lacking`` for these losses, with other roots only shown."""
        needs = without_needs(self.index, self.forward, losses, self.batch, self.updated)
        return {name: lost for name, lost in needs.items() if name not in self.roles.params}

    def without_backward(self, losses: Iterable[str], gradients: Mapping[str, str]) -> dict[str, str]:
        """Of the values taken for gradients, few nodes behind the forward, the values that lack an input upstream of
        every gradient: a running mean of activations is made of all operands of the loss, and contains no derivative.

        State -> input that the value lacks."""
        near = {
            name: multiplied(self.index, value) for name, value in gradients.items()
            if name not in self.roles.params and self.may_average(name, value)
        }  # fmt: skip
        if not near:
            return {}
        needs = without_needs(self.index, self.forward, losses, self.batch, {**self.updated, **near})
        return {name: lost for name, lost in needs.items() if name in near}

    def may_average(self, name: str, value: str) -> bool:
        """Return whether a value may be no gradient, but what a state averages, or keeps rows of: few nodes stand
        between the forward and the value, and the new value is a sum of the value and the old one."""
        return self._near_forward(value) and self._averaged(name, value)

    def _averaged(self, name: str, value: str) -> bool:
        """Return whether the new value of a state is a sum of the old value and of another value, each times numbers
        without the state: a derivative's own factors, such as a softmax's, may stand behind the cut."""
        behind, averaged = {value}, {name}
        update = self._update_behind(name, value)
        for node in sorted(update or (), key=lambda node: self.index.position[id(node)]):
            operands = [name for name in node.reads if name not in behind]
            if not averaged.isdisjoint(node.reads):
                averaged.update(node.outputs)
            if len(operands) == len(node.reads):
                continue
            scaled = node.is_in(SCALES) and len(operands) == 1 and operands[0] not in averaged
            if not (scaled or node.is_in(_LINEAR)):
                return False
            behind.update(node.outputs)
        return update is not None

    def _update_behind(self, name: str, value: str) -> list[Node] | None:
        """The nodes upstream of a state's new value, along paths that stop at ``value``; None for more nodes than an
        average has."""
        stack, nodes = [self.updated[name]], dict[int, Node]()
        while stack:
            value_name = stack.pop()
            node = None if value_name == value else self.index.producers.get(value_name)
            if node is None or id(node) in nodes:
                continue
            if len(nodes) == _NEAR * _NEAR:
                return None
            nodes[id(node)] = node
            stack.extend(node.reads)
        return [*nodes.values()]

    def _near_forward(self, value: str) -> bool:
        """Return whether at most ``_NEAR`` nodes outside the forward make a value."""
        stack, visited = [value], set[int]()
        while stack and len(visited) <= _NEAR:
            node = self.index.producers.get(stack.pop())
            if node is not None and id(node) not in self.forward and id(node) not in visited:
                visited.add(id(node))
                stack.extend(node.reads)
        return len(visited) <= _NEAR

    def is_statistic(self, name: str) -> bool:
        """Return whether a state follows the batch without a gradient, by the user's word or by a lacking input."""
        return name in self.roles.statistics or name in self.lacking

    def _is_batch(self, name: str) -> bool:
        if name in self.updated:
            return False
        if name in self.roles.batch:
            return True
        graph = self.index.graph
        if name not in self.forward_values or name in graph.initializers or graph.inputs[name].shape == ():
            return False
        return not self._is_mask(name)

    def _beside_samples(self) -> set[str]:
        """Inputs outside of the forward with a value for each sample: such inputs meet values of the forward along the
        samples, as weights of a running mean do."""
        graph = self.index.graph
        placed = {*self.forward_values, *self.updated, *graph.initializers}
        rest = [name for name in graph.inputs if name not in placed]
        samples = {(graph.inputs[name].shape or (None,))[0] for name in self.batch}
        rest = [name for name in rest if (graph.inputs[name].shape or (None,))[0] in samples - {1, None}]
        tainted = descendants(self.index, self.batch) if rest else set[str]()
        values = set()
        for name in rest:
            size = (graph.inputs[name].shape or (None,))[0]
            named = isinstance(size, str) and name in self.index.users
            if named or any(self._meets_samples(value, size, tainted) for value in self._layouts(name)):
                values.add(name)
        return values

    def _layouts(self, name: str) -> list[str]:
        """A value, and the results of layout operators and casts on the value."""
        values = [name]
        for value in values:
            for node in self.index.users.get(value, ()):
                if len(values) < _NEAR and node.is_in(RELAYS):
                    values += node.outputs
        return values

    def _meets_samples(self, name: str, size: object, tainted: set[str]) -> bool:
        """Return whether a node joins a value element by element with a value of the forward that follows the batch, of
        the same rank and number of rows."""
        types = self.index.graph.types
        for node in self.index.users.get(name, ()):
            operands = [name for name in node.inputs if name in tainted and name in self.forward_values]
            shapes = [types[operand].shape for operand in (name, *operands) if operand in types]
            alike = {(*(shape or ())[:1], len(shape or ())) for shape in shapes}
            if elementwise(node) and operands and alike == {(size, len(shapes[0] or ()))}:
                return True
        return False

    def _is_mask(self, name: str) -> bool:
        """Return whether an input masks a parameter in the forward and in the update: all ranks have the same mask.

        The forward reads the mask beside a parameter of the same shape alone. One more reader would be the backward's;
        a second reader is the update, which may read nothing that differs from rank to rank."""
        users = self._past_casts(name)
        if not all(node.is_in(MASKS) for node, _ in users):
            return False
        types = self.index.graph.types
        forward = [(node, read) for node, read in users if id(node) in self.forward]
        read_beside = (name for node, read in forward for name in node.inputs if name != read)
        masked = [copy_chain(self.index.producers, name, CASTS)[-1] for name in read_beside]
        tensors = [tensor for tensor in masked if tensor in self.updated or not self.index.one_element(tensor)]
        alike = all(tensor in self.updated and types[tensor].shape == types[name].shape for tensor in tensors)
        return bool(tensors) and alike and len(users) - len(forward) > 1

    def _past_casts(self, name: str) -> list[tuple[Node, str]]:
        """Return the readers of a value or of a cast of the value, each with the name read."""
        readers: list[tuple[Node, str]] = []
        for node in self.index.users.get(name, []):
            readers += self._past_casts(node.outputs[0]) if node.is_in(CASTS) else [(node, name)]
        return readers
