"""Staging memory of one call: sent and received data, in the layout of NCCL.

NCCL does not reduce bool and 16-bit integers, loses a NaN in a maximum, and scatters and gathers equal parts only. This
module converts types, marks NaNs and pads, on the communication stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np

from gopt.collectives.layout import ALIGN as SHARD
from gopt.collectives.layout import HALVES, resized
from gopt.ir.graph import Node
from gopt.runtime.engines.cuda import DeviceBlock, Dtype
from gopt.runtime.engines.gpu import ALIGN, Gpu
from gopt.runtime.engines.kernels import Kernels

BYTE = np.dtype(np.uint8)
_FLOAT: Dtype = np.dtype(np.float32)
_WIDE: dict[str, Dtype] = {"int16": np.dtype(np.int32), "uint16": np.dtype(np.uint32), "bool": BYTE}


@dataclass(frozen=True, slots=True)
class ReductionOp:
    """How elements of a type are combined: cast to ``wide``, by an operator of NCCL."""

    dtype: Dtype
    wide: Dtype
    operator: str
    extreme: bool
    """Whether it is a maximum or minimum of floats, in which NaN is to win."""

    @classmethod
    def of(cls, node: Node, dtype: Dtype) -> ReductionOp:
        how = node.attributes.get("reduce", "sum")
        half = dtype.name in HALVES
        wide = _FLOAT if half else _WIDE.get(dtype.name, dtype)
        operator = {"sum": "SUM", "mean": "AVG", "max": "MAX", "min": "MIN"}[how]
        return cls(dtype, wide, operator, how in ("max", "min") and (half or dtype.kind == "f"))

    @property
    def casts(self) -> bool:
        """Whether elements must be cast by a kernel. The bytes of a bool are 0 and 1 and need no cast."""
        return self.wide.itemsize != self.dtype.itemsize


@dataclass(slots=True)
class Staging:
    """Memory of one call. ``held``: blocks in use by the stream, not to be reused before the stream is done."""

    gpu: Gpu
    kernels: Kernels
    held: list[DeviceBlock] = field(default_factory=list)

    def empty(self, shape: Sequence[int] | int, dtype: Dtype, beyond: int = 0) -> DeviceBlock:
        block = self.gpu.empty((shape,) if isinstance(shape, int) else shape, dtype, beyond)
        self.held.append(block)
        return block

    def copy(self, target: DeviceBlock, source: DeviceBlock) -> None:
        self.gpu.copy(target, source, self.gpu.comm_stream)

    # --- reductions ---

    def upcast(self, block: DeviceBlock, how: ReductionOp) -> DeviceBlock:
        """A flat block in the type of the combination; may be the block itself."""
        if not how.casts:
            return block.bits() if how.wide != how.dtype else block.part(0, (block.size,))
        wide = self.empty(block.size, how.wide)
        self._cast(block, wide)
        return wide

    def marks(self, block: DeviceBlock, how: ReductionOp, buffer: int = 0) -> DeviceBlock:
        """1 where an input of a maximum or minimum is NaN, with memory for ``room`` elements; an empty block for
        other reductions."""
        size = block.size if how.extreme else 0
        marks = self.empty(size, BYTE, beyond=max(buffer - size, 0))
        self.kernels.mark_nan(self._aligned(block.part(0, (size,))), marks)
        return marks

    def downcast(self, total: DeviceBlock, marks: DeviceBlock, how: ReductionOp) -> DeviceBlock:
        """A flat result in the type of the call, with NaN where an input was NaN."""
        if how.extreme:
            mended = self.empty(total.size, total.dtype)
            self.kernels.put_nan(total, marks, mended)
            total = mended
        if not how.casts:
            return DeviceBlock(total.memory, total.offset, how.dtype, total.shape)
        narrow = self.empty(total.size, how.dtype)
        self.kernels.cast(total, narrow)
        return narrow

    def _cast(self, source: DeviceBlock, target: DeviceBlock) -> None:
        """Cast any block into a flat block. Kernels get only blocks at aligned addresses."""
        source = self._aligned(source.part(0, (source.size,)))
        aligned = target if target.offset % ALIGN == 0 else self.empty(target.shape, target.dtype)
        self.kernels.cast(source, aligned)
        if aligned is not target:
            self.copy(target, aligned)

    def _aligned(self, block: DeviceBlock) -> DeviceBlock:
        """The block, or a copy for an unaligned address."""
        if block.offset % ALIGN == 0:
            return block
        copy = self.empty(block.shape, block.dtype)
        self.copy(copy, block)
        return copy

    # --- layout ---

    def packed(self, blocks: Sequence[DeviceBlock], how: ReductionOp, buffer: int) -> DeviceBlock:
        """The blocks as one flat block in the type of the reduction, with memory for ``room`` elements: a view of
        adjacent blocks, else a copy."""
        size, head = sum(block.size for block in blocks), blocks[0]
        follows = all(
            before.memory is after.memory and before.end == after.offset for before, after in pairwise(blocks)
        )
        fits = head.offset + buffer * head.dtype.itemsize <= head.memory.nbytes
        if follows and fits and how.wide == how.dtype:
            return head.part(0, (size,))
        flat = self.empty(size, how.wide, beyond=max(buffer - size, 0))
        start = 0
        for block in blocks:
            part = flat.part(start, (block.size,))
            if how.casts:
                self._cast(block, part)
            else:
                self.copy(part, block)
            start += block.size
        return flat

    def unpacked(self, flat: DeviceBlock, shapes: Sequence[tuple[int, ...]]) -> list[DeviceBlock]:
        """The adjacent tensors of a flat block. Tensors at unaligned addresses are copied, because sessions read
        them."""
        return [self._aligned(part) for part in contiguous_views(flat, shapes)]

    def sliced(self, block: DeviceBlock, axis: int, sizes: Sequence[int]) -> list[DeviceBlock]:
        """Slices of an axis, each contiguous: views or copies."""
        rows, row = math.prod(block.shape[:axis]), math.prod(block.shape[axis + 1 :])
        parts = []
        for start, size in zip(accumulate((size * row for size in sizes), initial=0), sizes):
            part = block.part(start, resized(block.shape, axis, size))
            if rows > 1:
                copy = self.empty(part.shape, block.dtype)
                self._rows(copy, size * row, part, block.shape[axis] * row, size * row, rows)
                part = copy
            parts.append(part)
        return parts

    def joined(self, pieces: Sequence[DeviceBlock], axis: int) -> DeviceBlock:
        """Join adjacent slices along an axis."""
        head = pieces[0]
        length = sum(piece.shape[axis] for piece in pieces)
        rows, row = math.prod(head.shape[:axis]), math.prod(head.shape[axis + 1 :])
        if rows == 1:
            return head.part(0, resized(head.shape, axis, length))
        whole = self.empty(resized(head.shape, axis, length), head.dtype)
        start = 0
        for piece in pieces:
            width = piece.shape[axis] * row
            self._rows(whole.part(start, piece.shape), length * row, piece, width, width, rows)
            start += width
        return whole

    def _rows(self, target: DeviceBlock, step: int, source: DeviceBlock, stride: int, width: int, rows: int) -> None:
        """Copy rows of ``width`` elements, every ``stride`` elements in ``source`` and every ``step`` in ``target``."""
        item = source.dtype.itemsize
        self.gpu.copy_rows(target, step * item, source, stride * item, width * item, rows, self.gpu.comm_stream)


def contiguous_views(flat: DeviceBlock, shapes: Sequence[tuple[int, ...]]) -> list[DeviceBlock]:
    """Views of a flat block as adjacent tensors of these shapes."""
    starts = accumulate(map(math.prod, shapes), initial=0)
    return [flat.part(start, shape) for start, shape in zip(starts, shapes)]


def equal_parts(counts: Sequence[int]) -> int:
    """The elements of a part where all parts but the last have one size and little padding makes all equal; else 0."""
    part, total = counts[0], sum(counts)
    alike = all(count == max(min(part, total - index * part), 0) for index, count in enumerate(counts))
    return part if alike and part * len(counts) - total <= SHARD * len(counts) else 0
