"""How statistics are combined over ranks: a record of the program and of its manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL
from gopt.ir.graph import Node


@dataclass(frozen=True, slots=True)
class StatisticPoint:
    """A value of each rank's own batch that is reduced over the ranks before a statistic reads it."""

    value: str
    reduce: str


@dataclass(frozen=True, slots=True)
class StatisticReduction:
    """``rule``: ``mean``, ``sum``, ``max``, ``min``, ``root`` or ``local``, or several of these joined by ``+``.

    ``points``: the values that ranks reduce; behind them every rank computes the new value alike. Without points the
    new values themselves are combined.
    """

    tensor: str
    rule: str
    points: tuple[StatisticPoint, ...] = field(default=(), metadata=OPTIONAL)


def path_nodes(
    nodes: Iterable[Node], producers: Mapping[str, Node], points: Collection[str], updated: str
) -> list[Node]:
    """The nodes between some values and a new value that depends on them, in order."""
    behind, stack, seen = set(points), [updated], set()
    inside: dict[int, Node] = {}
    while stack:
        name = stack.pop()
        node = producers.get(name)
        if name in seen or name in behind or node is None:
            continue
        seen.add(name)
        inside[id(node)] = node
        stack.extend(node.reads)
    path: list[Node] = []
    for node in nodes:
        if id(node) in inside and not behind.isdisjoint(node.reads):
            behind.update(node.outputs)
            path.append(node)
    return path
