"""How statistics are combined over ranks: a record of the program and of its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL
from gopt.ir.graph import Node
from gopt.ir.graph_index import walk


@dataclass(frozen=True, slots=True)
class Ring:
    """Places of rows, equal on all ranks: those of each rank are ``step`` behind those of the rank before it.

    ``pointer``: the state from which they are counted; ``wraps``: they are taken modulo ``rows``.
    """

    pointer: str
    step: int
    rows: int
    wraps: bool


@dataclass(frozen=True, slots=True)
class StatisticPoint:
    """A value of each rank's own batch that is reduced over the ranks before a statistic reads it.

    ``reduce`` ``gather``: the ranks' rows are joined along ``axis``; places of a ``ring`` are computed.
    """

    value: str
    reduce: str
    axis: int = field(default=0, metadata=OPTIONAL)
    ring: Ring | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class RowQueue:
    """A queue: ``value`` joins the gathered rows, in ``front`` or not, and as many of the rows ``old`` as there is room
    for, the newest of them; all along ``axis``."""

    value: str
    old: str
    axis: int
    front: bool


@dataclass(frozen=True, slots=True)
class StatisticReduction:
    """``rule``: ``mean``, ``sum``, ``max``, ``min``, ``root`` or ``local``, or several of these joined by ``+``.

    ``points``: the values that ranks reduce; behind them every rank computes the new value alike. Without points the
    new values themselves are combined.
    """

    tensor: str
    rule: str
    points: tuple[StatisticPoint, ...] = field(default=(), metadata=OPTIONAL)
    queue: RowQueue | None = field(default=None, metadata=OPTIONAL)
    """Where the points are rows of a queue."""

    @property
    def cut(self) -> list[str]:
        """The values behind which every rank computes the new value alike."""
        return [self.queue.value] if self.queue is not None else [point.value for point in self.points]


def path_nodes(
    nodes: Iterable[Node], producers: Mapping[str, Node], points: Collection[str], updated: str
) -> list[Node]:
    """The nodes between some values and a new value that depends on them, in order."""
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
