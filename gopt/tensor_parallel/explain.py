"""Explains a placement: the chain of nodes and operands from a value back to a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.errors import OptionError
from gopt.ir.graph import Graph
from gopt.records.placements import Placement, Replicated
from gopt.text.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class PlacementOrigin:
    """The node that placed a value, and the deciding operand, or ''."""

    node: str
    operand: str


@dataclass(slots=True)
class Explanation:
    """The placements along an axis, and the reasons. ``reasons``: why parameters are split; ``converted``: value -> the
    results of the mappings."""

    axis: str
    graph: Graph
    placements: Mapping[str, Placement]
    reasons: Mapping[str, str]
    origins: dict[str, PlacementOrigin] = field(default_factory=dict)
    converted: dict[str, list[str]] = field(default_factory=dict)

    def lines(self, value: str) -> list[str]:
        """Return the chain from a value back to a choice, one line a value; raises OptionError for a value that is not
        in the step."""
        if value not in self.graph.types:
            hint = did_you_mean(value, self.graph.types) or "gopt inspect MODEL --text lists the values"
            raise OptionError(f"the step has no value {value!r}", hint)
        lines = [self._line(value)]
        for name in self.converted.get(value, ()):
            lines.append(f"  readers get {name}: {self._placed(name)}")
        names = {value}
        while (origin := self.origins.get(value)) is not None and origin.operand and origin.operand not in names:
            value = origin.operand
            names.add(value)
            lines.append(f"by {origin.node}, from {self._line(value)}")
        return lines

    def _line(self, value: str) -> str:
        why = f" ({self.reasons[value]})" if value in self.reasons else ""
        return f"{value}, {self.graph.type_of(value)}: {self._placed(value)}{why}"

    def _placed(self, value: str) -> str:
        placement = self.placements.get(value, Replicated())
        return f"{placement} along {self.axis}"
