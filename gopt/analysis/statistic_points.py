"""How statistics are combined over ranks: a record of the program and of its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from gopt.documents.records import OPTIONAL, Dimension, Positive, one_of
from gopt.ir.graph import Node
from gopt.ir.graph_index import walk


@dataclass(frozen=True, slots=True)
class Ring:
    """Row indices, equal on all ranks: each rank's rows are ``step`` behind the rows of the rank before.

    ``pointer``: the state from which rows are counted; ``wraps``: indices are taken modulo ``rows``."""

    pointer: str
    """The places are counted from this state."""
    step: Positive
    """Each rank's rows lie so many places behind the rows of the rank before."""
    rows: Positive
    """The ring has so many rows."""
    wraps: bool
    """The places are taken modulo the rows."""


@dataclass(frozen=True, slots=True)
class StatisticPoint:
    """A value of each rank's own batch, reduced over the ranks before a statistic reads the value."""

    value: str
    """The value of the source has this name."""
    reduce: Annotated[str, one_of("mean", "sum", "max", "min", "gather")]
    """The value is reduced over the ranks by this operation; gather joins the rows of all ranks, in their order."""
    axis: Dimension = field(default=0, metadata=OPTIONAL)
    """The rows that are gathered lie along this dimension; the key is absent when it is the first."""
    ring: Ring | None = field(default=None, metadata=OPTIONAL)
    """The value holds the places of rows in a ring, equal on all ranks; the key is absent for any other value."""


@dataclass(frozen=True, slots=True)
class RowQueue:
    """A queue: ``value`` joins the gathered rows, in ``front`` or not, and the newest of the rows ``old`` as far as
    there is room; all along ``axis``."""

    value: str
    """This value of the source joins the rows with the old ones."""
    old: str
    """This value of the source holds the old rows."""
    axis: Dimension
    """The rows lie along this dimension."""
    front: bool
    """New rows come first in the queue, and not last."""


@dataclass(frozen=True, slots=True)
class StatisticReduction:
    """``rule``: ``mean``, ``sum``, ``max``, ``min``, ``root`` or ``local``, or several of these joined by ``+``.

    ``points``: the values reduced by ranks; behind the points every rank computes the new value alike. Without points
    the new values themselves are combined."""

    tensor: str
    """The statistic is the state of the source of this name."""
    rule: str
    """The rule is mean, sum, max, min, gather, root or local, or several of these joined by a plus sign where several
    values are reduced."""
    points: tuple[StatisticPoint, ...] = field(default=(), metadata=OPTIONAL)
    """The values in this list are reduced or gathered over the ranks, and every rank makes the new value of them; the
    key is absent when the new values themselves are combined. Each item is one value that is reduced."""
    queue: RowQueue | None = field(default=None, metadata=OPTIONAL)
    """The points are rows of a queue, which drops its oldest; the key is absent for any other statistic."""

    @property
    def cut(self) -> list[str]:
        """The values behind which every rank computes the new value alike."""
        return [self.queue.value] if self.queue is not None else [point.value for point in self.points]


def path_nodes(
    nodes: Iterable[Node], producers: Mapping[str, Node], points: Collection[str], updated: str
) -> list[Node]:
    """The nodes from some values to a new value that depends on them, in order."""
    behind = set(points)

    def following(name: str) -> Sequence[str]:
        return producers[name].reads if name in producers and name not in points else ()

    inside = {id(producers[name]) for name in walk([updated], following) if name in producers and name not in points}
    path: list[Node] = []
    for node in nodes:
        if id(node) in inside and not behind.isdisjoint(node.reads):
            behind.update(node.outputs)
            path.append(node)
    return path
