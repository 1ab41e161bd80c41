"""Values converted to other placements, once for all readers."""

from __future__ import annotations

from dataclasses import replace

from gopt.errors import UnsupportedError
from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Node, clone
from gopt.ir.node_kinds import order_of
from gopt.ir.operator_use import use_of
from gopt.ir.phase import Phase
from gopt.records.placements import REPLICATED, Placement, Replicated, Shard, Window
from gopt.spmd.conversions import Conversion
from gopt.spmd.links import Slot, strategies
from gopt.tensor_parallel.builder import PASS, ExpansionBuilder
from gopt.tensor_parallel.explain import PlacementOrigin
from gopt.tensor_parallel.propagated import Propagated
from gopt.tensor_parallel.strategy import StrategyChooser
from gopt.tensor_parallel.window_nodes import Windows


class ConvertedValues:
    """The values of a sweep. ``out``: gets placements, and converted values; ``weights``: states, and values computed
    from states alone; ``gradients``: values reduced by later passes; ``regather``: each phase gathers anew."""

    def __init__(
        self, build: ExpansionBuilder, out: Propagated, choose: StrategyChooser, constants: Constants, windows: Windows,
        weights: set[str], gradients: frozenset[str], *, regather: bool,
    ) -> None:  # fmt: skip
        self.build, self.out, self.choose, self.constants, self.windows = build, out, choose, constants, windows
        self.weights, self.gradients, self.regather = weights, gradients, regather
        self.graph, self.placements, self.axis = build.graph, out.placements, build.axis
        self.moves: dict[str, Node] = {}
        """Result of a node that only moves elements -> the node."""
        self._by_key: dict[tuple[str, Placement, Phase | None], str] = {}
        """(value, placement, phase) -> the name of the converted value. The phase is None unless each phase gathers
        anew, or the update reads a gradient: it gets the reduced one, and the backward keeps the rank's own."""

    def converted(self, name: str, placement: Placement) -> str:
        """Return a value in another placement, converted once for all readers."""
        before = self.placements.get(name, REPLICATED)
        if before == placement:
            return name
        key = self._key(name, placement)
        if key not in self._by_key:
            move = None if self._reads_reduced(name) else self.moves.get(name)
            behind = self._behind(move, placement) if isinstance(before, Shard) and move is not None else None
            if move is not None and behind is not None:
                self._by_key[key] = self._moved(name, move, behind, placement)
                return self._by_key[key]
            role = {Replicated: "whole", Shard: "part", Window: "window"}[type(placement)]
            count = len(self.out.converted.get(name, ()))
            output = self.named(name, f"{role}{count or ''}")
            self.count(before, placement)
            self.build.convert(name, before, placement, output)
            self.note(output, placement)
            self.out.origins[output] = PlacementOrigin("the mapping", name)
            self.out.converted.setdefault(name, []).append(output)
            if name in self.weights:
                self.weights.add(output)
            self._by_key[key] = output
        return self._by_key[key]

    def _key(self, name: str, placement: Placement) -> tuple[str, Placement, Phase | None]:
        return name, placement, self.build.phase if self.regather or self._reads_reduced(name) else None

    def _reads_reduced(self, name: str) -> bool:
        """Return whether a value is a gradient the update reads: later passes reduce it for these readers."""
        return self.build.phase is Phase.UPDATE and name in self.gradients

    def _behind(self, move: Node, placement: Placement) -> Placement | None:
        """Return the operand placement of a move for this result placement, if available or whole."""
        if isinstance(placement, Replicated):
            return REPLICATED
        if isinstance(placement, Window):
            order = order_of(move, len(self.graph.types[move.outputs[0]].dims))
            return None if order is None else replace(placement, dim=order[placement.dim])
        assert isinstance(placement, Shard)
        value, further = move.inputs[0], self.moves.get(move.inputs[0])
        for strategy in strategies(use_of(move, self.graph, self.constants), Slot(0, True), placement):
            is_made = self._key(value, strategy.operands[0]) in self._by_key
            if not self.choose.fit(move, strategy):
                continue
            if is_made or (further is not None and self._behind(further, strategy.operands[0]) is not None):
                return strategy.operands[0]
        return None

    def _moved(self, name: str, move: Node, operand: Placement, placement: Placement) -> str:
        """Return a value in another placement by moving its converted operand, converted once for all views."""
        node = clone(move)
        conversions = self.out.converted.setdefault(name, [])
        output = self.named(name, "whole" if isinstance(placement, Replicated) else "moved")
        output = f"{output}{len(conversions) or ''}" if output in self.graph.types else output
        conversions.append(output)
        node.source, node.made_by, node.encoded, node._attributes = None, PASS, None, dict(move.attributes)
        node.inputs = [self.converted(move.inputs[0], operand), *move.inputs[1:]]
        node.outputs, node.name, node.phase = [output], "", self.build.phase
        self.graph.types[output] = self.graph.types[name]
        self.build.nodes.append(node)
        self.note(output, placement)
        if name in self.weights:
            self.weights.add(output)
        return output

    def count(self, before: Placement, after: Placement) -> None:
        """Count a mapping by kind. Raises UnsupportedError without a mapping between the placements."""
        mapping = Conversion(before, after).mapping
        if mapping is None:
            raise UnsupportedError(
                f"no mapping brings a value that is {before} along {self.axis} to {after}",
                "keep the value whole: give its parameters the placement replicate",
            )
        self.out.conversions[mapping.value] += 1

    def note(self, name: str, placement: Placement) -> None:
        """Record the placement of a value; a replicated one needs none."""
        if name and not isinstance(placement, Replicated):
            self.placements[name] = placement
        self.windows.note(placement)

    def named(self, value: str, role: str) -> str:
        """Return the name of a mapping's result."""
        return f"{self.build.root}{value.removeprefix(f'gopt.{PASS}.')}.{role}"
