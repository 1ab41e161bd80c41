"""Statistics that keep rows of single samples: queues, rings that a pointer walks through, tables written by sample.

In the step of the large batch the rows of all ranks are written, in rank order. Ranks gather their rows before the
node that writes rows; every rank computes all later values alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gopt.analysis.coupling.context import CouplingContext, axis_of
from gopt.analysis.coupling.marks import Mark, Untraceable
from gopt.analysis.coupling.open_statistics import ROWS, Unclear
from gopt.analysis.coupling.ring_places import places, pointer_of
from gopt.analysis.coupling.sample_counts import SampleCounts, may_count
from gopt.analysis.statistic_points import Ring, RowQueue, StatisticPoint, StatisticReduction
from gopt.analysis.training import State, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import ancestors
from gopt.ir.node_kinds import elementwise, record_of
from gopt.operators.kinds import COPIES, LAYOUT, PARTS, SCATTERS
from gopt.operators.operator import Indices

_DEPTH = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a value along the axis of a queue."""

    value: str
    start: int
    stop: int


def gathered_rows(
    context: CouplingContext, counts: SampleCounts, training: TrainingGraph, state: State
) -> StatisticReduction:
    """How ranks gather the rows of a statistic. Raises Unclear where the structure does not tell."""
    try:
        return _Rows(context, counts, training, state).reduction()
    except Untraceable as lost:
        raise Unclear(str(lost), ROWS) from None


