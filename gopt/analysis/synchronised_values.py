"""Values averaged by ranks in forward and backward: a record of the program and of its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gopt.documents.records import key
from gopt.ir.graph import Graph
from gopt.ir.graph_index import walk


@dataclass(frozen=True, slots=True)
class CorrectedConstant:
    """A constant of the batch's size: node ``output`` reads ``constant``, equal to ``value`` for the large batch."""

    output: str
    """The node that makes the value of this name reads the constant."""
    constant: str
    """The constant has this name in the source."""
    value: float
    """The node reads this number in the place of the constant."""


@dataclass(frozen=True, slots=True)
class SynchronisedValues:
    """Values averaged over the ranks at the point of computation, and constants that depend on the number of
    samples."""

    points: tuple[str, ...] = field(default=(), metadata=key("values"))
    """The values of the source in this list are averaged over all ranks that see different data as soon as they are
    made, for all nodes that read them. Each item is the name of a value of the source."""
    corrected: tuple[CorrectedConstant, ...] = field(default=(), metadata=key("constants"))
    """The list has the constants of the source that follow the number of samples, and what they are for the samples of
    all ranks. Each item is one constant as one node reads it."""


def as_read(graph: Graph, values: Sequence[str]) -> list[str]:
    """Return values of a step that is split, in the layouts in which nodes of the source read them."""
    users = graph.users() if values else {}

    def layouts(name: str) -> list[str]:
        return [output for node in users.get(name, ()) if node.added for output in node.outputs]

    result: dict[str, None] = {}
    for value in values:
        read = [name for name in walk([value], layouts) if not all(node.added for node in users.get(name, ()))]
        result |= dict.fromkeys(read or [value])
    return list(result)
