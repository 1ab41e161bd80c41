"""What an update is made of: the record of every parameter's cone, and of the scalars that cones share.

``cones`` finds them, ``classes`` tells which are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from gopt.analysis.training import State
from gopt.graph.model import Node


class Mode(str, Enum):
    """How a parameter's update is shared out."""

    SPLIT = "split"
    WHOLE = "whole"
    REPLICATED = "replicated"


@dataclass(slots=True)
class Cone:
    """One parameter's update. ``states`` starts with the parameter; ``outside`` lists full-shaped operands that
    every rank has; ``reductions`` the nodes that reduce a full-shaped value to one element."""

    parameter: State
    gradient: str
    states: list[State]
    nodes: list[Node] = field(default_factory=list)
    reductions: list[Node] = field(default_factory=list)
    mode: Mode = Mode.SPLIT
    why: str = "elementwise"
    whole_gradient: bool = False
    """The full reduced gradient is needed on every rank (an accumulator that stays whole reads it)."""
    likeness: int = -1
    """Split cones with the same number are equal by structure: one run serves neighbouring pieces of all of them."""

    def demote(self, mode: Mode, why: str) -> None:
        if self.mode is Mode.SPLIT or mode is Mode.REPLICATED:
            self.mode, self.why = mode, why


@dataclass(slots=True)
class Tree:
    """Scalars joined by one associative operator: ``root`` = all ``leaves`` (reductions) and ``extras`` joined."""

    root: str
    kind: str
    leaves: list[str] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)


@dataclass(slots=True)
class Updates:
    """All cones of a step in parameter order, the trees their reductions feed, and the nodes of neither."""

    cones: dict[str, Cone]
    trees: dict[str, Tree]
    tree_of: dict[str, str]
    """Reduction output -> root of its tree."""

    def replicated(self, why: str) -> Updates:
        """The same updates, run by every rank."""
        cones = {name: replace(cone, mode=Mode.REPLICATED, why=why) for name, cone in self.cones.items()}
        return replace(self, cones=cones)
