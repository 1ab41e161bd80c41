"""The result of propagation along an axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gopt.ir.graph import Graph
from gopt.records.placements import Placement
from gopt.tensor_parallel.explain import PlacementOrigin


@dataclass(slots=True)
class Propagated:
    """A graph with a placement for every value along an axis. Types are logical; mappings are nodes."""

    graph: Graph
    placements: dict[str, Placement]
    conversions: Counter[str] = field(default_factory=Counter)
    origins: dict[str, PlacementOrigin] = field(default_factory=dict)
    """Sharded or partial value -> the node that placed it."""
    converted: dict[str, list[str]] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    """Label of a node that all members compute whole although an operand was sharded -> bytes of its results."""
