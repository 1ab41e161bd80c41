"""Chooses how a node is split along an axis: the cheapest of the strategies its links allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import SPMD, Graph, Node
from gopt.ir.types import nbytes
from gopt.operators.kinds import RESHAPES
from gopt.records.placements import REPLICATED, Partial, Placement, Shard, WindowTerms
from gopt.spmd.links import Slot, Strategy, strategies
from gopt.tensor_parallel.cost import Cost, Packed
from gopt.tensor_parallel.forward import COLUMN_PRODUCTS
from gopt.tensor_parallel.mappings import described_as, is_mapping
from gopt.tensor_parallel.other_axes import OtherAxes
from gopt.tensor_parallel.tokens import Tokens
from gopt.tensor_parallel.window_nodes import Windows

Weight: TypeAlias = tuple[float, int]
"""Cost of a strategy, and its number of calls, which breaks ties."""
FREE: Weight = (0.0, 0)
_WEIGHT = 1000.0
"""Weight of a byte of a sharded parameter that would be gathered: it was sharded so that no member holds it whole."""


@dataclass(slots=True)
class StrategyChooser:
    """Chooses strategies. ``weights``: states, and values computed from them alone; ``wanted``: required placements of
    the step's results."""

    graph: Graph
    constants: Constants
    cost: Cost
    tokens: Tokens | None
    others: OtherAxes
    windows: Windows
    weights: set[str]
    wanted: Mapping[str, Placement]
    packed: Packed | None = field(init=False)
    """Values whose calls are packed with others; None where the cost is in bytes."""

    def __post_init__(self) -> None:
        self.packed = Packed.of(self.graph) if self.cost.link is not None else None

    def cheapest(self, node: Node, placements: Sequence[Placement]) -> Strategy:
        """Return the cheapest strategy allowed by the operands' placements or by required results; where no such
        strategy is free, strategies with activations sharded by tokens count too. A product is always split, whatever
        the traffic: members share its work."""
        whole = Strategy((REPLICATED,) * len(placements), (REPLICATED,) * len(node.outputs))
        options = self._options(node, [(Slot(index), placement) for index, placement in enumerate(placements)])
        options += self._options(node, self._aims(node))
        best, least = self._least(node, placements, options)
        if least > FREE and self.tokens is not None:
            may = [
                (Slot(index), shard) for index, (name, placement) in enumerate(zip(node.inputs, placements))
                for shard in self.tokens.shards(self.graph.type_of(name), placement, self.others.of(name))
            ]  # fmt: skip
            best, least = self._least(node, placements, [*options, *self._options(node, may)])
        if best is not None and (node.is_in(COLUMN_PRODUCTS) or least <= self._weigh(node, placements, whole)):
            return best
        return whole

    def aimed(self, node: Node) -> bool:
        """Return whether a result is required to be sharded."""
        return bool(self._aims(node))

    def _aims(self, node: Node) -> list[tuple[Slot, Placement]]:
        aims = [(Slot(index, True), self.wanted.get(name)) for index, name in enumerate(node.outputs)]
        return [(slot, placement) for slot, placement in aims if isinstance(placement, Shard)]

    def _options(self, node: Node, placed: Sequence[tuple[Slot, Placement]]) -> list[Strategy]:
        """Return the strategies with one of these placements, allowed by other axes."""
        shards = [(slot, placement) for slot, placement in placed if isinstance(placement, Shard)]
        unique: dict[Strategy, None] = {}
        if is_mapping(node, self.others.axes):
            count = len(node.inputs)
            unique = dict.fromkeys(
                Strategy((shard,) * count, (shard,)) for _, shard in shards if self.others.adds(node, shard)
            )
        elif shards:
            described = described_as(node, self.graph, self.constants)
            if described is not None:
                for slot, shard in shards:
                    unique.update(dict.fromkeys(strategies(described, slot, shard)))
        return [way for way in unique if not (way.masked and node.domain == SPMD) and self.fit(node, way)]

    def fit(self, node: Node, strategy: Strategy) -> bool:
        """Return whether all parts nest with the parts of other axes, and a reshape can tell dimensions apart."""
        reshapes = node.is_in(RESHAPES)
        for operand in (*strategy.operands, *strategy.results):
            if isinstance(operand, Shard) and operand.alone and (reshapes or operand.runs > 1):
                return False
        return self.others.fit(zip((*node.inputs, *node.outputs), (*strategy.operands, *strategy.results)))

    def _least(
        self, node: Node, placements: Sequence[Placement], options: Sequence[Strategy]
    ) -> tuple[Strategy | None, Weight]:  # fmt: skip
        """Return the cheapest option and the cost; the first of equals."""
        best, least = None, (float("inf"), 0)
        for option in options:
            cost = self._weigh(node, placements, option)
            if cost < least:
                best, least = option, cost
        return best, least

    def _weigh(self, node: Node, placements: Sequence[Placement], option: Strategy) -> Weight:
        """Return the cost of a strategy: of bringing operands and results to the placements, and of completing partial
        sums."""
        costs = [self._moved(node, name, a, b) for name, a, b in zip(node.inputs, placements, option.operands) if name]
        for name, placement in zip(node.outputs, option.results):
            aim = self.wanted.get(name)
            if isinstance(placement, WindowTerms):
                costs.append(self._priced(node, name, placement, self.windows.part(placement)))
            elif isinstance(aim, Shard) and isinstance(placement, Shard):
                costs.append(self._priced(node, name, placement, aim))
            elif isinstance(placement, Partial):
                costs.append(self._priced(node, name, placement, REPLICATED))
        return sum(costs), sum(cost > 0 for cost in costs)

    def _moved(self, node: Node, name: str, before: Placement, after: Placement) -> float:
        cost = self._priced(node, name, before, after)
        return cost * _WEIGHT if name in self.weights and isinstance(before, Shard) else cost

    def _priced(self, node: Node, name: str, before: Placement, after: Placement) -> float:
        packed = self.packed is not None and self.packed.has(name, node.phase)
        return self.cost.of(before, after, self.nbytes(name), packed=packed)

    def nbytes(self, name: str) -> int:
        """Return the bytes of a whole value."""
        type = self.graph.type_of(name)
        return nbytes(type.dtype, max(type.elements, 1))
