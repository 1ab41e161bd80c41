"""Long elementwise runs in tiles that fit a cache: an update passes over its memory once, not once per operator.

A segment is split into what works on long rows of one length, element by element, and the rest. Such a run becomes one
small session with an open length, bound by address to tile after tile of its rows. A result that takes the place of an
operand is written where that lay: through a scratch tile, for the runtime does not see when an operand is still read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gopt.analysis.operators import elementwise
from gopt.graph.model import Node
from gopt.graph.types import TensorType
from gopt.runtime.cut import Segment

LENGTH = 1 << 16
"""Elements from which a run is cut into tiles."""
TILE = 1 << 15
"""Elements of a tile: a dozen float32 rows of them fit a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elementwise nodes over rows of ``length`` elements: ``rows`` and ``scalars`` are inputs of the segment."""

    segment: Segment
    length: int
    rows: tuple[str, ...]
    scalars: tuple[str, ...]


def split(segment: Segment, types: Mapping[str, TensorType]) -> list[Segment | Run]:
    """The parts of a segment in an order in which they can run; the segment itself when nothing in it is long.

    A node's turn is the number of times that work passes from rows to the rest on the way to it. Linear.
    """
    lengths = [_length(node, types) for node in segment.nodes]
    if not any(lengths):
        return [segment]
    turn: dict[str, tuple[int, bool]] = {}
    parts: dict[tuple[int, int], list[Node]] = {}
    for node, length in zip(segment.nodes, lengths):
        before = [turn[name] for name in node.reads if name in turn]
        if length:
            own = max((place for place, _ in before), default=0)
        else:
            own = max((place + in_run for place, in_run in before), default=0)
        turn.update((name, (own, bool(length))) for name in node.outputs)
        parts.setdefault((own, length), []).append(node)
    # Within a turn the rest (length 0) comes first; runs of different lengths do not read one another.
    ordered = [parts[key] for key in sorted(parts)]
    lengths = [length for _, length in sorted(parts)]
    wanted = set(segment.outputs)
    made: list[Segment | Run] = []
    for nodes, length in zip(reversed(ordered), reversed(lengths)):
        part = _part(nodes, wanted)
        wanted.update(part.inputs)
        made.append(_run(part, length, types) if length else part)
    return made[::-1]


def _length(node: Node, types: Mapping[str, TensorType]) -> int:
    """Elements of the rows on which a node works one by one; 0 for any other node."""
    if not elementwise(node) or node.captures:
        return 0
    found = set()
    for name in (*node.inputs, *node.outputs):
        type = types.get(name)
        if name and (type is None or not type.static or len(type.dims) > 1):
            return 0
        if name and type is not None and type.elements != 1:
            found.add(type.elements)
    outputs = [types[name] for name in node.outputs if name]
    if len(found) != 1 or any(type.elements == 1 for type in outputs):
        return 0
    length = found.pop()
    return length if length >= LENGTH else 0


def _part(nodes: Sequence[Node], wanted: set[str]) -> Segment:
    made = {name for node in nodes for name in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
    outputs = dict.fromkeys(name for node in nodes for name in node.outputs if name in wanted)
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))


def _run(part: Segment, length: int, types: Mapping[str, TensorType]) -> Run:
    rows = tuple(name for name in part.inputs if types[name].elements == length)
    return Run(part, length, rows, tuple(name for name in part.inputs if name not in rows))
