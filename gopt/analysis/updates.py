"""Records of the updates: the subgraph of every parameter, and the scalars shared by subgraphs.

``update_subgraphs`` finds the updates, ``isomorphism`` groups equal updates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import Enum

from gopt.analysis.training import State
from gopt.ir.graph import Node


class UpdateMode(str, Enum):
    """How a parameter's update is distributed."""

    SPLIT = "split"
    WHOLE = "whole"
    REPLICATED = "replicated"


@dataclass(slots=True)
class UpdateSubgraph:
    """One parameter's update. ``states`` starts with the parameter; ``outside`` lists full-shaped operands present on
    every rank; ``reductions`` the nodes that reduce a full-shaped value to one element."""

    parameter: State
    gradient: str
    states: list[State]
    nodes: list[Node] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    mode: UpdateMode = UpdateMode.SPLIT
    why: str = "elementwise"
    whole_gradient: bool = False
    """The full reduced gradient is needed on every rank (an accumulator that stays whole reads it)."""
    equivalence_class: int = -1
    """Split subgraphs with the same number are equal by structure: one run serves neighbouring pieces of all."""

    def weaken(self, mode: UpdateMode, why: str) -> None:
        if self.mode is UpdateMode.SPLIT or mode is UpdateMode.REPLICATED:
            self.mode, self.why = mode, why


@dataclass(slots=True)
class ScalarReduction:
    """Scalars joined by one associative operator: ``root`` = all ``leaves`` (reductions) and ``epilogue`` joined.

    ``leaves``: name -> sign in a sum; ``epilogue``: names with signs."""

    root: str
    kind: str
    leaves: dict[str, int] = field(default_factory=dict)
    epilogue: list[tuple[str, int]] = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Updates:
    """All subgraphs of a step in parameter order, and the scalar reductions fed by subgraphs."""

    subgraphs: dict[str, UpdateSubgraph]
    scalar_reductions: dict[str, ScalarReduction]
    reduction_of: dict[str, str]
    """Reduction output -> root of its scalar reduction."""

    def replicated(self, why: str, names: Collection[str] | None = None) -> Updates:
        """The same updates, with every update, or the updates of ``names``, run by every rank."""
        subgraphs = {
            name: replace(subgraph, mode=UpdateMode.REPLICATED, why=why) if names is None or name in names else subgraph
            for name, subgraph in self.subgraphs.items()
        }
        return replace(self, subgraphs=subgraphs)
