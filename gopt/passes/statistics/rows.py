"""Rows of statistics gathered by ranks: the call, the queue for the rows, the places of a ring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gopt.analysis.open_shapes import fix_sizes
from gopt.analysis.statistic_points import Ring, RowQueue
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Node
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType, numpy_dtype
from gopt.spmd.program import SpmdProgram


class RowCalls:
    """Emits one statistic's nodes on the rows of all ranks, in the order of the group."""

    def __init__(self, program: SpmdProgram, group: str, rewriter: GraphRewriter, tensor: str) -> None:
        self.program, self.group, self.rewriter, self.tensor = program, group, rewriter, tensor
        self.ranks, self.types = program.mesh.size(group), program.graph.types

    def rows(self, value: str, name: str, axis: int, after: Node | None) -> None:
        """One call to join the ranks' rows."""
        self._whole(value)
        attributes = {"group": self.group, "axis": axis, "sizes": [self.types[value].dims[axis]] * self.ranks}
        self.rewriter.add("AllGather", [value], {name: self._wide(value, axis)}, domain=COMM, attributes=attributes,
                          after=after)  # fmt: skip

    def queue(self, queue: RowQueue, rows: Sequence[str], prefix: str) -> str:
        """The gathered rows, and as many old rows as fit."""
        for name in (queue.value, queue.old):
            self._whole(name)
        type, axis = self.types[queue.old], queue.axis
        fresh = sum(self.types[name].dims[axis] for name in rows)
        room = type.dims[axis] - fresh
        if room < 0:
            raise self._short(type.dims[axis], fresh)
        start = 0 if queue.front else fresh
        ends = [self.rewriter.constant(f"{prefix}.{word}", np.array([number])) for word, number in
                (("start", start), ("stop", start + room), ("axis", axis))]  # fmt: skip
        old, joined = f"{prefix}.old", f"{prefix}.joined"
        self.rewriter.add("Slice", [queue.old, *ends], {old: _sized(type, axis, room)})
        order = [*rows, old] if queue.front else [old, *rows]
        self.rewriter.add("Concat", order, {joined: type}, attributes={"axis": axis})
        return joined

    def places(self, value: str, name: str, axis: int, ring: Ring) -> None:
        """The places of all ranks' rows: each rank's are a step behind the rank before."""
        self._whole(value)
        fresh = ring.step * self.ranks
        if fresh > ring.rows:
            raise self._short(ring.rows, fresh)
        if not ring.wraps:
            self._refuse_uneven(ring, fresh)
        type, wide = self.types[value], self._wide(value, axis)
        dims = type.dims
        apart = (*dims[:axis], self.ranks, *dims[axis:])
        shape = [self.ranks if position == axis else 1 for position in range(len(apart))]
        steps = (np.arange(self.ranks) * ring.step).reshape(shape).astype(numpy_dtype(type.dtype))
        one = self.rewriter.constant(f"{name}.one", np.array([*dims[:axis], 1, *dims[axis:]]))
        row, moved, all_ = f"{name}.alone", f"{name}.moved", f"{name}.all" if ring.wraps else name
        self.rewriter.add("Reshape", [value, one], {row: TensorType(type.dtype, (*dims[:axis], 1, *dims[axis:]))})
        by = self.rewriter.constant(f"{name}.steps", steps)
        self.rewriter.add("Add", [row, by], {moved: TensorType(type.dtype, apart)})
        whole = self.rewriter.constant(f"{name}.shape", np.array(wide.dims))
        self.rewriter.add("Reshape", [moved, whole], {all_: wide})
        if ring.wraps:
            rows = self.rewriter.constant(f"{name}.rows", np.array(ring.rows, numpy_dtype(type.dtype)))
            self.rewriter.add("Mod", [all_, rows], {name: wide})

    def _wide(self, value: str, axis: int) -> TensorType:
        return _sized(self.types[value], axis, self.types[value].dims[axis] * self.ranks)

    def _whole(self, value: str) -> None:
        """Raise UnsupportedError for a value split over ranks of this mesh, or of open size."""
        if not self.types[value].static:
            raise UnsupportedError(
                f"--statistics {self.tensor}=gather: the number of rows {value!r} has is open, and ranks gather as "
                "many as the file says",
                fix_sizes(self.program.source.graph.inputs),
            )
        source = self.program.source.graph.types.get(value)
        if source is not None and self.types.get(value) != source:
            raise UnsupportedError(
                f"--statistics {self.tensor}=gather: this mesh splits {value!r}, and gopt gathers whole rows",
                "leave out the axes that split the computation",
            )

    def _short(self, rows: int, fresh: int) -> UnsupportedError:
        return UnsupportedError(
            f"--statistics {self.tensor}=gather: {self.ranks} ranks bring {fresh} rows in a step, and {self.tensor!r} "
            f"has {rows}",
            "take fewer ranks, smaller batches or more rows",
        )

    def _refuse_uneven(self, ring: Ring, fresh: int) -> None:
        """Raise UnsupportedError where the rows of a step would lie across the end of a ring."""
        stored = self.program.source.graph.initializers.get(ring.pointer)
        begin = int(stored.numpy().reshape(-1)[0]) if stored is not None else 0
        for number, what in ((ring.rows, f"{self.tensor!r} has {ring.rows}"), (begin, f"{ring.pointer!r} is {begin}")):
            if number % fresh:
                raise UnsupportedError(
                    f"--statistics {self.tensor}=gather: {self.ranks} ranks bring {fresh} rows in a step, and {what}, "
                    f"no multiple of them: some would lie across the end, where the step does not go on at the start",
                    "take another number of ranks, or write each place modulo the rows",
                )


def _sized(type: TensorType, axis: int, size: int) -> TensorType:
    return TensorType(type.dtype, (*type.dims[:axis], size, *type.dims[axis + 1 :]))
