"""Updates that are one function of their own values: one of them is recognised for all.

As the classes of ``analysis.isomorphism``, but a one-element state that an update reads, such as a step counter of its
own, counts by its place and not by its name. Hyper-parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from gopt.analysis.isomorphism import signature
from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import control_flow
from gopt.offline.optimizer.probe_harness import ProbeHarness


@dataclass(frozen=True, slots=True)
class UpdateClass:
    """``key``: equal for updates that are one function; ``scalars``: the one-element values that follow states of one
    element, in an order that is the same for all updates of a key."""

    key: Hashable
    scalars: tuple[str, ...]

    def counterpart(self, name: str, other: UpdateClass) -> str:
        """Return the value of ``other`` that corresponds to ``name``, a value of this update."""
        return other.scalars[self.scalars.index(name)] if name in self.scalars else name


class UpdateClasses:
    """Finds the classes of one step's updates."""

    def __init__(self, harness: ProbeHarness) -> None:
        self._harness = harness
        self._numbers: dict[Hashable, int] = {}
        self._fixed: dict[str, int] = {}
        """Numbers of values that follow no state: they are the same in all updates."""
        self._of_class: dict[int, UpdateClass] = {}

    def of(self, subgraph: UpdateSubgraph, start: str) -> UpdateClass:
        """The class of an update that begins at ``start``, the gradient behind casts and clips."""
        number = subgraph.equivalence_class
        if number in self._of_class:
            return self._of_class[number]
        found = _Numbering(self._harness, self._numbers, self._fixed).update_class(subgraph, start)
        if number >= 0:
            self._of_class[number] = found
        return found


class _Numbering:
    """Numbers of the values of one update; those of values that follow no state are shared with other updates."""

    def __init__(self, harness: ProbeHarness, numbers: dict[Hashable, int], fixed: dict[str, int]) -> None:
        self._harness, self._numbers, self._fixed = harness, numbers, fixed
        self._own: dict[str, int] = {}
        self._scalars: list[str] = []

    def update_class(self, subgraph: UpdateSubgraph, start: str) -> UpdateClass:
        type_of = self._harness.graph.type_of
        keys: list[Hashable] = [(state.kind, type_of(state.tensor).dtype) for state in subgraph.states]
        self._own.update({state.tensor: self._number(("state", n)) for n, state in enumerate(subgraph.states)})
        self._own[start] = self._own[subgraph.gradient] = self._number("gradient")
        keys += [subgraph.mode, start == subgraph.gradient, type_of(start).dtype]
        for node in subgraph.nodes:
            keys.append(self._node(node, [self._value(name) if name else -1 for name in node.inputs]))
            self._own.update({name: self._number((keys[-1], slot)) for slot, name in enumerate(node.outputs)})
        keys.append(tuple(self._value(state.updated) for state in subgraph.states))
        return UpdateClass(tuple(keys), tuple(self._scalars))

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _node(self, node: Node, operands: list[int]) -> Hashable:
        return signature(node), tuple(operands)

    def _value(self, name: str) -> int:
        """The number of a value that the update reads; without recursion, because a schedule may be a long chain."""
        harness, stack = self._harness, [name]
        while stack:
            top = stack[-1]
            known = self._own.get(top, self._fixed.get(top))
            if known is not None:
                stack.pop()
                continue
            states = harness.inputs_behind(top) - harness.hyper
            node = harness.producers.get(top)
            if node is None or top in harness.owners.reduced or top in harness.owners.full or control_flow(node):
                key = self._leaf(top)
            else:
                missing = [x for x in node.reads if x not in self._own and x not in self._fixed]
                if missing:
                    stack.extend(missing)
                    continue
                operands = [self._own[x] if x in self._own else self._fixed[x] if x else -1 for x in node.inputs]
                key = (self._node(node, operands), node.outputs.index(top))
            (self._own if states else self._fixed)[top] = self._number(key)
            if states:
                self._scalars.append(top)
        return self._own[name] if name in self._own else self._fixed[name]

    def _leaf(self, name: str) -> Hashable:
        """A state by its place among those that the update has met, a small constant by its value, else a name."""
        harness = self._harness
        if name in harness.inputs and name not in harness.hyper:
            return "scalar state", len(self._scalars), str(harness.graph.type_of(name))
        if harness.is_constant(name) and (value := harness.constant(name)) is not None:
            return "constant", str(harness.graph.type_of(name).dtype), value.shape, value.tobytes()
        return "value", name