class _Rows:
    def __init__(self, context: CouplingContext, counts: SampleCounts, training: TrainingGraph, state: State) -> None:
        self.context, self.counts, self.training, self.state = context, counts, training, state
        self.producers, self.marks = context.index.producers, context.marks

    def reduction(self) -> StatisticReduction:
        name = self.state.updated
        for _ in range(_DEPTH):
            node = self.producers.get(name)
            if node is None or name not in self.marks:
                break
            if self.context.samples(name) is not None:
                raise Unclear(f"{name!r} holds the rows of a batch alone, and all ranks have more of them", ROWS)
            if node.is_in(SCATTERS):
                return StatisticReduction(self.state.tensor, "gather", self._scattered(node))
            if node.is_in(PARTS | {"Concat"}):
                return self._queue(name, self._axis(node))
            name = self._before(node)
        raise Unclear(f"no rows of samples are joined with rows of {self.state.tensor!r} or written into it", ROWS)

    def _before(self, node: Node) -> str:
        """The one operand that follows the batch, of a node that does the same to all rows."""
        follows = [each for each in dict.fromkeys(node.reads) if each in self.marks]
        other = [each for each in node.reads if each not in self.marks and self.context.constant(each) is not None]
        plain = node.is_in(LAYOUT) or (
            elementwise(node) and all(self.context.index.one_element(each) for each in other)
        )
        sized = any(self.counts.written_out(node, each) for each in other)
        if len(follows) != 1 or not plain or sized:
            raise Unclear(f"the rows cannot be followed past {node.op_type} {node.label!r}", ROWS)
        return follows[0]

    # --- queues ---

    def _axis(self, node: Node) -> int:
        rank = self.context.rank(node.inputs[0])
        if not node.is_a("Slice"):
            return axis_of(node, rank, 0)
        cut = [axis for axis in range(rank)
               if self.context.shape(node.inputs[0])[axis] != self.context.shape(node.outputs[0])[axis]]  # fmt: skip
        return cut[0] if len(cut) == 1 else -1

    def _queue(self, name: str, axis: int) -> StatisticReduction:
        parts = self._parts(name, axis, _DEPTH) if axis >= 0 else []
        merged: list[_Part] = []
        for part in parts:
            last = merged[-1] if merged else None
            if last is not None and (last.value, last.stop) == (part.value, part.start):
                merged[-1] = _Part(part.value, last.start, part.stop)
            else:
                merged.append(part)
        old = [part for part in merged if part.value not in self.marks]
        fresh = [part for part in merged if part.value in self.marks]
        rows, made = sum(part.stop - part.start for part in fresh), sum(part.stop - part.start for part in merged)
        front, back = merged[-1:] == old, merged[:1] == old
        if len(old) != 1 or not fresh or front == back or self._size(old[0].value, axis) != made:
            raise Unclear(
                f"{name!r} is no queue: new rows beside a part of the old ones, of as many rows as it had", ROWS
            )
        if (old[0].start, old[0].stop) != ((0, made - rows) if front else (rows, made)):
            raise Unclear(f"{name!r} does not drop the oldest rows", ROWS)
        self._refuse_other(old[0].value)
        points = tuple(self._point(part, axis) for part in fresh)
        return StatisticReduction(
            self.state.tensor, "gather", points, RowQueue(name, old[0].value, axis, front)
        )  # fmt: skip

    def _point(self, part: _Part, axis: int) -> StatisticPoint:
        if (part.start, part.stop) != (0, self._size(part.value, axis)):
            raise Unclear(f"a part of the samples' rows {part.value!r} is joined alone", ROWS)
        return StatisticPoint(part.value, "gather", self._checked(part.value, axis))

    def _refuse_other(self, name: str) -> None:
        """Raise Unclear for what is not made of the old rows alone."""
        behind, values = self.counts.of(name), ancestors(self.context.index, [name])[1]
        sized = bool(behind.counts or behind.term or behind.factor or behind.lost)
        rates = (1 - self.context.scalar(each) for each in values)  # 1 - 1/n keeps what n samples leave
        sized = sized or any(may_count(rate, self.context.batch, self.counts.sizes()) for rate in rates)
        if name in self.marks or sized or self.state.tensor not in values:
            raise Unclear(f"{name!r}, beside which samples are written, is not made of the old rows alone", ROWS)

    def _size(self, name: str, axis: int) -> int:
        size = self.context.shape(name)[axis]
        if not isinstance(size, int):
            raise Unclear(f"the number of rows of {name!r} is not known", ROWS)
        return size

    def _parts(self, name: str, axis: int, depth: int) -> list[_Part]:
        """The rows joined into a value, in order."""
        node = self.producers.get(name)
        whole = [_Part(name, 0, self._size(name, axis))]
        if node is None or not depth:
            return whole
        if node.is_in(COPIES):
            return self._parts(node.inputs[0], axis, depth - 1)
        if record_of(node).joins and self._axis(node) == axis:
            return [part for each in node.inputs for part in self._parts(each, axis, depth - 1)]
        if node.is_in(PARTS) and self._axis(node) == axis:
            start = self._start(node, name, axis)
            return _cut(self._parts(node.inputs[0], axis, depth - 1), start, start + whole[0].stop)
        return whole

    def _start(self, node: Node, name: str, axis: int) -> int:
        """The first of the rows that a Slice or Split takes."""
        if node.is_a("Split"):
            before = node.outputs[: node.outputs.index(name)]
            return sum(self._size(each, axis) for each in before)
        size, rank = self._size(node.inputs[0], axis), self.context.rank(name)
        starts, steps = self.context.ints(node.inputs[1]), [1]
        axes = self.context.axes(node, rank, 3) if len(node.inputs) > 3 else None
        given = self.context.ints(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
        if len(node.inputs) > 4 and node.inputs[4]:
            steps = self.context.ints(node.inputs[4]) or [0]
        if starts is None or any(step != 1 for step in steps) or (axes is not None and given is None):
            raise Unclear(f"{name!r} is sliced at places that are computed", ROWS)
        place = [each % rank for each in given].index(axis) if given is not None else axis
        start = starts[place]
        return min(max(start + size if start < 0 else start, 0), size)

    def _checked(self, name: str, axis: int) -> int:
        """The axis of rows, each sample's beside one another."""
        mark = self.context.samples(name)
        if mark is None or mark.axis != axis or mark.outer != 1:
            raise Unclear(f"the rows of {name!r} do not lie along dimension {axis} sample by sample", ROWS)
        return axis

    # --- rings and tables ---

    def _scattered(self, node: Node) -> tuple[StatisticPoint, ...]:
        data, indices, updates = node.inputs
        self._refuse_other(data)
        mark = self.context.samples(updates)
        if mark is None or mark.outer != 1:
            raise Unclear(f"{updates!r}, which {node.op_type} {node.label!r} writes, holds no rows of samples", ROWS)
        elements = record_of(node).indices is Indices.ELEMENT
        axis = axis_of(node, self.context.rank(data), 0) if elements else mark.axis
        if mark.axis != axis or (not elements and axis >= self.context.rank(indices) - 1):
            raise Unclear(f"{node.op_type} {node.label!r} writes samples along another dimension", ROWS)
        rows = StatisticPoint(updates, "gather", axis)
        if indices in self.marks:
            by: Mark | None = self.context.samples(indices)
            if by is None or (by.axis, by.outer, by.inner) != (axis, 1, mark.inner):
                raise Unclear(f"the places {indices!r} of rows are not places of single samples", ROWS)
            return (StatisticPoint(indices, "gather", axis), rows)
        return (self._ring(node, axis, 0 if not elements else axis), rows)

    def _ring(self, node: Node, axis: int, along: int) -> StatisticPoint:
        """The places of a ring; ``along``: the dimension of the old rows that they count."""
        data, indices = node.inputs[:2]
        size, count = self._size(data, along), self._size(indices, axis)
        found = places(self.context.index, indices)
        pointer = pointer_of(self.context.index, self.training, found.pointer) if found is not None else None
        if found is None or pointer is None:
            raise Unclear(
                f"the places {indices!r} are not counted from a pointer that moves by the rows of a step", ROWS
            )
        shape = [count if place == axis else 1 for place in range(found.offsets.ndim)]
        start = found.offsets.reshape(-1)[:1]
        whole = record_of(node).indices is Indices.TUPLE and self.context.shape(indices)[-1] != 1
        if whole or not bool((found.offsets == start + np.arange(count).reshape(shape)).all()):
            raise Unclear(f"the places {indices!r} are not one behind the other", ROWS)
        if pointer.rows != count:
            raise Unclear(f"{pointer.tensor!r} moves by {pointer.rows}, and {count} rows are written", ROWS)
        if {found.modulus, pointer.modulus} - {0, size} or not (found.modulus or pointer.modulus):
            raise Unclear(f"the places {indices!r} do not go round the {size} rows of {self.state.tensor!r}", ROWS)
        return StatisticPoint(indices, "gather", axis, Ring(pointer.tensor, count, size, found.wrapped))


def _cut(parts: list[_Part], start: int, stop: int) -> list[_Part]:
    """The rows ``start`` to ``stop`` of joined parts."""
    found, at = [], 0
    for part in parts:
        length = part.stop - part.start
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            found.append(_Part(part.value, part.start + low, part.start + high))
        at += length
    return found
